"""Whether a level was steady: the part without ramp and drain, a step, and pauses."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmi_bench.core.json_value import JsonValue


@dataclass(frozen=True, slots=True)
class SteadyWindow(JsonValue):
    """The steady window of a level, and its throughput.

    throughput_tokens_per_s  None, with `reason`, if no window was found
    low, high                95 % interval of the throughput by batch means, tok/s
    share                    length of the window over the length of all token events, 0 to 1
    """

    start_s: float | None = None
    end_s: float | None = None
    throughput_tokens_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    share: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SpeedStep(JsonValue):
    """A moment from which on the time between tokens, or that to the first one, was another one.

    at_s    seconds since the level's start
    change  of that time, as a share: 0.2 is 20 % slower
    of      `itl` or `ttft`
    """

    at_s: float
    change: float
    of: str = "itl"


@dataclass(frozen=True, slots=True)
class Pauses(JsonValue):
    """Moments in which no stream that was decoding had a token; at_s: the starts of the ten longest."""

    number: int
    total_s: float
    longest_ms: float
    at_s: Sequence[float]
