"""A fast simulation of one copy: the scheduler's rules with its blocks counted, not listed.

It agrees with `simulator` on the same arrivals. `queue.c` is the same in C, number for number, and
runs where it can be compiled. Left out of `engine.scheduling`: other policies, speculation, the
search of the prefix cache (its hits are given), waiting limits, and time-outs.
"""

import ctypes
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.level.fast import prompt_part
from lmi_bench.analysis.level.prefix_hits import CachedLengths
from lmi_bench.analysis.model.speculation import SpeculativeModel
from lmi_bench.analysis.model.step_time import Column, Pricer, StepTimeModel
from lmi_bench.core.native_build import QUEUE, NativeUnavailableError, library
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.join_rule import JoinRule


@dataclass(frozen=True, slots=True, eq=False)
class QueueRun:
    """Requests in the order of their arrival, shape (requests,), and gaps, shape (gaps,).

    ttft_s, e2e_s  since `sent_s`
    gap_s          time between two tokens of one answer; gap_count: how many tokens had it
    gap_end_s      time at which it ended
    runs    shape (runs, 3): decode steps of each, and the ends of its first and its last step
    starts  shape (starts, 4): request that starts or comes back, tokens that it had, decode steps
            before, and the time of its next token
    """

    sent_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.float64]
    gap_end_s: NDArray[np.float64]
    runs: NDArray[np.float64]
    starts: NDArray[np.float64]

    @property
    def wall_s(self) -> float:
        """First send to last token."""
        return float((self.sent_s + self.e2e_s).max() - self.sent_s.min())


_DONE, _ASK_PROMPTS, _ASK_LINE = range(3)
_WIDTHS = (3, 3, 4)  # of `queue.c`'s tables: gaps, runs, starts
_LARGEST_BLOCK = 1024  # in C each token of a block has a counter


def follow(
    steps: StepTimeModel | SpeculativeModel | Pricer,
    config: SchedulerConfig,
    load: Sequence[float] | NDArray[np.float64] | int,
    lengths: Sequence[tuple[int, int] | CachedLengths],
    *,
    overhead_s: float = 0.0,
    shared_tokens: int = 0,
    slower: float = 1.0,
    spacing_s: float = 0.0,
) -> QueueRun:
    """One copy under requests in this order.

    load           when each is sent (an open loop), or users that send again when answered
    lengths        input and output tokens of each request, and prompt tokens in the prefix cache
    overhead_s     time outside the engine: a request reaches it so long after it was sent
    shared_tokens  tokens that running sequences have in common, held once
    slower         factor on the time of each step
    spacing_s      between the first requests of two users
    """
    at = [spacing_s * n for n in range(load)] if isinstance(load, int) else map(float, load)
    sends = list(islice(at, len(lengths)))
    if isinstance(steps, StepTimeModel) and lengths and (native := _native()) is not None:
        found = _followed(native, steps, config, sends, lengths, overhead_s, shared_tokens, slower)
        if found is not None:
            return found
    price = steps if callable(steps) else steps.pricer()
    timed = price if slower == 1.0 else lambda *counts: slower * price(*counts)
    join = JoinRule(config.waiting_served_ratio, config.max_waiting_tokens)
    copy = _Copy(timed, config, join, shared_tokens)
    requests = [_Request(number, *each) for number, each in enumerate(lengths)]
    # `sends` is a heap: of the users' first requests and of those that follow an answer
    coming, unsent = deque(requests), len(requests) - len(sends)
    while sends or copy.waiting or copy.running:
        if not (copy.waiting or copy.running):
            copy.now_s = max(copy.now_s, sends[0] + overhead_s)
        while sends and sends[0] + overhead_s <= copy.now_s:
            coming[0].sent_s = heapq.heappop(sends)
            copy.waiting.append(coming.popleft())
        ended = copy.step(sends[0] + overhead_s if sends else None)
        for _ in range(min(ended, unsent)):
            heapq.heappush(sends, copy.now_s)
        unsent = max(0, unsent - ended)
    rows = [(each.sent_s, each.first_s, each.end_s) for each in requests]
    times = np.array(rows, dtype=np.float64).reshape(-1, 3)
    tables = zip((copy.gaps, copy.runs, copy.starts), _WIDTHS, strict=True)
    each = [np.array(flat, dtype=np.float64).reshape(-1, width) for flat, width in tables]
    return _run_of(times, [each.output for each in requests], each)


def _run_of(times: Column, outputs: Sequence[int] | Column, tables: Sequence[Column]) -> QueueRun:
    sent_s, first_s, end_s = times.T.copy()
    (gap_s, count, gap_end_s), tokens = tables[0].T, np.array(outputs, dtype=np.float64)
    ttft_s, e2e_s = first_s - sent_s, end_s - sent_s
    return QueueRun(sent_s, ttft_s, e2e_s, tokens, gap_s, count, gap_end_s, *tables[1:])


