"""Messages of a running job; the command line shows them, a library's caller may ignore them."""

from typing import Protocol


class Listener(Protocol):
    """Receives messages while a job runs; the job returns its result separately."""

    def note(self, text: str) -> None:
        """A note about the work in progress."""

    def step(self, text: str) -> None:
        """A part of the work is done; redundant if a progress line is shown."""

    def warn(self, text: str) -> None:
        """A warning: the result is less than requested."""

    def progress(self, description: str, done: float, total: float | None) -> None:
        """The amount of work done; `total` None: unknown."""


class Silent:
    """A listener that ignores everything."""

    def note(self, *args: object, **named: object) -> None:
        """Ignore it."""

    step = warn = progress = note


SILENT = Silent()
