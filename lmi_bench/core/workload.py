"""Requests, arrivals, users and levels, as rules over numbers.

The load generator applies them on a real clock, the simulator on its own, so both send the same
requests by the same rules.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import ArrivalProcess, Load, LoadAxis

LEAST_REQUESTS, USUAL_REQUESTS_PER_USER = 32, 3
"""Requests of a closed loop's level where none are stated: a p90 needs 29 answers."""
OPEN_LOOP_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request before it is sent.

    arrival_s         due time, seconds after the level's start; 0.0 in a closed loop, where a
                      request is due when its user is free
    input_tokens      prompt length; output_tokens: length to generate
    prompt_token_ids  prompt for targets that take token ids; empty: the target needs lengths only
    prompt_text       the same prompt as text, for targets that take text
    messages          (role, text) of a conversation so far, for targets that take messages; empty:
                      the prompt is the first message
    session, turn     conversation number and turn within it, from 0
    of_turns          number of requests that its conversation sends in this level; 0: not known
    adapter           adapter of the model that it asks for
    """

    request_id: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    prompt_token_ids: Sequence[int] = ()
    prompt_text: str = ""
    ignore_eos: bool = True
    messages: Sequence[tuple[str, str]] = ()
    session: int | None = None
    turn: int = 0
    of_turns: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise InputError(
                f"request {self.request_id}: input_tokens and output_tokens must be at least 1, "
                f"got {self.input_tokens} and {self.output_tokens}"
            )


@dataclass(frozen=True, slots=True)
class LevelSpec:
    """One level of a sweep: a fixed load, and its end.

    At least one of `num_requests` and `duration_s` is given.

    repeat         number of earlier runs of the level: same lengths, other prompts and arrivals
    num_sessions   conversations, for a load of sessions; None: the duration ends the level
    max_sessions   maximum concurrent conversations of an open loop
    start_requests  number of first requests of a closed loop's users, part of `num_requests`: sent
                    at once, they wait for each other, so latencies leave them out
    """

    index: int
    load: Load
    num_requests: int | None = None
    duration_s: float | None = None
    warmup_requests: int = 0
    repeat: int = 0
    num_sessions: int | None = None
    max_sessions: int | None = None
    max_in_flight: int | None = None
    start_requests: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise InputError("a level needs a number of requests or a duration_s")
        if self.num_requests is not None and self.num_requests < 1:
            raise InputError(f"a level needs at least 1 request, got {self.num_requests}")
        if self.duration_s is not None and self.duration_s <= 0:
            raise InputError(f"duration_s must be above 0, got {self.duration_s:g}")

    @property
    def counted_requests(self) -> int | None:
        """Requests that latencies count; None where the duration alone ends the level."""
        if self.num_requests is None:
            return None
        return self.num_requests - self.left_out_of(self.num_requests)

    def left_out_of(self, sent: int) -> int:
        """Requests of the start that are left out of `sent` ones; 0 if too few would be left."""
        return self.start_requests if sent >= 2 * self.start_requests else 0

    @property
    def concurrency(self) -> int | None:
        """Users of a closed loop."""
        return self.load.concurrency

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second of an open loop."""
        return self.load.rate_per_s


def of_sessions(
    spec: LevelSpec, num_turns: Callable[[int], int], *, num_sessions: int | None, max_sessions: int | None = None
) -> LevelSpec:
    """The level with conversations instead of single requests.

    num_turns     turns of a conversation, by its number
    num_sessions  number of conversations; None: enough to send the level's requests, the last one
                  complete
    """
    count, requests = 0, 0
    if num_sessions is not None:
        count, requests = num_sessions, sum(map(num_turns, range(num_sessions)))
    elif spec.num_requests is not None:
        while requests < spec.num_requests:
            requests += num_turns(count)
            count += 1
    return replace(
        spec,
        load=replace(spec.load, sessions=True),
        num_sessions=count or None,
        num_requests=requests or None,
        max_sessions=max_sessions,
    )


