"""Imports a table of InferenceX (CSV): a run for each of its set-ups, a level for each line.

`analysis.fit.measured_tables` says what a line means: its set-up, and by the benchmark's scripts
its requests and the lengths that they are drawn from. The statistics are those of the table.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.measured_tables import INFERENCEX, TableRow, read_table
from lmi_bench.analysis.model.measured_level import MeasuredLevel, cell_to_json
from lmi_bench.core.durable import read_text, table_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import Imported, number_of
from lmi_bench.interchange.imports.read import joined, read_results
from lmi_bench.interchange.imports.tools import read_summary


def read_runs(path: Path, load: Load | None = None) -> dict[str, Imported]:
    """The runs of a file of another tool by their names: one without a name, or those of a table.

    load  as `read_results` takes it; a table states its own
    Raises InputError as `read_results` does, and for a table without a line that can be used.
    """
    if path.suffix.lower() != ".csv":
        return {"": read_results(path, load)}
    rows, lines = read_table(path), table_rows(read_text(path), path)
    if load is not None or not all(name in lines[0] for name in INFERENCEX):
        why = "is no table of InferenceX" if load is None else "states its loads: leave --concurrency and --rate out"
        raise InputError(f"{path} {why}")
    setups: dict[str, list[Imported]] = {}
    for row in rows:
        if row.cell is not None:
            name, part = _level(row, row.cell, lines[row.number])
            setups.setdefault(name, []).append(part)
    bad = [f"line {row.number + 2}: {row.problem}" for row in rows if row.cell is None]
    if not setups:
        raise InputError(f"{path}: no line can be used; {bad[0]}")
    notes = [f"{len(bad)} of {len(rows)} lines are left out; {bad[0]}"] if bad else []
    return {name: replace(joined(parts), notes=(*parts[0].notes, *notes)) for name, parts in setups.items()}


def _level(row: TableRow, cell: MeasuredLevel, line: Mapping[str, Any]) -> tuple[str, Imported]:
    """The name of a line's set-up, and its level with what is known of the set-up."""
    setup, pools = cell.setup, cell.prefill
    drafts = f"MTP {setup.speculation.draft_tokens}" if setup.speculation else ""
    split = f"{pools.workers}P{pools.setup.devices} {cell.replicas}D{setup.devices} pools" if pools else ""
    layout = ", ".join(filter(None, (setup.parallelism.label, drafts, split)))
    per_gpu, devices = number_of(line, "tokens_per_s_per_gpu"), None if pools else setup.devices
    content = {**line, "cell": cell_to_json(cell), "engine": row.engine, "layout": layout, "devices": devices}
    content |= {"_unit": {"e2e": "s"}, "tput": per_gpu and devices and per_gpu * devices}
    means, spread = {"input": cell.input_tokens, "output": cell.output_tokens}, cell.length_spread
    lengths = {f"{side}_lengths": f"uniform({n - n * spread:.0f},{n + n * spread:.0f})" for side, n in means.items()}
    part = replace(read_summary("inferencex-table", content, None), tool="inferencex", workload=lengths)
    words = [line["model"], *(line[key] for key in INFERENCEX[:3]), f"tp{setup.tensor_parallel}", layout]
    words += [line["input_tokens"], line["output_tokens"], (line.get("image") or "").rpartition("/")[2]]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-."), part
