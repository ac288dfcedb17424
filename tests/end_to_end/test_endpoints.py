"""`lmi-bench sweep` of endpoints from the outside: a URL is enough, SageMaker needs only a name."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from lmi_bench.analysis.search.next_level import is_saturated
from lmi_bench.core.level import Level
from lmi_bench.core.run_store import load_run
from tests.end_to_end.commands import Server, lmi_bench
from tests.loadgen.aws.runtime_server import SECRET_KEY, dummy_credentials, runtime_server

SMALL = ("--isl", "8", "--osl", "6", "--concurrency", "1,2", "--warmup-requests", "0")
SMALL += ("--requests-per-user", "3")
KEY = "sk-never-to-be-written"


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch, tmp_path):
    dummy_credentials(monkeypatch, tmp_path)


def lines_of(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def manifest_of(run: Path) -> dict:
    return json.loads((run / "manifest.json").read_text())


def files_hold(run: Path, text: str) -> bool:
    return any(text in path.read_text() for path in run.iterdir() if path.is_file())


def test_a_url_says_all_that_is_needed_of_a_server(tmp_path):
    """The default workload, 256 tokens each way, at two levels of three requests a user."""
    run = tmp_path / "run"
    with runtime_server(step_s=0.0002) as url:
        done = lmi_bench("sweep", url, "--concurrency", "1,2", "--out", run)
    assert "protocol openai, model toy, context 512 tokens" in done.stderr
    assert "token counts: the server's own" in done.stderr
    assert "token counts: the server's own" in done.stdout
    levels = lines_of(run, "levels.jsonl")
    assert levels
    assert all(line["errors"] == 0 for line in levels)
    assert levels[0]["output_tokens"] == levels[0]["requests"] * 256
    scenario = manifest_of(run)["scenario"]
    assert (scenario["protocol"], scenario["model"]) == ("openai", "toy")
    assert (run / "knees.json").exists()


def test_the_bundled_server_is_measured_over_tgis_routes_where_that_is_asked_for(tmp_path):
    run = tmp_path / "run"
    with runtime_server(signed=False) as url:
        done = lmi_bench("sweep", url, "--protocol", "tgi", *SMALL, "--out", run)
    assert "protocol tgi, model toy, context 512 tokens" in done.stderr
    assert [line["errors"] for line in lines_of(run, "levels.jsonl")] == [0, 0]
    for record in lines_of(run, "requests.jsonl"):
        assert (record["input_tokens"], record["output_tokens"]) == (8, 6)
        assert record["token_counts"] == [1] * 6


def test_levels_that_nobody_named_double_until_the_server_is_full(tmp_path):
    """Two slots of 50 ms a token: 4 and 8 users bring no more than 2, unless a busy machine slows
    the levels of 2 or 4, so it is the measured levels that say where the doubling has to end.
    """
    run = tmp_path / "run"
    with runtime_server(step_s=0.05, max_rolling_batch_size=2) as url:
        args = ("sweep", url, "--isl", "8", "--osl", "4", "--requests-per-user", "3")
        done = lmi_bench(*args, "--out", run)
    assert "levels are picked for 5:00 at most (--max-time)" in done.stderr
    doubled = {2**power: list[Level]() for power in range(13)}
    for level in load_run(run).levels:
        doubled.get(level.load.concurrency, []).append(level)
    chain = [lines for lines in doubled.values() if lines]
    assert [lines[0].load.concurrency for lines in chain] == list(doubled)[: len(chain)]
    pairs = [is_saturated(*pair) for pair in pairwise(chain)]
    assert pairs[-2:] == [True, True]
    assert len(chain) < len(doubled)
    assert manifest_of(run)["scenario"]["load"]["concurrency"] == "auto"


def test_a_time_of_ones_own_leaves_out_what_would_end_later_and_says_so(tmp_path):
    """Answers of 0.4 s: four each of two users do not fit a second."""
    run = tmp_path / "run"
    with runtime_server(step_s=0.02, signed=False) as url:
        args = ("sweep", url, "--isl", "8", "--osl", "20", "--out", run)
        done = lmi_bench(*args, "--max-time", "1")
        assert [line["concurrency"] for line in lines_of(run, "levels.jsonl")] == [1]
        assert "left out concurrency 2" in done.stderr
        assert (run / "knees.json").exists()
        lmi_bench(*args, "--concurrency", "auto", "--max-time", "8", "--resume")
    assert [line["concurrency"] for line in lines_of(run, "levels.jsonl")][:2] == [1, 2]


def test_a_trace_is_replayed_at_its_own_times_also_where_no_level_is_named(tmp_path):
    """Requests at 0, 0.3 and 0.9 s; at speed 3 at 0, 0.1 and 0.3 s."""
    trace, run = tmp_path / "trace.csv", tmp_path / "run"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.0,30,4\n"
        "2024-05-10 00:00:00.3,20,6\n2024-05-10 00:00:00.9,50,3\n"
    )
    with runtime_server() as url:
        lmi_bench("sweep", url, "--trace", trace, "--speed", "1,3", "--out", run)
    due = {0: [], 1: []}
    for record in lines_of(run, "requests.jsonl"):
        due[record["level"]].append(record["due_s"])
    assert due[0] == pytest.approx([0, 0.3, 0.9])
    assert due[1] == pytest.approx([0, 0.1, 0.3])
    assert [line["concurrency"] for line in lines_of(run, "levels.jsonl")] == [None, None]


def test_a_key_is_sent_and_never_written_and_a_price_is_worked_out(tmp_path):
    run = tmp_path / "run"
    with runtime_server(step_s=0.02) as url:  # an invalid level has no cost line
        args = ("sweep", url, *SMALL, "--api-key", KEY, "-H", "X-Team: a", "--out", run)
        done = lmi_bench(*args, "--price-per-hour", "2.5")
    for line in lines_of(run, "levels.jsonl"):
        usd = 2.5 / 3600 / line["throughput_tokens_per_s"] * 1e6
        assert line["usd_per_1m_output_tokens"] == pytest.approx(usd)
    assert "USD per 1M output tokens" in done.stdout
    assert not files_hold(run, KEY)
    assert manifest_of(run)["target"]["headers"] == ["Authorization", "X-Team"]


def test_a_workload_beyond_the_context_is_refused_before_it_starts(tmp_path):
    run = tmp_path / "run"
    with runtime_server() as url:
        refused = lmi_bench("sweep", url, "--isl", "400", "--out", run, expect=2)
    assert "takes 512 tokens a request" in refused.stderr
    assert not run.exists()


def test_a_data_set_that_cannot_be_read_leaves_no_folder_behind(tmp_path):
    run, data = tmp_path / "run", tmp_path / "data.jsonl"
    data.write_text("not json\n")
    with runtime_server() as url:
        refused = lmi_bench("sweep", url, "--dataset", data, "--out", run, expect=2)
    assert "is neither JSON lines nor JSON" in refused.stderr
    assert not run.exists()


def test_an_address_without_its_scheme_is_told_from_a_file(tmp_path):
    refused = lmi_bench("sweep", "localhost:8000", "--out", tmp_path / "run", expect=2)
    assert "for a server write http://localhost:8000" in refused.stderr


def test_a_folder_that_is_no_run_cannot_be_resumed_and_the_way_out_is_named(tmp_path):
    (tmp_path / "notes.txt").touch()
    with runtime_server() as url:
        args = ("sweep", url, *SMALL, "--out", tmp_path, "--resume")
        refused = lmi_bench(*args, expect=2)
    assert "name another folder with --out" in refused.stderr
    assert "continue it with --resume" not in refused.stderr


def test_a_metrics_page_that_was_asked_for_and_is_not_there_is_an_error(tmp_path):
    with runtime_server() as url:
        nowhere = "http://127.0.0.1:1/metrics"
        args = ("sweep", url, *SMALL, "--metrics-url", nowhere, "--out", tmp_path / "run")
        refused = lmi_bench(*args, expect=2)
    assert f"--metrics-url {nowhere}" in refused.stderr
    assert "Connection refused" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_nothing_at_the_address_is_one_line(tmp_path):
    refused = lmi_bench("sweep", "http://127.0.0.1:1", "--out", tmp_path / "run", expect=2)
    assert "nothing answers at" in refused.stderr


@pytest.mark.parametrize("protocol", ["lmi", "openai-chat"])
def test_a_sagemaker_endpoint_streams_to_the_sweep(tmp_path, protocol):
    run = tmp_path / "run"
    with runtime_server() as url:
        lmi_bench(
            *("sweep", "sagemaker:mine", "--sagemaker-endpoint-url", url, *SMALL, "--out", run),
            *("--protocol", protocol, "--model", "toy"),
        )
    levels = lines_of(run, "levels.jsonl")
    assert [line["errors"] for line in levels] == [0, 0]
    assert [line["output_tokens"] for line in levels] == [24, 48]
    assert all(line["ttft_ms"]["n"] == 3 * line["concurrency"] for line in levels)
    manifest = manifest_of(run)
    assert manifest["scenario"]["timeout_s"] == 480.0
    assert manifest["target"]["operation"] == "InvokeEndpointWithResponseStream"
    assert not files_hold(run, SECRET_KEY)


def test_without_streaming_only_the_total_time_is_known(tmp_path):
    run = tmp_path / "run"
    with runtime_server() as url:
        args = ("sweep", "sagemaker:mine", "--sagemaker-endpoint-url", url, *SMALL)
        lmi_bench(*args, "--no-stream", "--out", run)
        lmi_bench(*args, "--no-stream", "--out", run, "--resume")
    levels = lines_of(run, "levels.jsonl")
    assert len(levels) == 2
    assert [line["ttft_ms"]["n"] for line in levels] == [0, 0]
    assert [line["e2e_ms"]["n"] for line in levels] == [3, 6]
    assert manifest_of(run)["scenario"]["timeout_s"] == 60.0
    assert all(record["streamed"] is False for record in lines_of(run, "requests.jsonl"))


def test_a_wrong_key_shows_in_the_records_and_not_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    run = tmp_path / "run"
    with runtime_server() as url:
        args = ("sweep", "sagemaker:mine", "--sagemaker-endpoint-url", url, *SMALL)
        done = lmi_bench(*args, "--out", run, expect=1)
    assert "InvalidSignatureException" in done.stderr
    (level,) = lines_of(run, "levels.jsonl")
    assert level["errors_by_kind"] == {"client_error": 3}  # more than half of four: cut short
    assert "InvalidSignatureException" in (run / "requests.jsonl").read_text()
    assert not files_hold(run, "another-secret")


def test_boto3_streams_from_the_bundled_engine_that_wants_signatures(tmp_path, monkeypatch):
    """`serve` with a real model, boto3 as anyone uses it, then our own sweep of the same."""
    server = Server("--model", "demo-15m", "--threads", "1", "--require-signature")
    try:
        body = {"inputs": "time year way", "parameters": {"max_new_tokens": 5}, "stream": True}
        arguments = {"EndpointName": "any", "ContentType": "application/json", "Body": json.dumps(body).encode()}
        once = Config(retries={"total_max_attempts": 1})

        def client():
            return boto3.Session().client("sagemaker-runtime", endpoint_url=server.url, config=once)

        reply = client().invoke_endpoint_with_response_stream(**arguments)
        parts = [event["PayloadPart"]["Bytes"] for event in reply["Body"]]
        run = tmp_path / "run"
        lmi_bench(
            *("sweep", "sagemaker:any", "--sagemaker-endpoint-url", server.url, *SMALL),
            *("--model", "demo-15m", "--out", run),
        )
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with pytest.raises(ClientError, match="InvalidSignatureException"):
            client().invoke_endpoint_with_response_stream(**arguments)
    finally:
        assert server.stop()[0] == 0
    lines = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert reply["ContentType"] == "application/jsonlines"
    assert len(lines) == 5
    assert len(parts) > 1
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]
    assert [line["errors"] for line in lines_of(run, "levels.jsonl")] == [0, 0]


def test_a_server_that_is_to_check_signatures_needs_a_key(monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused = lmi_bench("serve", "--require-signature", "--port", "0", expect=2)
    assert "AWS_SECRET_ACCESS_KEY" in refused.stderr
