"""How true the load generator's times are: reported against known, on one core each.

    python benchmarks/loadgen_accuracy.py                       # 1, 32, 128, 512 and 1024 streams
    python benchmarks/loadgen_accuracy.py --streams 2048 --server c --burn 0.6

A server whose token times are known runs on one core, the whole sweep (progress included) on the
other. Errors are reported / true - 1 of the same quantile; what lies between the client's send and
the server's read counts as error, too. CPU is the client's, in seconds for 100,000 token events,
while the level runs and with the decoding after it. `late` is the p99 of user time - kernel time:
by so much would the times be wrong without the kernel's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmi_bench.loadgen.http_target import SPACING_S, HttpTarget
from lmi_bench.loadgen.prompts import CommonWords, Lengths, SyntheticPrompts
from lmi_bench.loadgen.receive import run_on_sockets
from lmi_bench.loadgen.sweep import run_sweep
from lmi_bench.records import LevelRun
from lmi_bench.wire.format import find_format
from lmi_bench.workload import LevelSpec

SUPPORT = Path(__file__).parent / "support"
SERVER_CORE, CLIENT_CORE = 0, 1


@dataclass(frozen=True)
class Result:
    """One run; errors in %, times in ms, CPU in s for 100,000 events."""

    events_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    throughput: float
    late_p99_ms: float
    merged: float
    server_late_p99_ms: float
    cpu_share: float
    cpu_level: float
    cpu_all: float
    valid: bool


def call(port: int, path: str, method: str) -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, data=b"{}")
    if method == "GET":
        request.data = None
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def take_core(core: int, *, realtime: bool = False) -> None:
    """Pin this process to a core; with `realtime`, ahead of every ordinary program there."""
    os.sched_setaffinity(0, {core})
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


@contextlib.contextmanager
def truth_server(kind: str, folder: Path, port: int, options: argparse.Namespace) -> Iterator[None]:
    """The Python server up to what it can do on time, the C one above it."""
    if kind == "c":
        binary = folder / "truth_server"
        if not binary.exists():
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                raise SystemExit("a C compiler is needed for the C truth server")
            source = SUPPORT / "truth_server.c"
            subprocess.run([compiler, "-O2", "-w", "-o", binary, source], check=True)
        command = [binary, port, options.ttft_ms, options.itl_ms, options.tokens]
    else:
        command = [sys.executable, SUPPORT / "truth_server.py", "--port", port]
        command += ["--ttft-ms", options.ttft_ms, "--itl-ms", options.itl_ms]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: take_core(SERVER_CORE, realtime=options.realtime),
    )
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                call(port, "/truth/reset", "POST")
                break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def burn(share: float, realtime: bool) -> None:
    """Take a share of the client's core, in slices of 10 ms, at equal priority."""
    take_core(CLIENT_CORE, realtime=realtime)
    while True:
        end = time.perf_counter() + 0.01 * share
        while time.perf_counter() < end:
            pass
        time.sleep(0.01 * (1 - share))


@contextlib.contextmanager
def burnt_core(share: float, realtime: bool) -> Iterator[None]:
    if not share:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(
        target=burn, args=(share, realtime), daemon=True
    )
    process.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.join()


def measure(port: int, streams: int, rounds: int, options: argparse.Namespace) -> Result:
    """One level through the whole sweep, against what the server says it did."""
    runs: list[LevelRun] = []

    async def main() -> None:
        url = f"http://127.0.0.1:{port}"
        chat = find_format("openai-chat")
        async with HttpTarget(
            url, chat, model="truth-model", timestamps=options.timestamps
        ) as target:
            await run_sweep(
                [LevelSpec(0, concurrency=streams, num_requests=streams * rounds)],
                target,
                None,
                prompts=SyntheticPrompts([Lengths(64, options.tokens)], CommonWords(), seed=1),
                summarise=lambda _: {},
                on_level=lambda run, _: runs.append(run),
                spacing_s=SPACING_S,
            )

    call(port, "/truth/reset", "POST")
    cpu_s = time.process_time()
    run_on_sockets(main())
    cpu_s = time.process_time() - cpu_s
    truth = call(port, "/truth/stats", "GET")
    return compare(runs[0], truth, cpu_s)


