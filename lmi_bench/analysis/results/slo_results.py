"""SLOs against requests and levels: goodput, measured statistics, and whether a level passes.

A request is judged by its own value of the metric, or by the SLO's statistic over its own gaps
(`itl`); a level by the statistic over its requests. Failed requests are left out (`exclude`) or
count as infinitely slow (`infinite`): a fast success among failures is no fast level. All in ms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lmi_bench.analysis.results.columns import Columns, columns_of, request_ms
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.quantiles import FloatArray, upper_quantile
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import QUANTILES, Judgement, Level
from lmi_bench.core.records import LevelRun, RequestRecord, is_at_start
from lmi_bench.core.slo import Slo
from lmi_bench.core.workload import LevelSpec

FailureRule = Literal["exclude", "infinite"]
FAILURE_RULES: tuple[FailureRule, ...] = ("exclude", "infinite")
UNKNOWN_NOISE = 1.0
DECIDED = "decided"
"""`stopped_by` of a level that was cut short because it was sure to miss its SLOs."""
SURE_CHANCE = 0.01
MISSED_BY = ("timeout", "errors", DECIDED)
_WITHIN_AN_ANSWER = ("ttft", "itl", "tpot")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every SLO, out of those that count.

    per_s  their share of the requests sent each second
    """

    good: int
    requests: int
    per_s: float | None

    @property
    def share(self) -> float | None:
        """Share of the requests that count, 0 to 1; None without requests."""
        return self.good / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class SloResult:
    """One SLO against one level; `reason` says why it is neither met nor missed."""

    slo: Slo
    verdict: Literal["pass", "fail", "unsupported"]
    measured_ms: float | None
    reason: str = ""

    @property
    def slack_ms(self) -> float | None:
        """Limit minus measured; negative if missed."""
        return None if self.measured_ms is None else self.slo.limit_ms - self.measured_ms


def goodput(records: Sequence[RequestRecord] | Columns, slos: Sequence[Slo], *, open_loop: bool) -> Goodput:
    """Number and rate of a level's requests that meet every SLO; a failed request meets none.

    An answer in one piece has no time within it: where that alone is missing it does not count.
    """
    columns = columns_of(records)
    good, unknown = columns.ok & columns.counted, np.zeros(len(columns), dtype=bool)
    in_one = ~columns.streamed & (columns.tokens > 1)
    for slo in slos:  # a metric that a request does not have (TPOT of one token) cannot be missed
        values_ms, rows = columns.values_ms(slo.metric, open_loop=open_loop)
        if slo.metric in _WITHIN_AN_ANSWER:
            unknown |= in_one & ~np.isin(np.arange(len(columns)), rows)
        if slo.metric == "itl" and rows.size:
            begins = np.flatnonzero(np.diff(rows, prepend=-1))
            gaps = np.split(values_ms, begins[1:])
            values_ms = np.array([statistic_ms(each, slo.statistic) for each in gaps])
            rows = rows[begins]
        good[rows[values_ms > slo.limit_ms]] = False
    judged = int((columns.counted & ~(good & unknown)).sum())
    number, wall_s = int((good & ~unknown).sum()), columns.wall_s
    per_s = number * len(records) / judged / wall_s if judged and wall_s > 0 else None
    return Goodput(number, judged, per_s)


def check_slo(line: Level, slo: Slo) -> SloResult:
    """Whether a level's line meets an SLO.

    `unsupported`, neither pass nor fail, where the level is invalid, or has too few requests for
    the quantile, unless even the fastest request exceeds the limit; and for a pass of the few that
    were answered, where the others failed.
    """
    if not line.valid:
        return SloResult(slo, "unsupported", None, f"the level is invalid: {line.invalid_reason}")
    statistics = line.of(slo.metric)
    value = statistics.value(slo.statistic)
    if value is not None:
        return _verdict(line, slo, float(value))
    least = statistics.min
    reason = statistics.why_missing(slo.statistic) or "no request has this latency"
    if least is not None and least > slo.limit_ms:
        return SloResult(slo, "fail", None, f"even the least, {least:.4g} ms, is over; {reason}")
    return SloResult(slo, "unsupported", None, reason)


