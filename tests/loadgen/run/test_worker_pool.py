"""Worker processes against a real server: nothing lost, nothing twice, and no one left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.results.early_stop import QuantileWatch, parse_stop_when
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.slo_results import CertainMiss, judge_level
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.lengths import parse_seconds
from lmi_bench.core.level import KNOWN
from lmi_bench.core.listener import Silent
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.workload import LevelSpec, of_sessions
from lmi_bench.jobs.sweep.watch import Client, open_pool
from lmi_bench.jobs.worker import sample_of
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import SPACING_S, HttpTarget
from lmi_bench.loadgen.prompts.dialogues import MadeUpDialogues
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, common_words
from lmi_bench.loadgen.run.channel import Job, Ready, Start
from lmi_bench.loadgen.run.hosts import LOCAL, PIPE_SECRET, Launched
from lmi_bench.loadgen.run.level_runner import LevelOrder, Progress, StopRules
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.loadgen.run.worker_pool import WorkerPool, _Worker
from lmi_bench.targets.bench import NO_ACCESS
from lmi_bench.targets.open import open_bench
from lmi_bench.wire.format import find_format
from tests.levels import level_of

SOURCE = Path(__file__).parents[3] / "lmi_bench/loadgen/http/truth_server.c"
TTFT_MS, ITL_MS, TOKENS = 60.0, 5.0, 16
WORKLOAD = {"input_tokens": 16, "output_tokens": TOKENS}
PROMPTS = SyntheticPrompts([Lengths(16, TOKENS)], common_words, seed=0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the truth server needs epoll")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the truth server")
    binary = tmp_path_factory.mktemp("truth") / "truth_server"
    subprocess.run([compiler, "-O2", "-w", "-o", binary, SOURCE], check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [binary, str(port), str(TTFT_MS), str(ITL_MS), str(TOKENS)]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _job(url, prompts=PROMPTS, **workload):
    stated = {"target": url, "protocol": "openai-chat", "model": "m"}
    scenario = parse_scenario(stated | {"workload": WORKLOAD | workload})
    return Job(scenario.canonical(), {"tokenizer": None, "format": {}}, sample_of(prompts))


def _target(url):
    return HttpTarget(url, find_format("openai-chat"), model="m")


def _sweep(url, levels, count, prompts=PROMPTS, workload=None, **options):
    runs, states = [], []

    async def main():
        async with _target(url) as target:
            await run_sweep(
                levels,
                target,
                None,
                prompts=prompts,
                summarise=summarise_level,
                on_level=lambda run, _: runs.append(run),
                on_progress=states.append,
                spacing_s=SPACING_S,
                workers=pool,
                **{"stop_rules": StopRules(watch=lambda _spec: None)} | options,
            )

    with closing(WorkerPool(_job(url, prompts, **(workload or {})), count)) as pool:
        run_on_sockets(main())
    return runs, states


def test_two_workers_measure_what_the_server_did(url):
    spec = LevelSpec(0, Load(concurrency=16), num_requests=80, warmup_requests=2)
    (run,), states = _sweep(url, [spec], 2)
    assert run.check.workers == 2
    assert [record.request_id for record in run.records] == list(range(80))
    assert all(record.ok and record.output_tokens == TOKENS for record in run.records)
    ttft_ms = [1e3 * (r.token_times_s[0] - r.sent_s) for r in run.records]
    assert min(ttft_ms) >= TTFT_MS - run.check.ttft_error_bound_ms
    assert max(state.done for state in states) > 0
    sent_s = sorted(r.sent_s for r in run.records)[:16]
    assert 0 <= sent_s[0] < 1  # both began at the common start, one user after the other
    assert all(sent_s[i] >= i * SPACING_S - 1e-6 for i in range(16))


@pytest.mark.parametrize("count", [1, 2])
def test_a_watched_level_ends_when_its_verdict_is_sure_whoever_sends_it(url, count):
    """Every answer misses: of 400 some 40 may, so the 42nd decides; a round of 16 may follow.

    Over several workers more may follow: the verdict takes its time to reach them.
    """
    slos = [parse_slo(f"ttft_p90<={TTFT_MS / 2}ms")]
    spec = LevelSpec(0, Load(concurrency=16), num_requests=400, warmup_requests=0)
    rules = StopRules(ends_sweep=False, watch=lambda each: CertainMiss(slos, each).add)
    (run,), _ = _sweep(url, [spec], count, stop_rules=rules)
    assert (run.check.workers, run.stopped_by) == (count, "decided")
    assert 41 <= len(run.records) <= (41 + 2 * 16 if count == 1 else 399)
    judged = judge_level(run, slos)
    assert (judged.passed, judged.sure, judged.planned) == (False, True, 400)


def test_two_workers_end_a_level_whose_percentile_is_known(url):
    rule = parse_stop_when("ttft_p50:20%")
    spec = LevelSpec(0, Load(concurrency=16), num_requests=800, warmup_requests=0)
    rules = StopRules(watch=lambda each: QuantileWatch(rule, each).add, watch_says=KNOWN)
    (run,), _ = _sweep(url, [spec], 2, stop_rules=rules)
    assert (run.check.workers, run.stopped_by) == (2, KNOWN)
    assert 100 <= len(run.records) < 800


@pytest.mark.parametrize("count", [1, 2])
def test_the_stated_bound_meets_the_truth_however_busy_the_machine_is(url, count):
    """Each quantile lies in an interval: ours by the self-check, the server's by its writes."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/truth/reset", method="POST", data=b"{}"))
    spec = LevelSpec(0, Load(concurrency=32), num_requests=160, warmup_requests=0)
    (run,), _ = _sweep(url, [spec], count)
    with urllib.request.urlopen(f"{url}/truth/stats") as reply:
        truth = json.load(reply)
    assert truth["completed"] == 160
    ttft_ms = [1e3 * (r.token_times_s[0] - r.sent_s) for r in run.records]
    gaps_ms = np.concatenate([1e3 * np.diff(r.token_times_s) for r in run.records])
    printed_ms, check = 0.001, run.check
    for values_ms, q, bound_ms, stated in (
        (ttft_ms, 50, check.ttft_p50_error_bound_ms, truth["ttft_from_arrival"]),
        (ttft_ms, 99, check.ttft_error_bound_ms, truth["ttft_from_arrival"]),
        (gaps_ms, 50, check.itl_p50_error_bound_ms, truth["itl"]),
        (gaps_ms, 99, check.itl_error_bound_ms, truth["itl"]),
    ):
        low_ms, true_ms, high_ms = (stated[f"p{q}{end}_ms"] for end in ("_low", "", "_high"))
        assert low_ms <= true_ms <= high_ms
        reported_ms, reach_ms = np.percentile(values_ms, q), bound_ms + printed_ms
        assert low_ms - reach_ms <= reported_ms <= high_ms + reach_ms


