"""Search for the highest load that meets all SLOs, in few endpoint-minutes.

First a bracket, with levels of few requests and strides that grow with the distance from the limit;
then the load at which measured / limit becomes 1 is interpolated (log over log), and a level just
beyond it closes the bracket to 5 %; where the ratio jumps (a full batch, a full cache) the bracket
is halved instead. Users are looked at with few requests a level; the end that passed is confirmed
with enough, and so is the end that failed unless its miss is sure. A rate gets whole levels once
there is a bracket, since a queue takes its time to grow. A pure function of the finished levels'
lines, whose `search` holds the judgement (`slo_judgement`): a resumed search goes on as it would
have gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.level_sizes import LevelSizes, LoadAxis
from lmi_bench.analysis.slo_judgement import Judgement, requests_needed
from lmi_bench.slo import Slo
from lmi_bench.units import ms_to_s
from lmi_bench.workload import LevelSpec

SEARCH_KEY = "search"
TOLERANCE = 0.05
"""Relative width of the bracket at which the search ends."""

_FAR = 0.25  # measured / limit below which the stride is the longest
_LONG_STRIDE, _STRIDE, _SHORTEST_STRIDE = 4.0, 2.0, 1.25
_OVERSHOOT = 1.1  # aimed beyond the predicted boundary, to have it in the bracket
_PROBE_PER_USER, _MIN_PROBE = 2, 4
_MIN_OPEN_PROBE = 20
_PROBE_SPAN, _FULL_SPAN = 3.0, 10.0  # lengths of an open-loop level, in answers of the lowest load
_FLAT = 0.05  # growth per growth of the load below which nothing can be extrapolated
_CURVATURE, _SURPRISE = 2.0, 1.2  # a smooth curve may steepen so much within a bracket
_MAX_LEVELS = 40
START_USERS = 4.0
"""First number of users: the lone user's answers, one after the other, take longest of all."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A load that was tried. `full`: with the requests that a verdict needs."""

    load: float
    judgement: Judgement
    full: bool

    @property
    def passed(self) -> bool:
        """Whether all SLOs were met."""
        return self.judgement.passed

    @property
    def settled(self) -> bool:
        """Whether no further requests are needed to believe it."""
        return self.full or self.judgement.sure

    @property
    def ratio(self) -> float:
        """Largest of measured / limit."""
        return self.judgement.ratio


@dataclass(frozen=True, slots=True)
class Bracket:
    """Highest load that passed and lowest that did not; None where there is none yet."""

    low: Trial | None
    high: Trial | None