def request_values_ms(
    records: Sequence[RequestRecord], metric: str, *, open_loop: bool, failures: FailureRule = "exclude"
) -> list[FloatArray]:
    """The values that each request adds to a metric's sample, in order, an array of ms a request.

    Requests without the metric (a TPOT of one token) are left out. Under `infinite` a failed
    request adds one infinite value, for `itl` as many as an answered request has gaps on average.
    """
    columns = columns_of(records)
    own = columns.by_request_ms(metric, open_loop=open_loop)
    counts = columns.counted.tolist()
    sizes = [values.size for values, kept in zip(own, counts, strict=True) if kept and values.size]
    infinite = np.full(max(1, round(float(np.mean(sizes)))) if sizes else 1, np.inf)
    if failures == "infinite":
        own = [values if ok else infinite for values, ok in zip(own, columns.ok, strict=True)]
    return [values for values, kept in zip(own, counts, strict=True) if kept and values.size]


def level_slo(line: Level, records: Sequence[RequestRecord], slo: Slo, failures: FailureRule = "exclude") -> SloResult:
    """Whether a level meets an SLO by its requests, or by its line where there are none."""
    if not records:
        return check_slo(line, slo)
    open_loop = line.load.is_open
    values = request_values_ms(records, slo.metric, open_loop=open_loop, failures=failures)
    if not values:
        return SloResult(slo, "unsupported", None, "no request has this latency")
    n = sum(each.size for each in values)
    needed = requests_needed([slo])
    if n < needed and min(float(each.min()) for each in values) <= slo.limit_ms:
        return SloResult(slo, "unsupported", None, f"{slo.statistic} needs {needed} samples, has {n}")
    return _verdict(line, slo, statistic_ms(np.concatenate(values), slo.statistic))


def _verdict(line: Level, slo: Slo, measured_ms: float) -> SloResult:
    if measured_ms > slo.limit_ms:
        return SloResult(slo, "fail", measured_ms)
    if line.has_failed:
        failed = f"{line.failed:,} of {line.sent:,} requests failed: the others are no measurement"
        return SloResult(slo, "unsupported", measured_ms, failed)
    return SloResult(slo, "pass", measured_ms)


def statistic_ms(values_ms: FloatArray, statistic: str) -> float:
    """Mean or linear quantile of values that may be infinite; shape (n,), n at least 1.

    The caller checks whether n supports the quantile.
    """
    if statistic == "mean":
        return float(values_ms.mean())
    return upper_quantile(values_ms, QUANTILES[statistic])


def log_noise(values_ms: FloatArray, statistic: str, *, samples: int) -> float:
    """Standard deviation of the logarithm of a statistic, estimated from its values.

    For a quantile it is half the distance between the two quantiles one standard error,
    sqrt(q (1 - q) / n), below and above it (Woodruff 1952); for a mean, the deviation of the
    values over sqrt(n). It is 1 where the values do not determine it (a single one, or an
    infinite one nearby).

    samples  independent values: requests, where each of them adds many gaps
    """
    if samples < 2:
        return UNKNOWN_NOISE
    if statistic == "mean":
        mean = float(values_ms.mean())
        if not 0 < mean < math.inf:
            return UNKNOWN_NOISE
        return min(UNKNOWN_NOISE, float(values_ms.std(ddof=1)) / (mean * math.sqrt(samples)))
    q = QUANTILES[statistic]
    error = math.sqrt(q * (1 - q) / samples)
    below, above = max(0.0, q - error), min(1.0, q + error)
    low, high = upper_quantile(values_ms, below), upper_quantile(values_ms, above)
    if low <= 0 or not math.isfinite(high):
        return UNKNOWN_NOISE
    return min(UNKNOWN_NOISE, math.log(high / low) * error / (above - below))


