"""A whole level against a server that knows when it sent each token (benchmarks/support).

The machine that runs the tests may be busy, so only medians are held here, loosely; the figures of
a quiet machine come from benchmarks/loadgen_accuracy.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import SPACING_S, HttpTarget
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, common_words
from lmi_bench.loadgen.run.level_runner import StopRules
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.wire.format import find_format

SERVER = Path(__file__).parents[3] / "benchmarks" / "support" / "truth_server.py"
TTFT_MS, ITL_MS, TOKENS = 100.0, 10.0, 16
TOLERANCE = 0.25
"""On a machine that others use, too. How true the times are is the matter of
benchmarks/loadgen_accuracy.py; here, whether they are those of the right events."""


@contextlib.contextmanager
def _truth_server(*options: str):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, SERVER, "--port", port, "--ttft-ms", TTFT_MS, "--itl-ms", ITL_MS]
    process = subprocess.Popen([*map(str, command), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline_s, "the truth server did not start"
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def _level(protocol: str, *options: str, users: int = 8):
    """Records of one level, and the server's own account of it."""
    runs = []
    with _truth_server(*options) as port:

        async def main():
            url = f"http://127.0.0.1:{port}"
            async with HttpTarget(url, find_format(protocol), model="truth-model") as target:
                await run_sweep(
                    [LevelSpec(0, Load(concurrency=users), num_requests=users * 3)],
                    target,
                    None,
                    prompts=SyntheticPrompts([Lengths(16, TOKENS)], common_words, seed=0),
                    summarise=summarise_level,
                    on_level=lambda run, line: runs.append(run),
                    stop_rules=StopRules(max_error_share=None),
                    spacing_s=SPACING_S,
                )

        run_on_sockets(main())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/truth/stats", timeout=60) as reply:
            return runs[0], json.load(reply)


def _ttft_ms(records) -> float:
    return statistics.median(1e3 * (r.token_times_s[0] - r.sent_s) for r in records)


def _gap_ms(records) -> float:
    return statistics.median(1e3 * (late - early) for r in records for early, late in pairwise(r.token_times_s))


@pytest.mark.parametrize("protocol", ["openai", "openai-chat", "lmi"])
def test_times_and_counts_are_those_of_the_server(protocol):
    run, truth = _level(protocol)
    assert [record.status for record in run.records] == ["ok"] * 24
    assert sum(record.output_tokens for record in run.records) == truth["tokens"] == 24 * TOKENS
    assert all(len(record.token_times_s) == TOKENS for record in run.records)
    assert _ttft_ms(run.records) == pytest.approx(truth["ttft"]["p50_ms"], rel=TOLERANCE)
    assert _gap_ms(run.records) == pytest.approx(truth["itl"]["p50_ms"], rel=TOLERANCE)
    assert truth["connections"] <= 8 + 2  # one a user, one of the port's probe, one of the stats


def test_a_role_chunk_before_the_first_token_does_not_start_it():
    run, truth = _level("openai-chat", "--role-chunk", "early")
    assert _ttft_ms(run.records) == pytest.approx(truth["ttft"]["p50_ms"], rel=TOLERANCE)
    assert sum(record.output_tokens for record in run.records) == truth["tokens"]


def test_frames_of_several_tokens_are_counted_by_the_servers_usage():
    run, truth = _level("openai", "--tokens-per-frame", "4")
    assert sum(record.output_tokens for record in run.records) == truth["tokens"] == 24 * TOKENS
    assert all(len(record.token_times_s) == TOKENS // 4 for record in run.records)
    assert _gap_ms(run.records) == pytest.approx(truth["itl"]["p50_ms"], rel=TOLERANCE)


def test_refused_requests_are_counted_one_by_one():
    run, truth = _level("openai", "--error-rate", "0.4")
    refused = [record for record in run.records if record.status == "overloaded"]
    assert len(refused) == truth["injected_errors"] > 0
    assert sum(record.ok for record in run.records) == truth["completed"]


def test_stalls_are_seen_where_they_were():
    """A fifth of the gaps takes 60 ms longer: the long gaps of both sides are as many and as long."""
    run, truth = _level("openai", "--stall-p", "0.2", "--stall-ms", "60")
    gaps_ms = [1e3 * (late - early) for r in run.records for early, late in pairwise(r.token_times_s)]
    assert statistics.fmean(gaps_ms) == pytest.approx(truth["itl"]["mean_ms"], rel=TOLERANCE)
    for share, name in ((0.5, "p50_ms"), (0.9, "p90_ms")):
        assert np.quantile(gaps_ms, share) == pytest.approx(truth["itl"][name], rel=TOLERANCE)
