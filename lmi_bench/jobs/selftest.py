"""What `selftest` does: measures servers whose true behaviour is known, and breaks its own runs.

Each check runs sweeps as a user does. The truth server (`truth_server.c`) states when it sent each
token by the clock of this machine; `FaultyServer` states which faults it sent.
"""

import contextlib
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.level import Level
from lmi_bench.core.listener import Listener, Silent
from lmi_bench.core.native_build import NativeUnavailableError, library
from lmi_bench.core.run_store import LEVELS, REQUESTS, load_run
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.units import MS_PER_S, plural
from lmi_bench.jobs.doctor import Finding
from lmi_bench.jobs.faulty_server import FAULTS, MODEL, FaultyServer, faulty_server
from lmi_bench.jobs.settings.setup import SelftestSettings
from lmi_bench.jobs.sweep.run import SweepOptions, sweep_scenario
from lmi_bench.loadgen.http.native_harvest import SOURCE
from lmi_bench.loadgen.http.target import SPARE_DESCRIPTORS

TRUTH_SERVER: Final = replace(
    SOURCE,
    path=SOURCE.path.with_name("truth_server.c"),
    what="the truth server",
    flags=("-O2", "-w"),  # a program, not a library
)
MAX_ERROR: Final = 0.01  # of TTFT and ITL, p50 and p99
_TTFT_MS, _ITL_MS, _TOKENS = 200, 20, 64
_STREAMS: Final = 16, 64, 256, 512, 1024, 2048, 4096
_ROUNDS: Final = 3  # requests a user
_BURNERS: Final = 4  # busy processes on the load generator's core, where a level has to be invalid
_LEVELS: Final = 1, 2, 3, 4  # of a sweep that is broken off
_REQUESTS: Final = 24  # in each of its levels
_TMPFS_KIB: Final = 40  # has room for its first level, and not for all
_LIMIT_S: Final = 60.0


@dataclass(slots=True)
class SelfTest:
    """The checks so far. streams, tokens_per_s: of the highest level that was measured right."""

    findings: list[Finding] = field(default_factory=list)
    streams: int = 0
    tokens_per_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(each.state == "fail" for each in self.findings)

    @property
    def verdict(self) -> str:
        """What this machine can measure, in a sentence."""
        if not self.streams:
            return "this machine is not shown to measure TTFT and ITL within 1 %"
        return (
            f"this machine measures up to {self.streams:,} streams, {self.tokens_per_s:,.0f} "
            "tokens/s, with TTFT and ITL within 1 %"
        )

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "verdict": self.verdict,
            "streams": self.streams,
            "tokens_per_s": self.tokens_per_s,
            "findings": [
                {"check": each.check, "state": each.state, "found": each.found, "mend": each.mend}
                for each in self.findings
            ],
        }


class _OnlyProgress(Silent):
    """Passes on how far a check's sweep is, and not its notes."""

    def __init__(self, check: str, listener: Listener) -> None:
        self._check, self._listener = check, listener

    def progress(self, description: str, done: float, total: float | None) -> None:  # type: ignore[override]
        """The sweep's progress, after the check's name."""
        self._listener.progress(f"{self._check}: {description}", done, total)


def selftest(settings: SelftestSettings, listener: Listener) -> SelfTest:
    """Run the checks; about two minutes."""
    result = SelfTest()
    checks: dict[str, Callable[[Path, Listener], tuple[bool, str, str]]] = {
        "accuracy": functools.partial(_accuracy, result, settings.streams),
        "starved": functools.partial(_starved, result),
        "faults": _faults,
        "kill and resume": _kill,
        "disk full": _disk_full,
    }
    for name, check in checks.items():
        listener.step(f"{name} ...")
        with tempfile.TemporaryDirectory(prefix="lmi-bench-") as folder:
            try:
                is_ok, found, mend = check(Path(folder), _OnlyProgress(name, listener))
            except NativeUnavailableError as exc:
                mend = f"Install a C compiler such as gcc, or name one in {SOURCE.variable}."
                finding = Finding(name, "warn", f"not checked: {exc}", mend)
            except (LmiBenchError, OSError, subprocess.SubprocessError) as exc:
                finding = Finding(name, "fail", str(exc), "Report this with `doctor`'s answer.")
            else:
                finding = Finding(name, "ok" if is_ok else "fail", found, "" if is_ok else mend)
        result.findings.append(finding)
    return result


# ----- true times


