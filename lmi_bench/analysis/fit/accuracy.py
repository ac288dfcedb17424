"""Errors, interval coverage and half-width of judged rows, as a whole and by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lmi_bench.analysis.fit.validation import FIGURES, Judged
from lmi_bench.analysis.level.cells import MeasuredLevel

_LONG_PROMPT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one figure over the rows of one slice that were not calibrated on.

    rows           that state the figure; silent: of them, those that nothing was said of
    median, p90    of |predicted / measured - 1|
    coverage       share of the intervals that hold the measured figure
    half_width     median of (high - low) / 2 / predicted
    """

    slice_name: str
    figure: str
    rows: int
    silent: int
    median: float
    p90: float
    coverage: float
    half_width: float


def _slices(
    judged: Sequence[Judged],
) -> Iterator[tuple[str, Callable[[Judged, MeasuredLevel], bool]]]:
    yield "all", lambda _row, _cell: True
    engines = sorted({row.row.engine for row in judged})
    if len(engines) > 1:
        for engine in engines:
            yield engine or "no engine named", _of_engine(engine)
    yield "saturated", lambda row, _cell: row.regime in ("kv_memory", "batch_limit")
    yield "TP > 1", lambda _row, cell: cell.setup.tensor_parallel > 1
    yield "other model", lambda row, _cell: row.model_unseen
    yield "long prompt", lambda _row, cell: cell.input_tokens >= _LONG_PROMPT_TOKENS


def _of_engine(engine: str) -> Callable[[Judged, MeasuredLevel], bool]:
    return lambda row, _cell: row.row.engine == engine


def accuracies(judged: Sequence[Judged]) -> list[Accuracy]:
    """One entry for each slice and figure that has a row."""
    found = []
    for name, belongs in _slices(judged):
        for figure in FIGURES:
            rows = [
                row
                for row in judged
                if row.row.cell is not None and not row.calibrated and belongs(row, row.row.cell)
            ]
            entry = accuracy_of(name, figure, rows)
            if entry is not None:
                found.append(entry)
    return found


def accuracy_of(name: str, figure: str, rows: Sequence[Judged]) -> Accuracy | None:
    """Of one figure over these rows; None where no row states it and has it foretold."""
    pairs = [(row.figures.get(figure), row.measured(figure)) for row in rows]
    stated = [(said, measured) for said, measured in pairs if measured is not None]
    said = [(estimate, measured) for estimate, measured in stated if estimate is not None]
    if not said:
        return None
    errors = np.array([abs(estimate.value / measured - 1) for estimate, measured in said])
    return Accuracy(
        slice_name=name,
        figure=figure,
        rows=len(stated),
        silent=len(stated) - len(said),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        coverage=float(np.mean([e.low <= measured <= e.high for e, measured in said])),
        half_width=float(np.median([(e.high - e.low) / 2 / e.value for e, _ in said])),
    )


@dataclass(frozen=True, slots=True)
class RateUnderSlo:
    """Highest rate of a table's open loop that keeps a limit, as measured and as predicted."""

    engine: str
    model: str
    tensor_parallel: int
    limit: str
    measured_per_s: float | None
    predicted_per_s: float | None


def rates_under(judged: Sequence[Judged], figure: str, limit_ms: float) -> list[RateUnderSlo]:
    """Per engine and copy; a row on which nothing is said keeps no limit."""
    groups: dict[tuple[str, str, int], list[Judged]] = {}
    for row in judged:
        cell = row.row.cell
        if cell is not None and cell.rate_per_s is not None and row.measured(figure) is not None:
            key = (row.row.engine, cell.setup.shape.name, cell.setup.tensor_parallel)
            groups.setdefault(key, []).append(row)
    found = []
    for (engine, model, degree), rows in groups.items():
        measured, predicted = [], []
        for row in rows:
            assert row.row.cell is not None
            assert row.row.cell.rate_per_s is not None
            value, said = row.measured(figure), row.figures.get(figure)
            if value is not None and value <= limit_ms:
                measured.append(row.row.cell.rate_per_s)
            if said is not None and said.value <= limit_ms:
                predicted.append(row.row.cell.rate_per_s)
        found.append(
            RateUnderSlo(
                engine,
                model,
                degree,
                f"{figure.removesuffix('_ms')} <= {limit_ms:g} ms",
                max(measured, default=None),
                max(predicted, default=None),
            )
        )
    return found
