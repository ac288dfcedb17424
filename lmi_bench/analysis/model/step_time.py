"""The time of one step: named physical parts, and the one that binds.

The formula is in docs/planner_model.md (One step). Seconds, bytes and FLOP of one model copy: a
forecast with an engine's profile. `roofline` gives the bound of the hardware alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.model.step_costs import AttentionCosts, SplitCosts, StepCosts, step_costs
from lmi_bench.engine.scheduling.step_shape import StepShape

Binding = Literal["bandwidth", "compute", "link", "host"]
Pricer = Callable[[int, int, int, int, float, int], float]
Column = NDArray[np.float64]
Amount = TypeVar("Amount", float, NDArray[np.floating])
"""A number, or an array with one value for each step."""
Larger = Callable[[Amount, Amount], Amount]
"""The maximum of two, for numbers or for arrays."""


class StepColumns(NamedTuple):
    """Many steps, one a row, shape (rows,), with the names and units of StepShape.

    repeat  number of equal steps in the row; the other columns describe one of them
    """

    repeat: Column
    decode_sequences: Column
    decode_context_tokens: Column
    prefill_sequences: Column
    prefill_tokens: Column
    prefill_context_pairs: Column
    prefill_context_tokens: Column

    @property
    def counts(self) -> tuple[Column, Column, Column, Column, Column, Column]:
        """The columns but `repeat`, in the order of `step_sum`."""
        return self[1:]


def counts_of(step: StepShape) -> tuple[int, int, int, int, int, int]:
    """A step's counts in the order of `Pricer`."""
    decode = step.decode_sequences, step.decode_context_tokens
    prompts = step.prefill_sequences, step.prefill_tokens
    return *decode, *prompts, step.prefill_context_pairs, step.prefill_context_tokens


@dataclass(frozen=True, slots=True)
class StepParts:
    """One step's time in seconds, part by part.

    weights_s, kv_s        reads of weights and cache; compute_s: arithmetic, at the same time
    all_reduce_s           sums over the ranks, after them
    host_s                 launch of the step, at the same time as the GPU part
    serial_s               bookkeeping of the batch and the prompts, before and after these
    total_s                the step, with gaps between kernels
    """

    weights_s: float
    kv_s: float
    compute_s: float
    all_reduce_s: float
    host_s: float
    serial_s: float
    total_s: float

    @property
    def binding(self) -> Binding:
        """The part that takes most of the step."""
        seconds = self.seconds_by_limit()
        return max(seconds, key=lambda part: seconds[part])

    def seconds_by_limit(self) -> dict[Binding, float]:
        """The step's seconds by what they go to; gaps between kernels go to nothing."""
        memory_s = self.weights_s + self.kv_s
        kernels_s = max(memory_s, self.compute_s)
        if self.host_s > kernels_s + self.all_reduce_s:
            return {"host": self.host_s + self.serial_s}
        of_kernels: Binding = "bandwidth" if memory_s >= self.compute_s else "compute"
        return {of_kernels: kernels_s, "link": self.all_reduce_s, "host": self.serial_s}


Counted = Callable[[Amount, Amount, Amount, Amount, Amount, Amount, Amount, float], "Seconds[Amount]"]
"""Arguments: decoding sequences, their context tokens; prompts, their tokens, pairs and cached
tokens; rows of all decoding sequences, and of each: more than one with drafted tokens."""

Seconds = tuple[Amount, Amount, Amount, Amount, Amount, Amount]
"""Reads of weights and arithmetic with them; the same of the cache; the GPU with gaps and
all-reduces; the whole step."""


def _larger(one: float, other: float) -> float:
    """`max` of two numbers, twice as fast."""
    return one if one > other else other


def _attended(keys: Amount, most: Amount, sliding: float, larger: Larger[Amount]) -> Amount:
    """Mean keys that a layer reads; the share `sliding` of the layers reads at most `most`."""
    unseen: Amount = larger(keys, most) - most
    read: Amount = keys - sliding * unseen
    return read


