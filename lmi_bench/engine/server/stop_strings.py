"""Finds stop strings in streamed text.

A stop string may span tokens, so text that could be the start of one is held back until the next
piece decides. The output does not depend on where the pieces were cut: the match that completes
first wins, and of two that end together the longer one.
"""

from __future__ import annotations


class StopStringFilter:
    """Returns text until a stop string is complete; drops what follows, and the stop string too
    unless `keep` is set."""

    def __init__(self, stop_strings: tuple[str, ...], *, keep: bool = False) -> None:
        self._stop_strings = stop_strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can be sent now; sets `matched` when a stop string is complete."""
        if not self._stop_strings:
            return text
        window = self._held + text
        start, end = len(window), len(window) + 1
        for stop in self._stop_strings:
            at = window.find(stop)
            if at >= 0 and (at + len(stop), at) < (end, start):
                start, end, self.matched = at, at + len(stop), stop
        if self.matched is not None:
            self._held = ""
            return window[: end if self._keep else start]
        keep = max(_overlap(window, stop) for stop in self._stop_strings)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """The text held back, after the last piece."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
