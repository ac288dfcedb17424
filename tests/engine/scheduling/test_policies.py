"""Each batching policy, seen in the trace of its steps. A step takes one second here."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lmi_bench.core.errors import InputError, OverloadedError
from lmi_bench.engine.scheduling.batch import StepBatch, WaitUntil
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.conftest import Drive

MIXED = [(0.0, 20, 500), (0.0, 500, 20)] * 8


def decode_rows(run):
    return [step.batch.shape.decode_sequences for step in run.steps]


def test_without_batching_one_request_runs_at_a_time_and_first_come_is_first_served(drive):
    run = drive(policy="none").run([(0.0, 4, 3), (0.0, 4, 2), (0.5, 4, 1)])
    assert [list(step.kinds) for step in run.steps] == [[0], [0], [0], [1], [1], [2]]


def test_a_prompt_is_computed_in_one_pass_that_gives_the_first_token(drive):
    """Prefill of n tokens gives one token; the others take a decode step each."""
    run = drive().run([(0.0, 100, 5)])
    assert [next(iter(step.kinds.values())) for step in run.steps] == ["prefill"] + ["decode"] * 4
    assert run.steps[0].prompt_tokens == 100
    assert run.token_times_s[0] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_as_many_prefills_as_requests(drive):
    run = drive(max_rolling_batch_size=4).run([(0.3 * i, 10, 7) for i in range(9)])
    prefills = [e for step in run.steps for e in step.batch.entries if e.kind == "prefill"]
    assert sorted(entry.seq_id for entry in prefills) == list(range(9))


class TestDynamic:
    def test_a_full_batch_leaves_at_once(self, drive):
        run = drive(policy="dynamic", batch_size=3, max_batch_delay_s=10.0)
        run.run([(0.0, 4, 2), (1.0, 4, 2), (2.0, 4, 2)])
        assert run.steps[0].start_s == 2.0
        assert list(run.steps[0].kinds) == [0, 1, 2]

    def test_a_batch_that_does_not_fill_leaves_when_its_oldest_member_has_waited(self, drive):
        run = drive(policy="dynamic", batch_size=3, max_batch_delay_s=10.0)
        run.run([(1.0, 4, 2), (5.0, 4, 2)])
        assert run.steps[0].start_s == 11.0
        assert list(run.steps[0].kinds) == [0, 1]

    def test_it_says_until_when_it_waits(self, drive):
        run = drive(policy="dynamic", batch_size=2, max_batch_delay_s=0.1)
        assert run.scheduler.plan(0.0) is None
        run.now_s = 3.0
        run.add(0, 4, 2)
        assert run.scheduler.plan(3.0) == WaitUntil(3.0 + 0.1)
        assert isinstance(run.scheduler.plan(3.0 + 0.1), StepBatch)

    def test_nobody_enters_before_the_whole_batch_has_ended(self, drive):
        run = drive(policy="dynamic", batch_size=2, max_batch_delay_s=0.0)
        run.run([(0.0, 4, 10), (0.0, 4, 2), (0.5, 4, 2)])
        assert [list(step.kinds) for step in run.steps[:2]] == [[0, 1], [0, 1]]
        assert [list(step.kinds) for step in run.steps[2:10]] == [[0]] * 8
        assert run.steps[10].start_s == 10.0
        assert list(run.steps[10].kinds) == [2]

    def test_who_waits_for_the_next_batch_does_not_disturb_this_one(self, drive):
        """One member left with 9 tokens to go, of which the last is not like the others."""
        run = drive(policy="dynamic", batch_size=2, max_batch_delay_s=0.0)
        run.add(0, 4, 10)
        run.step()
        run.add(1, 4, 10)
        assert run.scheduler.identical_decode_steps() == 8

    def test_slots_of_ended_members_stand_idle_and_are_counted(self, drive):
        """Outputs of 10 and 2: 9 decode steps of 2 slots, of which 9 + 1 are used."""
        run = drive(policy="dynamic", batch_size=2).run([(0.0, 4, 10), (0.0, 4, 2)])
        stats = run.scheduler.stats
        assert (stats.slot_steps_used, stats.slot_steps_idle) == (10, 8)
        assert stats.slot_waste_frac == pytest.approx(8 / 18)

    def test_batches_vary_with_arrivals_and_no_limit_is_passed(self, drive):
        draw = random.Random(5)
        at_s, arrivals = 0.0, []
        for _ in range(60):
            at_s += draw.expovariate(0.8)
            arrivals.append((at_s, 4, 5))
        run = drive(policy="dynamic", batch_size=4, max_batch_delay_s=2.0).run(arrivals)
        leaves = [step for step in run.steps if step.prompt_tokens]
        sizes = [len(step.batch.entries) for step in leaves]
        assert max(sizes) == 4
        assert min(sizes) < 4
        busy_until_s = 0.0
        for step in leaves:  # free engine: no batch leaves later than its oldest member's delay
            oldest_s = min(arrivals[seq_id][0] for seq_id in step.kinds)
            assert step.start_s <= max(oldest_s + 2.0, busy_until_s) + 1e-9
            busy_until_s = step.start_s + 5.0  # one prefill and four decode steps

    def test_a_batch_of_many_prompts_is_prefilled_in_passes_before_it_decodes(self, drive):
        run = drive(policy="dynamic", batch_size=3, max_rolling_batch_prefill_tokens=100)
        run.run([(0.0, 60, 2)] * 3)
        assert [list(step.kinds) for step in run.steps] == [[0], [1], [2], [0, 1, 2]]


class TestRolling:
    def test_a_slot_is_taken_again_in_the_step_after_a_finish(self, drive):
        run = drive(max_rolling_batch_size=2).run([(0.0, 4, 10), (0.0, 4, 3), (0.0, 4, 3)])
        last_of_1 = max(i for i, step in enumerate(run.steps) if 1 in step.kinds)
        assert run.steps[last_of_1 + 1].kinds == {2: "prefill"}
        assert run.scheduler.stats.slot_steps_idle == 0

    def test_a_prefill_pauses_decoding_for_just_one_step(self, drive):
        """Request 1 comes in step 2 and is prefilled in step 3: a gap of 2 s, all others 1 s."""
        run = drive().run([(0.0, 4, 6), (1.5, 4, 2)])
        assert [step.kinds for step in run.steps[1:4]] == [{0: "decode"}, {1: "prefill"}, {0: "decode", 1: "decode"}]
        assert run.token_times_s[0] == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]

    def test_the_queue_is_looked_at_after_every_step(self, drive):
        arrivals = [(0.0, 4, 30)] + [(k + 0.5, 4, 30) for k in range(0, 20, 2)]
        run = drive().run(arrivals)
        for seq_id, (arrival_s, _, _) in enumerate(arrivals):
            first = next(step for step in run.steps if seq_id in step.kinds)
            assert first.start_s - arrival_s < 1.0

    def test_no_more_run_than_the_batch_holds_and_the_rest_wait(self, drive):
        run = drive(max_rolling_batch_size=3)
        for seq_id in range(8):
            run.add(seq_id, 4, 5)
        run.step()
        assert (run.scheduler.num_running, run.scheduler.num_waiting) == (3, 5)
        run.run()
        assert max(decode_rows(run)) == 3
        assert run.scheduler.stats.peak_running == 3
        assert len(run.reasons) == 8

    def test_a_prefill_holds_no_more_prompt_tokens_than_allowed(self, drive):
        run = drive(max_rolling_batch_prefill_tokens=100).run([(0.0, 40, 2)] * 7)
        assert [step.prompt_tokens for step in run.steps if step.prompt_tokens] == [80, 80, 80, 40]

    def test_a_longer_prompt_is_split_over_passes(self, drive):
        run = drive(max_rolling_batch_prefill_tokens=100).run([(0.0, 250, 3)])
        entries = [step.batch.entries[0] for step in run.steps]
        assert [(e.first_position, len(e.token_ids), e.samples) for e in entries] == [
            (0, 100, False),
            (100, 100, False),
            (200, 50, True),
            (250, 1, True),
            (251, 1, True),
        ]
        assert [e.token_ids for e in entries[:3]] == [range(100), range(100, 200), range(200, 250)]

    def test_the_mixed_load_needs_less_than_half_the_steps_of_dynamic_batching(self, drive):
        """Dynamic: each batch of 4 holds a 500-token answer, 4 batches of about 500 steps.
        Rolling with 16 places: all of them run beside each other in about 500."""
        rolling = drive(max_rolling_batch_size=16, max_model_len=1024).run(MIXED)
        dynamic = drive(policy="dynamic", batch_size=4, max_model_len=1024).run(MIXED)
        none = drive(policy="none", max_model_len=1024).run(MIXED)
        assert len(none.steps) == 8 * (500 + 20)
        assert len(dynamic.steps) == pytest.approx(4 * 500, abs=4)
        assert len(rolling.steps) == pytest.approx(500, abs=4)
        # of each batch of 4, two stop after 19 decode steps of 499
        assert dynamic.scheduler.stats.slot_waste_frac == pytest.approx(480 / (2 * 499))
        assert rolling.scheduler.stats.slot_waste_frac == 0.0

    def test_late_requests_are_served_in_order_of_arrival(self, drive):
        run = drive(max_rolling_batch_size=1)
        run.add(5, 4, 3)
        run.step()
        for seq_id in (9, 3, 7):  # all at the same instant: the order of their submission decides
            run.add(seq_id, 4, 1)
        run.run()
        assert [next(iter(step.kinds)) for step in run.steps] == [5, 5, 5, 9, 3, 7]


class TestRecomputeOnJoin:
    def test_a_newcomer_makes_everyone_compute_prompt_and_tokens_anew(self, drive):
        """Request 0 (4 + 10) has 3 tokens when request 1 (4 + 2) comes: one step computes
        4 + 3 tokens beside the newcomer's 4, and gives both a token."""
        run = drive(recompute_on_join=True).run([(0.0, 4, 10), (2.5, 4, 2)])
        assert [step.kinds for step in run.steps[2:5]] == [
            {0: "decode"},
            {0: "prefill", 1: "prefill"},
            {0: "decode", 1: "decode"},
        ]
        assert run.steps[3].prompt_tokens == 4 + 3 + 4
        assert run.token_times_s[0] == [float(k) for k in range(1, 11)]
        assert (run.scheduler.stats.rebuilt_batches, run.scheduler.stats.preemptions) == (1, 0)

    def test_a_batch_longer_than_a_prefill_step_is_rebuilt_once_and_decodes_together(self, drive):
        """Steps of at most 8 prompt tokens: 7 of request 0, then 4 of request 1, then decode.
        Request 2, there before that decode, joins without another rebuild."""
        run = drive(recompute_on_join=True, max_rolling_batch_prefill_tokens=8)
        run.run([(0.0, 4, 10), (2.5, 4, 4), (3.5, 4, 4)])
        assert [step.kinds for step in run.steps[3:7]] == [
            {0: "prefill"},
            {1: "prefill", 2: "prefill"},
            {0: "decode", 1: "decode", 2: "decode"},
            {0: "decode", 1: "decode", 2: "decode"},
        ]
        assert run.scheduler.stats.rebuilt_batches == 1

    def test_nothing_is_rebuilt_while_the_newcomer_finds_no_place(self, drive):
        run = drive(recompute_on_join=True, max_rolling_batch_size=1)
        run.run([(0.0, 4, 5), (1.5, 4, 5)])
        assert run.scheduler.stats.rebuilt_batches == 0

    def test_without_it_a_newcomer_costs_its_own_prompt(self, drive):
        run = drive().run([(0.0, 4, 10), (2.5, 4, 2)])
        assert [step.prompt_tokens for step in run.steps if step.prompt_tokens] == [4, 4]

    @pytest.mark.parametrize("other", [{"policy": "dynamic"}, {"chunked_prefill": True}, {"prefix_caching": True}])
    def test_it_is_refused_where_nobody_joins_or_little_is_computed_anew(self, drive, other):
        with pytest.raises(InputError, match="recompute_on_join"):
            drive(recompute_on_join=True, **other)