def test_an_open_loop_is_split_request_by_request(url):
    spec = LevelSpec(0, Load(rate_per_s=100.0, arrivals="constant"), num_requests=41)
    (run,), _ = _sweep(url, [spec], 2)
    assert [round(record.due_s, 6) for record in run.records] == [i / 100 for i in range(41)]
    assert all(record.ok for record in run.records)


@pytest.mark.parametrize("load", [Load(concurrency=4), Load(rate_per_s=20.0, arrivals="constant")])
def test_conversations_are_split_and_each_stays_with_one_worker(url, load):
    """Nine of three turns: all 27 requests once, turn after turn with the pause between them."""
    words = [SyntheticPrompts([Lengths(16, TOKENS)], common_words, seed=0) for _ in range(2)]
    source = MadeUpDialogues(*words, lambda _: 3, parse_seconds("0.05"), seed=0)
    spec = LevelSpec(0, load, num_requests=1)
    spec = of_sessions(spec, lambda _: 3, num_sessions=9)
    (run,), _ = _sweep(url, [spec], 2, source, {"turns": "3", "think_s": "0.05"})
    assert run.check.workers == 2
    assert [record.request_id for record in run.records] == list(range(27))
    assert all(record.ok for record in run.records)
    for begin in range(0, 27, 3):
        turns = run.records[begin : begin + 3]
        for before, after in pairwise(turns):
            assert after.sent_s - before.ended_s > 0.04
            assert (after.session, after.turn) == (before.session, before.turn + 1)


