"""Search for the highest load that meets all SLOs, in few endpoint-minutes.

A noisy curve of measured / limit goes through all levels (`slo_curve`); the next level is where
the curve is expected to reach 1. The search ends once two levels at most 5 % apart lie on either
side. Far from the limit a level is a probe with few requests; it is a full level where its verdict
would close the bracket. An end of the bracket is settled by as many requests, its own and its near
neighbours', as a verdict needs, or by the certainty of the curve.

Rates get full levels once there is a bracket, as long as a queue needs to grow: arrivals 5 % above
the capacity add 50 ms of waiting each second, which shows in a p90 only once nine tenths of the
level have used up the slack of an idle server.

The search is a pure function of the finished levels' lines, whose `search` holds the judgement
(`slo_results`), so a resumed search continues unchanged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmi_bench.analysis.results.quantiles import central_interval
from lmi_bench.analysis.results.repeats import steady_lines
from lmi_bench.analysis.results.slo_results import requests_needed
from lmi_bench.analysis.search.slo_curve import Bracket, SloCurve, Trial, bracket, by_load, trial
from lmi_bench.core.findings import SloAnswer, whole
from lmi_bench.core.level import QUANTILES, Level
from lmi_bench.core.load import LoadAxis
from lmi_bench.core.slo import Slo
from lmi_bench.core.units import ms_to_s
from lmi_bench.core.workload import LevelSizes, LevelSpec

TOLERANCE = 0.05
"""Relative width of the bracket at which the search ends."""
_STEP = math.log1p(TOLERANCE)  # in log load

_FAR = 0.25  # measured / limit, or its inverse, below which a stride may be the longest
_LONG_STRIDE, _STRIDE, _SHORTEST_STRIDE = 4.0, 2.0, 1.5
_PROBE_PER_USER, _MIN_PROBE = 2, 4
_MIN_OPEN_PROBE = 20
_PROBE_SPAN, _FULL_SPAN = 3.0, 10.0  # lengths of an open-loop level, in answers of the lowest load
_LONGEST_GROWTH_S = 300.0  # of an open-loop level that waits for a queue to show
_WAITING = ("ttft", "e2e", "latency_per_token")  # metrics that include the wait in the queue
_TWICE = 1.0  # the excess that a probe shows
_CERTAIN = 0.95
_MAX_LEVELS = 40
_LOOK_BEYOND = math.log(2.0)
_CLIFF_JUMP, _CLIFF_GROWTH = 1.5, 8.0
BOUNDARY_CONFIDENCE = 0.95
START_USERS = 4.0
"""First number of users: a single user's answers, one after the other, take longest of all."""

Lines = Sequence[Level]


