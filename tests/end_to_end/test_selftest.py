"""`selftest`: its checks pass on this machine, and each of them fails where what it checks does."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import pytest

from lmi_bench.core.listener import SILENT
from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.jobs import selftest
from lmi_bench.jobs.settings.setup import SelftestSettings
from tests.end_to_end.commands import lmi_bench

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the truth server needs epoll")


def test_faults_are_named(tmp_path):
    state, found, _ = selftest._faults(tmp_path)
    assert state == "ok", found
    for kind in ("broken_stream", "timeout", "malformed_frame", "short_output", "overloaded"):
        assert kind in found


def test_a_fault_with_another_name_fails_the_check(tmp_path, monkeypatch):
    """As if what the server sends as 429 were to be named otherwise."""
    names = [{"throttled": "cancelled"}.get(each, each) for each in selftest.FAULTS]
    monkeypatch.setattr(selftest, "FAULTS", tuple(names))
    state, found, mend = selftest._faults(tmp_path)
    assert state == "fail"
    assert found == "cancelled: 6 sent, 0 named; throttled: 0 sent, 6 named"
    assert mend


@pytest.mark.parametrize(("check", "said"), [("_kill", "SIGKILL"), ("_disk_full", "KiB")])
def test_a_broken_off_sweep_goes_on(check, said, tmp_path):
    state, found, _ = getattr(selftest, check)(tmp_path)
    assert state == "ok", found
    assert said in found
    assert "byte for byte" in found


def test_without_a_small_disk_a_limit_on_files_stands_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest.shutil, "which", lambda _: None)
    state, found, _ = selftest._disk_full(tmp_path)
    assert state == "ok", found
    assert "RLIMIT_FSIZE" in found


@pytest.mark.parametrize(
    ("damage", "said"),
    [(lambda lines: lines[:1], "1 levels"), (lambda lines: [lines[0].upper(), *lines[1:]], "was changed")],
)
def test_a_damaged_level_fails_the_check(damage, said, tmp_path, monkeypatch):
    """By a `--resume` that changes what it should keep."""
    run = tmp_path / "run"
    assert selftest._run([*selftest._SWEEP, str(run)]).returncode == 0
    original, file = selftest._run, run / "levels.jsonl"

    def damaging(command):
        done = original(command)
        file.write_bytes(b"".join(damage(file.read_bytes().splitlines(keepends=True))))
        return done

    monkeypatch.setattr(selftest, "_run", damaging)
    monkeypatch.setattr(selftest.json, "loads", lambda _: {"requests": 0})
    state, found, _ = selftest._resumed(run, "a test")
    assert state == "fail"
    assert said in found


def measured(*levels):
    """Stands for sweeps: (valid, error, wrong) of each level."""
    left = list(levels)

    def one(_url, streams, _folder):
        is_valid, error, is_wrong = left.pop(0)
        text = f"{streams:,} streams, {'valid' if is_valid else 'invalid'}"
        return selftest._Measured(error, is_wrong, is_valid, text, 50.0 * streams)

    return one


@pytest.fixture
def no_server(monkeypatch):
    class Server:
        def __enter__(self):
            return ""

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(selftest, "truth_server", Server)


@pytest.mark.usefixtures("no_server")
def test_the_verdict_is_the_highest_level_that_is_right_and_valid(monkeypatch, tmp_path):
    right, invalid = (True, 0.001, False), (False, 0.3, False)
    monkeypatch.setattr(selftest, "_measured", measured(right, right, invalid))
    result = selftest.SelfTest()
    state, found, _ = selftest._accuracy(result, 4096, SILENT, tmp_path)
    assert state == "ok"
    assert (result.streams, result.tokens_per_s) == (64, 3200.0)
    assert "256 streams" in found
    assert "invalid" in found


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(("is_wrong", "state"), [(True, "fail"), (False, "ok")])
def test_a_wrong_level_that_passes_as_valid_fails_the_check(is_wrong, state, monkeypatch, tmp_path):
    """Unless it states an error that is as large."""
    monkeypatch.setattr(selftest, "_measured", measured((True, 0.0, False), (True, 0.02, is_wrong)))
    result = selftest.SelfTest()
    assert selftest._accuracy(result, 4096, SILENT, tmp_path)[0] == state
    assert result.streams == 16


@pytest.mark.usefixtures("no_server")
def test_a_machine_that_measures_nothing_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "_measured", measured((False, 0.0, False)))
    result = selftest.SelfTest()
    assert selftest._accuracy(result, 4096, SILENT, tmp_path)[0] == "fail"
    assert result.streams == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the truth server")
@pytest.mark.parametrize(
    ("shift_ms", "metric", "bound", "is_wrong"),
    [
        (0.0, "ttft", "its own", False),
        (30.0, "ttft", None, True),  # of 200 ms
        (30.0, "ttft", "ttft_p50_error_bound_ms", False),  # as the level says of itself
        (5.0, "itl", None, True),
    ],
)
def test_reported_times_are_compared_with_the_truth(shift_ms, metric, bound, is_wrong, tmp_path, monkeypatch):
    """By a truth that is moved: how quick this machine is does not matter, also since a level that
    is too late for its own bound may say so, if nothing else is said for it."""
    original, moved_ms = selftest.Probe.get, []

    def moved(self, path, *method):
        reply = original(self, path, *method)
        if "stats" not in path:
            return reply
        truth = reply.json_object()
        place = truth["ttft_from_arrival" if metric == "ttft" else "itl"]
        place["p50_ms"] += shift_ms
        moved_ms.append(place["p50_ms"])
        return replace(reply, body=json.dumps(truth).encode())

    def sweep(*args, original=selftest._sweep, **more):
        run = original(*args, **more)
        if bound == "its own":
            return run
        bounds = dict.fromkeys(f"{name}_error_bound_ms" for name in ("ttft_p50", "ttft", "itl_p50", "itl"))
        bounds |= {"ttft_error_bound_ms": 1e9, "itl_error_bound_ms": 1e9}
        bounds |= {} if bound is None else {bound: 1e9}
        generator = replace(run.levels[0].generator, valid=True, reason=None, **bounds)
        return replace(run, levels=[replace(run.levels[0], generator=generator)])

    monkeypatch.setattr(selftest.Probe, "get", moved)
    monkeypatch.setattr(selftest, "_sweep", sweep)
    with selftest.truth_server() as url:
        found = selftest._measured(url, 16, tmp_path)
    assert found.is_wrong is is_wrong, found.text
    assert found.error >= 0.7 * shift_ms / moved_ms[-1]  # what is read late lessens it


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the truth server")
def test_the_truth_is_of_the_level_without_what_the_sweep_asked_beforehand(tmp_path, monkeypatch):
    original, told = selftest.Probe.get, []

    def get(self, path, *method):
        reply = original(self, path, *method)
        if "stats" in path:
            told.append(reply.json_object()["completed"])
        return reply

    monkeypatch.setattr(selftest.Probe, "get", get)
    with selftest.truth_server() as url:
        selftest._measured(url, 16, tmp_path)
    (run,) = tmp_path.iterdir()
    assert told == [len((run / "requests.jsonl").read_text().splitlines())]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the truth server")
def test_a_starved_level_does_not_pass(tmp_path):
    state, found, _ = selftest._starved(selftest.SelfTest(), tmp_path)
    assert state == "ok", found


def test_one_line_a_check_and_exit_1_if_one_fails(monkeypatch, tmp_path):
    def fails(*_):
        raise OSError("no room")

    def no_compiler(*_):
        raise NativeUnavailableError("no C compiler is installed")

    for name in ("_accuracy", "_starved"):
        monkeypatch.setattr(selftest, name, no_compiler)
    monkeypatch.setattr(selftest, "_kill", fails)
    for name in ("_faults", "_disk_full"):
        monkeypatch.setattr(selftest, name, lambda *_: ("ok", "as it should be", ""))
    result = selftest.selftest(SelftestSettings(), SILENT)
    assert [each.state for each in result.findings] == ["fail", "fail", "ok", "fail", "ok"]
    assert "no C compiler" in result.findings[0].found
    assert "no room" in result.findings[3].found


def test_the_command_says_the_verdict_first(tmp_path):
    """Whether this busy machine is quick enough is not judged."""
    done = lmi_bench("selftest", "--streams=16", f"--json={tmp_path / 's'}", expect=(0, 1))
    first, *rest = done.stdout.splitlines()
    assert first.startswith("selftest: ")
    assert "this machine" in first
    found = json.loads((tmp_path / "s").read_text())
    assert [each["check"] for each in found["findings"]] == [
        "accuracy",
        "starved",
        "faults",
        "kill and resume",
        "disk full",
    ]
    assert {each["state"] for each in found["findings"][1:]} == {"ok"}, found
    assert done.returncode == (found["streams"] == 0)
    for each in found["findings"]:
        assert any(each["check"] in line for line in rest)