async def _endless(url, pool, signalled=None):
    """A level that only its end from outside ends.

    signalled  number of a worker that gets a signal half a second after it began to send, and it
    """

    async def strike(number, kind):
        while len(pool._workers) < 2 or not pool._workers[number].sending:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        os.kill(pool._workers[number].channel.process.pid, kind)

    striking = asyncio.create_task(strike(*signalled)) if signalled else None
    try:
        async with _target(url) as target:
            await run_sweep(
                [LevelSpec(0, Load(concurrency=4), duration_s=60.0)],
                target,
                None,
                prompts=PROMPTS,
                summarise=summarise_level,
                workers=pool,
            )
    finally:
        if striking is not None:
            await striking


def test_a_worker_that_dies_ends_the_level_with_its_exit_code(url):
    async def main():
        with closing(WorkerPool(_job(url), 2)) as pool:
            await _endless(url, pool, signalled=(1, signal.SIGKILL))

    with pytest.raises(LmiBenchError, match=r"worker 1 \(local\) died \(exit code -9\)"):
        run_on_sockets(main())


def test_a_cancelled_level_leaves_no_process_behind_and_none_complains(url, capfd):
    async def main():
        pool = WorkerPool(_job(url), 2)
        task = asyncio.create_task(_endless(url, pool))
        while len(pool._workers) < 2:
            await asyncio.sleep(0.01)
        processes = [worker.channel.process for worker in pool._workers.values()]
        await asyncio.sleep(1.0)  # both are at work
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [process.poll() for process in processes]

    for exit_code in run_on_sockets(main()):
        assert exit_code in (0, -signal.SIGKILL)  # a worker that is slow to end is killed
    assert capfd.readouterr().err == ""


def test_a_worker_whose_sweep_hears_nothing_goes_on_in_silence_until_the_pipe_closes(url):
    launched = Launched(LOCAL, "worker 0")
    launched.greet(PIPE_SECRET)
    channel = launched
    channel.send(_job(url))
    channel.receive(Ready)
    spec = LevelSpec(0, Load(concurrency=2), num_requests=2000, warmup_requests=0)
    channel.send(LevelOrder(spec, StopRules(max_error_share=None), None, SPACING_S, 0))
    channel.receive(Ready)
    with socket.socket(fileno=os.dup(channel._source.fileno())) as deaf:
        deaf.shutdown(socket.SHUT_RD)  # whatever the worker sends from now on fails
    channel.send(Start(time.monotonic()))
    time.sleep(1.0)
    assert launched.process.poll() is None
    channel.close()
    assert launched.process.wait(120) == 0
    launched._said.seek(0)
    assert launched._said.read() == b""
    launched.end()


def test_a_worker_whose_start_comes_late_says_so_with_its_part(url):
    launched = Launched(LOCAL, "worker 0")
    launched.greet(PIPE_SECRET)
    launched.send(_job(url))
    launched.receive(Ready)
    spec = LevelSpec(0, Load(concurrency=1), num_requests=2)
    launched.send(LevelOrder(spec, StopRules(max_error_share=None), None, 0.0, 0))
    launched.receive(Ready)
    launched.send(Start(time.monotonic() - 1))
    while isinstance(part := launched._next(), Progress):
        pass
    launched.close()
    launched.end()
    assert re.fullmatch(r"the start reached it 1,0\d\d ms late", part.fault)


def test_a_worker_whose_start_comes_late_is_named_while_the_level_runs(url, monkeypatch):
    """The level would last a minute; it is cancelled as soon as the worker is named."""
    begin, said = _Worker.begin, []
    monkeypatch.setattr(_Worker, "begin", lambda worker, at_s: begin(worker, at_s - worker.number))

    async def main():
        class Hears(Silent):
            def warn(self, text):
                if text.startswith("worker 1") and "the start" in text:
                    said.append(text)
                    level.cancel()

        with closing(WorkerPool(_job(url), 2, listener=Hears())) as pool:
            level = asyncio.create_task(_endless(url, pool))
            with pytest.raises(asyncio.CancelledError):
                await level

    run_on_sockets(main())
    (line,) = said
    assert re.fullmatch(r"worker 1 \(local\): the start reached it [\d,]+ ms late: the level is invalid", line)


