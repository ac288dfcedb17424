"""How true the load generator's times are: reported against known, on one core each.

    python benchmarks/loadgen_accuracy.py                       # the whole table, as Markdown
    python benchmarks/loadgen_accuracy.py --streams 2048 --burn 0.6

A server whose token times are known runs on one core, the whole sweep (progress included) on the
other. Errors are reported / true - 1 of the same quantile; the true time to first token runs from
the request's arrival in the server's kernel (`from read`: from the server's read of it). `off` and
`bound` compare the error with what the self-check states. CPU is the client's, in seconds for
100,000 token events, in the level and with the decoding after it. `late` is the p99 of user time -
kernel time: by so much would the times be wrong without the kernel's. `steal` is the share of both
cores that the hypervisor gave to others, `left out` the runs that had more of it than `--max-steal`
allows.

    python benchmarks/loadgen_accuracy.py --rows 6,7,8          # three of its rows
    python benchmarks/loadgen_accuracy.py --realtime --max-steal 0.5 --peers VENVS --tokenizer DIR \
        --write benchmarks/results/loadgen_accuracy.md          # the page of results, in one go
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import rich.progress
from rich.console import Console

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.host import host_facts
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.workload import LevelSpec
from lmi_bench.jobs.worker import sample_of
from lmi_bench.loadgen.http.native_harvest import Receive, choose_receive
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import SPACING_S, HttpTarget, Timestamps
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, common_words
from lmi_bench.loadgen.run.channel import Job
from lmi_bench.loadgen.run.level_runner import Progress
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.loadgen.run.worker_pool import WorkerPool
from lmi_bench.wire.format import find_format

sys.path.insert(0, str(Path(__file__).parent))

from support.loadgen_verdicts import IN_TURN, verdicts

SUPPORT = Path(__file__).parent / "support"
SERVER_CORE, CLIENT_CORE = 0, 1
RT_RUNTIME = Path("/proc/sys/kernel/sched_rt_runtime_us")
CLIENT_PRIORITY, SERVER_PRIORITY = 1, 2
"""Of SCHED_FIFO: where two workers leave the server no core of its own, it sends first."""


@dataclass(frozen=True)
class Result:
    """One run; errors in %, times in ms, CPU in s for 100,000 events.

    *_error_ms, *_bound_ms  of the p99: by how much it is off, and by how much the self-check says
                            that it may be
    from_read_p99           of the TTFT, had it begun at the server's read of the request
    *_truth_ms              how far below and above the server's own figure the true p99 may lie: a
                            token leaves during the write call, a request came between two readings
                            of the clocks; None: the server does not say
    reported_ms, true_ms    what lmi-bench and the server say: ttft_p50, ttft_p99, itl_p50, itl_p99
    """

    events_per_s: float
    ttft_error_ms: float
    ttft_bound_ms: float | None
    ttft_truth_ms: tuple[float, float] | None
    itl_error_ms: float
    itl_bound_ms: float | None
    itl_truth_ms: tuple[float, float] | None
    ttft_p50: float
    ttft_p99: float
    from_read_p99: float
    itl_p50: float
    itl_p99: float
    throughput: float
    late_p99_ms: float
    merged: float
    server_late_p99_ms: float
    cpu_share: float
    cpu_level: float
    cpu_all: float | None
    valid: bool
    reason: str | None
    receiver: str
    peak_mib: float
    steal: float
    reported_ms: dict[str, float]
    true_ms: dict[str, float]

    @property
    def holds(self) -> bool | None:
        """Whether both bounds are at least the errors, as far as the truth itself is known.

        None: the server does not say when a request arrived.
        """
        if self.ttft_truth_ms is None or self.itl_truth_ms is None:
            return None
        return _meets(self.ttft_error_ms, self.ttft_bound_ms, self.ttft_truth_ms) and _meets(
            self.itl_error_ms, self.itl_bound_ms, self.itl_truth_ms
        )

    @property
    def ttft_truth_error_ms(self) -> float | None:
        """The further end of the true TTFT p99."""
        return None if self.ttft_truth_ms is None else max(self.ttft_truth_ms)

    @property
    def itl_truth_error_ms(self) -> float | None:
        """The further end of the true ITL p99."""
        return None if self.itl_truth_ms is None else max(self.itl_truth_ms)


def _meets(error_ms: float, bound_ms: float | None, truth_ms: tuple[float, float]) -> bool:
    """Whether the reported figure with its bound and the truth with its own have a value in common.

    error_ms  reported - what the server states; the server prints 0.1 us
    """
    if bound_ms is None:
        return True
    below_ms, above_ms = truth_ms
    return -below_ms - bound_ms - 0.001 <= error_ms <= above_ms + bound_ms + 0.001


@dataclass(frozen=True)
class Row:
    """A set-up of the table.

    repeat    runs of it, where --repeat does not say
    ordinary  never real-time, whatever --realtime says
    """

    streams: int
    what: str = ""
    server: str = "c"
    timestamps: Timestamps | None = None
    burn: float = 0.0
    workers: int = 1
    receive: Receive = "auto"
    rounds: int = 3
    repeat: int = 1
    ordinary: bool = False


TABLE = (
    Row(1, rounds=20, repeat=3),
    Row(32, repeat=3),
    Row(128, repeat=3),
    Row(512, repeat=3),
    Row(1024, repeat=3),
    Row(2048, rounds=6, repeat=3),
    Row(2560, rounds=6, repeat=3),
    Row(3072, "past the server's core", rounds=5),
    Row(512, "Python truth server", server="py"),
    Row(512, "user time", timestamps="user"),
    Row(1024, "user time", timestamps="user"),
    Row(1024, "60 % of the core burnt", burn=0.6, repeat=3),
    Row(1024, "60 % burnt, user time", burn=0.6, timestamps="user"),
    Row(512, "two workers, two cores", workers=2, repeat=6),
    Row(1024, "Python receiver", receive="python"),
    Row(2048, "Python receiver", receive="python", rounds=6),
    Row(4096, "past the ceiling"),
    Row(1024, "60 % burnt, ordinary scheduling", burn=0.6, repeat=3, ordinary=True),
    Row(128, "TLS", server="tls", repeat=3),
    Row(512, "TLS", server="tls", repeat=3),
    Row(1024, "TLS", server="tls", repeat=3),
    Row(1536, "TLS", server="tls", rounds=5, repeat=3),
    Row(1536, "TLS, Python receiver", server="tls", receive="python", rounds=5),
)


def call(port: int, path: str, method: str) -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, data=b"{}")
    if method == "GET":
        request.data = None
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def take_cores(*cores: int, realtime: bool = False, priority: int = CLIENT_PRIORITY) -> None:
    """Pin this process to cores; with `realtime`, ahead of every ordinary program there."""
    os.sched_setaffinity(0, cores)
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    elif os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def make_certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1, signed by itself, beside its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=truth",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return certificate


@contextlib.contextmanager
def truth_server(kind: str, folder: Path, port: int, options: argparse.Namespace) -> Iterator[None]:
    """The Python server up to what it can do on time; the C one above it and for TLS."""
    environment = dict(os.environ)
    if kind != "py":
        binary = folder / f"truth_server_{kind}"
        flags = ["-O2", "-w"]
        if kind == "tls":
            flags += ["-DTLS", "-lssl", "-lcrypto"]
            certificate = make_certificate(folder)
            environment |= {"TLS_CERT": str(certificate), "TLS_KEY": str(folder / "key.pem")}
        if not binary.exists():
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                raise SystemExit("a C compiler is needed for the C truth server")
            source = SUPPORT.parents[1] / "lmi_bench/loadgen/http/truth_server.c"
            subprocess.run([compiler, "-o", binary, source, *flags], check=True)
        command = [binary, port, options.ttft_ms, options.itl_ms, options.tokens]
    else:
        command = [sys.executable, SUPPORT / "truth_server.py", "--port", port]
        command += ["--ttft-ms", options.ttft_ms, "--itl-ms", options.itl_ms]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        preexec_fn=lambda: take_cores(SERVER_CORE, realtime=options.realtime, priority=SERVER_PRIORITY),
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
    take_cores(CLIENT_CORE, realtime=realtime)
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
    process = multiprocessing.get_context("spawn").Process(target=burn, args=(share, realtime), daemon=True)
    process.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def unthrottled(realtime: bool) -> Iterator[None]:
    """Real-time tasks may have all of a core, not the usual 95 %: the rest would be a stall."""
    if not realtime or not os.access(RT_RUNTIME, os.W_OK):
        yield
        return
    before = RT_RUNTIME.read_text()
    RT_RUNTIME.write_text("-1")
    print("sched_rt_runtime_us is -1 during these runs.", file=sys.stderr)
    try:
        yield
    finally:
        RT_RUNTIME.write_text(before)


def stolen() -> tuple[int, int]:
    """Ticks that the hypervisor took from all cores since the start, and all ticks."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return ticks[7], sum(ticks)


