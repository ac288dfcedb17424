"""A level of equal requests on one copy, computed without the engine's scheduler.

`trace_closed_loop` finds the steps of users that send again at once. They do not depend on the
times of steps, so they are found once, and each set of parameters prices them as arrays: a fit
takes a second. `run_open` and `run_users` process random arrivals, random times outside the engine
and varied output lengths event by event.

Both admit prompts by `admit`, the rule of the rolling scheduler: first come, first served, in steps
that pause decoding or in chunks beside running sequences. `queueing` admits prompts of several
lengths by the same `prompt_part`. With chunks the token limit of a step counts decoding sequences
too, as in vLLM; in `engine.scheduling` and `queueing` it counts prompt tokens only.

Left out of `engine.scheduling`: blocks (a limit on sequences stands for the cache, so nothing is
preempted), the other batching policies, prompts of several lengths, limits on waiting requests,
cancelled requests, and the search of the prefix cache (its hits are given). Runs of equal decode
steps are priced by a few of them. Times agree with the scheduler's (`simulator`) to about 1 %.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.model.step_time import Pricer, StepColumns
from lmi_bench.core.errors import CapacityError

_ROWS_PER_RUN = 4  # the time is linear in the context but for a kink: few rows sum it
_SEED = 20

Admission = tuple[bool, int, int, int, int, float, int]
"""Whether the begun prompt is complete, whole prompts admitted, tokens of the prompt now begun (0:
none); then the step's prompts, prompt tokens, pairs and cached tokens."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Lengths of the requests and the scheduler's limits.

    max_sequences       sequences that cache and engine let run together
    max_prefill_tokens  prompt tokens of one step; with chunks, all tokens of one step
    cached_tokens       tokens of each prompt that the prefix cache holds
    """

    input_tokens: int
    output_tokens: int
    max_sequences: int
    max_prefill_tokens: int
    chunked_prefill: bool
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise CapacityError(
                f"the cache holds no sequence of {self.input_tokens + self.output_tokens} tokens"
            )


def prompt_part(left: int, budget: int, *, may_split: bool) -> int:
    """Tokens of a prompt in a step with `budget` tokens to go: all, what fits, or none.

    left  tokens of the prompt that are not computed
    """
    if left <= budget:
        return left
    return budget if may_split else 0


def admit(limits: CopyLimits, decoding: int, room: int, waiting: int, begun: int) -> Admission:
    """The prompts of the next step.

    decoding  sequences that decode in the same step, within its token limit
    room      further sequences that may run; waiting: number of waiting prompts
    begun     computed tokens of a partly computed prompt, 0 for none
    """
    length, found = limits.input_tokens, limits.cached_tokens
    new, chunked = length - found, limits.chunked_prefill
    budget = max(1, limits.max_prefill_tokens - decoding)
    if not chunked and budget < new:
        budget = new  # a prompt alone may exceed the limit
    prompts = tokens = cached = 0
    pairs, complete = 0.0, False
    if begun:
        tokens = prompt_part(length - begun, budget, may_split=True)
        pairs, cached, prompts = tokens * (begun + (tokens + 1) / 2), begun, 1
        if begun + tokens < length:  # the step is full
            return False, 0, begun + tokens, 1, tokens, pairs, cached
        complete, begun, budget = True, 0, budget - tokens
    whole = min(waiting, room, budget // new)
    if whole:
        tokens += whole * new
        pairs += whole * new * (found + (new + 1) / 2)
        cached += whole * found
        prompts += whole
        budget -= whole * new
    part = prompt_part(new, budget, may_split=chunked) if whole < min(waiting, room) else 0
    if part:
        begun = found + part
        tokens += part
        pairs += part * (found + (part + 1) / 2)
        cached += found
        prompts += 1
    return complete, whole, begun, prompts, tokens, pairs, cached


@dataclass(frozen=True, slots=True, eq=False)
class ClosedLoopSteps:
    """The steps of a closed loop, and its requests as groups, shape (groups,).

    count           requests of the group; sent, first, end: the rows of `columns` after which it
                    was sent, had its first and its last token (-1: the level's start)
    peak_sequences  most sequences that ran together
    """

    columns: StepColumns
    count: NDArray[np.int64]
    sent: NDArray[np.int64]
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    peak_sequences: int


@lru_cache(maxsize=4096)
def trace_closed_loop(limits: CopyLimits, users: int, num_requests: int) -> ClosedLoopSteps:
    """The steps of a closed loop from its first request to its last token."""
    loop = _ClosedLoop(limits, users, num_requests)
    while loop.waiting or loop.groups or loop.begun:
        loop.step()
    return loop.result()


@dataclass(slots=True, eq=False)
class _Group:
    """Sequences with their first token in the same step, which end together."""

    count: int
    sent: int
    first: int
    tokens_left: int


class _ClosedLoop:
    """State of a closed loop between two steps, and the rows of its steps so far."""

    def __init__(self, limits: CopyLimits, users: int, num_requests: int) -> None:
        first_sent = min(users, num_requests)
        self.limits = limits
        self.unsent = num_requests - first_sent
        self.waiting: deque[list[int]] = deque([[-1, first_sent]])  # row of sending, count
        self.num_waiting = first_sent
        self.groups: deque[_Group] = deque()
        self.begun = 0
        self.begun_sent = -1
        self.running = self.context = self.peak = 0
        self.rows: list[tuple[float, float, float, float, float, float, float]] = []
        self.ended: list[tuple[int, int, int, int]] = []

    def step(self) -> None:
        """One step with prompts, or the run of decode steps until sequences end."""
        limits, running = self.limits, self.running
        decoding = running if limits.chunked_prefill else 0
        room = limits.max_sequences - running - (self.begun > 0)
        started: list[tuple[int, int]] = []  # row of sending, count
        if self.begun or (self.num_waiting and room):
            complete, whole, begun, prompts, tokens, pairs, cached = admit(
                limits, decoding, room, self.num_waiting, self.begun
            )
            if complete:
                started.append((self.begun_sent, 1))
            started += self._take(whole)
            if begun and (complete or not self.begun):
                ((self.begun_sent, _),) = self._take(1)
            self.begun = begun
            context = self.context if decoding else 0
            self.rows.append((1, decoding, context, prompts, tokens, pairs, cached))
            steps = 1 if decoding else 0
        else:
            steps = self.groups[0].tokens_left
            self._decode(steps)
        self.context += steps * running
        for group in self.groups:
            group.tokens_left -= steps
        for sent, count in started:
            self.groups.append(_Group(count, sent, len(self.rows) - 1, limits.output_tokens - 1))
            self.running += count
            self.context += count * (limits.input_tokens + 1)
        self.peak = max(self.peak, self.running)
        self._end_groups()

    def _take(self, number: int) -> list[tuple[int, int]]:
        """Take waiting requests, the oldest first: rows of sending and counts."""
        taken = []
        self.num_waiting -= number
        while number:
            head = self.waiting[0]
            part = min(head[1], number)
            taken.append((head[0], part))
            number -= part
            head[1] -= part
            if not head[1]:
                self.waiting.popleft()
        return taken

    def _decode(self, steps: int) -> None:
        """Decode steps of the running sequences, as a few rows."""
        pieces, done = min(steps, _ROWS_PER_RUN), 0
        for piece in range(pieces):
            size = steps * (piece + 1) // pieces - done
            middle = self.context + self.running * (done + (size - 1) / 2)
            self.rows.append((size, self.running, middle, 0, 0, 0, 0))
            done += size

    def _end_groups(self) -> None:
        freed, row = 0, len(self.rows) - 1
        while self.groups and self.groups[0].tokens_left <= 0:
            group = self.groups.popleft()
            self.ended.append((group.count, group.sent, group.first, row))
            freed += group.count
        self.running -= freed
        self.context -= freed * (self.limits.input_tokens + self.limits.output_tokens)
        again = min(freed, self.unsent)
        if again:
            self.unsent -= again
            self.num_waiting += again
            self.waiting.append([row, again])

    def result(self) -> ClosedLoopSteps:
        """The steps as columns."""
        count, sent, first, end = np.array(self.ended).T
        columns = StepColumns(*np.array(self.rows, dtype=np.float64).T)
        return ClosedLoopSteps(columns, count, sent, first, end, self.peak)


@dataclass(frozen=True, slots=True)
class Chance:
    """Random variation of otherwise equal requests.

    overhead_s     mean of the exponential time outside the engine, part of the time to first token
                   (parsing, tokenizing, the network); in a closed loop it breaks up groups
    length_spread  output lengths are uniform between 1 - spread and 1 + spread times the mean
    """

    overhead_s: float = 0.0
    length_spread: float = 0.0

    def delays(self, count: int) -> list[float]:
        """Times outside the engine, scaled to have exactly their mean."""
        drawn = np.random.default_rng(_SEED + 1).exponential(size=count)
        return [float(value) for value in drawn * (self.overhead_s / drawn.mean())]

    def lengths(self, mean: int) -> Iterator[int]:
        """An endless sequence of output lengths."""
        if not self.length_spread:
            yield from itertools.repeat(mean)
        chance = np.random.default_rng(_SEED + 2)
        while True:
            spread = chance.uniform(1 - self.length_spread, 1 + self.length_spread, size=1000)
            for factor in spread:
                yield max(1, round(float(factor) * mean))


NO_CHANCE = Chance()


@dataclass(frozen=True, slots=True, eq=False)
class EqualRun:
    """One copy's requests in the order of their ends, or groups of `count`; shape (groups,).

    wall_s  first send to last token
    """

    count: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    wall_s: float


def even_arrivals(rate_per_s: float, num_requests: int) -> NDArray[np.float64]:
    """Poisson arrivals, scaled so that the last one is at num_requests / rate as in generators."""
    gaps = np.random.default_rng(_SEED).exponential(size=num_requests)
    times = np.cumsum(gaps)
    return np.asarray(times * (num_requests / rate_per_s / times[-1]), dtype=np.float64)


def run_open(
    price: Pricer,
    arrivals_s: Sequence[float] | NDArray[np.float64],
    limits: CopyLimits,
    chance: Chance = NO_CHANCE,
) -> EqualRun:
    """An open loop: requests arrive whether or not earlier ones are answered."""
    delays = chance.delays(len(arrivals_s))
    first = [(float(at) + delay, float(at)) for at, delay in zip(arrivals_s, delays, strict=True)]
    return _run(price, limits, chance, first, lambda _end: None)


def run_users(
    price: Pricer, users: int, num_requests: int, limits: CopyLimits, chance: Chance = NO_CHANCE
) -> EqualRun:
    """A closed loop: users send again when answered, `num_requests` in all."""
    delays = iter(chance.delays(num_requests))
    first = [(next(delays), 0.0) for _ in range(min(users, num_requests))]

    def again(end_s: float) -> tuple[float, float] | None:
        delay = next(delays, None)
        return None if delay is None else (end_s + delay, end_s)

    return _run(price, limits, chance, first, again)


def _run(
    price: Pricer,
    limits: CopyLimits,
    chance: Chance,
    first: list[tuple[float, float]],
    again: Callable[[float], tuple[float, float] | None],
) -> EqualRun:
    """first: when requests reach the engine and when they were sent; again: after an end."""
    isl = limits.input_tokens
    arriving = list(first)
    heapq.heapify(arriving)
    waiting: deque[float] = deque()  # times of sending
    running: list[tuple[int, float, float, int]] = []  # step of the last token, sent, first, length
    lengths = chance.lengths(limits.output_tokens)
    ended: list[tuple[float, float, float]] = []
    now_s, step, rows, context, begun, begun_sent_s = 0.0, 0, 0, 0, 0, 0.0
    while arriving or waiting or rows or begun:
        if not (waiting or rows or begun):
            now_s = max(now_s, arriving[0][0])
        while arriving and arriving[0][0] <= now_s:
            waiting.append(heapq.heappop(arriving)[1])
        room = limits.max_sequences - rows - (begun > 0)
        if begun or (waiting and room > 0):
            decoding = rows if limits.chunked_prefill else 0
            begun_before = begun
            complete, whole, begun, prompts, tokens, pairs, cached = admit(
                limits, decoding, room, len(waiting), begun
            )
            now_s += price(decoding, context if decoding else 0, prompts, tokens, pairs, cached)
            if decoding:
                step += 1
                context += rows
            started = [begun_sent_s] if complete else []
            if whole:
                started += [waiting.popleft() for _ in range(whole)]
            if begun and (complete or not begun_before):
                begun_sent_s = waiting.popleft()
            for sent_s in started:
                length = next(lengths)
                heapq.heappush(running, (step + length - 1, sent_s, now_s, length))
                rows += 1
                context += isl + 1
        else:
            until_s = arriving[0][0] - now_s if arriving and room > 0 else None
            steps, took_s = decode_run(price, rows, context, running[0][0] - step, until_s)
            now_s += took_s
            step += steps
            context += steps * rows
        while running and running[0][0] <= step:
            _, sent_s, token_s, length = heapq.heappop(running)
            ended.append((sent_s, token_s, now_s))
            rows -= 1
            context -= isl + length
            following = again(now_s)
            if following is not None:
                heapq.heappush(arriving, following)
    sent_s, first_s, end_s = np.array(ended).T
    wall_s = float(end_s.max() - sent_s.min())
    return EqualRun(np.ones(len(ended)), first_s - sent_s, end_s - sent_s, wall_s)


def decode_run(
    price: Pricer, rows: int, context: int, steps: int, until_s: float | None
) -> tuple[int, float]:
    """Steps without prompts and their seconds: `steps`, or fewer if a request arrives before."""
    first_s = price(rows, context, 0, 0, 0.0, 0)
    last_s = price(rows, context + (steps - 1) * rows, 0, 0, 0.0, 0)
    if until_s is not None:
        steps = _steps_until(until_s, first_s, last_s, steps)
        last_s = price(rows, context + (steps - 1) * rows, 0, 0, 0.0, 0)
    return steps, steps * (first_s + last_s) / 2


def _steps_until(span_s: float, first_s: float, last_s: float, most: int) -> int:
    """Fewest steps that last `span_s`, each longer than the one before."""
    slope = (last_s - first_s) / max(1, most - 1)
    if slope <= 1e-12 * first_s:
        return max(1, min(most, int(span_s / first_s) + 1))
    # n * first + slope * n * (n - 1) / 2 = span
    half = first_s - slope / 2
    root = (-half + (half * half + 2 * slope * span_s) ** 0.5) / slope
    return max(1, min(most, int(root) + 1))
