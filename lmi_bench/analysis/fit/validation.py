"""Judges predictions on a table of measured levels: some cells calibrate, the others are foretold.

Each engine of the table has a fit of its own. A profile that was fitted to the table's models is
not used as the prior of its own judgement: the general prior of its kind takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from lmi_bench.analysis.fit.experiment_design import choose_cells
from lmi_bench.analysis.fit.fit import Fit, fit_of_profile, prior_fit
from lmi_bench.analysis.fit.measured_tables import (
    TableRow,
    requests_of_open_loop,
    with_requests,
)
from lmi_bench.analysis.fit.uncertainty import Estimate, estimates, is_silent
from lmi_bench.analysis.fit.unstated import as_fitted, fit_unstated
from lmi_bench.analysis.level.cells import (
    MeasuredLevel,
    Metric,
    can_run,
    marks_of,
    predict_cell,
    regime_of,
    slots_for,
)
from lmi_bench.analysis.model.builtin_profiles import prior_of_engine
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.units import s_to_ms

_NARROW: Final = "float8"
_NARROW_CACHES: Final = ("nim", "tensorrt", "trt")
_SPLIT_SHARE = 0.7  # of the cells, from which a split with a seed chooses


@dataclass(frozen=True, slots=True)
class Judged:
    """One row with its prediction, in the units of the table; None where nothing is said.

    model_unseen  no calibration cell of its engine is of its model
    """

    row: TableRow
    calibrated: bool
    regime: str | None
    figures: Mapping[str, Estimate | None]
    model_unseen: bool = False

    def to_json(self) -> dict[str, Any]:
        """The row of the command's JSON list."""
        content: dict[str, Any] = {}
        for key in FIGURES:
            figure = self.figures.get(key)
            content[f"predicted_{key}"] = None if figure is None else figure.value
            content[f"low_{key}"] = None if figure is None else figure.low
            content[f"high_{key}"] = None if figure is None else figure.high
        content["calibrated"] = self.calibrated
        content["regime"] = self.regime
        return content

    def measured(self, key: str) -> float | None:
        """The figure as the table states it."""
        cell = self.row.cell
        if cell is None:
            return None
        metric = metric_of(key, cell)
        value: float | None = getattr(cell, metric)
        if value is None:
            return None
        return value if key == "throughput_tokens_per_s" else s_to_ms(value)


FIGURES = ("throughput_tokens_per_s", "latency_ms_per_token", "tpot_ms", "ttft_ms")


def metric_of(key: str, cell: MeasuredLevel) -> Metric:
    """The metric of a column for that cell: published latencies are the 90th percentile."""
    if key == "latency_ms_per_token":
        published = cell.latency_p90_s_per_token is not None or cell.latency_rounded_down_s > 0
        return "latency_p90_s_per_token" if published else "latency_mean_s_per_token"
    metrics: dict[str, Metric] = {
        "throughput_tokens_per_s": "throughput_tokens_per_s",
        "tpot_ms": "tpot_mean_s",
        "ttft_ms": "ttft_mean_s",
    }
    return metrics[key]


def validate(
    rows: Sequence[TableRow],
    *,
    calibrate_cells: int = 0,
    calibrate_on: Sequence[TableRow] | None = None,
    seed: int = 0,
) -> tuple[list[Judged], list[str]]:
    """Every row judged, in order, and warnings.

    calibrate_cells  cells to choose and calibrate on, shared out over the table's engines: each
                     is fitted apart, and no cell of one tells of another
    calibrate_on     or measured rows to calibrate on
    seed             0 chooses among all cells; others among a random part of them
    """
    usable = [row for row in rows if row.cell is not None]
    if not usable:
        reasons = Counter(row.problem for row in rows)
        raise InputError(f"no line of the table can be used: {reasons.most_common(1)[0][0]}")
    warnings: list[str] = []
    engines = Counter(row.engine for row in usable)
    shares = _shares(
        Counter(row.engine for row in usable if _is_measured(row)), max(0, calibrate_cells)
    )
    judged: dict[int, Judged] = {}
    for engine in engines:
        group = [row for row in usable if row.engine == engine]
        first = _base(engine, group)
        group = [_that_ran(first, row) for row in group]
        known, more = _known_rows(engine, group, shares.get(engine, 0), calibrate_on, seed)
        warnings += more
        count = requests_of_open_loop(known)
        if count is not None:
            group = [with_requests(row, count) for row in group]
            known = [with_requests(row, count) for row in known]
        base = _base(engine, [*group, *known])
        known = [_that_ran(base, row) for row in known]
        started = prior_fit(base, _cells(group))
        known = [
            row for row in known if row.cell is not None and can_run(started.profile, row.cell)
        ]
        fit = fit_unstated(base, _cells(known)) if known else started
        group = [_as_fitted(fit, row) for row in group]
        if calibrate_on is None:  # a line that repeats another has not been chosen with it
            chosen = {row.number for row in known}
        else:
            seen = {_identity(cell) for cell in _cells(known)}
            chosen = {
                row.number for row in group if row.cell is not None and _identity(row.cell) in seen
            }
        for row in group:
            judged[row.number] = _judge(fit, row, row.number in chosen)
    found = [
        judged.get(row.number) or Judged(row, False, None, dict.fromkeys(FIGURES)) for row in rows
    ]
    return found, [*problems_of(found), *warnings]


