"""Ctrl-C at any moment: exit 130, no traceback, a run that resumes, a report of what is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmi_bench.core.run_store import load_run
from lmi_bench.report.html import render_html
from lmi_bench.report.view import build_view
from tests.end_to_end.commands import command, environment, lmi_bench
from tests.loadgen.aws.runtime_server import runtime_server

INTERRUPTED = (130, -signal.SIGINT)  # Python may end by the signal itself: 130 to a shell

THREE = ("--requests-per-user", "3")


def interrupted(args, moment, by=signal.SIGINT, codes=INTERRUPTED, before=None) -> str:
    """Start a sweep, press Ctrl-C when `moment()` is true; what it said on stderr.

    before  called in the new process, ahead of the command
    """
    sweep = subprocess.Popen(
        command(*args),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    limit_s = time.monotonic() + 600  # a busy machine takes longer for the same work
    with sweep:
        try:
            while not moment():
                assert sweep.poll() is None, "over before it could be interrupted"
                assert time.monotonic() < limit_s
                time.sleep(0.01)
            sweep.send_signal(by)
            _, said = sweep.communicate(timeout=600)
        finally:
            sweep.kill()
    assert sweep.returncode in codes
    assert "Traceback" not in said
    return said


def ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def manifest_is_whole(run: Path) -> bool:
    """The folder is there, and nothing else is certain: the first level is about to begin."""
    return (run / "manifest.json").exists()


def sweep_of(url, loads, run):
    """The words of a sweep with answers of 40 tokens and three requests a user."""
    lengths = ("--isl", "8", "--osl", "40")
    return ("sweep", url, *lengths, "--concurrency", loads, *THREE, "--out", run)


def test_ctrl_c_in_the_first_level_and_after_it_loses_the_level_in_flight_alone(tmp_path):
    """20 ms a token: level 1 takes 4 x 0.8 s, so both moments lie well within a level."""
    run = tmp_path / "run"
    levels = run / "levels.jsonl"
    with runtime_server(step_s=0.02, signed=False) as url:
        args = sweep_of(url, "1,2", run)
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
    assert len(numbers) == len(set(numbers)) == 4 + 8


def test_a_termination_ends_a_sweep_as_ctrl_c_does_with_a_code_of_its_own(tmp_path):
    """Job schedulers and containers send SIGTERM: 128 + 15 tells them that it was heeded."""
    run = tmp_path / "run"
    levels = run / "levels.jsonl"
    with runtime_server(step_s=0.02, signed=False) as url:
        args = ("sweep", url, "--isl", "8", "--osl", "20", "--concurrency", "1,2", *THREE, "--out", run)
        said = interrupted(args, lambda: len(lines(levels)) == 1, signal.SIGTERM, (143,))
    assert "1 finished level(s) kept" in said


@pytest.mark.parametrize("pressed", [False, True])
def test_a_background_job_of_a_script_obeys_a_termination_and_no_ctrl_c(tmp_path, pressed):
    """Such a shell starts its jobs with SIGINT ignored; the script's own Ctrl-C is not theirs."""
    run = tmp_path / "run"
    levels, sent = run / "levels.jsonl", []

    def moment():
        if pressed and not sent and manifest_is_whole(run):
            sent.append(os.kill(int((run / ".lock").read_text()), signal.SIGINT))
        return len(lines(levels)) == 1

    with runtime_server(step_s=0.02, signed=False) as url:
        said = interrupted(sweep_of(url, "1,2", run), moment, signal.SIGTERM, (143,), before=ignore_ctrl_c)
    assert "Ctrl-C is ignored, as in a background job: `kill " in said
    assert "1 finished level(s) kept" in said


