"""Checks: each doubt shows when its cause is there and is silent when it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.results.checks import check_level, check_levels
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import GeneratorReport
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.workload import LevelSpec
from tests.levels import level_of


def line(concurrency=4, throughput=100.0, mean_concurrency=3.9, **more):
    return level_of(
        **{
            "concurrency": concurrency,
            "requests": 10 * (concurrency or 1),
            "errors": 0,
            "valid": True,
            "throughput_tokens_per_s": throughput,
            "mean_concurrency": mean_concurrency,
        }
        | more
    )


def test_a_sound_level_gives_no_warning():
    assert check_level(line()) == []
    assert check_level(line(1, 30.0, 0.99)) == []


def test_more_in_flight_than_asked_breaks_littles_law():
    (warning,) = check_level(line(mean_concurrency=4.4))
    assert "4.4 requests in flight, more than the 4" in warning


def test_littles_law_is_not_held_against_an_open_loop():
    assert check_level(line(None, rate_per_s=2.0, mean_concurrency=50.0)) == []


@pytest.mark.parametrize(("of_a_chunk", "warned"), [(4, True), (1, False)])
def test_chunks_of_several_tokens_are_told_from_the_servers_count(of_a_chunk, warned):
    """Ten answers of 16 tokens by the usage, which came in 4 chunks or in 16."""
    chunks = 16 // of_a_chunk
    records = tuple(
        RequestRecord(n, 0.0, Exchange(0.0, tuple(0.1 * i for i in range(1, chunks + 1))), output_tokens=16)
        for n in range(10)
    )
    level = summarise_level(LevelRun(LevelSpec(0, Load(concurrency=10), num_requests=10), 1, records))
    assert level.output_tokens == 160
    said = [text for text in check_level(level) if "chunks add up to" in text]
    assert bool(said) == warned == (level.unequal_counts is not None)
    if warned:
        assert "160 tokens were counted (by the server), but the chunks add up to 40" in said[0]


def test_a_word_cut_off_by_the_alphabet_is_no_disagreement():
    """A token of half a character has no text and so no chunk: 1 of 200 is not worth a warning."""
    records = (RequestRecord(0, 0.0, Exchange(0.0, tuple(0.1 * i for i in range(1, 200))), output_tokens=200),)
    level = summarise_level(LevelRun(LevelSpec(0, Load(concurrency=1), num_requests=1), 1, records))
    assert level.unequal_counts.chunk_tokens == 199
    assert not [text for text in check_level(level) if "chunks add up to" in text]


def test_a_load_that_was_not_held_is_named_with_what_to_do():
    (short,) = check_level(line(mean_concurrency=2.0, requests=12))
    assert "more requests a user" in short
    (long,) = check_level(line(mean_concurrency=2.0, requests=400))
    assert "load generator" in long


def test_a_lone_user_that_leaves_the_server_idle_is_told_the_reciprocal_of_the_latency():
    """30 tok/s while busy 75 % of the time is 40 tok/s by the latency."""
    warnings = check_level(line(1, 30.0, 0.75))
    assert any("idle 25%" in warning and "40 tok/s" in warning for warning in warnings)


def test_failures_are_told_by_kind():
    (warning,) = check_level(line(errors=3, errors_by_kind={"timeout": 2, "connect": 1}))
    assert "3 of 40 requests failed (2 timeout, 1 connect)" in warning


def test_invalid_and_cut_levels_are_told():
    warnings = check_level(line(valid=False, invalid_reason="client: lag", stopped_by="timeout"))
    assert "concurrency 4 is invalid: client: lag" in warnings
    assert any("cut short by timeout" in warning for warning in warnings)


@pytest.mark.parametrize(("last", "warned"), [(185.0, False), (150.0, True)])
def test_throughput_may_dip_as_repeats_do_and_not_more(last, warned):
    """From 200 tok/s: 185 is within 8 %, 150 is not."""
    lines = [line(1, 50.0, 1.0), line(4, 200.0, 4.0), line(8, last, 8.0)]
    warnings = check_levels(lines)
    assert bool(warnings) is warned
    if warned:
        assert "falls from 200 tok/s at concurrency 4 to 150 at concurrency 8" in warnings[0]


def test_answers_of_another_length_than_planned_are_another_workload():
    """Two of three stopped at 10 of 40 tokens: 20 on average."""
    records = [
        RequestRecord(i, 0.0, Exchange(0.0, (1.0,), (n,)), output_tokens=n, asked_tokens=40)
        for i, n in enumerate((40, 10, 10))
    ]
    run = LevelRun(LevelSpec(0, Load(concurrency=1), num_requests=3), 1, tuple(records))
    line = summarise_level(run)
    assert line.unplanned_lengths.requests == 2
    (warning,) = [text for text in check_level(line) if "planned length" in text]
    assert "20 tokens on average instead of 40" in warning


def test_a_prefix_cache_that_the_usage_tells_of_is_warned_of_unless_it_was_wanted():
    record = RequestRecord(0, 0.0, Exchange(0.0, (1.0,), (4,), cached_tokens=96), input_tokens=100, asked_tokens=4)
    line = summarise_level(LevelRun(LevelSpec(0, Load(concurrency=1), num_requests=1), 1, (record,)))
    assert line.cached_prompt_frac == 0.96
    assert line.unplanned_lengths is None
    assert any("96.0% of the prompt tokens" in text for text in check_level(line))
    wanted = replace(line, cached_prompt_expected=True)
    assert not any("prefix cache" in text for text in check_level(wanted))


@pytest.mark.parametrize(
    ("errors", "stopped_by", "failed"),
    [(0, None, False), (5, None, False), (6, None, True), (10, None, True), (2, "errors", True)],
)
def test_a_level_most_of_whose_requests_failed_is_no_measurement(errors, stopped_by, failed):
    assert level_of(requests=10, errors=errors, stopped_by=stopped_by).has_failed is failed


@pytest.mark.parametrize(("unsaid", "warned"), [(0, False), (3, True), (10, False)])
def test_answers_that_end_without_a_reason_beside_others_with_one_may_have_been_cut(unsaid, warned):
    """A server that never gives a reason has cut nothing, but they are counted all the same."""
    records = tuple(
        RequestRecord(
            n, 0.0, Exchange(0.0, (0.1, 0.2), (1, 1), finish_reason=None if n < unsaid else "length"), output_tokens=2
        )
        for n in range(10)
    )
    check = GeneratorReport(receiver="python")
    spec = LevelSpec(0, Load(concurrency=10), num_requests=10)
    level = summarise_level(LevelRun(spec, 1, records, check=check))
    assert (level.without_finish_reason or 0) == unsaid
    said = [text for text in check_level(level) if "finish_reason" in text]
    assert bool(said) is warned
    if warned:
        assert "3 of 10 answers ended without a finish_reason" in said[0]
