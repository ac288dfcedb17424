"""Writes JSON Schemas of the scenario file and of the files of a run, from their declarations.

The scenario's is for editors, which then complete and check a file as it is typed; the others are
for programs that read what lmi-bench wrote. `lmi_bench/core/data/schemas/` is where they are. An
`$id` ends with the version that the file states, or for a file without one the run's.

    python benchmarks/schemas.py            write them
    python benchmarks/schemas.py --check    fail if one is not what the program declares
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lmi_bench.analysis.fleet.answer import SCHEMA_VERSION as ANSWER_SCHEMA  # noqa: E402
from lmi_bench.analysis.fleet.answer import Question, Recommendation  # noqa: E402
from lmi_bench.analysis.model.profiles import PROFILE_SCHEMA, EngineProfile  # noqa: E402
from lmi_bench.core import records  # noqa: E402
from lmi_bench.core.findings import Knee, SloAnswer  # noqa: E402
from lmi_bench.core.json_value import JsonValue, Slot  # noqa: E402
from lmi_bench.core.level import Level  # noqa: E402
from lmi_bench.core.manifest import SCHEMA_VERSION, Manifest  # noqa: E402
from lmi_bench.core.option import _texts  # noqa: E402
from lmi_bench.core.scenario import Scenario  # noqa: E402
from lmi_bench.core.scenario_sections import Section  # noqa: E402
from lmi_bench.core.server_metrics import CloudWatch  # noqa: E402
from lmi_bench.jobs.matrix import Cell  # noqa: E402

FOLDER = ROOT / "lmi_bench" / "core" / "data" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
ALSO = {
    "Scenario": {"timeout_s": {"const": "none"}, "slo": TEXT},
    "WorkloadSection": {"turns": NUMBER, "think_s": NUMBER},
    "LoadSection": {"concurrency": {"type": "integer"}, "rate_per_s": NUMBER, "speed": NUMBER},
}
"""What a file may say for a field although the field's type is another: one value for a list."""
TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: NUMBER,
    str: TEXT,
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
}

Schema = dict[str, Any]


def scenario_schema() -> Schema:
    """The scenario file's: pydantic's own, with the help of each option as its description."""
    schema = Scenario.model_json_schema()
    sections: dict[str, type[Section]] = {each.__name__: each for each in all_below(Section)}
    for name, part in (("Scenario", schema), *schema["$defs"].items()):
        texts: dict[str, str] = {}
        for group in reversed(sections[name].__mro__):
            texts |= _texts(group)
        for field, found in part.get("properties", {}).items():
            found.pop("title", None)
            if field in texts:
                found["description"] = texts[field]
            if field in ALSO.get(name, {}):
                kinds = found.pop("anyOf", None) or [{"type": found.pop("type")} | moved(found)]
                found["anyOf"] = [*kinds, ALSO[name][field]]
        part.pop("description", None)
    return {**schema, "title": "A scenario of lmi-bench"}


def moved(found: Schema) -> Schema:
    """The keywords of a schema that belong to its type, taken out of it."""
    names = ("items", "minItems", "prefixItems", "exclusiveMinimum", "minimum", "minLength")
    return {name: found.pop(name) for name in names if name in found}


def all_below(kind: type[Any]) -> list[type[Any]]:
    return [kind, *(each for below in kind.__subclasses__() for each in all_below(below))]