@dataclass(frozen=True, slots=True)
class SloSearch:
    """Where and how finely to search; `next_level` is the rule.

    start        first load
    least, most  loads beyond which nothing is tried
    sizes        requests a level; at least as many as the SLOs' quantiles need
    """

    axis: LoadAxis
    slos: tuple[Slo, ...]
    sizes: LevelSizes
    start: float = START_USERS
    least: float = 1.0
    most: float = 4096.0
    tolerance: float = TOLERANCE

    def next_level(self, finished: Sequence[Mapping[str, Any]]) -> LevelSpec | None:
        """The level to run after the finished ones; None when the boundary is known."""
        if len(finished) >= _MAX_LEVELS:
            return None
        trials = self.trials(finished)
        found = bracket(trials)
        if found.high is None:
            return self._seek_above(found.low, trials, finished)
        if found.low is None:
            return self._seek_below(found.high, finished)
        if not self.is_closed(found):
            load = self._between(found.low, found.high, trials, finished)
            if self.axis == "rate_per_s" or self._are_close(load, found.high.load):
                return self._full_level(load, finished)  # a pass there is the answer
            return self._probe_level(load, finished)
        for end in (found.low, found.high):
            if not end.settled:
                return self._full_level(end.load, finished)
        return None

    def trials(self, finished: Sequence[Mapping[str, Any]]) -> list[Trial]:
        """The loads tried so far, rising; a full level outranks one of few requests."""
        by_load: dict[float, Trial] = {}
        for line in finished:
            judgement = Judgement.from_dict(line[SEARCH_KEY])
            load = float(line[self.axis])
            needed = self._full_requests(load, finished)
            full = needed is None or judgement.planned is None or judgement.planned >= needed
            known = by_load.get(load)
            if known is None or full or not known.full:
                by_load[load] = Trial(load, judgement, full)
        return [by_load[load] for load in sorted(by_load)]

    def is_closed(self, found: Bracket) -> bool:
        """Whether the bracket is as narrow as asked, or as whole users allow."""
        if found.low is None or found.high is None:
            return False
        return self._are_close(found.low.load, found.high.load)

    def _are_close(self, low: float, high: float) -> bool:
        if self.axis == "concurrency" and high - low <= 1:
            return True
        return high <= low * (1 + self.tolerance) * (1 + 1e-4)

    def _seek_above(
        self,
        low: Trial | None,
        trials: Sequence[Trial],
        finished: Sequence[Mapping[str, Any]],
    ) -> LevelSpec | None:
        if low is None:
            return self._probe_level(self.start, finished)
        if low.load >= self.most:
            return None if low.full else self._full_level(low.load, finished)
        return self._probe_level(min(self.most, low.load * _stride(trials)), finished)

    def _seek_below(self, high: Trial, finished: Sequence[Mapping[str, Any]]) -> LevelSpec | None:
        if high.load <= self.least:
            return None if high.settled else self._full_level(high.load, finished)
        far = not math.isfinite(high.ratio) or high.ratio > 1 / _FAR
        stride = _LONG_STRIDE if far else _STRIDE
        return self._probe_level(max(self.least, high.load / stride), finished)

    def _between(
        self,
        low: Trial,
        high: Trial,
        trials: Sequence[Trial],
        finished: Sequence[Mapping[str, Any]],
    ) -> float:
        """A load inside the bracket: the predicted boundary, or its far side to close in on it."""
        width = math.log(high.load / low.load)
        share = 0.5
        jumps = _jumps(low, high, trials)
        if not jumps and low.ratio > 0 and not self._was_poor(width, finished):
            share = -math.log(low.ratio) / math.log(high.ratio / low.ratio)
        step = math.log1p(self.tolerance)
        place = share * width
        if jumps:
            pass  # its place says nothing of the boundary, so there is no side to close in on
        elif place <= step:
            place = min(step, width / 2)
        elif width - place <= step:
            place = width - min(step, width / 2)
        load = low.load * math.exp(place)
        if self.axis == "concurrency":
            rounded = math.floor(load + 1e-9) if place <= step * (1 + 1e-9) else round(load)
            return min(max(rounded, low.load + 1), high.load - 1)
        return load

    def _was_poor(self, width: float, finished: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the last level, meant to narrow the bracket, left more than half of it."""
        before = bracket(self.trials(finished[:-1]))
        if before.low is None or before.high is None:
            return False
        return width > 0.5 * math.log(before.high.load / before.low.load)

    def _probe_level(self, load: float, finished: Sequence[Mapping[str, Any]]) -> LevelSpec:
        full = self._full_requests(load, finished)
        few: int | None = None
        if self.axis == "concurrency":
            load = max(1, round(load))
            few = max(_MIN_PROBE, load * _PROBE_PER_USER)
        else:
            answer_s = _answer_s(finished)
            few = max(_MIN_OPEN_PROBE, math.ceil(load * answer_s * _PROBE_SPAN))
        return self._level(load, few if full is None else min(few, full), finished)

    def _full_level(self, load: float, finished: Sequence[Mapping[str, Any]]) -> LevelSpec:
        return self._level(load, self._full_requests(load, finished), finished)

    def _level(
        self, load: float, num_requests: int | None, finished: Sequence[Mapping[str, Any]]
    ) -> LevelSpec:
        # a rate as a person would write it: five digits are far finer than the tolerance
        return self.sizes.level(len(finished), self.axis, float(f"{load:.5g}"), num_requests)

    def _full_requests(self, load: float, finished: Sequence[Mapping[str, Any]]) -> int | None:
        """Requests of a level that gives a verdict; None where its duration alone ends it."""
        asked = self.sizes.requests(self.axis, load)
        if asked is None:
            return None
        needed = max(asked, requests_needed(self.slos))
        if self.axis == "rate_per_s" and self.sizes.requests_per_level is None:
            # shorter than some answers, a level beyond capacity would end before it is felt
            needed = max(needed, math.ceil(load * _answer_s(finished) * _FULL_SPAN))
        return needed


def _jumps(low: Trial, high: Trial, trials: Sequence[Trial]) -> bool:
    """Whether the ratio rises within the bracket as its rise below it does not foretell."""
    if not math.isfinite(high.ratio) or low.ratio <= 0:
        return True
    before = [trial for trial in trials if trial.load < low.load and trial.ratio > 0]
    if not before:
        return False
    growth = math.log(low.ratio / before[-1].ratio) / math.log(low.load / before[-1].load)
    steepest = _CURVATURE * max(growth, _FLAT)
    foretold: float = low.ratio * (high.load / low.load) ** steepest
    return high.ratio > _SURPRISE * foretold


def bracket(trials: Sequence[Trial]) -> Bracket:
    """Lowest failed load, and the highest one below it that passed."""
    high = next((trial for trial in trials if not trial.passed), None)
    below = [t for t in trials if t.passed and (high is None or t.load < high.load)]
    return Bracket(below[-1] if below else None, high)


def _stride(trials: Sequence[Trial]) -> float:
    """Factor to the next load above: towards where measured / limit is predicted to reach 1."""
    last = trials[-1]
    longest = _LONG_STRIDE if last.ratio < _FAR else _STRIDE
    if len(trials) < 2:
        return longest
    before = trials[-2]
    if min(before.ratio, last.ratio) <= 0:
        return longest
    growth = math.log(last.ratio / before.ratio) / math.log(last.load / before.load)
    if growth < _FLAT:
        return longest
    predicted = math.exp(-math.log(last.ratio) / growth) * _OVERSHOOT
    return min(longest, max(_SHORTEST_STRIDE, predicted))


def _answer_s(finished: Sequence[Mapping[str, Any]]) -> float:
    """Mean time of an answer at the lowest load tried, seconds; 0 where none came."""
    lowest = min(finished, key=lambda line: float(line["rate_per_s"] or 0), default=None)
    mean = None if lowest is None else (lowest.get("e2e_ms") or {}).get("mean")
    return 0.0 if mean is None else ms_to_s(mean)
