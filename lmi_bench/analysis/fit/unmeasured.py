"""What a prediction does not know before anything of its set-up is measured.

A profile that ships was fitted to others' machines. Hosts, drivers, builds and harnesses of the
same names differ, and so do the figures of published tables that no profile was fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lmi_bench.analysis.level.cells import Cell, CellPrediction, Metric, predict_cell
from lmi_bench.analysis.model.profiles import EngineProfile

UNSEEN_SETUP: Final = 0.10
_UNSEEN_SETUP_TTFT: Final = 0.30
_INTERVAL_REACH: Final = 1.2816  # standard deviations at the end of an 80 % interval
_NARROW: Final = "float8"
_NARROW_CACHES: Final = ("nim", "tensorrt", "trt")
_LENGTH_SPREAD: Final = 0.1  # of answers that end by themselves or whose lengths are drawn


def as_assumed(cell: Cell, engine: str) -> Cell:
    """A cell of a table before any level of it is measured, of an engine in lower case.

    All answers of a closed loop have one length: load generators ask for the tokens that a table
    states and let none end before, and schedulers whose prompts pause decoding then keep the
    users in step for good. Where NVIDIA's engines have FP8 weights the checkpoints that it
    publishes have a cache in FP8, too.
    """
    if cell.rate_per_s is None:
        cell = replace(cell, length_spread=0.0)
    if cell.dtype == _NARROW and cell.kv_dtype is None and engine.startswith(_NARROW_CACHES):
        cell = replace(cell, kv_dtype=_NARROW)
    return cell


def unmeasured_sd(
    profile: EngineProfile, cell: Cell, predicted: CellPrediction, metrics: Sequence[Metric]
) -> list[tuple[float, float]]:
    """Standard deviations of each figure's logarithm that come of it: below it, and above.

    Answers of one length keep the users of a closed loop in step, so that their prompts wait for
    each other; others spread them out. No load says which it will be, so the interval reaches as
    far as the other of the two, on its side.
    """
    other = predicted
    if cell.rate_per_s is None and cell.concurrency > cell.replicas:
        spread = 0.0 if cell.length_spread else _LENGTH_SPREAD
        other = predict_cell(profile, replace(cell, length_spread=spread))
    found = []
    for metric in metrics:
        reach = math.log(other.value(metric) / predicted.value(metric)) / _INTERVAL_REACH
        setup = _UNSEEN_SETUP_TTFT if metric == "ttft_mean_s" else UNSEEN_SETUP
        found.append((math.hypot(setup, min(reach, 0.0)), math.hypot(setup, max(reach, 0.0))))
    return found
