"""Answers that must follow a grammar do, in mixed batches, with speculation and preemption."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from lmi_bench.core.errors import InputError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.grammar import Follower, calls_grammar, read_grammar
from lmi_bench.engine.native_backend.executor import NativeExecutor
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter, NgramDrafter
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.engine.torch_backend.executor import ParallelExecutor, TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from tests.engine.server.test_chat_template import with_template
from tests.engine.server.test_tool_calls import HISTORY, QWEN, WEATHER
from tests.engine.torch_backend.tiny_models import TinyModel

pytest.importorskip("llguidance", reason="needs the extra `structured`")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
VOCAB = 320
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("structured"))


def write_model(folder):
    """A tiny random model whose tokens are bytes and some merges; 1 ends an answer."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in ("<s>", "</s>")],
    )
    tokenizer.train_from_iterator([json.dumps(SCHEMA), json.dumps(HISTORY)], trainer)
    config = {"vocab_size": VOCAB, "eos_token_id": 1, "bos_token_id": 0}
    TinyModel(folder, "Llama", max_position_embeddings=2048, **config)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN}))
    return folder


SETTINGS = LoadSettings(dtype="float32", num_blocks=256, block_size=16, threads=1, sampling_seed=3)


def structured_server(serve_toy, folder, **settings):
    settings = {"max_model_len": 1024, "executor": TorchExecutor.load(folder, SETTINGS)} | settings
    return serve_toy(**with_template(folder), **settings)


