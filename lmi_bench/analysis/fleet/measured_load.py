"""Verdicts on measured levels, and the capacity that follows from them.

A quantile q is within a limit if at least a share q of the values is. That share is a ratio of sums
over requests. Requests of one batch are correlated, so its error comes from the means of blocks of
neighbours (batch means, Law and Kelton, Simulation Modeling and Analysis, section 9.5).

The logarithm of a copy's capacity within the SLOs is normal around the prediction; with probability
ODD the model lacks an effect, and the distribution is several times wider:

    P(capacity >= rate) = (1 - ODD) * F(x / sd) + ODD * F(x / wide)      x = ln(median / rate)

A measured level that kept the SLOs excludes capacities below its rate, one that missed them those
above:

    P(capacity >= rate | levels) = (P(rate) - P(missed)) / (P(kept) - P(missed))

A level at its limit says more: the share of slow requests doubles within some 10 % of rate there,
so the capacity is that level's rate within a few per cent, whatever the prediction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fit.from_run import PlacedRun, run_lengths
from lmi_bench.analysis.level.layouts import CopyKey, Layout, Workload
from lmi_bench.analysis.level.steady_state import bisect
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.repeats import steady_lines
from lmi_bench.analysis.results.slo_results import MISSED_BY, request_values_ms
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo

Verdict = Literal["kept", "missed", "near", "open"]
"""`near`: at the limit within a narrow interval, so the capacity is near; `open`: undecided."""
_WORST_FIRST: Final[tuple[Verdict, ...]] = ("missed", "open", "near")
_BLOCKS = 20
_T90 = 1.328  # upper 10 % of Student's t with 19 degrees of freedom
_NEAR = {"share": 0.5, "mean": 0.1}  # of the limit: half the widest interval of `near`


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredLoad:
    """One copy of the model under random arrivals, as measured.

    rate_per_s  requests each second for this copy
    records     settled requests in order of their due times (`settled`)
    cut_short   a stop rule ended the level: too slow, or too many errors
    """

    copy_key: CopyKey
    rate_per_s: float
    records: tuple[RequestRecord, ...]
    cut_short: bool = False

    def verdict(self, slos: Sequence[Slo]) -> Verdict:
        """`kept` or `missed` with 90 % confidence, else `near` or `open` by its interval."""
        if self.cut_short:
            return "missed"
        verdicts = [_verdict(self.records, slo) for slo in slos]
        return next((worst for worst in _WORST_FIRST if worst in verdicts), "kept")


def settled(records: Sequence[RequestRecord]) -> tuple[RequestRecord, ...]:
    """The requests due after the first answer, when the engine had filled up; in order."""
    ends_s = [record.token_times_s[-1] for record in records if record.token_times_s]
    if not ends_s:
        return tuple(records)
    first_end_s = min(ends_s)
    late = (record for record in records if record.due_s >= first_end_s)
    return tuple(sorted(late, key=lambda record: record.due_s))


def loads_from_run(placed: PlacedRun, workload: Workload) -> list[MeasuredLoad]:
    """The run's valid levels of Poisson arrivals with the workload's lengths; loads of a copy."""
    run = placed.run
    scenario = run.manifest.scenario
    if scenario.load.arrivals not in (None, "poisson") or scenario.workload.trace:
        return []
    if not any(line.load.is_open for line in run.levels):
        return []
    if run_lengths(run) != (workload.input_tokens, workload.output_tokens):
        return []
    copies, steady = run.manifest.target.replicas, steady_lines(run.levels)
    key = Layout(placed.instance, placed.degree).copy_key
    return [
        MeasuredLoad(
            copy_key=key,
            rate_per_s=line.load.value / copies,
            records=settled(records),
            cut_short=line.stopped_by in MISSED_BY,
        )
        for line, records in zip(run.levels, run.records, strict=True)
        if line.load.is_open and line.valid and records and line in steady
    ]


def pooled(loads: Sequence[MeasuredLoad]) -> list[MeasuredLoad]:
    """The loads of one engine, with levels of the same rate joined."""
    found: dict[float, MeasuredLoad] = {}
    for load in loads:
        before = found.get(load.rate_per_s)
        if before is not None:
            records = (*before.records, *load.records)
            load = replace(load, records=records, cut_short=before.cut_short or load.cut_short)
        found[load.rate_per_s] = load
    return list(found.values())


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
    if not np.isfinite(excess).all():
        return "missed"
    ratio, error = ratio_by_blocks(excess, counts)
    if ratio - _T90 * error > wanted:
        return "missed"
    if ratio + _T90 * error <= wanted:
        return "kept"
    near = _NEAR["mean" if slo.statistic == "mean" else "share"]
    return "near" if _T90 * error <= near * wanted else "open"


def ratio_by_blocks(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[float, float]:
    """Sum of `sums` over sum of `counts`, both shape (n,), and its standard error by blocks.

    >>> ratio_by_blocks(np.ones(40), np.full(40, 2.0))
    (0.5, 0.0)
    """
    ratio = float(sums.sum() / counts.sum())
    parts, sizes = (np.array([each.sum() for each in np.array_split(values, _BLOCKS)]) for values in (sums, counts))
    left = parts - ratio * sizes
    mean_size = float(counts.sum()) / _BLOCKS
    variance = float(np.sum(left**2)) / (_BLOCKS * (_BLOCKS - 1))
    return ratio, math.sqrt(variance) / mean_size


CONFIDENCE = 0.9
"""Confidence that a planned load stays within its SLOs."""

_NORMAL = NormalDist()
_LEAST_LOG_SD = 0.01
_ODD, _WIDER, _WIDER_BY = 0.15, 3.0, 0.1
_HALVINGS = 50
_NEAR_LOG_SD = 0.06  # of the capacity around the rate of a `near` level


@dataclass(frozen=True, slots=True)
class CapacityBelief:
    """A capacity in requests each second, with its uncertainty.

    low_per_s     exceeded with 90 % confidence before measurements; 0: unknown
    median_per_s  exceeded with even odds, at least low_per_s
    kept_per_s    highest measured rate that kept the SLOs; missed_per_s: lowest that missed them
    """

    low_per_s: float
    median_per_s: float
    kept_per_s: float = 0.0
    missed_per_s: float = math.inf

    @classmethod
    def after(
        cls, low_per_s: float, median_per_s: float, measured: Sequence[tuple[float, Verdict]]
    ) -> "CapacityBelief":
        """The belief after levels at these rates; an undecided one counts as missed.

        If levels contradict each other, the missed one counts. The lowest of those at their limit
        replaces the prediction.
        """
        missed = (rate for rate, verdict in measured if verdict in ("missed", "open"))
        missed_per_s = min(missed, default=math.inf)
        below = [(rate, verdict) for rate, verdict in measured if rate < missed_per_s]
        kept_per_s = max((rate for rate, verdict in below if verdict == "kept"), default=0.0)
        near = [rate for rate, verdict in below if verdict == "near" and rate > kept_per_s]
        if near:
            median_per_s = min(near)
            low_per_s = median_per_s * math.exp(-_NORMAL.inv_cdf(CONFIDENCE) * _NEAR_LOG_SD)
        return cls(low_per_s, median_per_s, kept_per_s, missed_per_s)

    def _above(self, rate_per_s: float) -> float:
        """P(capacity >= rate) before measurements."""
        if rate_per_s <= 0:
            return 1.0
        if rate_per_s == math.inf or self.median_per_s <= 0:
            return 0.0
        if self.low_per_s <= 0:  # even odds at most, of unknown width
            return 0.5 if rate_per_s <= self.median_per_s else 0.0
        median_per_s = max(self.median_per_s, self.low_per_s)
        log_sd = math.log(median_per_s / self.low_per_s) / _NORMAL.inv_cdf(CONFIDENCE)
        room, sd = math.log(median_per_s / rate_per_s), max(_LEAST_LOG_SD, log_sd)
        wide = _WIDER * sd + _WIDER_BY
        return (1 - _ODD) * _NORMAL.cdf(room / sd) + _ODD * _NORMAL.cdf(room / wide)

    def chance(self, rate_per_s: float) -> float:
        """P(capacity >= rate), given the measurements."""
        if rate_per_s <= self.kept_per_s:
            return 1.0
        if rate_per_s >= self.missed_per_s:
            return 0.0
        most, least = self._above(self.kept_per_s), self._above(self.missed_per_s)
        if most - least < 1e-9:  # the measurements contradict the prediction: interpolate
            if self.missed_per_s == math.inf:
                return 0.0
            span = self.missed_per_s - self.kept_per_s
            return (self.missed_per_s - rate_per_s) / span
        return (self._above(rate_per_s) - least) / (most - least)

    @property
    def sure_per_s(self) -> float:
        """The highest rate that is exceeded with 90 % confidence; 0 if none is.

        >>> round(CapacityBelief(4.0, 5.0).sure_per_s, 3)
        4.0
        >>> CapacityBelief(4.0, 5.0, missed_per_s=3.0).sure_per_s < 3.0
        True
        """
        if self.low_per_s <= 0:
            return self.kept_per_s
        low = self.kept_per_s
        if self.missed_per_s == math.inf:
            low = max(low, self.low_per_s)
        high = min(self.missed_per_s, max(low, self.median_per_s))
        if high <= low:
            return low
        return bisect(lambda rate: self.chance(rate) >= CONFIDENCE, low, high, _HALVINGS)[0]
