"""The published tables by set-up source, and every row of them judged without its own table.

A table is one source's rows of one engine and model on one kind of device. Repeated rows of one
configuration are one row, that of the median throughput. Judged are predictions before any cell of
the table (blind), after a few cells that the tool chooses, after cells of the shortest lengths
alone, and after cells of another model of the same source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.fit import fit_cells
from lmi_bench.analysis.fit.from_run import prior_for, profile_of_fit
from lmi_bench.analysis.fit.measured_tables import TableRow, read_table
from lmi_bench.analysis.fit.uncertainty import octaves_beyond
from lmi_bench.analysis.fit.validation import FIGURES, FittedRows, Judged, PriorRule, choose_rows, fitted_rows, judge
from lmi_bench.analysis.model.builtin_profiles import FEW_BITS, widened
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.memory import weight_format
from lmi_bench.analysis.model.profiles import EngineProfile

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "lmi_bench/catalog/data/published"
SHARED = next((found for up in ROOT.parents if (found := up / "shared" / "data").exists()), Path("../shared/data"))
SEEDS = (0,)
_KIN_CELLS = 40
_JUDGED_ROWS = 40  # of a table, evenly over its lines
_LEAST_ROWS = 5


@dataclass(frozen=True)
class Table:
    """One set-up source's rows; cells: how many the tool may measure; source: where to fetch it."""

    name: str
    rows: tuple[TableRow, ...]
    cells: int
    source: str
    ships: bool

    @property
    def engine(self) -> str:
        return self.rows[0].engine

    @property
    def is_open(self) -> bool:
        return self.levels[0].rate_per_s is not None

    @property
    def levels(self) -> list[MeasuredLevel]:
        return [row.cell for row in self.rows if row.cell is not None]


@dataclass(frozen=True)
class Figure:
    """One figure of one row: predicted with its 80 % interval, and measured, in one unit.

    kind      blind, cells, short or model: what was known
    users     of one copy; None at a rate
    distance  doublings of load, prompt and answer to the nearest calibrated cell, one more for
              another degree; None without any
    twice     whether a length is at least twice the longest calibrated one
    """

    table: str
    kind: str
    figure: str
    predicted: float | None
    low: float
    high: float
    measured: float
    users: float | None
    distance: float | None
    twice: bool

    @property
    def is_ttft(self) -> bool:
        return self.figure == "ttft_ms"

    @property
    def is_blind(self) -> bool:
        return self.kind == "blind"

    @property
    def error(self) -> float:
        """Relative error; a row without an answer misses by 100 %."""
        return 1.0 if self.predicted is None else abs(self.predicted / self.measured - 1)

    def reach(self) -> float:
        """Distance of the measured figure in half-widths of the interval."""
        if self.predicted is None:
            return math.inf
        off = math.log(self.measured / self.predicted)
        side = math.log((self.high if off > 0 else self.low) / self.predicted)
        return off / side

    def widened(self, factor: float) -> Figure:
        if self.predicted is None:
            return self
        low = self.predicted * (self.low / self.predicted) ** factor
        high = self.predicted * (self.high / self.predicted) ** factor
        return Figure(**{**self.__dict__, "low": low, "high": high})


