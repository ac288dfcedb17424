"""Prints benchmarks/results/many_hosts.md: four workers on four hosts against one process.

    sudo python benchmarks/many_hosts.py --realtime --write benchmarks/results/many_hosts.md

A host is a network namespace with a cable to the sweep's, and a time namespace whose
CLOCK_MONOTONIC is off. Workers dial in through a relay that delays each way by 20 ms (tc's netem
is not in every kernel); requests go to the C truth server over the cable alone. The library is
called, so that the measured offsets can be held against the true ones. Needs Linux, root, a C
compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import multiprocessing
import os
import platform
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.listener import Silent
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.workload import LevelSpec
from lmi_bench.jobs.worker import sample_of
from lmi_bench.loadgen.http.native_harvest import choose_receive
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, common_words
from lmi_bench.loadgen.run.channel import Job
from lmi_bench.loadgen.run.hosts import JOIN
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.loadgen.run.worker_pool import WorkerPool
from lmi_bench.wire.format import find_format

SUPPORT = Path(__file__).parent / "support"
SERVER, DOOR, RELAY = 18601, 18602, 18603
HERE, THERE = "10.77.0.1", "10.77.0.{}"
SKEWS_S = (-1000, 77, 3600, 86_400)
DELAY_S, JITTER_S = 0.02, 0.001
TTFT_MS, ITL_MS, TOKENS = 100, 10, 32
RATE, REQUESTS, LEVELS = 100.0, 1000, 3
STEP_S = 0.5
PROMPTS = SyntheticPrompts([Lengths(16, TOKENS)], common_words, seed=0)
SECRET = secrets.token_hex(16)


def sh(text: str) -> None:
    subprocess.run(text.split(), check=True, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """A bridge here, and four namespaces with a cable to it."""
    clear()
    try:
        sh("ip link add lmib type bridge")
        sh(f"ip addr add {HERE}/24 dev lmib")
        sh("ip link set lmib up")
        for n in range(len(SKEWS_S)):
            sh(f"ip netns add lmi{n}")
            sh(f"ip link add lmiv{n} type veth peer name eth0 netns lmi{n}")
            sh(f"ip link set lmiv{n} master lmib up")
            sh(f"ip -n lmi{n} addr add {THERE.format(10 + n)}/24 dev eth0")
            sh(f"ip -n lmi{n} link set eth0 up")
        yield
    finally:
        clear()


def clear() -> None:
    for n in range(len(SKEWS_S)):
        with contextlib.suppress(subprocess.CalledProcessError):
            sh(f"ip netns del lmi{n}")
    with contextlib.suppress(subprocess.CalledProcessError):
        sh("ip link del lmib")


def relay() -> None:
    """Pass on what comes to RELAY and back, each way later by the delay, in order."""

    async def one_way(reader, writer) -> None:
        loop, due_s = asyncio.get_running_loop(), 0.0
        while data := await reader.read(2**20):
            due_s = max(due_s + 1e-6, loop.time() + DELAY_S + random.uniform(0, JITTER_S))
            loop.call_at(due_s, writer.write, data)
        loop.call_at(loop.time() + 2 * DELAY_S, writer.close)

    async def connected(reader, writer) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", DOOR)
            await asyncio.gather(one_way(reader, back), one_way(there, writer))

    async def serve() -> None:
        server = await asyncio.start_server(connected, HERE, RELAY)
        await server.serve_forever()

    asyncio.run(serve())


@contextlib.contextmanager
def running(*programs: list[str] | Callable[[], None]) -> Iterator[None]:
    """Programs, or functions in a process of their own, until the end of the block."""
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []
    for each in programs:
        if callable(each):
            started.append(context.Process(target=each, daemon=True))
            started[-1].start()
        else:
            started.append(subprocess.Popen(each, stdout=subprocess.DEVNULL))
    try:
        yield
    finally:
        for each in started:
            each.kill()
            getattr(each, "join", getattr(each, "wait", None))()


@dataclass
class Workers:
    """The processes of four workers, and the clock of each that can be stepped."""

    folder: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    def __enter__(self) -> Workers:
        for n, skew_s in enumerate(SKEWS_S):
            step = self.folder / f"step{n}"
            step.write_bytes(bytes(8))
            command = f"ip netns exec lmi{n} unshare --time --monotonic {skew_s} --fork"
            worker = [sys.executable, "-m", "lmi_bench", "worker"]
            self.processes.append(
                subprocess.Popen(
                    [*command.split(), *worker, "--connect", f"{HERE}:{RELAY}"],
                    env=os.environ
                    | {
                        "LMI_BENCH_SECRET": SECRET,
                        "JOB_COMPLETION_INDEX": str(n),
                        "LD_PRELOAD": str(self.folder / "stepped_clock.so"),
                        "STEPPED_CLOCK": str(step),
                    },
                    stderr=subprocess.DEVNULL,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for n, each in enumerate(self.processes):
            with contextlib.suppress(OSError, IndexError):
                os.kill(self.pid(n), signal.SIGKILL)
            each.kill()
            each.wait()

    def pid(self, n: int) -> int:
        """Of the worker itself, below `unshare`."""
        pid = self.processes[n].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def step(self, n: int, by_s: float) -> None:
        with (self.folder / f"step{n}").open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 8)
            shared[:] = int(by_s * 1e9).to_bytes(8, "little", signed=True)
            shared.close()


def levels(*specs: LevelSpec, pool: WorkerPool | None, on_level=lambda _: None) -> None:
    """Run levels, by the workers or in this process."""
    chat, library = find_format("openai-chat"), choose_receive("auto").library

    async def main() -> None:
        url = f"http://{HERE}:{SERVER}"
        async with HttpTarget(url, chat, model="m", native=library) as target:
            await run_sweep(
                specs,
                target,
                None,
                prompts=PROMPTS,
                summarise=summarise_level,
                on_level=lambda run, _: on_level(run),
                workers=pool,
            )

    run_on_sockets(main())


class Heard(Silent):
    """Passes warnings on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.warn = tell


