"""Blocks: who gets them, what happens when they run out, what is refused."""

from __future__ import annotations

from typing import ClassVar

import pytest

from lmi_bench.core.errors import CapacityError, InputError, OverloadedError
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler


def test_a_table_grows_by_one_block_when_its_last_one_is_full(drive):
    """Blocks of 4: a prompt of 6 takes 2; positions 8 and 12 open the third and fourth."""
    run = drive(block_size=4).run([(0.0, 6, 9)])
    added = [len(step.batch.entries[0].new_block_ids) for step in run.steps]
    first = [step.batch.entries[0].first_position for step in run.steps]
    assert first == [0, 6, 7, 8, 9, 10, 11, 12, 13]
    assert added == [2, 0, 0, 1, 0, 0, 0, 1, 0]


def test_the_block_table_is_the_blocks_that_the_steps_announced(drive):
    run = drive(block_size=4)
    for seq_id in range(3):
        run.add(seq_id, 5, 12)
    announced = {0: [], 1: [], 2: []}
    for _ in range(9):
        for entry in run.step().batch.entries:
            announced[entry.seq_id] += entry.new_block_ids
        tables = {seq_id: list(run.scheduler.block_table(seq_id)) for seq_id in announced}
        assert tables == announced
        held = [block for table in tables.values() for block in table]
        assert len(set(held)) == len(held) == run.scheduler.blocks.num_used


def test_contiguous_reserves_the_whole_length_and_paged_what_is_filled(drive):
    """Prompt 8, output 24, blocks of 4: 8 blocks at once, or 2 and one more every 4 tokens."""
    contiguous = drive(block_size=4, kv_layout="contiguous")
    paged = drive(block_size=4)
    for run in (contiguous, paged):
        run.add(0, 8, 24)
        run.step()
    assert contiguous.scheduler.blocks.num_used == 8
    assert paged.scheduler.blocks.num_used == 2
    assert contiguous.run().tokens == paged.run().tokens


def test_the_same_memory_holds_a_larger_paged_batch(drive):
    """40 blocks of 4 tokens; 8 + 24 tokens take 8 blocks contiguous: a batch of 5."""
    requests = [(0.0, 8, 24)] * 20
    contiguous = drive(block_size=4, num_blocks=40, kv_layout="contiguous").run(requests)
    paged = drive(block_size=4, num_blocks=40).run(requests)
    assert contiguous.scheduler.stats.peak_running == 5
    assert contiguous.scheduler.stats.preemptions == 0
    assert paged.scheduler.stats.peak_running > 5
    assert len(paged.steps) < len(contiguous.steps)


class TestWindow:
    """A window of 8 over blocks of 4: a decoding sequence holds 3 blocks at most."""

    REQUESTS: ClassVar = [(0.0, 6, 40)] * 4  # 46 tokens take 12 blocks

    def test_blocks_behind_it_are_given_back_while_decoding(self, drive):
        run = drive(block_size=4, num_blocks=12, attention_window=8)
        run.add(0, 6, 40)
        held = []
        while run.step():
            held.append(run.scheduler.blocks.num_used)
        # after 6, 7, ... tokens; block 0 (positions 0 to 3) is last seen by position 10
        assert held[:11] == [2, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2]
        assert max(held) == 3

    def test_four_sequences_share_what_one_would_fill_alone(self, drive):
        windows = drive(block_size=4, num_blocks=12, attention_window=8).run(self.REQUESTS)
        assert windows.scheduler.stats.preemptions == 0
        assert windows.scheduler.stats.peak_running == 4
        whole = drive(block_size=4, num_blocks=12).run(self.REQUESTS)
        assert whole.scheduler.stats.preemptions > 0
        assert windows.tokens == whole.tokens

    def test_a_contiguous_reservation_stays_whole(self, drive):
        tables = []
        for window in (8, None):
            run = drive(block_size=4, num_blocks=12, attention_window=window, kv_layout="contiguous")
            run.add(0, 6, 40)
            tables.append([run.scheduler.blocks.num_used for _ in iter(run.step, None)])
        assert tables[0] == tables[1]
        assert max(tables[0]) == 12

    def test_a_window_of_nothing_is_refused(self):
        with pytest.raises(InputError, match="attention_window must be at least 1"):
            SchedulerConfig(num_blocks=1, attention_window=0)


