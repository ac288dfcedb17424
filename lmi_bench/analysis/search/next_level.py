"""Levels chosen during the sweep: doubled until the server is saturated, then finer at the knee.

A rule is a pure function of the finished levels' lines, so a resumed sweep continues unchanged.
The doubling ends where the server is saturated (two doublings in a row gain less than 5 %
throughput while the latency doubles), where an SLO is broken, or where requests fail. The levels
that show it are measured again first: one noisy level ends nothing. If none was, the level with
the most throughput is measured again, since two attempts show how noisy the target is.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from lmi_bench.analysis.results.knee import bend_index
from lmi_bench.analysis.results.slo_results import check_slo
from lmi_bench.analysis.results.sweep_curve import sweep_curve, work_per_s
from lmi_bench.core.level import Level, NextLevel
from lmi_bench.core.slo import Slo
from lmi_bench.core.workload import LevelSizes, LevelSpec

Fits = Callable[[LevelSpec, Sequence[Level]], bool]
"""Whether a level may be run after the finished ones."""
Shortened = Callable[[LevelSpec, Sequence[Level]], LevelSpec]

Lines = Sequence[Sequence[Level]]

MAX_CONCURRENCY = 4096
SATURATED_GAIN = 0.05
"""Throughput gain of a doubling below which the server is saturated."""
DOUBLED_LATENCY = 1.5
"""Growth of the mean latency that counts as a doubling: 2 / (1 + gain) by Little's law, and less in
a level of few rounds, whose first answers came to fewer waiting users."""
LATENCY_LIMIT_MS_PER_TOKEN = 100.0

_FAILED_BY = ("timeout", "errors")


def auto_levels(
    sizes: LevelSizes,
    *,
    slos: Sequence[Slo] = (),
    max_concurrency: int = MAX_CONCURRENCY,
    fits: Fits = lambda _spec, _finished: True,
    shortened: Shortened = lambda spec, _finished: spec,
) -> NextLevel:
    """The rule behind `--concurrency auto`.

    slos   the doubling ends at the first level that breaks one of them
    fits   whether a level may still be run: the doubling ends before one that may not; of the finer
           levels those that fit are run. A level that did not fit once never fits later.
    shortened  a level as short as the time demands, unless `sizes` states its requests
    """

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        spec = next((each for each in wanted(finished) if fits(each, finished)), None)
        stated = sizes.requests_per_level or sizes.requests_per_user
        return spec if spec is None or stated else shortened(spec, finished)

    def wanted(finished: Sequence[Level]) -> Iterator[LevelSpec]:
        """The levels that may follow; the first that fits does."""
        tried: dict[int, list[Level]] = defaultdict(list)
        for line in finished:
            tried[line.load.concurrency or 0].append(line)
        chain: list[list[Level]] = []
        concurrency = 1
        while concurrency <= max_concurrency:
            if concurrency not in tried:
                yield level(len(finished), concurrency)
                break
            chain.append(tried[concurrency])
            deciding = _deciding(chain, slos)
            if deciding is not None:
                yield from (again(lines[0]) for lines in deciding if len(lines) == 1)
                break
            concurrency *= 2
        last = [lines[-1] for lines in chain]
        if last and not slos and all(len(lines) == 1 for lines in tried.values()):
            yield again(max(last, key=lambda line: work_per_s(line) or 0.0))
        yield from (level(len(finished), c) for c in _finer_levels(last) if c not in tried)

    def again(line: Level) -> LevelSpec:
        return replace(level(line.index, line.load.concurrency or 1), repeat=1)

    def level(index: int, concurrency: int) -> LevelSpec:
        number = sizes.requests("concurrency", concurrency)
        return sizes.level(index, "concurrency", concurrency, number)

    return next_level


def _deciding(chain: Lines, slos: Sequence[Slo]) -> Lines | None:
    """The attempts at the levels that end the doubling, to be measured again; None: it goes on.

    chain  attempts at each level
    """
    lines = chain[-1]
    if lines[-1].stopped_by in _FAILED_BY:
        return ()
    judged = [line.search for line in lines if line.search is not None]
    if judged and all(each.sure for each in judged):  # even with few requests
        return ()
    if all(any(check_slo(line, slo).verdict == "fail" for slo in slos) for line in lines):
        return (lines,)
    if len(chain) > 2 and all(is_saturated(*pair) for pair in pairwise(chain[-3:])):
        return (chain[-3], lines)
    return None


def is_saturated(before: Sequence[Level], after: Sequence[Level]) -> bool:
    """Whether twice the users gave hardly more throughput and twice the latency, on average."""

    def mean(lines: Sequence[Level], value: Callable[[Level], float | None]) -> float:
        return fmean(value(line) or math.nan for line in lines)

    def ratio(value: Callable[[Level], float | None]) -> float:
        return mean(after, value) / mean(before, value)

    gain = ratio(work_per_s) - 1
    return gain < SATURATED_GAIN and ratio(lambda level: level.of("e2e").mean) >= DOUBLED_LATENCY


def _finer_levels(chain: Sequence[Level]) -> list[int]:
    """Levels half-way on both sides of the bend, and below a limit that was exceeded; rising."""
    highest = (chain[-1].load.concurrency or 0) if chain else 0
    points = sweep_curve(chain).usable
    wanted: set[int] = set()
    if len(points) >= 3:
        loads = np.array([point.load for point in points])
        throughput = np.array([point.throughput_tokens_per_s or 0.0 for point in points])
        bend = bend_index(loads, throughput)
        if bend is not None:
            wanted |= {int(loads[bend] * 3 / 4), int(loads[bend] * 3 / 2)}
    slow = [p.load for p in points if (p.latency_ms_per_token or 0) > LATENCY_LIMIT_MS_PER_TOKEN]
    if slow:
        wanted.add(int(slow[0] * 3 / 4))
    if chain and chain[-1].stopped_by in _FAILED_BY:
        wanted.add(highest * 3 // 4)
    return sorted(c for c in wanted if 1 < c < highest)
