"""Writes imported levels as a run folder, which every other command reads like our own."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.manifest import Manifest, RunScenario, TargetFacts
from lmi_bench.core.run_store import RunStore
from lmi_bench.interchange.imports.level import Imported


def write_imported(parts: Sequence[Imported], folder: Path, *, command: Sequence[str]) -> int:
    """Write the levels of several files of one tool as one run; returns how many.

    Raises InputError where the files are of several tools, or the folder exists.
    """
    tools = sorted({part.tool for part in parts})
    if len(tools) > 1:
        raise InputError(
            f"files of {' and '.join(tools)} are not one run: import those of each tool separately"
        )
    first = parts[0]
    facts = {key: value for key, value in first.facts.items() if value not in (None, [])}
    workload = first.workload if all(p.workload == first.workload for p in parts) else {}
    scenario: dict[str, Any] = {"name": "", "model": facts.get("model", ""), "target": tools[0]}
    if workload:
        scenario["workload"] = workload
    digest = hashlib.sha256(json.dumps(scenario, sort_keys=True).encode()).hexdigest()
    manifest = Manifest(
        scenario=RunScenario.from_json(scenario, "the files"),
        scenario_hash=digest,
        target=TargetFacts.from_json({"kind": "imported", "tool": tools[0], **facts}, "the files"),
        commands=[list(command)],
        imported_from=tools[0],
        notes=sorted({note for part in parts for note in part.notes}),
    )
    levels = [level for part in parts for level in part.levels]
    if not levels:
        raise InputError("the files hold no level")
    with RunStore.create(folder, manifest) as store:
        for index, level in enumerate(levels):
            store.append_level(level.records, replace(level.level, index=index))
    return len(levels)