class TestChunkedPrefill:
    def test_chunks_run_beside_decode_rows_without_a_pause(self, drive):
        run = drive(chunked_prefill=True, max_rolling_batch_prefill_tokens=10)
        run.run([(0.0, 4, 8), (0.5, 25, 2)])
        assert [step.kinds for step in run.steps[1:4]] == [{0: "decode", 1: "prefill"}] * 3
        assert [step.prompt_tokens for step in run.steps[1:4]] == [10, 10, 5]
        assert run.token_times_s[0] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]

    def test_what_a_chunk_reads_is_in_the_shape(self, drive):
        """10 tokens behind 10 cached ones: 10 * 10 + 10 * 11 / 2 pairs, 10 cached tokens read."""
        run = drive(chunked_prefill=True, max_rolling_batch_prefill_tokens=10).run([(0.0, 25, 1)])
        shapes = [step.batch.shape for step in run.steps]
        assert [s.prefill_context_pairs for s in shapes] == [55, 155, 5 * 20 + 15]
        assert [s.prefill_context_tokens for s in shapes] == [0, 10, 20]

    def test_several_prompts_share_the_tokens_of_a_step(self, drive):
        run = drive(chunked_prefill=True, max_rolling_batch_prefill_tokens=10)
        run.run([(0.0, 7, 1), (0.0, 7, 1)])
        parts = [[(e.seq_id, len(e.token_ids)) for e in step.batch.entries] for step in run.steps]
        assert parts == [[(0, 7), (1, 3)], [(1, 4)]]


