"""Equal requests against one copy, event by event: random arrivals, or users with a way to go.

The rolling scheduler's rules (first come, first served; chunks beside running sequences, or a
prompt step that pauses them), without its blocks: a limit on sequences stands for the cache. Where
nothing happens but decoding, steps are jumped with their time taken as linear in the context. A
level of thousands of requests takes tens of milliseconds, so that a fit can afford it; the
engine's own scheduler (`simulator`) gives the same times to about a per cent.

Each request spends a random time outside the engine before it is seen: parsing, tokenizing, the
network. It belongs to the time to first token, and in a closed loop it breaks up the groups that
equal requests would otherwise run in for ever.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Pricer = Callable[[int, int, int, int, float, int], float]

_SEED = 20


class HasPricer(Protocol):
    """What prices steps by their counts (`step_time.PricedSteps`)."""

    def pricer(self) -> Pricer:
        """Seconds of a step as a plain function of counts."""
        ...


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Lengths of the requests and limits of the copy; names as in `step_trace.LevelShape`.

    length_spread  output lengths are even between 1 - spread and 1 + spread times the mean
    overhead_s     mean time of a request outside the engine, exponential
    cached_tokens  of each prompt, found in the prefix cache
    """

    input_tokens: int
    output_tokens: int
    max_sequences: int
    max_prefill_tokens: int
    chunked_prefill: bool
    overhead_s: float = 0.0
    length_spread: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EqualRun:
    """Shape (requests,), in the order of their ends; seconds since the level's start."""

    sent_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @property
    def wall_s(self) -> float:
        """First send to last token."""
        return float(self.end_s.max() - self.sent_s.min())

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """From sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> NDArray[np.float64]:
        """From sending to the last token."""
        return self.end_s - self.sent_s


def even_arrivals(rate_per_s: float, num_requests: int) -> NDArray[np.float64]:
    """Poisson arrivals scaled so that the last one falls at num_requests / rate.

    Load generators fix the mean so; it makes one draw stand for all.
    """
    gaps = np.random.default_rng(_SEED).exponential(size=num_requests)
    times = np.cumsum(gaps)
    return np.asarray(times * (num_requests / rate_per_s / times[-1]), dtype=np.float64)


def run_open(
    model: HasPricer, arrivals_s: Sequence[float] | NDArray[np.float64], limits: CopyLimits
) -> EqualRun:
    """Requests that arrive whether or not earlier ones are answered."""
    delays = _delays(limits.overhead_s, len(arrivals_s))
    seen = [(float(at) + delay, float(at)) for at, delay in zip(arrivals_s, delays, strict=True)]
    return _run(model, limits, seen, lambda _end: None)


def run_users(model: HasPricer, users: int, num_requests: int, limits: CopyLimits) -> EqualRun:
    """Users that wait for their answer and ask again at once, `num_requests` in all."""
    delays = iter(_delays(limits.overhead_s, num_requests))
    first = min(users, num_requests)
    seen = [(next(delays), 0.0) for _ in range(first)]

    def again(end_s: float) -> tuple[float, float] | None:
        delay = next(delays, None)
        return None if delay is None else (end_s + delay, end_s)

    return _run(model, limits, seen, again)


def _delays(mean_s: float, count: int) -> list[float]:
    """Exponential, scaled to their mean: that of a few draws would be a matter of luck."""
    drawn = np.random.default_rng(_SEED + 1).exponential(size=count)
    return [float(value) for value in drawn * (mean_s / drawn.mean())]


def _lengths(mean: int, spread: float) -> Iterator[int]:
    if not spread:
        yield from itertools.repeat(mean)
    chance = np.random.default_rng(_SEED + 2)
    while True:
        for factor in chance.uniform(1 - spread, 1 + spread, size=1000):
            yield max(1, round(float(factor) * mean))


def _run(
    model: HasPricer,
    limits: CopyLimits,
    first: list[tuple[float, float]],
    again: Callable[[float], tuple[float, float] | None],
) -> EqualRun:
    """`first`: when a request is seen, when it was sent; `again`: the same after an end."""
    price = model.pricer()
    isl, osl, found = limits.input_tokens, limits.output_tokens, limits.cached_tokens
    new = isl - found
    arriving = list(first)
    heapq.heapify(arriving)
    waiting: deque[float] = deque()  # times of sending
    running: list[tuple[int, float, float, int]] = []  # step of the last token, sent, first, length
    lengths = iter(_lengths(osl, limits.length_spread))
    ended: list[tuple[float, float, float]] = []
    now_s, step, rows, context = 0.0, 0, 0, 0
    begun_tokens, begun_sent_s = 0, 0.0
    while arriving or waiting or rows or begun_tokens:
        if not (waiting or rows or begun_tokens):
            now_s = max(now_s, arriving[0][0])
        while arriving and arriving[0][0] <= now_s:
            waiting.append(heapq.heappop(arriving)[1])
        room = limits.max_sequences - rows - (begun_tokens > 0)
        if begun_tokens or (waiting and room > 0):
            decoding = rows if limits.chunked_prefill else 0
            budget = max(1, limits.max_prefill_tokens - decoding)
            if not limits.chunked_prefill:
                budget = max(budget, new)
            tokens = prompts = cached = 0
            pairs = 0.0
            started: list[float] = []
            if begun_tokens:
                tokens = min(budget, isl - begun_tokens)
                pairs, cached, prompts = tokens * (begun_tokens + (tokens + 1) / 2), begun_tokens, 1
                begun_tokens += tokens
                budget -= tokens
                if begun_tokens == isl:
                    started.append(begun_sent_s)
                    begun_tokens = 0
            number = min(len(waiting), room, budget // new)
            if number > 0:
                started += [waiting.popleft() for _ in range(number)]
                tokens += number * new
                pairs += number * new * (found + (new + 1) / 2)
                cached += number * found
                prompts += number
                room -= number
                budget -= number * new
            if limits.chunked_prefill and not begun_tokens and waiting and room > 0 and budget:
                begun_sent_s, begun_tokens = waiting.popleft(), found + budget
                tokens += budget
                pairs += budget * (found + (budget + 1) / 2)
                cached += found
                prompts += 1
            now_s += price(decoding, context if decoding else 0, prompts, tokens, pairs, cached)
            if decoding:
                step += 1
                context += rows
            for sent_s in started:
                length = next(lengths)
                heapq.heappush(running, (step + length - 1, sent_s, now_s, length))
            rows += len(started)
            context += len(started) * (isl + 1)
        else:
            steps = running[0][0] - step
            first_s = price(rows, context, 0, 0, 0.0, 0)
            last_s = price(rows, context + (steps - 1) * rows, 0, 0, 0.0, 0)
            if arriving and room > 0:
                steps = _steps_until(arriving[0][0] - now_s, first_s, last_s, steps)
                last_s = price(rows, context + (steps - 1) * rows, 0, 0, 0.0, 0)
            now_s += steps * (first_s + last_s) / 2
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
    columns = np.array(ended).T
    return EqualRun(columns[0], columns[1], columns[2])


def _steps_until(span_s: float, first_s: float, last_s: float, most: int) -> int:
    """Fewest whole steps that reach a point in time, each longer than the one before."""
    slope = (last_s - first_s) / max(1, most - 1)
    if slope <= 1e-12 * first_s:
        return max(1, min(most, int(span_s / first_s) + 1))
    # n * first + slope * n * (n - 1) / 2 = span
    half = first_s - slope / 2
    root = (-half + (half * half + 2 * slope * span_s) ** 0.5) / slope
    return max(1, min(most, int(root) + 1))
