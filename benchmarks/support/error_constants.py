"""Estimates the constants of the model's error over tables, each time without one of them.

The fits are linear near their solution, so what a fit says of a table's other rows under other
constants is a conditional normal distribution: nothing is simulated again. A coordinate search
takes the constants with the highest mean log density of those rows (Student's t, so that single
rows do not decide), with the same weight for each table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.accuracy_tables import Figure, Table, judged_rows
from lmi_bench.analysis.fit.discrepancy import (
    ERRORS,
    OUTLIER,
    ErrorConstants,
    Observation,
    error_covariance,
    find_scales,
    measured_covariance,
    observations_of,
)
from lmi_bench.analysis.fit.fit import derivatives
from lmi_bench.analysis.fit.uncertainty import octaves_beyond, transfer_sd
from lmi_bench.analysis.fit.validation import FittedRows
from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.model.profiles import EngineProfile, log_value
from lmi_bench.core.errors import InputError

_FREEDOM = 4.0
GRID: dict[str, tuple[float, ...]] = {
    "step_sd": (0.035, 0.05, 0.065),
    "growth": (0.0, 0.1, 0.2, 0.35),
    "output_octaves": (2.5, 5.0, 10.0),
    "prompt_octaves": (1.5, 2.5, 4.0),
    "load_octaves": (1.5, 2.5),
    "lasting_share": (0.4, 0.6, 0.8),
    "noise": (0.7, 1.0, 1.3),
    "scale": (0.7, 1.0),
    "beyond_sd": (0.01, 0.02, 0.04),
    "ttft_sd": (0.1, 0.15, 0.2, 0.3),
    "ttft_growth": (0.0, 0.15, 0.3),
    "ttft_scale": (0.7, 1.0),
    "ttft_beyond_sd": (0.04, 0.08, 0.15),
}
_TARGET = 0.80
_PASSES = 1
_FEW = 5


@dataclass(frozen=True)
class Linear:
    """One fit and the rows that it did not see, near its solution; arrays by known and other."""

    table: str
    known: list[Observation]
    others: list[Observation]
    jacobian: NDArray[np.float64]
    slopes: NDArray[np.float64]
    residuals: NDArray[np.float64]
    errors: NDArray[np.float64]
    moved: NDArray[np.float64]
    prior_sd: NDArray[np.float64]
    beyond: NDArray[np.float64]
    transfer: NDArray[np.float64]

    @classmethod
    def of(cls, table: Table, fitted: FittedRows, base: EngineProfile) -> Linear | None:
        fit = fitted.fit
        cells = [row.cell for row in judged_rows(fitted) if row.cell]
        if not fit.cells or any(cell.rate_per_s is not None for cell in cells):
            return None  # an open loop is not smooth
        others: list[Observation] = []
        slopes, errors, beyond, transfer = [], [], [], []
        for cell in cells:
            items = observations_of([cell], fit.profile)
            metrics = [item.metric for item in items]
            try:
                slopes.append(derivatives(fit.profile, cell, fit.names, metrics))
                predicted = predict_cell(fit.profile, cell)
            except InputError:
                continue
            others += items
            errors += [math.log(cell.measured(m) / predicted.value(m)) for m in metrics]
            beyond += [octaves_beyond(fit, cell)] * len(items)
            transfer += [transfer_sd(fit, cell)] * len(items)
        jacobian = [
            derivatives(fit.profile, cell, fit.names, [i.metric for i in observations_of([cell])]) for cell in fit.cells
        ]
        moved = [log_value(fit.profile, n) - log_value(base, n) for n in fit.names]
        if not others:
            return None
        return cls(
            table.name,
            list(fit.observations),
            others,
            np.concatenate(jacobian),
            np.concatenate(slopes),
            fit.residuals,
            np.array(errors),
            np.array(moved),
            fit.prior_sd,
            np.array(beyond),
            np.array(transfer),
        )

    def scores(self) -> dict[bool, float]:
        """Mean log density of the others by whether they are TTFT, with the constants in use."""
        known = ERRORS.get()
        _, scales = find_scales(self.known, self.residuals, self.jacobian, self.moved, self.prior_sd)
        prior = np.diag(self.prior_sd**2)
        seen = self.jacobian @ prior @ self.jacobian.T + measured_covariance(self.known, scales)
        across = self.jacobian @ prior @ self.slopes.T
        across = across + error_covariance(self.known, self.others, scales)
        from_prior = self.residuals + self.jacobian @ self.moved
        limits = OUTLIER * np.sqrt(np.diag(seen))
        gain = np.linalg.solve(seen, across)
        off = self.errors + self.slopes @ self.moved
        off = off - np.clip(from_prior, -limits, limits) @ gain
        own = np.diag(measured_covariance(self.others, scales))
        is_ttft = np.array([item.is_ttft for item in self.others])
        growth = [known.growth_at(i.cell, ttft=i.is_ttft) for i in self.others]
        far = np.where(is_ttft, known.ttft_beyond_sd, known.beyond_sd) * self.beyond
        variance = np.einsum("ij,jk,ik->i", self.slopes, prior, self.slopes)
        variance = variance + own + far**2 - np.sum(across * gain, axis=0)
        sd = np.hypot(np.array(growth) * np.sqrt(np.maximum(variance, 1e-6)), self.transfer)
        density = -np.log(sd) - (_FREEDOM + 1) / 2 * np.log1p((off / sd) ** 2 / _FREEDOM)
        return {kind: float(np.mean(density[is_ttft == kind])) for kind in (False, True) if (is_ttft == kind).any()}


class Search:
    """Coordinate searches over the grid; a table's score of given constants is computed once."""

    def __init__(self, items: Sequence[Linear]) -> None:
        self._items = items
        self._scores: dict[tuple[Any, ...], dict[tuple[str, bool], float]] = {}

    def best(self, start: ErrorConstants, without: str | None) -> ErrorConstants:
        """The best constants without a table; one pass over the coordinates."""
        best, top = start, self._mean(start, without, "")
        for _ in range(_PASSES):
            before = best
            for name, values in GRID.items():
                top = self._mean(best, without, name)
                for value in values:
                    option = replace(best, **{name: value})
                    found = self._mean(option, without, name)
                    if found > top + 1e-3:
                        best, top = option, found
            if best == before:
                break
        return best

    def _mean(self, constants: ErrorConstants, without: str | None, name: str) -> float:
        key = tuple(getattr(constants, each) for each in GRID)
        if key not in self._scores:
            token = ERRORS.set(constants)
            by_table: dict[tuple[str, bool], list[float]] = {}
            for item in self._items:
                for kind, score in item.scores().items():
                    by_table.setdefault((item.table, kind), []).append(score)
            ERRORS.reset(token)
            self._scores[key] = {k: float(np.mean(v)) for k, v in by_table.items()}
        ttft = name.startswith("ttft")
        return float(np.mean([v for (t, k), v in self._scores[key].items() if t != without and k == ttft]))


