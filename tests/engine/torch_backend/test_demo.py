"""The demo models: made on first use, the same everywhere, with a vocabulary that round-trips."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.batch import BatchEntry, StepBatch, StepKind
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.engine.torch_backend.demo import ensure_demo_model
from lmi_bench.engine.torch_backend.demo_vocabulary import demo_tokens
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ensure_demo_model("demo-15m", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


def test_the_vocabulary_is_32000_distinct_ascii_strings(tokenizer):
    tokens = demo_tokens()
    assert len(set(tokens)) == len(tokens) == 32000 == tokenizer.vocab_size
    assert all(token and token.isascii() for token in tokens)
    assert [tokenizer.decode([token_id]) for token_id in range(32000)] == tokens


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 31999), max_size=60))
def test_any_sequence_of_ids_survives_the_way_through_text(tokenizer, ids):
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@settings(max_examples=200)
@given(text=st.text(max_size=60))
def test_any_text_has_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert bool(ids) == bool(text)
    assert all(0 <= token_id < 32000 for token_id in ids)


def test_short_words_of_a_persons_text_are_tokens(tokenizer):
    ids = tokenizer.encode("What is the cat?")
    assert tokenizer.decode(ids) == "<unk> is the cat<unk>"


def test_the_tokenizer_is_the_one_that_transformers_reads(folder, tokenizer):
    from transformers import AutoTokenizer

    ids = [5, 31999, 0, 2, 1, 777]
    text = tokenizer.decode(ids)
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids


def test_the_weights_are_15_million_and_the_same_each_time(folder, tmp_path):
    again = ensure_demo_model("demo-15m", tmp_path)
    first, second = (load_file(path / "model.safetensors") for path in (folder, again))
    assert sum(tensor.numel() for tensor in first.values()) == 15_191_712
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def test_a_model_that_is_there_is_not_written_again(folder):
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_demo_model("demo-15m", folder.parent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_several_makers_at_once_leave_one_whole_folder(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: ensure_demo_model("demo-15m", tmp_path), range(3)))
    assert len(set(folders)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folders[0].name]
    assert (folders[0] / "config.json").is_file()


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = ensure_demo_model("demo-15m")
    assert made == tmp_path / "lmi-bench" / "models" / "demo-15m-v1"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".cache").symlink_to(tmp_path)
    assert ensure_demo_model("demo-15m").name == "demo-15m-v1"


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"'demo-7b' is unknown.*demo-15m, demo-110m"):
        ensure_demo_model("demo-7b", tmp_path)


def test_it_answers_with_more_than_its_last_token(folder):
    """Random weights with tied embeddings easily say the same token for ever."""

    async def run():
        executor = TorchExecutor.load(folder, LoadSettings(num_blocks=2, threads=1))
        prompt = list(range(100, 116))
        sampling = SamplingParams()
        entry = BatchEntry(1, StepKind.PREFILL, prompt, 0, (0,), True, sampling)
        tokens = []
        for position in range(16, 46):
            (output,) = await executor.execute(StepBatch(0, (entry,), StepShape()))
            tokens += output.token_ids
            entry = BatchEntry(1, StepKind.DECODE, tokens[-1:], position, (), True, sampling)
        await executor.close()
        return tokens

    assert len(set(asyncio.run(run()))) > 10
