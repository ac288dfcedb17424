"""How right the planner is, and how fast: cross-validated errors, intervals, layouts, speed.

    LMI_BENCH_TABLES=FOLDER python benchmarks/planner_accuracy.py

Each split lets the tool choose calibration cells (seed 0 among all, others among a random 70 %; in
all, shared out over a table's engines) and judges it on the rest. Profiles that were fitted to the
models of a table are not its prior. A table's figures are to be covered by 70 to 90 % of the
intervals, at least 60 % in each slice. The two H100 tables may not ship; without LMI_BENCH_TABLES
their lines say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmi_bench.analysis.fit.fit import fit_cells
from lmi_bench.analysis.fit.measured_tables import TableRow, read_table
from lmi_bench.analysis.fit.uncertainty import Estimate, estimates
from lmi_bench.analysis.fit.validation import Judged, validate
from lmi_bench.analysis.level.layouts import CopyPlan, Layout, Workload, plan_copy
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, GRAPH_GPU_PRIOR, TGI_2023
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import all_model_entries, find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec

JUMPSTART = Path(__file__).parents[1] / "lmi_bench/catalog/data/published/jumpstart_concurrency.csv"
SPLITS = 5
TRANSFER_CELLS, TRANSFER_FORETOLD = 8, 20
LIGHT_LOAD = 0.7
Belongs = Callable[[Judged], bool]


@dataclass(frozen=True)
class Bar:
    """What is to be reached: figure, median and 90th percentile (None: no bar)."""

    figure: str
    median: float
    p90: float | None = None


SET_BARS = [Bar("throughput_tokens_per_s", 0.08), Bar("tpot_ms", 0.08)]


def judged_splits(rows: Sequence[TableRow], cells: int) -> list[Judged]:
    """The rows of all splits that were not calibrated on."""
    judged = []
    for seed in range(SPLITS):
        split, _ = validate(rows, calibrate_cells=cells, seed=seed)
        judged += [row for row in split if not row.calibrated]
    return judged


def line(name: str, rows: Sequence[Judged], figure: str, bar: Bar | None = None) -> str | None:
    pairs = [(row.figures.get(figure), row.measured(figure)) for row in rows]
    stated = [(said, measured) for said, measured in pairs if measured is not None]
    said = [(each, measured) for each, measured in stated if each is not None]
    if not said:
        return None
    errors = [abs(each.value / measured - 1) for each, measured in said]
    errors += [1.0] * (len(stated) - len(said))  # silence where an answer is due is a miss
    middle, high = np.quantile(errors, [0.5, 0.9])
    covered = np.mean([each.low <= measured <= each.high for each, measured in said])
    width = np.median([(each.high - each.low) / 2 / each.value for each, _ in said])
    target = "" if bar is None else f"{bar.median:.1%}"
    if bar is not None and bar.p90 is not None:
        target += f" / {bar.p90:.0%}"
    return (
        f"| {name} | {figure} | {len(stated)} | {len(stated) - len(said)} | {middle:.1%} / "
        f"{high:.1%} | {target} | {covered:.0%} | {width:.1%} |"
    )


def table(title: str, lines: Sequence[str | None]) -> None:
    print(f"\n## {title}\n")
    print("| slice | figure | cells | silent | median / p90 error | bar | covered | half-width |")
    print("|---|---|---|---|---|---|---|---|")
    for text in lines:
        if text is not None:
            print(text)


def slices(rows: Sequence[Judged]) -> dict[str, Sequence[Judged]]:
    def where(belongs: Belongs) -> list[Judged]:
        return [row for row in rows if row.row.cell is not None and belongs(row)]

    return {
        "saturated": where(lambda r: r.regime in ("kv_memory", "batch_limit")),
        "TP > 1": where(lambda r: r.row.cell.setup.tensor_parallel > 1),
        "long prompt": where(lambda r: r.row.cell.input_tokens >= 2048),
    }


def report(name: str, rows: Sequence[Judged], figures: Sequence[str], bars: Sequence[Bar]) -> None:
    by_figure = {bar.figure: bar for bar in bars}
    lines = [line("all", rows, figure, by_figure.get(figure)) for figure in figures]
    for label, part in slices(rows).items():
        lines += [line(label, part, figure) for figure in figures]
    table(name, lines)


def light(rows: Sequence[Judged]) -> list[Judged]:
    """Rows below 70 % of the highest throughput that the same copy reached in the table."""
    top: dict[tuple[object, ...], float] = {}
    for row in rows:
        value = row.measured("throughput_tokens_per_s")
        if value is not None:
            top[copy_key(row)] = max(top.get(copy_key(row), 0.0), value)
    return [
        row
        for row in rows
        if (row.measured("throughput_tokens_per_s") or 0.0) < LIGHT_LOAD * top.get(copy_key(row), 0)
    ]


def copy_key(row: Judged) -> tuple[object, ...]:
    cell = row.row.cell
    assert cell is not None
    return (
        row.row.engine,
        cell.setup.shape.name,
        cell.setup.tensor_parallel,
        cell.input_tokens,
        cell.output_tokens,
    )


def jumpstart() -> None:
    rows = read_table(JUMPSTART)
    figures = ("throughput_tokens_per_s", "latency_ms_per_token")
    for cells, thr, lat in ((28, (0.045, 0.12), (0.06, 0.15)), (8, (0.07, 0.16), (0.09, 0.20))):
        judged = judged_splits(rows, cells)
        bars = [Bar(figures[0], *thr), Bar(figures[1], *lat)]
        report(f"JumpStart (TGI 2023), {cells} cells, {SPLITS} splits", judged, figures, bars)
    transfers("JumpStart", rows, EAGER_GPU_PRIOR, lambda cell: cell.setup.instance.accelerator.name)


def h100() -> None:
    folder = os.environ.get("LMI_BENCH_TABLES")
    if not folder:
        print("\n## H100\n\nnot shown: LMI_BENCH_TABLES names no folder with the two tables")
        return
    figures = ("throughput_tokens_per_s", "tpot_ms", "ttft_ms")
    bars = [Bar(figures[0], 0.06), Bar(figures[1], 0.06)]
    light_rows: list[Judged] = []
    pooled: list[Judged] = []
    for kind in ("closed", "open"):
        rows = read_table(Path(folder) / f"h100_vllm_{kind}_loop.csv")
        judged = judged_splits(rows, 6)
        report(f"H100, {kind} loop, 6 cells, {SPLITS} splits", judged, figures, SET_BARS)
        for engine in sorted({row.engine for row in rows}):
            own = [row for row in judged if row.row.engine == engine]
            table(f"H100, {kind} loop, {engine}", [line("all", own, f) for f in figures])
        pooled += judged
        light_rows += light(judged)
    report("H100, both sets pooled", pooled, figures[:2], bars)
    table(
        "H100, time to first token below 70 % load",
        [line("both sets", light_rows, "ttft_ms", Bar("ttft_ms", 0.20))],
    )
    closed = read_table(Path(folder) / "h100_vllm_closed_loop.csv")
    transfers("H100, closed loop", closed, GRAPH_GPU_PRIOR, lambda cell: cell.setup.shape.name)


def transfers(
    title: str, rows: Sequence[TableRow], prior: EngineProfile, kind: Callable[[MeasuredLevel], str]
) -> None:
    """Fit cells of one kind, predict those of the others: nothing of them is known."""
    print(f"\n## {title}: calibrated on {TRANSFER_CELLS} cells of one, {SPLITS} draws\n")
    print("| fitted to | predicted | figure | n | median / p90 error | covered | half-width |")
    print("|---|---|---|---|---|---|---|")
    cells = [row.cell for row in rows if row.cell is not None]
    metrics: list[Metric] = ["throughput_tokens_per_s"]
    metrics.append("tpot_mean_s" if cells[0].tpot_mean_s else "latency_p90_s_per_token")
    for known in sorted({kind(cell) for cell in cells}):
        own = [cell for cell in cells if kind(cell) == known]
        other = [cell for cell in cells if kind(cell) != known]
        said: dict[Metric, list[tuple[Estimate, float]]] = {metric: [] for metric in metrics}
        for seed in range(SPLITS):
            chance = np.random.default_rng(seed)
            chosen = chance.permutation(len(own))[:TRANSFER_CELLS]
            fit = fit_cells(prior, [own[index] for index in chosen])
            for index in chance.permutation(len(other))[:TRANSFER_FORETOLD]:
                cell = other[index]
                found = estimates(fit, cell, metrics)
                for metric in metrics:
                    value = cell.measured(metric)
                    if value is not None:
                        said[metric].append((found[metric], value))
        names = ", ".join(sorted({kind(cell) for cell in other}))
        for metric, pairs in said.items():
            errors = [abs(each.value / value - 1) for each, value in pairs]
            middle, high = np.quantile(errors, [0.5, 0.9])
            covered = np.mean([each.low <= value <= each.high for each, value in pairs])
            width = np.median([(each.high - each.low) / 2 / each.value for each, _ in pairs])
            print(
                f"| {known} | {names} | {metric} | {len(pairs)} | {middle:.1%} / {high:.1%} | "
                f"{covered:.0%} | {width:.1%} |"
            )


def simulated_tokens_per_s(instance: str, degree: int, copies: int, users: int) -> float:
    """Of a level with three requests a user on so many copies of Llama 2 7B."""
    workload = Workload(find_model("llama-2-7b"), "float16", 256, 256)
    plan = plan_copy(Layout(find_instance(instance), degree), workload, TGI_2023, open_loop=False)
    spec = LevelSpec(0, Load(concurrency=users), num_requests=3 * users)
    level = plan.simulate(spec, replicas=copies)
    wall_s = max(record.token_times_s[-1] for record in level.records)
    return 3 * users * 256 / wall_s


def layouts() -> None:
    print("\n## Layouts of Llama 2 7B, 256 in / 256 out, as the simulation has them\n")
    four = simulated_tokens_per_s("ml.p4d.24xlarge", 4, 1, 256)
    eight = simulated_tokens_per_s("ml.p4d.24xlarge", 8, 1, 256)
    print(f"p4d, one copy, 256 users: TP 4 {four:,.0f} tok/s, TP 8 {eight:,.0f} tok/s")
    small = simulated_tokens_per_s("ml.g5.12xlarge", 4, 1, 64)
    large = simulated_tokens_per_s("ml.g5.48xlarge", 8, 1, 64)
    print(f"64 users: g5.12xlarge TP 4 {small:,.0f} tok/s, g5.48xlarge TP 8 {large:,.0f} tok/s")
    for degree in (1, 2, 4, 8):
        value = simulated_tokens_per_s("ml.p4d.24xlarge", degree, 8 // degree, 512)
        print(f"p4d, 512 users on {8 // degree} x TP {degree}: {value:,.0f} tok/s")


def speed() -> None:
    print("\n## Speed\n")
    start_s = time.perf_counter()
    count, shapes = 0, [entry.shape for entry in all_model_entries()]
    while count < 10_000:
        for shape in shapes:
            for instance in all_instances():
                for degree in (1, 2, 4, 8):
                    for lengths in ((256, 256), (1024, 128)):
                        if degree > instance.num_accelerators or count >= 10_000:
                            continue
                        count += 1
                        workload = Workload(shape, "float16", *lengths)
                        try:
                            plan = plan_copy(
                                Layout(instance, degree), workload, TGI_2023, open_loop=True
                            )
                        except InputError:
                            continue
                        plan.steady.rate_per_s(plan.steady.slots)
    print(f"10,000 configurations in closed form: {time.perf_counter() - start_s:.2f} s (bar 5 s)")
    workload = Workload(find_model("llama-2-7b"), "float16", 256, 256)
    plan = plan_copy(
        Layout(find_instance("ml.p4d.24xlarge"), 1), workload, TGI_2023, open_loop=False
    )
    best_s = min(_level_s(plan) for _ in range(3))
    print(f"a simulated 60-second level of 64 streams: {best_s:.3f} s (bar 0.2 s)")


def _level_s(plan: CopyPlan) -> float:
    start_s = time.perf_counter()
    plan.simulate(LevelSpec(0, Load(concurrency=64), duration_s=60.0))
    return time.perf_counter() - start_s


def main() -> None:
    print("# Planner accuracy")
    print("\nPrinted by benchmarks/planner_accuracy.py.")
    jumpstart()
    h100()
    layouts()
    speed()


if __name__ == "__main__":
    main()
