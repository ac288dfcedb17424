"""The first request of each user of a closed loop: sent at once with all others, in no latency."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.analysis.model.capacity import planned_model_for, scheduler_config_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel, cell_from_json, cell_to_json
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.results.checks import check_level
from lmi_bench.analysis.results.compare import compare_runs
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.slo_results import CertainMiss, goodput, judge_level
from lmi_bench.analysis.search.slo_search import SloSearch, slo_answer
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.records import LevelRun, RequestRecord, record_of, request_line, with_start_marked
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.workload import LevelSizes, LevelSpec, PlannedRequest, of_sessions, with_start

PROMPT_S, DECODE_S = 0.1, 5.0


def closed(users, requests, **more):
    return with_start(LevelSpec(0, Load(concurrency=users), num_requests=requests, **more))


def served(spec, slos=(), *, requests=None):
    """Prompts one after the other, then decoding beside all others.

    Users follow each other at PROMPT_S after the start, so a TTFT is one prompt for up to 51 users
    (5.1 s / 0.1 s) and users * PROMPT_S - DECODE_S for more. The first are 1, 2, 3 prompts ...
    """
    watch = CertainMiss(slos, spec)
    users, free_s, records, stopped_by = [0.0] * spec.concurrency, 0.0, [], None
    for number in range(requests or spec.num_requests):
        sent_s = heapq.heappop(users)
        free_s = max(free_s, sent_s) + PROMPT_S
        times_s = (free_s, free_s + DECODE_S)
        records.append(RequestRecord(number, sent_s, Exchange(sent_s, times_s, (1, 1))))
        heapq.heappush(users, times_s[1])
        if slos and watch.add(records[-1]):
            stopped_by = "decided"
            break
    return LevelRun(spec, 1, with_start_marked(records, spec), stopped_by)


def test_a_level_sends_one_more_for_each_user_and_counts_as_many_as_asked():
    line = summarise_level(served(closed(40, 120)))
    assert (line.requests, line.start_requests, line.of("ttft").n) == (160, 40, 120)
    assert line.of("ttft").max == pytest.approx(1e3 * PROMPT_S)
    assert line.throughput_tokens_per_s == pytest.approx(2 * 160 / line.wall_s)
    assert with_start(open_loop := LevelSpec(0, Load(rate_per_s=2.0), num_requests=9)) == open_loop


@pytest.mark.parametrize(("limit_ms", "users"), [(150, 51), (1050, 60)])
def test_a_search_finds_the_users_that_the_steady_server_carries(limit_ms, users):
    """By hand: 0.1 s up to 51 users, and n * 0.1 - 5 <= 1.05 s up to 60; a step is 5 %."""
    slos = (parse_slo(f"ttft_p90<={limit_ms}ms"),)
    search, lines = SloSearch("concurrency", slos, LevelSizes()), []
    while (spec := search.next_level(lines)) is not None:
        run = served(spec, slos)
        lines.append(replace(summarise_level(run), search=judge_level(run, slos)))
    answer = slo_answer(search, lines)
    assert users / 1.05 <= answer.value <= users < answer.first_breach <= 1.05 * users


def test_no_first_request_decides_a_level_early():
    slos = (parse_slo("ttft_p90<=150ms"),)
    assert served(closed(40, 120), slos).stopped_by is None
    assert served(closed(60, 180), slos).stopped_by == "decided"


def test_a_level_with_too_few_others_counts_all_and_says_so():
    """Cut by its time after 70 requests of 40 users; the same with 9 requests for 40 users."""
    for run in (served(closed(40, 120), requests=70), served(closed(40, 9))):
        line = summarise_level(run)
        assert (line.start_requests, line.of("ttft").n) == (0, len(run.records))
        assert any(f"only {line.sent} requests for 40 users" in text for text in check_level(line))
    assert check_level(summarise_level(served(closed(40, 120)))) == []


def test_goodput_counts_the_same_requests():
    """Half of the 40 first ones wait longer than 2 s; none of the 120 later ones does."""
    found = goodput(served(closed(40, 120)).records, [parse_slo("ttft_p90<=2s")], open_loop=False)
    assert (found.good, found.requests, found.share) == (120, 120, 1.0)
    wall_s = summarise_level(served(closed(40, 120))).wall_s
    assert found.per_s == pytest.approx(160 / wall_s)


def test_of_conversations_the_first_turns_that_all_begin_with_are_left_out():
    spec = of_sessions(closed(2, 8), lambda _: 4, num_sessions=None)
    assert (spec.num_requests, spec.num_sessions, spec.counted_requests) == (12, 3, 10)
    records = [RequestRecord(n, 0.0, Exchange(0.0, (1.0, 2.0), (1, 1)), session=n // 4, turn=n % 4) for n in range(12)]
    marked = with_start_marked(records, spec)
    assert [r.request_id for r in marked if r.at_start] == [0, 4]
    line = summarise_level(LevelRun(spec, 1, marked))
    assert (line.sessions.ttft_first_turn_ms.n, line.sessions.ttft_later_turns_ms.n) == (1, 9)


def run_of(tmp_path, run):
    return Run(tmp_path, Manifest(), [summarise_level(run)], [run.records], None)


def test_a_run_from_before_keeps_its_figures_and_is_compared_by_all_requests(tmp_path):
    run = served(closed(40, 120))
    old = replace(
        run, records=tuple(record_of(request_line(0, 1, replace(each, at_start=False), ())) for each in run.records)
    )
    line = summarise_level(replace(old, spec=replace(run.spec, start_requests=0)))
    assert (line.start_requests, line.of("ttft").n) == (None, 160)
    assert all(record_of(request_line(0, 1, each, ())).at_start == each.at_start for each in run.records)
    new, before = run_of(tmp_path, run), run_of(tmp_path, old)
    equal = [each.change for each in compare_runs(before, new) if each.metric == "ttft_p90"]
    assert equal == [pytest.approx(0.0)]


SETUP = Setup(find_model("qwen3-32b"), find_instance("ml.p5.48xlarge"), 2, "float16")


@pytest.mark.parametrize(("users", "isl", "osl"), [(24, 2000, 100), (50, 1000, 200)])
def test_a_prediction_counts_the_requests_that_a_measurement_counts(users, isl, osl):
    """Against the scheduler step by step, with all requests too: their TTFT is a fifth longer."""
    spec, profile, drawn = closed(users, 10 * users), VLLM_0_12, np.random.default_rng(1)
    outputs = np.round(drawn.uniform(0.9, 1.1, size=11 * users) * osl).astype(int).tolist()
    means = []
    for level in (spec, replace(spec, start_requests=0)):
        run = simulate_level(
            level,
            lambda i: PlannedRequest(i, 0.0, isl, outputs[i]),
            scheduler_config_for(SETUP, profile, isl + 2 * osl),
            planned_model_for(SETUP, profile),
            overhead_s=profile.parameters.request_overhead_s,
        )
        line = summarise_level(run)
        left_out = bool(line.start_requests)
        cell = MeasuredLevel(SETUP, isl, osl, spec.load, spec.num_requests, length_spread=0.1)
        cell = replace(cell, start_left_out=left_out)
        assert cell_from_json(cell_to_json(cell), None) == cell
        predicted = predict_cell(profile, cell)
        assert 1e3 * predicted.ttft_mean_s == pytest.approx(line.of("ttft").mean, rel=0.08)
        assert 1e3 * predicted.tpot_mean_s == pytest.approx(line.of("tpot").mean, rel=0.02)
        means.append(predicted.ttft_mean_s)
    assert means[1] > 1.2 * means[0]
