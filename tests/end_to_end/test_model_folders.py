"""Folders of other families than the demo models': served, swept and simulated."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.engine.torch_backend.demo_vocabulary import VOCAB_SIZE, demo_tokenizer_json
from tests.end_to_end.commands import Server, lmi_bench
from tests.engine.torch_backend.tiny_models import TinyModel

GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
FAMILIES = {"Mixtral": {}, "Falcon": GROUPED}
PROMPT = " the cat can see a dog"


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny model with the demo models' vocabulary, as a folder that one could download."""
    folder = tmp_path_factory.mktemp("folder") / f"tiny-{request.param.lower()}"
    made = TinyModel(folder, request.param, vocab_size=VOCAB_SIZE, **FAMILIES[request.param])
    (folder / "tokenizer.json").write_text(demo_tokenizer_json(), encoding="utf-8")
    return made


def levels_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "levels.jsonl").read_text().splitlines()]


def test_serve_answers_with_the_tokens_that_transformers_gives(model):
    tokenizer = Tokenizer.from_folder(model.folder)
    reference = model.greedy(tokenizer.encode(PROMPT), 12)
    assert min(reference.gaps) > 1e-4
    server = Server("--model", str(model.folder), "--dtype", "float32", "--threads", "1")
    try:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        call = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps({"model": model.folder.name, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        code, _ = server.stop()
    assert code == 0
    assert text == tokenizer.decode(reference.token_ids)


def test_a_sweep_measures_every_request_with_a_chosen_cache_format(model, tmp_path):
    run = tmp_path / "run"
    lmi_bench(
        *("sweep", "--target", "engine", "--model", model.folder, "--out", run),
        *("--input-tokens", "20", "--output-tokens", "6", "--concurrency", "1,3"),
        *("--warmup-requests", "0", "--threads", "1", "--kv-dtype", "float32"),
    )
    lines = levels_of(run)
    assert [(line["errors"], line["output_tokens"]) for line in lines] == [(0, 6 * line["requests"]) for line in lines]
    assert json.loads((run / "manifest.json").read_text())["target"]["kv_dtype"] == "float32"


def test_a_folder_can_be_simulated_without_its_weights(model, tmp_path):
    folder = tmp_path / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text((model.folder / "config.json").read_text())
    run = tmp_path / "run"
    lmi_bench(
        *("sweep", "--target", "sim:ml.g5.2xlarge", "--model", folder, "--out", run),
        *("--input-tokens", "20", "--output-tokens", "6", "--concurrency", "1"),
    )
    assert levels_of(run)[0]["errors"] == 0


def test_a_cache_format_is_refused_where_nothing_is_cached(tmp_path):
    done = lmi_bench(
        *("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b"),
        *("--kv-dtype", "float32", "--out", tmp_path / "run"),
        expect=2,
    )
    assert "--kv-dtype is for the bundled engine: a simulated engine has a cache" in done.stderr
