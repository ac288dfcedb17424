"""`/v1/completions` and `/v1/models` as vLLM answers them, over a real engine."""

import asyncio
import json

import pytest

from lmi_bench import __version__
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.wire.format import find_format


def events_of(body):
    """The data of each event, the end mark left as text."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def test_an_unstreamed_reply_counts_sixteen_tokens_unless_told_otherwise(serve_toy):
    async def main():
        async with serve_toy() as server:
            call = {"model": "toy", "prompt": "one two three"}
            return await server.post("/v1/completions", call)

    status, headers, body = asyncio.run(main())
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    reply = json.loads(body)
    assert reply["id"].startswith("cmpl-")
    assert (reply["object"], reply["model"]) == ("text_completion", "toy")
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    (choice,) = reply["choices"]
    assert len(choice["text"].split()) == 16
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert (choice["stop_reason"], choice["logprobs"]) == (None, None)


def test_a_stream_has_a_chunk_a_token_then_usage_then_the_end_mark(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            call = {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
            return await server.post("/v1/completions", call)

    status, headers, body = asyncio.run(main())
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    first, second, usage = events_of(body)
    assert first["choices"] == [
        {"index": 0, "text": " t11", "logprobs": None, "finish_reason": None, "stop_reason": None}
    ]
    assert second["choices"][0]["text"] == " t12"
    assert second["choices"][0]["finish_reason"] == "length"
    assert "usage" not in first
    assert "usage" not in second
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert first["id"] == second["id"] == usage["id"]


def test_usage_comes_only_when_asked_for_and_on_every_chunk_if_wanted(serve_toy):
    async def main():
        async with serve_toy() as server:
            call = {"prompt": "a b", "max_tokens": 3, "stream": True}
            plain = await server.post("/v1/completions", call)
            call["stream_options"] = {"continuous_usage_stats": True}
            return plain, await server.post("/v1/completions", call)

    plain, continuous = asyncio.run(main())
    assert ["usage" in event for event in events_of(plain[2])] == [False] * 3
    counts = [event["usage"]["completion_tokens"] for event in events_of(continuous[2])]
    assert counts == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "text", "finish_reason", "stop_reason", "count"),
    [
        ({}, "abc", "stop", None, 4),
        ({"ignore_eos": True}, "abcabcab", "length", None, 10),
        ({"stop": "bc"}, "a", "stop", "bc", 3),
        ({"stop": ["zzz", "c"]}, "ab", "stop", "c", 3),
        ({"stop_token_ids": [98]}, "a", "stop", 98, 2),
        ({"stop_token_ids": [98], "include_stop_str_in_output": True}, *("ab", "stop", 98, 2)),
        ({"max_tokens": 2}, "ab", "length", None, 2),
        ({"ignore_eos": True, "stop": "a", "min_tokens": 3}, "abc", "stop", "a", 5),
    ],
)
def test_what_ends_an_answer_is_told(serve_toy, scripted, byte_codec, fields, text, finish_reason, stop_reason, count):
    """The script is a, b, c, end of sequence; a byte is a token. min_tokens 3 with the stop
    string `a`: the first `a` is too early, the one after the ignored end counts.
    """

    async def main():
        async with serve_toy(executor=scripted([*b"abc", 0]), codec=byte_codec) as server:
            call = {"prompt": "x", "max_tokens": 10} | fields
            whole = await server.post("/v1/completions", call)
            call |= {"stream": True, "stream_options": {"include_usage": True}}
            return whole, await server.post("/v1/completions", call)

    whole, stream = asyncio.run(main())
    reply = json.loads(whole[2])
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, finish_reason)
    assert choice["stop_reason"] == stop_reason
    assert reply["usage"]["completion_tokens"] == count
    *chunks, usage = events_of(stream[2])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == finish_reason
    assert usage["usage"]["completion_tokens"] == len(chunks) == count


def test_log_probabilities_and_token_ids_where_asked_for(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            call = {"prompt": "a", "max_tokens": 2, "logprobs": 1, "temperature": 0}
            whole = await server.post("/v1/completions", call)
            call |= {"stream": True, "return_token_ids": True}
            chat = {"messages": [{"role": "user", "content": "t7 t8"}], "max_tokens": 2, "return_token_ids": True}
            chats = [await server.post("/v1/chat/completions", chat | {"stream": stream}) for stream in (False, True)]
            return whole, await server.post("/v1/completions", call | {"prompt": "t7 t8"}), *chats

    whole, stream, chat, chat_stream = asyncio.run(main())
    assert json.loads(whole[2])["choices"][0]["logprobs"] == {
        "text_offset": [0, 4],
        "token_logprobs": [-0.5, -0.5],
        "tokens": [" t11", " t12"],
        "top_logprobs": [{" t11": -0.5}, {" t12": -0.5}],
    }
    chunks = events_of(stream[2])
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[11], [12]]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[7, 8], None]
    assert "prompt_token_ids" not in json.loads(whole[2])["choices"][0]
    assert json.loads(chat[2])["prompt_token_ids"] == [7, 8]
    assert [chunk.get("prompt_token_ids") for chunk in events_of(chat_stream[2])] == [[7, 8], None, None]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [4]]


def test_a_prompt_may_be_text_ids_or_a_list_of_one(serve_toy):
    async def main():
        async with serve_toy() as server:
            prompts = ["a b", [1, 2], ["a b"], [[1, 2]]]
            calls = [{"prompt": prompt, "max_tokens": 1} for prompt in prompts]
            return [await server.post("/v1/completions", call) for call in calls]

    for status, _, body in asyncio.run(main()):
        assert status == 200
        assert json.loads(body)["usage"]["prompt_tokens"] == 2


def test_a_model_may_state_how_its_tokens_are_drawn(serve_toy, scripted):
    """As in vLLM; what a request says itself goes before, and a null says nothing."""

    class Watching(scripted):
        seen = ()

        async def execute(self, batch):
            sampling = batch.entries[0].sampling
            self.seen += ((sampling.temperature, sampling.top_k, sampling.top_p),)
            return await super().execute(batch)

    executor = Watching([11])
    codec = PlainTokenizer()
    codec.sampling = {"temperature": 0.5, "top_k": 7}

    async def main():
        async with serve_toy(executor=executor, codec=codec) as server:
            for more in ({}, {"temperature": None, "top_p": 0.5}, {"temperature": 2, "top_k": 0}):
                await server.post("/v1/completions", {"prompt": "a", "max_tokens": 1} | more)

    asyncio.run(main())
    assert executor.seen == ((0.5, 7, 1.0), (0.5, 7, 0.5), (2.0, 0, 1.0))


def test_a_model_may_state_how_long_its_chats_are(serve_toy, scripted):
    """As in vLLM: where the request does not say, up to the end of the context."""
    codec = PlainTokenizer()
    body = {"messages": [{"role": "user", "content": "a b"}]}

    async def main(most, more):
        codec.max_new_tokens = most
        async with serve_toy(executor=scripted([11]), codec=codec, max_model_len=32) as server:
            _, _, reply = await server.post("/v1/chat/completions", body | more)
            return json.loads(reply)["usage"]["completion_tokens"]

    found = [
        asyncio.run(main(*each))
        for each in ((None, {}), (3, {}), (99, {}), (3, {"max_tokens": 5}), (3, {"min_tokens": 4}))
    ]
    assert found == [30, 3, 30, 5, 4]


def test_several_prompts_have_their_choices_one_after_the_other(serve_toy, scripted):
    """As in vLLM: choice 2 * i + j is the j-th answer to the i-th prompt."""

    async def main():
        async with serve_toy(executor=scripted([11])) as server:
            body = {"prompt": ["a b", "c", "d e f"], "n": 2, "echo": True, "max_tokens": 2}
            whole = await server.post("/v1/completions", body)
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return whole, await server.post("/v1/completions", body)

    whole, stream = asyncio.run(main())
    reply = json.loads(whole[2])
    texts = [f"{prompt} t11 t11" for prompt in ("a b", "a b", "c", "c", "d e f", "d e f")]
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    *chunks, usage = events_of(stream[2])
    streamed = [""] * 6
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert (streamed, usage["usage"]) == (texts, reply["usage"])


def test_if_one_of_several_prompts_cannot_run_none_does(serve_toy, slow_steps):
    async def main():
        async with serve_toy(executor=slow_steps) as server:
            body = {"prompt": ["a", "b " * 600], "max_tokens": 400}
            status, _, _ = await server.post("/v1/completions", body)
            await server.until(lambda: server.scheduler.num_running == 0)
            return status, server.engine.outstanding

    assert asyncio.run(main()) == (400, 0)


def test_tokens_of_a_prompt_and_their_text(serve_toy, byte_codec):
    async def main():
        async with serve_toy(codec=byte_codec) as server:
            return [
                await server.post("/tokenize", {"model": "toy", "prompt": "aé"}),
                await server.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]}),
                await server.post("/detokenize", {"tokens": [97, 195, 169]}),
                await server.post("/detokenize", {"tokens": [256]}),
                await server.post("/tokenize", {}),
                await server.post("/tokenize", {"prompt": ["a", "b"]}),
                await server.post("/tokenize", {"prompt": "a", "return_token_strs": True}),
                await server.post("/tokenize", {"prompt": "a", "model": "other"}),
                await server.post("/detokenize", {"tokens": [97], "model": "other"}),
                await server.post("/detokenize", {"tokens": "a"}),
            ]

    prompt, chat, text, unknown, empty, *refused = asyncio.run(main())
    assert [status for status, _, _ in refused] == [400, 400, 404, 404, 400]
    expected = {"count": 3, "max_model_len": 512, "tokens": [97, 195, 169], "token_strs": None}
    assert json.loads(prompt[2]) == expected
    assert json.loads(chat[2])["tokens"] == [97, 98]
    assert json.loads(text[2]) == {"prompt": "aé"}
    assert (unknown[0], empty[0]) == (400, 400)
    assert "ids below 256, got 256" in json.loads(unknown[2])["error"]["message"]


def test_the_bytes_of_tokens_make_up_a_character(serve_toy, scripted, byte_codec):
    async def main():
        async with serve_toy(executor=scripted([*"é".encode()]), codec=byte_codec) as server:
            call = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            return await server.post("/v1/chat/completions", call | {"logprobs": True})

    content = json.loads(asyncio.run(main())[2])["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "é"


@pytest.mark.parametrize("stream", [True, False])
def test_parts_of_characters_are_told_apart_and_offsets_are_where_tokens_begin(serve_toy, scripted, byte_codec, stream):
    """lm-eval takes an answer for the likeliest by comparing these; a stop string holds text back."""
    answer = "xé x.".encode()
    body = {"prompt": "a", "max_tokens": 6, "logprobs": 2, "stop": ["é!", "x.."], "stream": stream}

    async def main():
        async with serve_toy(executor=scripted([*answer]), codec=byte_codec) as server:
            return await server.post("/v1/completions", body)

    reply = asyncio.run(main())[2]
    found = [part["choices"][0]["logprobs"] for part in (events_of(reply) if stream else [json.loads(reply)])]
    columns = {name: [value for part in found for value in part[name]] for name in found[0]}
    assert columns["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", " ", "x", "."]
    assert columns["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert columns["top_logprobs"][1] == {"bytes:\\xc3": -0.5, "bytes:\\xc4": -1.5}


def test_models_names_the_one_model_and_its_limit(serve_toy):
    async def main():
        async with serve_toy() as server, server.client.get("/v1/models/other") as other:
            found = []
            for path in ("/v1/models", "/v1/models/toy", "/version"):
                async with server.client.get(path) as response:
                    found.append(await response.json())
            return *found[:2], other.status, found[2]

    reply, alone, other, version = asyncio.run(main())
    assert (alone, other) == (reply["data"][0], 404)
    assert version == {"version": __version__}
    assert reply["object"] == "list"
    (model,) = reply["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 512)


def test_a_chat_stream_starts_with_the_role_and_ends_with_usage(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            call = {
                "messages": [
                    {"role": "system", "content": "a b"},
                    {"role": "user", "content": [{"type": "text", "text": "c"}]},
                ],
                "max_completion_tokens": 2,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            return await server.post("/v1/chat/completions", call)

    _, headers, body = asyncio.run(main())
    assert headers["Content-Type"].startswith("text/event-stream")
    role, *chunks, usage = events_of(body)
    assert {event["object"] for event in (role, *chunks, usage)} == {"chat.completion.chunk"}
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"content": " t11"}, {"content": " t12"}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_a_chat_goes_on_to_the_end_of_the_context_unless_told_otherwise(serve_toy):
    async def main():
        async with serve_toy(max_model_len=64) as server:
            chat = {"messages": [{"role": "user", "content": "a b c d"}]}
            whole = await server.post("/v1/chat/completions", chat)
            return whole, await server.post("/v1/chat/completions", chat | {"max_tokens": 3})

    whole, three = asyncio.run(main())
    assert json.loads(whole[2])["usage"]["completion_tokens"] == 60
    reply = json.loads(three[2])
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"].split()) == 3
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)


def test_the_likeliest_tokens_stand_beside_the_chosen_one(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11])) as server:
            call = {"prompt": "a", "max_tokens": 1, "logprobs": 2}
            completion = await server.post("/v1/completions", call)
            call = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            call |= {"logprobs": True, "top_logprobs": 2}
            return completion, await server.post("/v1/chat/completions", call)

    completion, chat = (json.loads(body)["choices"][0] for _, _, body in asyncio.run(main()))
    assert completion["logprobs"]["top_logprobs"] == [{" t11": -0.5, " t12": -1.5}]
    (token,) = chat["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in token["top_logprobs"]] == [(" t11", -0.5), (" t12", -1.5)]


def test_log_probabilities_of_a_chat(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11])) as server:
            call = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            call |= {"logprobs": True, "top_logprobs": 1, "temperature": 0}
            return await server.post("/v1/chat/completions", call)

    _, _, body = asyncio.run(main())
    entry = {"token": " t11", "logprob": -0.5, "bytes": [32, 116, 49, 49]}
    content = json.loads(body)["choices"][0]["logprobs"]["content"]
    assert content == [entry | {"top_logprobs": [entry]}]


@pytest.mark.parametrize("name", ["openai", "openai-chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_the_client_format_reads_its_own_server(serve_toy, stream, name):
    openai = find_format(name)

    async def one(server, length):
        text = " ".join(["word"] * length)
        ids = range(length) if name == "openai" else ()
        planned = PlannedRequest(length, 0.0, length, length, ids, prompt_text=text)
        body = openai.request_body(planned, model="toy", stream=stream)
        async with server.client.post(openai.path, data=body) as response:
            if not stream:
                return [openai.parse(await response.read())]
            splitter = openai.new_splitter()
            payloads = []
            async for data in response.content.iter_any():
                payloads += splitter.feed(data)
            return [openai.parse(payload) for payload in payloads + splitter.close()]

    async def main():
        async with serve_toy() as server:
            return await asyncio.gather(*(one(server, length) for length in range(1, 31)))

    for length, events in enumerate(asyncio.run(main()), start=1):
        assert sum(event.num_tokens for event in events) == (length if stream else 1)
        last = [event for event in events if event.output_tokens is not None][-1]
        assert (last.input_tokens, last.output_tokens) == (length, length)
        assert events[-1].end