def test_ctrl_c_ends_an_optimization_and_not_the_sweep_of_one_variant_alone(tmp_path):
    """The first level of the baseline is over; three longer ones, and eight sweeps, would come."""
    recipe, job = tmp_path / "recipe.yaml", tmp_path / "job"
    recipe.write_text(
        "model: demo-15m\nevaluate: {input_tokens: 8, output_tokens: 64, concurrency: [1, 4, 8, 16]}\n"
        "variants: [{name: int8, engine: {quantize: int8}}]\n"
    )
    first = job / "baseline-round-1" / "levels.jsonl"
    said = interrupted(("optimize", recipe, "--out", job), lambda: lines(first) != [])
    assert f"finished levels are in {job}" in " ".join(said.split())
    assert {path.name for path in job.iterdir()} <= {"baseline-round-1", "prompts.jsonl"}
    assert "Levels and knees" in render_html(build_view([load_run(first.parent)]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_a_compilation_at_once(tmp_path, ranks):
    """It takes half a minute in a thread, or in processes, that do not hear a Ctrl-C."""
    steps = tmp_path / "steps"
    args = ("compile", "demo-15m", "--tp", ranks, "--shapes", "1x512", "--out", steps)
    said = interrupted(args, lambda: any(steps.glob(".compiling-*")))
    assert "interrupted" in said.splitlines()
    assert not (steps / "manifest.json").exists()
    assert ranks == 2 or not any(steps.glob(".compiling-*"))


def test_ctrl_c_while_the_target_is_opened_leaves_nothing(tmp_path):
    run = tmp_path / "run"
    at_s = time.monotonic() + 0.8
    args = ("sweep", "--model", "demo-15m", "--concurrency", "1", "--osl", "400", *THREE, "--out", run)
    interrupted(args, lambda: time.monotonic() >= at_s)
    assert lines(run / "levels.jsonl") == []


def test_ctrl_c_before_the_commands_are_loaded_is_no_traceback():
    """The import itself is interrupted, as happens to whoever thinks better of it at once."""
    program = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'lmi_bench.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from lmi_bench.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def _run(program: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())


def test_ctrl_c_that_a_library_wraps_is_no_fault():
    """Python 3.11 makes a RuntimeError of what interrupts the making of a class."""
    program = (
        "import lmi_bench.cli.main\n"
        "from lmi_bench.__main__ import main\n"
        "def app(arguments):\n"
        "    try:\n"
        "        raise KeyboardInterrupt\n"
        "    except KeyboardInterrupt as exc:\n"
        "        raise RuntimeError('in __set_name__') from exc\n"
        "lmi_bench.cli.main.app = app\n"
        "main()\n"
    )
    done = _run(program)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("held_s", [0.0, 0.2])
def test_ctrl_c_in_a_destructor_is_not_lost(held_s):
    """Python prints and ignores what a destructor or a weak reference's callback raises, and what
    the hook for it does, which a busy machine may hold long."""
    program = (
        "import signal, threading, time\n"
        "begin = threading.Timer.start\n"
        "def start(timer):\n"
        "    begin(timer)\n"
        "    if threading.current_thread() is threading.main_thread():\n"
        f"        time.sleep({held_s})\n"
        "threading.Timer.start = start\n"
        "import lmi_bench.cli.main\n"
        "from lmi_bench.__main__ import main\n"
        "class Last:\n"
        "    def __del__(self):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "def app(arguments):\n"
        "    Last()\n"
        "    assert threading.Event().wait(120)\n"
        "lmi_bench.cli.main.app = app\n"
        "main()\n"
    )
    done = _run(program)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(("ends_by", "code"), [("SystemExit(143)", 143), ("", 130)])
def test_an_interrupt_in_the_making_of_a_class_does_not_change_the_exit_code(tmp_path, ends_by, code):
    """Python remembers one that left an exec(), and a module would end by SIGINT."""
    (tmp_path / "interrupted.py").write_text(
        "import lmi_bench.cli.main\n"
        "from lmi_bench.__main__ import main\n"
        "def app(arguments):\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        f"        raise {ends_by}\n"
        "lmi_bench.cli.main.app = app\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment())
    assert done.returncode == code


def test_an_interrupt_in_the_making_of_a_class_while_commands_load_has_its_exit_code(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'lmi_bench.cli.main':\n"
        "            exec('raise KeyboardInterrupt')\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from lmi_bench.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment())
    assert (done.returncode, done.stderr) == (130, b"")


def test_ctrl_c_while_python_ends_is_no_traceback():
    """It comes when the command is done, and Python waits for the last threads."""
    program = (
        "import os, signal, sys, threading\n"
        "sys.argv[1:] = ['--version']\n"
        "from lmi_bench.__main__ import main\n"
        "thread = threading.main_thread()\n"
        "def interrupt():\n"
        "    thread.join()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "main()\n"
    )
    done = _run(program)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_class_whose_making_is_interrupted_while_loading_ends_like_any_ctrl_c():
    """Python 3.11 raises a RuntimeError from what `__set_name__` raised."""
    program = (
        "import sys\n"
        "class Field:\n"
        "    def __set_name__(self, owner, name):\n"
        "        raise KeyboardInterrupt\n"
        "class Finder:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'lmi_bench.cli.main':\n"
        "            type('Settings', (), {'field': Field()})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv[1:] = ['--version']\n"
        "from lmi_bench.__main__ import main\n"
        "main()\n"
    )
    done = _run(program)
    assert done.returncode in INTERRUPTED, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_again_and_again_leaves_a_run_that_goes_on_with_each_level_once(tmp_path):
    """Whatever moment it hits: loading, warm-up, a level. 1.6 s a level, so three are not enough to
    finish what is interrupted at 1.7 s at the latest."""
    run = tmp_path / "run"
    with runtime_server(step_s=0.01, signed=False) as url:
        args = sweep_of(url, "1,2,3", run)
        for delay_s in (0.7, 1.2, 1.7):
            at_s = time.monotonic() + delay_s
            interrupted((*args, "--resume"), lambda at_s=at_s: time.monotonic() >= at_s)
            if manifest_is_whole(run):
                assert "Levels" in render_html(build_view([load_run(run)]))
        lmi_bench(*args, "--resume")
    kept = lines(run / "levels.jsonl")
    assert [line["level"] for line in kept] == [0, 1, 2]
    counted = {(line["level"], line["attempt"]) for line in kept}
    records = lines(run / "requests.jsonl")
    numbers = [(r["level"], r["request_id"]) for r in records if (r["level"], r["attempt"]) in counted]
    assert len(numbers) == len(set(numbers)) == 4 + 8 + 12
