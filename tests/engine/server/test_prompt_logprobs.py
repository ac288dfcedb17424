"""Log-probabilities of a prompt's tokens, which `echo` with `logprobs` asks for."""

import asyncio
import json

import pytest
import torch

from lmi_bench.engine.native_backend.executor import NativeExecutor
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from tests.engine.torch_backend.tiny_models import TinyModel

COMPLETIONS = "/v1/completions"
SETTINGS = LoadSettings(dtype="float32", num_blocks=64, block_size=16, threads=1)
PROMPTS = [[(7 * i * k + k) % 90 + 3 for i in range(length)] for k, length in enumerate((50, 2, 37))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return TinyModel(tmp_path_factory.mktemp("llama"), "Llama")


def scores_of(llama, tokens):
    """transformers' log-probability of each token but the first, and the likeliest's."""
    scores = torch.log_softmax(llama.logits(tokens), -1)[: len(tokens) - 1]
    own = scores.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    return own.tolist(), scores.max(dim=-1).values.tolist()


def replies(serve_toy, llama, calls, load=TorchExecutor.load, path=COMPLETIONS, **settings):
    async def main():
        executor, codec = load(llama.folder, SETTINGS), PlainTokenizer(96)
        settings.setdefault("num_blocks", 64)
        async with serve_toy(executor=executor, codec=codec, **settings) as server:
            for _ in range(2):  # the second time all prompts are in the prefix cache, if any
                posts = (server.post(path, call) for call in calls)
                found = await asyncio.gather(*posts)
            assert bool(server.engine.stats().done.preemptions) == (settings["num_blocks"] < 64)
            return found

    found = asyncio.run(main())
    assert [status for status, _, _ in found] == [200] * len(calls)
    return [body for _, _, body in found]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_rolling_batch_prefill_tokens": 16},
        {"max_rolling_batch_prefill_tokens": 16, "chunked_prefill": True},
        {"prefix_caching": True},
        {"num_blocks": 8},
        {"load": NativeExecutor.load},
    ],
    ids=["whole", "in parts", "chunked", "prefix cache", "preempted", "native"],
)
def test_they_are_those_of_transformers_however_a_prompt_is_computed(serve_toy, llama, settings):
    """lm-eval's request, among others that run at once and have none."""
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    longer = asked | {"max_tokens": 20}
    calls = [{"prompt": prompt} | fields for prompt in PROMPTS for fields in (asked, longer, {})]
    for call, body in zip(calls, replies(serve_toy, llama, calls, **settings), strict=True):
        (choice,) = json.loads(body)["choices"]
        if "echo" not in call:
            assert choice["logprobs"] is None
            continue
        found, prompt = choice["logprobs"], call["prompt"]
        names = [f" t{token}" for token in prompt]
        assert found["tokens"][: len(prompt)] == names
        assert len(found["tokens"]) == len(prompt) + call["max_tokens"]
        assert choice["text"].startswith("".join(names))
        tokens = [int(name[2:]) for name in found["tokens"]]
        own, likeliest = scores_of(llama, tokens)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        tops = [max(each.values()) for each in found["top_logprobs"][1:]]
        assert tops == pytest.approx(likeliest, abs=1e-4)
        starts = [choice["text"].index(name, at) for name, at in zip(names, found["text_offset"], strict=False)]
        assert starts == found["text_offset"][: len(prompt)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_has_its_tokens_and_no_more(serve_toy, llama, stream):
    call = {"prompt": PROMPTS[0], "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    (body,) = replies(serve_toy, llama, [call | usage])
    chunk, *rest = [json.loads(event[6:]) for event in body.split(b"\n\n")[:-2]] if stream else [json.loads(body)]
    (choice,) = chunk["choices"]
    assert choice["text"] == "".join(f" t{token}" for token in PROMPTS[0])
    assert choice["finish_reason"] == "length"
    own, _ = scores_of(llama, PROMPTS[0])
    assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(x, abs=1e-4) for x in own)]
    counted = (rest[-1] if rest else chunk)["usage"]
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (50, 0)


def test_tgi_has_them_as_prefill(serve_toy, llama):
    text = "".join(f" t{token}" for token in PROMPTS[2])
    call = {"inputs": text, "parameters": {"decoder_input_details": True, "max_new_tokens": 1}}
    (body,) = replies(serve_toy, llama, [call], path="/generate")
    first, *rest = json.loads(body)["details"]["prefill"]
    assert first == {"id": PROMPTS[2][0], "text": f" t{PROMPTS[2][0]}", "logprob": None}
    assert [each["id"] for each in rest] == PROMPTS[2][1:]
    own, _ = scores_of(llama, PROMPTS[2])
    assert [each["logprob"] for each in rest] == pytest.approx(own, abs=1e-4)


def test_an_engine_without_a_model_refuses_them_in_one_line(serve_toy):
    async def main():
        async with serve_toy() as server:
            asked = {"prompt": "a b", "echo": True, "logprobs": 1}
            refused = await server.post(COMPLETIONS, asked)
            none = await server.post(COMPLETIONS, {"prompt": "a b", "max_tokens": 0})
            return refused, none

    refused, none = asyncio.run(main())
    assert (refused[0], none[0]) == (400, 400)
    assert "no log-probabilities of prompts" in json.loads(refused[2])["error"]["message"]
    assert "max_tokens must be at least 1, got 0" in json.loads(none[2])["error"]["message"]