@cache
def _native() -> Any:
    """`queue.c` compiled, with its types; None without a compiler."""
    try:
        found = ctypes.PyDLL(str(library(QUEUE)))
    except (NativeUnavailableError, OSError):
        return None
    address, seconds = ctypes.c_void_p, ctypes.c_double
    found.queue_new.argtypes = (address, ctypes.c_int64, address, address)
    found.queue_run.argtypes = (address, seconds, seconds, address)
    found.queue_num_rows.argtypes = (address, ctypes.c_int64)
    found.queue_num_rows.restype = ctypes.c_int64
    found.queue_result.argtypes, found.queue_result.restype = (address, address, address), None
    found.queue_free.argtypes, found.queue_new.restype = (address,), address
    return found


def _followed(
    native: Any,
    model: StepTimeModel,
    config: SchedulerConfig,
    sends_s: Sequence[float],
    lengths: Sequence[tuple[int, int] | CachedLengths],
    overhead_s: float,
    shared_tokens: int,
    slower: float,
) -> QueueRun | None:
    """`follow` in C; None where that gives up, for Python to say why."""
    costs, price, window = model.costs, model.pricer(), model.costs.attention.window
    paged = config.kv_layout is KvLayout.PAGED
    limits = (
        *(paged, config.chunked_prefill, config.block_size, config.cache_tokens),
        *(config.max_rolling_batch_size, config.max_rolling_batch_prefill_tokens),
        *(config.max_waiting_tokens, shared_tokens, len(sends_s)),
        *(config.waiting_served_ratio, overhead_s, slower),
        *(math.inf if window is None else window, costs.attention.sliding_share),
        *(costs.host_s, costs.host_row_s),
    )
    if config.block_size > _LARGEST_BLOCK or max(limits[:9]) > 2**53:  # to be exact in doubles
        return None
    rows, own = np.zeros((len(lengths), 3)), np.array(lengths, dtype=np.float64)
    rows[:, : own.shape[1]] = own
    both = [np.array(each, dtype=np.float64) for each in (limits, sends_s)]
    asked, first, second = (ctypes.c_double * 6)(), 0.0, 0.0
    queue = native.queue_new(both[0].ctypes.data, len(rows), rows.ctypes.data, both[1].ctypes.data)
    try:
        while (answer := native.queue_run(queue, first, second, asked)) != _DONE:
            if answer == _ASK_LINE:
                first, second = model.decode_line(int(asked[0]))
            elif answer == _ASK_PROMPTS:
                first = slower * price(*asked)
            else:
                return None
        sizes = [width * native.queue_num_rows(queue, i) for i, width in enumerate(_WIDTHS)]
        times, flat = np.empty((len(rows), 3)), np.empty(sum(sizes))
        native.queue_result(queue, times.ctypes.data, flat.ctypes.data)
    finally:
        native.queue_free(queue)
    parts = zip(np.split(flat, np.cumsum(sizes)[:-1]), _WIDTHS, strict=True)
    return _run_of(times, rows[:, 1], [part.reshape(-1, width) for part, width in parts])


