"""Answers that must follow a JSON schema: how many do, and what it costs a token.

`lmi-bench serve` with a model of random weights, which knows nothing of JSON, answers 200 prompts
at temperature 1, 16 at a time, with a schema and then without: of as many tokens, so that the time
a token takes can be compared. jsonschema judges the answers.

    python benchmarks/structured_answers.py --out benchmarks/results/structured_answers.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp
import jsonschema
from grammar_libraries import SCHEMA as UNBOUNDED
from grammar_libraries import trained
from transformers import LlamaConfig, LlamaForCausalLM

COUNT, AT_ONCE, VOCAB = 200, 16, 32_000
BACK_ENDS = ("native", "torch")
SCHEMA = json.loads(json.dumps(UNBOUNDED))
SCHEMA["properties"]["address"]["properties"]["street"]["maxLength"] = 40  # random text never ends


def write_model(folder: Path) -> int:
    """Random weights and a tokenizer of Python's library; the number of parameters."""
    trained(VOCAB, 5e6).save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used: on a shared machine, time would say less."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def answers(url: str, pid: int, lengths: list[int] | None) -> tuple[list[dict], float]:
    """The replies, and CPU seconds of the server. With a schema if there are no lengths."""
    free = asyncio.Semaphore(AT_ONCE)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}

    async def one(number: int) -> dict:
        body = {"prompt": f"Person {number}: ", "seed": number, "temperature": 1, "max_tokens": 600}
        if lengths is None:
            body |= {"response_format": form}
        else:
            body |= {"max_tokens": lengths[number], "ignore_eos": True}
        async with free, client.post("/v1/completions", json=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
            return reply

    async with aiohttp.ClientSession(url) as client:
        begin_s = cpu_s(pid)
        replies = await asyncio.gather(*map(one, range(COUNT)))
        return replies, cpu_s(pid) - begin_s


def is_valid(reply: dict) -> bool:
    try:
        jsonschema.validate(json.loads(reply["choices"][0]["text"]), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def row(folder: Path, back_end: str) -> str:
    command = [sys.executable, "-m", "lmi_bench", "serve", "--model", str(folder), "--port", "0"]
    command += ["--backend", back_end]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"serving (\S+) at (http://\S+)", process.stdout.readline())
        assert found is not None, "the server did not start"
        url = found[2]
        asyncio.run(answers(url, process.pid, [8] * COUNT))  # warm
        kept, kept_s = asyncio.run(answers(url, process.pid, None))
        lengths = [reply["usage"]["completion_tokens"] for reply in kept]
        _, free_s = asyncio.run(answers(url, process.pid, lengths))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    valid, tokens = sum(map(is_valid, kept)), sum(lengths)
    texts = len({reply["choices"][0]["text"] for reply in kept})
    each_ms = f"{kept_s / tokens * 1e3:.2f} | {free_s / tokens * 1e3:.2f}"
    return f"| {back_end} | {valid} of {COUNT} | {texts} | {tokens:,} | {each_ms} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file; the default is to print")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        parameters = write_model(Path(name))
        rows = [row(Path(name), back_end) for back_end in BACK_ENDS]
    lines = [
        "# Structured answers",
        "",
        f"{parameters:,} random parameters, a vocabulary of {VOCAB:,}, {COUNT} prompts at",
        f"temperature 1, {AT_ONCE} at a time; client and server share the machine.",
        "",
        "| back end | keep the schema | different | tokens | CPU ms a token | without a schema |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text) if out is None else out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
