"""A real engine on this machine: six levels calibrate, others are predicted and then compared.

    python benchmarks/real_engine.py --out RUNS --engine bundled
    python benchmarks/real_engine.py --out RUNS --engine vllm --python PATH/TO/python
    python benchmarks/real_engine.py --out RUNS --engine URL
    python benchmarks/real_engine.py --judge RUNS ...      prints the tables of folders made above

Every step is the program's own: `sweep` measures each level, `calibrate` fits a profile to the six
on the machine `local`, `validate --profile` predicts the others: other concurrencies, other lengths
of prompt and answer, open loops. vLLM is started from its CPU build (extra `peers`) and stopped.
A first level is measured and left out. The six are measured twice, among the others and once more
at the end, so that a machine that changes slowly does so for both; how far it has is printed. The
machine must be idle: what other processes and the host of a virtual machine take is measured beside
each level, and a level that more than 10 % was taken from is measured again, up to three times; the
least disturbed time counts. Before each it waits, ten minutes in all, for all of the processors.
One run is one sitting, unattended; what an --out holds is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

FIGURES = {
    "throughput_tokens_per_s": "tok/s",
    "tpot_ms": "TPOT ms",
    "ttft_ms": "TTFT ms",
    "latency_ms_per_token": "ms/token",
}
BAR = 0.10
FOREIGN_LIMIT = 0.10
TRIES = 3
START_S = 900.0
PATIENCE_S, PAUSE_S = 600.0, 5.0
LOOP = """
import time
start, used = time.perf_counter(), time.process_time()
while time.perf_counter() - start < 0.7:
    pass
print((time.process_time() - used) / (time.perf_counter() - start))
"""
PORT = 8231


@dataclass(frozen=True)
class Level:
    """One sweep of one level; `of_level` and `share`: an open loop at a share of that level's
    requests a second."""

    name: str
    input_tokens: int
    output_tokens: int
    requests: int
    users: int = 0
    of_level: str = ""
    share: float = 0.0


CALIBRATION = (
    Level("fit-1", 128, 64, 8, users=1),
    Level("fit-4", 128, 64, 16, users=4),
    Level("fit-16", 128, 64, 48, users=16),
    Level("fit-1-long", 512, 48, 6, users=1),
    Level("fit-8-long", 512, 48, 16, users=8),
    Level("fit-32-short", 32, 96, 64, users=32),
)
UNSEEN = (
    Level("2", 128, 64, 10, users=2),
    Level("8", 128, 64, 24, users=8),
    Level("32", 128, 64, 64, users=32),
    Level("4-256-96", 256, 96, 8, users=4),
    Level("12-256-96", 256, 96, 24, users=12),
    Level("6-64-32", 64, 32, 24, users=6),
    Level("3-384-64", 384, 64, 9, users=3),
    Level("24-64-128", 64, 128, 48, users=24),
    Level("open-60", 128, 64, 40, of_level="fit-16", share=0.60),
    Level("open-50-256-96", 256, 96, 24, of_level="12-256-96", share=0.50),
)
# measured and left out: on a virtual machine that stood still the first half minute is slower
WARM_UP = Level("warm-up", 128, 64, 64, users=4)
# the six once more at the end, the last first
AGAIN = tuple(replace(level, name=f"{level.name}-again") for level in reversed(CALIBRATION))
# measured in turn, so that a machine that changes slowly changes for both alike
ORDER = (*(level for pair in zip(CALIBRATION, UNSEEN, strict=False) for level in pair), *UNSEEN[len(CALIBRATION) :])


def cli(*arguments: str, quiet: bool = True) -> str:
    """Run one lmi-bench command and return what it printed; its errors end the benchmark."""
    done = subprocess.run([sys.executable, "-m", "lmi_bench", *arguments], text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"lmi-bench {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}")
    if not quiet:
        print(done.stdout)
    return done.stdout


class Processors:
    """Processor seconds of this machine, and those of the engine and of what is measured here."""

    def __init__(self, server_pid: int | None) -> None:
        self._server_pid = server_pid
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def busy_s(self) -> float:
        """All that ran since the start, time that the host took away included."""
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        idle = {3, 4}
        return sum(int(v) for i, v in enumerate(fields) if i not in idle) * self._tick_s

    def own_s(self) -> float:
        """Of this process, its ended children and the server's processes."""
        times = os.times()
        server = sum(self._ticks(pid) for pid in self._tree()) * self._tick_s
        return times.user + times.system + times.children_user + times.children_system + server

    def _tree(self) -> list[int]:
        if self._server_pid is None:
            return []
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                stat = self._stat(int(entry.name))
                if stat:
                    parents[int(entry.name)] = int(stat[1])
        tree = [self._server_pid]
        for pid in tree:
            tree += [child for child, parent in parents.items() if parent == pid]
        return tree

    def _ticks(self, pid: int) -> int:
        stat = self._stat(pid)
        return int(stat[11]) + int(stat[12]) if stat else 0

    @staticmethod
    def _stat(pid: int) -> list[str]:
        try:
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return []


