"""The load on a target, and its name."""

from dataclasses import dataclass
from typing import Literal

from lmi_bench.core.errors import InputError

ArrivalProcess = Literal["constant", "poisson", "gamma", "trace"]
LoadAxis = Literal["concurrency", "rate_per_s"]
LEAST_PER_S, MOST = 1e-12, 10**9  # requests a second; users or requests a second


@dataclass(frozen=True, slots=True)
class Load:
    """Users that each wait for their answer (closed loop), or requests at a rate (open loop).

    Exactly one of `concurrency` and `rate_per_s` is given.

    concurrency   users; without a think time also the requests in flight
    think_time_s  seconds between an answer and the same user's next request; None: none is
                  stated, and the next request follows at once
    arrivals      of an open loop; with "trace" each request has its own arrival time
    burstiness    shape of gamma arrivals: 1 is Poisson, a lower value is more bursty
    ramp_s        an open loop's rate rises from 0 over these first seconds
    sessions      users or arrivals are conversations of several turns, one request each

    levels.jsonl keeps the load's value and whether there were sessions: the arrivals of a level
    that was read back are those of its run's scenario.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    ramp_s: float = 0.0
    sessions: bool = False
    think_time_s: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise InputError("a level has either a concurrency or a rate_per_s")
        if self.concurrency is not None and not 1 <= self.concurrency <= MOST:
            raise InputError(f"concurrency must be 1 to {MOST:,}, got {self.concurrency}")
        if self.rate_per_s is not None and not LEAST_PER_S <= self.rate_per_s <= MOST:
            raise InputError(f"rate_per_s must be {LEAST_PER_S} to 1e9, got {self.rate_per_s:g}")
        if self.burstiness <= 0 or self.ramp_s < 0:
            raise InputError(
                f"burstiness must be above 0 and ramp_s at least 0, got {self.burstiness:g} and {self.ramp_s:g}"
            )
        if self.think_time_s is not None and (self.is_open or self.think_time_s < 0):
            raise InputError(
                f"a think time of 0 s or more belongs to users, not to a rate, got {self.think_time_s:g} s"
            )

    @property
    def is_open(self) -> bool:
        """Whether requests are due at fixed times, however long answers take."""
        return self.concurrency is None

    @property
    def axis(self) -> LoadAxis:
        """The given one of the two; also the key in the files."""
        return "rate_per_s" if self.concurrency is None else "concurrency"

    @property
    def value(self) -> float:
        """Users, or requests per second."""
        value = self.rate_per_s if self.concurrency is None else self.concurrency
        assert value is not None  # checked when the load was made
        return float(value)

    def on(self, axis: str) -> float | None:
        """The value if the load has this axis, else None."""
        return self.value if axis == self.axis else None

    @property
    def name(self) -> str:
        """Name of the load for people: `concurrency 8`, `2.5 req/s`, `2 sessions/s`."""
        if self.sessions and self.is_open:
            return f"{self.value:g} sessions/s"
        if self.think_time_s is not None:
            return f"{self.concurrency} users, {self.think_time_s:g} s think time"
        return load_name(self.axis, self.value)

    @property
    def description(self) -> str:
        """The name; of a rate also how the requests arrive: `2.5 req/s, Poisson`."""
        if not self.is_open:
            return self.name
        bursts = "in bursts " if self.burstiness < 1 else ""
        shown = {"poisson": "Poisson", "gamma": f"{bursts}(gamma, {self.burstiness:g})"}
        return f"{self.name}, {shown.get(self.arrivals, self.arrivals)}"


def load_name(axis: str, value: float) -> str:
    """Name of a load from its axis and value: `concurrency 8`, `2.5 req/s`."""
    return f"concurrency {value:g}" if axis == "concurrency" else f"{value:g} req/s"
