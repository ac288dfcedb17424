"""The steps of a closed loop of equal requests, without their times: times follow for any profile.

Users send again at once, and all requests are equal, so which sequences run in which step does not
depend on how long steps take. The steps of a level are therefore found once, and each set of
parameters prices them as arrays: a fit of a dozen parameters to dozens of levels takes a second.

Two schedulers: waiting prompts pause decoding (`rolling`), or prompt chunks fill up the steps of
running sequences (chunked prefill). Runs of equal decode steps are kept as a few rows with the
number of steps that each stands for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lmi_bench.core.errors import CapacityError

_ROWS_PER_RUN = 4  # the time is linear in the context but for a kink: few rows sum it


@dataclass(frozen=True, slots=True)
class LevelShape:
    """A closed loop of equal requests and the scheduler's limits.

    max_sequences       that cache and engine let run together
    max_prefill_tokens  prompt tokens of one step; with chunks, all tokens of one step
    cached_tokens       of each prompt, found in the prefix cache
    """

    concurrency: int
    num_requests: int
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


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """Steps as columns, shape (rows,), and requests as groups, shape (groups,).

    repeat              equal steps that the row stands for; the other columns are of one of them,
                        with the names and units of StepShape
    count               requests of the group; sent, first, end: the rows after which it was sent,
                        had its first and its last token (-1: the level's start)
    peak_sequences      most sequences that ran together
    """

    repeat: NDArray[np.float64]
    decode_sequences: NDArray[np.float64]
    decode_context_tokens: NDArray[np.float64]
    prefill_sequences: NDArray[np.float64]
    prefill_tokens: NDArray[np.float64]
    prefill_context_pairs: NDArray[np.float64]
    prefill_context_tokens: NDArray[np.float64]
    count: NDArray[np.int64]
    sent: NDArray[np.int64]
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    peak_sequences: int


@dataclass(slots=True, eq=False)
class _Group:
    """Sequences that had their first token in the same step and will end together."""

    count: int
    sent: int
    first: int
    tokens_left: int


class _Rows:
    """Collects the steps' columns."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float, float, float, float, float, float]] = []

    def decode_run(self, rows: int, context_tokens: int, steps: int) -> None:
        """`steps` decode steps of `rows` sequences that begin with `context_tokens` in all."""
        pieces = min(steps, _ROWS_PER_RUN)
        done = 0
        for piece in range(pieces):
            size = steps * (piece + 1) // pieces - done
            middle = context_tokens + rows * (done + (size - 1) / 2)
            self.values.append((size, rows, middle, 0, 0, 0, 0))
            done += size

    def mixed(
        self,
        rows: int,
        context_tokens: int,
        prompts: int,
        tokens: int,
        pairs: float,
        cached_tokens: int,
    ) -> None:
        """One step with prompt tokens, and `rows` sequences that decode beside them."""
        self.values.append((1, rows, context_tokens, prompts, tokens, pairs, cached_tokens))

    @property
    def last(self) -> int:
        """Index of the last row; -1 for none."""
        return len(self.values) - 1


@lru_cache(maxsize=4096)
def trace_closed_loop(level: LevelShape) -> StepTrace:
    """Follow one level from its first request to its last token; raises no error."""
    rows = _Rows()
    first_sent = min(level.concurrency, level.num_requests)
    unsent = level.num_requests - first_sent
    waiting: deque[list[int]] = deque([[-1, first_sent]])
    groups: deque[_Group] = deque()
    ended: list[_Group] = []
    ends: list[int] = []
    running = context = peak = begun_tokens = 0
    isl, osl, found = level.input_tokens, level.output_tokens, level.cached_tokens
    new = isl - found
    begun_sent: int | None = None  # a prompt of which only a part is computed
    while waiting or groups or begun_sent is not None:
        room = level.max_sequences - running - (begun_sent is not None)
        decoding = running if level.chunked_prefill else 0
        budget = max(level.max_prefill_tokens - decoding, 1)
        if not level.chunked_prefill:
            budget = max(budget, new)
        tokens = prompts = cached = 0
        pairs = 0.0
        admitted: list[tuple[int, int]] = []  # sent, count
        if begun_sent is not None:
            size = min(budget, isl - begun_tokens)
            pairs += size * begun_tokens + size * (size + 1) / 2
            cached += begun_tokens
            tokens, prompts, budget = size, 1, budget - size
            begun_tokens += size
            if begun_tokens == isl:
                admitted.append((begun_sent, 1))
                begun_sent, begun_tokens = None, 0
        while waiting and room and budget >= new:
            head = waiting[0]
            number = min(head[1], room, budget // new)
            admitted.append((head[0], number))
            tokens += number * new
            prompts += number
            pairs += number * new * (found + (new + 1) / 2)
            cached += number * found
            budget -= number * new
            room -= number
            head[1] -= number
            if not head[1]:
                waiting.popleft()
        if level.chunked_prefill and begun_sent is None and waiting and room and budget:
            head = waiting[0]
            begun_sent, begun_tokens = head[0], found + budget
            tokens += budget
            prompts += 1
            cached += found
            pairs += budget * (found + (budget + 1) / 2)
            head[1] -= 1
            if not head[1]:
                waiting.popleft()
        if tokens:
            rows.mixed(decoding, context if decoding else 0, prompts, tokens, pairs, cached)
            steps = 1 if decoding else 0
        else:
            steps = groups[0].tokens_left
            rows.decode_run(running, context, steps)
        if steps:
            context += steps * running
            for group in groups:
                group.tokens_left -= steps
        if admitted:
            for sent, number in admitted:
                groups.append(_Group(number, sent, rows.last, osl - 1))
                running += number
                context += number * (isl + 1)
            peak = max(peak, running)
        freed = 0
        while groups and groups[0].tokens_left <= 0:
            group = groups.popleft()
            ended.append(group)
            ends.append(rows.last)
            freed += group.count
        if freed:
            running -= freed
            context -= freed * (isl + osl)
            again = min(freed, unsent)
            unsent -= again
            if again:
                waiting.append([rows.last, again])
    repeat, decoding_rows, contexts, prompts_of, tokens_of, pairs_of, cached_of = np.array(
        rows.values, dtype=np.float64
    ).T
    return StepTrace(
        repeat=repeat,
        decode_sequences=decoding_rows,
        decode_context_tokens=contexts,
        prefill_sequences=prompts_of,
        prefill_tokens=tokens_of,
        prefill_context_pairs=pairs_of,
        prefill_context_tokens=cached_of,
        count=np.array([group.count for group in ended]),
        sent=np.array([group.sent for group in ended]),
        first=np.array([group.first for group in ended]),
        end=np.array(ends),
        peak_sequences=peak,
    )