def test_the_shape_of_a_decode_step_counts_the_tokens_it_reads(drive):
    """Prompts of 10 and 20, first tokens out: positions 10 and 20, so 11 + 21 tokens are read."""
    run = drive().run([(0.0, 10, 3), (0.0, 20, 3)])
    assert [step.batch.shape.decode_context_tokens for step in run.steps[1:]] == [32, 34]
    assert run.steps[0].batch.shape.prefill_context_pairs == 55 + 210


def test_clients_take_turns_and_one_that_comes_later_waits_for_no_backlog():
    """One slot: b comes when four of a wait, c when a and b have been served once more."""
    config = SchedulerConfig(num_blocks=64, max_rolling_batch_size=1)
    drive, served = Drive(Scheduler(config)), []

    def add(*names):
        for name in names:
            drive.scheduler.add(len(order), [1], SamplingParams(max_new_tokens=1), 0.0, name[0])
            order.append(name)

    def serve(count):
        for _ in range(count):
            batch = drive.scheduler.plan(0.0)
            served.extend(order[entry.seq_id] for entry in batch.entries)
            drive.commit(batch)

    order = []
    add("a1", "a2", "a3", "a4", "a5")
    serve(1)
    add("b1", "b2")
    serve(2)
    add("c1", "b3")
    serve(6)
    assert served == ["a1", "b1", "a2", "b2", "c1", "a3", "b3", "a4", "a5"]
    assert drive.scheduler.num_waiting == 0
    add("a6", "c2")
    serve(2)
    assert served[-2:] == ["c2", "a6"]


