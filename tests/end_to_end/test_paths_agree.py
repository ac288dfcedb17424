"""One scenario through the engine, through `serve` over HTTP, and simulated: the same work."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.commands import Server, lmi_bench

SCENARIO = """
model: demo-15m
workload: {mix: [{input_tokens: 12, output_tokens: 5}, {input_tokens: 5, output_tokens: 9}]}
load: {concurrency: [2, 4], requests_per_level: 6, warmup_requests: 0}
engine: {threads: 1}
"""
# By hand: one for each user and 6 more, in equal shares, so 4 and 5 of each kind.
WORK = [(2 * n, 0, n * 12 + n * 5, n * 5 + n * 9) for n in (4, 5)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--model", "demo-15m", "--threads", "1")
    yield running
    assert running.stop()[0] == 0


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenario") / "mixed.yaml"
    path.write_text(SCENARIO)
    return path


def work_of(run: Path) -> list[tuple[int, int, int, int]]:
    lines = [json.loads(line) for line in (run / "levels.jsonl").read_text().splitlines()]
    keys = ("requests", "errors", "input_tokens", "output_tokens")
    return [tuple(line[key] for key in keys) for line in lines]


def lengths_of(run: Path) -> list[tuple[int, int, int, int]]:
    keys = ("level", "request_id", "input_tokens", "output_tokens")
    lines = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    return sorted(tuple(line[key] for key in keys) for line in lines)


def test_every_path_does_the_same_work(tmp_path, scenario, server):
    paths = {
        "engine": ("--target", "engine"),
        "openai": ("--target", server.url, "--protocol", "openai"),
        "lmi": ("--target", server.url, "--protocol", "lmi"),
        "sim": ("--target", "sim:ml.g5.2xlarge"),
    }
    for name, target in paths.items():
        lmi_bench("sweep", scenario, *target, "--out", tmp_path / name)
        assert work_of(tmp_path / name) == WORK, name
    lengths = {name: lengths_of(tmp_path / name) for name in paths}
    assert lengths["engine"] == lengths["openai"] == lengths["lmi"] == lengths["sim"]


def test_the_simulated_server_answers_with_the_instance_s_timing(tmp_path):
    """A10G, 13.5 GB of weights at 600 GB/s: a decode step cannot take less than 22 ms."""
    running = Server(*("--executor", "simulated", "--instance", "ml.g5.2xlarge", "--model", "llama-2-7b"))
    try:
        run = tmp_path / "run"
        lmi_bench(
            *("sweep", running.url, "--protocol", "openai", "--model", "llama-2-7b", "--out", run),
            *("--concurrency", "1", "--requests-per-level", "2", "--warmup-requests", "0"),
            *("--input-tokens", "16", "--output-tokens", "16"),
        )
        (line,) = [json.loads(text) for text in (run / "levels.jsonl").read_text().splitlines()]
        assert 22 < line["itl_ms"]["mean"] < 60
        assert line["output_tokens"] == 3 * 16
    finally:
        assert running.stop()[0] == 0


def test_the_server_says_where_it_listens_and_what_it_serves(server):
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
        assert json.load(answer)["data"][0]["id"] == "demo-15m"


def test_a_port_in_use_is_one_clear_line(server):
    port = server.url.rsplit(":", 1)[1]
    done = lmi_bench("serve", "--model", "demo-15m", "--port", port, expect=2)
    assert port in done.stderr
    assert "--port" in done.stderr
