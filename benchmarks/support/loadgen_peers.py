"""Other load generators against the truth server: what they report beside what was true.

    python benchmarks/support/loadgen_peers.py --peers ~/peers --tokenizer DIR [--only vllm,aiperf]
    python benchmarks/support/loadgen_peers.py --peers ~/peers --tokenizer DIR \\
        --only lmi-bench,vllm-rs,endpoints --streams 32,128,512,2048 --burn 0,0.6 \\
        --rounds 16,8,4,3 --write benchmarks/results/loadgen_clients.md

`--peers` holds one virtual environment a tool: vllm, aiperf, guidellm, genai-bench, llmeter,
endpoints (MLCommons'), and `vllm-rs/vllm-rs`, a program of vLLM's wheel; lmi-bench is this one's
command, from its start to the written run. Each runs with its own defaults on the client's core;
most result files are read by `lmi-bench import`'s readers.
Errors are reported / true - 1 of the same quantile. A tool that reports no gaps between tokens
shows its time per output token there, marked TPOT. `beside` is the time that the command took
beyond the first request's arrival to the last token's departure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import loadgen_accuracy as accuracy

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run
from lmi_bench.interchange.imports.read import read_results

TOKENS = 64
PREFACE = """# Clients beside each other

Printed by `python benchmarks/support/loadgen_peers.py ... --write FILE`: whole commands of several
tools against the C server of known times, TTFT 200 ms, ITL 20 ms, 64 tokens, the server on one
core and the tool on the other, one run each. Errors are reported / true - 1 of the same quantile,
in %; TPOT where a tool measures no gaps between tokens. "Core burnt": the share of the tool's core
that another program takes at equal priority. "Says": what the tool's result states of its own
truth; of lmi-bench the bounds of the TTFT p99 and the ITL p99. "Beside": seconds of the command
before the first request came to the server and after its last token had left. lmi-bench leaves the
first request of each user out of its latencies, of which the server's quantiles know nothing; it
asks the server two questions and sends a warm-up request before its level.
"""
VLLM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
LLMETER = """
import asyncio, sys
from llmeter.endpoints.openai import OpenAICompletionStreamEndpoint
from llmeter.runner import Runner
url, streams, rounds, out = sys.argv[1:]
endpoint = OpenAICompletionStreamEndpoint("truth-model", api_key="none", base_url=url + "/v1")
runner = Runner(endpoint=endpoint, output_path=out)
payload = endpoint.create_payload("time " * 64, max_tokens=64)
asyncio.run(runner.run(payload=payload, clients=int(streams), n_requests=int(rounds), run_name="r"))
"""


@dataclass(frozen=True)
class Job:
    """One run of a peer."""

    url: str
    streams: int
    rounds: int
    tokenizer: Path
    peers: Path
    out: Path

    @property
    def requests(self) -> int:
        return self.streams * self.rounds

    def python(self, name: str) -> str:
        return str(self.peers / name / "bin" / "python")


Quantiles = Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Peer:
    """A tool: the command that measures, and what its result says of TTFT and ITL in ms."""

    command: Callable[[Job], list[str]]
    read: Callable[[Path, int], Quantiles]
    offline: bool = True
    says: Callable[[Path], str] = lambda _: "nothing"


def imported(pattern: str) -> Callable[[Path, int], Quantiles]:
    def read(folder: Path, streams: int) -> Quantiles:
        load = Load(concurrency=streams)
        return read_results(next(folder.glob(pattern)), load).levels[0].level.to_json()

    return read


def vllm(job: Job) -> list[str]:
    return [
        job.python("vllm"),
        "-c",
        VLLM,
        "--backend",
        "openai-chat",
        "--endpoint",
        "/v1/chat/completions",
        "--base-url",
        job.url,
        "--model",
        "truth-model",
        "--tokenizer",
        str(job.tokenizer),
        "--dataset-name",
        "random",
        "--random-input-len",
        "64",
        "--random-output-len",
        str(TOKENS),
        "--num-prompts",
        str(job.requests),
        *vllm_result(job),
    ]


def vllm_result(job: Job) -> list[str]:
    """Options of both of vLLM's clients."""
    return [
        "--max-concurrency",
        str(job.streams),
        "--ignore-eos",
        "--save-result",
        "--result-dir",
        str(job.out),
        "--result-filename",
        "vllm.json",
        "--percentile-metrics",
        "ttft,tpot,itl",
        "--metric-percentiles",
        "50,99",
    ]


def aiperf(job: Job) -> list[str]:
    return [
        str(job.peers / "aiperf/bin/aiperf"),
        "profile",
        "-m",
        "truth-model",
        "--url",
        job.url,
        "--endpoint-type",
        "chat",
        "--streaming",
        "--concurrency",
        str(job.streams),
        "--request-count",
        str(job.requests),
        "--tokenizer",
        str(job.tokenizer),
        "--isl",
        "64",
        "--osl",
        str(TOKENS),
        "--artifact-dir",
        str(job.out),
        "--ui",
        "none",
    ]