def judge_level(run: LevelRun, slos: Sequence[Slo]) -> Judgement:
    """A level against its SLOs; a level that a stop rule ended has missed them.

    Unlike `check_slo` it decides for any number of requests: a search first looks with few, then
    confirms with enough. Failed requests count as infinitely slow.

    Raises InputError where no request has the metric at all.
    """
    ratio, binding, noise, sure = -math.inf, slos[0], UNKNOWN_NOISE, False
    planned = run.spec.counted_requests
    for slo in slos:
        values = request_values_ms(run.records, slo.metric, open_loop=run.spec.load.is_open, failures="infinite")
        if not values:
            raise InputError(
                f"SLO {slo}: no request of {len(run.records)} has this metric; ask for "
                "more output tokens, or state an SLO on another metric"
            )
        pooled = np.concatenate(values)
        found = statistic_ms(pooled, slo.statistic) / slo.limit_ms
        if found > ratio:
            ratio, binding = found, slo
            noise = log_noise(pooled, slo.statistic, samples=len(values))
        sure |= found > 1 and _is_sure_miss(values, slo, planned or 0)
    missed = run.stopped_by in MISSED_BY
    if missed and ratio <= 1:  # the slow requests never ended
        ratio = math.inf
    passed = not missed and ratio <= 1
    return Judgement(passed, ratio, str(binding), planned, sure and not passed, noise)


def _is_sure_miss(values: Sequence[FloatArray], slo: Slo, planned: int) -> bool:
    """Whether so many requests over the limit are improbable where the SLO is met.

    The unsent requests of a level that was cut short count as fast. A mean has no count, and gaps
    between tokens depend on each other: neither is ever sure.
    """
    if slo.statistic not in QUANTILES or slo.metric == "itl":
        return False
    over = sum(float(value[0]) > slo.limit_ms for value in values)
    if not over:
        return False
    from scipy.special import bdtrc  # 0.2 s to load

    chance = bdtrc(over - 1, max(len(values), planned), 1 - QUANTILES[slo.statistic])
    return bool(chance < SURE_CHANCE)


def requests_needed(slos: Sequence[Slo]) -> int:
    """Requests below which a quantile of the SLOs is not known."""
    return max((samples_needed(QUANTILES[s.statistic]) for s in slos if s.statistic in QUANTILES), default=1)


class CertainMiss:
    """Watches a level's answers until it is certain that the level misses an SLO.

    A quantile is lost once more requests are over the limit than may lie above it, a mean once the
    sum is. Gaps between tokens (`itl`) are pooled over requests of unknown lengths: never certain.

    spec  a level with a number of requests
    """

    def __init__(self, slos: Sequence[Slo], spec: LevelSpec) -> None:
        self._slos = [slo for slo in slos if slo.metric != "itl"]
        self._spec = spec
        n = spec.counted_requests or 0
        self._leaves_out = n != spec.num_requests
        # of n ordered values the quantile lies at or above the one of index floor(q * (n - 1))
        self._most = [
            slo.limit_ms * n if slo.statistic == "mean" else n - 1 - math.floor(QUANTILES[slo.statistic] * (n - 1))
            for slo in self._slos
        ]
        self._seen = [0.0] * len(self._slos)

    def add(self, record: RequestRecord) -> bool:
        """Count a request that ended; True once the level is sure to miss an SLO."""
        spec = self._spec
        if self._leaves_out and is_at_start(record, spec):
            return False
        for place, slo in enumerate(self._slos):
            value_ms = math.inf
            if record.ok:
                value_ms = request_ms(record, slo.metric, open_loop=spec.load.is_open) or 0.0
            self._seen[place] += value_ms if slo.statistic == "mean" else value_ms > slo.limit_ms
        return any(seen > most for seen, most in zip(self._seen, self._most, strict=True))
