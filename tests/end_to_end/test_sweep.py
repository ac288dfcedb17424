"""`lmi-bench sweep` from the outside: its files, its exit codes, and what survives being killed."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmi_bench.catalog.published import jumpstart_cells
from tests.end_to_end.commands import ONCE, command, environment, lmi_bench
from tests.loadgen.ask.test_discover import good_completions, playing, says

SMALL = ("--input-tokens", "8", "--output-tokens", "8", "--warmup-requests", "0")


def levels_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "levels.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def test_a_simulated_g5_2xlarge_has_the_published_knees_and_throughput(tmp_path):
    """Published: throughput of each level; knees at 32 (100 ms/token) and 16 (twice the lowest)."""
    run = tmp_path / "run"
    lmi_bench(
        *("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", "--out", run),
        *("--input-tokens", "256", "--output-tokens", "256"),
        *("--concurrency", "1,2,4,8,16,32,64"),
    )
    published = {
        cell.concurrency: cell.throughput_tokens_per_s
        for cell in jumpstart_cells("concurrency")
        if (cell.table, cell.instance_type) == ("instance_comparison", "ml.g5.2xlarge")
    }
    assert len(published) == 7
    lines = {line["concurrency"]: line for line in levels_of(run)}
    errors = sorted(
        abs(lines[level]["throughput_tokens_per_s"] / tokens_per_s - 1) for level, tokens_per_s in published.items()
    )
    assert errors[len(errors) // 2] < 0.25
    knees = {knee["rule"]: knee for knee in json.loads((run / "knees.json").read_text())}
    assert knees["latency_limit"]["concurrency"] in (16, 32, 64)
    assert knees["half_latency"]["concurrency"] in (8, 16, 32)
    assert sum(knee["recommended"] for knee in knees.values()) == 1


def test_a_simulated_sweep_without_levels_goes_on_past_the_knee(tmp_path):
    """The cache of an A10G holds 14,720 tokens of Llama 2 7B: 28 sequences of 512."""
    run = tmp_path / "run"
    lmi_bench("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", "--profile", "tgi-2023", "--out", run)
    levels = [line["concurrency"] for line in levels_of(run)]
    assert min(levels) == 1
    assert max(levels) > 28
    (best,) = [knee for knee in json.loads((run / "knees.json").read_text()) if knee["recommended"]]
    assert best["cause"] == "kv_memory"


def test_a_queue_that_is_never_empty_leaves_no_time_between_steps(tmp_path):
    """A rate past the instance's limit against a rate far below it, in the trace of the steps."""

    def idle_share(name: str, *load: str) -> float:
        trace = tmp_path / f"{name}.json"
        lmi_bench(
            *("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", *SMALL),
            *(*load, "--step-trace", trace, "--out", tmp_path / name),
        )
        lines = trace.read_text().strip().strip("[]").split("\n")
        events = [json.loads(line.rstrip(",")) for line in lines if line.strip("[], ")]
        steps = [event for event in events if event.get("ph") == "X" and event["pid"] == 1]
        steps = steps[: int(0.9 * len(steps))]  # the last requests drain an empty queue
        spans = [(step["ts"], step["ts"] + step["dur"]) for step in steps]
        busy = sum(end - begin for begin, end in spans)
        return 1 - busy / (spans[-1][1] - spans[0][0])

    assert idle_share("full", "--rate", "200", "--requests-per-level", "200") < 0.001
    assert idle_share("sparse", "--rate", "0.5", "--requests-per-level", "20") > 0.5


def test_a_run_folder_is_never_overwritten(tmp_path):
    run = tmp_path / "run"
    args = ("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", *SMALL)
    lmi_bench(*args, "--concurrency", "1", "--out", run)
    before = (run / "levels.jsonl").read_bytes()
    refused = lmi_bench(*args, "--concurrency", "1", "--out", run, expect=2)
    assert "--resume" in refused.stderr
    other = lmi_bench(*args, "--concurrency", "1,2", "--out", run, "--resume", expect=2)
    assert "another scenario" in other.stderr
    assert (run / "levels.jsonl").read_bytes() == before


