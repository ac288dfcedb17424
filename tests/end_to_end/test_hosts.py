"""One load from several hosts: over ssh (a stand-in), by dialling in, and every way to fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.commands import command, environment, lmi_bench
from tests.loadgen.aws.runtime_server import runtime_server

SMALL = ("--isl", "8", "--osl", "6", "--concurrency", "4", "--warmup-requests", "0")
SMALL += ("--requests-per-user", "3")
SECRET = "5f0c6d7e8a9b4c3d"


def _level(run):
    (line,) = [json.loads(text) for text in (run / "levels.jsonl").read_text().splitlines()]
    return line


def _numbers(run):
    lines = (run / "requests.jsonl").read_text().splitlines()
    return [json.loads(line)["request_id"] for line in lines]


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """A folder at the front of PATH: writes a shell script there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    write("lmi-bench", f'exec {sys.executable} -m lmi_bench "$@"')
    return write


def _start(*args, **variables):
    return subprocess.Popen(
        command(*args), env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_host_over_ssh_and_this_one_send_one_load(tmp_path, programs):
    """ssh gets no secret on its command line; what the host prints first does no harm."""
    run, seen = tmp_path / "run", tmp_path / "seen"
    programs("ssh", f'echo "$@" > {seen}; echo Welcome; for last; do :; done; exec sh -c "$last"')
    with runtime_server(step_s=0.02) as url:
        hosts = ("--hosts", "ada@gpu1,local", "--api-key", "sk-1234567890abcdef")
        done = lmi_bench("sweep", url, *SMALL, *hosts, "--out", run)
    line = _level(run)
    assert (line["requests"], line["errors"], line["output_tokens"]) == (16, 0, 96)
    assert sorted(_numbers(run)) == list(range(16))
    assert line["generator"]["workers"] == 2
    assert 0 < line["generator"]["clock_error_bound_ms"] < 50  # gpu1's, as an interval
    assert seen.read_text().split()[-3:] == ["ada@gpu1", "lmi-bench", "worker"]
    assert "workers: ada@gpu1, local" in done.stderr
    assert "the workers' clocks agree within" in done.stdout


def test_a_search_over_hosts_ends_a_level_that_is_sure_to_miss(tmp_path):
    """Four of 32 users are answered each 0.12 s; 7 of the first level's 64 requests may miss."""
    run = tmp_path / "run"
    with runtime_server(step_s=0.02, max_rolling_batch_size=4) as url:
        search = ("--search", "concurrency", "--slo", "e2e_p90<=50ms", "--isl", "8", "--osl", "6")
        hosts = ("--hosts", "local,local", "--concurrency", "32", "--out", run)
        lmi_bench("sweep", url, *search, *hosts, expect=99)
    first = json.loads((run / "levels.jsonl").read_text().splitlines()[0])
    assert (first["generator"]["workers"], first["stopped_by"]) == (2, "decided")
    assert first["requests"] < 32 + 64
    assert (first["search"]["planned"], first["search"]["passed"]) == (64, False)


@pytest.mark.parametrize(
    ("ssh", "said"),
    [
        ("echo 'ssh: no route to gpu1' >&2; exit 255", "ssh does not get there .* no route"),
        ("echo 'sh: lmi-bench: not found' >&2; exit 127", "lmi-bench is not found: .*HOST:PATH"),
        (r"echo lmi-bench worker greets; printf '\0\0\0\0069.9 00'", r"has lmi-bench 9\.9, this is .*the same"),
        ("echo 'boom' >&2; exit 3", r"died \(exit code 3\): boom"),
    ],
)
def test_a_host_that_cannot_be_used_is_one_line_and_nothing_is_written(tmp_path, programs, ssh, said):
    programs("ssh", ssh)
    with runtime_server(step_s=0.02) as url:
        args = ("sweep", url, *SMALL, "--hosts", "local,gpu1", "--out", tmp_path / "run")
        done = lmi_bench(*args, expect=2)
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert re.search(rf"worker 1 \(gpu1\).*{said}", error[0])
    assert not (tmp_path / "run").exists()


def test_without_ssh_the_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with runtime_server(step_s=0.02) as url:
        args = ("sweep", url, *SMALL, "--hosts", "gpu1", "--out", tmp_path / "run")
        done = lmi_bench(*args, expect=2)
    assert "error: worker 0 (gpu1): ssh is not found here" in done.stderr


def _address(sweep):
    for line in sweep.stderr:
        if found := re.search(r"--connect (127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError("the sweep waits for nobody")


def test_workers_dial_in_with_the_numbers_of_their_job(tmp_path):
    """A pod of a Kubernetes Indexed Job has its number in JOB_COMPLETION_INDEX."""
    run = tmp_path / "run"
    with runtime_server(step_s=0.02) as url:
        hosts = ("--hosts", "join*2", "--listen", "127.0.0.1:0")
        sweep = _start("sweep", url, *SMALL, *hosts, "--out", run, LMI_BENCH_SECRET=SECRET)
        at = ("worker", "--connect", _address(sweep))
        stranger = _start(*at, LMI_BENCH_SECRET="another secret, as long")
        said = stranger.communicate(timeout=120)[1]
        known = {"LMI_BENCH_SECRET": SECRET}
        workers = [_start(*at, JOB_COMPLETION_INDEX=str(n), **known) for n in (1, 0)]
        _, heard = sweep.communicate(timeout=120)
        ends = [worker.communicate(timeout=120)[1] for worker in workers]
    assert stranger.returncode == 2
    assert "set the same LMI_BENCH_SECRET on both sides" in said
    assert "a worker is refused: 127.0.0.1:" in heard
    assert (sweep.returncode, [worker.returncode for worker in workers]) == (0, [0, 0]), heard
    assert [end.splitlines() for end in ends] == [[f"connecting to the sweep at {at[2]}"]] * 2
    assert sorted(_numbers(run)) == list(range(16))
    assert _level(run)["generator"]["workers"] == 2
    assert SECRET not in "".join(path.read_text("utf-8") for path in run.iterdir())


def test_a_number_that_is_not_awaited_is_refused(tmp_path):
    known = {"LMI_BENCH_SECRET": SECRET}
    with runtime_server(step_s=0.02) as url:
        hosts = ("--hosts", "join*2", "--listen", "127.0.0.1:0")
        sweep = _start("sweep", url, *SMALL, *hosts, "--out", tmp_path / "run", **known)
        at = ("worker", "--connect", _address(sweep))
        second = _start(*at, JOB_COMPLETION_INDEX="2", **known)
        assert second.wait(120) != 0
        heard = next(line for line in sweep.stderr if "refused" in line)
        sweep.send_signal(signal.SIGINT)
        sweep.communicate(timeout=120)
    assert "no free place for number 2" in heard
    assert sweep.returncode == 130
    for each in (second, sweep):
        each.stdout.close()
        each.stderr.close()


def test_a_worker_may_come_before_the_sweep_and_a_port_belongs_to_one_sweep(tmp_path):
    """Over IPv6: addresses are in brackets."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            address = f"[::1]:{probe.getsockname()[1]}"
    except OSError:
        pytest.skip("no IPv6 here")
    known = {"LMI_BENCH_SECRET": SECRET}
    at = ("worker", "--connect", address)
    early = _start(*at, **known)
    assert early.stderr.readline() == f"connecting to the sweep at {address}\n"
    with runtime_server(step_s=0.02) as url:
        hosts = ("--hosts", "join*2", "--listen", address)
        sweep = _start("sweep", url, *SMALL, *hosts, "--out", tmp_path / "run", **known)
        while "waiting for 1 worker(s)" not in (line := sweep.stderr.readline()):
            assert line, "the sweep has ended"
        other = _start("sweep", url, *SMALL, *hosts, "--out", tmp_path / "other", **known)
        said = other.communicate(timeout=120)[1]
        late = _start(*at, **known)
        heard = sweep.communicate(timeout=120)[1]
        ends = [each.communicate(timeout=120)[1] for each in (early, late)]
    assert f"error: --listen {address}: Address already in use" in said
    assert other.returncode == 2
    assert [each.returncode for each in (sweep, early, late)] == [0, 0, 0], (heard, ends)
    assert sorted(_numbers(tmp_path / "run")) == list(range(16))


def test_a_key_stays_on_each_host(tmp_path):
    """The server refuses requests without it; the worker is told which header is missing."""
    key, known = "sk-1234567890abcdef", {"LMI_BENCH_SECRET": SECRET}
    with runtime_server(step_s=0.02, signed=False, app_options={"api_key": key}) as url:
        hosts = ("--hosts", "join", "--listen", "127.0.0.1:0", "--api-key", key)
        sweep = _start("sweep", url, *SMALL, *hosts, "--out", tmp_path / "none", **known)
        worker = _start("worker", "--connect", _address(sweep), **known)
        said = [each.communicate(timeout=120)[1] for each in (worker, sweep)]
        assert [worker.returncode, sweep.returncode] == [2, 2], said
        for text in said:
            assert "the sweep's requests have the headers Authorization, which no message" in text
            assert "set LMI_BENCH_API_KEY or --header for `worker` too" in text
        assert not (tmp_path / "none").exists()
        sweep = _start("sweep", url, *SMALL, *hosts, "--out", tmp_path / "run", **known)
        own = ("--connect", _address(sweep), "--api-key", key)
        worker = _start("worker", *own, **known)
        said = [each.communicate(timeout=120)[1] for each in (worker, sweep)]
        assert [worker.returncode, sweep.returncode] == [0, 0], said
        local = ("--hosts", "local", "--api-key", key)  # a worker at a pipe is given it
        lmi_bench("sweep", url, *SMALL, *local, "--out", tmp_path / "local")
    for name in ("run", "local"):
        assert _level(tmp_path / name)["errors"] == 0
        assert key not in "".join(path.read_text("utf-8") for path in (tmp_path / name).iterdir())


def test_an_address_with_a_password_is_not_sent_over_the_network(tmp_path):
    with runtime_server(step_s=0.02) as url:
        address = url.replace("http://", "http://ada:secret@")
        args = ("sweep", address, *SMALL, "--hosts", "join", "--out", tmp_path / "run")
        done = lmi_bench(*args, expect=2)
    assert "error: --hosts: the scenario holds a secret" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--hosts", "join"), "set the variable LMI_BENCH_SECRET"),
        (("--hosts", "a,,b"), "--hosts a,,b: write local, join"),
        (("--hosts", "-oProxyCommand=x"), "--hosts -oProxyCommand=x: write local"),
        (("--hosts", "local*0"), r"--hosts local\*0: write local"),
        (("--hosts", "local", "--workers", "2"), r"--hosts and --workers: write local\*4"),
        (("--hosts", "local", "--listen", "7711"), "--listen 7711: write HOST:PORT"),
        (("--hosts", "local", "--connections", "2"), "--hosts: a cap on requests needs a single process"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, monkeypatch, args, said):
    monkeypatch.delenv("LMI_BENCH_SECRET", raising=False)
    with runtime_server(step_s=0.001) as url:
        done = lmi_bench("sweep", url, *SMALL, *args, "--out", tmp_path / "r", expect=2)
    assert re.search(f"error: {said}", done.stderr), done.stderr
    assert not (tmp_path / "r").exists()


def test_hosts_are_for_an_endpoint(tmp_path):
    args = ("sweep", "sim:ml.g5.2xlarge", "-m", "llama-2-7b", "--hosts", "local")
    done = lmi_bench(*args, "--out", tmp_path / "r", expect=2)
    assert "--hosts is for an endpoint" in done.stderr


def _children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in listed.stdout.split()]


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
@pytest.mark.parametrize("end", ["worker killed", "Ctrl-C"])
def test_a_lost_worker_and_ctrl_c_leave_a_run_that_goes_on_and_no_process(tmp_path, end):
    run = tmp_path / "run"
    with runtime_server(step_s=0.02) as url:
        small = ("--isl", "8", "--osl", "6", "--warmup-requests", "0", "--requests-per-user", "6")
        args = ("sweep", url, *small, "--concurrency", "2,4", "--hosts", "local,local")
        sweep = _start(*args, "--out", run)
        levels = run / "levels.jsonl"
        while not levels.exists() or not levels.read_text():
            assert sweep.poll() is None, sweep.stderr.read()
            time.sleep(0.01)
        workers = _children(sweep.pid)
        if end == "Ctrl-C":
            sweep.send_signal(signal.SIGINT)
        else:
            os.kill(workers[0], signal.SIGKILL)
        said = sweep.communicate(timeout=120)[1]
        assert sweep.returncode == (130 if end == "Ctrl-C" else 1), said
        if end != "Ctrl-C":
            assert re.search(r"error: worker \d \(local\) died \(exit code -9\)", said)
            assert "continue with --resume" in said
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
        assert len(levels.read_text().splitlines()) == 1
        lmi_bench(*args, "--out", run, "--resume")
    assert [json.loads(line)["level"] for line in levels.read_text().splitlines()] == [0, 1]


def test_the_commands_of_an_indexed_job_make_one_run(tmp_path):
    """As its pods would, with their numbers set by hand and this machine's address."""
    run, file = tmp_path / "run", tmp_path / "loadgen.yaml"
    with runtime_server(step_s=0.02) as url:
        write = ("deploy", "loadgen", "--image", "lmi", "--workers", "2", "--out", file)
        said = lmi_bench(*write, "--", url, *SMALL).stdout
        assert "--from-file=LMI_BENCH_SECRET=/dev/stdin" in said
        commands = {}
        for each in yaml.safe_load_all(file.read_text()):
            if each["kind"] == "Job":
                (container,) = each["spec"]["template"]["spec"]["containers"]
                commands[each["metadata"]["name"]] = container["command"][1:]
        here = {"[::]:7711": "127.0.0.1:0", "/runs/run": str(run)}
        given = [here.get(word, word) for word in commands["loadgen"]]
        sweep = _start(*given, LMI_BENCH_SECRET=SECRET)
        here = {"loadgen:7711": _address(sweep)}
        given = [here.get(word, word) for word in commands["loadgen-workers"]]
        pods = [_start(*given, JOB_COMPLETION_INDEX=str(n), LMI_BENCH_SECRET=SECRET) for n in range(2)]
        heard = sweep.communicate(timeout=120)[1]
        for pod in pods:
            pod.communicate(timeout=120)
    assert [each.returncode for each in (sweep, *pods)] == [0, 0, 0], heard
    assert _level(run)["generator"]["workers"] == 2
    assert sorted(_numbers(run)) == list(range(16))
