"""Kills at random moments, and a disk that fills up; benchmarks/kills.py has many more kills."""

from __future__ import annotations

import json
import random
import subprocess

import pytest

from benchmarks.kills import JOBS, kill_once, levels_of, prepare, undisturbed
from lmi_bench.core.run_store import load_run
from tests.end_to_end.commands import command, environment, lmi_bench

KILLS = {"sweep": 2, "matrix": 2, "report": 1}  # benchmarks/kills.py does 200


def test_kills_at_random_moments_lose_nothing(tmp_path):
    prepare(tmp_path)
    for job in JOBS:
        if job.name not in KILLS:
            continue
        whole = undisturbed(job, tmp_path / f"{job.name} whole")
        for number in range(KILLS[job.name]):
            at = f"0-{job.name}-{number}"  # raises DamageError
            counts = kill_once(job, whole, tmp_path / at, random.Random(at))
            assert counts["kills"] == 1
            assert counts["resumed"] == job.resumes


def in_full_disk(folder, size, script):
    """Run a shell script in a tmpfs of so many bytes; the folder is its only window."""
    mount = f'mount -t tmpfs -o size={size} none "$0" && cd "$0" || exit 77\n'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount + script, folder],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no tmpfs of one's own here: {done.stderr.strip()}")
    return done


@pytest.mark.filterwarnings("ignore:.*--repair:UserWarning")
def test_a_disk_that_fills_up_in_mid_sweep_is_one_line_and_the_run_resumes(tmp_path):
    """96 KiB hold the first levels alone; more room comes by mounting anew."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "left").mkdir()
    args = ("sweep", "sim:ml.g5.2xlarge", "--model", "qwen3-8b", "--isl", "64", "--osl", "16")
    line = " ".join(command(*args, "--concurrency", "1,2,4,8,16", "--out", "run"))
    left = tmp_path / "left"
    script = f"""
        {line} > {left}/out 2> {left}/err; echo $? > {left}/code
        cp -r run {left}/full
        mount -o remount,size=8m "$0"
        {line} --resume && cp -r run {left}/whole
    """
    done = in_full_disk(tmp_path / "disk", "96k", script)
    assert done.returncode == 0, done.stderr
    said = (left / "err").read_text()
    assert (left / "code").read_text() == "1\n"
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [said.splitlines()[-1]]
    assert "No space left on device" in said
    assert "--resume" in said
    kept = load_run(left / "full").levels
    assert 0 < len(kept) < 5
    before = (left / "full" / "levels.jsonl").read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert (left / "whole" / "levels.jsonl").read_bytes().startswith(before)
    (levels,) = levels_of(left / "whole").values()
    assert sorted(number for number, *_ in levels) == [0, 1, 2, 3, 4]
    assert json.loads((left / "whole" / "knees.json").read_text())


def test_a_sweep_killed_between_its_folder_and_the_lock_resumes(tmp_path):
    (tmp_path / "run").mkdir()
    args = ("sweep", "sim:ml.g5.2xlarge", "--model", "qwen3-8b", "--isl", "64", "--osl", "16")
    args += ("--concurrency", "1", "--out", tmp_path / "run")
    lmi_bench(*args, expect=2)
    lmi_bench(*args, "--resume")
    assert len(load_run(tmp_path / "run").levels) == 1