def test_a_killed_sweep_resumes_at_its_next_level(tmp_path):
    """SIGKILL in mid-level: finished levels stay byte for byte and none is run twice."""
    run = tmp_path / "run"
    args = ("sweep", ONCE, "--model", "demo-15m", "--concurrency", "1,2,3,4", "--out", run)
    lengths = ("--input-tokens", "8", "--output-tokens", "16", "--threads", "1", "--resume")
    first = subprocess.Popen(command(*args, *lengths), env=environment(), stderr=subprocess.DEVNULL)
    levels = run / "levels.jsonl"
    wait_for(lambda: levels.exists() and len(levels.read_bytes().splitlines()) >= 2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    finished = levels.read_bytes()
    assert len(finished.splitlines()) < 4, "too fast to be killed in mid-sweep"

    lmi_bench(*args, *lengths)
    assert levels.read_bytes().startswith(finished)
    lines = levels_of(run)
    assert [line["level"] for line in lines] == [0, 1, 2, 3]
    counted = {(line["level"], line["attempt"]) for line in lines}
    requests = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    ids = [(r["level"], r["request_id"]) for r in requests if (r["level"], r["attempt"]) in counted]
    assert len(ids) == len(set(ids)) == sum(line["requests"] for line in lines)


def test_ctrl_c_exits_130_and_leaves_a_resumable_run(tmp_path):
    run = tmp_path / "run"
    args = ("sweep", ONCE, "--model", "demo-15m", "--concurrency", "1,2", "--out", run, "--resume")
    lengths = ("--input-tokens", "8", "--output-tokens", "32", "--threads", "1")
    sweep = subprocess.Popen(command(*args, *lengths), env=environment(), stderr=subprocess.PIPE, text=True)
    levels = run / "levels.jsonl"
    wait_for(lambda: levels.exists() and len(levels.read_bytes().splitlines()) >= 1)
    sweep.send_signal(signal.SIGINT)
    _, stderr = sweep.communicate(timeout=120)
    assert sweep.returncode == 130
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    lmi_bench(*args, *lengths)
    assert [line["level"] for line in levels_of(run)] == [0, 1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--target", "sim:ml.g5.3xlarge", "--model", "llama-2-7b"), "ml.g5.2xlarge"),
        (("--target", "sim:ml.g5.2xlarge", "--model", "llama-2-70b"), "GiB"),
        (("--target", "sim:ml.g5.2xlarge", "--model", "lama-2-7b"), "llama-2-7b"),
        (("--target", "nowhere"), "sim:INSTANCE"),
        (("--tp", "4"), "6 query heads"),
        (("--model", "no-such-folder"), "demo-15m"),
        (("--concurrency", "1,x"), "'x' is not a number"),
        (("--concurrency", "0"), "greater than 0"),
        (("--policy", "static"), "rolling"),
        (("--slo", "ttft<=1s"), "ttft_p90<=1s"),
        (("--timeout", "soon"), "seconds"),
        (("--target", "http://127.0.0.1:1", "--model", "m", "--protocol", "grpc"), "lmi"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_2(tmp_path, args, said):
    run = tmp_path / "run"
    done = lmi_bench("sweep", *SMALL, "--out", run, *args, expect=2)
    assert said in done.stderr
    assert not run.exists(), "nothing is written for bad input"


def test_an_unknown_field_names_the_nearest_known_one(tmp_path):
    scenario = tmp_path / "s.yaml"
    scenario.write_text("model: demo-15m\nload: {concurency: [1]}\n")
    done = lmi_bench("sweep", scenario, "--out", tmp_path / "run", expect=2)
    assert "concurrency" in done.stderr


def test_an_slo_that_no_level_meets_exits_99(tmp_path):
    args = ("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", *SMALL)
    load = ("--concurrency", "1", "--requests-per-level", "40")
    lmi_bench(*args, *load, "--slo", "itl_p90<=10s", "--out", tmp_path / "kept")
    lmi_bench(*args, *load, "--slo", "itl_p90<=1ms", "--out", tmp_path / "missed", expect=99)


def test_an_endpoint_that_is_not_there_is_one_line_although_protocol_and_model_are_stated(tmp_path):
    """Port 9 (discard) has no listener here: every connection is refused."""
    run = tmp_path / "run"
    target = ("http://127.0.0.1:9", "--protocol", "openai", "--model", "m", "--concurrency", "1")
    done = lmi_bench("sweep", *target, *SMALL, "--out", run, expect=2)
    assert "nothing answers at http://127.0.0.1:9: Connection refused" in done.stderr
    assert not run.exists()


def _failing(share_of_ten):
    """Completions of which so many of every ten are refused as overload."""
    numbers = itertools.count()

    def route(body):
        if next(numbers) % 10 < share_of_ten:
            return says({"error": {"message": "queue full"}}, 503)(body)
        return good_completions(body)

    return playing({("POST", "/v1/completions"): route})


STATED = ("--protocol", "openai", "--model", "m", "--concurrency", "2")
TWENTY = ("--requests-per-level", "20", "--osl", "2", "--warmup-requests", "0")


@pytest.mark.parametrize(
    ("share_of_ten", "slo", "code", "said"),
    [
        (10, (), 1, "error: no request was answered: overloaded: HTTP 503: queue full; the records"),
        (8, (), 1, "requests failed: overloaded: HTTP 503: queue full"),
        (8, ("--slo", "ttft_mean<=100s"), 1, "error: no level is usable"),
        (8, ("--slo", "ttft_mean<=0.001ms"), 99, "requests failed ("),
        (3, (), 0, "8 of 22 requests failed (8 overloaded: HTTP 503: queue full)"),
    ],
)
def test_failures_decide_the_exit_code_when_they_are_most_of_all_and_are_named_always(
    tmp_path, share_of_ten, slo, code, said
):
    run = tmp_path / "run"
    with _failing(share_of_ten) as (url, _):
        done = lmi_bench("sweep", url, *STATED, *TWENTY, *slo, "--out", run, expect=code)
    assert said in done.stderr
    if share_of_ten == 10:
        assert done.stdout == "", "no table of nothing"
    assert ("Serving Benchmark Result" in done.stdout) is (share_of_ten == 3)
    assert (run / "requests.jsonl").read_text().count("queue full") >= 6


@pytest.mark.parametrize(
    ("share", "code", "stopped_by", "requests"),
    [("20%", 1, ["errors"], (401, 450)), ("none", 0, [None, None], (602, 602))],
)
def test_a_level_ends_at_the_share_of_failures_that_is_stated(tmp_path, share, code, stopped_by, requests):
    """After the probe the requests 1, 2, 10, 11, 12, 20 ... fail: the 121st, the first beyond a
    fifth of 602, is number 401. Others are on their way before the users hear of it."""
    run = tmp_path / "run"
    with _failing(3) as (url, _):
        load = ("--requests-per-level", "600", "--osl", "2", "--warmup-requests", "0")
        target = (url, *STATED[:-1], "2,2", *load)
        lmi_bench("sweep", *target, "--max-errors", share, "--out", run, expect=code)
    levels = [json.loads(text) for text in (run / "levels.jsonl").read_text().splitlines()]
    assert [line["stopped_by"] for line in levels] == stopped_by
    for line in levels:
        assert requests[0] <= line["requests"] <= requests[1]
