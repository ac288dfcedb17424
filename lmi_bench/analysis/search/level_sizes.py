"""How large a level is: its requests or its seconds, for rules that pick loads as they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmi_bench.core.load import ArrivalProcess, Load, LoadAxis
from lmi_bench.core.workload import LevelSpec

OPEN_LOOP_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class LevelSizes:
    """The load section of a scenario without its loads.

    requests_per_user   closed loop: a level sends its concurrency times this many
    requests_per_level  requests of every level instead
    duration_s          a level hands out nothing after this long
    as_sessions         makes a level's requests turns of conversations, where they are
    """

    requests_per_user: int = 3
    requests_per_level: int | None = None
    duration_s: float | None = None
    warmup_requests: int = 1
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    ramp_s: float = 0.0
    max_in_flight: int | None = None
    as_sessions: Callable[[LevelSpec], LevelSpec] | None = None

    def requests(self, axis: LoadAxis, load: float) -> int | None:
        """Requests of a level at a load; None where its duration alone ends it."""
        if self.requests_per_level is not None:
            return self.requests_per_level
        if self.duration_s is not None:
            return None
        if axis == "concurrency":
            return int(load) * self.requests_per_user
        return OPEN_LOOP_REQUESTS

    def level(self, index: int, axis: LoadAxis, load: float, num_requests: int | None) -> LevelSpec:
        """A level at a load."""
        by_concurrency = axis == "concurrency"
        spec = LevelSpec(
            index=index,
            load=Load(
                concurrency=int(load) if by_concurrency else None,
                rate_per_s=None if by_concurrency else load,
                arrivals=self.arrivals,
                burstiness=self.burstiness,
                ramp_s=0.0 if by_concurrency else self.ramp_s,
            ),
            num_requests=num_requests,
            duration_s=self.duration_s,
            warmup_requests=self.warmup_requests,
            max_in_flight=self.max_in_flight,
        )
        return spec if self.as_sessions is None else self.as_sessions(spec)