def _stage_part(stages: int, rows: Amount, larger: Larger[Amount]) -> Amount:
    """The part of a batch in a stage at a time: 1 / stages, or a whole row."""
    one = 0 * rows + 1.0
    return larger(one / stages, one / larger(one, rows))


def _prompt_part(stages: int, prompts: Amount, larger: Larger[Amount]) -> Amount:
    """Time of m prompts through p stages as a part of the whole model's: (m + p - 1) / (m p)."""
    some: Amount = larger(prompts, 0 * prompts + 1.0)
    part: Amount = (some + (stages - 1)) / (some * stages)
    return part


def _fullest_group(groups: int, sequences: Amount, larger: Larger[Amount]) -> Amount:
    """Sequences of the fullest group over the mean: all in one of g, or half a sequence more."""
    mean = larger(sequences, 0 * sequences + 1.0) / groups
    return larger(1 / mean, 1 + 0.5 / mean)


def _busiest(split: SplitCosts, unread: Amount, rows: Amount, larger: Larger[Amount]) -> tuple[Amount, Amount]:
    """Experts that the busiest device leaves unread, and the further part of a row's products.

    Of E experts a device reads a binomial number, and its rows are a Poisson number; of n devices
    the step waits for the largest.
    """
    spread = split.busiest * (unread * (1 - unread) / split.experts) ** 0.5
    left = larger(unread - spread, 0 * unread)
    more: Amount = split.busiest * (split.rows_per_expert_row / rows) ** 0.5
    return left, split.expert_share * more


def step_sum(costs: StepCosts, larger: Larger[Amount]) -> Counted[Amount]:
    """The step's time as a function of its counts: the only place where the parts are added up."""
    attention, unhidden, split = costs.attention, costs.unhidden, costs.split
    of_products = _products(costs, larger)
    of_attention = _attention(attention, larger)
    window, sliding, state_s = attention.window, attention.sliding_share, attention.row_s
    fixed_s = costs.products.first_s + costs.gap_s + costs.all_reduce_s
    reduce_s, host_s = costs.all_reduce_token_s, costs.host_s
    host_row_s, host_token_s = costs.host_row_s, costs.host_token_s
    host_prompt_s, launch_s = costs.host_prompt_s, costs.launch_s
    share_s = 0.0 if split is None else costs.products.token_s * split.attention_share

    def seconds(
        rows: Amount,
        context: Amount,
        prompts: Amount,
        tokens: Amount,
        pairs: Amount,
        cached: Amount,
        drafted: Amount,
        each: float,
    ) -> Seconds[Amount]:
        sequences = rows
        if split is not None and split.stages > 1:
            part = _stage_part(split.stages, rows, larger)
            rows, context, drafted = rows * part, context * part, drafted * part
            part = _prompt_part(split.stages, prompts, larger)
            tokens, pairs, cached = tokens * part, pairs * part, cached * part
        every = drafted + tokens
        weights_s, linear_s = of_products(every, drafted + prompts)
        if window is not None:  # it bounds the pairs of a prompt of n tokens by n * window
            context = _attended(context, window * rows, sliding, larger)
            pairs = _attended(pairs, window * tokens, attention.sliding_pairs, larger)
            cached = _attended(cached, window * prompts, sliding, larger)
        if split is not None and split.groups > 1:
            of_rows = _fullest_group(split.groups, rows, larger)
            of_prompts = _fullest_group(split.groups, prompts, larger)
            more: Amount = drafted * (of_rows - 1) + tokens * (of_prompts - 1)
            linear_s = linear_s + share_s * more
            context, cached, pairs = context * of_rows, cached * of_prompts, pairs * of_prompts
        kv_s, attention_s = of_attention(rows, context, cached, pairs, each)
        # matrix products and attention are kernels of their own: each is bound by itself
        longer_s = larger(weights_s, linear_s) + larger(kv_s, attention_s)
        gpu_s = longer_s + fixed_s + reduce_s * every + state_s * rows
        if unhidden:
            gpu_s = gpu_s + unhidden * (weights_s + linear_s + kv_s + attention_s - longer_s)
        step_s = larger(gpu_s, host_s * (sequences > 0))
        if launch_s:
            step_s = larger(step_s, launch_s * (prompts > 0))
        step_s = step_s + host_row_s * sequences + host_token_s * tokens + host_prompt_s * prompts
        return weights_s, linear_s, kv_s, attention_s, gpu_s, step_s

    return seconds


