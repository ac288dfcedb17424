"""What a prediction does not know before anything of its set-up is measured.

A profile that ships was fitted to others' machines. Hosts, drivers, builds and harnesses of the
same names differ, and so do the figures of published tables that no profile was fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from lmi_bench.analysis.cells import Cell, CellPrediction, Metric, predict_cell
from lmi_bench.analysis.profiles import EngineProfile

UNSEEN_SETUP: Final = 0.10
_UNSEEN_SETUP_TTFT: Final = 0.30
_INTERVAL_REACH: Final = 1.2816  # standard deviations at the end of an 80 % interval


def unmeasured_sd(
    profile: EngineProfile, cell: Cell, predicted: CellPrediction, metrics: Sequence[Metric]
) -> list[float]:
    """Standard deviation of each figure's logarithm that comes of it.

    Answers of one length keep the users of a closed loop in step, so that their prompts wait for
    each other; others spread them out. No load says which it will be, so the interval reaches as
    far as the other of the two.
    """
    together = predicted
    if cell.rate_per_s is None:
        together = predict_cell(profile, cell, smooth=True)
    found = []
    for metric in metrics:
        reach = abs(math.log(together.value(metric) / predicted.value(metric)))
        setup = _UNSEEN_SETUP_TTFT if metric == "ttft_mean_s" else UNSEEN_SETUP
        found.append(math.hypot(setup, reach / _INTERVAL_REACH))
    return found
