"""`sweep --against`: two targets in turn, until a difference is sure."""

from __future__ import annotations

import re

import pytest

from lmi_bench.core.run_store import load_run
from tests.end_to_end.commands import lmi_bench
from tests.loadgen.aws.runtime_server import runtime_server

SMALL = ("--isl", "8", "--osl", "20", "--concurrency", "1", "--requests-per-level", "4")
SIM = ("--target", "sim:ml.g5.2xlarge", "-m", "llama-2-7b", "--concurrency", "1,2")


def test_the_slower_of_two_servers_is_found_and_both_runs_are_whole(tmp_path):
    """Steps of 4 ms against 100 ms, so that a busy machine cannot hide which one is slower."""
    with runtime_server(step_s=0.004) as a, runtime_server(step_s=0.1) as b:
        few = (*SMALL, "--osl", "6")
        done = lmi_bench("sweep", a, "--against", b, *few, "--out", tmp_path / "ab")
    assert "concurrency 1: B has less: throughput -" in done.stdout
    runs = [load_run(tmp_path / "ab" / side) for side in "ab"]
    rounds = [len(run.levels) for run in runs]
    assert rounds[0] == rounds[1] >= 3
    assert [run.manifest.scenario.target for run in runs] == [a, b]
    starts = [[line.started_at for line in run.levels] for run in runs]
    assert starts[0][0] < starts[1][0] < starts[1][1] < starts[0][1]  # A B, B A
    assert [len(run.manifest.commands) for run in runs] == [1, 1]
    lmi_bench("compare", tmp_path / "ab/a", tmp_path / "ab/b")


def test_equal_targets_end_with_no_difference_and_a_resumed_one_sends_nothing(tmp_path):
    args = ("sweep", *SIM, "--against", SIM[1], "--out", tmp_path / "ab")
    done = lmi_bench(*args)
    same = re.findall(r"no difference of 3.0%: throughput .* from A to B .*, 3 round", done.stdout)
    assert len(same) == 2
    assert f"next: lmi-bench compare {tmp_path}/ab/a {tmp_path}/ab/b" in " ".join(done.stdout.split())
    before = (tmp_path / "ab/a/levels.jsonl").read_bytes()
    again = lmi_bench(*args, "--resume")
    assert again.stdout == done.stdout
    assert (tmp_path / "ab/a/levels.jsonl").read_bytes() == before
    assert "exists" in lmi_bench(*args, expect=2).stderr


def test_a_key_is_not_sent_to_the_other_host(tmp_path, monkeypatch):
    """B takes its own key alone, from a variable of its own."""
    keys = {"a": "sk-1234567890abcdef", "b": "sk-fedcba0987654321"}
    with (
        runtime_server(signed=False, app_options={"api_key": keys["a"]}) as a,
        runtime_server(signed=False, app_options={"api_key": keys["b"]}) as b,
    ):
        args = ("sweep", a, "--against", b, *SMALL, "--api-key", keys["a"])
        refused = lmi_bench(*args, "--out", tmp_path / "none", expect=2)
        assert f"{b} wants a key" in refused.stderr  # it was given none
        monkeypatch.setenv("LMI_BENCH_API_KEY_B", keys["b"])
        lmi_bench(*args, "--until", "throughput +-99%", "--out", tmp_path / "ab")
    files = [path for side in "ab" for path in (tmp_path / "ab" / side).iterdir()]
    assert not any(key in path.read_text("utf-8") for path in files for key in keys.values())


def test_what_does_not_go_together_is_one_line(tmp_path):
    args = ("sweep", *SIM, "--against", "sim:ml.g6.2xlarge")
    assert "--against needs --out" in lmi_bench(*args, expect=2).stderr
    auto = lmi_bench(*args, "--concurrency", "auto", "--out", tmp_path / "ab", expect=2)
    assert "--against needs listed levels" in auto.stderr


@pytest.mark.parametrize(
    "more",
    [
        ("--slo", "ttft_p90<=1ms"),
        ("--goodput", "ttft:1"),
        ("--max-time", "5m"),
        ("--max-spend", "1", "--price-per-hour", "1"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path, more):
    args = ("sweep", *SIM, "--against", "sim:ml.g6.2xlarge", "--concurrency", "2", "--out")
    refused = lmi_bench(*args, tmp_path / "ab", *more, expect=2)
    assert "--against finds differences: it takes no --slo" in refused.stderr
    assert not (tmp_path / "ab").exists()
