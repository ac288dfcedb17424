"""Levels picked as the sweep goes: doubling until the server is full, then finer round the knee.

A rule is a pure function of the finished levels' lines, so a resumed sweep goes on as it would
have gone. The doubling ends where the server is saturated (a doubling of the users gains less than
5 % throughput while the latency doubles), where an SLO is broken, or where requests fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lmi_bench.analysis.results.knee import kneedle_index
from lmi_bench.analysis.results.slo_results import check_slo
from lmi_bench.analysis.results.sweep_curve import sweep_curve
from lmi_bench.analysis.search.level_sizes import LevelSizes
from lmi_bench.core.level import Level, NextLevel
from lmi_bench.core.slo import Slo
from lmi_bench.core.workload import LevelSpec

Fits = Callable[[LevelSpec, Sequence[Level]], bool]
"""Whether a level may be run after the finished ones."""

MAX_CONCURRENCY = 4096
SATURATED_GAIN = 0.05
"""Throughput gain of a doubling below which the server is full."""
DOUBLED_LATENCY = 1.8
"""Growth of the latency that counts as a doubling; by Little's law it is 2 / (1 + gain)."""
LATENCY_LIMIT_MS_PER_TOKEN = 100.0

_FAILED_BY = ("timeout", "errors")


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
    fits   says whether a level may still be run: the doubling ends before one that may not, and
           the finer levels that may are run all the same. What once did not fit never will again.
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
    if last.stopped_by in _FAILED_BY:
        return True
    if any(check_slo(last, slo).verdict == "fail" for slo in slos):
        return True
    if (
        last.search is not None and last.search.sure
    ):  # too few requests for the quantile, all the same
        return True
    return len(chain) > 1 and is_saturated(chain[-2], last)


def is_saturated(before: Level, after: Level) -> bool:
    """Whether twice the users brought hardly more throughput and twice the latency."""
    gain = _throughput(after) / _throughput(before) - 1
    growth = _mean_e2e_ms(after) / _mean_e2e_ms(before)
    return bool(gain < SATURATED_GAIN and growth >= DOUBLED_LATENCY)


def _finer_levels(chain: Sequence[Level]) -> list[int]:
    """Half-way levels on both sides of the bend, and where a limit was passed; rising."""
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


def _throughput(level: Level) -> float:
    return level.throughput_tokens_per_s or float("nan")


def _mean_e2e_ms(level: Level) -> float:
    return level.of("e2e").mean or float("nan")
