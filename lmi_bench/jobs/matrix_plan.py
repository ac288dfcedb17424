"""A matrix of sweeps: every payload on every target, each cell a scenario of its own.

    targets:
      - {name: vllm, target: "http://gpu1:8000", instance: ml.g5.2xlarge}
      - sim:ml.g5.2xlarge
    payloads:
      - {name: chat, workload: {input_tokens: 256, output_tokens: 256}}
      - scenarios/code-15-500.yaml
    defaults: {load: {concurrency: [1, 4, 16]}, slo: ["ttft_p90<=1s"]}

An entry holds fields of a scenario; those of the target win over those of the payload, and these
over the defaults. A payload may be a scenario file, a target an address alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.scenario import load_scenario, parse_scenario

_OWN_OF_TARGETS = ("name", "instance", "price_per_hour", "api_key_env")


class _MatrixFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: Annotated[list[str | dict[str, Any]], Field(min_length=1)]
    payloads: Annotated[list[str | dict[str, Any]], Field(min_length=1)]
    defaults: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Combination:
    """One payload on one target.

    fields          of its scenario, as plain values
    instance, usd_per_hour  what the target runs on and costs, where the file says so
    api_key_env     environment variable that holds the target's key
    """

    target: str
    payload: str
    fields: dict[str, Any]
    instance: str | None = None
    usd_per_hour: float | None = None
    api_key_env: str | None = None

    @property
    def folder(self) -> str:
        """Name of the cell's run folder."""
        return f"{_slug(self.target)}--{_slug(self.payload)}"

    @property
    def title(self) -> str:
        """How people name the cell."""
        return f"{self.payload} on {self.target}"

    def api_key(self) -> str | None:
        """The target's key; raises InputError where its variable is not set."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise InputError(f"target {self.target}: the variable {self.api_key_env} is not set")
        return key


def read_matrix(path: Path) -> list[Combination]:
    """The cells of a matrix file, payload after payload on each target.

    Every cell's scenario is checked before anything runs. Raises InputError.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read the matrix {path}: {file_reason(exc)}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path}: not YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(content, dict):
        raise InputError(
            f"{path} is no matrix: write `targets` and `payloads`, lists, and if wanted `defaults`"
        )
    try:
        matrix = _MatrixFile.model_validate(content)
    except ValidationError as exc:
        places = "; ".join(
            f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}"
            for error in exc.errors()
        )
        raise InputError(
            f"{path}: {places}. A matrix has `targets` and `payloads`, lists, and if wanted "
            "`defaults`"
        ) from exc
    targets = [_target(entry) for entry in matrix.targets]
    payloads = [_payload(entry, path.parent) for entry in matrix.payloads]
    cells = [
        _cell(path, target, payload, matrix.defaults) for target in targets for payload in payloads
    ]
    folders = [cell.folder for cell in cells]
    for cell in cells:
        if folders.count(cell.folder) > 1:
            raise InputError(f"{path}: two cells are called {cell.title}: give them own names")
    return cells


def _target(entry: str | dict[str, Any]) -> dict[str, Any]:
    fields = {"target": entry} if isinstance(entry, str) else dict(entry)
    if "target" not in fields:
        raise InputError(f"matrix: the target {fields.get('name', fields)} has no `target`")
    fields.setdefault("name", redact_text(str(fields["target"])))  # folders are called by it
    return fields


def _payload(entry: str | dict[str, Any], base: Path) -> dict[str, Any]:
    if isinstance(entry, str):
        path = base / entry
        load_scenario(path)  # says what is wrong with it, if anything is
        stated = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        entry, base = {"name": path.stem, **stated}, path.parent
    if "name" not in entry:
        raise InputError(f"matrix: the payload {entry} has no `name`")
    fields = {name: value for name, value in entry.items() if name != "target"}
    workload = dict(fields.get("workload") or {})
    for name in ("dataset", "trace", "conversations"):
        if workload.get(name):
            workload[name] = str(base / workload[name])
    return {**fields, **({"workload": workload} if workload else {})}


def _cell(
    path: Path, target: dict[str, Any], payload: dict[str, Any], defaults: Mapping[str, Any]
) -> Combination:
    own = {name: target[name] for name in _OWN_OF_TARGETS if name in target}
    stated = {name: value for name, value in target.items() if name not in _OWN_OF_TARGETS}
    fields = _merged(_merged(defaults, payload), stated)
    fields["name"] = f"{payload['name']} on {own['name']}"
    parse_scenario(fields, source=f"{path}, {fields['name']}")
    return Combination(
        target=str(own["name"]),
        payload=str(payload["name"]),
        fields=fields,
        instance=own.get("instance"),
        usd_per_hour=own.get("price_per_hour"),
        api_key_env=own.get("api_key_env"),
    )


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping over the other, section by section."""
    merged = dict(below)
    for name, value in above.items():
        known = merged.get(name)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(known, value) if both else value  # type: ignore[arg-type]
    return merged


def _slug(text: str) -> str:
    """Text as the part of a folder's name; two hyphens stand between target and payload alone."""
    words = re.split(r"[^\w.]+", text)
    return "-".join(word for word in words if word).strip(".") or "cell"
