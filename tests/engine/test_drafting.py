"""Guessed tokens save steps and change nothing: over memories that know what was written where."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.scheduling.adaptive_drafting import AdaptiveDrafter, best_draft_length
from lmi_bench.engine.scheduling.batch import DRAFTED, StepBatch, StepOutput
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter, NgramDrafter
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.scheduling.sequence import Sequence
from lmi_bench.engine.simulated import SimulatedExecutor


def right(context) -> int:
    return hash(tuple(context)) % 41


def wrong_now_and_then(context) -> int:
    return right(context) if len(context) % 3 else 40 - right(context)


def always_wrong(context) -> int:
    return right(context) + 1


class Memory:
    """Writes ids into block slots; its next token is a function of what it reads back."""

    def __init__(self, rule, block_size) -> None:
        self.rule, self.block_size, self.max_in_flight = rule, block_size, 1
        self.slots: dict[tuple[int, int], int] = {}
        self.tables: dict[int, list[int]] = {}
        self.closed = False

    def slot(self, seq_id, position):
        block, offset = divmod(position, self.block_size)
        return (self.tables[seq_id][block], offset)

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        await asyncio.sleep(1.0)
        for seq_id in batch.released_seq_ids:
            self.tables.pop(seq_id, None)
        for entry in batch.entries:
            assert DRAFTED not in entry.token_ids
            if entry.first_position == 0:
                self.tables[entry.seq_id] = []
            self.tables[entry.seq_id] += entry.new_block_ids
            for position, token_id in enumerate(entry.token_ids, entry.first_position):
                self.slots[self.slot(entry.seq_id, position)] = token_id
        return [self.output(entry) for entry in batch.entries]

    def output(self, entry):
        if not entry.samples:
            return StepOutput(entry.seq_id)
        end = entry.first_position + len(entry.token_ids)
        context = [self.slots[self.slot(entry.seq_id, position)] for position in range(end)]
        tokens = []
        for length in range(end - entry.draft_length, end + 1):
            tokens.append(self.rule(context[:length]))
            if length < end and context[length] != tokens[-1]:
                break
        return StepOutput(entry.seq_id, tuple(tokens))

    async def close(self):
        self.closed = True


requests = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8)
configs = st.builds(
    dict,
    num_blocks=st.sampled_from([13, 25, 60]),
    block_size=st.sampled_from([4, 5, 16]),
    max_rolling_batch_size=st.integers(1, 5),
    max_rolling_batch_prefill_tokens=st.sampled_from([7, 50]),
    chunked_prefill=st.booleans(),
    kv_layout=st.sampled_from(["paged", "contiguous"]),
)


def run(executor, drafter, config, arrivals):
    """Tokens of every request, and the engine's counts."""

    async def main():
        scheduler = Scheduler(config, drafter=drafter)
        async with AsyncEngine(scheduler, executor) as engine:
            running = []
            for seq_id, (delay_s, num_prompt, num_output) in enumerate(arrivals):
                await asyncio.sleep(delay_s)
                prompt = tuple(range(seq_id, seq_id + num_prompt))
                sampling = SamplingParams(max_new_tokens=num_output)
                running.append(engine.submit(prompt, sampling))
            for generation in running:
                await generation.wait()
            scheduler.audit()
            assert scheduler.blocks.num_used == 0
            tokens = [[t for event in g.events for t in event.token_ids] for g in running]
            return tokens, engine.stats().done, running

    return run_virtual(main())


def alone(seq_id, num_prompt, num_output):
    context = list(range(seq_id, seq_id + num_prompt))
    while len(context) < num_prompt + num_output:
        context.append(right(context))
    return context[num_prompt:]