def peak_mib() -> float:
    """The process's highest memory since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure(port: int, row: Row, rounds: int, options: argparse.Namespace, folder: Path) -> Result:
    """One level through the whole sweep, progress drawn, against what the server says it did."""
    runs: list[LevelRun] = []
    tls = row.server == "tls"
    open_target = functools.partial(
        HttpTarget,
        f"http{'s' if tls else ''}://127.0.0.1:{port}",
        find_format("openai-chat"),
        model="truth-model",
        cacert=str(folder / "certificate.pem") if tls else None,
        timestamps=row.timestamps or options.timestamps,
        native=choose_receive(row.receive, tls=tls).library,
    )
    prompts = SyntheticPrompts([Lengths(64, options.tokens)], common_words, seed=1)
    scenario = parse_scenario(
        {
            "target": f"http://127.0.0.1:{port}",
            "protocol": "openai-chat",
            "model": "truth-model",
            "seed": 1,
            "workload": {"input_tokens": 64, "output_tokens": options.tokens},
            "client": {"timestamps": row.timestamps or options.timestamps, "receive": row.receive},
        }
    )

    async def main() -> None:
        job = Job(scenario.canonical(), {"tokenizer": None, "format": {}}, sample_of(prompts))
        with (
            open(os.devnull, "w") as nowhere,
            drawn_progress(nowhere) as on_progress,
            contextlib.closing(WorkerPool(job, row.workers)) as pool,
        ):
            async with open_target() as target:
                await run_sweep(
                    [LevelSpec(0, Load(concurrency=row.streams), num_requests=row.streams * rounds)],
                    target,
                    None,
                    prompts=prompts,
                    summarise=summarise_level,
                    on_level=lambda run, _: runs.append(run),
                    on_progress=on_progress,
                    spacing_s=SPACING_S,
                    workers=pool,
                )

    call(port, "/truth/reset", "POST")
    forget_peak()
    stolen_before, ticks_before = stolen()
    cpu_s = time.process_time()
    run_on_sockets(main())
    cpu_s = time.process_time() - cpu_s
    stolen_after, ticks_after = stolen()
    steal = (stolen_after - stolen_before) / max(1, ticks_after - ticks_before)
    truth = call(port, "/truth/stats", "GET")
    return compare(runs[0], truth, cpu_s, steal)


@contextlib.contextmanager
def drawn_progress(file: TextIO) -> Iterator[Callable[[Progress], None]]:
    """The progress line of a terminal, drawn into a file."""
    bar = rich.progress.Progress(console=Console(file=file, force_terminal=True))
    with bar:
        task = bar.add_task("", total=1)

        def on_progress(state: Progress) -> None:
            bar.update(task, description=state.label, completed=state.done, total=state.total)

        yield on_progress


def compare(run: LevelRun, truth: dict, cpu_s: float, steal: float) -> Result:
    failed = [record for record in run.records if not record.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0].error}")
    times = [np.asarray(record.token_times_s) for record in run.records]
    ttft_ms = [1e3 * (t[0] - r.sent_s) for t, r in zip(times, run.records, strict=True)]
    itl_ms = np.concatenate([1e3 * np.diff(t) for t in times])
    tokens = sum(len(t) for t in times)
    wall_s = max(t[-1] for t in times) - min(record.sent_s for record in run.records)

    reported_ms = {
        f"{name}_p{q}": float(np.percentile(values, q))
        for name, values in (("ttft", ttft_ms), ("itl", itl_ms))
        for q in (50, 99)
    }

    arrived = truth.get("ttft_from_arrival", truth["ttft"])
    true_ms = {"ttft": arrived, "itl": truth["itl"]}

    def error(name: str, q: int) -> float:
        return 100 * (reported_ms[f"{name}_p{q}"] / true_ms[name][f"p{q}_ms"] - 1)

    check, cpu_share = run.check, run.check.cpu_share or 0.0
    return Result(
        events_per_s=tokens / wall_s,
        ttft_error_ms=reported_ms["ttft_p99"] - arrived["p99_ms"],
        ttft_bound_ms=check.ttft_error_bound_ms,
        ttft_truth_ms=unsure_ms(arrived),
        itl_error_ms=reported_ms["itl_p99"] - truth["itl"]["p99_ms"],
        itl_bound_ms=check.itl_error_bound_ms,
        itl_truth_ms=unsure_ms(truth["itl"]),
        ttft_p50=error("ttft", 50),
        ttft_p99=error("ttft", 99),
        from_read_p99=100 * (reported_ms["ttft_p99"] / truth["ttft"]["p99_ms"] - 1),
        itl_p50=error("itl", 50),
        itl_p99=error("itl", 99),
        throughput=100 * (tokens / wall_s / truth["tokens_per_s"] - 1),
        late_p99_ms=1e3 * (check.receive_delay_p99_s or 0.0),
        merged=check.merged_share or 0.0,
        server_late_p99_ms=truth["lateness"]["p99_ms"],
        cpu_share=cpu_share,
        cpu_level=cpu_share * wall_s / tokens * 1e5,
        cpu_all=cpu_s / tokens * 1e5 if check.workers == 1 else None,
        valid=check.valid is True,
        reason=check.reason,
        receiver=check.receiver or "",
        peak_mib=peak_mib(),
        steal=100 * steal,
        reported_ms=reported_ms,
        true_ms={f"{name}_p{q}": true_ms[name][f"p{q}_ms"] for name in true_ms for q in (50, 99)},
    )


def unsure_ms(stated: dict) -> tuple[float, float] | None:
    """How far below and above the stated p99 the true one may lie, if the server knows."""
    if "p99_low_ms" not in stated:
        return None
    return (max(0.0, stated["p99_ms"] - stated["p99_low_ms"]), max(0.0, stated["p99_high_ms"] - stated["p99_ms"]))


PREFACE = """# Accuracy of the load generator

