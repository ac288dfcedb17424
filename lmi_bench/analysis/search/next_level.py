"""Levels chosen during the sweep: doubled until the server is saturated, then finer at the knee.

A rule is a pure function of the finished levels' lines, so a resumed sweep continues unchanged.
The doubling ends where the server is saturated (twice the users gain less than 5 % throughput
while the latency doubles), where an SLO is broken, or where requests fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lmi_bench.analysis.results.knee import kneedle_index
from lmi_bench.analysis.results.slo_results import check_slo
from lmi_bench.analysis.results.sweep_curve import sweep_curve
from lmi_bench.core.level import Level, NextLevel
from lmi_bench.core.load import ArrivalProcess, Load, LoadAxis
from lmi_bench.core.slo import Slo
from lmi_bench.core.workload import LevelSpec

Fits = Callable[[LevelSpec, Sequence[Level]], bool]
"""Whether a level may be run after the finished ones."""

OPEN_LOOP_REQUESTS = 100
MAX_CONCURRENCY = 4096
SATURATED_GAIN = 0.05
"""Throughput gain of a doubling below which the server is saturated."""
DOUBLED_LATENCY = 1.8
"""Growth of the latency that counts as a doubling; by Little's law it is 2 / (1 + gain)."""
LATENCY_LIMIT_MS_PER_TOKEN = 100.0

_FAILED_BY = ("timeout", "errors")


@dataclass(frozen=True, slots=True)
class LevelSizes:
    """The load section of a scenario without its loads, for rules that choose them.

    requests_per_user   closed loop: requests of a level over its concurrency
    requests_per_level  requests of every level; overrides requests_per_user
    duration_s          a level sends nothing after this time
    as_sessions         makes a level's requests turns of conversations, where they are
    """

    requests_per_user: int = 3
    requests_per_level: int | None = None
    duration_s: float | None = None
    warmup_requests: int = 1
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    ramp_s: float = 0.0
    max_in_flight: int | None = None
    as_sessions: Callable[[LevelSpec], LevelSpec] | None = None

    def requests(self, axis: LoadAxis, load: float) -> int | None:
        """Requests of a level at a load; None where its duration alone ends it."""
        if self.requests_per_level is not None:
            return self.requests_per_level
        if self.duration_s is not None:
            return None
        if axis == "concurrency":
            return int(load) * self.requests_per_user
        return OPEN_LOOP_REQUESTS

    def level(self, index: int, axis: LoadAxis, load: float, num_requests: int | None) -> LevelSpec:
        """A level at a load."""
        by_concurrency = axis == "concurrency"
        spec = LevelSpec(
            index=index,
            load=Load(
                concurrency=int(load) if by_concurrency else None,
                rate_per_s=None if by_concurrency else load,
                arrivals=self.arrivals,
                burstiness=self.burstiness,
                ramp_s=0.0 if by_concurrency else self.ramp_s,
            ),
            num_requests=num_requests,
            duration_s=self.duration_s,
            warmup_requests=self.warmup_requests,
            max_in_flight=self.max_in_flight,
        )
        return spec if self.as_sessions is None else self.as_sessions(spec)


def auto_levels(
    sizes: LevelSizes,
    *,
    slos: Sequence[Slo] = (),
    max_concurrency: int = MAX_CONCURRENCY,
    fits: Fits = lambda _spec, _finished: True,
) -> NextLevel:
    """The rule behind `--concurrency auto`.

    sizes  requests and seconds of each level
    slos   the doubling ends at the first level that breaks one of them
    fits   whether a level may still be run: the doubling ends before one that may not; of the finer
           levels those that fit are run. A level that did not fit once never fits later.
    """

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        lines = {line.load.concurrency or 0: line for line in finished}
        chain: list[Level] = []
        concurrency = 1
        while concurrency <= max_concurrency:
            if concurrency not in lines:
                spec = level(len(finished), concurrency)
                if fits(spec, finished):
                    return spec
                break
            chain.append(lines[concurrency])
            if _ends_doubling(chain, slos):
                break
            concurrency *= 2
        finer = (level(len(finished), c) for c in _finer_levels(chain) if c not in lines)
        return next((spec for spec in finer if fits(spec, finished)), None)

    def level(index: int, concurrency: int) -> LevelSpec:
        number = sizes.requests("concurrency", concurrency)
        return sizes.level(index, "concurrency", concurrency, number)

    return next_level


def _ends_doubling(chain: Sequence[Level], slos: Sequence[Slo]) -> bool:
    last = chain[-1]
    return (
        last.stopped_by in _FAILED_BY
        or any(check_slo(last, slo).verdict == "fail" for slo in slos)
        or (last.search is not None and last.search.sure)  # even with few requests
        or (len(chain) > 1 and is_saturated(chain[-2], last))
    )


def is_saturated(before: Level, after: Level) -> bool:
    """Whether twice the users gave hardly more throughput and twice the latency."""

    def ratio(value: Callable[[Level], float | None]) -> float:
        return (value(after) or math.nan) / (value(before) or math.nan)

    gain = ratio(lambda level: level.throughput_tokens_per_s) - 1
    return gain < SATURATED_GAIN and ratio(lambda level: level.of("e2e").mean) >= DOUBLED_LATENCY


def _finer_levels(chain: Sequence[Level]) -> list[int]:
    """Levels half-way on both sides of the bend, and below a limit that was exceeded; rising."""
    highest = (chain[-1].load.concurrency or 0) if chain else 0
    points = sweep_curve(chain).usable
    wanted: set[int] = set()
    if len(points) >= 3:
        loads = np.array([point.load for point in points])
        throughput = np.array([point.throughput_tokens_per_s or 0.0 for point in points])
        bend = kneedle_index(np.log2(loads), throughput)
        if bend is not None:
            wanted |= {int(loads[bend] * 3 / 4), int(loads[bend] * 3 / 2)}
    slow = [p.load for p in points if (p.latency_ms_per_token or 0) > LATENCY_LIMIT_MS_PER_TOKEN]
    if slow:
        wanted.add(int(slow[0] * 3 / 4))
    if chain and chain[-1].stopped_by in _FAILED_BY:
        wanted.add(highest * 3 // 4)
    return sorted(c for c in wanted if 1 < c < highest)
