"""Compares predictions with a table of measured levels: some calibrate, others are predicted."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from lmi_bench.analysis.fit.experiment_design import choose_cells
from lmi_bench.analysis.fit.fit import Fit, fit_of_profile, prior_fit
from lmi_bench.analysis.fit.from_run import prior_for
from lmi_bench.analysis.fit.measured_tables import TableRow, requests_of_open_loop, with_requests
from lmi_bench.analysis.fit.uncertainty import FIGURE_METRICS, Estimate, estimates, shown_value
from lmi_bench.analysis.fit.unstated import as_assumed, as_fitted, fit_unstated
from lmi_bench.analysis.level.cells import can_run, predict_cell, regime_of, slots_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.json_value import JsonValue, key_of
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.units import s_to_ms

_IDENTITY = attrgetter(  # what tells measured cells apart
    "setup.shape.name",
    "setup.instance.instance_type",
    "setup.tensor_parallel",
    "setup.parallelism",
    "setup.speculation",
    "replicas",
    "prefill",
    "setup.dtype",
    "input_tokens",
    "output_tokens",
    "concurrency",
    "rate_per_s",
    "throughput_tokens_per_s",
    "tpot_mean_s",
    "latency_p90_s_per_token",
)
PriorRule = Callable[[str, Sequence[MeasuredLevel]], EngineProfile]
_SPLIT_SHARE = 0.7  # share of the cells from which a split with a seed chooses
_LONG_PROMPT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Judged:
    """One row with its prediction, in the units of the table; a figure is None without one.

    model_unseen  no calibration cell of its engine has its model
    """

    row: TableRow
    calibrated: bool = False
    regime: str | None = None
    figures: Mapping[str, Estimate | None] = field(default_factory=dict)
    model_unseen: bool = False

    def to_json(self) -> dict[str, Any]:
        """The row of the command's JSON list."""
        content: dict[str, Any] = {}
        for key in FIGURES:
            figure = self.figures.get(key)
            shown = {} if figure is None else figure.to_json()
            content |= {f"{name}_{key}": shown.get(name) for name in ("predicted", "low", "high")}
            content[f"measured_{key}"] = self.measured(key)
        return {**content, "calibrated": self.calibrated, "regime": self.regime}

    def measured(self, key: str) -> float | None:
        """The figure as the table states it."""
        cell = self.row.cell
        if cell is None:
            return None
        metric = metric_of(key, cell)
        value: float | None = getattr(cell, metric)
        return None if value is None else shown_value(metric, value)


FIGURES = ("throughput_tokens_per_s", "latency_ms_per_token", "tpot_ms", "ttft_ms")


def metric_of(key: str, cell: MeasuredLevel) -> Metric:
    """The metric of a column for that cell: published latencies are the 90th percentile."""
    published = cell.latency_p90_s_per_token is not None or cell.latency_rounded_down_s > 0
    if published and key == "latency_ms_per_token":
        return "latency_p90_s_per_token"
    return FIGURE_METRICS[key]


@dataclass(frozen=True, slots=True, eq=False)
class FittedRows:
    """The rows of one engine, the fit that predicts them, and the numbers of those it was made of.

    warnings  what is assumed about the calibration cells
    """

    fit: Fit
    rows: tuple[TableRow, ...]
    chosen: frozenset[int]
    warnings: tuple[str, ...]


def validate(
    rows: Sequence[TableRow], fitted: Iterable[FittedRows], listener: Listener = SILENT
) -> tuple[list[Judged], list[str]]:
    """Every row as the fits judge it, in order, and warnings: rows without a prediction first."""
    judged: dict[int, Judged] = {}
    warnings: list[str] = []
    for group in fitted:
        warnings += group.warnings
        for row in group.rows:
            judged[row.number] = judge(group.fit, row, row.number in group.chosen)
            listener.progress("levels", len(judged), len(rows))
    found = [judged.get(row.number) or Judged(row) for row in rows]
    bad = (each.row for each in found if each.row.problem is not None)
    return found, [*(f"line {row.number + 2}: {row.problem}" for row in bad), *warnings]


