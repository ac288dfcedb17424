"""The time, machine, target and versions of a run, from its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmi_bench.core.units import bytes_to_gib
from lmi_bench.report.formats import number, plain
from lmi_bench.report.values import Facts

_PLACED = {"target", "commands", "scenario", "host", "versions"}
_FIRST = {
    "created_at": "Created",
    "schema_version": "Schema version",
    "scenario_hash": "Scenario hash",
}


def environment_facts(manifest: Mapping[str, Any]) -> tuple[Facts, ...]:
    """The facts about a run, in four groups."""
    commands = (
        command if isinstance(command, list | tuple) else [command]
        for command in manifest.get("commands") or []
    )
    run = [
        *((title, plain(manifest.get(key))) for key, title in _FIRST.items()),
        *(("Command", " ".join(map(str, command))) for command in commands),
        *_pairs({k: v for k, v in manifest.items() if k not in (*_PLACED, *_FIRST)}, _words),
    ]
    host = manifest.get("host")
    if isinstance(host, Mapping) and isinstance(size := host.get("memory_bytes"), int | float):
        shown = f"{number(bytes_to_gib(size))} GiB"
        host = {
            "memory" if key == "memory_bytes" else key: shown if key == "memory_bytes" else value
            for key, value in host.items()
        }
    return (
        Facts("Run", tuple(run)),
        Facts("Target", tuple(_pairs(manifest.get("target"), _words))),
        Facts("Host", tuple(_pairs(host, _words))),
        Facts("Versions", tuple(_pairs(manifest.get("versions"), str))),
    )


def _pairs(values: object, name: Callable[[str], str]) -> list[tuple[str, str]]:
    if isinstance(values, Mapping):
        return [(name(str(key)), plain(value)) for key, value in values.items()]
    return [] if values is None else [("", plain(values))]


def _words(key: str) -> str:
    text = key.replace("_", " ")
    return text[:1].upper() + text[1:]
