"""Ctrl-C at any moment: exit 130, no traceback, a run that resumes, a report of what is there."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from lmi_bench.report.html import render_html
from lmi_bench.report.view import build_view
from lmi_bench.run_store import load_run
from tests.end_to_end.commands import command, environment, lmi_bench
from tests.loadgen.runtime_server import runtime_server

INTERRUPTED = (130, -signal.SIGINT)  # Python may end by the signal itself: 130 to a shell


def interrupted(args, moment) -> str:
    """Start a sweep, press Ctrl-C when `moment()` is true; what it said on stderr."""
    sweep = subprocess.Popen(
        command(*args),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit_s = time.monotonic() + 60
    while not moment():
        assert sweep.poll() is None, "over before it could be interrupted"
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    sweep.send_signal(signal.SIGINT)
    _, said = sweep.communicate(timeout=60)
    assert sweep.returncode in INTERRUPTED
    assert "Traceback" not in said
    return said


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def manifest_is_whole(run: Path) -> bool:
    """The folder is there, and nothing else is certain: the first level is about to begin."""
    return (run / "manifest.json").exists()


def test_ctrl_c_in_the_first_level_and_after_it_loses_the_level_in_flight_alone(tmp_path):
    """20 ms a token: level 1 takes 3 x 0.8 s, so both moments lie well within a level."""
    run = tmp_path / "run"
    levels = run / "levels.jsonl"
    with runtime_server(step_s=0.02, signed=False) as url:
        args = ("sweep", url, "--isl", "8", "--osl", "40", "--concurrency", "1,2", "--out", run)
        said = interrupted((*args, "--resume"), lambda: manifest_is_whole(run))
        assert "0 finished level(s) kept" in said
        assert lines(levels) == []

        said = interrupted((*args, "--resume"), lambda: len(lines(levels)) == 1)
        assert "1 finished level(s) kept" in said
        finished = levels.read_bytes()
        view = build_view([load_run(run)])
        assert [row.cells[0].text for row in view.runs[0].levels.rows] == ["1"]
        assert "Levels and knees" in render_html(view)

        lmi_bench(*args, "--resume")
    assert levels.read_bytes().startswith(finished)
    assert [line["level"] for line in lines(levels)] == [0, 1]
    kept = {(line["level"], line["attempt"]) for line in lines(levels)}
    records = lines(run / "requests.jsonl")
    numbers = [(r["level"], r["request_id"]) for r in records if (r["level"], r["attempt"]) in kept]
    assert len(numbers) == len(set(numbers)) == 3 + 6


def test_ctrl_c_while_the_target_is_opened_leaves_nothing(tmp_path):
    run = tmp_path / "run"
    at_s = time.monotonic() + 0.8
    args = ("sweep", "--model", "demo-15m", "--concurrency", "1", "--osl", "400", "--out", run)
    interrupted(args, lambda: time.monotonic() >= at_s)
    assert lines(run / "levels.jsonl") == []