@contextlib.contextmanager
def truth_server() -> Iterator[str]:
    """The truth server's URL; it has a core of its own if this process may use two."""
    program = [library(TRUTH_SERVER), 0, _TTFT_MS, _ITL_MS, _TOKENS]  # raises where epoll is not
    cores = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(  # noqa: S603  our own program, no shell
        list(map(str, program)), stdout=subprocess.PIPE
    ) as process:
        try:
            if len(cores) > 1:
                os.sched_setaffinity(process.pid, cores[-1:])
                os.sched_setaffinity(0, cores[:-1])
            assert process.stdout is not None
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            os.sched_setaffinity(0, cores)
            process.kill()


def _truth(url: str, path: str) -> Any:
    data = None if path == "stats" else b"{}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/truth/{path}", data, timeout=_LIMIT_S) as reply:
        return json.load(reply)


def _measured(
    url: str, streams: int, folder: Path, listener: Listener
) -> tuple[Level, float, dict[str, Any]]:
    """A level, the largest relative error of its TTFT and ITL, and the truth."""
    _truth(url, "reset")
    found = _sweep(url, "openai-chat", folder, listener, streams, requests=_ROUNDS * streams)
    truth = _truth(url, "stats")
    records = [record for record in load_run(found).records[0] if record.ok]
    times = [np.asarray(record.token_times_s) for record in records]
    ttft = [at[0] - record.sent_s for at, record in zip(times, records, strict=True)]
    itl = np.concatenate([np.diff(at) for at in times])
    worst = 0.0
    for values, true in ((ttft, truth["ttft_from_arrival"]), (itl, truth["itl"])):
        p50, p99 = MS_PER_S * np.percentile(values, (50, 99))
        nearest = min(max(p99, true["p99_low_ms"]), true["p99_high_ms"])
        worst = max(worst, abs(p50 / true["p50_ms"] - 1), abs(p99 / nearest - 1))
    return load_run(found).levels[0], worst, truth


def _sweep(
    url: str, protocol: str, folder: Path, listener: Listener, streams: int, **more: Any
) -> Path:
    """The run folder of a sweep of one level."""
    scenario = parse_scenario(
        {
            "target": url,
            "protocol": protocol,
            "model": MODEL,
            "workload": {"input_tokens": 16, "output_tokens": _TOKENS},
            "load": {
                "concurrency": [streams],
                "requests_per_level": more["requests"],
                "warmup_requests": 0,
            },
            "timeout_s": more.get("timeout_s"),
        }
    )
    options = SweepOptions(max_error_share=None)
    return sweep_scenario(scenario, options, listener, out=folder / f"run-{streams}").folder


def _accuracy(
    result: SelfTest, most: int, folder: Path, listener: Listener
) -> tuple[bool, str, str]:
    """Doubles the streams until times are wrong, the self-check says invalid, or files run out."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends, tried = "", [each for each in _STREAMS if each <= min(most, files - SPARE_DESCRIPTORS)]
    with truth_server() as url:
        for streams in tried:
            level, error, truth = _measured(url, streams, folder, listener)
            seen = f"{streams:,} streams, {truth['tokens_per_s']:,.0f} tokens/s: off by {error:.2%}"
            if _is_wrong(level, error):
                return False, f"{seen}, said to be valid", "Report this: a wrong level passed."
            if error > MAX_ERROR or not level.generator.valid:
                ends = f"{seen}, said to be {_judged(level)}"
                break
            result.streams, result.tokens_per_s = streams, truth["tokens_per_s"]
            best = seen
    if not result.streams:
        return False, ends, "End other programs, or take cores of its own; see `doctor`."
    return True, f"{best}; {ends or 'no more were tried'}", ""


def _is_wrong(level: Level, error: float) -> bool:
    """Whether a level passes as valid and is off by more than it says of itself."""
    check = level.generator
    stated = max(check.ttft_error_bound_frac or 0.0, check.itl_error_bound_frac or 0.0)
    return bool(check.valid) and error > max(MAX_ERROR, stated)


def _judged(level: Level) -> str:
    return "valid" if level.generator.valid else f"invalid ({level.generator.reason})"


def _starved(result: SelfTest, folder: Path, listener: Listener) -> tuple[bool, str, str]:
    """Busy processes take the load generator's cores: the level may not pass as valid and wrong."""
    streams = max(result.streams, _STREAMS[0])
    with truth_server() as url, contextlib.ExitStack() as burning:
        for _ in range(_BURNERS * len(os.sched_getaffinity(0))):
            process = subprocess.Popen([sys.executable, "-Sc", "while True: pass"])
            burning.callback(process.wait)
            burning.callback(process.kill)
        level, error, _ = _measured(url, streams, folder, listener)
    found = (
        f"{streams:,} streams, {_BURNERS} busy processes a core: off by {error:.2%}, said to be "
    )
    return not _is_wrong(level, error), found + _judged(level), "Report this: a wrong level passed."


# ----- faults


