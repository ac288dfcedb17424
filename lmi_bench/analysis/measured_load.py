"""Whether a measured level of random arrivals kept its SLOs, and how sure that is.

A quantile q is within a limit if at least a share q of the values is. That share is a ratio of sums
over requests; requests of one batch move together, so its error is taken from the means of blocks
of neighbours (batch means, Law and Kelton, Simulation Modeling and Analysis, section 9.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.latency import QUANTILES, samples_needed
from lmi_bench.analysis.slo_values import request_values_ms
from lmi_bench.catalog.accelerators import Link
from lmi_bench.records import RequestRecord
from lmi_bench.slo import Slo

Verdict = Literal["kept", "missed", "open"]
EngineKey = tuple[str, Link, int]
"""Accelerator, link and tensor-parallel degree: `Layout.engine_key`."""

_BLOCKS = 20
_T90 = 1.328  # upper 10 % of Student's t with 19 degrees of freedom


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredLoad:
    """One copy of the model under random arrivals, as measured.

    engine_key    what it ran on
    rate_per_s    requests each second that this copy was offered
    records       settled requests in the order in which they were due
    name          of the level, for people
    """

    engine_key: EngineKey
    rate_per_s: float
    records: tuple[RequestRecord, ...]
    name: str = ""

    def verdict(self, slos: Sequence[Slo]) -> Verdict:
        """`kept` or `missed` where nine of ten such levels would say the same, else `open`."""
        verdicts = [_verdict(self.records, slo) for slo in slos]
        if "missed" in verdicts:
            return "missed"
        return "open" if "open" in verdicts else "kept"

    def statistic_ms(self, slo: Slo) -> float | None:
        """The SLO's own statistic over the level; None where no request has the metric."""
        values = request_values_ms(
            self.records, slo.metric, open_loop=True, failures="infinite"
        )
        if not values:
            return None
        pooled = np.concatenate(values)
        if slo.statistic == "mean":
            return float(pooled.mean())
        return float(np.quantile(pooled, QUANTILES[slo.statistic], method="higher"))


def _verdict(records: Sequence[RequestRecord], slo: Slo) -> Verdict:
    values = request_values_ms(records, slo.metric, open_loop=True, failures="infinite")
    needed = samples_needed(QUANTILES.get(slo.statistic, 0.5))
    if len(values) < max(needed, 2 * _BLOCKS):
        return "open"
    if slo.statistic == "mean":
        excess = np.array([float(own.sum()) for own in values])
        wanted = slo.limit_ms
    else:  # the share of values within the limit, turned so that less is better
        excess = np.array([float(np.count_nonzero(own > slo.limit_ms)) for own in values])
        wanted = 1 - QUANTILES[slo.statistic]
    counts = np.array([float(own.size) for own in values])
    ratio, error = ratio_by_blocks(excess, counts)
    if not math.isfinite(ratio) or ratio - _T90 * error > wanted:
        return "missed"
    return "kept" if ratio + _T90 * error <= wanted else "open"


def ratio_by_blocks(
    sums: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[float, float]:
    """Sum of `sums` over sum of `counts`, both shape (n,), and its standard error by blocks.

    >>> ratio_by_blocks(np.ones(40), np.full(40, 2.0))
    (0.5, 0.0)
    """
    ratio = float(sums.sum() / counts.sum())
    blocks = [
        (float(part.sum()), float(size.sum()))
        for part, size in zip(
            np.array_split(sums, _BLOCKS), np.array_split(counts, _BLOCKS), strict=True
        )
    ]
    left = np.array([part - ratio * size for part, size in blocks])
    mean_size = float(counts.sum()) / _BLOCKS
    variance = float(np.sum(left**2)) / (_BLOCKS * (_BLOCKS - 1))
    return ratio, math.sqrt(variance) / mean_size
