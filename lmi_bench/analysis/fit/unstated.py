"""Infers settings that no table states from measured levels: equal lengths, the cache's format.

Answers of one length keep users in step, whose prompts wait for each other. Engines with FP8 or
NVFP4 weights keep the cache in 16 bits or in FP8, which holds twice the sequences.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lmi_bench.analysis.fit.fit import Fit, fit_cells
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.errors import CapacityError

_WORTH_IT: Final = 2.0  # least gain in cost for which a setting is assumed
_NARROW: Final = "float8"
_NARROW_WEIGHTS: Final = ("float8", "nvfp4")
_NARROW_CACHES: Final = ("nim", "tensorrt", "trt")


def fit_unstated(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """The likeliest fit of three: to the cells as stated, in lock-step, or with an FP8 cache.

    The `length_spread` and `kv_dtype` of the fit's own cells show which it was.
    """
    best = fit_cells(base, cells)
    if any(
        cell.concurrency > cell.replicas
        and cell.length_spread > 0
        and not cell.lengths_stated
        and cell.ttft_mean_s is not None
        for cell in cells
    ):
        level = [replace(cell, length_spread=0.0) for cell in best.cells]
        best = _likelier(best, base, level)
    if any(map(_may_be_narrow, cells)):
        narrow = [_narrow(cell) if _may_be_narrow(cell) else cell for cell in best.cells]
        best = _likelier(best, base, narrow)
    return best


def as_fitted(fit: Fit, cell: MeasuredLevel) -> MeasuredLevel:
    """A cell of the same load generator and engine, with the settings that the fit found."""
    closed = [known for known in fit.cells if known.rate_per_s is None]
    if cell.rate_per_s is None and closed and not any(known.length_spread for known in closed):
        cell = replace(cell, length_spread=0.0)
    formats = {known.setup.kv_dtype for known in fit.cells if known.setup.dtype in _NARROW_WEIGHTS}
    if _may_be_narrow(cell) and formats == {_NARROW}:
        cell = _narrow(cell)
    return cell


def as_assumed(cell: MeasuredLevel, engine: str) -> MeasuredLevel:
    """A cell of a table before any level of it is measured, for an engine in lower case.

    Answers of a closed loop have one length, as load generators request it. NVIDIA's engines have
    FP8 caches with FP8 weights, as in the checkpoints that it publishes.
    """
    if cell.rate_per_s is None and not cell.lengths_stated:
        cell = replace(cell, length_spread=0.0)
    return _narrow(cell) if _may_be_narrow(cell) and engine.startswith(_NARROW_CACHES) else cell


def _narrow(cell: MeasuredLevel) -> MeasuredLevel:
    return replace(cell, setup=replace(cell.setup, kv_dtype=_NARROW))


def _may_be_narrow(cell: MeasuredLevel) -> bool:
    return cell.setup.dtype in _NARROW_WEIGHTS and cell.setup.kv_dtype is None


def _likelier(fit: Fit, base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    try:
        other = fit_cells(base, cells)
    except CapacityError:
        return fit
    return other if other.cost(base) < fit.cost(base) - _WORTH_IT else fit
