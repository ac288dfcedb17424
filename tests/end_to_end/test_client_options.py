"""The load generator's own options, from the outside and against the bundled server."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.commands import lmi_bench
from tests.loadgen.aws.runtime_server import runtime_server

SMALL = ("--isl", "8", "--osl", "6", "--concurrency", "4", "--warmup-requests", "0")
SMALL += ("--requests-per-user", "3")


def _level(run):
    (line,) = [json.loads(text) for text in (run / "levels.jsonl").read_text().splitlines()]
    return line


def test_two_workers_and_the_servers_own_view_of_the_level(tmp_path):
    """16 requests of 6 tokens through two processes; the server counted them, too."""
    run = tmp_path / "run"
    with runtime_server(step_s=0.02) as url:
        done = lmi_bench("sweep", url, *SMALL, "--workers", "2", "--out", run)
    line = _level(run)
    assert (line["requests"], line["errors"], line["output_tokens"]) == (16, 0, 96)
    assert line["generator"]["workers"] == 2
    assert line["server"]["requests"] == 16
    assert line["server"]["ttft_mean_ms"] <= line["server"]["client_ttft_mean_ms"]
    assert line["connect_ms"]["n"] >= 4
    assert line["generator"]["ttft_error_bound_ms"] is not None
    assert "the generator's own error: TTFT p99 at most" in done.stdout


def test_user_time_is_shown_as_such_with_its_wider_bound(tmp_path):
    run = tmp_path / "run"
    with runtime_server(step_s=0.02) as url:
        lmi_bench("sweep", url, *SMALL, "--timestamps", "user", "--workers", "1", "--out", run)
    check = _level(run)["generator"]
    assert check["timestamps"] == "user"
    assert check["ttft_error_bound_ms"] > 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--workers", "two", "number of processes or auto"),
        ("--timestamps", "gps", "client.timestamps"),
        ("--retries", "often", "client.retries"),
        ("--metrics-url", "somewhere", "--metrics-url somewhere cannot be used"),
        ("--metrics-url", "http://me:hidden@127.0.0.1:9", "--metrics-url http://127.0.0.1:9 cannot"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, option, value, said):
    with runtime_server(step_s=0.001) as url:
        done = lmi_bench("sweep", url, *SMALL, option, value, "--out", tmp_path / "r", expect=2)
    assert said in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_number_of_connections_is_that_of_the_whole_sweep(tmp_path):
    """Two workers with two each would have four."""
    with runtime_server() as url:
        args = ("sweep", url, *SMALL, "--connections", "2", "--workers", "2")
        refused = lmi_bench(*args, "--out", tmp_path / "run", expect=2)
    assert "a cap on requests needs a single process" in refused.stderr