@cache
def tables() -> tuple[Table, ...]:
    """Every table that may be read here; those outside the package only where they are at hand."""
    found = []
    posts = SHARED / "published" if SHARED.exists() else SHIPPED
    jumpstart = read_table(posts / "jumpstart_concurrency.csv")
    for model in ("llama-2-7b", "llama-2-13b"):
        rows = [row for row in jumpstart if row.cell and row.cell.setup.shape.name == model]
        found.append(_table(f"TGI 2023, {model}, A10G and A100", rows, 8, "jumpstart_concurrency"))
    extremes = []
    for name in ("min_latency", "max_throughput"):
        for row in read_table(posts / f"jumpstart_{name}.csv"):
            if row.cell and row.cell.setup.shape.name not in ("llama-2-7b", "llama-2-13b"):
                extremes.append(row)
    found.append(_table("TGI 2023, other models, extremes", extremes, 6, "jumpstart_extremes"))
    for kind in ("closed", "open"):
        path = SHARED / "published" / f"h100_vllm_{kind}_loop.csv"
        groups = _grouped(read_table(path)) if path.exists() else {}
        for (engine, model, *_), rows in groups.items():
            name = f"{engine}, {model}, H100, {kind} loop"
            found.append(_table(name, rows, 6 if kind == "closed" else 3, path.name, ships=False))
    path = SHARED / "inferencex_deepseek_r1.csv"
    for key, rows in (_grouped(read_table(path)) if path.exists() else {}).items():
        found.append(_table(", ".join(key), rows, 6, path.name, ships=False))
    return tuple(table for table in found if len(table.rows) >= _LEAST_ROWS)


def _grouped(rows: Sequence[TableRow]) -> dict[tuple[str, ...], list[TableRow]]:
    groups: dict[tuple[str, ...], list[TableRow]] = {}
    for row in rows:
        if row.cell is not None:
            setup = row.cell.setup
            device = setup.instance.accelerator.name
            key = (row.engine, setup.shape.name, device, setup.dtype)
            pools = () if row.cell.prefill is None else ("pools",)
            groups.setdefault((*key, *pools), []).append(row)
    return groups