def test_auto_takes_another_worker_when_a_core_is_nearly_full():
    pool = WorkerPool(_job("http://127.0.0.1:1"))
    line = level_of(concurrency=512, generator={"cpu_share": 0.4, "workers": 1})
    assert pool.count_for(LevelSpec(0, Load(concurrency=512), num_requests=9), []) == 1
    assert pool.count_for(LevelSpec(1, Load(concurrency=640), num_requests=640), [line]) == 1
    most = len(os.sched_getaffinity(0))
    assert pool.count_for(LevelSpec(1, Load(concurrency=2048), num_requests=2048), [line]) == min(3, most)


def test_a_worker_that_stops_answering_is_named_before_two_seconds_are_over(url):
    """Stopped, not ended: only its silence tells."""

    async def main():
        with closing(WorkerPool(_job(url), 2)) as pool:
            await _endless(url, pool, signalled=(0, signal.SIGSTOP))

    with pytest.raises(LmiBenchError, match=r"worker 0 \(local\) has not answered for 1\.\d s"):
        run_on_sockets(main())


def test_a_worker_that_waits_for_its_next_request_is_not_taken_for_lost(url):
    """Between its two requests it has nothing to report for 2.4 s; its answers to pings count."""
    spec = LevelSpec(0, Load(rate_per_s=0.4, arrivals="constant"), num_requests=3)
    (run,), _ = _sweep(url, [spec], 2)
    assert [record.ok for record in run.records] == [True] * 3


def _open(job):
    with closing(WorkerPool(job, hosts=(LOCAL,))) as pool:
        pool.open()


def test_a_worker_here_imports_nothing_from_the_working_directory(url, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    _open(_job(url))


def test_a_worker_with_other_prompts_is_refused_by_name(url):
    """Its scenario has 17 tokens where this process sends 16, as with another data set."""
    with pytest.raises(InputError, match=r"^worker 0 \(local\): this host makes other prompts"):
        _open(_job(url, input_tokens=17))


def test_a_worker_whose_file_differs_in_any_line_is_refused_by_name(url, tmp_path):
    """Only the times of the third request differ, so each single request is the same."""
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 16, "output_length": 4}\n'

    class Rewrites(Silent):
        def note(self, text):
            if text.startswith("workers: "):
                path.write_text("".join(row % at for at in (0, 100, 300)))

    path.write_text("".join(row % at for at in (0, 100, 200)))
    stated = {"target": url, "protocol": "openai-chat", "model": "m", "workload": {"trace": str(path)}}
    bench = open_bench(parse_scenario(stated | {"load": {"rate_per_s": [5.0]}}), NO_ACCESS)
    options = (bench, NO_ACCESS, "", bench.prompts(""), Client(hosts=(LOCAL,)), Rewrites())
    with pytest.raises(InputError, match=r"^worker 0 \(local\): this host makes other prompts"), open_pool(*options):
        pass


def test_a_target_that_a_worker_cannot_open_is_its_own_line(tmp_path):
    job = _job("http://127.0.0.1:1", dataset=str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match=r"^worker 0 \(local\): cannot read .*none"):
        _open(job)


def test_hosts_send_levels_of_a_single_user_too(url):
    """The sweep's own process sends nothing: its target is never opened."""

    async def main():
        class Unused:
            async def send(self, request):
                raise AssertionError

        runs = []
        with closing(WorkerPool(_job(url), hosts=(LOCAL, LOCAL))) as pool:
            pool.open()
            spec = LevelSpec(0, Load(concurrency=1), num_requests=3, warmup_requests=0)
            await run_sweep(
                [spec],
                Unused(),
                None,
                prompts=PROMPTS,
                summarise=summarise_level,
                on_level=lambda run, _: runs.append(run),
                workers=pool,
            )
        return runs

    (run,) = run_on_sockets(main())
    assert [record.ok for record in run.records] == [True] * 3
    assert run.check.workers == 1
    assert run.check.clock_error_bound_ms is None  # all have this machine's clock
