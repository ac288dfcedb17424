"""Searches and adaptive sweeps through the load generator itself, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.search.slo_search import slo_answer
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.run_store import RunStore, load_run
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.jobs.sweep.levels import level_rule, with_levels_found
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, no_text
from lmi_bench.loadgen.run.sweep import run_sweep

PROMPTS = SyntheticPrompts([Lengths(8, 4)], no_text, seed=0)
MANIFEST = Manifest(scenario_hash="h")


class Slots:
    """`slots` requests at a time, one second each, first come first served; more wait.

    With c users an answer takes max(1, c / slots) seconds.
    """

    def __init__(self, slots, refuse_above=1000):
        self.slots = slots
        self.refuse_above = refuse_above
        self.inside = 0
        self.semaphore = None

    async def send(self, request):
        loop = asyncio.get_running_loop()
        self.semaphore = self.semaphore or asyncio.Semaphore(self.slots)
        sent_s = loop.time()
        if self.inside >= self.refuse_above:
            await asyncio.sleep(0.01)
            raise TargetError("overloaded", "full")
        self.inside += 1
        try:
            async with self.semaphore:
                await asyncio.sleep(1.0)
        finally:
            self.inside -= 1
        return Exchange(sent_s, (loop.time(),), (request.output_tokens,))


def sweep(folder, target, load, slo=(), resume_after=None):
    rule = level_rule(parse_scenario({"load": {"warmup_requests": 0, **load}, "slo": slo}))
    with RunStore.create(folder, MANIFEST) as store:
        options = {"prompts": PROMPTS, "summarise": rule.summarise, "stop_rules": rule.stop_rules}
        run_virtual(run_sweep(rule.levels, target, store, **options))
    run = load_run(folder)
    if rule.search is None:
        return run, None
    return run, slo_answer(rule.search, run.levels)


def test_a_search_finds_the_users_that_ten_slots_answer_in_three_seconds(tmp_path):
    """From 31 users on someone waits a fourth second, from 34 on more than a tenth do."""
    run, answer = sweep(tmp_path / "run", Slots(10), {"search": "concurrency"}, slo=["e2e_p90<=3.05s"])
    assert 30 <= answer.value <= 33
    assert answer.value < answer.first_breach <= 34
    assert run.levels[0].load.concurrency == 4


def test_a_level_that_cannot_be_saved_is_cut_short(tmp_path):
    """200 users on ten slots: 40 of 400 may take over 3 s; 200 first answers end by 20 s, the 41st
    that counts at 25 s."""
    load = {"search": "concurrency", "concurrency": 200}
    run, answer = sweep(tmp_path / "run", Slots(10), load, slo=["e2e_p90<=3.05s"])
    first = run.levels[0]
    assert (first.stopped_by, first.search.planned) == ("decided", 400)
    assert first.requests == 200 + 240  # all users, and again those that were free by 24 s
    assert 30 <= answer.value <= 33


def test_a_search_over_rates_finds_the_capacity(tmp_path):
    """Ten slots of a second: beyond 10 req/s the queue grows without end."""
    _, answer = sweep(
        tmp_path / "run",
        Slots(10),
        {"search": "rate", "arrivals": "constant", "requests_per_level": 300},
        slo=["e2e_p90<=1.5s"],
    )
    assert 9.5 <= answer.value <= 10.5
    assert answer.value < answer.first_breach <= answer.value * 1.051


def test_refusals_do_not_end_a_search(tmp_path):
    _, answer = sweep(tmp_path / "run", Slots(100, refuse_above=20), {"search": "concurrency"}, slo=["e2e_p90<=5s"])
    assert answer.value <= 22
    assert answer.boundary == "cliff"


def test_auto_levels_stop_when_the_slots_are_full(tmp_path):
    run, _ = sweep(tmp_path / "run", Slots(8), {"concurrency": "auto", "requests_per_user": 8})
    loads = [line.load.concurrency for line in run.levels]
    assert loads[:8] == [1, 2, 4, 8, 16, 32, 8, 32]
    assert max(loads) == 32


def test_auto_levels_go_on_to_where_the_slo_breaks(tmp_path):
    """The curve first, by doubling; then between its levels. From 34 users on a tenth of the
    answers take 4 s."""
    run, answer = sweep(tmp_path / "run", Slots(10), {"concurrency": "auto"}, slo=["e2e_p90<=3.05s"])
    loads = [line.load.concurrency for line in run.levels]
    assert loads[:6] == [1, 2, 4, 8, 16, 32]
    assert 30 <= answer.value <= 33
    assert answer.value < answer.first_breach <= 34
    assert answer.low <= answer.value <= answer.first_breach <= answer.high
    assert answer.binding == "e2e_p90<=3050ms"


def test_auto_levels_end_where_the_server_is_full_if_no_slo_broke_by_then(tmp_path):
    load = {"concurrency": "auto", "requests_per_user": 8}
    run, answer = sweep(tmp_path / "run", Slots(8), load, slo=["e2e_p90<=100s"])
    assert max(line.load.concurrency for line in run.levels) == answer.value == 32
    assert answer.first_breach is None


def test_doubling_ends_where_few_requests_already_make_a_miss_certain(tmp_path):
    """12 answers are too few for a p90, yet none of them was below the limit."""
    run, answer = sweep(tmp_path / "run", Slots(2), {"concurrency": "auto"}, slo=["e2e_p90<=1.5s"])
    assert answer.value == 2
    assert max(line.load.concurrency for line in run.levels) == 4


@pytest.mark.parametrize(
    ("load", "found"),
    [
        ({}, True),
        ({"concurrency": [1, 2]}, False),
        ({"rate_per_s": [1.0]}, False),
        ({"repeat": 3}, False),
        ({"until": "ttft_p90 +-5%", "requests_per_level": 40}, False),
    ],
)
def test_levels_are_found_where_neither_they_nor_repeats_are_stated(load, found):
    scenario = with_levels_found(parse_scenario({"target": "sim:ml.g5.2xlarge", "load": load}))
    assert scenario.load.is_adaptive is found
    level_rule(scenario)


def test_the_bundled_engine_has_a_usual_list_of_levels():
    scenario = parse_scenario({"target": "engine"})
    assert with_levels_found(scenario) == scenario


def test_a_search_without_an_slo_is_refused():
    with pytest.raises(InputError, match="needs an SLO"):
        parse_scenario({"load": {"search": "rate"}})


def test_a_search_takes_one_start():
    with pytest.raises(InputError, match="one value to start from"):
        parse_scenario({"load": {"search": "rate", "rate_per_s": [1, 2]}, "slo": "ttft_p90<=1s"})


def test_levels_are_numbers_or_auto():
    with pytest.raises(InputError, match="or auto, got 'many'"):
        parse_scenario({"load": {"concurrency": "many"}})
    with pytest.raises(InputError, match="must be greater than 0, got -2") as error:
        parse_scenario({"load": {"concurrency": [1, -2]}})
    assert "\n" not in str(error.value)


def test_slos_that_pick_the_levels_are_part_of_what_is_resumed():
    plain = [parse_scenario({"slo": slo}).hash() for slo in ((), ("ttft_p90<=1s",))]
    auto = [parse_scenario({"slo": slo, "load": {"concurrency": "auto"}}).hash() for slo in ((), ("ttft_p90<=1s",))]
    assert plain[0] == plain[1]
    assert auto[0] != auto[1]


class Warming:
    """Tokens 30 ms apart until 15 s have passed, as while a server compiles, then 20 ms."""

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s, times_s = loop.time(), []
        for _ in range(40):
            await asyncio.sleep(0.03 if loop.time() < 15 else 0.02)
            times_s.append(loop.time())
        return Exchange(sent_s, tuple(times_s))


def test_a_level_in_which_the_server_became_faster_runs_until_two_attempts_agree(tmp_path):
    load = {"concurrency": [1, 2], "requests_per_level": 32}
    run, _ = sweep(tmp_path / "run", Warming(), load)
    assert [(line.index, line.attempt) for line in run.levels] == [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert [line.speed_step is None for line in run.levels] == [False, True, True, True]
    assert run.levels[1].of("itl").p50 == pytest.approx(20)
    alone, _ = sweep(tmp_path / "alone", Warming(), {**load, "repeat_unsteady": 0})
    assert [line.index for line in alone.levels] == [0, 1]


def test_repeats_of_unsteady_levels_are_for_levels_that_run_once():
    for beside in ({"repeat": 2}, {"until": "ttft_p90 +-5%"}, {"search": "concurrency"}):
        with pytest.raises(InputError, match="repeat_unsteady: leave it out"):
            parse_scenario({"load": {"repeat_unsteady": 1, **beside}, "slo": ["ttft_p90<=1s"]})


def test_a_level_ends_when_its_percentile_is_known_and_the_next_one_runs(tmp_path):
    """Answers take one second: the first look, at 100 requests beside the first of each user."""
    load = {"concurrency": [2, 4], "requests_per_level": 500, "stop_when": "e2e_p90:5%"}
    run, _ = sweep(tmp_path / "run", Slots(4), load)
    assert [line.stopped_by for line in run.levels] == ["known", "known"]
    assert [line.known.requests for line in run.levels] == [100, 100]
    assert all(100 < line.requests < 125 for line in run.levels)
    assert not any(line.is_cut_short for line in run.levels)
    assert not [text for text in check_levels(run.levels) if "cut short" in text]
    with pytest.raises(InputError, match="need listed levels"):
        parse_scenario({"load": {"concurrency": "auto", "stop_when": "e2e_p90:5%"}})
    with pytest.raises(InputError, match="the first look needs 100"):
        sweep(tmp_path / "few", Slots(4), {**load, "requests_per_level": 90})
