"""Whether a level meets its SLOs, by how much, and when that is certain before it has ended.

The ratio of a level is the largest of measured / limit over its SLOs: 1 is the boundary. A failed
request counts as endless. Unlike `goodput.check_slo` a judgement is made for any number of
requests: a search first looks with few, then confirms with enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lmi_bench.analysis.results.latency import request_latency, samples_needed
from lmi_bench.analysis.results.slo_values import (
    level_statistic_ms,
    log_noise,
    own_values_ms,
    request_values_ms,
)
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import QUANTILES, Judgement
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.slo import Slo

DECIDED = "decided"
"""`stopped_by` of a level that was cut short because it misses its SLOs whatever comes."""
SURE_CHANCE = 0.01
MISSED_BY = ("timeout", "errors", DECIDED)


def judge_level(run: LevelRun, slos: Sequence[Slo]) -> Judgement:
    """Hold a level against its SLOs; a level that a stop rule ended has missed them.

    Raises InputError where no request has the metric at all.
    """
    open_loop = run.spec.load.is_open
    ratio, binding = slo_ratio(run.records, slos, open_loop=open_loop)
    noise = _noise(run.records, binding, open_loop=open_loop)
    missed = run.stopped_by in MISSED_BY
    if missed and ratio <= 1:  # what would have been slow never ended
        ratio = math.inf
    passed = not missed and ratio <= 1
    sure = not passed and any(_is_sure_miss(run, slo) for slo in slos)
    return Judgement(passed, ratio, str(binding), run.spec.num_requests, sure, noise)


def _noise(records: Sequence[RequestRecord], slo: Slo, *, open_loop: bool) -> float:
    values = request_values_ms(records, slo.metric, open_loop=open_loop, failures="infinite")
    return log_noise(np.concatenate(values), slo.statistic, samples=len(values))


def _is_sure_miss(run: LevelRun, slo: Slo) -> bool:
    """Whether chance alone hardly puts so many requests over an SLO's limit.

    What a level that was cut short did not send counts as fast. Gaps between tokens depend on each
    other, and a mean has no count: neither is ever sure.
    """
    if slo.statistic not in QUANTILES or slo.metric == "itl":
        return False
    values = request_values_ms(
        run.records, slo.metric, open_loop=run.spec.load.is_open, failures="infinite"
    )
    over = sum(float(value[0]) > slo.limit_ms for value in values)
    of = max(len(values), run.spec.num_requests or 0)
    from scipy.special import bdtrc  # 0.2 s to load

    chance = float(bdtrc(over - 1, of, 1 - QUANTILES[slo.statistic])) if over else 1.0
    return chance < SURE_CHANCE


def slo_ratio(
    records: Sequence[RequestRecord], slos: Sequence[Slo], *, open_loop: bool
) -> tuple[float, Slo]:
    """Largest of measured / limit over the SLOs, and the SLO that has it."""
    worst = (-math.inf, slos[0])
    for slo in slos:
        measured = level_statistic_ms(
            records, slo.metric, slo.statistic, open_loop=open_loop, failures="infinite"
        )
        if measured is None:
            raise InputError(
                f"SLO {slo}: no request of {len(records)} has this metric; ask for more output "
                "tokens, or state an SLO on another metric"
            )
        worst = max(worst, (measured / slo.limit_ms, slo), key=lambda found: found[0])
    return worst


def requests_needed(slos: Sequence[Slo]) -> int:
    """Requests that the SLOs' quantiles need before they can be told at all."""
    return max(
        (samples_needed(QUANTILES[s.statistic]) for s in slos if s.statistic in QUANTILES),
        default=1,
    )


class CertainMiss:
    """Follows a level's answers and says when no further answer can save its SLOs.

    A quantile is lost once more requests are over the limit than may lie above it, a mean once the
    sum is. Gaps between tokens (`itl`) are pooled over requests of unknown lengths: never certain.
    """

    def __init__(self, slos: Sequence[Slo], num_requests: int, *, open_loop: bool) -> None:
        self._slos = [slo for slo in slos if slo.metric != "itl"]
        self._num_requests = num_requests
        self._open_loop = open_loop
        self._over = [0] * len(self._slos)
        self._sum_ms = [0.0] * len(self._slos)

    def add(self, record: RequestRecord) -> bool:
        """Count a request that ended; whether the level's miss is certain now."""
        latency = request_latency(record, open_loop=self._open_loop) if record.ok else None
        certain = False
        for place, slo in enumerate(self._slos):
            if latency is None:
                value_ms = math.inf
            else:
                own = own_values_ms(latency, slo.metric)
                value_ms = float(own[0]) if own.size else 0.0
            self._over[place] += value_ms > slo.limit_ms
            self._sum_ms[place] += value_ms
            certain |= self._is_lost(place, slo)
        return certain

    def _is_lost(self, place: int, slo: Slo) -> bool:
        n = self._num_requests
        if slo.statistic == "mean":
            return self._sum_ms[place] > slo.limit_ms * n
        # of n ordered values the quantile lies at or above the one of this index
        index = math.floor(QUANTILES[slo.statistic] * (n - 1))
        return self._over[place] >= n - index
