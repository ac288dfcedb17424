"""Decisions on published tables, without a simulator: which layout and load under an SLO?

    python benchmarks/published_decisions.py

The options are a table's rows: layouts (machine, tensor-parallel degree) at numbers of users. For
each table and a ladder of limits over the measured range, the planner takes the cheapest row that
keeps the limit at the upper end of its interval (else the least upper end below which the
prediction lies), after 0, 2, 4 and 6 cells of the table. The choice is judged by the measured
figures: is the limit broken, and what does it cost over the cheapest row that keeps it?

The six cells are chosen for the whole table, before any limit is known. "4 cells, then 2 that
decide" also measures six, the last two for its limit: the row whose saving over the choice, times
its chance to keep the limit, is the largest, by which `recommend` ranks its "measure next".

Beside it: the smallest layout that fits at its highest load, the data sheet (kernels that reach
their peaks, no host), and the nearest measured cell. A row that was measured counts as measured.
"engine unseen" is today's default profile for tables of other engines. No profile, prior or error
constant has seen the table. Costs are dollars where the catalog has the machine's price, else
accelerators.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.support.accuracy_tables import Table, fitted_with, octaves_apart, prior_without, tables  # noqa: E402
from lmi_bench.analysis.fit.discrepancy import ERRORS, ErrorConstants  # noqa: E402
from lmi_bench.analysis.fit.measured_tables import TableRow  # noqa: E402
from lmi_bench.analysis.fit.uncertainty import Estimate  # noqa: E402
from lmi_bench.analysis.fit.validation import FittedRows, Judged, PriorRule, fitted_rows, judge, validate  # noqa: E402
from lmi_bench.analysis.fleet.ranking import LEAST_CHANCE, LEAST_SAVING  # noqa: E402
from lmi_bench.analysis.model.measured_level import MeasuredLevel  # noqa: E402
from lmi_bench.analysis.model.profiles import EngineProfile, StepParameters  # noqa: E402
from lmi_bench.targets.profiles import find_profile  # noqa: E402

CELLS = (0, 2, 4, 6)
DECISIVE_CELLS = "planner, 4 cells, then 2 that decide"
_LADDER = np.linspace(0.1, 0.9, 9)
_LEAST_ROWS = 9
_DECISIVE = 2  # of the six cells
_LEAST_SD = 1e-4
_PEAK = StepParameters(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0)


@dataclass(frozen=True)
class Option:
    """A row: what it costs a token and its latency, as predicted and as measured."""

    cost: float
    latency: float
    upper: float
    true_cost: float
    true_latency: float


@dataclass(frozen=True)
class Decision:
    """Whether a choice was made, broke its limit, and its true cost over the least possible."""

    made: bool
    broken: bool
    regret: float | None


def decide(options: Sequence[Option], limit: float) -> Decision | None:
    """The planner's rule; None where no row keeps the limit."""
    keeping = [o.true_cost for o in options if o.true_latency <= limit]
    if not keeping:
        return None
    sure = [o for o in options if o.upper <= limit]
    likely = [o for o in options if o.latency <= limit]
    if sure:
        chosen = min(sure, key=lambda option: option.cost)
    elif likely:
        chosen = min(likely, key=lambda option: option.upper)
    else:
        return Decision(made=False, broken=False, regret=None)
    if chosen.true_latency > limit:
        return Decision(made=True, broken=True, regret=None)
    return Decision(made=True, broken=False, regret=chosen.true_cost / min(keeping))


def decisive(options: Mapping[int, Option], measured: Set[int], limit: float) -> int | None:
    """Number of the row to measure next, by the rule of `fleet.ranking.decisive_measurements`; None
    where no measurement is worth it."""
    best = min((option.cost for option in options.values() if option.upper <= limit), default=None)
    worth: dict[int, float] = {}
    for number, option in options.items():
        if number in measured or option.latency == math.inf:
            continue
        sd = max(_LEAST_SD, math.log(option.upper / option.latency) / NormalDist().inv_cdf(0.9))
        chance = NormalDist().cdf(math.log(limit / option.latency) / sd)
        saving = 1 / option.cost if best is None else 1 - option.cost / best
        if chance >= LEAST_CHANCE and (best is None or chance * saving >= LEAST_SAVING):
            worth[number] = chance * saving
    return max(worth, key=worth.__getitem__, default=None)