def fitted_rows(
    rows: Sequence[TableRow],
    *,
    calibrate_cells: int = 0,
    calibrate_on: Sequence[TableRow] | None = None,
    seed: int = 0,
    prior: PriorRule = prior_for,
) -> Iterator[FittedRows]:
    """The fit of each engine and its rows as it predicts them.

    calibrate_cells  number of cells to choose and calibrate on, distributed over the table's
                     engines, since each is fitted alone
    calibrate_on     measured rows to calibrate on instead
    seed             0 chooses among all cells, another among a random part of them
    prior            the profile from which an engine's fit starts, by its name and cells
    """
    usable = _usable(rows)
    able = Counter(row.engine for row in usable if _can_calibrate(row))
    shares = _shares(able, max(0, calibrate_cells))
    for engine in dict.fromkeys(row.engine for row in usable):
        group = [row for row in usable if row.engine == engine]
        first = prior(engine, _cells(group))
        group = [_with_measured_limits(first, row) for row in group]
        if calibrate_on is None:
            known, warnings = choose_rows(engine, group, shares.get(engine, 0), seed, prior), list[str]()
        else:
            known, warnings = _known_rows(engine, calibrate_on)
        requests = requests_of_open_loop(known)
        if requests is not None:
            group = [with_requests(row, requests) for row in group]
            known = [with_requests(row, requests) for row in known]
        base = prior(engine, _cells([*group, *known]))
        known = [_with_measured_limits(base, row) for row in known]
        started = prior_fit(base, _cells(group))
        known = [row for row in known if row.cell and can_run(started.profile, row.cell)]
        fit = fit_unstated(base, _cells(known)) if known else started
        if calibrate_on is None:  # a line that repeats a chosen one is not chosen itself
            chosen = {row.number for row in known}
        else:
            chosen = _among(group, _cells(known))
        group = [_as_fitted(fit, row) for row in group]
        yield FittedRows(fit, tuple(group), frozenset(chosen), tuple(warnings))


def _usable(rows: Sequence[TableRow]) -> list[TableRow]:
    usable = [row for row in rows if row.cell is not None]
    if not usable:
        reasons = Counter(row.problem for row in rows)
        raise InputError(f"no line of the table can be used: {reasons.most_common(1)[0][0]}")
    return usable


def rows_of_profile(profile: EngineProfile, rows: Sequence[TableRow]) -> FittedRows:
    """The rows as a profile predicts them as it is; those among its own levels are calibrated on.

    Raises InputError where no row can be used.
    """
    usable = tuple(_with_measured_limits(profile, row) for row in _usable(rows))
    fit = fit_of_profile(profile, _cells(usable))
    return FittedRows(fit, usable, frozenset(_among(usable, fit.cells)), ())


def _among(rows: Sequence[TableRow], cells: Sequence[MeasuredLevel]) -> set[int]:
    """The numbers of the rows that are among the cells."""
    seen = {_IDENTITY(cell) for cell in cells}
    return {row.number for row in rows if row.cell is not None and _IDENTITY(row.cell) in seen}


