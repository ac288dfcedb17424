"""What no table states and measured levels tell: one length of all answers, the cache's format.

Where all answers have one length (`--ignore-eos`) users that began together end together, and
their next prompts wait for each other: the first token takes as long as all of their prompts.
Lengths that vary a little spread them out. A level of ten users with prompts of 1,024 tokens
differs by a factor of four. Engines with FP8 weights keep the cache in 16 bits or in FP8, which
holds twice the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lmi_bench.analysis.fit.fit import Fit, fit_cells
from lmi_bench.analysis.level.cells import MeasuredLevel
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.errors import CapacityError

_WORTH_IT: Final = 2.0  # of cost: nothing is assumed for nothing
_NARROW: Final = "float8"


def fit_unstated(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """The likeliest of the fits of the cells as they are, in step, and with a cache in FP8.

    The fit's own cells say which it was: by their `length_spread`, and their `kv_dtype`.
    """
    best = fit_cells(base, cells)
    if any(map(_may_be_in_step, cells)):
        level = [replace(cell, length_spread=0.0) for cell in best.cells]
        best = _likelier(best, base, level)
    if any(map(_may_be_narrow, cells)):
        narrow = [_narrow(cell) if _may_be_narrow(cell) else cell for cell in best.cells]
        best = _likelier(best, base, narrow)
    return best


def as_fitted(fit: Fit, cell: MeasuredLevel) -> MeasuredLevel:
    """A cell of the same harness and engine, with what the fit has found."""
    closed = [known for known in fit.cells if known.rate_per_s is None]
    if cell.rate_per_s is None and closed and not any(known.length_spread for known in closed):
        cell = replace(cell, length_spread=0.0)
    formats = {known.setup.kv_dtype for known in fit.cells if known.setup.dtype == _NARROW}
    if _may_be_narrow(cell) and formats == {_NARROW}:
        cell = _narrow(cell)
    return cell


def _may_be_in_step(cell: MeasuredLevel) -> bool:
    several = cell.concurrency > cell.replicas
    return several and cell.length_spread > 0 and cell.ttft_mean_s is not None


def _narrow(cell: MeasuredLevel) -> MeasuredLevel:
    return replace(cell, setup=replace(cell.setup, kv_dtype=_NARROW))


def _may_be_narrow(cell: MeasuredLevel) -> bool:
    return cell.setup.dtype == _NARROW and cell.setup.kv_dtype is None


def _likelier(fit: Fit, base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    try:
        other = fit_cells(base, cells)
    except CapacityError:
        return fit
    return other if other.cost(base) < fit.cost(base) - _WORTH_IT else fit
