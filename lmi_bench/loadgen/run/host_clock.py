"""Another host's clock, as an interval: how far its CLOCK_MONOTONIC is ahead of ours.

A ping leaves at our time s, is read at their time t, and its answer is read at our time r. The
offset (theirs - ours) is then between t - r and t - s, however long either way took: no symmetry is
assumed. Intervals of several pings are intersected; between them the known one widens, since two
clocks drift apart by at most `MAX_DRIFT`. An answer outside it shows that a clock has stepped.
"""

import math

MAX_DRIFT = 1e-3
"""Seconds a second: kernels let time services slew a clock by 500 ppm, and there are two clocks."""


class HostClock:
    """The offset of one host's clock in seconds; `shared`: it is our own clock."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self._low_s, self._high_s = (0.0, 0.0) if shared else (-math.inf, math.inf)
        self._known_at_s = 0.0
        self._used_s = 0.0
        self.error_s = 0.0
        self.round_trip_s = 0.0

    def begin_level(self) -> float:
        """The offset to use for a level: the middle of what is known. Resets `error_s`."""
        self._used_s = 0.0 if self.shared else (self._low_s + self._high_s) / 2
        self.error_s = self._distance_s()
        return self._used_s

    def add(self, sent_s: float, at_s: float, read_s: float) -> float:
        """Add a ping; returns by how much the clock has stepped at least, 0.0 if it need not have.

        `error_s` becomes the largest error that the level's offset may have had so far.
        """
        if self.shared:
            return 0.0
        self.round_trip_s = read_s - sent_s
        drift_s = MAX_DRIFT * (read_s - self._known_at_s)
        low_s, high_s = self._low_s - drift_s, self._high_s + drift_s
        seen_low_s, seen_high_s = at_s - read_s, at_s - sent_s
        step_s = max(0.0, seen_low_s - high_s, low_s - seen_high_s)
        if step_s:
            low_s, high_s = seen_low_s, seen_high_s
        self._low_s, self._high_s = max(low_s, seen_low_s), min(high_s, seen_high_s)
        self._known_at_s = read_s
        self.error_s = max(self.error_s, self._distance_s())
        return step_s

    def _distance_s(self) -> float:
        """Largest distance of the offset in use from what is known now."""
        return max(self._high_s - self._used_s, self._used_s - self._low_s)
