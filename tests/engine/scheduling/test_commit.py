"""How results become tokens: ends, cancels, drafts, and batches that overlap."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED, StepKind, StepOutput

EOS, STOP = 2, 13


def answer(run, tokens):
    """Take steps, giving request 0 these tokens; returns its reason."""
    for token in tokens:
        run.token = lambda entry, token=token: (token,)
        if run.step() is None:
            break
    return run.reasons.get(0)


class TestEnds:
    def test_the_last_allowed_token_ends_with_length(self, drive):
        run = drive()
        run.add(0, 4, 3)
        assert answer(run, [9, 9]) is None
        assert answer(run, [9]) == "length"

    def test_an_eos_token_ends_the_sequence_and_is_its_last_token(self, drive):
        run = drive()
        run.add(0, 4, 10, eos_token_ids=(EOS,))
        assert answer(run, [9, EOS, 9]) == "eos_token"
        assert run.tokens[0] == [9, EOS]

    def test_ignore_eos_goes_on_to_the_length(self, drive):
        run = drive()
        run.add(0, 4, 3, eos_token_ids=(EOS,), ignore_eos=True)
        assert answer(run, [EOS, EOS, EOS]) == "length"

    def test_a_stop_token_ends_with_its_own_reason_even_where_eos_is_ignored(self, drive):
        run = drive()
        run.add(0, 4, 10, stop_token_ids=(STOP,), ignore_eos=True)
        assert answer(run, [9, STOP, 9]) == "stop_sequence"

    def test_nothing_ends_a_sequence_before_min_tokens_came_first(self, drive):
        """As in Transformers and vLLM: at least min_tokens tokens, then an end token counts."""
        run = drive()
        run.add(0, 4, 10, eos_token_ids=(EOS,), min_tokens=2)
        assert answer(run, [EOS, EOS, EOS, 9]) == "eos_token"
        assert run.tokens[0] == [EOS, EOS, EOS]

    def test_an_eos_as_the_last_allowed_token_is_an_eos(self, drive):
        run = drive()
        run.add(0, 4, 2, eos_token_ids=(EOS,))
        assert answer(run, [9, EOS]) == "eos_token"


class TestFinish:
    def test_between_steps_it_frees_the_blocks_at_once(self, drive):
        run = drive()
        run.add(0, 40, 10)
        run.add(1, 40, 10)
        run.step()
        held = run.scheduler.blocks.num_used
        run.scheduler.finish(0, "stop_sequence")
        assert run.scheduler.blocks.num_used == held / 2
        assert run.step().batch.released_seq_ids == (0,)

    def test_in_flight_it_frees_them_at_the_commit_and_the_token_is_dropped(self, drive):
        run = drive()
        run.add(0, 40, 10)
        batch = run.scheduler.plan(0.0)
        held = run.scheduler.blocks.num_used
        run.scheduler.finish(0, "cancelled")
        assert run.scheduler.blocks.num_used == held
        run.commit(batch)
        assert run.scheduler.blocks.num_used == 0
        assert run.tokens == {}
        assert run.scheduler.plan(1.0) is None

    def test_a_waiting_request_just_leaves(self, drive):
        run = drive(max_rolling_batch_size=1)
        for seq_id in range(3):
            run.add(seq_id, 4, 3)
        run.step()
        run.scheduler.finish(1, "cancelled")
        assert run.scheduler.num_waiting == 1
        run.run()
        assert run.reasons == {0: "length", 2: "length"}
        assert all(1 not in step.batch.released_seq_ids for step in run.steps)

    def test_of_an_unknown_or_ended_sequence_it_does_nothing(self, drive):
        run = drive()
        run.add(0, 4, 1)
        run.step()
        run.scheduler.finish(0, "cancelled")
        run.scheduler.finish(99, "cancelled")
        assert run.reasons == {0: "length"}

    def test_in_the_middle_of_a_split_prompt_it_leaves_a_sound_scheduler(self, drive):
        run = drive(max_rolling_batch_prefill_tokens=10)
        run.add(0, 35, 3)
        run.add(1, 5, 4)
        run.step()
        run.scheduler.finish(0, "cancelled")
        run.step()
        assert run.scheduler.identical_decode_steps() == 2  # no prompt is left to wait for
        run.run()
        assert run.reasons == {1: "length"}
        assert run.scheduler.blocks.num_free == 1000


class TestOverlap:
    def test_the_next_step_is_planned_before_its_token_is_known(self, drive):
        run = drive()
        run.add(0, 4, 3)
        first = run.scheduler.plan(0.0)
        second = run.scheduler.plan(0.0)
        assert second.entries[0].token_ids == (LAST_SAMPLED,)
        assert second.entries[0].first_position == 4
        run.commit(first)
        third = run.scheduler.plan(1.0)
        assert third.entries[0].first_position == 5
        assert run.scheduler.plan(1.0) is None  # its third and last token is on its way
        run.commit(second)
        run.commit(third)
        assert (len(run.tokens[0]), run.reasons[0]) == (3, "length")

    def test_a_token_beyond_the_end_is_dropped_and_the_blocks_wait_for_its_step(self, drive):
        run = drive()
        run.add(0, 4, 10, eos_token_ids=(7,))
        first, second = run.scheduler.plan(0.0), run.scheduler.plan(0.0)
        run.commit(first)
        assert run.reasons == {0: "eos_token"}
        assert run.scheduler.blocks.num_used == 1
        run.commit(second)
        assert run.scheduler.blocks.num_used == 0
        assert run.tokens[0] == [7]

    def test_nothing_is_preempted_while_a_batch_is_in_flight(self, drive):
        run = drive(block_size=4, num_blocks=4)
        run.add(0, 4, 8)
        run.add(1, 4, 8)
        for _ in range(4):
            run.step()
        last = run.scheduler.plan(4.0)  # fills position 7 of both; all four blocks are taken
        assert run.scheduler.plan(4.0) is None
        run.commit(last)
        assert run.scheduler.stats.preemptions == 0
        assert run.step().kinds == {0: "decode"}
        assert run.scheduler.stats.preemptions == 1

    def test_batches_are_committed_in_their_order(self, drive):
        run = drive()
        run.add(0, 4, 3)
        run.scheduler.plan(0.0)
        second = run.scheduler.plan(0.0)
        with pytest.raises(EngineError, match="not the oldest"):
            run.commit(second)


class TestDrafts:
    @pytest.fixture
    def verifying(self, drive):
        """One sequence with its first token out, about to verify two drafted tokens."""
        run = drive(drafter=lambda seq, most: (21, 22, 23, 24)[: min(2, most)])
        run.add(0, 4, 8)
        run.step()
        return run

    @pytest.mark.parametrize("tokens", [(), (5,), (21, 5), (21, 22, 5)])
    def test_rejected_positions_are_computed_anew(self, verifying, tokens):
        batch = verifying.scheduler.plan(1.0)
        entry = batch.entries[0]
        assert (entry.kind, entry.draft_length) == (StepKind.VERIFY, 2)
        assert (entry.token_ids, entry.first_position) == ((7, 21, 22), 4)
        assert (batch.shape.decode_tokens, batch.shape.decode_context_tokens) == (3, 7)
        gained = verifying.scheduler.commit(batch, [StepOutput(0, tokens)], 2.0)
        assert [g.token_ids for g in gained] == ([tokens] if tokens else [])
        following = verifying.scheduler.plan(2.0).entries[0]
        assert following.first_position == 4 + len(tokens)
        assert following.token_ids[0] == (tokens[-1] if tokens else 7)

    def test_tokens_behind_an_end_are_dropped_with_their_logprobs(self, drive):
        run = drive(drafter=lambda seq, most: (21, EOS)[:most])
        run.add(0, 4, 8, eos_token_ids=(EOS,), logprobs=True)
        run.step()
        batch = run.scheduler.plan(1.0)
        outputs = [StepOutput(0, (21, EOS, 30), (-0.1, -0.2, -0.3))]
        [gained] = run.scheduler.commit(batch, outputs, 2.0)
        assert gained.token_ids == (21, EOS)
        assert gained.logprobs == (-0.1, -0.2)
        assert gained.finish_reason == "eos_token"

    def test_no_more_is_drafted_than_may_still_be_generated(self, drive):
        run = drive(drafter=lambda seq, most: (21,) * most)
        run.add(0, 4, 3)
        run.step()
        assert run.scheduler.plan(1.0).entries[0].draft_length == 1  # and one token beside it


@pytest.mark.parametrize(
    "outputs",
    [[], [StepOutput(0)], [StepOutput(0, (1, 2))], [StepOutput(5, (1,))]],
    ids=["too few outputs", "no token", "too many tokens", "another sequence"],
)
def test_outputs_that_are_not_the_batchs_are_refused(drive, outputs):
    run = drive()
    run.add(0, 4, 3)
    batch = run.scheduler.plan(0.0)
    with pytest.raises(EngineError, match="executor returned"):
        run.scheduler.commit(batch, outputs, 1.0)