def guidellm(job: Job) -> list[str]:
    return [
        str(job.peers / "guidellm/bin/guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target={job.url},model={job.tokenizer}",
        "--profile",
        f"kind=concurrent,streams={job.streams}",
        "--constraint",
        f"kind=max_requests,count={job.requests}",
        "--data",
        f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}",
        "--output",
        f"kind=json,path={job.out}/guidellm.json",
        "--disable-console",
    ]


def genai_bench(job: Job) -> list[str]:
    return [
        str(job.peers / "genai-bench/bin/genai-bench"),
        "benchmark",
        "--api-backend",
        "openai",
        "--api-base",
        job.url,
        "--api-key",
        "none",
        "--task",
        "text-to-text",
        "--api-model-name",
        "truth-model",
        "--model-tokenizer",
        str(job.tokenizer),
        "--model",
        "truth-model",
        "--num-concurrency",
        str(job.streams),
        "--traffic-scenario",
        f"D(64,{TOKENS})",
        "--max-requests-per-run",
        str(job.requests),
        "--max-time-per-run",
        "1",
        "--experiment-base-dir",
        str(job.out),
        "--experiment-folder-name",
        "g",
        "--server-engine",
        "vLLM",
        "--server-gpu-type",
        "A10",
        "--server-version",
        "0",
        "--server-gpu-count",
        "1",
    ]


def llmeter(job: Job) -> list[str]:
    arguments = [job.url, str(job.streams), str(job.rounds), str(job.out)]
    return [job.python("llmeter"), "-c", LLMETER, *arguments]


def vllm_rs(job: Job) -> list[str]:
    """The program vllm/vllm-rs of vLLM's wheel."""
    return [
        str(job.peers / "vllm-rs/vllm-rs"),
        "bench",
        "serve",
        "--backend",
        "openai-chat",
        "--base-url",
        job.url,
        "--model",
        "truth-model",
        "--tokenizer",
        str(job.tokenizer),
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(write_prompts(job)),
        "--custom-output-len",
        str(TOKENS),
        "--num-prompts",
        str(job.requests),
        *vllm_result(job),
    ]


def endpoints(job: Job) -> list[str]:
    return [
        str(job.peers / "endpoints/bin/inference-endpoint"),
        "benchmark",
        "online",
        "--endpoints",
        job.url,
        "--model",
        "truth-model",
        "--dataset",
        str(write_prompts(job)),
        "--load-pattern",
        "concurrency",
        "--concurrency",
        str(job.streams),
        "--num-samples",
        str(job.requests),
        "--max-output-tokens",
        str(TOKENS),
        "--min-output-tokens",
        str(TOKENS),
        "--streaming",
        "on",
        "--tokenizer",
        str(job.tokenizer),
        "--report-dir",
        str(job.out / "report"),
        "--duration",
        "0",
    ]


def endpoints_result(folder: Path, _: int) -> Quantiles:
    """Its summary's empirical percentiles; it measures no gaps between tokens."""
    found = json.loads((folder / "report/performance/result_summary.json").read_text())
    return {
        f"{ours}_ms": {f"p{quantile}": found[theirs]["percentiles"][f"{quantile}.0"] / 1e6 for quantile in (50, 99)}
        for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"))
    }


def lmi_bench(job: Job) -> list[str]:
    return [
        sys.executable,
        "-m",
        "lmi_bench",
        "sweep",
        job.url,
        "--protocol",
        "openai-chat",
        "--model",
        "truth-model",
        "--isl",
        "64",
        "--osl",
        str(TOKENS),
        "--concurrency",
        str(job.streams),
        "--requests-per-user",
        str(job.rounds),
        "--workers",
        "1",
        "--out",
        str(job.out / "run"),
    ]


def lmi_bench_result(folder: Path, _: int) -> Quantiles:
    (level,) = load_run(folder / "run").levels
    return level.to_json()


def lmi_bench_says(folder: Path) -> str:
    (level,) = load_run(folder / "run").levels
    if not level.valid:
        return f"invalid: {(level.invalid_reason or '').partition(';')[0]}"
    bounds = [level.generator.p99_bound(metric)[1] for metric in ("ttft", "itl")]
    return "valid, " + " and ".join("?" if one is None else f"{one:.2%}" for one in bounds)


def write_prompts(job: Job) -> Path:
    path = job.out / "prompts.jsonl"
    line = json.dumps({"prompt": "time " * 64}) + "\n"
    path.write_text(line * job.requests)
    return path


PEERS = {
    "vllm": Peer(vllm, imported("vllm.json")),
    "vllm-rs": Peer(vllm_rs, imported("vllm.json")),
    "endpoints": Peer(endpoints, endpoints_result),
    "lmi-bench": Peer(lmi_bench, lmi_bench_result, says=lmi_bench_says),
    "aiperf": Peer(aiperf, imported("profile_export_aiperf.json"), offline=False),
    "guidellm": Peer(guidellm, imported("guidellm.json")),
    "genai-bench": Peer(genai_bench, imported("g/D*.json")),
    "llmeter": Peer(llmeter, imported("r/responses.jsonl")),
}


