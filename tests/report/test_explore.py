"""Data of the views that the page draws: against arithmetic by hand, and small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest, TargetFacts
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.steadiness import SpeedStep
from lmi_bench.core.workload import LevelSpec
from lmi_bench.report.explore import BINS, CANDIDATES, LANES, QUANTILES, candidates_data, levels_data

NO_MANIFEST = Manifest(target=TargetFacts(tensor_parallel=2))


def one_level(records):
    level = summarise_level(LevelRun(LevelSpec(0, Load(concurrency=2), len(records)), 1, records))
    return Run(Path("run"), NO_MANIFEST, [level], [records], None)


@pytest.fixture
def level():
    """Two requests over 4 s and 2 s with tokens each second; a third fails at 3 s."""
    records = (
        RequestRecord(0, 0.0, Exchange(0.0, (1.0, 2.0, 3.0, 4.0))),
        RequestRecord(1, 2.0, Exchange(2.0, (3.0, 4.0))),
        RequestRecord(2, 0.0, Exchange(0.0, (), ended_s=3.0), status="timeout"),
    )
    (found,) = levels_data(one_level(records), "")["levels"]
    return found


def test_the_time_line_is_the_mean_in_flight_and_the_tokens_of_each_part(level):
    """4 s in 40 parts: 2 requests until 3 s (the second replaces none), 2 from then on."""
    assert level["bin_s"] == 4 / BINS
    assert level["in_flight"] == pytest.approx([2.0] * 20 + [3.0] * 10 + [2.0] * 10)
    assert sum(level["tokens_per_s"]) * level["bin_s"] == pytest.approx(6)
    assert level["errors"] == {"timeout": [0] * 30 + [1] + [0] * 9}


def test_quantiles_are_of_completed_requests_and_lanes_of_all(level):
    assert level["quantiles"]["ttft_ms"] == [1000.0] * len(QUANTILES)
    assert level["quantiles"]["e2e_ms"][0] == 2000.0
    assert level["quantiles"]["e2e_ms"][-1] == 4000.0
    lanes = [[0, 10**6, 4 * 10**6, "ok"], [2 * 10**6, 3 * 10**6, 4 * 10**6, "ok"]]
    assert level["lanes"] == [*lanes, [0, None, 3 * 10**6, "timeout"]]


def test_lanes_are_exact_after_minutes_too():
    """What the page shows is the difference of two times: 68 ms after a quarter of an hour."""
    record = RequestRecord(0, 903.1111, Exchange(903.1111, (903.1791, 904.25)))
    (found,) = levels_data(one_level([record]), "")["levels"]
    assert found["lanes"] == [[903_111_100, 903_179_100, 904_250_000, "ok"]]


def test_throughput_is_of_all_copies_and_invalid_levels_say_so():
    run = one_level([RequestRecord(0, 0.0, Exchange(0.0, (1.0, 2.0)))])
    four = replace(run, manifest=Manifest(target=TargetFacts(kind="engine", tensor_parallel=2, replicas=4)))
    assert (levels_data(run, "")["gpus"], levels_data(four, "")["gpus"]) == (2, 8)
    assert levels_data(run, "")["levels"][0]["usable"]
    late = replace(run, levels=[replace(run.levels[0], valid=False)])
    (found,) = levels_data(late, "")["levels"]
    assert (found["usable"], found["name"]) == (False, "concurrency 2 (invalid)")


def test_a_long_level_is_as_large_as_a_short_one(sweep, monkeypatch):
    """Of many requests every second, third ... is a sample; tokens are counted up again."""
    records = sweep.records[-1] * 3
    (whole,) = levels_data(one_level(records), "")["levels"]
    monkeypatch.setattr("lmi_bench.report.explore.SAMPLE", len(records) // 2)
    (sampled,) = levels_data(one_level(records), "")["levels"]
    assert len(json.dumps(sampled)) == pytest.approx(len(json.dumps(whole)), rel=0.1)
    assert len(whole["lanes"]) == LANES
    assert sum(sampled["tokens_per_s"]) == pytest.approx(sum(whole["tokens_per_s"]), rel=0.02)
    assert sampled["in_flight"] == whole["in_flight"]


def test_the_last_attempt_of_a_level_is_shown(runs_of):
    run = runs_of("", loads=(1, 2))
    again = replace(run.levels[0], attempt=2)
    run.levels.append(again)
    run.records.append(run.records[0][:1])
    first, second = levels_data(run, "")["levels"]
    assert (first["load"], second["load"]) == (1, 2)
    assert len(first["lanes"]) == 1
    run.levels[-1] = replace(again, speed_step=SpeedStep(at_s=1.0, change=0.3))
    steady, _ = levels_data(run, "")["levels"]
    assert len(steady["lanes"]) == len(run.records[0]) > 1


def test_candidates_keep_prices_figures_with_intervals_and_memory(recommendation):
    memory = {"device_gib": 22.0, "weights_gib": 3.123456, "kv_cache_gib": 10.0}
    recommendation["candidates"][0]["memory"] |= memory
    answer = Recommendation.from_json(recommendation)
    rows = candidates_data(answer.candidates, answer.recommended)
    assert rows[0]["price_usd_per_hour"] == 14.18
    assert rows[0]["ttft_p90_ms"] == [420.0, 300.0, 610.0]
    assert rows[0]["memory"] == [22.0, 3.123, 10.0]
    assert rows[2]["price_usd_per_hour"] is None
    assert len(candidates_data(answer.candidates * 99, None)) == CANDIDATES


def test_the_lanes_of_conversations_are_of_whole_ones():
    """Each sends one request, then three at once: ten of them fill the 30 lanes."""
    records = [
        RequestRecord(4 * s + n, at_s, Exchange(at_s, (at_s + 1,)), session=s, turn=n)
        for s in range(12)
        for n, at_s in enumerate((0.0, 2.0, 2.0, 2.0))
    ]
    (found,) = levels_data(one_level(records[:41] + records[44:]), "")["levels"]  # the 11th lacks its fan
    assert found["lanes"][:5] == [
        [0, 10**6, 10**6, "ok", 1, "session 0"],
        *([2 * 10**6, 3 * 10**6, 3 * 10**6, "ok", lane, "session 0"] for lane in (1, 2, 3)),
        [0, 10**6, 10**6, "ok", 4, "session 1"],
    ]
    assert len(found["lanes"]) == 40
    cut = [replace(each, session=0) for each in records[:40]]  # ten, then thirty at once
    (alone,) = levels_data(one_level([*cut, *records[44:]]), "")["levels"]
    assert {lane[-2] for lane in alone["lanes"]} == set(range(1, LANES + 1))
    assert {lane[-1] for lane in alone["lanes"]} == {"session 0"}
    wide = [*records[:36], *(replace(each, session=9) for each in records[36:48])]  # 27 lanes, then 9 at once
    (whole,) = levels_data(one_level(wide), "")["levels"]
    assert {lane[-1] for lane in whole["lanes"]} == {f"session {number}" for number in range(9)}