def _faults(folder: Path, listener: Listener) -> tuple[bool, str, str]:
    """Every fault that the server sends is named in the record of its request."""
    with faulty_server(faults=True) as server:
        requests = 3 * len(FAULTS)
        run = _sweep(server.url, "openai", folder, listener, 4, requests=requests, timeout_s=1.0)
        sent = server.sent
    named = Counter(record.status for record in load_run(run).records[0])
    wrong = [f"{kind}: {sent[kind]} sent, {named[kind]} named" for kind in sent | named]
    wrong = [
        text for text, kind in zip(wrong, sent | named, strict=True) if sent[kind] != named[kind]
    ]
    kinds = ", ".join(kind for kind in FAULTS if kind != "ok")
    found = f"{sent.total() - sent['ok']} of {len(FAULTS) - 1} kinds, named as sent: {kinds}"
    return not wrong, "; ".join(wrong) or found, "Report this: a fault has another name."


# ----- broken off runs


def _command(server: FaultyServer, run: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "lmi_bench", "sweep", server.url, "--protocol", "openai"),
        *("--model", MODEL, "--isl", "16", "--osl", "16", "--out", str(run), *more),
        *("--concurrency", ",".join(map(str, _LEVELS)), "--requests-per-level", str(_REQUESTS)),
    ]


def _finished(run: Path) -> dict[str, list[bytes]]:
    """The whole lines of the run's two growing files, those of finished levels first."""
    whole = {}
    for name in (LEVELS, REQUESTS):
        data = (run / name).read_bytes() if (run / name).exists() else b""
        whole[name] = data.split(b"\n")[:-1]
    whole[REQUESTS] = whole[REQUESTS][: _REQUESTS * len(whole[LEVELS])]
    return whole


def _resumed(server: FaultyServer, run: Path) -> tuple[bool, str]:
    """Whether `--resume` keeps what was finished, byte for byte, and ends the sweep."""
    kept = _finished(run)
    done = _run(_command(server, run, "--resume"))
    now, levels = _finished(run), len(kept[LEVELS])
    if done.returncode or len(now[LEVELS]) != len(_LEVELS):
        return False, f"exit {done.returncode}, {len(now[LEVELS])} levels: {_last(done)}"
    if any(now[name][: len(lines)] != lines for name, lines in kept.items()):
        return False, "a finished level was changed"
    return True, f"{plural(levels, 'finished level')} of {len(_LEVELS)} kept byte for byte"


def _run(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  our own command, no shell
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, **more
    )


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [""])[-1]


def _kill(folder: Path, listener: Listener) -> tuple[bool, str, str]:
    """SIGKILL in the third level; then the sweep goes on."""
    run = folder / "run"
    with faulty_server(token_s=0.005) as server:
        process = subprocess.Popen(  # noqa: S603  our own command, no shell
            _command(server, run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until_s = time.monotonic() + _LIMIT_S
        while len(_finished(run)[LEVELS]) < 2 and process.poll() is None:
            if time.monotonic() > until_s:
                break
            listener.progress("a sweep that will be killed", len(_finished(run)[LEVELS]), 2)
            time.sleep(0.02)
        process.kill()
        process.wait()
        is_ok, found = _resumed(server, run)
    return is_ok, f"SIGKILL in mid-sweep: {found}", "Report this: a run was damaged."


def _disk_full(folder: Path, listener: Listener) -> tuple[bool, str, str]:
    """The disk takes no more in mid-sweep; with room again, the sweep goes on."""
    disk, run = folder / "disk", folder / "run"
    disk.mkdir()
    with faulty_server() as server:
        listener.progress("a sweep on a small disk", 0, None)
        script = (
            f'mount -t tmpfs -o size={_TMPFS_KIB}k lmi-bench "$0" || exit 77; from=$0 to=$1; '
            'shift; "$@"; code=$?; cp -r "$from/run" "$to"; exit $code'
        )
        what = f"a tmpfs of {_TMPFS_KIB} KiB"
        unshare = shutil.which("unshare") or "unshare"
        inside = _command(server, disk / "run")
        try:
            done = _run([unshare, "-rm", "sh", "-c", script, str(disk), str(run), *inside])
        except FileNotFoundError:
            done = subprocess.CompletedProcess([], 77)
        if done.returncode == 77 or not run.exists():
            what = f"files of at most {_TMPFS_KIB} KiB (RLIMIT_FSIZE: no tmpfs can be mounted here)"
            limit = _TMPFS_KIB * 1024
            done = _run(
                _command(server, run),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            )
        if done.returncode != 1 or "make room" not in done.stderr or "Trace" in done.stderr:
            return False, f"{what}: exit {done.returncode}, {_last(done)}", "Report this."
        is_ok, found = _resumed(server, run)
    return is_ok, f"{what} filled: one line says so; {found}", "Report this: a run was damaged."