def conformal(figures: Sequence[Figure], without: str | None) -> dict[str, float]:
    """The factors on the widths with which 80 % of the intervals of one more table hold.

    Of the tables with five figures or more, each counted alike, and of all figures together: a
    table of few figures, all of which hold, does not narrow the others. One table of n + 1 is to be
    judged: the level is 80 % * (n + 1) / n. After cells those count that the tool chose. No blind
    interval and none of TTFT gets narrower: tables of other engines say little of an engine's worst
    table, and TTFT is due to its scheduler.
    """
    found = {}
    parts: dict[str, Callable[[Figure], bool]] = {
        "widen": lambda f: not f.is_ttft and f.kind == "cells",
        "ttft_widen": lambda f: f.is_ttft and f.kind == "cells",
        "blind_widen": lambda f: not f.is_ttft and f.is_blind,
        "ttft_blind_widen": lambda f: f.is_ttft and f.is_blind,
    }
    for name, belongs in parts.items():
        reaches: dict[str, list[float]] = {}
        for each in figures:
            if belongs(each) and each.table != without:
                reaches.setdefault(each.table, []).append(each.reach())
        if not reaches:
            continue
        grid = np.geomspace(0.4 if name == "widen" else 1.0, 3.0, 100)
        held = [[np.array(r) <= f for r in reaches.values()] for f in grid]
        covered = [min(np.mean(np.concatenate(h)), np.mean([np.mean(t) for t in h if len(t) >= _FEW])) for h in held]
        level = _TARGET * (1 + 1 / len(reaches)) - 1e-9
        enough = [f for f, c in zip(grid, covered, strict=True) if c >= level]
        found[name] = round(float(enough[0] if enough else grid[-1]), 2)
    return found