def test_a_short_prompt_does_not_wait_for_the_chunks_of_another_clients_long_ones():
    """Steps of 128 prompt tokens: b's 40 and what is left for a; with c, equal parts; then a's."""
    config = SchedulerConfig(
        num_blocks=128,
        max_rolling_batch_size=8,
        chunked_prefill=True,
        max_rolling_batch_prefill_tokens=128,
        client_share=0.5,
    )
    drive, clients = Drive(Scheduler(config)), "aabcbbbaaab"

    def add(number, tokens):
        sampling = SamplingParams(max_new_tokens=1)
        drive.scheduler.add(number, [1] * tokens, sampling, 0.0, clients[number])

    def chunks():
        batch = drive.scheduler.plan(0.0)
        drive.commit(batch)
        return {entry.seq_id: len(entry.token_ids) for entry in batch.entries}

    add(0, 300)
    add(1, 300)
    assert chunks() == {0: 128}
    add(2, 40)
    assert chunks() == {0: 88, 2: 40}
    add(3, 100)
    assert chunks() == {0: 64, 3: 64}
    assert chunks() == {0: 20, 1: 72, 3: 36}
    assert chunks() == {1: 128}
    assert chunks() == {1: 100}
    for number in (4, 5, 6):
        add(number, 10)
    assert chunks() == {4: 10, 5: 10, 6: 10}
    for number in (7, 8, 9):
        add(number, 300)
    assert chunks() == {7: 128}
    add(10, 30)
    assert [seq.seq_id for seq in drive.scheduler._waiting] == [8, 10, 9]  # in turn
    assert chunks() == {7: 98, 10: 30}


