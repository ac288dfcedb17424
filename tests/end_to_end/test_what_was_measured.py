"""Runs of endpoints whose names say little, and flags about things that are not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.commands import lmi_bench

PRICED = ("--price-per-hour", "1")
LLAMA = ("--model", "llama-2-7b", "--input-tokens", "256", "--output-tokens", "256")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    lmi_bench(*("sweep", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", "--out", folder), *("--concurrency", "1,8"))
    return folder


def renamed(run: Path, to: Path, model: str) -> Path:
    """The run as if an endpoint had answered that calls its model so."""
    shutil.copytree(run, to)
    path = to / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["target"] = {"kind": "http", "model": model}
    manifest["scenario"] |= {"target": "http://127.0.0.1:8000", "model": model}
    path.write_text(json.dumps(manifest))
    return to


def test_a_name_of_the_servers_own_is_told_by_the_model_flag(tmp_path, run):
    prod = renamed(run, tmp_path / "prod", "prod-chat")
    where = ("--measured-on", "ml.g5.2xlarge", "--instance", "ml.g5.2xlarge,ml.g6.2xlarge")
    unknown = lmi_bench("recommend", prod, *where, expect=2)
    assert "'prod-chat' is not in the catalog" in unknown.stderr
    assert "add --model" in unknown.stderr
    answer = tmp_path / "rec.json"
    lmi_bench("recommend", prod, *where, "--model", "llama-2-7b-chat", "--json", answer)
    content = json.loads(answer.read_text())
    assert content["calibrated"] is True
    named = (*content["candidates"], *content["rejected"])
    assert {each["instance"] for each in named} == {"ml.g5.2xlarge", "ml.g6.2xlarge"}
    assert (content["model"], content["model_as_named"]) == ("llama-2-7b", "llama-2-7b-chat")


def test_runs_of_two_models_are_no_one_profile(tmp_path, run):
    other = renamed(run, tmp_path / "other", "mistral-7b")
    refused = lmi_bench("recommend", run, other, "--measured-on", "ml.g5.2xlarge", expect=2)
    assert "several models (llama-2-7b, mistral-7b)" in refused.stderr


def test_a_run_that_was_killed_in_its_first_level_calibrates_nothing(tmp_path, run):
    killed = tmp_path / "killed"
    shutil.copytree(run, killed)
    (killed / "levels.jsonl").write_bytes(b"")
    assert "no finished level" in lmi_bench("recommend", killed, "--rate", "1", expect=2).stderr


def test_a_length_of_nothing_is_not_the_runs_length(run):
    refused = lmi_bench("recommend", run, "--input-tokens", "0", expect=2)
    assert "at least 1" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--rate", "nan"), "--rate nan: give a finite number"),
        (("--rate", "1", "--json", "-"), "--json -: name a file; --output json"),
        (("--rate", "1", "--max-usd-per-hour", "inf"), "--max-usd-per-hour inf"),
        (("--price-per-hour", "1"), "--prices file"),
        (("--measured-on", "ml.g5.2xlarge"), "give the run folders"),
    ],
)
def test_a_flag_that_would_decide_nothing_is_refused(flags, said):
    assert said in lmi_bench("recommend", *LLAMA, *flags, expect=2).stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ("sweep", "http://127.0.0.1:9", "--policy", "none"),
            "--policy is for an engine in this process: an endpoint keeps its own engine settings",
        ),
        (
            ("sweep", "sim:ml.g5.2xlarge", "-m", "llama-2-7b", "--batch-size", "8"),
            "--batch-size is for dynamic batching; add --policy dynamic",
        ),
        (
            ("predict", *LLAMA, "--instance", "ml.g5.2xlarge", "--concurrency", "4"),
            "--speed applies to recorded traffic",
        ),
        (("plan-day", "--capacity", "2", "--peak", "0", "--start-up", "460", *PRICED), "--peak must be above 0"),
        (("plan-day", "--capacity", "2", "--peak", "9", "--start-up", "460"), "add --machine-price-per-hour"),
    ],
)
def test_what_would_be_passed_over_is_refused_elsewhere_too(command, said):
    more = {"predict": ("--speed", "2"), "plan-day": ("--commit-discount", "0.3")}
    refused = lmi_bench(*command, *more.get(command[0], ()), expect=2)
    assert said in refused.stderr


def test_a_file_that_is_no_recommendation_is_not_reported_as_an_empty_one(tmp_path, run):
    manifest = run / "manifest.json"
    page = ("-o", tmp_path / "page.html")
    refused = lmi_bench("report", run, "--recommendation", manifest, *page, expect=2)
    assert "is not a recommendation" in refused.stderr


def test_a_regression_is_against_something(run):
    limits = ("--slo", "ttft_p90<=1s", "--max-regression", "5")
    assert "add --baseline" in lmi_bench("gate", run, *limits, expect=2).stderr
    refused = lmi_bench("gate", run, *limits, "--baseline", run, expect=2)
    assert "write for example 5% or 0.05" in refused.stderr


def test_a_file_that_is_no_scenario_is_not_shown_whole(tmp_path):
    path = tmp_path / "secrets.txt"
    path.write_text("x" * 5000)
    refused = lmi_bench("sweep", path, expect=2)
    assert len(refused.stderr) < 300


def test_a_portfolio_names_the_flags_that_it_does_not_take(tmp_path):
    path = tmp_path / "models.yaml"
    one = {"model": "llama-2-7b", "input_tokens": 128, "output_tokens": 16, "rate_per_s": 0.2}
    path.write_text(yaml.safe_dump({"models": [one]}))
    refused = lmi_bench(
        *("recommend", "runs/a", "--portfolio", path, "--dtype", "int4"), *("--max-usd-per-hour", "3"), expect=2
    )
    assert "takes no RUNS, --dtype, --max-usd-per-hour" in refused.stderr