def _with_measured_limits(base: EngineProfile, row: TableRow) -> TableRow:
    """The row with limits that its measurement proves.

    Its context is at least its requests' length; where they do not fit, all its users ran together.
    """
    cell = row.cell
    if cell is None or cell.max_sequences is not None:
        return row
    tokens = cell.input_tokens + cell.output_tokens
    if tokens > cell.setup.shape.max_positions:  # its context was extended
        shape = replace(cell.setup.shape, max_positions=tokens)
        cell = replace(cell, setup=replace(cell.setup, shape=shape))
        row = replace(row, cell=cell)
    try:
        slots_for(base, cell)
    except CapacityError:
        users = max(1, -(-cell.concurrency // cell.replicas)) if cell.concurrency else 32
        return replace(row, cell=replace(cell, max_sequences=users))
    except InputError:
        pass  # its prediction reports the reason
    return row


def _as_fitted(fit: Fit, row: TableRow) -> TableRow:
    if row.cell is None:
        return row
    cell = as_fitted(fit, row.cell) if fit.cells else as_assumed(row.cell, row.engine)
    return replace(row, cell=cell)


def _cells(rows: Sequence[TableRow]) -> list[MeasuredLevel]:
    return [row.cell for row in rows if row.cell is not None]


def _shares(engines: Mapping[str, int], total: int) -> dict[str, int]:
    """Calibration cells of each engine, in proportion to its rows; first one for each engine."""
    rows = sum(engines.values())
    shares = {engine: min(count, total * count // rows) for engine, count in engines.items()}
    for _ in range(min(total, rows) - sum(shares.values())):
        open_ = [engine for engine in engines if shares[engine] < engines[engine]]
        shares[min(open_, key=lambda engine: shares[engine] / engines[engine])] += 1
    return shares


def _known_rows(engine: str, calibrate_on: Sequence[TableRow]) -> tuple[list[TableRow], list[str]]:
    """Those of the rows to calibrate an engine on, and warnings."""
    known = [row for row in calibrate_on if row.cell is not None and row.fits]
    same = [row for row in known if row.engine == engine]
    if same:
        return same, []
    family = [row for row in known if row.engine.split()[:1] == engine.split()[:1]]
    if family:
        return family, [f"{engine or 'the table'} is calibrated on another version of its engine"]
    if len({row.engine for row in known}) == 1 and not (engine and known[0].engine):
        return known, ["the table or the calibration cells name no engine: assumed to be the same"]
    return [], [f"no calibration cell was measured on {engine or 'the engine of the table'}"]


def choose_rows(
    engine: str, group: Sequence[TableRow], count: int, seed: int, prior: PriorRule = prior_for
) -> list[TableRow]:
    """The `count` measured rows that are most informative about the whole group."""
    measured = [row for row in group if _can_calibrate(row)]
    if count <= 0 or not measured:
        return []
    pool = measured
    if seed:
        chance = np.random.default_rng(seed)
        size = max(min(len(measured), count + 2), round(_SPLIT_SHARE * len(measured)))
        pool = [measured[i] for i in sorted(chance.permutation(len(measured))[:size])]
    cells = [c if c.rate_per_s is None else replace(c, num_requests=min(c.num_requests, 200)) for c in _cells(pool)]
    per_token: Metric = "tpot_mean_s" if cells[0].tpot_mean_s else metric_of("latency_ms_per_token", cells[0])
    fit = prior_fit(prior(engine, _cells(group)), _cells(group))
    fits = [index for index, cell in enumerate(cells) if can_run(fit.profile, cell)]
    if not fits:
        return []
    able = [cells[i] for i in fits]
    return [pool[fits[index]] for index in choose_cells(fit, able, able, count, ["throughput_tokens_per_s", per_token])]


def _can_calibrate(row: TableRow) -> bool:
    """Whether a fit may use the row, and it states a figure."""
    figures: tuple[Metric, ...] = ("throughput_tokens_per_s", "tpot_mean_s", "latency_p90_s_per_token")
    return row.fits and row.cell is not None and any(row.cell.measured(name) is not None for name in figures)


def judge(fit: Fit, row: TableRow, calibrated: bool = False) -> Judged:
    """A row as the fit predicts it; its figures are None where it cannot run."""
    cell = row.cell
    assert cell is not None  # the caller chose usable rows
    models = {known.setup.shape.name for known in fit.cells}
    unseen = bool(models) and cell.setup.shape.name not in models
    try:
        metrics = [metric_of(key, cell) for key in FIGURES]
        found = estimates(fit, cell, metrics)
        regime = regime_of(fit.profile, cell, predict_cell(fit.profile, cell, smooth=True))
    except InputError as exc:
        return Judged(replace(row, problem=str(exc)), calibrated, model_unseen=unseen)
    figures: dict[str, Estimate | None] = {FIGURES[0]: found[metrics[0]]}
    for key, metric in zip(FIGURES[1:], metrics[1:], strict=True):
        cut_s = cell.latency_rounded_down_s if key == "latency_ms_per_token" else 0.0
        ends_ms = (s_to_ms(getattr(found[metric], name)) for name in ("value", "low", "high"))
        # less half the unit to which the table rounds down
        figures[key] = Estimate(*(max(end - s_to_ms(cut_s) / 2, end / 2) for end in ends_ms))
    if cell.output_tokens == 1:
        figures["tpot_ms"] = None
    return Judged(row, calibrated, regime, figures, unseen)


@dataclass(frozen=True, slots=True)
class Accuracy(JsonValue):
    """The accuracy of one figure over the rows of one slice that were not calibrated on.

    rows           number that state the figure; silent: of them, those without a prediction
    median, p90    of |predicted / measured - 1|
    coverage       share of the intervals that contain the measured figure
    half_width     median of (high - low) / 2 / predicted
    """

    slice_name: str = field(metadata=key_of("slice"))
    figure: str
    rows: int = field(metadata=key_of("lines"))
    silent: int
    median: float
    p90: float
    coverage: float = field(metadata=key_of("covered"))
    half_width: float = field(metadata=key_of("half-width"))

    def to_json(self) -> dict[str, Any]:
        """The errors of one figure; shares are 0 to 1."""
        return {**super(Accuracy, self).to_json(), "silent": self.silent or None}


def accuracies(judged: Sequence[Judged]) -> list[Accuracy]:
    """One entry for each slice and figure that has a row."""
    found = [accuracy_of(*part, figure) for part in _slices(judged) for figure in FIGURES]
    return [entry for entry in found if entry is not None]


def _slices(judged: Sequence[Judged]) -> Iterator[tuple[str, list[Judged]]]:
    """The rows that were not calibrated on, all and by kind."""
    others = [(row, row.row.cell) for row in judged if row.row.cell and not row.calibrated]
    yield "all", [row for row, _ in others]
    engines = sorted({row.row.engine for row in judged})
    for engine in engines if engines[1:] else ():
        yield engine or "no engine named", [row for row, _ in others if row.row.engine == engine]
    yield "saturated", [row for row, _ in others if row.regime in ("kv_memory", "batch_limit")]
    yield "TP > 1", [row for row, cell in others if cell.setup.tensor_parallel > 1]
    yield "other model", [row for row, _ in others if row.model_unseen]
    long = [row for row, cell in others if cell.input_tokens >= _LONG_PROMPT_TOKENS]
    yield "long prompt", long


def accuracy_of(name: str, rows: Sequence[Judged], figure: str) -> Accuracy | None:
    """The accuracy of one figure over these rows; None where no row states and predicts it."""
    pairs = [(row.figures.get(figure), row.measured(figure)) for row in rows]
    stated = [(estimate, measured) for estimate, measured in pairs if measured is not None]
    known = [(estimate, measured) for estimate, measured in stated if estimate is not None]
    if not known:
        return None
    errors = np.array([abs(estimate.value / measured - 1) for estimate, measured in known])
    return Accuracy(
        slice_name=name,
        figure=figure,
        rows=len(stated),
        silent=len(stated) - len(known),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        coverage=float(np.mean([e.low <= measured <= e.high for e, measured in known])),
        half_width=float(np.median([(e.high - e.low) / 2 / e.value for e, _ in known])),
    )


@dataclass(frozen=True, slots=True)
class LoadUnderSlo:
    """The highest load of a set-up's rows that meets a limit: users of a closed loop, or a rate.

    Measured, predicted, and by the far and the near end of the 80 % intervals (low, high); None
    where no row meets it. `row` is one of the set-up's.
    """

    row: TableRow
    limit: str
    is_rate: bool
    measured: float | None
    predicted: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, Any]:
        """As a row of its set-up states it."""
        figures = {name: getattr(self, name) for name in ("measured", "predicted", "low", "high")}
        return {"limit": self.limit, "load": "rate_per_s" if self.is_rate else "users", **figures}


def setup_key(row: TableRow) -> tuple[Any, ...]:
    """What rows of one set-up at different loads have in common."""
    cell = row.cell
    assert cell is not None  # the caller chose usable rows
    lengths = cell.input_tokens, cell.output_tokens
    return (row.engine, cell.setup, cell.replicas, cell.prefill, *lengths)


def loads_under(judged: Sequence[Judged], figure: str, limit_ms: float) -> list[LoadUnderSlo]:
    """One entry for each set-up and kind of load whose rows state the figure."""
    groups: dict[tuple[Any, ...], list[tuple[float, float, Judged]]] = {}
    for row in judged:
        cell, measured = row.row.cell, row.measured(figure)
        if cell is not None and measured is not None:
            same = groups.setdefault((*setup_key(row.row), cell.rate_per_s is None), [])
            same.append((cell.load.value, measured, row))
    limit = f"{figure.removesuffix('_ms')} <= {limit_ms:g} ms"
    found = []
    for (*_, is_closed), rows in groups.items():
        known = [(load, said) for load, _, row in rows if (said := row.figures.get(figure))]
        found.append(
            LoadUnderSlo(
                rows[0][2].row,
                limit,
                not is_closed,
                _highest((load, measured <= limit_ms) for load, measured, _ in rows),
                _highest((load, each.value <= limit_ms) for load, each in known),
                _highest((load, each.high <= limit_ms) for load, each in known),
                _highest((load, each.low <= limit_ms) for load, each in known),
            )
        )
    return found


def _highest(loads: Iterable[tuple[float, bool]]) -> float | None:
    return max((load for load, meets in loads if meets), default=None)
