"""Servers from other projects: swept with nothing but the URL, and beside `vllm bench serve`.

    python benchmarks/real_servers.py sweep --vllm PATH/TO/python
    python benchmarks/real_servers.py compare --vllm PATH/TO/python --repeats 3
    python benchmarks/real_servers.py sweep --llama PATH/TO/python
    python benchmarks/real_servers.py compare --llama PATH/TO/python --vllm PATH/TO/python
    python benchmarks/real_servers.py sweep --url http://127.0.0.1:8200

`--vllm` is a Python that has vLLM (its CPU build), `--llama` one that has llama-cpp-python[server]
and gguf, with which the checkpoint is made for it once (`--gguf FILE` serves another).
`sweep` gives `lmi-bench sweep URL` no other option and prints what it says. `compare` measures one
and four users alternately with `lmi-bench sweep` and `vllm bench serve` (64 tokens in, 64 out) and
prints medians and ranges; the two agree where the ranges overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real_engine import PORT, vllm_server

from lmi_bench.core.host import host_facts
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run
from lmi_bench.interchange.imports.read import read_results
from lmi_bench.targets.bundled import model_folder

MODEL, TOKENS = "demo-15m", 64
TOOLS = {"ours": "lmi-bench sweep", "vllm": "vllm bench serve"}
MAKE_GGUF = "import sys; from engine_peers import gguf_of; print(gguf_of(sys.argv[1], words=True))"
BENCH = """
import argparse, uuid
from vllm.benchmarks.serve import add_cli_args, main


class Uuids(str):
    def __add__(self, number):
        return str(uuid.uuid5(uuid.NAMESPACE_URL, number))


parser = argparse.ArgumentParser()
add_cli_args(parser)
options = parser.parse_args()
options.request_id_prefix = Uuids()
main(options)
"""
"""`vllm bench serve`, whose requests have a UUID in their header `x-request-id` instead of a name
and a number: llama-cpp-python's server answers 400 to everything else."""
METRICS = (
    ("TTFT p50, ms", lambda line: line.of("ttft").p50),
    ("ITL p50, ms", lambda line: line.of("itl").p50),
    ("output tok/s", lambda line: line.throughput_tokens_per_s),
)


class PeerFailed(Exception):
    """A tool measured nothing to compare with."""


@contextmanager
def llama_server(python: str, gguf: str | None) -> Iterator[str]:
    """llama.cpp's server by its Python package.

    A request waits for the one before it: as set up by default it would cut that one short.
    """
    gguf = gguf or words_gguf(python)
    command = [python, "-m", "llama_cpp.server", "--model", gguf, "--port", str(PORT)]
    command += ["--host", "127.0.0.1", "--n_ctx", "2048", "--model_alias", MODEL]
    command += ["--interrupt_requests", "False"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and server.poll() is None:
            done = subprocess.run(["curl", "-sf", f"http://127.0.0.1:{PORT}/v1/models"], capture_output=True)
            if done.returncode == 0:
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"llama.cpp's server did not start: {' '.join(command)}")
        yield f"http://127.0.0.1:{PORT}"
    finally:
        server.terminate()
        server.wait(30)


def words_gguf(python: str) -> str:
    """The demo model for llama.cpp, with the words of its own tokenizer."""
    support = Path(__file__).parent / "support"
    done = subprocess.run(
        [python, "-c", MAKE_GGUF, str(model_folder(MODEL))],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(support)},
    )
    if done.returncode != 0:
        raise SystemExit(f"{python} made no GGUF: {last_line(done.stderr)}")
    return done.stdout.split()[-1]


