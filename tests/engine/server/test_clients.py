"""Clients that people use, unmodified: those of OpenAI, LangChain, LiteLLM and lm-eval."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
import transformers

from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from tests.engine.server.test_structured import SETTINGS, structured_server, write_model
from tests.engine.server.test_tool_calls import HISTORY, PARIS, WEATHER, tool_server

openai = pytest.importorskip("openai", reason="needs the extra `clients`")


def test_openais_client_gets_calls_whole_and_streamed(tmp_path, serve_toy, scripted):
    answer = f"<tool_call>{PARIS}</tool_call>"
    chat = {"model": "toy", "messages": HISTORY, "tools": [WEATHER], "max_tokens": 200}

    async def main():
        async with (
            tool_server(serve_toy, scripted, tmp_path, answer) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        ):
            whole = await client.chat.completions.create(**chat)
            calls = []
            async for chunk in await client.chat.completions.create(**chat, stream=True):
                calls += chunk.choices[0].delta.tool_calls or ()
            with pytest.raises(openai.BadRequestError, match="logits_processors"):
                await client.chat.completions.create(**chat, extra_body={"logits_processors": ["a"]})
            return whole.choices[0], calls

    choice, streamed = asyncio.run(main())
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris é"}
    assert [piece.function.name for piece in streamed if piece.id] == ["weather"]
    pieces = [piece.function.arguments for piece in streamed]
    assert call.function.arguments == "".join(pieces)


def test_langchain_binds_tools(tmp_path, serve_toy, scripted):
    langchain = pytest.importorskip("langchain_openai", reason="needs the extra `clients`")
    answer = f"<tool_call>{PARIS}</tool_call>"

    async def main():
        async with tool_server(serve_toy, scripted, tmp_path, answer) as server:
            model = langchain.ChatOpenAI(model="toy", base_url=f"{server.url}/v1", api_key="none", max_tokens=200)
            bound = model.bind_tools([WEATHER])
            whole = await bound.ainvoke("And in Paris?")
            streamed = None
            async for chunk in bound.astream("And in Paris?"):
                streamed = chunk if streamed is None else streamed + chunk
            return whole, streamed

    for message in asyncio.run(main()):
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris é"})


def test_langchain_reads_structured_output(serve_toy, tmp_path):
    """A random model answers, so it is the grammar that keeps the schema."""
    langchain = pytest.importorskip("langchain_openai", reason="needs the extra `clients`")
    pytest.importorskip("llguidance", reason="needs the extra `structured`")
    person = {
        "title": "person",
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [7, 8]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }

    async def main():
        async with structured_server(serve_toy, write_model(tmp_path)) as server:
            model = langchain.ChatOpenAI(model="toy", base_url=f"{server.url}/v1", api_key="none", max_tokens=300)
            return [
                await model.with_structured_output(person, method=method).ainvoke("Who?")
                for method in ("json_schema", "function_calling")
            ]

    for found in asyncio.run(main()):
        assert sorted(found) == ["age", "name"]
        assert found["age"] in (7, 8)


@pytest.mark.filterwarnings("ignore")  # its own
def test_litellm_gets_calls_whole_and_streamed(tmp_path, serve_toy, scripted, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches one
    litellm = pytest.importorskip("litellm", reason="needs the extra `clients`")
    answer = f"<tool_call>{PARIS}</tool_call>"
    chat = {"model": "hosted_vllm/toy", "messages": HISTORY, "tools": [WEATHER], "max_tokens": 200}

    async def main():
        async with tool_server(serve_toy, scripted, tmp_path, answer) as server:
            chat.update(api_base=f"{server.url}/v1", api_key="none")
            whole = await litellm.acompletion(**chat)
            pieces = [chunk async for chunk in await litellm.acompletion(**chat, stream=True)]
            return whole, litellm.stream_chunk_builder(pieces)

    for reply in asyncio.run(main()):
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris é"}
        assert reply.choices[0].finish_reason == "tool_calls"


@pytest.mark.filterwarnings("ignore")  # its own
def test_lm_eval_generates_for_several_prompts_a_request(serve_toy, scripted):
    models = pytest.importorskip("lm_eval.models.openai_completions", reason="needs the extra `clients`")
    instances = pytest.importorskip("lm_eval.api.instance")

    async def main():
        async with serve_toy(executor=scripted([11, 12, 13])) as server:
            model = models.LocalCompletionsAPI(
                base_url=f"{server.url}/v1/completions",
                model="toy",
                tokenizer_backend=None,
                tokenized_requests=False,
                batch_size=2,
            )
            settings = {"until": [" t13"], "max_gen_toks": 9}
            requests = [instances.Instance("generate_until", {}, (f"prompt {i}", settings), i) for i in range(5)]
            return await asyncio.to_thread(model.generate_until, requests)

    assert asyncio.run(main()) == [" t11 t12"] * 5


@pytest.mark.filterwarnings("ignore")  # its own
def test_lm_eval_gets_the_log_likelihoods_of_transformers(tmp_path, serve_toy):
    models = pytest.importorskip("lm_eval.models.openai_completions", reason="needs the extra `clients`")
    instances = pytest.importorskip("lm_eval.api.instance")
    pairs = [("the person", " is seven"), ("a b c", " d"), ("hello", " world again")]
    folder = write_model(tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder)

    async def main():
        executor = TorchExecutor.load(folder, SETTINGS)
        async with serve_toy(executor=executor, codec=tokenizer, max_model_len=1024) as server:
            model = models.LocalCompletionsAPI(
                base_url=f"{server.url}/v1/completions",
                model="toy",
                tokenizer_backend="huggingface",
                tokenizer=str(folder),
                batch_size=2,
            )
            requests = [instances.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
            return await asyncio.to_thread(model.loglikelihood, requests)

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for (given, following), (found, _) in zip(pairs, asyncio.run(main()), strict=True):
        first, tokens = len(tokenizer.encode(given)), tokenizer.encode(given + following)
        scores = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = sum(scores[i - 1, tokens[i]].item() for i in range(first, len(tokens)))
        assert found == pytest.approx(expected, abs=1e-4)
