"""The load that is put on a target, and the one way in which it is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmi_bench.core.errors import InputError

ArrivalProcess = Literal["constant", "poisson", "gamma", "trace"]
LoadAxis = Literal["concurrency", "rate_per_s"]


@dataclass(frozen=True, slots=True)
class Load:
    """Users that each wait for their answer (closed loop), or requests at a rate (open loop).

    Exactly one of `concurrency` and `rate_per_s` is given.

    arrivals    of an open loop; with "trace" each request holds its own arrival time
    burstiness  of gamma arrivals: 1 is Poisson, below it they come in bursts, above it evenly
    ramp_s      an open loop's rate rises from 0 over these first seconds
    sessions    users or arrivals are conversations of several turns, a request each

    levels.jsonl keeps the first two and whether there were sessions: the arrivals of a level that
    was read back are those of its run's scenario.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    ramp_s: float = 0.0
    sessions: bool = False

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise InputError("a level has either a concurrency or a rate_per_s")
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.rate_per_s is not None and self.rate_per_s <= 0:
            raise InputError(f"rate_per_s must be above 0, got {self.rate_per_s:g}")
        if self.burstiness <= 0 or self.ramp_s < 0:
            raise InputError(
                f"burstiness must be above 0 and ramp_s at least 0, got {self.burstiness:g} and "
                f"{self.ramp_s:g}"
            )

    @property
    def is_open(self) -> bool:
        """Whether requests are due by the clock, however long answers take."""
        return self.concurrency is None

    @property
    def axis(self) -> LoadAxis:
        """Which of the two is given; also the name of its key in the files."""
        return "rate_per_s" if self.concurrency is None else "concurrency"

    @property
    def value(self) -> float:
        """Users, or requests per second."""
        value = self.rate_per_s if self.concurrency is None else self.concurrency
        assert value is not None  # checked when the load was made
        return float(value)

    def on(self, axis: str) -> float | None:
        """The value where the load is of this kind, else None."""
        return self.value if axis == self.axis else None

    @property
    def name(self) -> str:
        """How people name the load: `concurrency 8`, `2.5 req/s`, `2 sessions/s`."""
        if self.sessions and self.is_open:
            return f"{self.value:g} sessions/s"
        return load_name(self.axis, self.value)


def load_name(axis: str, value: float) -> str:
    """A load as a sentence names it, on an axis of its own: `concurrency 8`, `2.5 req/s`."""
    return f"concurrency {value:g}" if axis == "concurrency" else f"{value:g} req/s"