def compare(run: LevelRun, truth: dict, cpu_s: float) -> Result:
    failed = [record for record in run.records if not record.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0].error}")
    times = [np.asarray(record.token_times_s) for record in run.records]
    ttft_ms = [1e3 * (t[0] - r.sent_s) for t, r in zip(times, run.records, strict=True)]
    itl_ms = np.concatenate([1e3 * np.diff(t) for t in times])
    tokens = sum(len(t) for t in times)
    wall_s = max(t[-1] for t in times) - min(record.sent_s for record in run.records)

    def error(values: list[float] | np.ndarray, name: str, q: int) -> float:
        return 100 * (float(np.percentile(values, q)) / truth[name][f"p{q}_ms"] - 1)

    check = run.check
    return Result(
        events_per_s=tokens / wall_s,
        ttft_p50=error(ttft_ms, "ttft", 50),
        ttft_p99=error(ttft_ms, "ttft", 99),
        itl_p50=error(itl_ms, "itl", 50),
        itl_p99=error(itl_ms, "itl", 99),
        throughput=100 * (tokens / wall_s / truth["tokens_per_s"] - 1),
        late_p99_ms=1e3 * check.receive_delay_p99_s,
        merged=check.merged_share,
        server_late_p99_ms=truth["lateness"]["p99_ms"],
        cpu_share=check.cpu_share,
        cpu_level=check.cpu_share * wall_s / tokens * 1e5,
        cpu_all=cpu_s / tokens * 1e5,
        valid=check.valid,
    )


COLUMNS = (
    ("streams", 7, ""),
    ("server", 6, ""),
    ("events/s", 9, "events_per_s"),
    ("TTFT p50 %", 10, "ttft_p50"),
    ("p99 %", 7, "ttft_p99"),
    ("ITL p50 %", 9, "itl_p50"),
    ("p99 %", 7, "itl_p99"),
    ("tok/s %", 7, "throughput"),
    ("late ms", 8, "late_p99_ms"),
    ("merged", 7, "merged"),
    ("srv ms", 7, "server_late_p99_ms"),
    ("share", 5, "cpu_share"),
    ("CPU", 5, "cpu_level"),
    ("+dec.", 5, "cpu_all"),
    ("valid", 5, "valid"),
)


def shown(name: str, value: float | bool) -> str:
    if name == "valid":
        return "yes" if value else "no"
    if name == "events_per_s":
        return f"{value:,.0f}"
    if name in ("merged",):
        return f"{value:.4f}"
    if name.startswith(("cpu", "late", "server")):
        return f"{value:.2f}"
    return f"{value:+.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,32,128,512,1024")
    parser.add_argument("--server", choices=("auto", "py", "c"), default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream")
    parser.add_argument("--repeat", type=int, default=1, help="runs; medians are printed")
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--timestamps", choices=("kernel", "user"))
    parser.add_argument("--burn", type=float, default=0.0, help="share of the core taken by others")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="SCHED_FIFO for server and client: for a machine on which other programs run",
    )
    parser.add_argument("--port", type=int, default=18411)
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two cores are needed: one for the server, one for the client")
    take_core(CLIENT_CORE, realtime=options.realtime)
    print(" ".join(f"{title:>{width}}" for title, width, _ in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for streams in (int(text) for text in options.streams.split(",")):
            kind = options.server
            if kind == "auto":
                kind = "py" if streams <= 512 else "c"
            rounds = max(options.rounds, 8 // streams)
            with (
                truth_server(kind, Path(folder), options.port, options),
                burnt_core(options.burn, options.realtime),
            ):
                results = [
                    measure(options.port, streams, rounds, options) for _ in range(options.repeat)
                ]
            cells = [f"{streams:>7}", f"{kind:>6}"]
            for _, width, name in COLUMNS[2:]:
                values = [getattr(result, name) for result in results]
                value = all(values) if name == "valid" else statistics.median(values)
                cells.append(f"{shown(name, value):>{width}}")
            print(" ".join(cells), flush=True)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak_mib:.0f} MiB")


if __name__ == "__main__":
    main()