class TestPreemption:
    def test_the_youngest_gives_way_and_computes_its_tokens_again(self, drive):
        """Blocks of 4, 5 of them. Prompts of 4, one block each and one to spare for the second's
        headroom; at position 4 both open a second, at 8 the older one takes the last."""
        run = drive(block_size=4, num_blocks=5, max_model_len=20)
        run.run([(0.0, 4, 12), (0.0, 4, 9)])
        stats = run.scheduler.stats
        assert stats.preemptions == 1
        assert run.tokens.keys() == {0, 1}
        assert [len(run.tokens[seq_id]) for seq_id in (0, 1)] == [12, 9]
        again = [step.batch.entries[0] for step in run.steps if step.kinds.get(1) == "prefill" and step.start_s > 0]
        # 4 prompt tokens and the 5 or more it had by then, its own tokens included
        assert [entry.first_position for entry in again] == [0]
        assert list(again[0].token_ids) == [0, 1, 2, 3] + [7] * (len(again[0].token_ids) - 4)
        assert len(again[0].token_ids) == 4 + 5

    def test_the_executor_is_told_before_the_blocks_are_used_again(self, drive):
        run = drive(block_size=4, num_blocks=5, max_model_len=20)
        run.run([(0.0, 4, 12), (0.0, 4, 9)])
        released = [step.batch.released_seq_ids for step in run.steps]
        preempted_at = next(i for i, ids in enumerate(released) if ids)
        assert released[preempted_at] == (1,)
        assert run.steps[preempted_at].kinds == {0: "decode"}

    def test_the_oldest_never_loses_its_blocks(self, drive):
        run = drive(block_size=1, num_blocks=30, max_model_len=30).run([(0.0, 3, 25)] * 6)
        assert run.scheduler.stats.preemptions > 0
        prefills = [s for s in run.steps if s.kinds.get(0) == "prefill"]
        assert len(prefills) == 1
        assert list(run.reasons) == [0, 1, 2, 3, 4, 5]  # first come, first finished

    def test_the_youngest_is_the_last_to_arrive_even_if_it_was_added_first(self, drive):
        run = drive(block_size=4, num_blocks=5)
        run.now_s = 9.0
        run.add(0, 4, 12)
        run.step()
        run.now_s = 2.0
        run.add(1, 4, 12)
        run.run()
        released = [seq_id for step in run.steps for seq_id in step.batch.released_seq_ids]
        assert released[0] == 0
        assert list(run.reasons) == [1, 0]

    def test_a_newcomer_leaves_one_block_for_each_that_runs(self, drive):
        """6 blocks: two prompts of one block run and hold 2; the third needs 3 and leaves 1 < 2."""
        run = drive(block_size=4, num_blocks=6)
        run.add(0, 4, 12)
        run.add(1, 4, 12)
        run.add(2, 12, 4)
        run.step()
        assert (run.scheduler.num_running, run.scheduler.num_waiting) == (2, 1)

    def test_a_dynamic_batch_goes_on_without_a_preempted_member(self, drive):
        run = drive(policy="dynamic", batch_size=2, block_size=4, num_blocks=5, max_batch_delay_s=0.0).run(
            [(0.0, 4, 12), (0.0, 4, 12)]
        )
        assert run.scheduler.stats.preemptions == 1
        assert [len(tokens) for tokens in run.tokens.values()] == [12, 12]


class TestRefusals:
    def test_what_the_cache_could_never_hold_is_refused_with_the_numbers(self):
        scheduler = Scheduler(SchedulerConfig(num_blocks=64))
        with pytest.raises(CapacityError) as caught:
            scheduler.add(17, range(3072), SamplingParams(max_new_tokens=1024), 0.0)
        message = str(caught.value)
        for part in ("1,024 tokens", "request 17", "4,096", "3,072", "from 64 to at least 256"):
            assert part in message

    def test_what_fits_exactly_runs_alone_to_its_end(self, drive):
        run = drive(num_blocks=4, block_size=4).run([(0.0, 10, 6), (0.0, 10, 6)])
        assert run.reasons == {0: "length", 1: "length"}

    def test_more_than_the_model_length_is_refused(self):
        scheduler = Scheduler(SchedulerConfig(num_blocks=1000, max_model_len=100))
        scheduler.add(0, range(60), SamplingParams(max_new_tokens=40), 0.0)
        with pytest.raises(CapacityError, match=r"101 tokens .* at most\s+100"):
            scheduler.add(1, range(60), SamplingParams(max_new_tokens=41), 0.0)

    def test_the_129th_request_is_refused_at_once_and_the_others_go_on(self, drive):
        run = drive(max_concurrent_requests=128)
        for seq_id in range(128):
            run.add(seq_id, 4, 2)
        with pytest.raises(OverloadedError, match="128 requests"):
            run.add(128, 4, 2)
        run.run()
        assert len(run.reasons) == 128
        run.add(129, 4, 2)  # there is room again

    def test_an_empty_prompt_and_a_used_id_are_bad_input(self, drive):
        run = drive()
        with pytest.raises(InputError, match="empty prompt"):
            run.add(0, 0, 2)
        run.add(1, 1, 2)
        with pytest.raises(InputError, match="unique"):
            run.add(1, 1, 2)
