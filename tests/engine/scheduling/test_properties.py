"""Whatever arrives and however little memory there is: right tokens, sound books, an end.

The executor here is a memory: it writes token ids into block slots and its next token is a function
of what it reads back through the block table. A wrong table, a block in two hands or a lost token
changes the answer, which is compared with generation without any blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.errors import CapacityError
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED, StepBatch, StepKind, StepOutput, WaitUntil
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler

EOS = (0, 1, 2)


def next_token(context) -> int:
    return hash(tuple(context)) % 41


def generate(prompt, sampling, window=None) -> list[int]:
    """The reference: no blocks, no batch."""
    tokens = []
    while len(tokens) < sampling.max_new_tokens:
        tokens.append(next_token([*prompt, *tokens][-(window or 0) :]))
        if tokens[-1] in EOS and not sampling.ignore_eos:
            break
    return tokens


class PagedMemory:
    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.slots: dict[tuple[int, int], int] = {}
        self.tables: dict[int, list[int]] = {}
        self.last_sampled: dict[int, int] = {}

    def slot(self, seq_id: int, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_size)
        return (self.tables[seq_id][block], offset)

    def run(self, batch: StepBatch) -> list[StepOutput]:
        for seq_id in batch.released_seq_ids:
            del self.tables[seq_id]
        for entry in batch.entries:
            if entry.begins:
                assert entry.seq_id not in self.tables, "begun twice without a release"
                self.tables[entry.seq_id] = []
            self.tables[entry.seq_id] += entry.new_block_ids
            for position, token_id in enumerate(entry.cached_token_ids):
                assert self.slots[self.slot(entry.seq_id, position)] == token_id
            for position, token_id in enumerate(entry.token_ids, entry.first_position):
                known = self.last_sampled[entry.seq_id] if token_id == LAST_SAMPLED else token_id
                self.slots[self.slot(entry.seq_id, position)] = known
        return [self.output(entry) for entry in batch.entries]

    def output(self, entry) -> StepOutput:
        if not entry.samples:
            return StepOutput(entry.seq_id)
        end = entry.first_position + len(entry.token_ids)
        tokens = []
        for length in range(end - entry.draft_length, end + 1):
            seen = range(0 if self.window is None else max(0, length - self.window), length)
            context = [self.slots[self.slot(entry.seq_id, position)] for position in seen]
            tokens.append(next_token(context))
            if length < end and self.slots[self.slot(entry.seq_id, length)] != tokens[-1]:
                break  # the drafted token was wrong
        self.last_sampled[entry.seq_id] = tokens[-1]
        return StepOutput(entry.seq_id, tuple(tokens))


def half_right(window: int | None):
    def guess(seq, most: int) -> tuple[int, ...]:
        """Drafts that hold, except that every third one is wrong."""
        context = [*seq.prompt_token_ids, *seq.output_token_ids]
        for _ in range(most):
            token = next_token(context[-(window or 0) :])
            context.append(40 - token if len(context) % 3 == 0 else token)
        return tuple(context[len(context) - most :])

    return guess


requests = st.lists(
    st.tuples(
        st.integers(0, 30),  # arrival
        st.integers(1, 40),  # prompt
        st.integers(1, 25),  # output
        st.booleans(),  # ignore_eos
        st.one_of(st.none(), st.none(), st.integers(0, 40)),  # cancelled at
    ),
    min_size=1,
    max_size=12,
)

configs = st.builds(
    dict,
    num_blocks=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 5, 16]),
    max_model_len=st.sampled_from([30, 64]),
    policy=st.sampled_from(["none", "dynamic", "rolling", "rolling"]),
    kv_layout=st.sampled_from(["paged", "paged", "contiguous"]),
    batch_size=st.integers(1, 5),
    max_batch_delay_s=st.sampled_from([0.0, 3.5]),
    max_rolling_batch_size=st.integers(1, 6),
    max_rolling_batch_prefill_tokens=st.integers(1, 50),
    chunked_prefill=st.booleans(),
    prefix_caching=st.booleans(),
    attention_window=st.sampled_from([None, None, 1, 4, 17]),
) | st.builds(
    dict,
    num_blocks=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 5, 16]),
    max_model_len=st.sampled_from([30, 64]),
    kv_layout=st.sampled_from(["paged", "contiguous"]),
    max_rolling_batch_size=st.integers(1, 6),
    max_rolling_batch_prefill_tokens=st.integers(1, 50),
    attention_window=st.sampled_from([None, 4]),
    recompute_on_join=st.just(True),
)


budgets = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), max_size=4)
"""(when, KV blocks that may be used from then on)"""


@settings(max_examples=250)
@given(requests, configs, st.sampled_from([1, 2]), st.booleans(), budgets)
def test_every_request_gets_its_own_tokens_or_is_refused(arrivals, config, depth, drafts, budgets):
    config = SchedulerConfig(**config)
    window = config.attention_window
    scheduler = Scheduler(config, drafter=half_right(window) if drafts else None)
    memory = PagedMemory(config.block_size, window)
    waiting = deque(sorted(enumerate(arrivals), key=lambda item: item[1][0]))
    cancels = {i: at for i, (*_, at) in enumerate(arrivals) if at is not None}
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    refused, expected, cancelled = set(), {}, set()
    in_flight: deque = deque()
    now = 0
    for _ in range(5000):
        while waiting and waiting[0][1][0] <= now:
            seq_id, (arrival, num_prompt, num_output, ignore_eos, _) = waiting.popleft()
            start = seq_id % 3  # some have a common beginning
            prompt = range(start, start + num_prompt)
            sampling = SamplingParams(max_new_tokens=num_output, ignore_eos=ignore_eos, eos_token_ids=EOS)
            try:
                scheduler.add(seq_id, prompt, sampling, arrival)
            except CapacityError:
                too_long = num_prompt + num_output
                assert too_long > min(config.max_model_len, config.cache_tokens)
                refused.add(seq_id)
            else:
                expected[seq_id] = generate(prompt, sampling, window)
                tokens[seq_id] = []
        for seq_id, at in list(cancels.items()):
            if at <= now and seq_id in expected:
                scheduler.finish(seq_id, "cancelled")
                cancelled.add(seq_id)
                del cancels[seq_id]
        for at, blocks in budgets:
            if at <= now:
                scheduler.set_block_budget(blocks)
        planned = scheduler.plan(now)
        if isinstance(planned, StepBatch):
            in_flight.append((planned, memory.run(planned)))
            assert planned.shape.prefill_tokens <= config.max_rolling_batch_prefill_tokens
        elif not in_flight:
            upcoming = [at for at in cancels.values() if at > now]
            upcoming += [waiting[0][1][0]] if waiting else []
            upcoming += [planned.at_s] if isinstance(planned, WaitUntil) else []
            if not upcoming:
                break
            now = min(upcoming)
            continue
        if len(in_flight) < depth and isinstance(planned, StepBatch):
            continue
        batch, outputs = in_flight.popleft()
        now += 1
        for gained in scheduler.commit(batch, outputs, now):
            assert gained.seq_id not in reasons
            assert gained.seq_id not in cancelled
            tokens[gained.seq_id] += gained.token_ids
            if gained.finish_reason is not None:
                reasons[gained.seq_id] = gained.finish_reason
        scheduler.audit()
        allowed = max(0, scheduler.blocks.budget - scheduler.blocks.num_used)
        assert scheduler.blocks.num_free == allowed
    else:
        pytest.fail("still running after 5000 steps")
    assert refused | set(expected) == set(range(len(arrivals)))
    for seq_id, right in expected.items():
        if seq_id in reasons:
            assert tokens[seq_id] == right
            eos = right[-1] in EOS and not arrivals[seq_id][3]
            assert reasons[seq_id] == ("eos_token" if eos else "length")
        else:
            assert seq_id in cancelled
            assert tokens[seq_id] == right[: len(tokens[seq_id])]
    scheduler.set_block_budget(config.num_blocks)
    assert scheduler.blocks.num_free == config.num_blocks
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_no_step_is_skipped_where_a_window_frees_cached_blocks():
    """Freed one by one they are the next to be evicted; freed at once after growth, others are."""
    config = SchedulerConfig(num_blocks=27, block_size=1, max_model_len=30, prefix_caching=True, attention_window=4)
    for window, skips in ((4, False), (None, True)):
        scheduler = Scheduler(replace(config, attention_window=window))
        scheduler.add(0, range(5), SamplingParams(max_new_tokens=22), 0.0)
        batch = scheduler.plan(0.0)
        scheduler.commit(batch, [StepOutput(0, (9,))], 0.0)
        assert bool(scheduler.identical_decode_steps()) is skips


@settings(max_examples=120)
@given(requests, configs, st.data())
def test_skipped_decode_steps_leave_the_scheduler_as_taken_ones_do(arrivals, config, data):
    """One scheduler takes every step; its twin skips as many of each run as it may, or fewer."""
    config = SchedulerConfig(**config)
    stepped, skipping = Scheduler(config), Scheduler(config)
    for seq_id, (_, num_prompt, num_output, _, _) in enumerate(arrivals):
        for scheduler in (stepped, skipping):
            try:
                scheduler.add(seq_id, range(num_prompt), SamplingParams(max_new_tokens=num_output), 0.0)
            except CapacityError:
                break

    def take_step(scheduler):
        batch = scheduler.plan(10.0)  # past every delay
        if not isinstance(batch, StepBatch):
            return None
        outputs = [StepOutput(e.seq_id, (9,) if e.samples else ()) for e in batch.entries]
        return batch.shape, batch.step_id, scheduler.commit(batch, outputs, 10.0)

    for _ in range(3000):
        steps = skipping.identical_decode_steps()
        assert steps == stepped.identical_decode_steps()
        if steps:
            steps = data.draw(st.integers(1, steps))
            shape = skipping.decode_shape()
            skipping.skip_decode_steps(steps, 9)
            for number in range(steps):
                taken, _, gained = take_step(stepped)
                assert taken.decode_context_tokens == (shape.decode_context_tokens + number * shape.decode_sequences)
                assert taken.num_tokens == shape.num_tokens
                assert not any(tokens.finish_reason for tokens in gained)
            skipping.audit()
            assert skipping.stats == stepped.stats
            assert skipping.blocks.num_free == stepped.blocks.num_free
            assert skipping.running_seq_ids() == stepped.running_seq_ids()
        ours, theirs = take_step(stepped), take_step(skipping)
        assert ours == theirs
        if ours is None:
            return
    pytest.fail("still running after 3000 rounds")


@pytest.mark.parametrize("window", [1, 4, 9])
def test_steps_are_not_identical_beyond_the_block_that_lets_the_next_one_in(window):
    """The oldest in the queue waits for blocks, and those behind a window come free on the way."""
    config = SchedulerConfig(
        num_blocks=12, block_size=5, max_model_len=64, max_rolling_batch_size=4, attention_window=window
    )
    scheduler = Scheduler(config)
    lengths = [(1, 14), (3, 20), (33, 20), (1, 20), (36, 6), (30, 8)]
    for seq_id, (num_prompt, num_output) in enumerate(lengths):
        scheduler.add(seq_id, range(num_prompt), SamplingParams(max_new_tokens=num_output), 0.0)
    waited = False
    while isinstance(planned := scheduler.plan(10.0), StepBatch):
        outputs = [StepOutput(e.seq_id, (9,) if e.samples else ()) for e in planned.entries]
        scheduler.commit(planned, outputs, 10.0)
        promised = scheduler.identical_decode_steps()
        waited |= bool(promised and scheduler.num_waiting and scheduler.num_running < 4)
        for _ in range(promised):
            planned = scheduler.plan(10.0)
            assert {entry.kind for entry in planned.entries} == {StepKind.DECODE}
            outputs = [StepOutput(entry.seq_id, (9,)) for entry in planned.entries]
            scheduler.commit(planned, outputs, 10.0)
    assert waited
