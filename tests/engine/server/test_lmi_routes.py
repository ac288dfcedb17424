"""`/invocations` as djl-serving's rolling batch answers it, over a real engine."""

import asyncio
import json

import pytest

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.format import find_format


def lines_of(body):
    return [json.loads(line) for line in body.splitlines()]


def ask(text, *, stream=False, **parameters):
    return {"inputs": text, "parameters": parameters, "stream": stream}


def test_an_unstreamed_reply_is_an_object_with_thirty_tokens_unless_told_otherwise(serve_toy):
    async def main():
        async with serve_toy() as server:
            return await server.post("/invocations", {"inputs": "one two three"})

    status, headers, body = asyncio.run(main())
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    reply = json.loads(body)
    assert list(reply) == ["generated_text"]
    assert len(reply["generated_text"].split()) == 30


def test_details_hold_the_reason_the_count_and_the_tokens(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11, 12, 13])) as server:
            call = ask("one two", max_new_tokens=3, details=True)
            return await server.post("/invocations", call)

    _, _, body = asyncio.run(main())
    reply = json.loads(body)
    times_ms = reply["details"].pop("engine")
    assert list(times_ms) == ["queue_ms", "prefill_ms", "decode_ms"]
    assert all(value >= 0 for value in times_ms.values())
    assert reply == {
        "generated_text": " t11 t12 t13",
        "details": {
            "finish_reason": "length",
            "generated_tokens": 3,
            "inputs": "one two",
            "tokens": [
                {"id": 11, "text": " t11", "log_prob": -0.5},
                {"id": 12, "text": " t12", "log_prob": -0.5},
                {"id": 13, "text": " t13", "log_prob": -0.5},
            ],
        },
    }


def test_details_hold_the_likeliest_tokens_where_they_are_asked_for(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11])) as server:
            call = ask("one two", max_new_tokens=1, details=True, top_n_tokens=2)
            return await server.post("/invocations", call)

    _, _, body = asyncio.run(main())
    assert json.loads(body)["details"]["top_tokens"] == [
        [{"id": 11, "text": " t11", "log_prob": -0.5}, {"id": 12, "text": " t12", "log_prob": -1.5}]
    ]


def test_a_stream_has_one_line_a_token_and_its_last_line_the_whole_text(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            call = ask("one two", stream=True, max_new_tokens=2, details=True)
            return await server.post("/invocations", call)

    status, headers, body = asyncio.run(main())
    assert (status, headers["Content-Type"]) == (200, "application/jsonlines")
    assert body.endswith(b"\n")
    lines = lines_of(body)
    del lines[-1]["details"]["engine"]
    assert lines == [
        {"token": {"id": 11, "text": " t11", "log_prob": -0.5}},
        {
            "token": {"id": 12, "text": " t12", "log_prob": -0.5},
            "generated_text": " t11 t12",
            "details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "one two"},
        },
    ]


def test_without_details_the_last_line_has_only_the_text(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11])) as server:
            return await server.post("/invocations", ask("one", stream=True, max_new_tokens=1))

    _, _, body = asyncio.run(main())
    assert [sorted(line) for line in lines_of(body)] == [["generated_text", "token"]]


def test_a_token_reaches_the_client_before_the_answer_ends(serve_toy, scripted):
    """The second step starts only after the client has read the first line."""

    async def main():
        gate = asyncio.Event()
        async with (
            serve_toy(executor=scripted([11, 12], gate=gate)) as server,
            server.client.post("/invocations", json=ask("a", stream=True, max_new_tokens=2)) as r,
        ):
            first = await r.content.readline()
            gate.set()
            return first, await r.content.read()

    first, rest = asyncio.run(main())
    assert json.loads(first)["token"]["id"] == 11
    assert json.loads(rest)["token"]["id"] == 12


def test_a_token_that_shows_no_text_still_gets_its_line(serve_toy, scripted, byte_codec):
    """A three-byte character comes with its third token; nothing of it is lost."""

    async def main():
        executor = scripted(list("日é".encode()))
        async with serve_toy(executor=executor, codec=byte_codec) as server:
            call = ask("a", stream=True, max_new_tokens=5)
            return await server.post("/invocations", call)

    _, _, body = asyncio.run(main())
    lines = lines_of(body)
    assert [line["token"]["text"] for line in lines] == ["", "", "日", "", "é"]
    assert [line["token"]["id"] for line in lines] == list("日é".encode())
    assert lines[-1]["generated_text"] == "日é"


def test_half_a_character_at_the_end_is_shown_as_broken_not_dropped(serve_toy, scripted, byte_codec):
    async def main():
        executor = scripted(list("a日".encode()))
        async with serve_toy(executor=executor, codec=byte_codec) as server:
            call = ask("a", stream=True, max_new_tokens=3)
            return await server.post("/invocations", call)

    _, _, body = asyncio.run(main())
    assert [line["token"]["text"] for line in lines_of(body)] == ["a", "", "\ufffd"]
    assert lines_of(body)[-1]["generated_text"] == "a\ufffd"