def usd_per_hour(cell: MeasuredLevel) -> float:
    """Of one copy; accelerators where the table names no machine."""
    instance, degree = cell.setup.instance, cell.setup.devices
    if instance.price_usd_per_hour is None:
        return float(degree)
    return instance.price_usd_per_hour / max(1, instance.num_accelerators // degree)


def _figure(row: Judged, figure: str) -> tuple[Estimate | None, float | None]:
    return row.figures.get(figure), row.measured(figure)


def options_of(judged: Sequence[Judged], figure: str) -> list[Option]:
    """The rows that state the figure and a throughput; measured ones as they are."""
    found = []
    for row in judged:
        said, true = _figure(row, figure)
        speed, true_speed = _figure(row, "throughput_tokens_per_s")
        if row.row.cell is None or not true or not true_speed:
            continue
        price = usd_per_hour(row.row.cell)
        true_cost = price / true_speed
        if row.calibrated:
            found.append(Option(true_cost, true, true, true_cost, true))
        elif said is not None and speed is not None:
            found.append(Option(price / speed.value, said.value, said.high, true_cost, true))
        else:
            found.append(Option(math.inf, math.inf, math.inf, true_cost, true))
    return found


def by_nearest(judged: Sequence[Judged], figure: str) -> list[Option]:
    """Each row with the latency of the nearest measured cell and the throughput in proportion."""
    known = [(row, row.row.cell) for row in judged if row.calibrated and row.row.cell]
    found = []
    for row in judged:
        true, true_speed = row.measured(figure), row.measured("throughput_tokens_per_s")
        cell = row.row.cell
        if cell is None or not true or not true_speed:
            continue
        apart = [octaves_apart(cell, other) for _, other in known]
        near, other = known[int(np.argmin(apart))]
        latency = near.measured(figure) or math.inf
        speed = (near.measured("throughput_tokens_per_s") or 0.0) * (cell.load.value / other.load.value)
        price = usd_per_hour(cell)
        cost = price / speed if speed else math.inf
        found.append(Option(cost, latency, latency, price / true_speed, true))
    return found


def cheapest_that_fits(judged: Sequence[Judged], figure: str) -> list[Option]:
    """The smallest layout at its highest load looks cheapest and meets every limit."""
    found = []
    for row in judged:
        cell, true = row.row.cell, row.measured(figure)
        true_speed = row.measured("throughput_tokens_per_s")
        if cell is None or not true or not true_speed:
            continue
        price = usd_per_hour(cell)
        found.append(Option(price / cell.load.value, 0.0, 0.0, price / true_speed, true))
    return found


def data_sheet(table: Table) -> PriorRule:
    def rule(engine: str, cells: Sequence[MeasuredLevel]) -> EngineProfile:
        prior = prior_without(table)(engine, cells)
        return replace(prior, parameters=_PEAK, host_factors={}, log_sd={}, log_correlation=())

    return rule


def unseen_engine(_engine: str, _cells: Sequence[MeasuredLevel]) -> EngineProfile:
    """Today's default profile, for an engine that nobody named."""
    return find_profile(None)


def limits_of(judged: Sequence[Judged], figure: str) -> list[float]:
    values = [value for row in judged if (value := row.measured(figure))]
    return [] if len(values) < _LEAST_ROWS else np.quantile(values, _LADDER).tolist()


def judged_by(table: Table, cells: int, prior: PriorRule | None = None) -> list[Judged]:
    if prior is not None:
        return validate(table.rows, fitted_rows(table.rows, calibrate_cells=cells, prior=prior))[0]
    fitted = fitted_with(table.name, cells)
    return [judge(fitted.fit, row, row.number in fitted.chosen) for row in fitted.rows]


def fitted_to(table: Table, numbers: frozenset[int]) -> FittedRows:
    """The fit to the rows of these numbers."""
    on = [row for row in table.rows if row.number in numbers]
    (fitted,) = fitted_rows(table.rows, calibrate_on=on, prior=prior_without(table))
    return fitted


class Decider:
    """Decides on a table's rows of one pair of lengths after four cells and those that decide."""

    def __init__(self, table: Table, pair: tuple[int, int]) -> None:
        self._table, self._pair = table, pair
        self._first = fitted_with(table.name, table.cells - _DECISIVE)
        self._judged = cache(self._judge)

    def decide(self, figure: str, limit: float) -> Decision | None:
        """The decision after the cells that this limit asks for."""
        numbers = self._first.chosen
        for _ in range(_DECISIVE):
            number = decisive(self._options(numbers, figure), numbers, limit)
            if number is None:
                break
            numbers |= {number}
        return decide(list(self._options(numbers, figure).values()), limit)

    def _options(self, numbers: frozenset[int], figure: str) -> dict[int, Option]:
        judged = self._judged(numbers)
        rows = (each.row.number for each in _stating(judged, figure))
        return dict(zip(rows, options_of(judged, figure), strict=True))

    def _judge(self, numbers: frozenset[int]) -> list[Judged]:
        new = numbers != self._first.chosen
        fitted = fitted_to(self._table, numbers) if new else self._first
        rows = [row for row in fitted.rows if _lengths(row) == self._pair]
        return [judge(fitted.fit, row, row.number in numbers) for row in rows]


def decisions_on(table: Table) -> dict[str, list[Decision]]:
    """Decisions of each method under the ladder of limits, on the rows of each pair of lengths."""
    most = table.cells  # 8 of JumpStart's, which have no TPOT
    runs = {f"planner, {n} cells": judged_by(table, most if n == 6 else n) for n in CELLS}
    methods: dict[str, tuple[list[Judged], Callable[..., list[Option]]]] = {
        name: (run, options_of) for name, run in runs.items()
    }
    if not table.engine.startswith("vllm"):
        run = judged_by(table, 0, unseen_engine)
        methods["planner, engine unseen, 0 cells"] = (run, options_of)
    methods["cheapest that fits"] = (runs["planner, 0 cells"], cheapest_that_fits)
    methods["data sheet"] = (judged_by(table, 0, data_sheet(table)), _without_interval)
    methods["nearest of 6 cells"] = (runs["planner, 6 cells"], by_nearest)
    found: dict[str, list[Decision]] = {name: [] for name in [DECISIVE_CELLS, *methods]}
    lengths = {(cell.input_tokens, cell.output_tokens) for cell in table.levels}
    for pair in sorted(lengths):
        decider = Decider(table, pair)
        for figure in ("latency_ms_per_token", "tpot_ms", "ttft_ms"):
            if figure == "latency_ms_per_token" and table.levels[0].tpot_mean_s:
                continue
            limits = limits_of(runs["planner, 0 cells"], figure)
            for name, (run, options) in methods.items():
                stating = zip(options(run, figure), _stating(run, figure), strict=True)
                same = [option for option, row in stating if _lengths(row.row) == pair]
                made = (decide(same, limit) for limit in limits)
                found[name] += [each for each in made if each is not None]
            made = (decider.decide(figure, limit) for limit in limits)
            found[DECISIVE_CELLS] += [each for each in made if each is not None]
    return found


def _lengths(row: TableRow) -> tuple[int, int]:
    """Prompt and answer tokens; (0, 0) without a cell."""
    return (0, 0) if row.cell is None else (row.cell.input_tokens, row.cell.output_tokens)


def _stating(judged: Sequence[Judged], figure: str) -> list[Judged]:
    return [row for row in judged if row.row.cell and row.measured(figure) and row.measured("throughput_tokens_per_s")]


def _without_interval(judged: Sequence[Judged], figure: str) -> list[Option]:
    return [replace(option, upper=option.latency) for option in options_of(judged, figure)]


def decision_lines(constants_without: Callable[[str], ErrorConstants]) -> tuple[str, dict[str, dict[str, float]]]:
    """The page's section, and shares of broken limits and regrets by method."""
    pooled: dict[str, list[Decision]] = {}
    by_table: dict[str, dict[str, list[Decision]]] = {}
    for table in tables():
        if table.is_open or len(table.rows) < _LEAST_ROWS:
            continue
        token = ERRORS.set(constants_without(table.name))
        by_table[table.name] = decisions_on(table)
        ERRORS.reset(token)
        for name, made in by_table[table.name].items():
            pooled.setdefault(name, []).extend(made)
    lines = ["", "## Decisions: layout and load under a limit on ms/token, TPOT or TTFT", ""]
    lines += ["| method | decisions | none | broken | regret median / p90 / worst |"]
    lines += ["|---|---|---|---|---|"]
    lines += [_line(name, made) for name, made in pooled.items()]
    for title, method in (("after 6 cells", "planner, 6 cells"), ("after 4 cells, then 2 that decide", DECISIVE_CELLS)):
        lines += ["", f"| table, {title} | decisions | none | broken | regret |"]
        lines += ["|---|---|---|---|---|"]
        lines += [_line(name, found[method]) for name, found in by_table.items()]
    numbers = {f"Decisions: {name}": _scores(made) for name, made in pooled.items()}
    return "\n".join(lines) + "\n", numbers


def _scores(made: Sequence[Decision]) -> dict[str, float]:
    """Broken counts as `median`, so that the page's comparison applies to it."""
    regrets = [each.regret for each in made if each.regret is not None]
    broken = float(np.mean([each.broken for each in made]))
    p90 = float(np.quantile(regrets, 0.9)) - 1 if regrets else 0.0
    return {"n": len(made), "median": round(broken, 4), "p90": round(p90, 4), "covered": 0.8}


def _line(name: str, made: Sequence[Decision]) -> str:
    regrets = [each.regret for each in made if each.regret is not None] or [math.nan]
    middle, high = np.quantile(regrets, [0.5, 0.9])
    return (
        f"| {name} | {len(made)} | {np.mean([not each.made for each in made]):.0%} | "
        f"{np.mean([each.broken for each in made]):.1%} | "
        f"{middle:.2f} / {high:.2f} / {max(regrets):.2f} |"
    )


def main() -> None:
    from benchmarks.planner_accuracy import constants_without

    print(decision_lines(constants_without)[0])


if __name__ == "__main__":
    main()
