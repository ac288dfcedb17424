"""`lmi-bench sweep` of endpoints from the outside: a URL is enough, SageMaker needs only a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import lmi_bench
from tests.loadgen.runtime_server import ACCESS_KEY, REGION, SECRET_KEY, runtime_server

SMALL = ("--isl", "8", "--osl", "6", "--concurrency", "1,2", "--warmup-requests", "0")
KEY = "sk-never-to-be-written"


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)


def lines_of(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def manifest_of(run: Path) -> dict:
    return json.loads((run / "manifest.json").read_text())


def files_hold(run: Path, text: str) -> bool:
    return any(text in path.read_text() for path in run.iterdir() if path.is_file())


def test_a_url_alone_is_enough(tmp_path):
    """The default sweep: six levels of three requests a user, 256 tokens each way."""
    run = tmp_path / "run"
    with runtime_server(step_s=0.0002, num_blocks=2048) as url:
        done = lmi_bench("sweep", url, "--out", run)
    assert "protocol openai, model toy, context 512 tokens" in done.stderr
    assert "token counts: the server's own" in done.stderr
    levels = lines_of(run, "levels.jsonl")
    assert levels
    assert all(line["errors"] == 0 for line in levels)
    assert levels[0]["output_tokens"] == levels[0]["requests"] * 256
    scenario = manifest_of(run)["scenario"]
    assert (scenario["protocol"], scenario["model"]) == ("openai", "toy")
    assert (run / "knees.json").exists()


def test_a_key_is_sent_and_never_written(tmp_path):
    run = tmp_path / "run"
    with runtime_server() as url:
        lmi_bench("sweep", url, *SMALL, "--api-key", KEY, "-H", "X-Team: a", "--out", run)
    assert not files_hold(run, KEY)
    assert manifest_of(run)["target"]["headers"] == ["Authorization", "X-Team"]


def test_a_workload_beyond_the_context_is_refused_before_it_starts(tmp_path):
    run = tmp_path / "run"
    with runtime_server() as url:
        refused = lmi_bench("sweep", url, "--isl", "400", "--out", run, expect=2)
    assert "takes 512 tokens a request" in refused.stderr
    assert not run.exists()


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
    assert [line["output_tokens"] for line in levels] == [18, 36]
    assert all(line["ttft_ms"]["n"] == line["requests"] for line in levels)
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
        lmi_bench("sweep", "sagemaker:mine", "--sagemaker-endpoint-url", url, *SMALL, "--out", run)
    (level,) = lines_of(run, "levels.jsonl")
    assert level["errors_by_kind"] == {"client_error": 3}
    assert "InvalidSignatureException" in (run / "requests.jsonl").read_text()
    assert not files_hold(run, "another-secret")