def line_of(folder: Path) -> dict[str, Any] | None:
    """The level that a sweep's folder holds, once it has ended."""
    path = folder / "levels.jsonl"
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return json.loads(text.splitlines()[-1]) if text else None


class Patience:
    """Wait until the machine is quiet, up to this many seconds in all."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    def wait(self) -> None:
        """Return once every processor is ours, or when patience has run out."""
        start_s = time.monotonic()
        while not all_ours() and time.monotonic() - start_s < self._left_s:
            time.sleep(PAUSE_S)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - start_s))


def all_ours() -> bool:
    """Whether a loop on each processor gets nearly all of it: only load shows what a host takes."""
    loops = [
        subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True)
        for _ in range(os.cpu_count() or 1)
    ]
    return min(float(loop.communicate()[0]) for loop in loops) >= 1 - FOREIGN_LIMIT / 2


def measure(
    level: Level, out: Path, target: str, options: Sequence[str], processors: Processors, patience: Patience
) -> None:
    """Sweep one level into its folder, again while others took the processors."""
    folder = out / level.name
    if line_of(folder) is not None:
        return
    load = ["--concurrency", str(level.users)]
    if level.of_level:
        base = line_of(out / level.of_level)
        assert base is not None
        rate = level.share * float(base["throughput_tokens_per_s"]) / level.output_tokens
        load = ["--rate", f"{rate:.3g}"]
    best = 1.0
    for _ in range(TRIES):
        attempt = out / f"{level.name}.try"
        shutil.rmtree(attempt, ignore_errors=True)
        patience.wait()
        start_s, busy_s, own_s = time.monotonic(), processors.busy_s(), processors.own_s()
        cli(
            "sweep",
            "--target",
            target,
            *options,
            *load,
            "--isl",
            str(level.input_tokens),
            "--osl",
            str(level.output_tokens),
            "--requests-per-level",
            str(level.requests),
            "--warmup-requests",
            "2",
            "--timeout",
            "none",
            "--out",
            str(attempt),
        )
        wall_s = time.monotonic() - start_s
        foreign_s = processors.busy_s() - busy_s - (processors.own_s() - own_s)
        share = foreign_s / wall_s / (os.cpu_count() or 1)
        note = f"{level.name}: {wall_s:.0f} s, {share:.1%} of the processors to others"
        print(note, file=sys.stderr, flush=True)
        (attempt / "foreign.json").write_text(json.dumps({"foreign_share": share}))
        if share < best or not folder.exists():  # the least disturbed is kept
            best = share
            shutil.rmtree(folder, ignore_errors=True)
            attempt.rename(folder)
        if best <= FOREIGN_LIMIT:
            break
    shutil.rmtree(out / f"{level.name}.try", ignore_errors=True)


@contextmanager
def vllm_server(python: str, model: str, dtype: str) -> Iterator[tuple[str, int]]:
    """vLLM's server on a folder, its URL and its process; stopped at the end."""
    from lmi_bench.targets.bundled import model_folder  # the demo models are made on first use

    folder = model_folder(model)
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", model, "--port", str(PORT), "--host", "127.0.0.1"]
    command += ["--dtype", dtype, "--max-model-len", "2048"]
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{PORT}"
    try:
        deadline_s = time.monotonic() + START_S
        while not answers(url):
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"vLLM did not start: {' '.join(command)}")
            time.sleep(1)
        yield url, server.pid
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def calibrate_and_predict(out: Path, dtype: str) -> None:
    """The product's own path: calibrate, then validate on what was not calibrated on."""
    known = [str(out / level.name) for level in (*CALIBRATION, *AGAIN)]
    others = [str(out / level.name) for level in UNSEEN]
    profile, judged = str(out / "profile.json"), str(out / "judged.json")
    where = ["--instance", "local", "--dtype", dtype]
    cli("calibrate", *known, *where, "-o", profile)
    cli("validate", *others, *where, "--profile", profile, "--json", judged)