Printed by `python benchmarks/loadgen_accuracy.py --realtime --max-steal 0.5 --peers ... --write
FILE`. TTFT 200 ms, ITL 20 ms, 64 tokens, three requests a stream or more, sends paced; server on
one core, client on the other, the whole `sweep` with progress drawn. Medians of the runs. Errors
are reported / true - 1 of the same quantile. The true time to first token runs from the request's
arrival in the server's kernel: what it then waits to be read is the server's time, not the
client's error; "from read" counts it as one (the Python server knows no other start). "off" is the
error in ms and what the bound is held against ("holds": in every run). "truth +-": how
far the server's own p99 may be off, since a token leaves at some moment of the write call and an
arrival is known between two readings of the clock. CPU: the client's seconds for 100,000 token
events, in the level and with the decoding after it. "late": p99 of user time - kernel time, by so
much would the times be wrong without the kernel's. Runs from which the hypervisor took more than
--max-steal % of the cores are left out and made again.
`sched_rt_runtime_us` is -1 meanwhile: real-time tasks may otherwise have 95 % of a core, and the
rest is a stall of 50 ms in each second. The server's priority is the higher: two workers leave it
no core of its own, and a token that it sends late is late for whoever measures.
"""

COLUMNS = (
    ("events/s", "events_per_s", "{:,.0f}"),
    ("TTFT p50 %", "ttft_p50", "{:+.2f}"),
    ("TTFT p99 %", "ttft_p99", "{:+.2f}"),
    ("from read", "from_read_p99", "{:+.2f}"),
    ("ITL p50 %", "itl_p50", "{:+.2f}"),
    ("ITL p99 %", "itl_p99", "{:+.2f}"),
    ("tok/s %", "throughput", "{:+.2f}"),
    ("TTFT p99 off, ms", "ttft_error_ms", "{:+.3f}"),
    ("bound", "ttft_bound_ms", "{:.3f}"),
    ("truth +-", "ttft_truth_error_ms", "{:.3f}"),
    ("ITL p99 off, ms", "itl_error_ms", "{:+.3f}"),
    ("bound", "itl_bound_ms", "{:.3f}"),
    ("truth +-", "itl_truth_error_ms", "{:.3f}"),
    ("holds", "holds", ""),
    ("late ms", "late_p99_ms", "{:.2f}"),
    ("merged", "merged", "{:.4f}"),
    ("server late ms", "server_late_p99_ms", "{:.2f}"),
    ("share", "cpu_share", "{:.2f}"),
    ("CPU", "cpu_level", "{:.2f}"),
    ("+ decoding", "cpu_all", "{:.2f}"),
    ("peak MiB", "peak_mib", "{:.0f}"),
    ("steal %", "steal", "{:.1f}"),
    ("receiver", "receiver", "{}"),
    ("valid", "valid", ""),
)


def cells(results: list[Result]) -> list[str]:
    """Medians over the runs; a yes only if every run says so."""
    shown = []
    for _, name, pattern in COLUMNS:
        values = [getattr(result, name) for result in results]
        if None in values:
            shown.append("n/a")
        elif not pattern:
            shown.append("yes" if all(values) else "no")
        elif pattern == "{}":
            shown.append("/".join(sorted(set(values))))
        else:
            shown.append(pattern.format(statistics.median(values)))
    return shown


def runs_of(rows: Sequence[Row], options: argparse.Namespace, folder: Path) -> Iterator[tuple[list[Result], int]]:
    """Of each row the runs that count, and how many did not: too much of the machine was stolen.

    What a hypervisor takes from the client for longer than a token's gap merges tokens, whatever
    the client does. After four times as many as are wanted, whatever comes counts. Several rows are
    measured in turn, since the machine drifts between one row and the next.
    """
    results: list[list[Result]] = [[] for _ in rows]
    left_out = [0 for _ in rows]
    repeat = options.repeat or rows[0].repeat
    while any(len(kept) < repeat for kept in results):
        for index, row in enumerate(rows):
            if len(results[index]) == repeat:
                continue
            cores = (CLIENT_CORE,) if row.workers == 1 else (SERVER_CORE, CLIENT_CORE)
            take_cores(*cores, realtime=options.realtime)
            result = measure(options.port, row, row.rounds, options, folder)
            if result.steal > options.max_steal and left_out[index] < 4 * repeat:
                left_out[index] += 1
            else:
                results[index].append(result)
    return zip(results, left_out, strict=True)


def rows_of(options: argparse.Namespace) -> list[Row]:
    if options.streams is None:
        numbers = [int(text) for text in options.rows.split(",")] if options.rows else []
        return [TABLE[number - 1] for number in numbers] or list(TABLE)
    return [
        Row(
            int(text),
            server=options.server,
            burn=options.burn,
            workers=options.workers,
            receive=options.receive,
            rounds=options.rounds,
        )
        for text in options.streams.split(",")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", help="such as 512,1024: these instead of the whole table")
    parser.add_argument("--server", choices=("py", "c", "tls"), default="c")
    parser.add_argument("--rows", help="such as 1,2,6: these rows of the table alone")
    parser.add_argument(
        "--max-steal",
        type=float,
        default=100.0,
        help="%% of both cores; a run from which the hypervisor took more is made again",
    )
    parser.add_argument("--receive", choices=("auto", "native", "python"), default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream")
    parser.add_argument("--repeat", type=int, help="runs, of which medians are printed")
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--timestamps", choices=("kernel", "user"))
    parser.add_argument("--workers", type=int, default=1, help="with two, on both cores")
    parser.add_argument("--burn", type=float, default=0.0, help="share of the core taken by others")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="SCHED_FIFO for server and client: for a machine on which other programs run",
    )
    parser.add_argument("--write", type=Path, help="this Markdown file, with what it shows")
    parser.add_argument("--peers", type=Path, help="folder of the peers' virtual environments")
    parser.add_argument("--tokenizer", type=Path, help="any small tokenizer's folder, for them")
    parser.add_argument("--port", type=int, default=18411)
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two cores are needed: one for the server, one for the client")
    if (options.peers is None) != (options.tokenizer is None):
        raise SystemExit("--peers and --tokenizer go together")
    page = Page(options.write)
    page.add(machine(realtime=options.realtime))
    titles = ["streams", "set-up", *(title for title, _, _ in COLUMNS), "runs", "left out"]
    page.add("| " + " | ".join(titles) + " |")
    page.add("|" + "---:|" * len(titles))
    measured: list[tuple[Row, list[Result]]] = []
    with tempfile.TemporaryDirectory() as folder, unthrottled(options.realtime):
        for row in rows_of(options):
            here = argparse.Namespace(**vars(options))
            here.realtime = options.realtime and not row.ordinary
            rows = (row, replace(row, what=IN_TURN, workers=1)) if row.workers == 2 else (row,)
            with truth_server(row.server, Path(folder), here.port, here), burnt_core(row.burn, here.realtime):
                runs = list(runs_of(rows, here, Path(folder)))
            for part, (results, left_out) in zip(rows, runs, strict=True):
                shown = [str(part.streams), part.what, *cells(results)]
                page.add("| " + " | ".join([*shown, str(len(results)), str(left_out)]) + " |")
                measured.append((part, results))
    for row, results in measured:
        for reason in sorted({result.reason for result in results if result.reason}):
            page.add(f"\nInvalid: {row.streams} {row.what}: {reason}.")
    page.add("\n## What was asked, and what was measured\n")
    for line in verdicts(measured):
        page.add(line)
    if options.peers is not None:
        take_cores(*range(os.cpu_count() or 1))
        add_peers(page, options)


def machine(*, realtime: bool) -> str:
    """The machine, as a page states it."""
    scheduling = "SCHED_FIFO" if realtime else "ordinary scheduling"
    return (
        f"{host_facts()['cpu']}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {scheduling}; load average {os.getloadavg()[0]:.1f} "
        "before the first run.\n"
    )


class Page:
    """Lines that are printed as they come, and written to a file if there is one."""

    def __init__(self, path: Path | None, preface: str = PREFACE) -> None:
        self._path = path
        self._lines = [] if path is None else [preface]

    def add(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)
        if self._path is not None:
            self._path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")


def add_peers(page: Page, options: argparse.Namespace) -> None:
    """Other load generators, on the same cores against the same server."""
    from support import loadgen_peers

    page.add("\n## Other tools, the same server, 512 streams on one core\n")
    page.add(
        "Three requests a stream, each tool's own defaults, one run each; the C server, so no "
        "wait in it to speak of. TPOT where a tool reports no gaps between tokens. The row of "
        "512 streams above is ours.\n"
    )
    for line in loadgen_peers.table(options.peers, options.tokenizer, options.port + 1):
        page.add(line)


if __name__ == "__main__":
    main()
