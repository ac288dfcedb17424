"""How long a sweep may take: levels that would not be over in time are left out.

A rule that picks its levels (`--concurrency auto`) has no end of its own that a person could know,
so it has five minutes on a real clock unless told otherwise. A level is judged before it begins, by
the levels before it; one that has begun runs to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.run.levels import NextLevel

AUTO_S = 300.0
"""Of levels that a rule picks, on a real clock."""
_MINUTE_S = 60.0
_Line = Mapping[str, Any]


class TimeBox:
    """Follows a sweep's time: one for each sweep, from its first question on.

    max_s  None: no limit
    note   told once of the first level that is left out
    """

    def __init__(
        self,
        max_s: float | None,
        *,
        note: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_s = max_s
        self._note = note
        self._clock = clock
        self._start_s: float | None = None
        self._noted = False

    def left_s(self) -> float | None:
        """Seconds that are left, none below 0; None where there is no limit."""
        if self.max_s is None:
            return None
        if self._start_s is None:
            self._start_s = self._clock()
        return max(0.0, self.max_s - (self._clock() - self._start_s))

    def fits(self, spec: LevelSpec, finished: Sequence[_Line]) -> bool:
        """Whether a level will probably be over in time; the first one always is begun."""
        left_s = self.left_s()
        if left_s is None or not finished:
            return True
        likely_s = likely_level_s(spec, finished)
        if likely_s <= left_s:
            return True
        if not self._noted:
            self._noted = True
            self._note(
                f"left out {spec.load.name}: it would take about {clock_text(likely_s)}, and "
                f"{clock_text(left_s)} of {clock_text(self.max_s or 0.0)} are left; --resume with "
                "a longer --max-time goes on"
            )
        return False

    def levels(self, rule: NextLevel) -> NextLevel:
        """The rule's levels, up to the first that does not fit."""

        def next_level(finished: Sequence[_Line]) -> LevelSpec | None:
            spec = rule(finished)
            return spec if spec is None or self.fits(spec, finished) else None

        return next_level


def likely_level_s(spec: LevelSpec, finished: Sequence[_Line]) -> float:
    """How long a level will probably take, by what the levels of less load took; 0.0 if unknown.

    A closed loop's requests end at the rate of the level below it, times what the last step up
    gained (twice the users bring at most twice the rate, and none fewer).
    """
    if spec.num_requests is None or spec.concurrency is None:
        known_s = spec.duration_s or 0.0
        if not known_s and spec.num_requests is not None and spec.rate_per_s is not None:
            known_s = spec.num_requests / spec.rate_per_s
        return known_s
    rates: dict[int, float] = {}
    for line in finished:
        users, wall_s = line.get("concurrency"), line.get("wall_s")
        if users and wall_s and users <= spec.concurrency:
            rates[int(users)] = float(line["requests"]) / float(wall_s)
    if not rates:
        return spec.duration_s or 0.0
    below, *lower = sorted(rates, reverse=True)
    gain = 1.0
    if lower and below < spec.concurrency:
        gain = min(2.0, max(1.0, rates[below] / rates[lower[0]]))
    likely_s = spec.num_requests / (rates[below] * gain)
    return min(likely_s, spec.duration_s or likely_s)


def read_max_time(text: str) -> float | None:
    """Seconds of `90`, `90s`, `10m` or `1h`, None of `none`; InputError where it is neither.

    >>> read_max_time("10m")
    600.0
    """
    if text == "none":
        return None
    units = {"s": 1.0, "m": _MINUTE_S, "h": 60 * _MINUTE_S}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"--max-time: {text!r} is no time; write 90, 90s, 10m, 1h or none")
    return seconds


def clock_text(seconds: float) -> str:
    """Minutes and seconds, as a clock shows them.

    >>> clock_text(312.4)
    '5:12'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