@dataclass(slots=True, eq=False)
class _Request:
    """found: prompt tokens in the prefix cache; ends: number of the decode step of its last token,
    -1: not decoding."""

    number: int
    prompt: int
    output: int
    found: int = 0
    computed: int = field(init=False)
    produced: int = 0
    ends: int = -1
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    end_s: float = 0.0

    def __post_init__(self) -> None:
        self.computed = self.found

    @property
    def to_fill(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return self.prompt + self.produced


@dataclass(slots=True, eq=False)
class _Copy:
    """running: admitted sequences, the oldest first; filling: those with prompt tokens left;
    shared: tokens that each running sequence has in common with the others.

    ending    decoding sequences by their last step; entries of sequences sent back are stale
    rows, context      decoding sequences and their tokens; to_fill: of the blocks of `filling`
    phases    decoding sequences by (tokens - step) % block size
    since     number of decoding sequences by the time of their last token
    gaps      seconds, count and end of each, flat: the collector is slow with many tuples
    step, decoded_s    number of decode steps, and the end of the last one
    """

    price: Pricer
    config: SchedulerConfig
    join: JoinRule
    shared: int = 0
    now_s: float = 0.0
    decoded_s: float = 0.0
    steps: int = 0
    rows: int = 0
    context: int = 0
    reserved: int = 0
    to_fill: int = 0
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    filling: list[_Request] = field(default_factory=list)
    ending: list[tuple[int, int, _Request]] = field(default_factory=list)
    since: dict[float, int] = field(default_factory=dict)
    phases: dict[int, int] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    paged: bool = field(init=False)
    block_size: int = field(init=False)
    cache_tokens: int = field(init=False)

    def __post_init__(self) -> None:  # a property at each of many steps takes time
        self.paged = self.config.kv_layout is KvLayout.PAGED
        self.block_size, self.cache_tokens = self.config.block_size, self.config.cache_tokens

    def _free_tokens(self, later: int = 0) -> int:
        """Least tokens of free blocks when the decoding sequences have `later` more tokens."""
        held = self.context + self.to_fill + (self.block_size - 1 + later) * self.rows
        if self.shared:
            held -= self.shared * max(0, len(self.running) - 1)
        return self.cache_tokens - held

    def _has_room(self, tokens: int, later: int = 0) -> bool:
        """Whether whole blocks for so many tokens are free then."""
        least, most = self._free_tokens(later), (self.block_size - 1) * self.rows
        if not least < tokens <= least + most:
            return tokens <= least
        at, size = self.steps + later, self.block_size
        empty = sum(count * (-(phase + at) % size) for phase, count in self.phases.items())
        return tokens <= least + most - empty

    def _blocks(self, tokens: int) -> int:
        """Tokens of the blocks that hold so many."""
        return -(-tokens // self.block_size) * self.block_size

    def step(self, next_arrival_s: float | None) -> int:
        """The next step, or a run of decode steps until something changes; how many ended."""
        chunked = self.config.chunked_prefill
        if chunked:
            self._make_room()
        before = len(self.running)
        if (self.filling or self.waiting) and (prompts := self._prompts()):
            if len(self.running) > before:
                self.join.admitted(before)
            return self._prefill(prompts, self.rows if chunked else 0)
        if not chunked:
            self._make_room()
        return self._decode(next_arrival_s)

    def _make_room(self) -> None:
        """Send the youngest back until every decoding sequence has room for a token."""
        while self.paged and len(self.running) > 1 and not self._has_room(0):
            youngest = self.running.pop()
            if youngest.ends < 0:
                self.filling.remove(youngest)
                self.to_fill -= self._blocks(youngest.to_fill)
            else:
                youngest.produced = youngest.output - (youngest.ends - self.steps)
                youngest.last_s = max(youngest.last_s, self.decoded_s)
                self._stop_decoding(youngest)
            youngest.computed = youngest.found
            self.waiting.appendleft(youngest)

    def _stop_decoding(self, request: _Request) -> None:
        request.ends = -1
        self._count(request.prompt + request.produced, -1)
        self.since[request.last_s] -= 1

    def _count(self, tokens: int, more: int) -> None:
        phase = (tokens - self.steps) % self.block_size
        self.phases[phase] = self.phases.get(phase, 0) + more
        self.rows += more
        self.context += more * tokens

    def _prompts(self) -> list[tuple[_Request, int]]:
        """Prompts of the next step, begun ones first, each with its tokens in it."""
        budget = limit = self.config.max_rolling_batch_prefill_tokens
        chosen: list[tuple[_Request, int]] = []
        before, begun = len(self.running), len(self.filling)
        while budget:
            is_new = len(chosen) >= begun
            joins = is_new and (len(self.running) > before or self._may_join())
            if is_new and not (joins and self._head_fits()):
                break
            request = self.waiting[0] if is_new else self.filling[len(chosen)]
            left = request.to_fill - request.computed
            splits = self.config.chunked_prefill or request.to_fill > limit
            part = prompt_part(left, budget, may_split=splits)
            if not part:
                break
            if is_new:
                self.waiting.popleft()
                self.running.append(request)
                self.filling.append(request)
                self.to_fill += self._blocks(request.to_fill)
                self.reserved += self._blocks(request.prompt + request.output)
            chosen.append((request, part))
            budget -= part
        return chosen

    def _may_join(self) -> bool:
        """Whether waiting requests may be admitted beside the running ones now."""
        least = self.join.least_joiners(len(self.running))
        if not least:
            return True
        most = self.config.max_rolling_batch_size - len(self.running)
        if least > min(most, len(self.waiting)):
            return False
        heads = list(islice(self.waiting, int(least)))
        tokens = sum(each.to_fill - each.found for each in heads)
        return tokens <= self.config.max_rolling_batch_prefill_tokens and self._fit(heads)

    def _head_fits(self) -> bool:
        if not self.waiting or len(self.running) >= self.config.max_rolling_batch_size:
            return False
        return self._fit((self.waiting[0],))

    def _fit(self, heads: Sequence[_Request]) -> bool:
        """Whether the cache takes these beside a block more for each running sequence."""
        if not self.paged:
            held = self.reserved + sum(self._blocks(each.prompt + each.output) for each in heads)
            return held <= self.cache_tokens
        needed = self.block_size * (len(self.running) + len(heads) - 1)
        for each in heads:
            needed += self._blocks(each.to_fill)
        return self._has_room(needed, 0 if self.config.chunked_prefill else -1)

    def _prefill(self, prompts: list[tuple[_Request, int]], decoding: int) -> int:
        tokens, pairs, cached = 0, 0.0, 0
        for each, count in prompts:
            tokens += count
            pairs += count * (each.computed + (count + 1) / 2)
            cached += each.computed
        context = self.context if decoding else 0
        took_s = self.price(decoding, context, len(prompts), tokens, pairs, cached)
        if decoding:
            self._decoded(1, took_s, took_s)
        else:
            self.now_s += took_s
        for request, count in prompts:
            request.computed += count
            if request.computed == request.to_fill:
                self.filling.remove(request)
                self.to_fill -= self._blocks(request.to_fill)
                self._start(request)
        return self._end_requests()

    def _start(self, request: _Request) -> None:
        """The step that ended its prompt sampled a token."""
        self.starts += (request.number, request.produced, self.steps, self.now_s)
        if request.produced:
            self.gaps += (self.now_s - request.last_s, 1, self.now_s)
        else:
            request.first_s = self.now_s
        request.produced += 1
        request.last_s = self.now_s
        request.ends = self.steps + request.output - request.produced
        heapq.heappush(self.ending, (request.ends, request.number, request))
        self._count(request.to_fill, 1)
        self.since[self.now_s] = self.since.get(self.now_s, 0) + 1

    def _decode(self, next_arrival_s: float | None) -> int:
        """Decode until a sequence ends, a request arrives that may run, or the cache is full."""
        steps = self.ending[0][0] - self.steps
        if self.paged:
            steps = max(1, min(steps, 1 + self._free_tokens() // self.rows))
        until_s, waits = None, self._head_fits()
        if waits:
            steps = min(steps, self.join.steps_to_wait)
        if next_arrival_s is not None and (waits or not self.waiting):
            until_s = next_arrival_s - self.now_s
        price, rows, context = self.price, self.rows, self.context
        first_s = last_s = price(rows, context, 0, 0, 0.0, 0)
        if steps > 1:
            last_s = price(rows, context + (steps - 1) * rows, 0, 0, 0.0, 0)
            if until_s is not None and until_s < steps * (first_s + last_s) / 2:
                steps = _steps_until(until_s, first_s, last_s, steps)
                last_s = price(rows, context + (steps - 1) * rows, 0, 0, 0.0, 0)
        self._decoded(steps, first_s, steps * (first_s + last_s) / 2)
        return self._end_requests()

    def _decoded(self, steps: int, first_s: float, took_s: float) -> None:
        """Every decoding sequence gets `steps` tokens, the first after `first_s`."""
        now_s = self.now_s + first_s
        for at_s, count in self.since.items():
            if count:
                self.gaps += (now_s - at_s, count, now_s)
        first_end_s = now_s
        if steps > 1:
            now_s += took_s - first_s
            self.gaps += ((took_s - first_s) / (steps - 1), self.rows * (steps - 1), now_s)
        self.runs += (steps, first_end_s, now_s)
        self.now_s = self.decoded_s = now_s
        self.steps += steps
        self.join.after_decoding(steps)
        self.context += steps * self.rows
        self.since = {now_s: self.rows}

    def _end_requests(self) -> int:
        before, ending = len(self.running), self.ending
        while ending and (ending[0][0] <= self.steps or ending[0][0] != ending[0][2].ends):
            ends, _, request = heapq.heappop(ending)
            if ends != request.ends:
                continue  # it was sent back in between
            request.produced = request.output
            request.last_s = request.end_s = self.now_s
            self._stop_decoding(request)
            self.running.remove(request)
            self.reserved -= self._blocks(request.prompt + request.output)
        return before - len(self.running)


def _steps_until(span_s: float, first_s: float, last_s: float, most: int) -> int:
    """Fewest steps that last `span_s`, each longer than the one before."""
    slope = (last_s - first_s) / max(1, most - 1)
    if slope <= 1e-12 * first_s:
        return max(1, min(most, int(span_s / first_s) + 1))
    # n * first + slope * n * (n - 1) / 2 = span
    half = first_s - slope / 2
    root = (-half + math.sqrt(half * half + 2 * slope * span_s)) / slope
    return max(1, min(most, int(root) + 1))
