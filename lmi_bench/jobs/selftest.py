"""What `selftest` does: measures a server of known times and faults, and breaks its own runs.

The truth server (`loadgen/http/truth_server.c`) states when it sent each token by this machine's
clock. Each check runs sweeps as a user does.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from lmi_bench.core.host import usable_cores
from lmi_bench.core.listener import SILENT, Listener, Silent
from lmi_bench.core.native_build import RECEIVER, library
from lmi_bench.core.run_store import LEVELS, REQUESTS, Run, load_run
from lmi_bench.core.units import MS_PER_S, plural
from lmi_bench.jobs.doctor import Finding, Outcome, finding
from lmi_bench.jobs.face import sweep
from lmi_bench.jobs.settings.setup import SelftestSettings
from lmi_bench.loadgen.ask.probe import Probe
from lmi_bench.loadgen.http.target import SPARE_DESCRIPTORS

TRUTH_SERVER: Final = replace(
    RECEIVER,
    path=RECEIVER.path.with_name("truth_server.c"),
    what="the truth server",
    flags=("-O2", "-w"),  # a program, not a library
)
MAX_ERROR: Final = 0.01  # of TTFT and ITL, p50 and p99
_TRUTH_MS: Final = 0.1  # a token leaves during the server's write, not at one instant
FAULTS: Final = (
    "ok",
    "broken_stream",
    "timeout",
    "malformed_frame",
    "short_output",
    "throttled",
    "overloaded",
    "server_error",
)
"""What the truth server sends in turn, as the records have to name it."""
_TTFT_MS, _ITL_MS, _TOKENS = 200, 20, 64
_STREAMS: Final = 16, 64, 256, 512, 1024, 2048, 4096
_ROUNDS: Final = 3  # requests of a user, or of each kind of fault
_BURNERS: Final = 4  # busy processes a core, where a level has to be invalid
_BURN: Final = "import os; ours = os.getppid()\nwhile os.getppid() == ours: pass"
_LEVELS, _REQUESTS = 4, 800  # of a sweep that is broken off
_SWEEP: Final = (
    *(sys.executable, "-m", "lmi_bench", "sweep", "sim:ml.g5.2xlarge", "--model", "qwen3-8b"),
    *("--isl", "16", "--osl", "16", "--concurrency", ",".join(map(str, range(1, _LEVELS + 1)))),
    *("--requests-per-level", str(_REQUESTS), "--out"),
)
_DISK_KIB: Final = 1024  # room for its first level, and not for all
_ON_A_DISK: Final = (
    f'mount -t tmpfs -o size={_DISK_KIB}k lmi-bench "$0" || exit 77; from=$0 to=$1; shift; "$@"; '
    'code=$?; cp -r "$from/run" "$to"; exit $code'
)
_LIMIT_S: Final = 60.0


@dataclass(slots=True)
class SelfTest:
    """The checks so far. streams, tokens_per_s: of the highest level that was measured right."""

    findings: list[Finding] = field(default_factory=list)
    streams: int = 0
    tokens_per_s: float = 0.0


def selftest(settings: SelftestSettings, listener: Listener) -> SelfTest:
    """Run the checks; about two minutes."""
    result = SelfTest()
    checks: dict[str, Callable[[Path], Outcome]] = {
        "accuracy": partial(_accuracy, result, settings.streams, listener),
        "starved": partial(_starved, result),
        "faults": _faults,
        "kill and resume": _kill,
        "disk full": _disk_full,
    }
    for number, (name, check) in enumerate(checks.items()):
        listener.step(f"{name} ...")
        listener.progress(name, number, len(checks))
        with tempfile.TemporaryDirectory(prefix="lmi-bench-") as folder:
            result.findings.append(finding(name, partial(check, Path(folder)), "fail"))
    return result


def _passed(is_ok: bool, found: str, mend: str) -> Outcome:
    return ("ok", found, "") if is_ok else ("fail", found, mend)


@contextlib.contextmanager
def truth_server(*faults: str) -> Iterator[str]:
    """The truth server's URL; on Linux with a core of its own if this process may use two."""
    program = [library(TRUTH_SERVER), 0, _TTFT_MS, _ITL_MS, _TOKENS, "127.0.0.1", *faults]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with subprocess.Popen(list(map(str, program)), stdout=subprocess.PIPE) as process:  # noqa: S603
        try:
            if sys.platform == "linux" and len(cores) > 1:
                os.sched_setaffinity(process.pid, cores[-1:])
                os.sched_setaffinity(0, cores[:-1])
            assert process.stdout is not None
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            if sys.platform == "linux":
                os.sched_setaffinity(0, cores)
            process.kill()


