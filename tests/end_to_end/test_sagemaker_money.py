"""`lmi-bench sweep sagemaker:NAME --slo ... --max-spend ...`: load, interval, price, instances."""

from __future__ import annotations

import json

import pytest

from lmi_bench.catalog.instances import find_instance
from tests.end_to_end.commands import lmi_bench
from tests.end_to_end.control_plane import control_plane
from tests.loadgen.aws.runtime_server import dummy_credentials, runtime_server

SMALL = ("--isl", "8", "--osl", "4", "--warmup-requests", "0")


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch, tmp_path):
    dummy_credentials(monkeypatch, tmp_path)


def sweep(monkeypatch, tmp_path, *flags, instances, step_s=0.02, **settings):
    """What was printed, and the lines of the levels."""
    run = tmp_path / "run"
    with runtime_server(step_s=step_s, **settings) as url, control_plane(instances) as control:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", control)
        monkeypatch.setenv("AWS_ENDPOINT_URL_APPLICATION_AUTO_SCALING", control)
        done = lmi_bench(*("sweep", "sagemaker:mine", "--sagemaker-endpoint-url", url, *SMALL, *flags), *("--out", run))
    return done, [json.loads(line) for line in (run / "levels.jsonl").read_text().splitlines()]


def test_the_highest_load_under_an_slo_is_told_with_its_interval_and_price(tmp_path, monkeypatch):
    """Two slots of 0.2 s an answer: the third user waits for as long, and gets no token in 0.15."""
    flags = ("--slo", "ttft_p90<=150ms", "--max-spend", "5")
    done, lines = sweep(monkeypatch, tmp_path, *flags, instances=lambda _: 2, step_s=0.05, max_rolling_batch_size=2)
    assert "2 x ml.g5.2xlarge" in done.stderr
    answer = json.loads((tmp_path / "run" / "slo.json").read_text())
    assert (answer["value"], answer["first_breach"]) == (2, 3)
    assert answer["binding"] == "ttft_p90<=150ms"
    assert "highest load within the SLOs: 2 concurrent requests, ttft_p90<=150ms" in done.stdout
    assert "; boundary " in done.stdout
    price = 2 * find_instance("ml.g5.2xlarge").price_usd_per_hour
    assert {line["price_usd_per_hour"] for line in lines} == {price}
    at = [line for line in lines if line["concurrency"] == 2][-1]
    usd = price / 3600 / at["throughput_tokens_per_s"] * 1e6
    assert at["usd_per_1m_output_tokens"] == pytest.approx(usd)
    assert "USD per 1M output tokens" in done.stdout.partition("; boundary ")[2]


def test_a_level_in_which_an_instance_came_is_invalid_whatever_else_is_said_of_it(tmp_path, monkeypatch):
    """Asked at the start, before the first level, after it and after the second."""
    done, lines = sweep(
        monkeypatch, tmp_path, "--concurrency", "1,2", "--requests-per-user", "3", instances=lambda n: 2 if n < 4 else 3
    )
    assert not lines[1]["valid"]
    assert "instances" not in (lines[0]["invalid_reason"] or "")
    assert "went from 2 to 3 instances" in done.stderr