def _table(name: str, rows: Sequence[TableRow], cells: int, source: str, *, ships: bool = True) -> Table:
    """The table with one row for each configuration, numbered anew."""
    same: dict[tuple[Any, ...], list[TableRow]] = {}
    for row in rows:
        if row.cell is not None:
            same.setdefault(configuration(row.cell), []).append(row)
    unique = []
    for repeats in same.values():
        repeats.sort(key=lambda row: row.cell.throughput_tokens_per_s or 0.0)
        # here every table may calibrate itself: what ships is fitted without it
        unique.append(replace(repeats[len(repeats) // 2], fits=True))
    return Table(name, tuple(unique), cells, source, ships)


def configuration(cell: MeasuredLevel) -> tuple[Any, ...]:
    setup = cell.setup
    return (
        setup.shape.name,
        setup.instance.accelerator.name,
        setup.instance.instance_type,
        setup.tensor_parallel,
        setup.parallelism,
        setup.speculation,
        setup.dtype,
        cell.replicas,
        cell.input_tokens,
        cell.output_tokens,
        cell.concurrency,
        cell.rate_per_s,
        cell.throughput_tokens_per_s is None,
    )


def prior_without(table: Table) -> PriorRule:
    """The engine's prior as if this table had never been seen.

    Where the shipped profiles were fitted to some of its rows, the engine's general prior is fitted
    to the other tables of its engine instead.
    """

    def rule(engine: str, cells: Sequence[MeasuredLevel]) -> EngineProfile:
        general = prior_for(engine, cells)
        return general if general.accelerators else _held_out(table.name, general)

    return rule


_HELD_OUT: dict[tuple[str, str], EngineProfile] = {}


def _held_out(name: str, general: EngineProfile) -> EngineProfile:
    key = (name, general.label)
    if key not in _HELD_OUT:
        own = next(table for table in tables() if table.name == name)
        kin = [
            table
            for table in tables()
            if table.name != name
            and table.engine.split()[:1] == own.engine.split()[:1]
            and len(table.rows) >= 30
            and _may_serve(table, own)
        ]
        steps = {table.name: -(-len(table.rows) // _KIN_CELLS) for table in kin}
        cells = [cell for table in kin for cell in table.levels[:: steps[table.name]]]
        _HELD_OUT[key] = general
        if cells:
            fitted = profile_of_fit(fit_cells(general, cells), fitted_on="other tables", fitted_date="now")
            _HELD_OUT[key] = widened(fitted, general)
    return _HELD_OUT[key]


def _may_serve(table: Table, own: Table) -> bool:
    """Whether a profile of the other table's set-ups is a prior for these, as the tool chooses."""
    other, setup = table.levels[0].setup, own.levels[0].setup
    same_vendor = other.instance.accelerator.vendor == setup.instance.accelerator.vendor
    if not same_vendor or not other.shape.is_moe:
        return same_vendor
    few = [weight_format(each.dtype).nominal_bits < FEW_BITS for each in (other, setup)]
    return setup.shape.is_moe and few[0] >= few[1]


@cache
def fitted_with(name: str, cells: int, seed: int = 0) -> FittedRows:
    """The table's rows and the fit to so many of its cells."""
    table = next(each for each in tables() if each.name == name)
    prior = prior_without(table)
    (fitted,) = fitted_rows(table.rows, calibrate_cells=cells, seed=seed, prior=prior)
    return fitted


@cache
def splits(name: str) -> tuple[tuple[str, FittedRows], ...]:
    """What is known, and the fit with the table's rows."""
    table = next(each for each in tables() if each.name == name)
    prior = prior_without(table)
    found = [("blind", fitted_with(name, 0))]
    found += [("cells", fitted_with(name, table.cells, seed)) for seed in SEEDS]
    lengths = sorted({(c.input_tokens, c.output_tokens) for c in table.levels}, key=sum)
    if len(lengths) > 1:
        short = [r for r in table.rows if (r.cell.input_tokens, r.cell.output_tokens) == lengths[0]]
        on = choose_rows(table.engine, short, min(table.cells, len(short)), 0, prior)
        found += [("short", each) for each in fitted_rows(table.rows, calibrate_on=on, prior=prior)]
    for other in tables():
        if _is_kin(table, other):
            on = choose_rows(other.engine, other.rows, other.cells, 0, prior)
            more = fitted_rows(table.rows, calibrate_on=on, prior=prior)
            found += [("model", each) for each in more]
    return tuple(found)


def _is_kin(table: Table, other: Table) -> bool:
    """Whether the other table has another model of the same source, and rows enough."""
    return (
        other.name != table.name
        and other.source.split("_")[0] == table.source.split("_")[0]
        and not table.is_open
        and not other.is_open
        and len(other.rows) >= 30
        and table.engine.split()[:1] == other.engine.split()[:1]
    )


def figures_of(table: Table, kind: str, fitted: FittedRows) -> Iterator[Figure]:
    """Every figure of the rows that were not calibrated on."""
    known = list(fitted.fit.cells)
    for row in judged_rows(fitted):
        judged = judge(fitted.fit, row)
        cell = row.cell
        assert cell is not None
        users = None if cell.rate_per_s is not None else cell.concurrency / cell.replicas
        near = min((octaves_apart(cell, each) for each in known), default=None)
        for figure in FIGURES:
            measured = judged.measured(figure)
            said = judged.figures.get(figure)
            if measured is None or _is_implied(judged, figure):
                continue
            value, low, high = (None, 0.0, math.inf) if said is None else (said.value, said.low, said.high)
            twice = bool(known) and octaves_beyond(fitted.fit, cell) >= 1
            yield Figure(table.name, kind, figure, value, low, high, measured, users, near, twice)


def judged_rows(fitted: FittedRows) -> list[TableRow]:
    """Rows that were not calibrated on; of many, so many evenly over the table."""
    rows = [row for row in fitted.rows if row.number not in fitted.chosen]
    return rows[:: -(-len(rows) // _JUDGED_ROWS)]


def _is_implied(judged: Judged, figure: str) -> bool:
    return figure == "latency_ms_per_token" and judged.measured("tpot_ms") is not None


def octaves_apart(one: MeasuredLevel, other: MeasuredLevel) -> float:
    apart = [math.log2(getattr(one, name) / getattr(other, name)) for name in ("input_tokens", "output_tokens")]
    apart.append(math.log2(one.load.value / one.replicas * other.replicas / other.load.value))
    return math.hypot(*apart) + (one.setup.tensor_parallel != other.setup.tensor_parallel)
