"""Repeats: intervals that cover, a stop rule that stops, attempts that pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.results.compare import compare_runs
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.repeats import (
    LOOKS,
    Until,
    paired_changes,
    parse_until,
    pooled_run,
    repeat_rule,
    spread,
    spread_of,
    unmet_until,
    until_steady,
)
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.steadiness import SpeedStep
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.run.sweep import in_order
from tests.levels import level_of

LEVELS = [LevelSpec(0, Load(concurrency=1), num_requests=40), LevelSpec(1, Load(concurrency=2), num_requests=40)]


def line(level, ttft_p90):
    return level_of(level=level, concurrency=8 * (level + 1), ttft_ms={"p90": ttft_p90}, throughput_tokens_per_s=10.0)


def test_the_interval_of_three_values_is_students():
    """1, 2, 3: mean 2, deviation 1, t(2) 4.3027: 2 +- 4.3027 / sqrt(3)."""
    found = spread([1.0, 2.0, 3.0])
    assert (found.mean, found.cv) == (2.0, 0.5)
    assert found.high - 2 == pytest.approx(4.302653 / 3**0.5)
    assert found.low + found.high == pytest.approx(4)


def test_a_single_value_has_no_interval():
    found = spread([5.0])
    assert (found.mean, found.low, found.half_width) == (5.0, None, float("inf"))


def test_the_interval_covers_the_truth_in_nineteen_of_twenty_runs():
    rng = np.random.default_rng(0)
    held = [
        found.low <= 100 <= found.high for _ in range(2000) for found in [spread(rng.normal(100, 10, size=5).tolist())]
    ]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)


def attempts_until(share, noise, seed):
    """Attempts that a level with noisy TTFTs takes."""
    rng = np.random.default_rng(seed)
    rule = repeat_rule(LEVELS[:1], repeats=1, until=Until("ttft_p90", share))
    lines = []
    while rule(lines) is not None:
        lines.append(line(0, float(rng.normal(100, noise))))
    return lines


def test_repeats_stop_when_the_interval_is_narrow_enough():
    for seed in range(20):
        lines = attempts_until(0.05, 3.0, seed)
        found = spread_of(lines, "ttft_p90")
        assert 3 <= found.attempts <= 20
        assert found.half_width <= 0.05 or found.attempts == 20


def test_more_noise_takes_more_attempts_and_never_more_than_twenty():
    calm = np.mean([len(attempts_until(0.05, 2.0, seed)) for seed in range(20)])
    noisy = np.mean([len(attempts_until(0.05, 8.0, seed)) for seed in range(20)])
    assert calm < noisy
    assert len(attempts_until(0.001, 20.0, 0)) == 20


def test_an_interval_that_stayed_too_wide_is_named():
    """Of 90, 100 and 110 the deviation is 10 and the half-width 4.303 * 10 / sqrt(3) = 24.8."""
    wide, narrow = (90.0, 100.0, 110.0), (99.0, 100.0, 101.0)
    lines = [line(0, p90) for p90 in wide]
    lines += [line(1, p90) for p90 in narrow]
    (text,) = unmet_until(lines, Until("ttft_p90", 0.05))
    assert text.startswith("concurrency 8: after 3 attempts the 95 % interval of ttft_p90 is +-24.8%, and +-5.0% was")
    assert "not known" in unmet_until(lines[:1], Until("ttft_p90", 0.05))[0]


def test_levels_take_turns():
    rule = repeat_rule(LEVELS, repeats=2)
    order, lines = [], []
    while (spec := rule(lines)) is not None:
        order.append((spec.index, spec.repeat))
        lines.append(line(spec.index, 1.0))
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_quantile_that_a_level_can_never_support_is_refused_at_once():
    few = [LevelSpec(0, Load(concurrency=1), num_requests=10)]
    with pytest.raises(InputError, match="counts 10 requests, but a p90 needs 29"):
        repeat_rule(few, repeats=1, until=Until("ttft_p90", 0.05))


@pytest.mark.parametrize("text", ["ttft_p90 +-5%", "ttft_p90±5 %", "ttft_p90 +/- 5%"])
def test_a_stop_rule_is_read(text):
    assert parse_until(text) == Until("ttft_p90", 0.05)


def test_what_is_no_stop_rule_names_the_grammar():
    with pytest.raises(InputError, match=r"METRIC \+-X%"):
        parse_until("ttft < 5")


def attempt(number, first_token_s, start_s=5.0):
    """Two requests one after the other of four seconds each, two tokens each."""
    sent_s = (start_s, start_s + 4)
    records = tuple(
        RequestRecord(i, at_s, Exchange(at_s, (at_s + first_token_s, start_s + 4 * (i + 1))))
        for i, at_s in enumerate(sent_s)
    )
    run = LevelRun(LevelSpec(0, Load(concurrency=1), num_requests=2), number, records)
    return replace(summarise_level(run), attempt=number), records


def test_attempts_are_pooled_end_to_end():
    """Two attempts of 4 tokens in 8 s: 8 tokens in 16 s; TTFTs of 1, 1, 2 and 2 s."""
    parts = [attempt(1, 1.0), attempt(2, 2.0, start_s=100.0)]
    run = Run(Path("r"), Manifest(), [p[0] for p in parts], [p[1] for p in parts], None)
    pooled = pooled_run(run)
    (level,) = pooled.levels
    assert (level.requests, level.attempts) == (4, 2)
    assert level.wall_s == pytest.approx(16)
    assert level.throughput_tokens_per_s == pytest.approx(0.5)
    assert level.of("ttft").mean == pytest.approx(1500)
    assert level.mean_concurrency == pytest.approx(1)
    assert level.spread["throughput"].cv == pytest.approx(0)
    assert [record.request_id for record in pooled.records[0]] == [0, 1, 2, 3]


def test_an_invalid_attempt_is_left_out():
    (good, bad) = attempt(1, 1.0), attempt(2, 3.0)
    parts = [good, (replace(bad[0], valid=False), bad[1])]
    run = Run(Path("r"), Manifest(), [p[0] for p in parts], [p[1] for p in parts], None)
    (level,) = pooled_run(run).levels
    assert level.of("ttft").mean == pytest.approx(1000)
    assert level.attempts_left_out == ["2 (invalid)"]
    assert "of 2 attempts left out: 2 (invalid);" in check_levels([level])[0]


def test_a_run_without_repeats_is_left_as_it_is():
    part = attempt(1, 1.0)
    run = Run(Path("r"), Manifest(), [part[0]], [part[1]], None)
    assert pooled_run(run) == run


STEP = {"at_s": 12.0, "change": 0.3}


def runs_of(throughputs, *, most=2, fits=lambda _spec, _finished: True, notes=None):
    """The levels and repeats that a sweep of two levels sends; attempts have these throughputs,
    and a step where one is negative. Asked anew each time, as a resumed sweep does."""
    sent, lines, left = [], [], {0: list(throughputs), 1: [200.0]}
    note = (lambda _: None) if notes is None else notes.append
    while (spec := until_steady(in_order(LEVELS), most, fits=fits, note=note)(lines)) is not None:
        sent.append((spec.index, spec.repeat))
        rate = left[spec.index].pop(0)
        step = {"speed_step": STEP} if rate < 0 else {}
        users, rate = spec.load.concurrency, abs(rate)
        known = {"level": spec.index, "concurrency": users, "attempt": spec.repeat + 1}
        lines.append(level_of(**known, throughput_tokens_per_s=rate, **step))
    return sent


@pytest.mark.parametrize(
    ("throughputs", "runs"),
    [
        ([100], 1),
        ([-80, 100, 104], 3),  # two that agree
        ([-80, -90, 100, 104], 3),  # the budget of two repeats is used up
        ([-80, 100, 130, 131], 3),
    ],
)
def test_a_level_that_was_not_steady_runs_until_two_attempts_agree(throughputs, runs):
    assert runs_of(throughputs) == [*((0, number) for number in range(runs)), (1, 0)]
    assert runs_of([-80, 100, 130, 131], most=5) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_a_repeat_is_told_and_left_out_where_there_is_no_time():
    notes = []
    assert runs_of([-80, 100, 104], notes=notes)[-1] == (1, 0)
    assert notes[0] == "concurrency 1: attempt 1 is not steady: it runs again"
    assert notes[1].startswith("concurrency 1: attempt 2 is steady, but has no second that")
    assert runs_of([-80], fits=lambda _spec, finished: not finished) == [(0, 0), (1, 0)]


def test_an_attempt_that_was_not_steady_is_left_out_and_named():
    """Of TTFTs of 3 s with a step, and 1 and 2 s: those of 1 and 2 s are pooled."""
    parts = [attempt(1, 3.0), attempt(2, 1.0), attempt(3, 2.0)]
    levels = [replace(parts[0][0], speed_step=SpeedStep(**STEP)), parts[1][0], parts[2][0]]
    many = tuple(replace(record, output_tokens=20) for record in parts[0][1])
    run = Run(Path("r"), Manifest(), levels, [many, parts[1][1], parts[2][1]], None)
    (level,) = pooled_run(run).levels
    assert (level.attempts, level.of("ttft").mean) == (2, pytest.approx(1500))
    assert "of 3 attempts left out: 1 (not steady)" in check_levels([level])[0]
    for different in compare_runs(run, run):
        if different.metric == "throughput":
            assert different.a == pytest.approx(0.5)
    (unsteady,) = pooled_run(replace(run, levels=levels[:1], records=run.records[:1])).levels
    assert "; measure it again" in check_levels([unsteady])[0]


def rounds_until_sure(change, noise, rng, levels=2):
    """Rounds and verdicts of two targets whose attempts vary by `noise`."""
    sides = [], []
    for rounds in range(1, LOOKS[-1] + 1):
        drift = rng.normal(0, 0.1)  # of the hour, which both sides share
        for side, factor in zip(sides, (1.0, 1 + change), strict=True):
            for index in range(levels):
                rate = 100 * factor * float(np.exp(drift + rng.normal(0, noise)))
                known = {"level": index, "concurrency": index + 1, "attempt": rounds}
                side.append(level_of(**known, throughput_tokens_per_s=rate))
        if rounds in LOOKS:
            found = paired_changes(*sides, Until("throughput", 0.03))
            if all(each.verdict for each in found):
                break
    return rounds, [each.verdict for each in found]


def test_equal_targets_are_told_apart_in_less_than_one_comparison_of_twenty():
    rng = np.random.default_rng(0)
    found = [rounds_until_sure(0.0, 0.01, rng)[1] for _ in range(300)]
    alarms = sum(bool({"more", "less"} & set(verdicts)) for verdicts in found)
    assert alarms / 300 <= 0.05
    assert sum(set(each) == {"no difference of 3.0%"} for each in found) > 280


def test_a_difference_is_found_as_soon_as_it_is_sure():
    """Of 10 % with noise of 1 %, although the hours vary by 10 %."""
    rng = np.random.default_rng(0)
    found = [rounds_until_sure(-0.1, 0.01, rng) for _ in range(100)]
    assert sum(verdicts == ["less", "less"] for _, verdicts in found) >= 99
    assert np.mean([rounds for rounds, _ in found]) < 8


def test_a_change_is_told_with_its_interval():
    sides = [[level_of(throughput_tokens_per_s=rate) for rate in rates] for rates in ([100.0], [110.0])]
    (found,) = paired_changes(*sides, Until("throughput", 0.03))
    assert str(found) == "concurrency 1: not sure: throughput +10.0% from A to B, 1 round(s)"
