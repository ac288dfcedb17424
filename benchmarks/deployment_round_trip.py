"""Recommended deployments from the plan to the load: recommend, write, check, serve, sweep.

    python benchmarks/deployment_round_trip.py [--only NAME] [--requests 20]

Every step is the command that a user types. The bundled engine serves with the written settings on
a simulated machine, in real time. The recommended load must hold there without an error, and users
beyond the limit must get the overload error. That limit is TGI's as written, LMI's by the variable
SERVING_JOB_QUEUE_SIZE; SGLang has none, so --max-concurrent-requests stands for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from real_engine import answers

from lmi_bench.deploy.properties import parse_properties

ROOT = Path(__file__).parents[1]
LENGTHS = ("--input-tokens", "622", "--output-tokens", "250")
QUEUE, BEYOND = 8, 24
BOUND_S = 120
VARIABLES = {"MAX_RUNNING_REQUESTS": "max-batch", "CONTEXT_LENGTH": "max-model-len"}
"""SGLang's arguments, and those of `serve`; its files are no LMI configuration."""


@dataclass(frozen=True)
class Case:
    """A recommendation and the server that runs it; refused: what the refusal must say."""

    name: str
    model: str
    instance: str
    rate: float = 2.0
    server: str = "lmi"
    plan: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    refused: str = ""


CASES = (
    Case("8B, g5", "llama-3.1-8b", "ml.g5.2xlarge"),
    Case("8B, g6e", "llama-3.1-8b", "ml.g6e.xlarge"),
    Case("13B, two copies of TP 2", "llama-2-13b", "ml.g5.12xlarge", 3, plan=("--tp", "2")),
    Case(
        "70B AWQ",
        "llama-3.1-70b",
        "ml.g5.12xlarge",
        0.5,
        plan=("--dtype", "int4"),
        write=("--model-id", "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4"),
    ),
    Case("Mixtral", "mixtral-8x7b", "ml.p4d.24xlarge"),
    Case("gpt-oss-120b", "gpt-oss-120b", "ml.p5.48xlarge"),
    Case("gemma-3", "gemma-3-12b", "ml.g6e.xlarge"),
    Case(
        "Qwen3-32B FP8",
        "qwen3-32b",
        "ml.g6e.xlarge",
        1,
        plan=("--dtype", "float8"),
        write=("--model-id", "Qwen/Qwen3-32B-FP8"),
    ),
    Case("8B, inf2", "llama-3.1-8b", "ml.inf2.8xlarge", refused="Neuron|inf2"),
    Case("8B by SGLang", "llama-3.1-8b", "ml.g6e.xlarge", server="sglang"),
    Case("8B by TGI", "llama-3.1-8b", "ml.g6e.xlarge", server="tgi"),
)


class Broken(Exception):
    """A step did not do what it should."""


def run(folder: Path, *words: str, refused: str = "", may_end: tuple[int, ...] = ()) -> str:
    """A command's whole output. Raises Broken unless it succeeds, or is refused in those words."""
    done = subprocess.run(
        [sys.executable, "-m", "lmi_bench", *words], capture_output=True, text=True, cwd=folder, env=environment()
    )
    said = done.stdout + done.stderr
    if refused:
        if done.returncode != 2 or not re.search(refused, said) or "Traceback" in said:
            raise Broken(f"{words[0]} is not refused: {said[-300:]}")
    elif done.returncode not in (0, *may_end):
        raise Broken(f"{' '.join(words[:2])} ended with {done.returncode}: {said[-400:]}")
    return said


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "150"}


@contextlib.contextmanager
def served(folder: Path, words: list[str], more: dict[str, str], port: int):
    """The bundled engine with these options and variables; stopped at the end."""
    command = [sys.executable, "-m", "lmi_bench", "serve", *words, "--port", str(port)]
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment() | more, stdout=log, stderr=log)
    url, start_s = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while not answers(url):
            if server.poll() is not None or time.monotonic() - start_s > BOUND_S:
                raise Broken(f"serve: {(folder / 'serve.log').read_text()[-400:]}")
            time.sleep(0.3)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def level(folder: Path, url: str, out: str, *load: str) -> dict:
    """A sweep's one level."""
    command = ["sweep", url, *load, "--max-errors", "none", "--out", out]
    run(folder, *command, may_end=(1,))  # 1: the level is not usable, for its errors
    return json.loads((folder / out / "levels.jsonl").read_text().splitlines()[-1])