def test_two_hundred_answers_keep_their_schema(serve_toy, folder):
    """A random model draws at temperature 1; beside them run answers without a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    requests = [{"prompt": f"Person {i}: ", "max_tokens": 400, "seed": i, "response_format": form} for i in range(200)]

    async def main():
        async with structured_server(serve_toy, folder) as server:
            free = [{"prompt": f"Free {i}", "max_tokens": 30} for i in range(20)]
            return await asyncio.gather(*(server.post("/v1/completions", body) for body in requests + free))

    replies = [json.loads(body)["choices"][0] for _, _, body in asyncio.run(main())]
    for choice in replies[:200]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert len({choice["text"] for choice in replies[:200]}) > 150
    assert {choice["finish_reason"] for choice in replies[200:]} <= {"length", "stop"}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}, "[ab]{3}-[0-9]"),
        ({"guided_regex": "[ab]{3}", "temperature": 0}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no é"]}}, "yes|no é"),
        ({"guided_choice": ["a"]}, "a"),
        ({"guided_choice": [f"c{i}" for i in range(3000)]}, "c[0-9]{1,4}"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
        ({"guided_grammar": 'start: "x" ("1" | "2")'}, "x[12]"),
        ({"guided_json": {"enum": [1, 2]}, "min_tokens": 8}, "1|2"),
    ],
)
def test_every_kind_of_grammar_is_kept_by_all_choices(serve_toy, folder, fields, pattern):
    """`min_tokens` cannot lengthen an answer that its grammar has ended."""

    async def main():
        async with structured_server(serve_toy, folder) as server:
            body = {"prompt": "a", "max_tokens": 50, "n": 3, "seed": 1} | fields
            return await server.post("/v1/completions", body)

    for choice in json.loads(asyncio.run(main())[2])["choices"]:
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "(["}, "the regex cannot be used as a grammar"),
        ({"guided_regex": r"[^\s\S]"}, "the regex cannot be used as a grammar: no answer can follow it"),
        ({"guided_json": {"type": "thing"}}, "Invalid type: thing"),
        ({"structured_outputs": {"structural_tag": "a"}}, 'structured_outputs.structural_tag must be omitted, got "a"'),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema', got",
        ),
        ({"response_format": {"type": "json_schema"}}, "the json cannot be used"),
        ({"guided_json": {}, "guided_regex": "a"}, "can follow one grammar: 2 were sent"),
        ({"guided_json": 5}, "the json cannot be used"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice must be a non-empty"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice must be a non-empty"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex must be a string, got 5"),
        ({"structured_outputs": {"json": {}}, "guided_json": {}}, "2 were sent"),
        ({"structured_outputs": 5}, "structured_outputs must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "must be an object"),
        ({"guided_grammar": "start: nothing"}, "the grammar cannot be used"),
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused(serve_toy, folder, fields, message):
    async def main():
        async with structured_server(serve_toy, folder) as server:
            return await server.post("/v1/completions", {"prompt": "a"} | fields)

    status, _, body = asyncio.run(main())
    assert (status, message in json.loads(body)["error"]["message"]) == (400, True)


def test_an_answer_that_left_its_grammar_is_an_error(serve_toy, folder, monkeypatch):
    """Beyond a limit of the library only the end may follow, which looked like a whole answer."""
    monkeypatch.setattr("lmi_bench.engine.grammar._LIMITS", {"max_items_in_row": 9})
    grammar = "start: " + " | ".join(f'"left{i}"' for i in range(20))
    body = {"prompt": "a", "guided_grammar": grammar, "max_tokens": 50}

    async def main():
        async with structured_server(serve_toy, folder) as server:
            replies = [await server.post("/v1/completions", body | {"stream": stream}) for stream in (False, True)]
            return replies, server.engine.stats().used_blocks

    (whole, stream), used = asyncio.run(main())
    assert (whole[0], b"left its grammar" in whole[2]) == (500, True)
    assert b"left its grammar" in stream[2]
    assert b'"finish_reason":"stop"' not in stream[2]
    assert used == 0


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object_may_be_asked_for(serve_toy, folder, fields):
    async def main():
        async with structured_server(serve_toy, folder) as server:
            body = {"prompt": "a", "max_tokens": 4, "n": 9, "seed": 1} | fields
            return await server.post("/v1/completions", body)

    choices = json.loads(asyncio.run(main())[2])["choices"]
    assert all(re.match(r'\{\s*("|\}|$)', choice["text"]) for choice in choices)


@pytest.mark.parametrize("begin", ["", '[{"name": "f", "parameters": '])
def test_whitespace_in_json_ends(folder, begin):
    """A model that writes nothing else would use all its tokens for it."""
    tokenizer = Tokenizer.from_folder(folder)
    kind, value = "json", SCHEMA
    if begin:
        functions = [{"name": "f", "parameters": SCHEMA}]
        kind, value = "grammar", calls_grammar(functions, several=False)
    for count, held in ((24, True), (25, False)):
        follower = Follower(read_grammar(kind, value, folder, VOCAB))
        answer = tokenizer.encode(begin + "{" + " " * count + '"name"')
        assert follower.forbidden(answer).any() == held


def test_an_answer_that_may_call_tools_has_no_grammar_beside(serve_toy, folder):
    """Taking both would drop one: a grammar leaves no room for calls."""
    chat = {"messages": HISTORY[:1], "tools": [WEATHER], "guided_regex": "a"}

    async def main():
        async with structured_server(serve_toy, folder) as server:
            choices = ("auto", "required", "none")
            return [await server.post(CHAT, chat | {"tool_choice": choice}) for choice in choices]

    auto, required, none = asyncio.run(main())
    for status, _, body in (auto, required):
        assert (status, b"cannot follow a grammar too" in body) == (400, True)
    assert json.loads(none[2])["choices"][0]["message"]["content"] == "a"


def test_a_tokenizer_that_the_library_cannot_use_is_refused_in_one_line(tmp_path):
    FastTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(InputError, match=r"the regex cannot be used as a grammar: can't determine"):
        read_grammar("regex", "a", tmp_path, 1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="has no end-of-sequence token"):
        read_grammar("regex", "a", tmp_path, 1)


def test_the_model_may_have_more_tokens_than_its_tokenizer_and_several_ends(tmp_path, folder):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    follower = Follower(read_grammar("regex", "ab?", tmp_path, VOCAB + 9))
    (a,), (b,) = map(Tokenizer.from_folder(folder).encode, "ab")
    assert follower.forbidden([]).shape == (VOCAB + 9,)
    assert np.flatnonzero(~follower.forbidden([])).tolist() == [a]
    assert np.flatnonzero(~follower.forbidden([a])).tolist() == [1, 2, b]
    assert np.flatnonzero(~follower.forbidden([a, 1])).tolist() == [1, 2]  # nothing else is left
    assert not follower.forbidden([b]).any()  # a draft that will be rejected
    assert np.flatnonzero(~follower.forbidden([a, b])).tolist() == [1, 2]


def test_a_simulated_server_has_no_text_to_structure(serve_toy):
    async def main():
        async with serve_toy() as server:
            return await server.post("/v1/completions", {"prompt": "a", "guided_regex": "a"})

    status, _, body = asyncio.run(main())
    assert (status, b"needs a real model" in body) == (400, True)


@pytest.mark.parametrize(
    ("choice", "several", "names"),
    [
        ("required", False, {"weather", "clock"}),
        ("required", True, {"weather", "clock"}),
        ({"type": "function", "function": {"name": "clock"}}, True, {"clock"}),
    ],
)
def test_a_call_can_be_forced(serve_toy, folder, choice, several, names):
    city = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}}
    city |= {"required": ["city"], "additionalProperties": False}
    city |= {"$defs": {"city": {"enum": ["Rome", "Oslo"]}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": city}} for name in ("weather", "clock")]

    async def main():
        async with structured_server(serve_toy, folder) as server:
            body = {"messages": HISTORY[:1], "tools": tools, "tool_choice": choice}
            body |= {"max_tokens": 300, "parallel_tool_calls": several}
            wrong = {"type": "function", "function": {"name": "other"}}
            return (
                await asyncio.gather(*(server.post(CHAT, body | {"seed": i}) for i in range(10))),
                await server.post(CHAT, body | {"tool_choice": wrong}),
            )

    replies, wrong = asyncio.run(main())
    found, counts = set(), set()
    for _, _, reply in replies:
        (answer,) = json.loads(reply)["choices"]
        assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        calls = answer["message"]["tool_calls"]
        counts.add(len(calls))
        for call in calls:
            assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
            found.add(call["function"]["name"])
    assert found == names
    assert (max(counts) > 1) == (several and choice == "required")
    assert (wrong[0], b"one of the tools" in wrong[2]) == (400, True)


CASES = ["ngram", "draft", "preemption", "chunks", "ranks", "native"]


@pytest.mark.parametrize("case", CASES)
def test_grammars_are_kept_whatever_computes_the_steps(folder, case):
    """Drafts that break the grammar are rejected; a preempted answer takes its grammar up again.
    Where the arithmetic is the same, so are the answers."""
    grammar = read_grammar("json", SCHEMA, folder, VOCAB)
    prompts = [[5 + i, 9, 9, 20 + i] * 4 for i in range(8)]

    async def main(case):
        blocks = 24 if case == "preemption" else 256
        chunks = {"max_rolling_batch_prefill_tokens": 8} if case == "chunks" else {}
        config = SchedulerConfig(num_blocks=blocks, max_model_len=512, block_size=16, **chunks)
        loader = {"ranks": partial(ParallelExecutor.load, tensor_parallel=2), "native": NativeExecutor.load}.get(
            case, TorchExecutor.load
        )
        settings = replace(SETTINGS, num_blocks=blocks)
        executor = loader(folder, settings)
        if case == "draft":
            beside = TorchExecutor.load(folder, settings, beside=executor)
            executor = DraftingExecutor(executor, beside)
        drafter = {"ngram": NgramDrafter(4, shortest=1), "draft": ExecutorDrafter(3)}.get(case)
        async with AsyncEngine(Scheduler(config, drafter=drafter), executor) as engine:
            shared = {"max_new_tokens": 300, "eos_token_ids": (1,), "temperature": 1.0}
            running = [
                engine.submit(prompt, SamplingParams(seed=i, grammar=grammar, **shared))
                for i, prompt in enumerate(prompts)
            ]
            for generation in running:
                await generation.wait()
            tokens = [[t for e in g.events for t in e.token_ids] for g in running]
            return tokens, engine.stats().done

    tokens, stats = asyncio.run(main(case))
    assert (stats.preemptions > 0) == (case == "preemption")
    assert (stats.accepted_tokens > 0) == (case in ("ngram", "draft"))
    tokenizer = Tokenizer.from_folder(folder)
    for answer in tokens:
        jsonschema.validate(json.loads(tokenizer.decode(answer)), SCHEMA)
    if case not in ("ranks", "native"):
        assert tokens == asyncio.run(main("plain"))[0]


def test_without_the_library_one_line_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"structured output needs llguidance: pip install 'lmi"):
        read_grammar("json", SCHEMA, folder, VOCAB)