@dataclass
class _Examined(Silent):
    """Empties the server's statistics when the sweep names its target: it has examined it then."""

    server: Probe

    def note(self, *args: object, **named: object) -> None:
        if str(args[0]).startswith("target: "):
            self.server.get("/truth/reset", "POST")


def _sweep(
    url: str, folder: Path, streams: int, requests: int, *, timeout_s: float = _LIMIT_S, listener: Listener = SILENT
) -> Run:
    """The run of one level on the truth server."""
    found = sweep(
        target=url,
        protocol="openai-chat",
        model="truth-model",
        concurrency=streams,
        input_tokens=16,
        output_tokens=_TOKENS,
        requests_per_level=requests,
        warmup_requests=0,
        timeout=timeout_s,
        max_errors="none",
        out=folder / f"run-{streams}",
        listener=listener,
    )
    if found.interrupted:
        raise KeyboardInterrupt
    return load_run(found.folder)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A level against the truth.

    error     largest relative error of the TTFT and ITL that the level reports, p50 and p99
    is_wrong  one is off by more than 1 %, and by more than the level says of itself
    """

    error: float
    is_wrong: bool
    is_valid: bool
    text: str
    tokens_per_s: float


def _measured(url: str, streams: int, folder: Path) -> _Measured:
    """Measure a level. Compared are all requests: the server does not know a level's first ones."""
    server = Probe(url, {})
    run = _sweep(url, folder, streams, _ROUNDS * streams, listener=_Examined(server))
    truth, level = server.get("/truth/stats").json_object(), run.levels[0]
    times = [record.token_times_s for record in run.records[0] if record.ok]
    sent_s = [record.sent_s for record in run.records[0] if record.ok]
    ttft_s = [at[0] - begin_s for at, begin_s in zip(times, sent_s, strict=True)]
    check, error, is_wrong = level.generator, 0.0, False
    for metric, values_s, true, bounds_ms in (
        ("ttft", ttft_s, truth["ttft_from_arrival"], (check.ttft_p50_error_bound_ms, check.ttft_error_bound_ms)),
        (
            "itl",
            np.concatenate([*map(np.diff, times)]),
            truth["itl"],
            (check.itl_p50_error_bound_ms, check.itl_error_bound_ms),
        ),
    ):
        for q, bound_ms in zip((50, 99), bounds_ms, strict=True):
            if level.of(metric).value(f"p{q}") is None:
                continue  # withheld
            true_ms = true[f"p{q}_ms"]
            off_ms = abs(MS_PER_S * np.percentile(values_s, q) - true_ms)
            error = max(error, off_ms / true_ms)
            is_wrong |= off_ms > max(MAX_ERROR * true_ms, (bound_ms or 0.0) + _TRUTH_MS)
    judged = "valid" if check.valid else f"invalid ({check.reason})"
    rate = truth["tokens_per_s"]
    text = f"{streams:,} streams, {rate:,.0f} tokens/s: off by {error:.2%}, said to be {judged}"
    return _Measured(error, bool(is_wrong and check.valid), bool(check.valid), text, rate)


def _accuracy(result: SelfTest, most: int, listener: Listener, folder: Path) -> Outcome:
    """Raises the streams until times are wrong, the self-check says invalid, or files run out."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    best, ends = "", "no more were tried"
    with truth_server() as url:
        for streams in _STREAMS:
            if streams > min(most, files - SPARE_DESCRIPTORS):
                break
            listener.progress(f"accuracy, {streams:,} streams", _STREAMS.index(streams), None)
            found = _measured(url, streams, folder)
            if found.is_wrong:
                return "fail", found.text, "Report this: a wrong level passed."
            if found.error > MAX_ERROR or not found.is_valid:
                ends = found.text
                break
            result.streams, result.tokens_per_s = streams, found.tokens_per_s
            best = f"{found.text}; "
    return _passed(bool(best), best + ends, "End other programs; see `doctor`.")


def _starved(result: SelfTest, folder: Path) -> Outcome:
    """Busy processes take the load generator's cores: the level may not pass as valid and wrong."""
    with truth_server() as url, contextlib.ExitStack() as burning:
        for _ in range(_BURNERS * usable_cores()):
            process = subprocess.Popen([sys.executable, "-Sc", _BURN])  # noqa: S603
            burning.callback(process.wait)
            burning.callback(process.kill)
        found = _measured(url, max(result.streams, _STREAMS[0]), folder)
    text = f"{_BURNERS} busy processes a core, {found.text}"
    return _passed(not found.is_wrong, text, "Report this: a wrong level passed.")


