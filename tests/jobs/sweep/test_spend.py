"""Money of a sweep: hours times price, a limit that holds, and instances that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.catalog.instances import find_instance
from lmi_bench.cli.sweep_print import cheapest, cost_at
from lmi_bench.core.errors import InputError
from lmi_bench.core.findings import SloAnswer
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec
from lmi_bench.jobs.sweep.limits import Budget, Spend
from lmi_bench.loadgen.run.sweep import in_order

LEVELS = [LevelSpec(i, Load(concurrency=2**i), num_requests=10 * 2**i) for i in range(4)]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def line_of(run):
    """What a level's line holds at least; 1,000 tokens a second out, 2,000 in and out."""
    return Level(
        run.index,
        1,
        run.load,
        requests=run.num_requests,
        throughput_tokens_per_s=1000.0,
        total_throughput_tokens_per_s=2000.0,
    )


def sweep(spend, clock, *, level_s, levels=LEVELS, finished=()):
    """Lines of a sweep whose i-th level takes level_s(i) seconds."""
    rule, summarise = spend.levels(in_order(levels)), spend.summarise(line_of)
    lines, specs = list(finished), []
    while (spec := rule(lines)) is not None:
        specs.append(spec)
        clock.now_s += level_s(spec)
        lines.append(summarise(spec))
    return lines, specs


def test_each_level_has_its_price_and_what_was_spent_so_far():
    """By hand: 3.6 USD an hour is 0.001 a second; 1,000 tok/s make 1e6 in 1,000 s, for 1 USD."""
    clock = Clock()
    lines, _ = sweep(Spend(3.6, clock=clock), clock, level_s=lambda spec: 10.0)
    assert [line.spent_usd for line in lines] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert lines[0].usd_per_1m_output_tokens == pytest.approx(1.0)
    assert lines[0].usd_per_1m_total_tokens == pytest.approx(0.5)
    said = cheapest(lines)
    assert said.startswith("cheapest at concurrency 1: 1.00 USD per 1M output tokens")
    said = cheapest(lines[::-1])  # whatever the order of the loads
    assert said.endswith("the sweep took 0.04 USD")


def test_the_load_that_a_search_found_has_its_price():
    """By hand: at 3.6 USD an hour 2,000 tok/s make 1e6 tokens in 500 s, for 0.50 USD."""
    clock = Clock()
    lines, _ = sweep(Spend(3.6, clock=clock), clock, level_s=lambda spec: 10.0)
    lines[2] = replace(lines[2], usd_per_1m_output_tokens=0.5, usd_per_1m_total_tokens=0.25)
    answer = SloAnswer(("ttft_p90<=1s",), "concurrency", 4.0, 3, 6, 8, None, "smooth", 1.0)
    assert cost_at(lines, answer) == (
        "  there 0.50 USD per 1M output tokens, 0.25 per 1M in and out, at 3.60 USD an hour"
    )
    assert cost_at([replace(line, usd_per_1m_output_tokens=None) for line in lines], answer) is None
    assert cost_at(lines, replace(answer, value=None)) is None


def test_a_level_that_would_cost_more_than_is_left_is_not_begun():
    """10 s for 10 requests, so 20, 40 s for the next two: 0.07 of 0.1 USD; 80 s would be 0.08."""
    clock, notes = Clock(), []
    spend = Spend(3.6, max_usd=0.1, note=notes.append, clock=clock)
    lines, specs = sweep(spend, clock, level_s=lambda spec: spec.num_requests * 1.0)
    assert [line.requests for line in lines] == [10, 20, 40]
    assert lines[-1].spent_usd == pytest.approx(0.07)
    assert "0.07 USD are spent" in notes[0]
    assert "0.08 more" in notes[0]
    assert [spec.duration_s for spec in specs] == pytest.approx([100.0, 90.0, 70.0])


def test_a_level_that_the_money_cut_short_says_so_and_not_only_that_its_time_was_up():
    clock, notes = Clock(), []
    spend = Spend(3600.0, max_usd=5.0, note=notes.append, clock=clock)
    rule = spend.levels(in_order(LEVELS))
    clock.now_s += rule([]).duration_s
    spend.summarise(lambda spec: replace(line_of(spec), stopped_by="duration"))(LEVELS[0])
    assert notes == ["concurrency 1 was cut short: the 5 USD of --max-spend are used up at 3600.00 USD an hour"]


def test_a_level_hands_out_nothing_once_the_money_is_gone():
    """The first level of all has no forerunner to judge it by: its duration is the limit."""
    clock = Clock()
    spend = Spend(3600.0, max_usd=5.0, clock=clock)
    _, specs = sweep(spend, clock, level_s=lambda spec: min(999.0, spec.duration_s))
    assert [spec.duration_s for spec in specs] == [5.0]


def test_what_a_resumed_sweep_spent_before_counts():
    clock = Clock()
    lines, _ = sweep(Spend(3.6, max_usd=1.0, clock=clock), clock, level_s=lambda spec: 10.0)
    half = lines[:2]
    later = Spend(3.6, max_usd=0.025, clock=clock)
    resumed, _ = sweep(later, clock, level_s=lambda spec: 10.0, finished=half)
    assert resumed == half


def test_a_level_in_which_instances_came_is_invalid_and_the_price_follows():
    """0.002 USD a second for the two levels of two instances, 0.003 for those of three."""
    clock, counts = Clock(), iter([2, 2, 3, 3, 3])
    spend = Spend(7.2, count_instances=lambda: next(counts), clock=clock)
    lines, _ = sweep(spend, clock, level_s=lambda spec: 10.0)
    assert [line.valid for line in lines] == [True, False, True, True]
    assert "from 2 to 3 instances" in lines[1].invalid_reason
    assert [line.price_usd_per_hour for line in lines] == pytest.approx([7.2, 7.2, 10.8, 10.8])
    assert [line.spent_usd for line in lines] == pytest.approx([0.02, 0.04, 0.07, 0.10])


def test_a_count_that_cannot_be_had_changes_nothing():
    clock = Clock()
    spend = Spend(None, count_instances=lambda: None, clock=clock)
    lines, _ = sweep(spend, clock, level_s=lambda spec: 10.0)
    assert lines == [line_of(spec) for spec in LEVELS]
    assert cheapest(lines) is None


def test_the_price_is_what_was_given_else_the_catalogs_else_the_targets():
    assert Budget(usd_per_hour=2.0).price(9.0) == 2.0
    each = find_instance("ml.g5.2xlarge").price_usd_per_hour
    assert Budget(instance="ml.g5.2xlarge").price(9.0) == each
    assert Budget().price(9.0) == 9.0
    assert Budget().price(None) is None
    with pytest.raises(InputError, match="--max-spend needs a price"):
        Budget(max_usd=1.0).price(None)
    with pytest.raises(InputError, match="leave one out"):
        Budget(usd_per_hour=2.0, instance="ml.g5.2xlarge")
    with pytest.raises(InputError, match="above 0"):
        Budget(max_usd=0.0)
