"""Scenarios, traces, logs, tables, prices, other tools' results and model folders with wrong values
or torn bytes: one line each.

LMI_BENCH_FUZZ is the number of damaged files here and in test_damaged_files (`make fuzz`: 100,000).
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import yaml

from lmi_bench.catalog.fresh_prices import fresh_prices
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.engine.torch_backend.static import artefact
from lmi_bench.engine.torch_backend.static.artefact import open_artefact
from tests.engine.server.test_structured import write_model
from tests.fuzz.damage import SEED, call, damage, find, run, wrong

NUMBER = int(os.environ.get("LMI_BENCH_FUZZ", "2000")) // 2
BATCHES = 3 if NUMBER <= 1000 else 50
DATA = Path(__file__).parents[1] / "data"
SIM = "sim:ml.g5.2xlarge"
MACHINE = ("--model", "qwen3-8b", "--instance", "ml.g5.2xlarge")
TORCH = ("--backend", "torch", "--dtype", "float32")  # bfloat16 kernels take 0.3 s to make
LEVEL = ("--requests-per-level", "4", "--isl", "64", "--osl", "8")
SCENARIO = """
name: chat
target: sim:ml.g5.2xlarge
model: qwen3-8b
workload: {input_tokens: 64, output_tokens: 8, shared_prefix: 16}
load: {concurrency: [1, 2], requests_per_level: 4}
timeout_s: 30
slo: [ttft_p90<=1s]
engine: {batch_size: 8}
"""
MOONCAKE = """{"timestamp": 500, "input_length": 755, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 0, "input_length": 1019, "output_length": 4, "hash_ids": [0, 2]}
"""
BAILIAN = """{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 40, \
"output_length": 13, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 70.5, "input_length": 70, \
"output_length": 9, "type": "text", "turn": 2, "hash_ids": [1, 2, 3, 4, 5]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,216,5
2024-05-10 00:00:01+00:00,239,6
2024-05-10 01:00:01.25+01:00,70,9
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,108,7,115,API log
"""
CALL = {"type": "s", "model": "m", "in": 128, "out": 10, "hash_ids": [1, 2], "api_time": 2.0}
AGENT = {"t": 5.0, "type": "subagent", "agent_id": "a", "status": "completed"}
WEKA = {"id": "a", "block_size": 64}
WEKA |= {"requests": [CALL | {"t": 0.0}, AGENT | {"requests": [CALL | {"t": 0}]}, CALL | {"t": 9}]}
SPANS = [
    {
        "traceId": "t",
        "spanId": str(number),
        "parentSpanId": "",
        "startTimeUnixNano": f"17{number}0000000",
        "endTimeUnixNano": f"17{number}9000000",
        "attributes": [
            {"key": f"gen_ai.usage.{way}_tokens", "value": {"intValue": "40"}} for way in ("input", "output")
        ],
    }
    for number in (1, 2, 3)
]
LITELLM = [
    {
        "startTime": f"2026-01-01T00:00:0{second}Z",
        "prompt_tokens": 30,
        "completion_tokens": 6,
        "status": "success",
        "messages": {},
        "call_type": "acompletion",
        "cache_hit": "False",
    }
    for second in (1, 3, 6)
]
CELLS = """model,instance,tp,dtype,input_tokens,output_tokens,concurrency_or_rate,\
throughput_tokens_per_s,ttft_ms,itl_ms,e2e_ms,engine
Qwen/Qwen3-8B,ml.g5.2xlarge,1,bf16,256,64,c=1,28,90,35,2300,vllm 0.12.0
Qwen/Qwen3-8B,ml.g5.2xlarge,1,bf16,256,64,c=4,105,130,37,2450,vllm 0.12.0
Qwen/Qwen3-8B,ml.g5.2xlarge,1,bf16,1024,64,c=8,190,400,40,2950,vllm 0.12.0
"""
OPEN = "Qwen/Qwen3-8B,ml.g5.2xlarge,1,bf16,256,64,r=1,60,110,36,2400,vllm 0.12.0\n"
PRICES = """machine,accelerator,accelerators,usd_per_hour,interconnect,network_gbit_per_s,region,\
date
h200-8,H200,8,24.00,,3200,elsewhere,2026-11-01
l40s-4,L40S,4,5.20,shared-pcie,,elsewhere,2026-11-01
"""
DAY = "hour,rate_per_s\n0,1\n6,4\n12,5\n18,3\n"
MATRIX = """
targets: [{name: g5, target: "sim:ml.g5.2xlarge", model: qwen3-8b}]
payloads:
  - {name: chat, workload: {input_tokens: 64, output_tokens: 8}}
defaults: {load: {concurrency: [1], requests_per_level: 4}}
"""
DIALOGUES = """{"conversations": [{"from": "human", "value": "How much is 1 + 1?"}, \
{"from": "gpt", "value": "It is 2."}, {"from": "human", "value": "Why?"}]}
{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
"""
PROMPTS = '{"prompt": "Hi", "output_tokens": 3}\n{"text": "Ho"}\n'
QUESTIONS = '{"prompt": "1+1=", "choices": ["2", "3"], "answer": "2"}\n' * 3
TEXTS = {
    "scenario.yaml": SCENARIO,
    "mooncake.jsonl": MOONCAKE,
    "bailian.jsonl": BAILIAN,
    "azure.csv": AZURE,
    "burst.csv": BURSTGPT,
    "weka.json": json.dumps(WEKA),
    "spans.json": json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": SPANS}]}]}),
    "log.jsonl": "".join(f"{json.dumps(row)}\n" for row in LITELLM),
    "cells.csv": CELLS,
    "table.csv": CELLS + OPEN,
    "prices.csv": PRICES,
    "day.csv": DAY,
    "questions.jsonl": QUESTIONS,
    "matrix.yaml": MATRIX,
    "prompts.jsonl": PROMPTS,
    "dialogues.jsonl": DIALOGUES,
}


def sweep(*options):
    return lambda file, out: ("sweep", SIM, "--model", "qwen3-8b", *LEVEL[:2], *options, file, "--out", out)


def played(option):
    """Texts are played on a tiny model; on a busy machine a reply of 300 tokens takes its time."""
    few = ("--requests-per-level", "2", "--concurrency", "1", "--osl", "4", "--timeout", "4")
    return lambda file, out: (
        "sweep",
        "--target",
        "engine",
        "--model",
        file.parent / "model",
        *few,
        *TORCH,
        option,
        file,
        "--out",
        out,
    )


def priced(command):
    return lambda file, out: (command, "--platform", "file", "--prices", file, *MACHINE[:2], *LEVEL[2:])


def matrix(file, out):
    return ("sweep", "--matrix", file, *LEVEL[:2], "--concurrency", "1", "--out", out)


def generate(file, out):
    return ("generate", "--model", file.parent, "--prompt", "ab", "--max-new-tokens", "2", *TORCH)


def predict(file, out):
    return ("predict", "--model", file.parent, *MACHINE[2:], "--concurrency", "2", *LEVEL[2:])


def imported(file, out):
    load = () if "sweep" in file.name else ("--concurrency", "4")
    return ("import", file, *load, "-o", out)


DOORS = {
    "scenario.yaml": [lambda file, out: ("sweep", file, "--target", SIM, *LEVEL[:2], "--out", out)],
    "mooncake.jsonl": [sweep("--trace"), lambda file, out: ("workload", "from", file, "-o", out)],
    "bailian.jsonl": [sweep("--trace"), sweep("--concurrency", "2", "--agent-trace")],
    "matrix.yaml": [matrix],
    "dialogues.jsonl": [played("--conversations")],
    "prompts.jsonl": [played("--dataset")],
    "binary/pytorch_model.bin": [lambda file, out: ("convert", file.parent, "--out", out)],
    "azure.csv": [sweep("--trace"), lambda file, out: ("workload", "from", file, "-o", out)],
    "burst.csv": [sweep("--trace"), lambda file, out: ("workload", "from", file, "-o", out)],
    "weka.json": [sweep("--concurrency", "2", "--agent-trace")],
    "spans.json": [sweep("--concurrency", "2", "--agent-trace")],
    "log.jsonl": [lambda file, out: ("workload", "from", file, "-o", out)],
    "table.csv": [lambda file, out: ("validate", file, "--calibrate-cells", "0")],
    "cells.csv": [lambda file, out: ("calibrate", file, "-o", out)],
    "prices.csv": [priced("recommend"), priced("compare-accelerators")],
    "day.csv": [lambda file, out: ("plan-day", file.parent / "rec.json", "--load", file)],
    "questions.jsonl": [lambda file, out: ("generate", "--model", file.parent / "model", "--questions", file, *TORCH)],
    "model/config.json": [generate, predict],
    "model/tokenizer.json": [generate],
    "model/tokenizer_config.json": [generate],
    "model/generation_config.json": [generate],
    "model/model.safetensors": [generate],
    "sizes/model.safetensors": [predict],
    "index/model.safetensors.index.json": [predict],
    **{f"imports/{path.name}": [imported] for path in sorted((DATA / "imports").iterdir())},
    **{f"imports_real/{path.name}": [imported] for path in sorted((DATA / "imports_real").iterdir()) if path.is_file()},
    **{
        f"deploy/{path.name}": [lambda file, out: ("deploy", "check", file)]
        for path in sorted((DATA / "deploy").iterdir())
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    whole = json.loads(parse_scenario(yaml.safe_load(SCENARIO)).model_dump_json())
    whole["load"] = yaml.safe_load(SCENARIO)["load"]  # a load of a million takes its time
    (folder / "scenario.yaml").write_text(yaml.safe_dump(whole))
    for name in ("imports", "imports_real", "deploy"):
        shutil.copytree(DATA / name, folder / name)
    (folder / "model").mkdir()
    write_model(folder / "model")
    for name in ("sizes", "index"):  # planned by the tensors alone
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "something_new"}')
    shutil.copy(folder / "model" / "model.safetensors", folder / "sizes")
    names = {f"model.layers.{number}.x.weight": "a.safetensors" for number in range(8)}
    index = {"metadata": {"total_size": 2**28}, "weight_map": names}
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "binary").mkdir()
    shutil.copy(folder / "model" / "config.json", folder / "binary")
    torch.save({"a.weight": torch.zeros(2, 2)}, folder / "binary" / "pytorch_model.bin")
    slo = ("--rate", "1", "--slo", "ttft_p90<=1s", *LEVEL[2:])
    call("recommend", *MACHINE, *slo, "--json", folder / "rec.json")
    return folder


@pytest.fixture
def folder(base, tmp_path):
    return shutil.copytree(base, tmp_path / "copied")


def one(base, folder, draw):
    """Damage a file and give it to a command that reads it."""
    name = draw.choice([*DOORS])
    shutil.copytree(base, folder, copy_function=os.link)  # a copy of 60 files takes its time
    (folder / name).unlink()
    shutil.copyfile(base / name, folder / name)
    damage(folder / name, draw)
    command = draw.choice(DOORS[name])(folder / name, folder / "out")
    call(*command)
    return name, command[0]


@pytest.mark.parametrize("name", DOORS)
def test_what_is_not_damaged_is_read(folder, name):
    """Else the damaged ones would all end at the same first line."""
    for number, door in enumerate(DOORS[name]):
        run(*door(folder / name, folder / f"out{number}"))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_damaged_input_ends_in_one_line(base, tmp_path, batch):
    seeds = range(SEED + batch, SEED + NUMBER, BATCHES)
    assert find(seeds, tmp_path, lambda folder, draw: one(base, folder, draw)) == []


FRESH = {"instance": "ml.g5.xlarge", "platform": "sagemaker", "usd_per_hour": 1.4}
FRESH |= {"region": "us-east-1", "date": "2026-11-01", "source": "AWS price list"}
KEY = {"format": 1, "model": "a", "settings": "{}"}
READERS = {
    "prices.json": ({"schema": 1, "prices": [FRESH, FRESH | {"platform": "ec2"}]}, lambda _: fresh_prices()),
    "manifest.json": (
        {"key": KEY, "shapes": {"1x64": {"file": "a", "sha256": "0", "bytes": 1, "compile_s": 1.5}}},
        lambda folder: open_artefact(folder, KEY),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_of_the_program_itself_is_one_line(tmp_path, monkeypatch, name):
    """Downloaded prices, and compiled steps: what no command names on its line."""
    monkeypatch.setenv("LMI_BENCH_DATA", str(tmp_path))
    (tmp_path / "a").touch()
    monkeypatch.setattr(artefact, "_sha256", lambda _: "0")
    whole, read = READERS[name]
    for seed in range(SEED, SEED + 300):
        content = wrong(deepcopy(whole), random.Random(seed)) if seed else whole
        (tmp_path / name).write_text(json.dumps(content), errors="surrogatepass")
        fresh_prices.cache_clear()
        try:
            read(tmp_path)
        except InputError as exc:
            assert seed, exc  # noqa: PT017 - what is not damaged is read
        except OSError as exc:
            assert exc.errno == errno.ENAMETOOLONG  # noqa: PT017 - the last handler names it
    fresh_prices.cache_clear()


HUGE, VAST = "1e308", "1" + "0" * 400
MISSING = [{"SpecialToken": {"id": "no", "type_id": 0}}]
LACKING = {"type": "TemplateProcessing", "single": MISSING, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("burst.csv", "\n45,", f"\n{HUGE},"),
        ("bailian.jsonl", '"input_length": 70', f'"input_length": {VAST}'),
        ("spans.json", '"startTimeUnixNano": "1720000000"', f'"startTimeUnixNano": {HUGE}'),
        ("log.jsonl", '"status": "success"', '"status": "\\ud800"'),
        ("day.csv", "\n6,", "\nnan,"),
        ("day.csv", "\n6,4", f"\n6,{HUGE}"),
        ("day.csv", "\n18,3", "\n24,0"),
        ("day.csv", "\n6,4", "\n6,1e-320"),
        ("table.csv", "c=4", f"c={VAST}"),
        ("table.csv", "r=1", "r=1e-300"),
        ("prices.csv", "2026-11-01", "2026-13-45"),
        ("scenario.yaml", "turns: null", f"turns: {VAST}"),
        ("scenario.yaml", "profile: null", f"profile: '{'9' * 300}'"),
        ("matrix.yaml", "workload: {input_tokens: 64, output_tokens: 8}", "workload: 1.5"),
        ("matrix.yaml", "- {name: chat, workload", '- "\\ud800"\n  - {name: chat, workload'),
        ("matrix.yaml", "name: chat", f"name: {'ü' * 300}"),
        ("matrix.yaml", "input_tokens: 64", f"input_tokens: {VAST}"),
        ("model/config.json", '"intermediate_size": 96', f'"intermediate_size": {VAST}'),
        ("model/tokenizer.json", '      "Properties": 309,\n', ""),
        ("model/tokenizer.json", '"post_processor": null', f'"post_processor": {json.dumps(LACKING)}'),
        ("model/generation_config.json", '"eos_token_id": 1', '"eos_token_id": [[1]]'),
        ("imports/awscurl.json", '"totalRequests": 400', f'"totalRequests": {2**70}'),
        ("imports/llmeter_responses.jsonl", '"error": null', '"error": "\\ud800"'),
        ("imports/vllm_detailed.json", '"input_lens": [\n  10', f'"input_lens": [\n  {VAST}'),
        ("imports/llmperf_individual_responses.json", '"ttft_s": 0.2', f'"ttft_s": {HUGE}'),
    ],
)
def test_a_value_that_once_broke_a_command_is_named(folder, name, old, new):
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    for number, door in enumerate(DOORS[name]):
        call(*door(folder / name, folder / f"out{number}"))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("explain savings", "CHEAP, DEAR: missing"),
        ("recommend --model qwen3-8b --isl 64 --osl 8 --blended-ratio -1", "at least 0"),
        ("sweep --target sim:ml.g5.2xlarge --model qwen3-8b --rate 1e-20", "1e-12 to 1e9"),
    ],
)
def test_options_that_once_broke_a_command_are_named(tmp_path, command, says):
    out = ("--out", tmp_path) if command.startswith("sweep") else ()
    with pytest.raises(InputError, match=says):
        run(*command.split(), *out)