@contextlib.contextmanager
def pool_of(tell: Callable[[str], None]) -> Iterator[WorkerPool]:
    scenario = parse_scenario(
        {
            "target": f"http://{HERE}:{SERVER}",
            "protocol": "openai-chat",
            "model": "m",
            "workload": {"input_tokens": 16, "output_tokens": TOKENS},
        }
    )
    job = Job(scenario.canonical(), {"tokenizer": None, "format": {}}, sample_of(PROMPTS))
    hosts = (JOIN,) * len(SKEWS_S)
    pool = WorkerPool(job, hosts=hosts, listen=("127.0.0.1", DOOR), listener=Heard(tell))
    with contextlib.closing(pool):
        pool.open()
        yield pool


def truth(path: str, body: bytes | None = None) -> dict:
    request = urllib.request.Request(f"http://{HERE}:{SERVER}/truth/{path}", body)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


LOAD = Load(rate_per_s=RATE, arrivals="constant")


def row(what: str, run: LevelRun, arrival_ms: float, clock: str) -> str:
    """A level beside what the server says it did; the bound holds if the two intervals meet."""
    stats, cells, holds = truth("stats"), [], True
    if failed := [record for record in run.records if not record.ok]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0].error}")
    ttft_ms = [1e3 * (r.token_times_s[0] - r.sent_s) for r in run.records]
    gaps_ms = np.concatenate([1e3 * np.diff(r.token_times_s) for r in run.records])
    for values, name, true in ((ttft_ms, "ttft", stats["ttft_from_arrival"]), (gaps_ms, "itl", stats["itl"])):
        for q in (50, 99):
            reported = np.percentile(values, q)
            cells.append(f"{reported:.3f} ({true[f'p{q}_ms']:.3f})")
        bound_ms = getattr(run.check, f"{name}_error_bound_ms")
        cells.append(f"{bound_ms:.3f}")
        holds &= reported - bound_ms - 0.001 <= true["p99_high_ms"]
        holds &= reported + bound_ms + 0.001 >= true["p99_low_ms"]
    cells += ["yes" if holds else "NO", f"{arrival_ms:.3f}", clock]
    cells += ["yes" if run.check.valid else f"no: {run.check.reason}"]
    return f"| {what} | {' | '.join(cells)} |"


def exact(add: Callable[[str], None], folder: Path) -> None:
    """The same levels from one process and from four hosts."""
    add(COLUMNS)
    specs = [LevelSpec(n, LOAD, num_requests=REQUESTS) for n in range(LEVELS)]

    def alone(run: LevelRun) -> None:
        off_s = [abs(record.sent_s - record.due_s) for record in run.records]
        add(row("one process", run, 1e3 * np.percentile(off_s, 99), "-"))
        truth("reset", b"{}")

    def by_four(run: LevelRun) -> None:
        clocks = [pool._workers[number].clock for number in range(len(SKEWS_S))]
        errors_s = [clock._used_s - s for clock, s in zip(clocks, SKEWS_S, strict=True)]
        held = sum(abs(e) <= c.error_s for e, c in zip(errors_s, clocks, strict=True))
        off_s = [
            abs(record.sent_s - record.due_s + errors_s[record.request_id % len(clocks)]) for record in run.records
        ]
        worst_ms = 1e3 * max(map(abs, errors_s))
        clock = f"{worst_ms:.3f} ({run.check.clock_error_bound_ms:.1f}), {held} of 4 within"
        add(row("four hosts", run, 1e3 * np.percentile(off_s, 99), clock))
        truth("reset", b"{}")

    truth("reset", b"{}")
    levels(*specs, pool=None, on_level=alone)
    with Workers(folder), pool_of(lambda _: None) as pool:
        levels(*specs, pool=pool, on_level=by_four)