@pytest.mark.parametrize(
    ("parameters", "reason", "count"),
    [
        ({}, "eos_token", 3),
        ({"ignore_eos_token": True}, "length", 6),
        ({"ignore_eos": True}, "length", 6),
        ({"max_new_tokens": 2}, "length", 2),
        ({"min_tokens": 6, "ignore_eos_token": True}, "length", 6),
    ],
)
def test_the_end_token_ends_the_answer_unless_it_is_ignored(serve_toy, scripted, byte_codec, parameters, reason, count):
    async def main():
        async with serve_toy(executor=scripted([*b"ab", 0]), codec=byte_codec) as server:
            call = ask("a", stream=True, **({"max_new_tokens": 6, "details": True} | parameters))
            return await server.post("/invocations", call)

    _, _, body = asyncio.run(main())
    lines = lines_of(body)
    assert lines[-1]["details"]["finish_reason"] == reason
    assert lines[-1]["details"]["generated_tokens"] == len(lines) == count
    for line in lines:
        assert line["token"].get("special_token", False) == (line["token"]["id"] == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_across_token_borders_ends_the_answer(serve_toy, scripted, byte_codec, stream):
    """`STOP` comes a byte at a time: nothing of it is shown, and what only looked like it is."""

    async def main():
        executor = scripted(list(b"xSTxSTOPyyyyyyyyyyyy"))
        async with serve_toy(executor=executor, codec=byte_codec) as server:
            call = ask("a", stream=stream, max_new_tokens=20, details=True, stop_sequences=["STOP"])
            reply = await server.post("/invocations", call)
            await server.until(lambda: server.scheduler.blocks.num_free == 256)
            return reply

    _, _, body = asyncio.run(main())
    lines = lines_of(body)
    assert lines[-1]["generated_text"] == "xSTx"
    assert lines[-1]["details"]["finish_reason"] == "stop_sequence"
    assert lines[-1]["details"]["generated_tokens"] == 8
    if stream:
        texts = [line["token"]["text"] for line in lines]
        assert texts == ["x", "", "", "STx", "", "", "", ""]


def test_text_held_back_for_a_stop_string_comes_with_the_last_token(serve_toy, scripted, byte_codec):
    async def main():
        async with serve_toy(executor=scripted(list(b"xST")), codec=byte_codec) as server:
            call = ask("a", stream=True, max_new_tokens=3, stop_sequences=["STOP"])
            return await server.post("/invocations", call)

    _, _, body = asyncio.run(main())
    assert [line["token"]["text"] for line in lines_of(body)] == ["x", "", "ST"]


def test_return_full_text_and_truncate(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11])) as server:
            full = await server.post("/invocations", ask("one two", max_new_tokens=1, return_full_text=True))
            long = ask(" ".join(["word"] * 600), max_new_tokens=1)
            refused = await server.post("/invocations", long)
            long["parameters"]["truncate"] = 100
            cut = await server.post("/invocations", long)
            return full, refused, cut

    full, refused, cut = asyncio.run(main())
    assert json.loads(full[2])["generated_text"] == "one two t11"
    assert refused[0] == 400
    assert cut[0] == 200


def test_predictions_is_the_same_under_the_models_name(serve_toy):
    async def main():
        async with serve_toy() as server:
            good = await server.post("/predictions/toy", {"inputs": "a"})
            bad = await server.post("/predictions/other", {"inputs": "a"})
            return good, bad

    good, bad = asyncio.run(main())
    assert good[0] == 200
    assert bad[0] == 404
    assert json.loads(bad[2])["code"] == 404
    assert "'toy'" in json.loads(bad[2])["message"]


def test_the_client_format_reads_its_own_server(serve_toy):
    """Thirty requests at once, each of another length: every token is counted once."""
    lmi = find_format("lmi")

    async def one(server, length):
        planned = PlannedRequest(length, 0.0, 3, length, prompt_text="one two three")
        body = lmi.request_body(planned, model="toy")
        async with server.client.post(lmi.path, data=body) as response:
            splitter = lmi.new_splitter()
            payloads = []
            async for data in response.content.iter_any():
                payloads += splitter.feed(data)
            return [lmi.parse(payload) for payload in payloads + splitter.close()]

    async def main():
        async with serve_toy() as server:
            answers = await asyncio.gather(*(one(server, length) for length in range(1, 31)))
            await server.until(lambda: server.scheduler.blocks.num_free == 256)
            return answers

    for length, events in enumerate(asyncio.run(main()), start=1):
        assert sum(event.num_tokens for event in events) == length
        assert events[-1].output_tokens == length
        assert events[-1].finish_reason == "length"
        assert [event.end for event in events] == [False] * (length - 1) + [True]