@settings(max_examples=80)
@given(requests, configs, st.integers(1, 6), st.sampled_from([right, wrong_now_and_then, always_wrong]), st.booleans())
def test_a_draft_model_changes_no_token_and_follows_every_sequence(arrivals, config, k, rule, adaptive):
    """A draft that is the model itself is always right, if it sees all that the model sees, also
    where it was not asked for many steps.
    """
    config = SchedulerConfig(**config)
    executor = DraftingExecutor(Memory(right, config.block_size), Memory(rule, config.block_size))
    drafter = ExecutorDrafter(k)
    if adaptive:
        drafter = AdaptiveDrafter(drafter, k, guess_cost_frac=0.3, probe_every=4)
    tokens, stats, _ = run(executor, drafter, config, arrivals)
    assert tokens == [alone(i, *lengths) for i, (_, *lengths) in enumerate(arrivals)]
    if rule is right:
        assert stats.accepted_tokens == stats.drafted_tokens


def test_tokens_are_lost_to_no_preemption_while_a_draft_runs():
    config = SchedulerConfig(num_blocks=10, block_size=4, max_rolling_batch_size=4)
    executor = DraftingExecutor(Memory(right, 4), Memory(right, 4))
    arrivals = [(0, 8, 20), (0, 8, 20), (0, 8, 20)]
    tokens, stats, _ = run(executor, ExecutorDrafter(3), config, arrivals)
    assert tokens == [alone(i, 8, 20) for i in range(3)]
    assert stats.preemptions > 0
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_a_draft_that_is_always_right_saves_all_but_one_step_in_k_plus_1():
    """16 tokens: one from the prefill, then 5 steps of 3: 2 drafted ones and the model's own."""
    executor = DraftingExecutor(Memory(right, 16), Memory(right, 16))
    _, stats, (generation,) = run(executor, ExecutorDrafter(2), SchedulerConfig(num_blocks=9), [(0, 5, 16)])
    assert stats.steps == 1 + 5
    assert (stats.drafted_tokens, stats.accepted_tokens) == (10, 10)
    assert (generation.drafted_tokens, generation.accepted_tokens) == (10, 10)
    assert stats.tokens_per_decode == 3.0
    assert stats.draft_acceptance_frac == 1.0


def test_closing_closes_both():
    target, draft = Memory(right, 4), Memory(right, 4)
    asyncio.run(DraftingExecutor(target, draft).close())
    assert (target.closed, draft.closed) == (True, True)


def test_other_blocks_than_the_models_are_refused():
    with pytest.raises(InputError, match="blocks of 8 tokens, the target model 4"):
        DraftingExecutor(Memory(right, 4), Memory(right, 8))


@settings(max_examples=60)
@given(requests, configs, st.integers(1, 6))
def test_look_up_changes_no_token(arrivals, config, k):
    config = SchedulerConfig(**config)
    executor = Memory(right, config.block_size)
    tokens, _, _ = run(executor, NgramDrafter(k, longest=2, shortest=1), config, arrivals)
    assert tokens == [alone(i, *lengths) for i, (_, *lengths) in enumerate(arrivals)]


class TestLookUp:
    def guess(self, prompt, output=(), *, most=8, **options):
        seq = Sequence(0, 0, prompt, SamplingParams(), 0.0, len(prompt), len(prompt))
        drafter = NgramDrafter(options.pop("num_tokens", 4), **options)
        seq.output_token_ids = []
        guess = drafter(seq, most)
        for token_id in output:  # as it grows, token by token
            seq.output_token_ids.append(token_id)
            guess = drafter(seq, most)
        return guess

    def test_what_followed_last_time_is_guessed(self):
        assert self.guess((1, 2, 3, 4, 5, 6, 9, 1, 2)) == (3, 4, 5, 6)

    def test_the_latest_place_counts(self):
        assert self.guess((1, 2, 3, 8, 1, 2, 4, 8, 7, 1, 2), num_tokens=1) == (4,)

    def test_the_longer_run_goes_first(self):
        """2 3 was followed by 5 last, but 1 2 3 by 4."""
        assert self.guess((1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3), num_tokens=1) == (4,)

    def test_new_tokens_give_no_guess(self):
        assert self.guess((1, 2, 3, 4, 5, 6)) == ()

    def test_a_guess_that_reaches_the_end_goes_on_with_the_period(self):
        assert self.guess((7, 1, 2, 1, 2)) == (1, 2, 1, 2)

    def test_no_more_is_guessed_than_asked_for(self):
        assert self.guess((1, 2, 3, 4, 5, 6, 9, 1, 2), most=2) == (3, 4)

    def test_output_is_looked_up_as_the_prompt_is(self):
        assert self.guess((1, 2, 3), output=(4, 5, 1, 2), num_tokens=2) == (3, 4)
        assert self.guess((9,), output=(1, 2, 3, 8, 1, 2), num_tokens=2) == (3, 8)

    def test_wrong_settings_are_refused(self):
        with pytest.raises(InputError, match="at least 1, got 0"):
            NgramDrafter(0)
        with pytest.raises(InputError, match="got 3 to 2"):
            NgramDrafter(1, longest=2, shortest=3)