def judge(out: Path) -> None:
    """Print measured and predicted figures of the unseen levels, and the errors."""
    facts = json.loads((out / "engine.json").read_text(encoding="utf-8"))
    judged = json.loads((out / "judged.json").read_text(encoding="utf-8"))
    print(f"\n## {facts['title']}\n")
    print(f"{facts['description']}\n")
    print("| unseen level | in / out | " + " | ".join(FIGURES.values()) + " |")
    print("|---|---|" + "---|" * len(FIGURES))
    errors: dict[str, list[float]] = {key: [] for key in FIGURES}
    covered: dict[str, list[bool]] = {key: [] for key in FIGURES}
    widths: dict[str, list[float]] = {key: [] for key in FIGURES}
    for level, said in zip(UNSEEN, judged, strict=True):
        line = line_of(out / level.name)
        assert line is not None
        cells = []
        for key in FIGURES:
            found = line[key]
            measured = float(found["mean"] if isinstance(found, dict) else found)
            value = said[f"predicted_{key}"]
            if value is None:
                cells.append(f"{measured:,.4g} (silent)")
                errors[key].append(1.0)
                continue
            error = value / measured - 1
            errors[key].append(abs(error))
            low, high = said[f"low_{key}"], said[f"high_{key}"]
            covered[key].append(low <= measured <= high)
            widths[key].append((high - low) / 2 / value)
            cells.append(f"{measured:,.4g} / {value:,.4g} ({error:+.1%})")
        rate = line.get("rate_per_s")
        load = f"{level.users} users" if level.users else f"{rate} req/s"
        lengths = f"{level.input_tokens} / {level.output_tokens}"
        print(f"| {load} | {lengths} | " + " | ".join(cells) + " |")
    print("\nMeasured / predicted (error). Over the unseen levels:\n")
    print("| figure | median / p90 error | bar | covered | half-width |")
    print("|---|---|---|---|---|")
    for key, title in FIGURES.items():
        middle, high = np.quantile(errors[key], [0.5, 0.9])
        print(
            f"| {title} | {middle:.1%} / {high:.1%} | {BAR:.0%} | {np.mean(covered[key]):.0%} | "
            f"{np.median(widths[key]):.1%} |"
        )
    print_drift(out)
    taken = [json.loads(path.read_text(encoding="utf-8"))["foreign_share"] for path in out.glob("*/foreign.json")]
    if taken:
        print(
            "\nOther processes, and the host of the virtual machine, took "
            f"{np.median(taken):.1%} of the processors beside a level (median), "
            f"{max(taken):.1%} at most."
        )


def print_drift(out: Path) -> None:
    """How much longer a token took when the calibration levels were measured again."""
    changes = []
    for level in AGAIN:
        first, last = line_of(out / level.name.removesuffix("-again")), line_of(out / level.name)
        if first is not None and last is not None:
            changes.append(last["tpot_ms"]["mean"] / first["tpot_ms"]["mean"] - 1)
    if changes:
        print(
            f"\nDrift: the calibration levels' TPOT changed by {np.median(changes):+.1%} (median; "
            f"{min(changes):+.1%} to {max(changes):+.1%}) from the first time to the second."
        )


def measure_all(args: argparse.Namespace) -> None:
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    dtype = args.dtype or ("bfloat16" if args.engine == "bundled" else "float32")
    names = {"bundled": f"The bundled engine, {args.backend} back end", "vllm": "vLLM's CPU build"}
    facts = {
        "title": f"{names.get(args.engine, args.engine)}, {args.model}, {dtype}",
        "description": f"{len(CALIBRATION)} levels calibrate, each measured twice: "
        + ", ".join(f"{level.users} users {level.input_tokens}/{level.output_tokens}" for level in CALIBRATION)
        + f". Client and engine share {os.cpu_count()} cores.",
    }
    (out / "engine.json").write_text(json.dumps(facts), encoding="utf-8")
    common = ["--model", args.model]
    if args.engine == "bundled":
        sweeps(out, "engine", [*common, "--dtype", dtype, "--backend", args.backend], None)
    elif args.engine == "vllm":
        with vllm_server(args.python, args.model, dtype) as (url, pid):
            sweeps(out, url, common, pid)
    else:
        sweeps(out, args.engine, common, args.pid)
    calibrate_and_predict(out, dtype)


def sweeps(out: Path, target: str, options: Sequence[str], pid: int | None) -> None:
    processors, patience = Processors(pid), Patience(PATIENCE_S)
    for level in (WARM_UP, *ORDER, *AGAIN):
        measure(level, out, target, options, processors, patience)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the sweeps; those in it are kept")
    parser.add_argument("--engine", default="bundled", help="bundled, vllm or a URL")
    parser.add_argument("--python", default=sys.executable, help="the one that has vLLM")
    parser.add_argument("--pid", type=int, help="of the server behind a URL, if it is here")
    parser.add_argument("--backend", default="native", help="step back end of the bundled engine")
    parser.add_argument("--model", default="demo-110m")
    parser.add_argument("--dtype", help="of the weights [bfloat16 bundled, float32 others]")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="RUNS", help="only print")
    args = parser.parse_args()
    if args.judge:
        print("# A real engine, six calibration levels\n\nPrinted by benchmarks/real_engine.py.")
        for out in args.judge:
            judge(out)
    elif args.out is None:
        parser.error("give --out, or --judge with folders")
    else:
        measure_all(args)
        judge(args.out)


if __name__ == "__main__":
    main()