@dataclass(frozen=True, slots=True)
class SloSearch:
    """Where to search; `next_level` is the rule.

    sizes        requests a level; at least as many as the SLOs' quantiles need
    """

    axis: LoadAxis
    slos: tuple[Slo, ...]
    sizes: LevelSizes
    start: float = START_USERS
    least: float = 1.0
    most: float = 4096.0

    def next_level(self, finished: Lines) -> LevelSpec | None:
        """The level to run after the finished ones; None when the boundary is known."""
        if len(finished) >= _MAX_LEVELS:
            return None
        if not finished:
            return self._probe_level(self.start, finished)
        trials = self.trials(finished)
        found = bracket(trials)
        if found.high is None:
            return self._seek_above(trials, finished)
        if found.low is None:
            return self._seek_below(found.high, finished)
        if self._are_close(found.low.load, found.high.load):
            return self._confirm(found.low, found.high, trials, finished)
        return self._between(found.low, found.high, trials, finished)

    def trials(self, finished: Lines) -> list[Trial]:
        """The loads tried so far, in increasing order."""
        lines = steady_lines(finished)
        return by_load([trial(one, self._full_requests(one.load.value, finished)) for one in lines])

    def first_breach(self, finished: Lines) -> float | None:
        """Lowest load tried that misses an SLO, judged together with its neighbours."""
        high = bracket(self.trials(finished)).high
        return None if high is None else high.load

    def _are_close(self, low: float, high: float) -> bool:
        """Whether a bracket is as narrow as required, or as whole users allow."""
        if self.axis == "concurrency" and high - low <= 1:
            return True
        return high <= low * (1 + TOLERANCE) * (1 + 1e-4)

    def _seek_above(self, trials: Sequence[Trial], finished: Lines) -> LevelSpec | None:
        """Go up to where half of the curves through the trials have reached the limit."""
        last = trials[-1]
        if last.load >= self.most:
            return None if last.full else self._full_level(last.load, finished)
        expected = math.exp(_crossing(trials, math.log(2 * _LONG_STRIDE)) - last.log_load)
        # beyond capacity an open loop's queue grows without end, so it is approached slowly
        slowly = self.axis == "rate_per_s" and last.judgement.ratio > _FAR
        longest = _STRIDE if slowly else _LONG_STRIDE
        stride = min(longest, max(_SHORTEST_STRIDE, expected))
        return self._probe_level(min(self.most, last.load * stride), finished)

    def _seek_below(self, high: Trial, finished: Lines) -> LevelSpec | None:
        if high.load <= self.least:
            if high.full or high.judgement.sure:
                return None
            return self._full_level(high.load, finished)
        stride = _LONG_STRIDE if high.judgement.ratio > 1 / _FAR else _STRIDE
        return self._probe_level(max(self.least, high.load / stride), finished)

    def _between(self, low: Trial, high: Trial, trials: Sequence[Trial], finished: Lines) -> LevelSpec:
        """A level inside the bracket, at or near the place where the curve reaches the limit.

        It is a full level where the expected verdict would close the bracket.
        """
        width = high.log_load - low.log_load
        place = width / 2
        if not self._was_poor(width, finished):
            place = min(width, max(0.0, _crossing(trials) - low.log_load))
        reached = low.load * math.exp(place)
        closes_below = place <= _STEP
        if closes_below:
            place = min(_STEP, width / 2)
        elif width - place <= _STEP:
            place = width - min(_STEP, width / 2)
        load = low.load * math.exp(place)
        if self.axis == "concurrency":
            rounded = math.floor(load + 1e-9) if closes_below else round(load)
            load = min(max(rounded, low.load + 1), high.load - 1)
        closes = self._are_close(load, high.load) or (self._are_close(low.load, load) and reached <= load)
        if closes or self.axis == "rate_per_s":
            return self._full_level(load, finished)
        return self._probe_level(load, finished)

    def _was_poor(self, width: float, finished: Lines) -> bool:
        """Whether the last two levels narrowed the bracket by less than half."""
        before = bracket(self.trials(finished[:-2]))
        if before.low is None or before.high is None:
            return False
        return width > 0.5 * (before.high.log_load - before.low.log_load)

    def _confirm(self, low: Trial, high: Trial, trials: Sequence[Trial], finished: Lines) -> LevelSpec | None:
        """A full level at an end of the closed bracket that has too few requests."""
        crossings = SloCurve(trials).crossings()
        beyond_low = float((crossings >= low.log_load).mean())
        within_high = float((crossings <= high.log_load).mean())
        for end, chance in ((low, beyond_low), (high, within_high)):
            if not self._is_settled(end, chance, trials, finished):
                return self._full_level(end.load, finished)
        # noise may close a bracket in the wrong place: the curve, which uses all levels, shows it
        crossing = float(crossings[len(crossings) // 2])
        if low.log_load - _STEP <= crossing <= high.log_load + _STEP:
            return None
        load = math.exp(min(trials[-1].log_load, max(trials[0].log_load, crossing)))
        if self.axis == "concurrency":
            load = round(load)
        known = any(one.full and abs(one.log_load - math.log(load)) < _STEP / 2 for one in trials)
        return None if known else self._full_level(load, finished)

    def _is_settled(self, end: Trial, chance: float, trials: Sequence[Trial], finished: Lines) -> bool:
        """Whether an end's verdict needs no further requests.

        chance  that the verdict is right, by the curve; counts once a quantile is known at all
        """
        needed = self._full_requests(end.load, finished)
        if end.full or needed is None or (end.judgement.sure and not end.judgement.passed):
            return True
        if self.axis == "rate_per_s" and end.judgement.passed:
            return False  # a probe ends before a queue shows
        near = [one for one in trials if abs(one.log_load - end.log_load) <= _STEP * (1 + 1e-3)]
        requests = sum(one.requests for one in near)
        return requests >= needed or (chance >= _CERTAIN and requests >= requests_needed(self.slos))

    def _probe_level(self, load: float, finished: Lines) -> LevelSpec:
        full = self._full_requests(load, finished)
        if self.axis == "concurrency":
            load = max(1, round(load))
            few = max(_MIN_PROBE, load * _PROBE_PER_USER)
        else:
            few = max(_MIN_OPEN_PROBE, math.ceil(load * self._span_s(finished, _PROBE_SPAN, _TWICE)))
        return self._level(load, few if full is None else min(few, full), finished)

    def _full_level(self, load: float, finished: Lines) -> LevelSpec:
        return self._level(load, self._full_requests(load, finished), finished)

    def _level(self, load: float, num_requests: int | None, finished: Lines) -> LevelSpec:
        # five digits are far finer than the tolerance, and easy to read
        return self.sizes.level(len(finished), self.axis, float(f"{load:.5g}"), num_requests)

    def _full_requests(self, load: float, finished: Lines) -> int | None:
        """Requests of a level that gives a verdict; None where its duration alone ends it."""
        asked = self.sizes.requests(self.axis, load)
        if asked is None:
            return None
        needed = max(asked, requests_needed(self.slos))
        if self.axis == "rate_per_s" and self.sizes.requests_per_level is None:
            # a level shorter than some answers would end before its excess load shows
            needed = max(needed, math.ceil(load * self._span_s(finished, _FULL_SPAN, TOLERANCE)))
        return needed

    def _span_s(self, finished: Lines, answers: float, excess: float) -> float:
        """Seconds of a level: of so many mean answers at the lowest load tried, and so long that a
        queue whose arrivals exceed the capacity by `excess` breaks an SLO.

        The wait at a time t of the level is excess * t; a quantile q misses the limit once the
        wait, at q of the level, exceeds the slack that the lowest load tried has.
        """
        lowest = _lowest(finished)
        answer_ms = 0.0 if lowest is None else lowest.of("e2e").mean or 0.0
        return max(answers * ms_to_s(answer_ms), min(_LONGEST_GROWTH_S, self._slack_s(finished) / excess))

    def _slack_s(self, finished: Lines) -> float:
        """Seconds of waiting by the end of a level that break an SLO; 0 where waiting breaks none.

        A rate that passed may exceed the capacity by this share of the level's length.
        """
        idle, slacks_s = _lowest(finished), []
        if idle is None:
            return 0.0
        for slo in self.slos:
            mean_ms = idle.of(slo.metric).mean
            if slo.metric in _WAITING and mean_ms:
                slack_ms = max(0.0, slo.limit_ms - mean_ms)
                if slo.metric == "latency_per_token":  # a wait is spread over the tokens
                    slack_ms *= (idle.of("e2e").mean or 0.0) / mean_ms
                slacks_s.append(ms_to_s(slack_ms) / QUANTILES.get(slo.statistic, 0.5))
        return min(slacks_s, default=0.0)

    def surely_carried(self, low: Trial, finished: Lines) -> float:
        """A load that passed, less the excess that its level was too short to show (open loop)."""
        if self.axis == "concurrency":
            return low.load
        return low.load / (1 + self._slack_s(finished) * low.load / low.requests)


def _crossing(trials: Sequence[Trial], reach: float = 0.0) -> float:
    """The median log load at which the curves through the trials reach the limit."""
    crossings = SloCurve(trials).crossings(reach)
    return float(crossings[len(crossings) // 2])


def _lowest(finished: Lines) -> Level | None:
    return min(finished, key=lambda line: line.load.value, default=None)


def slo_answer(search: SloSearch, levels: Lines, *, seed: int = 0) -> SloAnswer:
    """What the levels of a search show; its endpoint seconds leave out warm-ups.

    The interval is that of the load at which measured / limit becomes 1: the middle 95 % of the
    crossings of the curves (`slo_curve`), and never narrower than the bracket itself.
    """
    trials = search.trials(levels)
    found = bracket(trials)
    high = None if found.high is None else found.high.load
    low = None if high is None else 0.0
    if found.low is not None:
        low = search.surely_carried(found.low, levels)
        if high is not None:  # from below the lowest load tried (then 0) to twice the highest
            crossings = SloCurve(trials).crossings(_LOOK_BEYOND, seed=seed)
            first, last = central_interval(crossings, BOUNDARY_CONFIDENCE)
            last = min(last, trials[-1].log_load + _LOOK_BEYOND)
            low, high = min(low, math.exp(first)), max(math.exp(last), high)
    ends = [None if end is None else end.load for end in (found.low, found.high)]
    if search.axis == "concurrency":
        ends = [None if load is None else whole(load) for load in ends]
    at = found.high or found.low
    return SloAnswer(
        slo=[str(slo) for slo in search.slos],
        load=search.axis,
        value=ends[0],
        low=low,
        high=high,
        first_breach=ends[1],
        binding=None if at is None else at.judgement.binding,
        boundary=_boundary(found),
        endpoint_seconds=math.fsum(line.wall_s or 0.0 for line in levels),
    )


def _boundary(found: Bracket) -> str | None:
    if found.low is None or found.high is None:
        return None
    if not math.isfinite(found.high.judgement.ratio):
        return "cliff"
    jump = found.high.judgement.ratio / found.low.judgement.ratio
    growth = math.log(jump) / math.log(found.high.load / found.low.load)
    return "cliff" if jump > _CLIFF_JUMP and growth > _CLIFF_GROWTH else "smooth"