def problems_of(judged: Sequence[Judged]) -> list[str]:
    """A line for each row of which nothing can be said, and why."""
    return [
        f"line {row.row.number + 2}: {row.row.problem}"
        for row in judged
        if row.row.problem is not None
    ]


def validate_profile(profile: EngineProfile, rows: Sequence[TableRow]) -> list[Judged]:
    """Every row judged by a profile as it is; those among its own levels count as calibrated.

    Raises InputError where no row can be used.
    """
    usable = [_that_ran(profile, row) for row in rows if row.cell is not None]
    if not usable:
        reasons = Counter(row.problem for row in rows)
        raise InputError(f"no line of the table can be used: {reasons.most_common(1)[0][0]}")
    fit = fit_of_profile(profile, _cells(usable))
    seen = {_identity(cell) for cell in fit.cells}
    judged = {
        row.number: _judge(fit, row, row.cell is not None and _identity(row.cell) in seen)
        for row in usable
    }
    return [
        judged.get(row.number) or Judged(row, False, None, dict.fromkeys(FIGURES)) for row in rows
    ]


def _that_ran(base: EngineProfile, row: TableRow) -> TableRow:
    """A level that was measured did fit: where the memory plan says no, all its users ran."""
    cell = row.cell
    if cell is None or cell.max_sequences is not None:
        return row
    tokens = cell.input_tokens + cell.output_tokens
    if tokens > cell.setup.shape.max_positions:  # with a context that had been extended
        shape = replace(cell.setup.shape, max_positions=tokens)
        cell = replace(cell, setup=replace(cell.setup, shape=shape))
        row = replace(row, cell=cell)
    try:
        slots_for(base, cell)
    except CapacityError:
        users = max(1, -(-cell.concurrency // cell.replicas)) if cell.concurrency else 32
        return replace(row, cell=replace(cell, max_sequences=users))
    except InputError:
        return row  # it will say why when it is judged
    return row


def as_assumed(cell: MeasuredLevel, engine: str) -> MeasuredLevel:
    """A cell of a table before any level of it is measured, of an engine in lower case.

    All answers of a closed loop have one length: load generators ask for the tokens that a table
    states and let none end before, and schedulers whose prompts pause decoding then keep the
    users in step for good. Where NVIDIA's engines have FP8 weights the checkpoints that it
    publishes have a cache in FP8, too.
    """
    if cell.rate_per_s is None:
        cell = replace(cell, length_spread=0.0)
    setup = cell.setup
    if setup.dtype == _NARROW and setup.kv_dtype is None and engine.startswith(_NARROW_CACHES):
        cell = replace(cell, setup=replace(cell.setup, kv_dtype=_NARROW))
    return cell


def _as_fitted(fit: Fit, row: TableRow) -> TableRow:
    if row.cell is None:
        return row
    cell = as_fitted(fit, row.cell) if fit.cells else as_assumed(row.cell, row.engine)
    return replace(row, cell=cell)


def _cells(rows: Sequence[TableRow]) -> list[MeasuredLevel]:
    return [row.cell for row in rows if row.cell is not None]


def _shares(engines: Mapping[str, int], total: int) -> dict[str, int]:
    """Calibration cells of each engine: by its share of the rows, one at least while they last."""
    rows = sum(engines.values())
    shares = {engine: min(count, total * count // rows) for engine, count in engines.items()}
    for _ in range(min(total, rows) - sum(shares.values())):
        open_ = [engine for engine in engines if shares[engine] < engines[engine]]
        shares[min(open_, key=lambda engine: shares[engine] / engines[engine])] += 1
    return shares


def _base(engine: str, rows: Sequence[TableRow]) -> EngineProfile:
    cells = _cells(rows)
    return prior_of_engine(
        engine,
        models={cell.setup.shape.name for cell in cells},
        accelerators={cell.setup.instance.accelerator.name for cell in cells},
        open_loop=any(cell.rate_per_s is not None for cell in cells),
        marks=marks_of(cells),
    )


def _known_rows(
    engine: str,
    group: Sequence[TableRow],
    count: int,
    calibrate_on: Sequence[TableRow] | None,
    seed: int,
) -> tuple[list[TableRow], list[str]]:
    """The rows to calibrate an engine on, and warnings."""
    if calibrate_on is not None:
        same = [row for row in calibrate_on if row.cell is not None and row.engine == engine]
        if same:
            return same, []
        family = engine.split()[:1]
        kin = [
            row for row in calibrate_on if row.cell is not None and row.engine.split()[:1] == family
        ]
        if kin:
            return kin, [f"{engine or 'the table'} is calibrated on another version of its engine"]
        others = [row for row in calibrate_on if row.cell is not None]
        if len({row.engine for row in others}) == 1 and not (engine and others[0].engine):
            return others, [
                "only one of table and calibration cells names its engine: taken as one"
            ]
        return [], [f"no calibration cell is of {engine or 'the engine of the table'}"]
    return choose_rows(engine, group, count, seed), []


def choose_rows(engine: str, group: Sequence[TableRow], count: int, seed: int) -> list[TableRow]:
    """`count` measured rows whose measurement tells most about all of the group."""
    measured = [row for row in group if _is_measured(row)]
    if count <= 0 or not measured:
        return []
    pool = measured
    if seed:
        chance = np.random.default_rng(seed)
        size = max(min(len(measured), count + 2), round(_SPLIT_SHARE * len(measured)))
        pool = [measured[i] for i in sorted(chance.permutation(len(measured))[:size])]
    cells = _cells(pool)
    first = cells[0]
    metrics: list[Metric] = ["throughput_tokens_per_s"]
    metrics.append("tpot_mean_s" if first.tpot_mean_s else metric_of("latency_ms_per_token", first))
    fit = prior_fit(_base(engine, group), _cells(group))
    light = [replace(cell, num_requests=min(cell.num_requests, 200)) for cell in cells]
    cells = [c if c.rate_per_s is None else few for c, few in zip(cells, light, strict=True)]
    fits = [index for index, cell in enumerate(cells) if can_run(fit.profile, cell)]
    if not fits:
        return []
    chosen = choose_cells(fit, [cells[i] for i in fits], [cells[i] for i in fits], count, metrics)
    return [pool[fits[index]] for index in chosen]


def _is_measured(row: TableRow) -> bool:
    cell = row.cell
    return cell is not None and (
        cell.throughput_tokens_per_s is not None
        or cell.tpot_mean_s is not None
        or cell.latency_p90_s_per_token is not None
    )


def _identity(cell: MeasuredLevel) -> tuple[Any, ...]:
    return (
        cell.setup.shape.name,
        cell.setup.instance.instance_type,
        cell.setup.tensor_parallel,
        cell.replicas,
        cell.setup.dtype,
        cell.input_tokens,
        cell.output_tokens,
        cell.concurrency,
        cell.rate_per_s,
        cell.throughput_tokens_per_s,
        cell.tpot_mean_s,
        cell.latency_p90_s_per_token,
    )


def _judge(fit: Fit, row: TableRow, calibrated: bool) -> Judged:
    cell = row.cell
    assert cell is not None
    unseen = bool(fit.cells) and all(
        known.setup.shape.name != cell.setup.shape.name for known in fit.cells
    )
    try:
        metrics = [metric_of(key, cell) for key in FIGURES]
        found = estimates(fit, cell, metrics)
        regime = regime_of(fit.profile, cell, predict_cell(fit.profile, cell, smooth=True))
        silent = is_silent(fit, cell)
    except InputError as exc:
        problem = replace(row, problem=str(exc))
        return Judged(problem, calibrated, None, dict.fromkeys(FIGURES), unseen)
    figures: dict[str, Estimate | None] = {}
    for key, metric in zip(FIGURES, metrics, strict=True):
        figure = found[metric]
        if key != "throughput_tokens_per_s":
            figure = _as_published(figure, cell if key == "latency_ms_per_token" else None)
            figures[key] = None if silent else figure
        else:
            figures[key] = figure
    return Judged(row, calibrated, regime, figures, unseen)


def _as_published(figure: Estimate, cell: MeasuredLevel | None) -> Estimate:
    """In milliseconds; half a millisecond less where the table cuts them to whole ones."""
    cut_ms = 0.0 if cell is None else s_to_ms(cell.latency_rounded_down_s) / 2
    values = [
        max(s_to_ms(value) - cut_ms, s_to_ms(value) / 2)
        for value in (figure.value, figure.low, figure.high)
    ]
    return Estimate(*values)