def test_no_prompt_tokens_are_kept_for_a_client_without_a_slot():
    config = SchedulerConfig(
        num_blocks=64,
        max_rolling_batch_size=1,
        chunked_prefill=True,
        max_rolling_batch_prefill_tokens=128,
        client_share=0.5,
    )
    drive = Drive(Scheduler(config))
    for number in range(2):
        drive.scheduler.add(number, [1] * 300, SamplingParams(max_new_tokens=1), 0.0, str(number))
    for _ in range(2):
        batch = drive.scheduler.plan(0.0)
        assert [(entry.seq_id, len(entry.token_ids)) for entry in batch.entries] == [(0, 128)]
        drive.commit(batch)


def test_with_more_clients_than_prompt_tokens_the_shortest_prompts_go_on():
    """Twelve clients and eight tokens a step: no step is empty, and the shortest ends first."""
    config = SchedulerConfig(
        num_blocks=64,
        max_rolling_batch_size=12,
        chunked_prefill=True,
        max_rolling_batch_prefill_tokens=8,
        client_share=0.5,
    )
    drive = Drive(Scheduler(config))
    for number in range(12):
        sampling = SamplingParams(max_new_tokens=1)
        drive.scheduler.add(number, [1] * (20 + number), sampling, 0.0, str(number))
    for _ in range(sum(20 + number for number in range(12)) // 8):
        batch = drive.scheduler.plan(0.0)
        assert sum(len(entry.token_ids) for entry in batch.entries) == 8
        drive.commit(batch)
    assert list(drive.reasons)[:3] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_client_has_more_than_its_share_whatever_ends_when(seed):
    """Random requests of three clients, a third cancelled, with a cache that preempts some."""
    draw = random.Random(seed)
    config = SchedulerConfig(
        num_blocks=12,
        max_rolling_batch_size=6,
        max_concurrent_requests=20,
        client_share=0.5,
        chunked_prefill=seed % 2 == 1,
        max_rolling_batch_prefill_tokens=60 if seed % 2 == 0 else draw.choice([1, 13]),
    )
    drive, client_of, open_ids, refused = Drive(Scheduler(config)), {}, set(), 0
    scheduler = drive.scheduler

    def counts(ids):
        return Counter(client_of[seq_id] for seq_id in ids)

    for number in range(200):
        client = draw.choice("aaabc")
        full = counts(open_ids)[client] == 10 or len(open_ids) == 20
        sampling = SamplingParams(max_new_tokens=draw.randint(1, 40))
        try:
            scheduler.add(number, [1] * draw.randint(1, 60), sampling, float(number), client)
            client_of[number] = client
            open_ids.add(number)
            assert not full
        except OverloadedError:
            refused += 1
            assert full
        assert scheduler.num_running + scheduler.num_waiting == len(open_ids)
        if open_ids and draw.random() < 0.3:
            gone = draw.choice(sorted(open_ids))
            scheduler.finish(gone, "cancelled")
            open_ids.discard(gone)
        batch = scheduler.plan(float(number))
        if batch is not None:
            drive.commit(batch)
            open_ids -= drive.reasons.keys()
        assert max(counts(scheduler.running_seq_ids()).values(), default=0) <= 3
    while open_ids:
        drive.commit(scheduler.plan(1000.0))
        open_ids -= drive.reasons.keys()
    assert refused
    assert scheduler.num_waiting == scheduler.num_running == scheduler.blocks.num_used == 0
    assert not scheduler._clients._entered
    assert not scheduler._clients._held
    scheduler.audit()
