"""CloudWatch's view of a level, through botocore's own client against a local server."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.run_store import load_run
from lmi_bench.jobs.sweep.watch import read_cloudwatch
from lmi_bench.loadgen.aws.access import open_aws_access
from lmi_bench.loadgen.aws.cloudwatch import Watched, read_levels, timed_levels
from lmi_bench.report.view import build_view
from tests.end_to_end.commands import lmi_bench
from tests.jobs.hearing import Hearing
from tests.levels import level_of
from tests.loadgen.aws.cloudwatch_server import cloudwatch_server
from tests.loadgen.aws.runtime_server import dummy_credentials, runtime_server

NOON = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


def timed(index: int, attempt: int, start: datetime, end: datetime):
    times = {"started_at": start.isoformat(), "ended_at": end.isoformat()}
    return level_of(level=index, attempt=attempt, **times)


def known(metric, statistic, _start, _end):
    """Two minutes of a busy endpoint: 30 invocations of 2 s, then 10 of 4 s."""
    return {
        ("Invocations", "Sum"): {at(0): 30.0, at(1): 10.0},
        ("ModelLatency", "Sum"): {at(0): 60e6, at(1): 40e6},
        ("ModelLatency", "SampleCount"): {at(0): 30.0, at(1): 10.0},
        ("OverheadLatency", "Sum"): {at(0): 0.3e6, at(1): 0.1e6},
        ("OverheadLatency", "SampleCount"): {at(0): 30.0, at(1): 10.0},
        ("FirstChunkLatency", "Sum"): {at(0): 9e6, at(1): 3e6},
        ("FirstChunkLatency", "SampleCount"): {at(0): 30.0, at(1): 10.0},
        ("MidStreamErrors", "Sum"): {at(1): 2.0},
        ("GPUUtilization", "Average"): {at(0): 360.0, at(1): 280.0},  # of four devices
        ("CPUUtilization", "Average"): {at(0): 480.0},
    }.get((metric, statistic), {})


@pytest.fixture
def aws(monkeypatch, tmp_path):
    dummy_credentials(monkeypatch, tmp_path)

    def use(url):
        monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", url)

    return use


def read(aws, values, spans, component=None, **options):
    with cloudwatch_server(values, **options) as (url, asked):
        aws(url)
        client = open_aws_access().client("cloudwatch")
        watched = Watched("mine", "AllTraffic", component, devices=4, cores=48)
        return read_levels(client, watched, spans), asked


def test_a_level_gets_the_minutes_that_it_touches(aws):
    """(60 + 40) s over 40 invocations: 2,500 ms; 10 ms of overhead each."""
    span = timed(0, 1, at(0.2), at(1.9))
    (level,), asked = read(aws, known, [span])
    assert (level.minutes, level.shared_minutes) == (2, 0)
    assert level.invocations == 40
    assert level.model_latency_mean_ms == pytest.approx(2500)
    assert level.overhead_latency_mean_ms == pytest.approx(10)
    assert level.first_chunk_latency_mean_ms == pytest.approx(300)
    assert level.mid_stream_errors == 2
    assert level.gpu_utilization_mean_percent == 80
    assert level.cpu_utilization_mean_percent == 10
    assert "errors_5xx" not in level.to_json()
    assert level.to_json()["from"] == "2026-01-02T12:00:00+00:00"
    times = (asked[0]["StartTime"], asked[0]["EndTime"])
    assert times == (at(0).timestamp(), at(2).timestamp())
    dimensions = asked[0]["MetricDataQueries"][0]["MetricStat"]["Metric"]["Dimensions"]
    assert [d["Value"] for d in dimensions] == ["mine", "AllTraffic"]


def test_a_component_is_asked_for_by_its_own_dimension(aws):
    _, asked = read(aws, known, [timed(0, 1, at(0), at(1))], component="ic-1")
    metrics = [query["MetricStat"]["Metric"] for query in asked[0]["MetricDataQueries"]]
    assert all(metric["Dimensions"] == [{"Name": "InferenceComponentName", "Value": "ic-1"}] for metric in metrics)
    assert {metric["Namespace"] for metric in metrics} == {"AWS/SageMaker", "/aws/sagemaker/InferenceComponents"}


def test_levels_that_share_a_minute_are_told_so(aws):
    spans = [timed(0, 1, at(0.1), at(0.4)), timed(1, 1, at(0.5), at(1.5))]
    (first, second), _ = read(aws, known, spans)
    assert (first.shared_minutes, second.shared_minutes) == (1, 1)
    assert (first.invocations, second.invocations) == (30, 40)


def test_all_pages_of_a_reply_are_read(aws):
    (level,), asked = read(aws, known, [timed(0, 1, at(0.2), at(1.9))], page=3)
    assert len(asked) == 6
    assert level.gpu_utilization_mean_percent == 80


def test_a_refusal_says_what_aws_said(aws):
    with pytest.raises(LmiBenchError, match="AccessDenied: not authorised"):
        read(aws, known, [timed(0, 1, at(0), at(1))], denied=True)


def test_lines_without_wall_clock_times_have_no_span():
    times = {"started_at": "2026-01-02T12:00:00+00:00", "ended_at": "2026-01-02T12:01:00+00:00"}
    found = timed_levels([level_of(), level_of(level=1, **times)])
    assert [line.index for line in found] == [1]


def one_minute(metric, statistic, start, _end):
    values = {("Invocations", "Sum"): 4.0, ("ModelLatency", "Sum"): 80e3, ("ModelLatency", "SampleCount"): 4.0}
    value = values.get((metric, statistic))
    return {} if value is None else {start: value}


def test_a_sweep_of_an_endpoint_keeps_what_cloudwatch_said(aws, tmp_path):
    """Four requests and as many invocations, 20 ms each."""
    run = tmp_path / "run"
    with runtime_server() as url, cloudwatch_server(one_minute) as (watch_url, _):
        aws(watch_url)
        lmi_bench(
            *("sweep", "sagemaker:mine", "--sagemaker-endpoint-url", url, "--out", run),
            *("--isl", "8", "--osl", "4", "--concurrency", "1", "--warmup-requests", "0"),
            *("--requests-per-user", "3"),
            *("--protocol", "openai", "--model", "toy", "--cloudwatch-wait", "0"),
        )
    assert json.loads((run / "cloudwatch.json").read_text())[0]["invocations"] == 4
    (level,) = load_run(run).levels
    assert level.server.cloudwatch.model_latency_mean_ms == pytest.approx(20)
    (table,) = [t for t in build_view([load_run(run)]).runs[0].more if "server" in t.caption]
    assert {column.group for column in table.columns} >= {"CloudWatch"}


def test_a_refusal_leaves_the_levels_without_it():
    def refused(_spans):
        raise LmiBenchError("CloudWatch: AccessDenied: no")

    times = {"started_at": at(0).isoformat(), "ended_at": at(1).isoformat()}
    line = level_of(requests=3, **times)
    heard = Hearing()
    assert read_cloudwatch(SimpleNamespace(cloudwatch=refused), [line], heard) == []
    assert heard.notes == ["CloudWatch: AccessDenied: no; the levels have no CloudWatch figures"]
