"""What a job says while it works. The command line shows it, a library's caller may ignore it."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Hears of the work as it goes on; the result itself is what the job returns."""

    def note(self, text: str) -> None:
        """A remark on what is going on."""

    def step(self, text: str) -> None:
        """A part of the work is done; needless where a progress line is seen."""

    def warn(self, text: str) -> None:
        """A warning: the result is less than was asked for."""

    def progress(self, description: str, done: float, total: float | None) -> None:
        """How far the work is; `total` is None where it is not known."""


class Silent:
    """A listener that ignores everything."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def step(self, text: str) -> None:
        """Ignore it."""

    def warn(self, text: str) -> None:
        """Ignore it."""

    def progress(self, description: str, done: float, total: float | None) -> None:
        """Ignore it."""


SILENT = Silent()
