"""What four newcomers see in their first hour, and whether stated capacities hold when simulated.

    python -m benchmarks.first_hour --out benchmarks/results/first_hour.md

First the transcripts: commands of an endpoint's owner, a buyer without hardware, the owner of a log
and a CI job, each with what it prints on a terminal of 80 columns.

Then the audit: cells of a model, a machine, lengths and SLOs are drawn from the catalog, in turn
bound by KV memory, compute, bandwidth and anything. The SLOs are multiples of a lone request's
latencies. `recommend` states the cell's capacity [low, high]; `sweep sim:INSTANCE` then sends
Poisson arrivals to one copy at its share of `low`, where every SLO has to be kept, and of 1.15
times `high`, where one has to be broken. Near a limit the median of three draws of arrivals counts.
Both commands run as processes of their own and share the profile, not the code: `recommend` follows
a copy in closed form and by a fast simulation, the sweep runs the load generator against the
bundled engine in virtual time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import random
import re
import select
import shlex
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.operating_point import alone_of
from lmi_bench.analysis.level.layouts import CopyPlan, Layout, layouts_of, plan_copy
from lmi_bench.analysis.level.steady_state import SteadyState
from lmi_bench.analysis.model.capacity import checkpoint_problem, device_problem
from lmi_bench.catalog.instances import all_instances
from lmi_bench.catalog.models import all_model_entries
from lmi_bench.core.errors import EXIT_SLO_MISSED, InputError
from lmi_bench.core.level import Level
from lmi_bench.core.run_store import load_run
from lmi_bench.core.slo import Slo
from lmi_bench.deploy.images import machine_problem
from lmi_bench.jobs.planned import planned_workload
from lmi_bench.targets.profiles import find_profile

ROOT = Path(__file__).parent.parent
COLUMNS = 80
PORT = 18_517
REGIMES = ("kv_memory", "compute", "bandwidth", "any")
PROFILES = ("vllm", "vllm", "vllm-0.19", "tgi-2023")
JUDGED_REQUESTS = 1500
ABOVE = 1.15  # of the interval's upper end: here an SLO has to be broken
NEAR = 0.1  # distance from a limit below which two more draws are simulated
WANTED_SHARE = 0.9


@dataclass(frozen=True)
class Newcomer:
    """A person with a first hour. serves: a server that runs beside the commands."""

    title: str
    wants: str
    commands: tuple[str, ...]
    serves: str | None = None


HEAD = """\
# The first hour

Printed by `python -m benchmarks.first_hour`.
"""
SWEEP = "lmi-bench sweep sim:ml.g5.2xlarge --model llama-2-7b --isl 128 --osl 32 --concurrency 4,8"
NEWCOMERS = (
    Newcomer(
        "The owner of an endpoint",
        "has a server, here the bundled one, and asks how much it carries",
        (f"lmi-bench sweep http://127.0.0.1:{PORT}",),
        serves=f"lmi-bench serve --model demo-15m --port {PORT}",
    ),
    Newcomer(
        "The buyer without hardware",
        "asks what to rent for 5 requests a second of a 70B model",
        (
            "lmi-bench recommend --model llama-3-70b --input-tokens 622 --output-tokens 250 "
            '--rate 5 --slo "ttft_p90<=2s" --slo "itl_p90<=60ms"',
        ),
    ),
    Newcomer(
        "The owner of a log",
        "has a gateway's log of two hours and asks what to rent for that traffic",
        (
            "lmi-bench workload from gateway.jsonl -o chat.yaml --model mistral-7b",
            'lmi-bench recommend --workload chat.yaml --model mistral-7b --slo "ttft_p90<=1s" --json fleet.json',
            "lmi-bench verify fleet.json --target sim:{machine}",
        ),
    ),
    Newcomer(
        "The CI job",
        "asks whether a change is slower than the branch that it goes into",
        (
            f"{SWEEP} --out runs/main",
            f"{SWEEP} --max-batch 2 --out runs/change",
            "lmi-bench compare runs/main runs/change",
            'lmi-bench gate runs/main --slo "ttft_p90<=1s"',
            "lmi-bench gate runs/change --baseline runs/main --max-regression 10%",
        ),
    ),
)


def write_log(path: Path, seed: int) -> None:
    """A gateway's log: 600 chats over two hours, lognormal lengths, twice as many in the second."""
    chance = random.Random(seed)
    times = sorted([chance.uniform(0, 3600) for _ in range(200)])
    times += sorted([chance.uniform(3600, 7200) for _ in range(400)])
    with path.open("w", encoding="utf-8") as file:
        for at_s in times:
            usage = {
                "prompt_tokens": round(chance.lognormvariate(5.5, 0.7)) + 1,
                "completion_tokens": round(chance.lognormvariate(4.5, 0.6)) + 1,
            }
            file.write(json.dumps({"created": 1_790_000_000 + at_s, "usage": usage}) + "\n")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb", "OMP_NUM_THREADS": "1"}