@contextmanager
def server_of(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """A running server: its name and URL."""
    if options.url:
        yield options.url, options.url
    elif options.llama:
        with llama_server(options.llama, options.gguf) as url:
            yield "llama.cpp", url
    else:
        with vllm_server(options.vllm, MODEL, "float32") as (url, _):
            yield "vLLM's CPU build", url


def sweep(url: str) -> None:
    """`lmi-bench sweep URL`, told nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "lmi_bench", "sweep", url],
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "150"},
        )
        took_s = time.monotonic() - start_s
    print(f"`lmi-bench sweep URL`: exit status {done.returncode} after {took_s:.0f} s\n")
    print("```\n" + done.stderr.strip() + "\n" + done.stdout.strip() + "\n```")


def ours(url: str, users: int, folder: Path, options: argparse.Namespace) -> Level:
    """What `lmi-bench sweep` measured. Raises PeerFailed where that is nothing."""
    out = folder / "run"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lmi_bench",
            "sweep",
            url,
            "--concurrency",
            str(users),
            "--requests-per-level",
            str(options.requests),
            "--input-tokens",
            str(TOKENS),
            "--output-tokens",
            str(TOKENS),
            "--out",
            str(out),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    if done.returncode != 0:
        raise PeerFailed(f"exit status {done.returncode}: {last_line(done.stderr)}")
    return load_run(out).levels[0]


def vllms(url: str, users: int, folder: Path, options: argparse.Namespace) -> Level:
    """What `vllm bench serve` measured. Raises PeerFailed where that is nothing."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [
            options.vllm,
            "-c",
            BENCH,
            "--backend",
            "openai",
            "--base-url",
            url,
            "--endpoint",
            "/v1/completions",
            "--model",
            MODEL,
            "--tokenizer",
            str(model_folder(MODEL)),
            "--dataset-name",
            "random",
            "--random-input-len",
            str(TOKENS),
            "--random-output-len",
            str(TOKENS),
            "--num-prompts",
            str(options.requests),
            "--max-concurrency",
            str(users),
            "--ignore-eos",
            "--save-result",
            "--result-dir",
            str(folder),
            "--result-filename",
            "v.json",
            "--percentile-metrics",
            "ttft,tpot,itl",
            "--metric-percentiles",
            "50,99",
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode != 0:
        raise PeerFailed(f"exit status {done.returncode}: {last_line(done.stderr)}")
    result = json.loads((folder / "v.json").read_text())
    if result["completed"] != options.requests:
        errors = sorted({error for error in result.get("errors", ()) if error})
        raise PeerFailed(
            f"{result['completed']} of {options.requests} requests answered; "
            f"{errors[0] if errors else 'no error is told'}"
        )
    line = read_results(folder / "v.json", Load(concurrency=users)).levels[0].level.to_json()
    return Level.from_json({"level": 0, "attempt": 1, **line})


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if "error" in line.lower()), "no error is told")


def compare(url: str, options: argparse.Namespace) -> None:
    """Both tools in turn; a peer that fails is named and ends it."""
    print("| users | metric | lmi-bench | range | vllm bench serve | range | difference | ranges |")
    print("|---:|---|---:|---:|---:|---:|---:|---|")
    for users in map(int, options.users.split(",")):
        lines: dict[str, list[Level]] = {"ours": [], "vllm": []}
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                for name, tool in (("ours", ours), ("vllm", vllms)):
                    try:
                        lines[name].append(tool(url, users, Path(folder), options))
                    except PeerFailed as exc:
                        raise SystemExit(f"{TOOLS[name]}, {users} users: {exc}") from exc
        for metric, read in METRICS:
            cells, spans = [], []
            for measured in lines.values():
                values = [read(line) for line in measured]
                spans.append((min(values), max(values)))
                cells.append(statistics.median(values))
            apart = max(spans[0][0], spans[1][0]) > min(spans[0][1], spans[1][1])
            print(
                f"| {users} | {metric} | {cells[0]:.2f} | {spans[0][0]:.2f}-{spans[0][1]:.2f} | "
                f"{cells[1]:.2f} | {spans[1][0]:.2f}-{spans[1][1]:.2f} | "
                f"{100 * (cells[0] / cells[1] - 1):+.1f} % | "
                f"{'apart' if apart else 'overlap'} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("sweep", "compare"))
    parser.add_argument("--vllm", help="a Python that has vLLM; for compare in any case")
    parser.add_argument("--url", help="of such a server that runs already: none is started")
    parser.add_argument("--llama", help="a Python that has llama-cpp-python[server]")
    parser.add_argument("--gguf", help="what llama.cpp serves instead of demo-15m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--users", default="1,4")
    parser.add_argument("--requests", type=int, default=32)
    options = parser.parse_args()
    if options.requests < 5:
        parser.error("--requests: a median needs 5")
    start_s = time.monotonic()
    with server_of(options) as (name, url):
        facts = json.dumps({"cpu": host_facts()["cpu"], "cores": os.cpu_count()})
        print(
            f"{name}, {MODEL}, {facts}, ready after {time.monotonic() - start_s:.0f} s; load "
            f"average {os.getloadavg()[0]:.1f}\n",
            flush=True,
        )
        if options.what == "sweep":
            sweep(url)
        else:
            compare(url, options)


if __name__ == "__main__":
    main()