def run(name: str, port: int, options: argparse.Namespace) -> str:
    """A row of the table."""
    peer, columns = PEERS[name], TITLES.count("|") - 2
    with tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{port}"
        job = Job(url, options.streams, options.rounds, options.tokenizer, options.peers, Path(folder))
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
        if peer.offline:
            environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        accuracy.call(port, "/truth/reset", "POST")
        start_s = time.monotonic()
        try:
            done = subprocess.run(
                peer.command(job),
                capture_output=True,
                text=True,
                timeout=options.timeout_s,
                env=environment,
                cwd=folder,
                preexec_fn=lambda: accuracy.take_cores(accuracy.CLIENT_CORE),
            )
        except FileNotFoundError:
            return f"| {name} | not installed |" + " |" * (columns - 2)
        except subprocess.TimeoutExpired:
            return f"| {name} | not done after {options.timeout_s:g} s |" + " |" * (columns - 2)
        took_s = time.monotonic() - start_s
        truth = accuracy.call(port, "/truth/stats", "GET")
        try:
            reported, says = peer.read(job.out, job.streams), peer.says(job.out)
        except (StopIteration, OSError, InputError):
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            why = f"failed (exit status {done.returncode}): {lines[-1][:90]}"
            return f"| {name} | {why} |" + " |" * (columns - 2)
    beside_s = took_s - (truth["t_last_send_ns"] - truth["t_first_recv_ns"]) / 1e9
    cells = (job.streams, f"{options.burn:.0%}", row(reported, truth), says, truth["completed"])
    return f"| {name} | {' | '.join(map(str, cells))} | {took_s:.1f} | {beside_s:.1f} |"


def row(reported: Quantiles, truth: Mapping[str, Any]) -> str:
    cells = [error(reported["ttft_ms"].get(q), truth["ttft_from_arrival"][f"{q}_ms"]) for q in ("p50", "p99")]
    gaps, mark = reported.get("itl_ms") or {}, ""
    if gaps.get("p50") is None and gaps.get("p99") is None:
        gaps, mark = reported.get("tpot_ms") or {}, " TPOT"
    for q in ("p50", "p99"):
        shown = error(gaps.get(q), truth["itl"][f"{q}_ms"])
        cells.append(shown + (mark if shown != "n/a" else ""))
    return " | ".join(cells)


def error(reported: float | None, true: float) -> str:
    if reported is None or reported != reported:
        return "n/a"
    return f"{100 * (reported / true - 1):+.1f}"


TITLES = (
    "| tool | streams | core burnt | TTFT p50 % | TTFT p99 % | ITL p50 % | ITL p99 % | says | "
    "requests | took s | beside s |"
)


def table(
    peers: Path,
    tokenizer: Path,
    port: int,
    *,
    only: Sequence[str] = ("vllm", "aiperf", "guidellm", "genai-bench", "llmeter"),
    loads: Sequence[tuple[int, int]] = ((512, 3),),
    burns: Sequence[float] = (0.0,),
    timeout_s: float = 150.0,
) -> Iterator[str]:
    """The table's lines, each when its tool is done. loads: streams, and requests of each."""
    server = argparse.Namespace(ttft_ms=200.0, itl_ms=20.0, tokens=TOKENS, realtime=False)
    yield TITLES
    yield "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|"
    with tempfile.TemporaryDirectory() as folder:
        for (streams, rounds), burn, name in itertools.product(loads, burns, only):
            options = argparse.Namespace(
                peers=peers, tokenizer=tokenizer, streams=streams, rounds=rounds, timeout_s=timeout_s, burn=burn
            )
            with accuracy.truth_server("c", Path(folder), port, server), accuracy.burnt_core(burn, False):
                yield run(name, port, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="folder of virtual environments")
    parser.add_argument("--tokenizer", type=Path, required=True, help="any small tokenizer's folder")
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--streams", default="512", help="such as 32,512")
    parser.add_argument("--rounds", default="3", help="requests of each stream, such as 16,4")
    parser.add_argument("--burn", default="0", help="shares of the core burnt, such as 0,0.6")
    parser.add_argument("--timeout-s", type=float, default=150.0)
    parser.add_argument("--port", type=int, default=18412)
    parser.add_argument("--write", type=Path, help="this Markdown file, too")
    options = parser.parse_args()
    lines = table(
        options.peers,
        options.tokenizer,
        options.port,
        only=options.only.split(","),
        loads=list(zip(_numbers(options.streams), _numbers(options.rounds), strict=True)),
        burns=[float(text) for text in options.burn.split(",")],
        timeout_s=options.timeout_s,
    )
    page = accuracy.Page(options.write, PREFACE)
    page.add(accuracy.machine(realtime=False))
    for line in lines:
        page.add(line)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