def throttle(pid: int, until: threading.Event) -> None:
    """Take 70 ms of every 100, as a cgroup's quota does."""
    while not until.wait(0.03):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.07)
        os.kill(pid, signal.SIGCONT)


def fault(what: str, folder: Path) -> str:
    """One level of 8 s in which something happens to worker 2 after 2 s."""
    said: list[tuple[float, str]] = []
    began_s: list[float] = []
    over = threading.Event()
    runs: list[LevelRun] = []

    def happen(workers: Workers) -> None:
        pid = workers.pid(2)
        while not pool._workers[2].sending:
            time.sleep(0.01)
        time.sleep(2.0)
        began_s.append(time.monotonic())
        match what:
            case "killed":
                os.kill(pid, signal.SIGKILL)
            case "stopped":
                os.kill(pid, signal.SIGSTOP)
            case "clock stepped":
                workers.step(2, STEP_S)
            case "burnt":
                throttle(pid, over)

    def tell(text: str) -> None:
        said.append((time.monotonic(), text))

    with Workers(folder) as workers, pool_of(tell) as pool:
        said.clear()
        happening = threading.Thread(target=happen, args=(workers,))
        happening.start()
        try:
            spec = LevelSpec(0, LOAD, duration_s=8.0)
            levels(spec, pool=pool, on_level=runs.append)
        except LmiBenchError as exc:
            tell(str(exc))
        over.set()
        happening.join()
    named = [(at_s, text) for at_s, text in said if "worker 2" in text]
    after = f"{named[0][0] - began_s[0]:.2f}" if named else "NOT NAMED"
    level = f"invalid: {runs[0].check.reason}" if runs and not runs[0].check.valid else "valid"
    return f"| {what} | {after} | {named[0][1] if named else ''} | {level if runs else 'lost'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--realtime", action="store_true", help="SCHED_FIFO, where others work")
    options = parser.parse_args()
    os.environ["LMI_BENCH_SECRET"] = SECRET
    if options.realtime:  # all that is started inherits it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    lines: list[str] = []

    def add(text: str) -> None:
        print(text, flush=True)
        lines.append(text)
        if options.write is not None:
            options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.geteuid() != 0:
        raise SystemExit("root and a C compiler are needed")
    with tempfile.TemporaryDirectory() as folder:
        server, shim = Path(folder, "truth_server"), Path(folder, "stepped_clock.so")
        source = SUPPORT.parents[1] / "lmi_bench/loadgen/http/truth_server.c"
        subprocess.run([compiler, "-O2", "-w", "-o", server, source], check=True)
        shared = ["-shared", "-fPIC", "-o", shim, SUPPORT / "stepped_clock.c", "-ldl"]
        subprocess.run([compiler, "-O2", *shared], check=True)
        serve = [str(server), *map(str, (SERVER, TTFT_MS, ITL_MS, TOKENS)), HERE]
        with network(), running(serve, relay):
            time.sleep(1.0)
            system = f"Linux {platform.release()}, Python {platform.python_version()}"
            system += ", SCHED_FIFO" if options.realtime else ""
            add(HEAD.format(cores=os.cpu_count(), load=os.getloadavg()[0], system=system))
            exact(add, Path(folder))
            add(FAULTS)
            for what in ("killed", "stopped", "clock stepped", "burnt"):
                add(fault(what, Path(folder)))
    add("\nPrinted by `benchmarks/many_hosts.py`.")


HEAD = """# One load from four hosts

Four network namespaces on one machine, whose CLOCK_MONOTONIC is off by -1,000, 77, 3,600 and 86,400
s; the workers dial in through a relay that delays each way by 20 to 21 ms (no netem in the
kernel), requests go straight to the C truth server. 100 req/s with constant arrivals, TTFT 100 ms,
ITL 10 ms, 32 tokens, 1,000 requests a level. "true": as the server says, TTFT from the arrival in
its kernel. "bounds hold": the reported p99 with its bound meets the interval of the server's.
"arrivals off": sent minus due on the true common time line. "clock error": largest error of a
worker's measured offset, the level's stated bound, and how many workers are within theirs.
{cores} cores with other work (load average {load:.1f}), {system}.
"""
COLUMNS = (
    "| sent by | TTFT p50 ms (true) | TTFT p99 ms (true) | bound | ITL p50 ms (true) | "
    "ITL p99 ms (true) | bound | bounds hold | arrivals off, p99 ms | clock error ms (bound) | "
    "valid |\n|---|" + "---:|" * 10
)
FAULTS = """
## What happens to worker 2, two seconds into a level

"burnt": it gets 30 ms of every 100, as under a cgroup's quota. "clock stepped": by 500 ms, with
`support/stepped_clock.c`.

| what | named after s | line | the level |
|---|---:|---|---|"""

if __name__ == "__main__":
    main()