def trip(case: Case, folder: Path, port: int, requests: int) -> str:
    """The row of one case. Raises Broken with the step that fails."""
    planned = ["--model", case.model, "--instance", case.instance, *LENGTHS, *case.plan]
    planned += ["--rate", str(case.rate), "--profile", "vllm-0.19", "--json", "rec.json"]
    said = run(folder, "recommend", *planned, refused=case.refused)
    if case.refused:
        reason = next(line for line in said.splitlines() if re.search(case.refused, line))
        return f"| {case.name} | {case.instance} | | | | refused: {reason.strip()} |"
    best = json.loads((folder / "rec.json").read_text())["recommended"]
    machines, degree = best["instances"], best["tensor_parallel"]
    copies = best["replicas"]
    options = ["--server", case.server, "--accept-eula", *case.write]
    run(folder, "deploy", "write", "rec.json", "--out", "files", *options)
    run(folder, "deploy", "check", "files")
    given = ["--executor", "simulated", "--instance", case.instance]
    given += ["--replicas", str(copies)]
    more = {}
    if case.server == "lmi":
        given += ["--serving-properties", "files"]
        more["SERVING_JOB_QUEUE_SIZE"] = str(QUEUE)
        slots = parse_properties((folder / "files/serving.properties").read_text())
        beyond = int(slots["option.max_rolling_batch_size"]) + QUEUE
    else:
        variables = parse_properties((folder / f"files/{case.server}.env").read_text())
        more = {name: value for name, value in variables.items() if name.startswith("MAX_")}
        beyond = int(variables.get("MAX_CONCURRENT_REQUESTS", 0))
        for name, option in VARIABLES.items() if case.server == "sglang" else ():
            given += [f"--{option}", variables[f"SM_SGLANG_{name}"]]
            beyond = beyond or int(variables[f"SM_SGLANG_{name}"]) + QUEUE
        if case.server == "sglang":
            given += ["--max-concurrent-requests", str(beyond)]
        given += ["--tp", str(degree), "--model", case.model]
    with served(folder, given, more, port) as url:
        rate = case.rate / machines
        load = ["--rate", f"{rate:g}", "--requests-per-level", str(requests), *LENGTHS]
        held = level(folder, url, "held", *load)
        users = copies * beyond + BEYOND
        load = ["--concurrency", str(users), "--requests-per-level", str(users + 64)]
        over = level(folder, url, "over", *load, "--input-tokens", "64", "--output-tokens", "64")
    if held["errors"]:
        raise Broken(f"{held['errors']} errors at the recommended load")
    kinds = over["errors_by_kind"]
    if set(kinds) != {"overloaded"}:
        raise Broken(f"{users} users got {kinds or 'no error'}")
    predicted = best["itl_p50_ms"]
    told = f"{predicted['low']:.3g}-{predicted['high']:.3g}"
    return (
        f"| {case.name} | {machines} x {case.instance}, {copies} x TP {degree} | {rate:.3g} | "
        f"{held['errors']} of {held['requests']} | {held['itl_ms']['p50']:.3g} ({told}) | "
        f"{kinds['overloaded']} of {over['requests']} with {users} users |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="pattern of the cases' names")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--port", type=int, default=18500)
    options = parser.parse_args()
    print("| case | fleet | req/s a machine | errors | ITL p50, ms (predicted) | overload errors |")
    print("|---|---|---:|---:|---|---|")
    broken = 0
    for number, case in enumerate(CASES):
        if not re.search(options.only, case.name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(trip(case, Path(folder), options.port + number, options.requests), flush=True)
            except Broken as exc:
                broken += 1
                print(f"| {case.name} | {case.instance} | | | | BROKEN: {exc} |", flush=True)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