def process_of(command: str) -> list[str]:
    """The command line of the `lmi-bench` that belongs to this interpreter."""
    return [sys.executable, "-m", "lmi_bench", *shlex.split(command)[1:]]


def on_terminal(command: str, folder: Path) -> tuple[str, int, float]:
    """What a command prints on a terminal of 80 columns, its exit code, and its seconds."""
    start_s = time.perf_counter()
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(process_of(command), cwd=folder, env=environment(), stdin=its, stdout=its, stderr=its)
    os.close(its)
    said = bytearray()
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(ours, 65_536):
            said += chunk
    os.close(ours)
    text = said.decode("utf-8", "replace").replace("\r\n", "\n")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip("\n"), process.wait(), time.perf_counter() - start_s


@contextlib.contextmanager
def serving(command: str | None, folder: Path) -> Iterator[str]:
    """The server while it runs; what it prints until it is up."""
    if command is None:
        yield ""
        return
    process = subprocess.Popen(
        process_of(command), cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert process.stdout is not None
        said = []
        while "http://" not in "".join(said):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{command} ended: {''.join(said)}")
            said.append(line)
        while select.select([process.stdout], [], [], 0.5)[0]:
            said.append(process.stdout.readline())
        yield "".join(said).strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def transcript(person: Newcomer, folder: Path) -> Iterator[str]:
    """The person's section of the page."""
    folder.mkdir()
    write_log(folder / "gateway.jsonl", seed=1)
    yield f"### {person.title}\n\nThis person {person.wants}.\n\n```console"
    with serving(person.serves, folder) as said:
        if person.serves is not None:
            yield f"$ {person.serves} &\n{said}"
        for command in person.commands:
            if "{machine}" in command:
                answer = json.loads((folder / "fleet.json").read_text("utf-8"))
                command = command.format(machine=answer["recommended"]["instance"])
            text, code, took_s = on_terminal(command, folder)
            print(f"{took_s:5.1f} s, exit {code}: {command}", flush=True)
            yield f"$ {command}\n{text}\n# exit code {code}, {took_s:.0f} s"
    yield "```\n"


@dataclass(frozen=True)
class Cell:
    """A question whose answer is audited. rate_per_s: the stated load; None: one machine's most."""

    model: str
    profile: str
    layout: Layout
    dtype: str
    input_tokens: int
    output_tokens: int
    slos: tuple[Slo, ...]
    regime: str
    rate_per_s: float | None

    @property
    def asked(self) -> list[str]:
        """The options that both commands share."""
        pairs = {
            "--model": self.model,
            "--profile": self.profile,
            "--tp": self.layout.tensor_parallel,
            "--isl": self.input_tokens,
            "--osl": self.output_tokens,
        }
        return [str(word) for pair in pairs.items() for word in pair]


def regime_of(steady: SteadyState) -> str:
    """What binds a saturated copy: its sequences, its prompts (compute), or its decode steps."""
    binding = steady.limiting_part(steady.slots)
    if binding in ("kv_memory", "batch_limit"):
        return binding
    prompts_s = steady.slots * steady.prompt_step_s
    return "compute" if prompts_s > 0.5 * steady.cycle_s(steady.slots) else binding


def drawn_cell(chance: random.Random) -> Cell | None:
    """A cell; None where the model does not run there."""

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    model = chance.choice(all_model_entries()).shape.name
    offered = [each for each in all_instances() if each.instance_type.startswith("ml.")]
    machine, name = chance.choice(offered), chance.choice(PROFILES)
    layout = chance.choice(list(layouts_of(machine)))
    lengths = round(between(64, 4096)), round(between(16, 256))
    times = between(3, 10), between(1.2, 3), between(1, 40)
    second, stated = chance.choice((None, "itl", "tpot")), chance.random() < 0.5
    workload, profile = planned_workload(model, None, *lengths), find_profile(name)
    if checkpoint_problem(profile, workload.shape, workload.dtype) is not None:
        return None
    if machine.accelerator.bandwidth_bytes_per_s is None:
        return None
    if device_problem(profile, machine.accelerator) is not None:
        return None
    if machine_problem({profile.name.lower()}, machine) is not None:
        return None
    try:
        plan = plan_copy(layout, workload, profile, open_loop=True)
    except InputError:
        return None
    slos = [_slo(plan, "ttft", times[0])]
    if second is not None:
        slos.append(_slo(plan, second, times[1]))
    rate_per_s = times[2] / alone_of(plan.steady).latency_s("e2e", "mean", 1.0)
    return Cell(
        model,
        name,
        layout,
        workload.dtype,
        *lengths,
        tuple(slos),
        regime_of(plan.steady),
        float(f"{rate_per_s:.3g}") if stated else None,
    )


def _slo(plan: CopyPlan, metric: str, times: float) -> Slo:
    """A limit on the p90 at so many times the latency of a lone request."""
    alone_s = alone_of(plan.steady).latency_s(metric, "mean", 1.0)
    return Slo(metric, "p90", float(f"{1e3 * alone_s * times:.3g}"))


def drawn_cells(seed: int) -> Iterator[Cell]:
    """Cells without end, the regimes in turn; the same seed draws the same ones."""
    chance = random.Random(seed)
    for regime in cycle(REGIMES):
        while True:
            cell = drawn_cell(chance)
            if cell is not None and regime in (cell.regime, "any"):
                yield cell
                break


@dataclass(frozen=True)
class Audited:
    """A cell with its stated capacity, of one copy in requests a second, and what happened there.

    low, high  worst statistic over its limit, at the lower end and above the upper end
    """

    cell: Cell
    fleet: str
    limited_by: str
    capacity: tuple[float, float, float]
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the interval holds, or on which side it does not."""
        if self.low > 1:
            return "MISS: broken at the lower end"
        return "holds" if self.high > 1 else "MISS: kept above the upper end"


def run_quietly(words: Sequence[str], folder: Path) -> int:
    """Runs a command; its exit code, 0 or 99. Anything else is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "lmi_bench", *words], cwd=folder, env=environment(), capture_output=True, text=True
    )
    if done.returncode not in (0, EXIT_SLO_MISSED):
        raise RuntimeError(f"{shlex.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode


def audited(cell: Cell, folder: Path) -> Audited | None:
    """The cell's answer, and the simulated levels; None where no load keeps the SLOs."""
    folder.mkdir(parents=True)
    words = ["recommend", *cell.asked, "--instance", cell.layout.instance.instance_type]
    words += [word for slo in cell.slos for word in ("--slo", str(slo))]
    if cell.rate_per_s is not None:
        words += ["--rate", str(cell.rate_per_s)]
    if run_quietly([*words, "--json", "answer.json"], folder) == EXIT_SLO_MISSED:
        return None
    answer = json.loads((folder / "answer.json").read_text("utf-8"))
    best: Mapping[str, Any] = answer["recommended"]
    copies = best["instances"] * best["replicas"]
    stated = best["capacity_rate_per_s"]
    capacity = tuple(stated[name] / copies for name in ("predicted", "low", "high"))
    rates = (capacity[1], ABOVE * capacity[2])
    found = [worst_at(cell, rates, folder, seed=1)]
    if any(abs(worst - 1) < NEAR for worst in found[0]):
        found += [worst_at(cell, rates, folder, seed=seed) for seed in (2, 3)]
    low, high = (statistics.median(each) for each in zip(*found, strict=True))
    fleet = f"{best['instances']} x {best['instance']} TP {best['tensor_parallel']}"
    return Audited(cell, fleet, best["limited_by"], capacity, low, high)


def worst_at(cell: Cell, rates: Sequence[float], folder: Path, *, seed: int) -> list[float]:
    """The worst statistic over its limit at each rate of one copy, as a sweep measures it."""
    run = folder / f"run-{seed}"
    target = f"sim:{cell.layout.instance.instance_type}"
    load = ["--rate", ",".join(map(repr, rates)), "--requests-per-level", str(JUDGED_REQUESTS)]
    where = ["--seed", str(seed), "--out", str(run)]
    run_quietly(["sweep", target, *cell.asked, *load, *where], folder)
    levels = sorted(load_run(run).levels, key=lambda level: level.load.value)
    return [max(_share(level, slo) for slo in cell.slos) for level in levels]


def _share(level: Level, slo: Slo) -> float:
    """The level's statistic over the SLO's limit; an answer of one token has no gaps."""
    assert level.sent >= JUDGED_REQUESTS
    assert not level.failed
    return (level.of(slo.metric).value(slo.statistic) or 0.0) / slo.limit_ms


def audit(seed: int, count: int, folder: Path, workers: int) -> tuple[list[Audited], int]:
    """As many audited cells as wanted, and how many no load could keep within their SLOs."""
    found: list[Audited] = []
    left_out, drawn = 0, drawn_cells(seed)
    with ThreadPoolExecutor(workers) as pool:
        while len(found) < count:
            places = [folder / f"{len(found) + left_out + n}" for n in range(count - len(found))]
            for each in pool.map(audited, islice(drawn, len(places)), places):
                if each is None:
                    left_out += 1
                else:
                    found.append(each)
                    print(row(len(found), each), flush=True)
    return found, left_out


def row(number: int, each: Audited) -> str:
    """The cell's line of the table."""
    cell, (predicted, low, high) = each.cell, each.capacity
    load = "one machine" if cell.rate_per_s is None else f"{cell.rate_per_s:g} req/s"
    columns = (
        number,
        cell.model,
        cell.profile,
        each.fleet,
        f"{cell.input_tokens}/{cell.output_tokens}",
        ", ".join(map(str, cell.slos)).replace("_p90", ""),
        load,
        cell.regime,
        each.limited_by,
        f"{predicted:.3g} [{low:.3g}-{high:.3g}]",
        f"{each.low:.2f}",
        f"{each.high:.2f}",
        each.verdict,
    )
    return f"| {' | '.join(map(str, columns))} |"


def audit_section(found: Sequence[Audited], left_out: int, seed: int, took_s: float) -> str:
    """The page's second half."""
    held = sum(each.verdict == "holds" for each in found)
    wanted = math.ceil(WANTED_SHARE * len(found))
    titles = (
        "",
        "model",
        "profile",
        "fleet",
        "in/out",
        "SLOs (p90)",
        "load",
        "saturated by",
        "limited by",
        "req/s a copy",
        "at the lower end",
        f"at {ABOVE} x the upper end",
        "verdict",
    )
    return "\n".join(
        [
            f"## Do stated capacities hold?\n\n{held} of {len(found)} hold (wanted: {wanted}). "
            f"Seed {seed}; {left_out} more cells were drawn whose SLOs no load keeps. "
            f"{JUDGED_REQUESTS:,} requests a level. The two columns before the verdict are the "
            "worst p90 over its limit: at most 1 at the lower end and above 1 beyond the upper one."
            f" {took_s:.0f} s.\n",
            f"| {' | '.join(titles)} |",
            "|" + "---|" * len(titles),
            *(row(number, each) for number, each in enumerate(found, 1)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="draw of the audited cells")
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-transcripts", action="store_true")
    parser.add_argument("--out", type=Path, help="Markdown file; nothing is kept without it")
    given = parser.parse_args()
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as name:
        if not given.no_transcripts:
            parts.append("## Transcripts\n")
            for person in NEWCOMERS:
                parts += transcript(person, Path(name) / person.title.replace(" ", "-"))
        start_s = time.perf_counter()
        found, left_out = audit(given.seed, given.cells, Path(name) / "audit", given.workers)
    took_s = time.perf_counter() - start_s
    parts.append(audit_section(found, left_out, given.seed, took_s))
    print(parts[-1])
    if given.out is not None:
        given.out.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
