"""A gate passes what is known to pass, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from lmi_bench.analysis.results.gate import gate_baseline, gate_slos, gate_whole
from lmi_bench.analysis.results.slo_results import level_slo
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo, join_goodput, parse_goodput, parse_slo
from lmi_bench.jobs.results import GateVerdict
from lmi_bench.report.gate_files import gate_junit, gate_markdown
from tests.analysis.results.test_compare import SCENARIO, records_of, run_of
from tests.levels import changed


def answers(n, *, failed=0):
    """TTFT of 1, 2, ... n ms, then failures."""
    good = [RequestRecord(i, 0.0, Exchange(0.0, ((i + 1) / 1000, 1.0))) for i in range(n)]
    bad = [RequestRecord(n + i, 0.0, Exchange(0.0, ended_s=1.0), status="timeout") for i in range(failed)]
    return (*good, *bad)


def test_every_slo_is_checked_at_every_level():
    run = run_of((1, answers(100)), (2, answers(200)))
    cases = gate_slos(run, [parse_slo("ttft_p90<=100ms")])
    assert [(case.level, case.outcome) for case in cases] == [("concurrency 1", "passed"), ("concurrency 2", "missed")]
    assert cases[1].detail == "180.1 ms is over 100 ms"  # linear: 1 + 0.9 * 199


def test_too_few_requests_are_neither_passed_nor_missed():
    cases = gate_slos(run_of((1, answers(20))), [parse_slo("ttft_p90<=100ms")])
    assert [case.outcome for case in cases] == ["not measured"]
    assert cases[0].detail == "p90 needs 29 samples, has 20"
    assert GateVerdict(tuple(cases)).exit_code == 2
    group = ElementTree.fromstring(gate_junit(cases)).find("testsuite")
    assert (group.get("failures"), group.get("skipped")) == ("0", "1")
    assert group.find("testcase/skipped").get("message") == cases[0].detail
    assert "1 not measured" in gate_markdown(cases, title="gate")


def test_a_miss_counts_more_than_what_was_not_measured():
    limits = [parse_slo("ttft_p90<=100ms")]
    cases = gate_slos(run_of((1, answers(20)), (2, answers(200))), limits)
    assert GateVerdict(tuple(cases)).exit_code == 99


def test_a_quantile_of_the_baseline_that_nobody_asked_for_may_be_unknown():
    few = run_of((4, answers(20)))
    cases = gate_baseline(few, few, max_regression=0.05)
    outcomes = {case.name: case.outcome for case in cases}
    assert outcomes["ttft_p90 vs baseline"] == "not measured"
    assert outcomes["ttft_p50 vs baseline"] == "passed"
    assert GateVerdict(tuple(cases)).exit_code == 0
    unknown = [case for case in cases if case.outcome == "not measured"]
    assert GateVerdict(tuple(unknown)).exit_code == 2


def test_a_level_whose_load_was_not_delivered_is_not_measured():
    run = run_of((1, answers(100)))
    run.levels[0] = replace(run.levels[0], valid=False, invalid_reason="client: late")
    cases = gate_slos(run, [parse_slo("ttft_p90<=100ms")])
    assert [(case.name, case.outcome) for case in cases] == [("ttft_p90", "passed"), ("valid", "not measured")]


def test_the_few_answers_of_a_level_that_failed_pass_nothing():
    run = run_of((1, answers(40, failed=60)), (2, answers(60, failed=40)))
    lines = [replace(line, requests=100, errors=n) for line, n in zip(run.levels, (60, 40), strict=True)]
    cases = gate_slos(replace(run, levels=lines), [parse_slo("ttft_p90<=1s"), parse_slo("ttft_p90<=1ms")])
    assert [case.outcome for case in cases] == ["not measured", "missed", "passed", "missed"]
    assert cases[0].detail == "60 of 100 requests failed: the others are no measurement"


@pytest.mark.parametrize(
    ("load", "whole", "says"),
    [
        ({"concurrency": [1, 2]}, True, ""),
        ({"concurrency": [1, 2, 4]}, True, "it lacks concurrency 4"),
        ({"rate_per_s": [0.5], "concurrency": None}, True, "it lacks 0.5 req/s"),
        ({"concurrency": "auto"}, True, ""),
        ({"concurrency": "auto"}, False, "its sweep is not over"),
        ({"concurrency": [4], "search": "concurrency"}, True, ""),
    ],
)
def test_a_run_that_is_not_whole_does_not_pass(load, whole, says):
    run = run_of((1, answers(100)), (2, answers(200)), scenario={**SCENARIO, "load": load})
    cases = [*gate_whole(replace(run, knees=[] if whole else None), "the run")]
    assert "".join(case.detail.partition(":")[0].partition(", or")[0] for case in cases) == says
    assert GateVerdict((*cases, *gate_slos(run, [parse_slo("ttft_p90<=1s")]))).exit_code == 2 * bool(says)


def test_only_the_loads_asked_for_are_gated():
    run = run_of((1, answers(100)), (2, answers(200)))
    assert len(gate_slos(run, [parse_slo("ttft_p90<=100ms")], loads=[1.0])) == 1
    with pytest.raises(InputError, match="no level at 4; it has 1, 2"):
        gate_slos(run, [parse_slo("ttft_p90<=100ms")], loads=[4.0])


def test_six_failures_in_a_hundred_make_the_p95_endless():
    records = answers(94, failed=6)
    run = run_of((1, records))

    def measured_ms(statistic, failures):
        slo = parse_slo(f"ttft_{statistic}<=1s")
        return level_slo(run.levels[0], records, slo, failures).measured_ms

    assert measured_ms("p95", "infinite") == math.inf
    assert measured_ms("p90", "infinite") == pytest.approx(90.1)
    assert measured_ms("p95", "exclude") < 94
    (case,) = gate_slos(run, [parse_slo("ttft_p95<=1s")], failures="infinite")
    assert (case.outcome, case.measured) == ("missed", "infinite")


def test_a_level_without_records_is_judged_by_its_line():
    run = run_of((1, ()))
    run.levels[0] = changed(run.levels[0], ttft_ms={"p90": 80.0})
    assert [case.outcome for case in gate_slos(run, [parse_slo("ttft_p90<=100ms")])] == ["passed"]


def test_a_regression_is_worse_by_more_than_allowed_and_by_more_than_chance():
    base = run_of((4, records_of(0)))
    slower = run_of((4, records_of(1, slower=1.1)))
    strict = gate_baseline(slower, base, max_regression=0.05)
    assert {case.outcome for case in strict if case.name.startswith("tpot")} == {"missed"}

    def missed(run, earlier, allowed):
        cases = gate_baseline(run, earlier, max_regression=allowed)
        return [case.name for case in cases if case.outcome == "missed"]

    assert missed(slower, base, 0.2) == []
    assert missed(base, slower, 0.05) == []
    assert missed(base, base, 0.0) == []


def test_a_run_that_could_not_have_seen_the_regression_passes_nothing():
    base, alike = run_of((4, records_of(0))), run_of((4, records_of(1)))
    wide, narrow = (gate_baseline(alike, base, max_regression=share) for share in (0.2, 0.001))
    assert {case.outcome for case in wide} == {"passed"}
    assert {case.outcome for case in narrow} == {"not measured"}
    assert narrow[0].detail.endswith("would have been seen, not of 0.1%")


@pytest.mark.parametrize(
    ("picked", "has_it", "loads", "expected"),
    [
        ({}, False, (), (2, "the run has no such level")),
        ({}, True, (), (2, "client: late")),
        ({}, True, (4.0,), (0, "")),
        ({}, True, (8.0,), (2, "client: late")),
        ({"concurrency": "auto"}, False, (), (0, "the run has no such level")),
        ({"search": "concurrency"}, True, (), (2, "client: late")),
    ],
)
def test_a_level_of_the_baseline_that_is_lost_does_not_pass(picked, has_it, loads, expected):
    scenario = {**SCENARIO, "load": picked}
    base = run_of((4, records_of(0)), (8, records_of(0)), scenario=scenario)
    run = run_of(*[(4, records_of(0)), (8, records_of(0))][: 1 + has_it], scenario=scenario)
    if has_it:
        run.levels[1] = replace(run.levels[1], valid=False, invalid_reason="client: late")
    cases = gate_baseline(run, base, max_regression=0.2, loads=loads)
    lost = "".join(case.detail for case in cases if case.outcome == "not measured")
    assert (GateVerdict(tuple(cases)).exit_code, lost) == expected
    back = gate_baseline(base, run, max_regression=0.2)  # an invalid baseline asks for nothing
    assert GateVerdict(tuple(back)).exit_code == 0


def test_a_level_at_which_no_metric_was_measured_does_not_pass():
    base = run_of((4, records_of(0)), (8, records_of(0)))
    failing = run_of((4, records_of(0)), (8, answers(0, failed=60)))
    assert GateVerdict(tuple(gate_baseline(failing, base, max_regression=0.2))).exit_code == 2


def test_junit_counts_and_names_the_misses():
    cases = gate_slos(run_of((1, answers(100)), (2, answers(200))), [parse_slo("ttft_p90<=100ms")])
    root = ElementTree.fromstring(gate_junit(cases))
    assert (root.get("tests"), root.get("failures")) == ("2", "1")
    failed = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert [case.get("classname") for case in failed] == ["concurrency 2"]


def test_markdown_puts_the_misses_first():
    cases = gate_slos(run_of((1, answers(100)), (2, answers(200))), [parse_slo("ttft_p90<=100ms")])
    text = gate_markdown(cases, title="gate")
    assert text.startswith("## gate: 1 of 2 checks missed")
    assert text.index("concurrency 2") < text.index("concurrency 1")


def test_vllm_goodput_limits_are_read():
    assert parse_goodput("ttft:500 tpot:15,e2el:2000") == [
        Slo("ttft", "mean", 500.0),
        Slo("tpot", "mean", 15.0),
        Slo("e2e", "mean", 2000.0),
    ]
    with pytest.raises(InputError, match="METRIC:MS"):
        parse_goodput("ttft<500")


@pytest.mark.parametrize(
    ("typed", "joined"),
    [
        (["--goodput", "ttft:5", "tpot:1", "x.yaml"], ["--goodput", "ttft:5 tpot:1", "x.yaml"]),
        (["sweep", "ttft:5"], ["sweep", "ttft:5"]),
        (["--goodput", "ttft:5", "--rate", "1"], ["--goodput", "ttft:5", "--rate", "1"]),
        (["--goodput"], ["--goodput"]),
    ],
)
def test_goodput_takes_its_values_as_vllm_users_type_them(typed, joined):
    assert join_goodput(typed) == joined