class Shared:
    """Schemas of classes, each written once under `$defs`."""

    def __init__(self) -> None:
        self.defs: dict[str, Schema] = {}

    def of_value(self, kind: type[JsonValue]) -> Schema:
        """A reference to the schema of a JSON value's class."""
        if kind.__name__ not in self.defs:
            self.defs[kind.__name__] = {}  # it may contain itself
            self.defs[kind.__name__] = self.of_slots(kind)
        return {"$ref": f"#/$defs/{kind.__name__}"}

    def of_slots(self, *kinds: type[JsonValue]) -> Schema:
        """The object with the keys of these classes."""
        properties, required = {}, []
        for kind in kinds:
            texts = _texts(kind)
            for key, slot in kind.slots().items():
                described = {"description": texts[slot.name]} if slot.name in texts else {}
                properties[key] = self.of_slot(slot) | described
                if slot.required:
                    required.append(key)
        schema: Schema = {"type": "object", "properties": properties}
        return schema | ({"required": required} if required else {})

    def of_slot(self, slot: Slot) -> Schema:
        inner = None if slot.of is None else self.of_value(slot.of)
        found = []
        if Any in slot.accepts:
            return {}
        for kind in slot.accepts:
            if kind in (list, tuple):
                found.append({"type": "array"} | ({"items": inner} if inner else {}))
            elif kind is dict:
                found.append(inner if inner and not slot.is_tuple else {"type": "object"})
            elif not (kind is int and float in slot.accepts):
                found.append(TYPES.get(kind, {}))
        return alternatives(found)

    def of_annotation(self, kind: Any) -> Schema:
        """The schema of a type, dataclasses and enumerations included."""
        origin, parts = get_origin(kind) or kind, get_args(kind)
        if origin in (Union, types.UnionType):
            return alternatives([self.of_annotation(each) for each in parts])
        if origin is Literal:
            return {"enum": list(parts)}
        if origin in TYPES:
            return dict(TYPES[origin])
        if isinstance(origin, type) and issubclass(origin, enum.Enum):
            return {"enum": [each.value for each in origin]}
        if dataclasses.is_dataclass(origin):
            return self.of_dataclass(origin)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            of = self.of_annotation(parts[1]) if parts else {}
            return {"type": "object", "additionalProperties": of}
        if isinstance(origin, type) and issubclass(origin, Sequence | frozenset):
            return {"type": "array", "items": self.of_annotation(parts[0]) if parts else {}}
        return {}

    def of_dataclass(self, kind: Any) -> Schema:
        if kind.__name__ not in self.defs:
            self.defs[kind.__name__] = {}
            hints, texts = get_type_hints(kind), _texts(kind)
            self.defs[kind.__name__] = {
                "type": "object",
                "properties": {
                    each.name: self.of_annotation(hints[each.name])
                    | ({"description": texts[each.name]} if each.name in texts else {})
                    for each in dataclasses.fields(kind)
                },
            }
        return {"$ref": f"#/$defs/{kind.__name__}"}


def alternatives(found: list[Schema]) -> Schema:
    """One of several, in an order that no hash decides."""
    unique = sorted({json.dumps(each, sort_keys=True): each for each in found}.items())
    kinds = [each for _, each in unique]
    if len(kinds) > 1 and all(set(each) == {"type"} for each in kinds):
        return {"type": [each["type"] for each in kinds]}
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def whole(title: str, schema: Schema, shared: Shared) -> Schema:
    defs = {"$defs": dict(sorted(shared.defs.items()))} if shared.defs else {}
    return {"title": title, **schema, **defs}


def list_schema(title: str, kind: type[JsonValue]) -> Schema:
    shared = Shared()
    return whole(title, {"type": "array", "items": shared.of_slots(kind)}, shared)


def manifest_schema() -> Schema:
    shared = Shared()
    schema = shared.of_slots(Manifest)
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return whole("manifest.json of a run", schema, shared)


def level_schema() -> Schema:
    shared = Shared()
    return whole("A line of a run's levels.jsonl", shared.of_slots(Level), shared)


def request_schema() -> Schema:
    shared, accepted = Shared(), records._ACCEPTED
    properties = {"level": TYPES[int], "attempt": TYPES[int]}
    for key in (*sorted(records._NEEDED), *sorted(accepted)):
        if key not in ("exchange", "text"):
            slot = Slot(key, accepted[key], None)
            properties[key] = shared.of_slot(slot)
    required = ["level", "attempt", *sorted(records._NEEDED)]
    schema = {"type": "object", "properties": properties, "required": required}
    return whole("A line of a run's requests.jsonl", schema, shared)


def knees_schema() -> Schema:
    return list_schema("knees.json of a run", Knee)


def cloudwatch_schema() -> Schema:
    return list_schema("cloudwatch.json of a run", CloudWatch)


def slo_schema() -> Schema:
    shared = Shared()
    return whole("slo.json of a run", shared.of_slots(SloAnswer), shared)