def _faults(folder: Path) -> Outcome:
    """Every fault that the server sends is named in the record of its request."""
    users = _ROUNDS * len(FAULTS)  # all at once: the first time-out ends the level
    with truth_server("faults") as url:
        records = _sweep(url, folder, users, users, timeout_s=3.0).records[0]
    named, sent = Counter(record.status for record in records), len(records) // len(FAULTS)
    wrong = [
        f"{kind}: {sent if kind in FAULTS else 0} sent, {named[kind]} named"
        for kind in dict.fromkeys((*FAULTS, *named))
        if named[kind] != sent or kind not in FAULTS
    ]
    kinds = f"{len(FAULTS) - 1} kinds named as sent: {', '.join(FAULTS[1:])}"
    return _passed(not wrong, "; ".join(wrong) or kinds, "Report this: a fault has another name.")


def _run(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  our own command, no shell
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, **more
    )


def _finished(run: Path) -> dict[str, list[bytes]]:
    """The whole lines of the run's two growing files, of requests those of finished levels."""
    whole = {
        name: (run / name).read_bytes().split(b"\n")[:-1] if (run / name).exists() else []
        for name in (LEVELS, REQUESTS)
    }
    ended = sum(json.loads(line)["requests"] for line in whole[LEVELS])
    return {**whole, REQUESTS: whole[REQUESTS][:ended]}


def _resumed(run: Path, what: str) -> Outcome:
    """Whether `--resume` keeps what was finished, byte for byte, and ends the sweep."""
    kept = _finished(run)
    done, now = _run([*_SWEEP, str(run), "--resume"]), _finished(run)
    found = f"{plural(len(kept[LEVELS]), 'finished level')} of {_LEVELS} kept byte for byte"
    if done.returncode or len(now[LEVELS]) != _LEVELS:
        found = f"exit {done.returncode}, {len(now[LEVELS])} levels, {done.stderr[-200:]}"
    elif any(now[name][: len(lines)] != lines for name, lines in kept.items()):
        found = "a finished level was changed"
    is_ok = found.endswith("byte for byte")
    return _passed(is_ok, f"{what}: {found}", "Report this: a run was damaged.")


def _kill(folder: Path) -> Outcome:
    """SIGKILL after the first level; then the sweep goes on."""
    run, until_s = folder / "run", time.monotonic() + _LIMIT_S
    with subprocess.Popen(  # noqa: S603  our own command, no shell
        [*_SWEEP, str(run)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while not _finished(run)[LEVELS] and process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.005)
        process.kill()
    return _resumed(run, "SIGKILL in mid-sweep")


def _disk_full(folder: Path) -> Outcome:
    """The disk takes no more in mid-sweep; with room again, the sweep goes on."""
    disk, run, limit = folder / "disk", folder / "run", 1024 * _DISK_KIB
    disk.mkdir()
    what = f"a tmpfs of {_DISK_KIB} KiB filled"
    own_disk = (shutil.which("unshare") or "", "-rm", "sh", "-c", _ON_A_DISK, str(disk), str(run))
    done = _run([*own_disk, *_SWEEP, str(disk / "run")]) if own_disk[0] else None
    if done is None or not run.exists():
        what = f"files limited to {_DISK_KIB} KiB (RLIMIT_FSIZE; no tmpfs can be mounted here)"
        limits = (resource.RLIMIT_FSIZE, (limit, limit))
        done = _run([*_SWEEP, str(run)], preexec_fn=lambda: resource.setrlimit(*limits))
    if done.returncode != 1 or "make room" not in done.stderr or "Traceback" in done.stderr:
        return "fail", f"{what}: exit {done.returncode}, {done.stderr[-200:]}", "Report this."
    return _resumed(run, what)
