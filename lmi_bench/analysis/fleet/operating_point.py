"""The capacity of one copy within its limits: screened in closed form, then simulated.

A prediction's uncertainty is a factor s on time: if all steps take s times longer, the latency at
rate r is s times the predicted one at rate r * s. So the plan holds each SLO below its limit, and a
capacity's interval is the capacity divided and multiplied by s.

    held = lone + (limit - lone) / slope        up to ROOM * s * lone
    held = limit / s                            above

with `lone`, the latency of a lone request. A stricter limit never leaves more room.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lmi_bench.analysis.fit.uncertainty import TimeFactors
from lmi_bench.analysis.level.layouts import CopyPlan
from lmi_bench.analysis.level.queueing import QueueRun
from lmi_bench.analysis.level.steady_state import SteadyState, bisect
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.quantiles import FloatArray, counted_quantile
from lmi_bench.analysis.results.slo_results import requests_needed
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo
from lmi_bench.core.units import s_to_ms
from lmi_bench.core.workload import LevelSpec

_SEARCH_STEPS = 30
_CLOSE = 0.98  # ratio of neighbouring rates: the noise of the arrivals is no finer
_LOWEST_STEP = 340  # 0.1 % of the highest rate, for limits near the latency of a lone request
_CLOSED_FORM_STEPS, _MOST_STEPS = 5, 160  # above: the closed form's error of 10 %, and 25 times
_NEAR_SATURATION = 0.97
_LARGEST_SIMULATED_BATCH = 128
_SETTLED_REQUESTS = 3000  # a queue near saturation forgets slowly


@dataclass(frozen=True, slots=True)
class Operating:
    """The load of a copy: requests each second and mean number of running sequences."""

    rate_per_s: float
    batch: float


def worst_ratio(latency_s: Callable[[str, str], float], slos: Sequence[Slo]) -> float:
    """Largest predicted / limit over the SLOs; above 1 one of them is missed. 0 without SLOs."""
    return max((s_to_ms(latency_s(slo.metric, slo.statistic)) / slo.limit_ms for slo in slos), default=0.0)


def closed_ratio(steady: SteadyState, slos: Sequence[Slo], batch: float) -> float:
    """`worst_ratio` of a mean batch in closed form."""
    return worst_ratio(lambda metric, stat: steady.latency_s(metric, stat, batch), slos)


def alone_of(steady: SteadyState) -> SteadyState:
    """The copy with one user: a batch of 1 is then exactly one request."""
    return replace(steady, open_loop=False)


def screen_batch(steady: SteadyState, slos: Sequence[Slo]) -> float:
    """Largest mean batch that keeps the SLOs, in closed form; 0 if none does."""
    most = steady.batch_at(_NEAR_SATURATION * steady.saturated_rate_per_s)
    if not steady.open_loop:
        most = float(steady.slots)
    if closed_ratio(steady, slos, most) <= 1:
        return most
    return bisect(lambda b: closed_ratio(steady, slos, b) <= 1, 0.0, most, _SEARCH_STEPS)[0]


@dataclass(frozen=True, slots=True)
class CopySimulation:
    """Simulated levels of one copy, each load once (a cache, not compared).

    With speculation and for users, batches above 128 are left to the closed form: they vary little,
    and a level that fills them takes seconds to simulate.
    """

    plan: CopyPlan
    slos: Sequence[Slo]
    seed: int
    _seen: dict[float, "Latencies | None"] = field(init=False, repr=False, compare=False, default_factory=dict)

    def at_rate(self, rate_per_s: float) -> "Latencies | None":
        """Latencies under random arrivals, without the ramp; None: see the class."""
        if rate_per_s not in self._seen:
            self._seen[rate_per_s] = self._run_rate(rate_per_s)
        return self._seen[rate_per_s]

    def under(self, load: Load) -> "Latencies | None":
        """`at_rate`, or latencies of users with evenly spread starts; None: see the class."""
        if load.rate_per_s is not None:
            return self.at_rate(load.rate_per_s)
        users = int(load.value)
        if users > _LARGEST_SIMULATED_BATCH:
            return None
        spec, steady = LevelSpec(0, load, num_requests=4 * users), self.plan.steady
        level = self.plan.simulate(spec, seed=self.seed, spacing_s=1 / steady.rate_per_s(users))
        return Latencies.of(level.records[users : 3 * users], open_loop=False)

    def sustained_rate(self, guess_per_s: float, slos: Sequence[Slo], *, most_share: float | None = None) -> float:
        """Highest rate of a grid that keeps the SLOs under a fixed draw of arrivals; 0 if none.

        most_share  limit of the rate, as a share of the saturated rate in closed form; None: as
                    long as answers keep up with arrivals
        """
        if guess_per_s <= 0:
            return 0.0
        saturated = self.plan.steady.saturated_rate_per_s
        most = min(_NEAR_SATURATION, most_share or 1.0) * saturated
        # one grid for all limits, to share levels, with the highest allowed rate on top
        grid = [_NEAR_SATURATION * saturated * _CLOSE**step for step in range(_LOWEST_STEP + 1)]
        rates = [most, *(rate for rate in grid if rate < most * (1 - 1e-9))]
        kept = self._highest(rates, slos, guess_per_s)
        if kept < most or most_share is not None or self.plan.workload.speculation:
            return kept
        steps = _CLOSED_FORM_STEPS
        while steps < _MOST_STEPS and self._carries(most / _CLOSE**steps, slos):
            steps *= 2
        if steps == _CLOSED_FORM_STEPS:
            return kept
        beyond = [most / _CLOSE**step for step in range(steps, steps // 2 - 1, -1)]
        return self._highest(beyond, slos, beyond[len(beyond) // 2])

    def _highest(self, falling: Sequence[float], slos: Sequence[Slo], guess_per_s: float) -> float:
        """The highest of the rates that keeps the SLOs, looked for from the guess; 0 if none."""
        rates = falling[::-1]
        kept, missed, stride = -1, len(rates), 1
        at = max(0, bisect_right(rates, guess_per_s * (1 + 1e-9)) - 1)
        while kept + 1 < missed:
            carries = self._carries(rates[at], slos)
            kept, missed = (at, missed) if carries else (kept, at)
            stride *= 2
            at += stride if carries else -stride
            if not kept < at < missed:
                at = (kept + missed) // 2
        return rates[kept] if kept >= 0 else 0.0

    def _carries(self, rate_per_s: float, slos: Sequence[Slo]) -> bool:
        """Whether the SLOs are kept; beyond saturation in closed form, with no growing queue."""
        steady, observed = self.plan.steady, self.at_rate(rate_per_s)
        if observed is None:
            return closed_ratio(steady, slos, steady.batch_at(rate_per_s)) <= 1
        if worst_ratio(observed.statistic_s, slos) > 1:
            return False
        return rate_per_s <= steady.saturated_rate_per_s or observed.keeps_up(rate_per_s)

    def _run_rate(self, rate_per_s: float) -> "Latencies | None":
        ramp_requests = math.ceil(self.plan.steady.batch_at(rate_per_s))  # by Little's law
        if self.plan.workload.speculation is None:
            run = self.plan.follow(rate_per_s, ramp_requests + _SETTLED_REQUESTS, seed=self.seed)
            return Latencies.of_run(run, ramp_requests)
        if ramp_requests > _LARGEST_SIMULATED_BATCH:
            return None
        number = max(120, 3 * ramp_requests, ramp_requests + requests_needed(self.slos))
        spec = LevelSpec(0, Load(rate_per_s=rate_per_s), num_requests=number)
        level = self.plan.simulate(spec, seed=self.seed)
        return Latencies.of(level.records[ramp_requests:], open_loop=True)


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """Latencies of simulated requests, with the definitions of measured ones.

    values      of each metric in seconds
    gap_counts  how often each value of `itl` occurs; None: once
    """

    values: Mapping[str, FloatArray]
    gap_counts: FloatArray | None = None

    @classmethod
    def of(cls, records: Sequence[RequestRecord], *, open_loop: bool) -> "Latencies":
        """The statistics of single requests."""
        columns = columns_of(records)
        names = ("ttft", "itl", "tpot", "e2e", "latency_per_token")
        return cls({name: columns.values_s(name, open_loop=open_loop)[0] for name in names})

    @classmethod
    def of_run(cls, run: QueueRun, ramp_requests: int) -> "Latencies":
        """The statistics of a followed copy without its first requests."""
        settled = slice(ramp_requests, None)
        ttft_s, e2e_s, tokens = run.ttft_s[settled], run.e2e_s[settled], run.output_tokens[settled]
        late = run.gap_end_s > run.sent_s[ramp_requests]
        several = tokens > 1
        return cls(
            {
                "ttft": ttft_s,
                "itl": run.gap_s[late],
                "tpot": (e2e_s - ttft_s)[several] / (tokens[several] - 1),
                "e2e": e2e_s,
                "latency_per_token": e2e_s / tokens,
            },
            run.gap_count[late],
        )

    def keeps_up(self, rate_per_s: float) -> bool:
        """Whether answers do not take longer and longer under that rate of arrivals."""
        e2e_s = self.values["e2e"]
        quarter = e2e_s.size // 4
        grown_s = float(e2e_s[-quarter:].mean() - e2e_s[quarter : 2 * quarter].mean())
        return grown_s <= (1 - _NEAR_SATURATION) * 2 * quarter / rate_per_s

    def statistic_s(self, metric: str, statistic: str) -> float:
        """One statistic in seconds; 0 where no request has the metric (a single token's ITL)."""
        values = self.values[metric]
        if not values.size:
            return 0.0
        counts = self.gap_counts if metric == "itl" else None
        if statistic == "mean":
            return float(np.average(values, weights=counts))
        if counts is None:
            return float(np.quantile(values, QUANTILES[statistic]))
        return counted_quantile(values, counts, QUANTILES[statistic])


ROOM = 1.3


def held_limit(limit: float, lone: float, factor: float) -> float:
    """The limit to plan with: continuous and increasing in `limit`, never above it.

    >>> held_limit(30.0, 10.0, 1.5), held_limit(10.0, 10.0, 1.5), held_limit(9.0, 10.0, 1.5)
    (20.0, 10.0, 9.0)
    """
    if limit <= lone:
        return limit
    if limit >= ROOM * factor * lone:
        return limit / factor
    return lone + (limit - lone) * (ROOM - 1) / (ROOM * factor - 1)


def held_slos(steady: SteadyState, slos: Sequence[Slo], factors: TimeFactors) -> tuple[Slo, ...]:
    """The SLOs with the limits to plan with."""
    alone = alone_of(steady)

    def held(slo: Slo) -> Slo:
        lone_ms = s_to_ms(alone.latency_s(slo.metric, slo.statistic, 1.0))
        return replace(slo, limit_ms=held_limit(slo.limit_ms, lone_ms, factors.of(slo.metric)))

    return tuple(map(held, slos))