def with_start(spec: LevelSpec) -> LevelSpec:
    """A closed loop's level with one more request for each user, whose first is in no latency.

    Fewer requests than users are too few to leave any out.
    """
    users, number = spec.concurrency, spec.num_requests
    if users is None:
        return spec
    if number is not None and number >= users:
        number += users
    return replace(spec, start_requests=users, num_requests=number)


@dataclass(frozen=True, slots=True)
class LevelSizes:
    """The load section of a scenario without its loads: what a level at each of them has.

    requests_per_user   closed loop: requests of a level over its concurrency; None: 3, and at
                        least 32 in all
    requests_per_level  requests of every level; overrides requests_per_user
    duration_s          a level sends nothing after this time
    as_sessions         makes a level's requests turns of conversations, where they are
    """

    requests_per_user: int | None = None
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
        if axis != "concurrency":
            return OPEN_LOOP_REQUESTS
        if self.requests_per_user is not None:
            return int(load) * self.requests_per_user
        return max(LEAST_REQUESTS, int(load) * USUAL_REQUESTS_PER_USER)  # as many as a p90 needs

    def level(self, index: int, axis: LoadAxis, load: float, num_requests: int | None) -> LevelSpec:
        """A level at a load; num_requests: those that count."""
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
        spec = with_start(spec)
        return spec if self.as_sessions is None else self.as_sessions(spec)


@dataclass(slots=True, kw_only=True)
class ClosedLoop:
    """The order of requests in a closed loop: a user sends again as soon as its answer has ended.

    Users share one numbered supply of requests. A user stops when the supply is used up or the
    level's time is over. Every number handed out is sent, unless a cap made its user wait until
    the level was stopped.
    """

    concurrency: int
    num_requests: int | None
    duration_s: float | None = None
    is_stopped: bool = field(default=False, init=False)
    _next_index: int = field(default=0, init=False)

    def next_index(self, now_s: float) -> int | None:
        """The number of the request to send `now_s` seconds after the start; None to stop."""
        if self.is_stopped:
            return None
        if self.num_requests is not None and self._next_index >= self.num_requests:
            return None
        if self.duration_s is not None and now_s >= self.duration_s:
            return None
        index = self._next_index
        self._next_index += 1
        return index

    def stop(self) -> None:
        """Hand out no more requests: a stop rule was met."""
        self.is_stopped = True


def arrival_times_s(
    load: Load, *, seed: int, num_requests: int | None = None, duration_s: float | None = None
) -> Iterator[float]:
    """Seconds after the start at which an open loop's requests are due; a trace has its own.

    constant  the i-th is due at i / rate
    poisson   gaps are independent and exponential with mean 1 / rate; the first gap counts, too
    gamma     gaps are independent and gamma with mean 1 / rate and shape `burstiness`: their
              coefficient of variation is burstiness ** -0.5

    ramp_s    the rate rises linearly from 0 over these seconds: time is stretched so that the
              requests due by t are those that a steady rate has after t ** 2 / (2 ramp_s)

    Ends after `num_requests` or before `duration_s`, whichever comes first.
    """
    rate_per_s, ramp_s = load.value, load.ramp_s
    draw = random.Random(seed)
    steady_s = 0.0
    index = 0
    while num_requests is None or index < num_requests:
        if load.arrivals == "constant":
            steady_s = index / rate_per_s
        elif load.arrivals == "poisson":
            steady_s += draw.expovariate(rate_per_s)
        else:
            steady_s += draw.gammavariate(load.burstiness, 1 / (rate_per_s * load.burstiness))
        at_s = steady_s + ramp_s / 2
        if steady_s < ramp_s / 2:
            at_s = float((2 * ramp_s * steady_s) ** 0.5)
        if duration_s is not None and at_s >= duration_s:
            return
        yield at_s
        index += 1
