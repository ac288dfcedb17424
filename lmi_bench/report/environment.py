"""When, where and with what a run was made, from its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmi_bench.core.units import bytes_to_gib
from lmi_bench.report.formats import number, plain
from lmi_bench.report.values import Facts

_SHOWN = {
    "created_at",
    "schema_version",
    "scenario_hash",
    "target",
    "commands",
    "scenario",
    "host",
    "versions",
}


def environment_facts(manifest: Mapping[str, Any]) -> tuple[Facts, ...]:
    """When, where and with what the run was made."""
    run = [
        ("Created", plain(manifest.get("created_at"))),
        ("Schema version", plain(manifest.get("schema_version"))),
        ("Scenario hash", plain(manifest.get("scenario_hash"))),
    ]
    commands = manifest.get("commands") or []
    for command in commands:
        words = command if isinstance(command, list | tuple) else [command]
        run.append(("Command", " ".join(str(word) for word in words)))
    run += [(_words(key), plain(value)) for key, value in manifest.items() if key not in _SHOWN]
    return (
        Facts("Run", tuple(run)),
        Facts("Target", tuple(_words_pairs(manifest.get("target")))),
        Facts("Host", tuple(_host_facts(manifest.get("host")))),
        Facts("Versions", tuple(_pairs(manifest.get("versions")))),
    )


def _host_facts(host: object) -> list[tuple[str, str]]:
    if not isinstance(host, Mapping):
        return _pairs(host)
    return [
        ("Memory", f"{number(bytes_to_gib(value))} GiB")
        if key == "memory_bytes" and isinstance(value, int | float)
        else (_words(str(key)), plain(value))
        for key, value in host.items()
    ]


def _words_pairs(values: object) -> list[tuple[str, str]]:
    if isinstance(values, Mapping):
        return [(_words(str(key)), plain(value)) for key, value in values.items()]
    return _pairs(values)


def _pairs(values: object) -> list[tuple[str, str]]:
    if isinstance(values, Mapping):
        return [(str(key), plain(value)) for key, value in values.items()]
    return [] if values is None else [("", plain(values))]


def _words(key: str) -> str:
    text = key.replace("_", " ")
    return text[:1].upper() + text[1:]