class TestAdaptation:
    """The chance of a guess is estimated from what held; the best length follows from it."""

    @pytest.mark.parametrize("cost", [0.02, 0.1, 0.4])
    @pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.8, 1.0])
    def test_the_length_is_the_best_of_all_by_simulation(self, chance, cost):
        """Against the mean number of tokens over 4000 drawn steps of each length."""
        draw = random.Random(1)
        speeds = []
        for length in range(9):
            tokens = 0
            for _ in range(4000):
                held = 0
                while held < length and draw.random() < chance:
                    held += 1
                tokens += held + 1
            speeds.append(tokens / 4000 / (1 + cost * length))
        chosen = best_draft_length(chance, cost, most=8)
        assert speeds[chosen] >= 0.97 * max(speeds)

    def drafts(self, rule, *, probe_every=16, cost=0.1):
        executor = DraftingExecutor(Memory(right, 16), Memory(rule, 16))
        drafter = AdaptiveDrafter(ExecutorDrafter(4), 4, guess_cost_frac=cost, probe_every=probe_every)
        _, stats, _ = run(executor, drafter, SchedulerConfig(num_blocks=40), [(0, 5, 200)])
        return stats

    def test_guesses_that_never_hold_stop_but_for_a_probe_now_and_then(self):
        """199 decode steps: some guesses until the estimate has sunk, then one in 16 steps."""
        stats = self.drafts(always_wrong)
        assert stats.steps == 200
        assert stats.accepted_tokens == 0
        assert 199 // 16 <= stats.drafts <= 199 // 16 + 8
        assert stats.drafted_tokens < 40  # 4 a step would be 790

    def test_guesses_that_always_hold_keep_their_full_length(self):
        """199 tokens, 5 a step: 39.8 steps."""
        stats = self.drafts(right)
        assert stats.steps == 1 + 40
        assert stats.tokens_per_decode == pytest.approx(199 / 40)

    def test_a_text_that_becomes_easier_is_noticed(self):
        def wrong_at_first(context):
            return right(context) + (len(context) < 100)

        stats = self.drafts(wrong_at_first)
        assert stats.steps < 150
        assert stats.drafted_tokens - stats.accepted_tokens < 60

    def test_a_cost_of_nothing_is_refused(self):
        with pytest.raises(InputError, match="guess_cost_frac must be above 0"):
            AdaptiveDrafter(ExecutorDrafter(2), 2, guess_cost_frac=0)


class Tenth:
    def step_time_s(self, shape):
        return 0.1


def test_a_simulated_engine_accepts_the_stated_share():
    """Each of up to 3 guesses holds with chance 0.7 if those before it did: 0.7 + 0.49 + 0.343
    a step on average, over about 800 steps."""
    executor = SimulatedExecutor(Tenth(), draft_acceptance=0.7)
    config = SchedulerConfig(num_blocks=2000)
    _, stats, _ = run(executor, ExecutorDrafter(3), config, [(0, 5, 500)] * 4)
    assert stats.tokens_per_decode == pytest.approx(1 + 0.7 + 0.49 + 0.343, rel=0.05)


@pytest.mark.parametrize(("chance", "steps"), [(0.0, 17), (1.0, 1 + 4)])
def test_a_simulated_draft_saves_steps_only_where_it_holds(chance, steps):
    executor = SimulatedExecutor(Tenth(), draft_acceptance=chance)
    _, stats, _ = run(executor, ExecutorDrafter(3), SchedulerConfig(num_blocks=9), [(0, 5, 17)])
    assert stats.steps == steps