def _products(costs: StepCosts, larger: Larger[Amount]) -> Callable[[Amount, Amount], tuple[Amount, Amount]]:
    """Reads of weights and arithmetic with them, by all tokens of a step and rows of its head."""
    products, split = costs.products, costs.split
    read_s, expert_share = products.read_s, products.expert_share
    unread, more_read = products.unread_share, products.rows_read - 1
    widening, widening_rows = products.widening_share, products.widening_rows
    token_s, head_s = products.token_s, products.head_s

    def seconds(every: Amount, heads: Amount) -> tuple[Amount, Amount]:
        weights_s, linear_s = read_s + 0 * every, token_s * every + head_s * heads
        if expert_share:
            left: Amount = unread**every
            if split is not None and split.busiest:
                left, extra = _busiest(split, left, every, larger)
                linear_s = linear_s + token_s * every * extra
            weights_s = weights_s * (1 - expert_share * left)
        if widening:
            linear_s = linear_s + widening * weights_s * -(-every // widening_rows)
        if more_read:
            weights_s = weights_s * (1 + more_read * (every > 1))
        return weights_s, linear_s

    return seconds


def _attention(
    attention: AttentionCosts, larger: Larger[Amount]
) -> Callable[[Amount, Amount, Amount, Amount, float], tuple[Amount, Amount]]:
    """Reads of the cache and arithmetic with it, by rows, cached tokens of rows and of prompts,
    pairs of prompts, and drafted rows of a sequence."""
    decode_read_s, prompt_read_s = attention.decode_read_s, attention.prompt_read_s
    pair_s, prompt_pair_s = attention.pair_s, attention.prompt_pair_s
    convert_s, busy = attention.widening_s, attention.busy_rows

    def seconds(rows: Amount, context: Amount, cached: Amount, pairs: Amount, each: float) -> tuple[Amount, Amount]:
        decode_s = decode_read_s * context
        if busy > 1:  # a block for each sequence and head leaves multiprocessors idle
            one = 0 * rows + 1.0
            decode_s = decode_s * larger(busy / larger(rows, one), one)
        # each drafted token of a sequence looks at its whole context, which is read once
        attention_s = pair_s * context * each + prompt_pair_s * pairs
        if convert_s:
            attention_s = attention_s + convert_s * (context + cached)
        return decode_s + prompt_read_s * cached, attention_s

    return seconds


class StepTimeModel:
    """Predicts steps of one model copy, without speculation; a StepTime.

    Raises InputError for an unknown data-sheet figure, CapacityError for indivisible KV heads.
    """

    def __init__(self, setup: Setup, profile: EngineProfile) -> None:
        self.costs = step_costs(setup, profile)
        self._lines: dict[int, tuple[float, float]] = {}

    @cached_property
    def _seconds(self) -> Counted[float]:
        """The sum for one step, with the costs for its number of rows."""
        few, from_rows = step_sum(self.costs, _larger), self.costs.many_rows
        if self.costs.many is None:
            return few
        many = step_sum(self.costs.many, _larger)

        def seconds(*counts: float) -> Seconds[float]:
            tokens, drafted = counts[3], counts[6]
            return (many if drafted + tokens >= from_rows else few)(*counts)

        return seconds

    @cached_property
    def _price(self) -> Pricer:
        return self.pricer()

    def explain(self, step: StepShape) -> StepParts:
        """The step's time by part."""
        costs, rows = self.costs, step.decode_sequences
        every = step.num_tokens
        weights_s, linear_s, kv_s, attention_s, _, total_s = self.drafted(counts_of(step), step.decode_tokens)
        if costs.many is not None and every >= costs.many_rows:
            weights_s = costs.many.products.first_s
        prompts_s = costs.host_token_s * step.prefill_tokens + costs.host_prompt_s * step.prefill_sequences
        return StepParts(
            weights_s=weights_s,
            kv_s=kv_s + costs.attention.row_s * rows,
            compute_s=linear_s + attention_s,
            all_reduce_s=costs.all_reduce_s + costs.all_reduce_token_s * every,
            host_s=max(costs.host_s * (rows > 0), costs.launch_s * (step.prefill_sequences > 0)),
            serial_s=costs.host_row_s * rows + prompts_s,
            total_s=total_s,
        )

    def step_time_s(self, shape: StepShape) -> float:
        """Seconds of one step, after the copies from the host."""
        if shape.prefill_tokens or shape.decode_tokens != shape.decode_sequences:
            copy_s = self.costs.copy_token_s * shape.copied_tokens
            return copy_s + self.drafted(counts_of(shape), shape.decode_tokens)[-1]
        return self._price(shape.decode_sequences, shape.decode_context_tokens, 0, 0, 0.0, 0)

    def step_times_s(self, steps: StepColumns) -> NDArray[np.float64]:
        """Seconds of each row, repeats included, shape (rows,)."""
        costs, rows = self.costs, steps.decode_sequences
        step_s = step_sum(costs, np.maximum)(*steps.counts, rows, 1.0)[-1]
        if costs.many is not None:
            many_s = step_sum(costs.many, np.maximum)(*steps.counts, rows, 1.0)[-1]
            step_s = np.where(rows + steps.prefill_tokens >= costs.many_rows, many_s, step_s)
        return np.asarray(step_s * steps.repeat, dtype=np.float64)

    def decode_line(self, rows: int) -> tuple[float, float]:
        """A decode step without prompts is linear in its context but for the window and the host:
        seconds of the GPU without context, and of a token of it; cached."""
        if rows not in self._lines:
            _, _, kv_s, pair_s, _, _ = self._seconds(rows, rows, 0, 0, 0, 0, rows, 1.0)
            token_s = (max(kv_s, pair_s) + self.costs.unhidden * min(kv_s, pair_s)) / rows
            self._lines[rows] = self._seconds(rows, 0, 0, 0, 0, 0, rows, 1.0)[4], token_s
        return self._lines[rows]

    def pricer(self) -> Pricer:
        """`step_time_s` as a plain function of counts, for loops of many steps.

        Arguments: decode sequences and their context tokens; prompts, their tokens, pairs and
        cached tokens.
        """
        seconds, attention = self._seconds, self.costs.attention
        window, sliding = attention.window, attention.sliding_share
        host_s, host_row_s = self.costs.host_s, self.costs.host_row_s
        lines, line_of = self._lines, self.decode_line

        def price(rows: int, context: int, prompts: int, tokens: int, pairs: float, cached: int) -> float:
            if tokens:
                return seconds(rows, context, prompts, tokens, pairs, cached, rows, 1.0)[5]
            gpu_s, token_s = lines.get(rows) or line_of(rows)
            gpu_s += token_s * context
            if window is not None and context > rows * window:
                gpu_s -= token_s * sliding * (context - rows * window)
            return (gpu_s if gpu_s > host_s else host_s) + host_row_s * rows

        return price

    def drafted(self, counts: tuple[int, int, int, int, float, int], drafted: int) -> Seconds[float]:
        """A step in which the decoding sequences have `drafted` rows in all; the last: its time."""
        rows = counts[0]
        return self._seconds(*counts, drafted, drafted / rows if rows else 1.0)
