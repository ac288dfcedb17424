"""Equal requests in a closed loop, followed from event to event: the planner's fast path.

Users that wait for their answer send equal requests, so sequences start and end in groups and
nothing happens between: a level of thousands of requests is a few dozen events. The rules are the
rolling scheduler's (waiting prompts pause decoding, a sequence reserves its whole length), so a
step-by-step simulation of the same level gives the same times. Times in seconds since the first
request was sent; users send again as soon as their answer ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.step_time import StepTimeModel
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.errors import CapacityError


@dataclass(frozen=True, slots=True)
class ClosedLoopLoad:
    """Equal requests of `concurrency` users, `num_requests` in all."""

    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ClosedLoopRun:
    """What the level gave; the arrays hold one value a request.

    ttft_s, e2e_s    from sending to the first and to the last token
    peak_sequences   most sequences that ran together
    """

    load: ClosedLoopLoad
    wall_s: float
    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    peak_sequences: int

    @property
    def throughput_tokens_per_s(self) -> float:
        """Output tokens over the wall time, ramp and drain included."""
        return self.load.num_requests * self.load.output_tokens / self.wall_s

    def latency_s_per_token(self, quantile: float) -> float:
        """Quantile of end-to-end time / output tokens, linear."""
        return float(np.quantile(self.e2e_s, quantile)) / self.load.output_tokens


@dataclass(slots=True, eq=False)
class _Group:
    """Sequences that started together and will end together."""

    count: int
    sent_s: float
    first_token_s: float
    tokens_left: int
    context_tokens: int


def run_closed_loop(
    model: StepTimeModel, load: ClosedLoopLoad, *, max_sequences: int, max_prefill_tokens: int
) -> ClosedLoopRun:
    """Follow one level from its first request to its last token.

    max_sequences       that the cache and the engine's own limit let run together
    max_prefill_tokens  prompt tokens of one step; at least one prompt runs whatever its length
    """
    if max_sequences < 1:
        raise CapacityError(
            f"the cache holds no sequence of {load.input_tokens + load.output_tokens} tokens"
        )
    prompts_per_step = max(1, max_prefill_tokens // load.input_tokens)
    first_sent = min(load.concurrency, load.num_requests)
    unsent = load.num_requests - first_sent
    waiting: deque[tuple[float, int]] = deque([(0.0, first_sent)])
    groups: list[_Group] = []
    ended: list[tuple[int, float, float]] = []
    running = peak = 0
    now_s = 0.0
    while waiting or groups:
        room = min(max_sequences - running, prompts_per_step)
        if waiting and room:
            admitted = _take(waiting, room)
            count = sum(number for _, number in admitted)
            now_s += model.step_time_s(_prefill_step(count, load.input_tokens))
            running += count
            peak = max(peak, running)
            groups += [
                _Group(number, sent_s, now_s, load.output_tokens - 1, load.input_tokens + 1)
                for sent_s, number in admitted
            ]
        else:
            steps = min(group.tokens_left for group in groups)
            now_s += model.decode_run_s(_decode_step(groups), steps)
            for group in groups:
                group.tokens_left -= steps
                group.context_tokens += steps
        done = [group for group in groups if not group.tokens_left]
        if done:
            groups = [group for group in groups if group.tokens_left]
            freed = sum(group.count for group in done)
            running -= freed
            ended += [(g.count, g.first_token_s - g.sent_s, now_s - g.sent_s) for g in done]
            again = min(freed, unsent)
            unsent -= again
            if again:
                waiting.append((now_s, again))
    counts = np.array([count for count, _, _ in ended])
    return ClosedLoopRun(
        load=load,
        wall_s=now_s,
        ttft_s=np.repeat([ttft for _, ttft, _ in ended], counts),
        e2e_s=np.repeat([e2e for _, _, e2e in ended], counts),
        peak_sequences=peak,
    )


def _take(waiting: deque[tuple[float, int]], room: int) -> list[tuple[float, int]]:
    """The first `room` waiting requests, taken from the queue in order."""
    taken = []
    while waiting and room:
        sent_s, count = waiting.popleft()
        number = min(count, room)
        taken.append((sent_s, number))
        room -= number
        if count > number:
            waiting.appendleft((sent_s, count - number))
    return taken


def _prefill_step(count: int, input_tokens: int) -> StepShape:
    return StepShape(
        prefill_sequences=count,
        prefill_tokens=count * input_tokens,
        prefill_context_pairs=count * input_tokens * (input_tokens + 1) // 2,
    )


def _decode_step(groups: list[_Group]) -> StepShape:
    count = sum(group.count for group in groups)
    return StepShape(
        decode_sequences=count,
        decode_tokens=count,
        decode_context_tokens=sum(group.count * group.context_tokens for group in groups),
    )
