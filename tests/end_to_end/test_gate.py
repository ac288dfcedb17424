"""Search, gate and compare from the outside: files and exit codes."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.commands import lmi_bench

SIM = ("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", "--output-tokens", "16")
LEVELS = ("--concurrency", "4", "--requests-per-level", "32")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same workload, and again with two slots of the batch instead of all."""
    folder = tmp_path_factory.mktemp("runs")
    lmi_bench(*SIM, *LEVELS, "--out", folder / "wide")
    lmi_bench(*SIM, *LEVELS, "--max-batch", "2", "--out", folder / "narrow")
    return folder


def test_a_gate_exits_0_when_met_and_99_when_missed(runs, tmp_path):
    lmi_bench("gate", runs / "wide", "--slo", "ttft_p90<=1s")
    junit, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    lmi_bench(
        *("gate", runs / "narrow", "--slo", "ttft_p90<=300ms"), *("--junit", junit, "--markdown", markdown), expect=99
    )
    assert 'failures="1"' in junit.read_text()
    assert "1 of 1 checks missed" in markdown.read_text()


def test_a_gate_exits_99_on_a_regression_and_2_on_bad_input(runs, tmp_path):
    lmi_bench("gate", runs / "wide", "--baseline", runs / "wide")
    lmi_bench("gate", runs / "narrow", "--baseline", runs / "wide", expect=99)
    lmi_bench("gate", tmp_path / "nothing", "--slo", "ttft_p90<=1s", expect=2)
    lmi_bench("gate", runs / "wide", expect=2)


def test_compare_names_what_became_slower(runs, tmp_path):
    out = tmp_path / "differences.json"
    lmi_bench("compare", runs / "wide", runs / "narrow", "--json", out)
    found = {d["metric"]: d for d in json.loads(out.read_text())["differences"]}
    assert found["throughput"]["verdict"] == "slower"
    assert found["e2e_p90"]["change"] > 0.4


def test_compare_refuses_another_workload(runs, tmp_path):
    other = tmp_path / "other"
    lmi_bench(*SIM, *LEVELS, "--input-tokens", "32", "--out", other)
    done = lmi_bench("compare", runs / "wide", other, expect=2)
    assert "workload.input_tokens is 256 and 32" in done.stderr


def test_a_search_writes_its_answer(tmp_path):
    run = tmp_path / "run"
    done = lmi_bench(*SIM, "--search", "concurrency", "--slo", "e2e_p90<=2s", "--out", run)
    answer = json.loads((run / "slo.json").read_text())
    assert set(answer) == {
        "slo",
        "load",
        "value",
        "low",
        "high",
        "first_breach",
        "binding",
        "boundary",
        "endpoint_seconds",
    }
    assert answer["low"] <= answer["value"] < answer["first_breach"] <= answer["high"]
    assert f"{answer['value']} concurrent requests, e2e_p90<=2000ms; boundary" in done.stdout


def test_a_sweep_with_an_slo_names_the_highest_level_that_meets_it(tmp_path):
    """One token of this model takes about 33 ms alone, more in company: the limit lies between."""
    levels = ("--concurrency", "1,8,32", "--requests-per-level", "32")
    done = lmi_bench(*SIM, *levels, "--slo", "tpot_p50<=45ms", "--out", tmp_path / "run")
    assert "highest level within the SLOs: 8 concurrent requests, tpot_p50<=45ms" in done.stdout


def test_a_search_that_nothing_meets_exits_99(tmp_path):
    lmi_bench(*SIM, "--search", "concurrency", "--slo", "ttft_p50<=1ms", "--out", tmp_path / "run", expect=99)


def test_goodput_is_printed_as_vllm_users_ask_for_it(tmp_path):
    done = lmi_bench(*SIM, *LEVELS, "--goodput", "ttft:5000", "tpot:500", "--out", tmp_path / "run")
    assert "requests that meet ttft<=5000ms, tpot<=500ms" in done.stdout
    assert "goodput req/s" in done.stdout
    assert "100 %" in done.stdout


def test_goodput_is_a_gate_of_its_own(tmp_path):
    """No token of a 7B model on an A10G comes in a millisecond."""
    args = (*SIM, *LEVELS, "--goodput", "ttft:5000", "tpot:1")
    done = lmi_bench(*args, "--out", tmp_path / "run", expect=99)
    assert "no level has 90% of its requests within ttft<=5000ms, tpot<=1ms" in done.stdout
    assert "the best has 0.0%" in done.stdout


def test_a_run_goes_out_as_an_llm_d_report_and_comes_back(runs, tmp_path):
    lmi_bench("export", runs / "wide", "--format", "llm-d", "--out", tmp_path / "reports")
    lmi_bench("export", ".", "--format", "llm-d", cwd=runs / "wide")
    assert (runs / "wide-export").is_dir()
    lmi_bench("import", tmp_path / "reports" / "level-0.yaml", "--out", tmp_path / "back")
    lmi_bench("gate", tmp_path / "back", "--slo", "ttft_p90<=1s")
    lmi_bench("report", tmp_path / "back", "--out", tmp_path / "report.html")
    lmi_bench("import", runs / "wide" / "manifest.json", "--out", tmp_path / "no", expect=2)