def matrix_schema() -> Schema:
    keys = [*Cell("", "", Scenario()).to_json()]
    cell = dict.fromkeys(keys, TEXT) | {
        "state": {"enum": ["waiting", "unfinished", "finished", "failed"]},
        "error": {"type": ["null", "string"]},
    }
    properties = {
        "schema_version": {"const": SCHEMA_VERSION},
        "matrix": TEXT,
        "cells": {"type": "array", "items": {"type": "object", "properties": cell, "required": keys}},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return whole("matrix.json of a matrix of runs", schema, Shared())


def recommendation_schema() -> Schema:
    shared = Shared()
    schema = shared.of_slots(Question, Recommendation)
    properties = {"schema_version": {"const": ANSWER_SCHEMA}, **schema["properties"]}
    schema["properties"] = properties
    del properties["question"]
    schema["required"] = ["schema_version", *schema["required"]]
    schema["required"].remove("question")
    candidate, none = shared.defs["Candidate"], {"type": "object", "maxProperties": 0}
    for key in ("figures", "withheld"):  # each figure is a key of its own
        del candidate["properties"][key]
    candidate["required"].remove("figures")
    attainment = candidate["properties"]["attainment"]
    candidate["properties"]["attainment"] = {"anyOf": [*attainment["anyOf"], none]}
    measurement = shared.defs["Measurement"]
    del measurement["properties"]["layout"]
    measurement["properties"] |= {"instance": TEXT, "tensor_parallel": TYPES[int]}
    measurement["required"] = list(measurement["properties"])
    shared.defs["LevelAccuracy"] = {"type": "object"}  # its figures are keys of their own, too
    levels = {"type": "object", "properties": {"levels": properties["accuracy"]}}
    properties["accuracy"] = {"anyOf": [{"type": "null"}, levels]}
    return whole("A recommendation (recommend --json)", schema, shared)


def profile_schema() -> Schema:
    shared = Shared()
    shared.of_dataclass(EngineProfile)
    schema = shared.defs.pop("EngineProfile")
    properties = schema["properties"]
    properties |= {"levels": {"type": "array", "items": {"type": "object"}}, "fitted_cells": TEXT}
    schema["properties"] = {"schema": {"const": PROFILE_SCHEMA}, **properties}
    schema["required"] = ["schema", "name", "parameters", "log_sd", "kv_layout"]
    used = json.dumps(schema)
    while True:  # those that the levels alone need are left out
        kept = {name for name in shared.defs if f'"#/$defs/{name}"' in used}
        wider = used + json.dumps([shared.defs[name] for name in sorted(kept)])
        if {name for name in shared.defs if f'"#/$defs/{name}"' in wider} == kept:
            break
        used = wider
    shared.defs = {name: shared.defs[name] for name in kept}
    return whole("A profile (calibrate --out)", schema, shared)


SCHEMAS = {
    "scenario": scenario_schema,
    "manifest": manifest_schema,
    "level": level_schema,
    "request": request_schema,
    "knees": knees_schema,
    "slo": slo_schema,
    "cloudwatch": cloudwatch_schema,
    "matrix": matrix_schema,
    "recommendation": recommendation_schema,
    "profile": profile_schema,
}
VERSIONS = {"recommendation": ANSWER_SCHEMA, "profile": PROFILE_SCHEMA}


def text(name: str) -> str:
    """What has to be in the file of a schema."""
    version = VERSIONS.get(name, SCHEMA_VERSION)
    head = {"$schema": DIALECT, "$id": f"urn:lmi-bench:{name}:{version}"}
    return json.dumps(head | SCHEMAS[name](), indent=1) + "\n"


def texts() -> dict[Path, str]:
    """Each schema's file and what has to be in it."""
    return {FOLDER / f"{name}.schema.json": text(name) for name in SCHEMAS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Write nothing.")
    args = parser.parse_args()
    stale = [path for path, new in texts().items() if not args.check or not same(path, new)]
    if args.check and stale:
        sys.exit(f"not what the program declares: {', '.join(path.name for path in stale)}")
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts()[path], encoding="utf-8")


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
