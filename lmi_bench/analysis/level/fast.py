"""The steps of a closed loop of equal requests on one copy, without the engine's scheduler.

They do not depend on the times of steps, so `trace_closed_loop` finds them once, and each set of
parameters prices them as arrays. Prompts come first come, first served, in steps that pause
decoding or in chunks beside it, whose token limit counts decoding sequences too, as in vLLM. Left
out of `engine.scheduling`: blocks (a limit on sequences stands for the cache, so nothing is
preempted), other policies, limits on waiting requests, and the search of the prefix cache (its hits
are given). Times agree with the scheduler's (`simulator`) to about 1 %.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.model.step_time import StepColumns
from lmi_bench.core.errors import CapacityError
from lmi_bench.engine.scheduling.config import DEFAULT_WAITING_SERVED_RATIO
from lmi_bench.engine.scheduling.join_rule import JoinRule

_ROWS_PER_RUN = 4  # the time is linear in the context but for a kink: few rows sum it

Admission = tuple[bool, int, int, int, int, float, int]
"""Whether the begun prompt is complete, whole prompts admitted, tokens of the prompt now begun (0:
none); then the step's prompts, prompt tokens, pairs and cached tokens."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Lengths of the requests and the scheduler's limits.

    max_sequences       sequences that cache and engine let run together
    max_prefill_tokens  prompt tokens of one step; with chunks, all tokens of one step
    cached_tokens       tokens of each prompt that the prefix cache holds
    max_waiting_tokens, waiting_served_ratio  the rule for joining running sequences (`JoinRule`)
    """

    input_tokens: int
    output_tokens: int
    max_sequences: int
    max_prefill_tokens: int
    chunked_prefill: bool
    cached_tokens: int = 0
    max_waiting_tokens: int = 0
    waiting_served_ratio: float = DEFAULT_WAITING_SERVED_RATIO

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise CapacityError(f"the cache holds no sequence of {self.input_tokens + self.output_tokens} tokens")


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

    count  requests of the group; sent, first, end: the rows of `columns` after which it was sent,
           had its first and its last token (-1: the level's start)
    """

    columns: StepColumns
    count: NDArray[np.int64]
    sent: NDArray[np.int64]
    first: NDArray[np.int64]
    end: NDArray[np.int64]


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
        self.join = JoinRule(limits.waiting_served_ratio, limits.max_waiting_tokens)
        self.unsent = num_requests - first_sent
        self.waiting: deque[list[int]] = deque([[-1, first_sent]])  # row of sending, count
        self.num_waiting = first_sent
        self.groups: deque[_Group] = deque()
        self.begun = 0
        self.begun_sent = -1
        self.running = self.context = 0
        self.rows: list[tuple[float, float, float, float, float, float, float]] = []
        self.ended: list[tuple[int, int, int, int]] = []

    def step(self) -> None:
        """One step with prompts, or the run of decode steps until sequences end."""
        limits, running = self.limits, self.running
        decoding = running if limits.chunked_prefill else 0
        room = limits.max_sequences - running - (self.begun > 0)
        started: list[tuple[int, int]] = []  # row of sending, count
        waits = self.num_waiting > 0 and room > 0
        may_join = waits and self._may_join(room)
        if self.begun or may_join:
            complete, whole, begun, prompts, tokens, pairs, cached = admit(
                limits, decoding, room, self.num_waiting, self.begun
            )
            if complete:
                started.append((self.begun_sent, 1))
            started += self._take(whole)
            if begun and (complete or not self.begun):
                ((self.begun_sent, _),) = self._take(1)
            self.begun = begun
            self.join.admitted(running)
            context = self.context if decoding else 0
            self.rows.append((1, decoding, context, prompts, tokens, pairs, cached))
            steps = 1 if decoding else 0
        else:
            steps = self.groups[0].tokens_left
            if waits:
                steps = min(steps, self.join.steps_to_wait)
            self._decode(steps)
            self.join.after_decoding(steps)
        self.context += steps * running
        for group in self.groups:
            group.tokens_left -= steps
        for sent, count in started:
            self.groups.append(_Group(count, sent, len(self.rows) - 1, limits.output_tokens - 1))
            self.running += count
            self.context += count * (limits.input_tokens + 1)
        self._end_groups()

    def _may_join(self, room: int) -> bool:
        limits = self.limits
        least = self.join.least_joiners(self.running)
        length = limits.input_tokens - limits.cached_tokens
        return least == 0 or least <= min(self.num_waiting, room, limits.max_prefill_tokens // length)

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
        return ClosedLoopSteps(columns, count, sent, first, end)
