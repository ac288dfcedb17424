"""Every refusal has the status and the body of its protocol, and nothing of it stays behind."""

import asyncio
import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web

from lmi_bench.core.errors import CapacityError
from lmi_bench.engine.async_engine import Generation
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.engine.server.lmi_routes import LmiCall
from lmi_bench.engine.server.openai_request import CompletionCall
from lmi_bench.engine.server.state import ServerState
from lmi_bench.wire.format import find_format

LMI = "/invocations"
OPENAI = "/v1/completions"


def post_raw(serve_toy, path, body, **settings):
    async def main():
        async with serve_toy(**settings) as server, server.client.post(path, data=body) as response:
            return response.status, json.loads(await response.read())

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"inputs": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "inputs must be a non-empty string"),
        (b'{"inputs": ""}', "inputs must be a non-empty string"),
        (b'{"inputs": ["a"]}', "a list needs dynamic batching"),
        (b'{"inputs": " "}', "the prompt has no tokens"),
        (b'{"inputs": "a", "parameters": 3}', "parameters must be an object"),
        (b'{"inputs": "a", "stream": "yes"}', 'stream must be true or false, got "yes"'),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": 0}}', "max_new_tokens must be at"),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": "9"}}', "must be an integer"),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": true}}', "must be an integer"),
        (b'{"inputs": "a", "parameters": {"temperature": -1}}', "temperature must be 0 or more"),
        (b'{"inputs": "a", "parameters": {"temperature": 1e39}}', "up to 1e6"),
        (b'{"inputs": "a", "parameters": {"repetition_penalty": 1e-320}}', "1e-6 to 1e6"),
        (b'{"inputs": "a", "parameters": {"repetition_penalty": 1e300}}', "1e-6 to 1e6"),
        (b'{"inputs": "a", "parameters": {"top_p": 0.0}}', "top_p must be above 0"),
        (b'{"inputs": "a", "parameters": {"stop_sequences": [""]}}', "stop_sequences must be"),
        (b'{"inputs": "a", "parameters": {"n": 2}}', "n=2 is not supported by this server"),
        (b'{"inputs": "a", "parameters": {"seed": 0.5}}', "seed must be an integer"),
    ],
)
def test_a_bad_lmi_request_gets_400_and_the_reason(serve_toy, body, message):
    status, reply = post_raw(serve_toy, LMI, body)
    assert status == 400
    assert (reply["code"], reply["type"]) == (400, "BadRequestException")
    assert message in reply["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": ', "not valid JSON"),
        (b"{}", "prompt must be a non-empty string"),
        (b'{"prompt": []}', "prompt must be a non-empty string"),
        (b'{"prompt": [1, "a"]}', "prompt must be a non-empty string"),
        (b'{"prompt": [-1]}', "prompt must be a non-empty string"),
        (b'{"prompt": [32000]}', "ids go from 0 to 31999"),
        (b'{"prompt": ["a", ""]}', "prompt must be a non-empty string"),
        (b'{"prompt": [[1], [-1]]}', "prompt must be a non-empty string"),
        (b'{"prompt": "a", "model": 3}', "model must be a string"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1"),
        (b'{"prompt": "a", "min_tokens": 17}', "min_tokens must be between"),
        (b'{"prompt": "a", "logprobs": 21}', "top_logprobs must be between 0 and 20, got 21"),
        (b'{"prompt": "a", "suffix": "b"}', 'suffix="b" is not supported'),
        (b'{"prompt": "a", "allowed_token_ids": []}', "allowed_token_ids=[] is not supported"),
        (b'{"prompt": "a", "logit_bias": {"32000": 1}}', "ids go from 0 to 31999"),
        (b'{"prompt": "a", "logit_bias": {"5": 101}}', "numbers from -100 to 100"),
        (b'{"prompt": "a", "min_p": 1.5}', "min_p must be between 0 and 1"),
        (b'{"prompt": "a", "logits_processors": ["x"]}', "omit logits_processors or set it to null"),
        (b'{"prompt": "a", "stream_options": 1}', "stream_options must be an object"),
        (b'{"prompt": "a", "prompt_logprobs": 0}', "prompt_logprobs=0 is not supported"),
        (b'{"prompt": "a", "truncation_side": "right"}', 'truncation_side="right" is not'),
        (b'{"prompt": "a", "priority": -1}', "omit priority or set it to 0"),
        (
            b'{"prompt": "a", "response_format": {"type": "json_object", "schema": {}}}',
            "response_format.schema must be omitted",
        ),
    ],
)
def test_a_bad_completion_request_gets_400_and_the_reason(serve_toy, body, message):
    status, reply = post_raw(serve_toy, OPENAI, body)
    assert status == 400
    assert message in reply["error"]["message"]
    assert reply["error"]["type"] == "BadRequestError"
    assert (reply["error"]["code"], reply["error"]["param"]) == (400, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "messages must be a non-empty list"),
        (b'{"messages": []}', "messages must be a non-empty list"),
        (b'{"messages": ["a"]}', 'messages[0] must be an object, got "a"'),
        (b'{"messages": [{"content": "a"}]}', "messages[0].role must be a string"),
        (b'{"messages": [{"role": "user"}]}', "the prompt has no tokens"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content must be a string"),
        (b'{"messages": [{"role": "user", "content": [{"image": 1}]}]}', "list of text parts"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "the prompt has no tokens"),
        (b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}', "needs logprobs"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', "tools[0] must be an"),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web"}]}',
            "function.name must be a string",
        ),
    ],
)
def test_a_bad_chat_request_gets_400_and_the_reason(serve_toy, body, message):
    status, reply = post_raw(serve_toy, "/v1/chat/completions", body)
    assert status == 400
    assert message in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(LMI, {"inputs": "a b c", "parameters": {"max_new_tokens": 30}}), (OPENAI, {"prompt": "a b c", "max_tokens": 30})],
)
def test_a_request_that_never_fits_gets_400_with_both_numbers(serve_toy, path, body):
    """33 tokens: too many for a context of 32, or for a cache of 2 blocks of 16."""
    raw = json.dumps(body).encode()
    status, reply = post_raw(serve_toy, path, raw, max_model_len=32)
    assert status == 400
    assert "maximum context length is 32 tokens, but 33" in json.dumps(reply)
    status, reply = post_raw(serve_toy, path, raw, num_blocks=2, max_model_len=64)
    assert status == 400
    assert "33" in json.dumps(reply)
    assert "32" in json.dumps(reply)


def test_an_unknown_model_path_or_method_is_answered_in_the_protocols_words(serve_toy):
    async def main():
        async with serve_toy() as server:
            model = await server.post(OPENAI, {"model": "other", "prompt": "a"})
            openai_path = await server.post("/v1/embeddings", {})
            lmi_path = await server.post("/models", {})
            async with server.client.get(LMI) as response:
                method = response.status, response.headers, await response.read()
            return model, openai_path, lmi_path, method

    model, openai_path, lmi_path, method = asyncio.run(main())
    assert model[0] == openai_path[0] == lmi_path[0] == 404
    assert json.loads(model[2])["error"]["type"] == "NotFoundError"
    assert "`other` does not exist" in json.loads(model[2])["error"]["message"]
    assert json.loads(openai_path[2])["error"]["code"] == 404
    assert json.loads(lmi_path[2]) == {
        "code": 404,
        "type": "ResourceNotFoundException",
        "message": "no such path: /models",
    }
    assert method[0] == json.loads(method[2])["code"] == 405
    assert method[1]["Allow"] == "POST"


@pytest.mark.parametrize(("path", "field"), [(LMI, "inputs"), (OPENAI, "prompt")])
def test_a_body_above_the_limit_gets_413(serve_toy, path, field):
    body = json.dumps({field: "a " * 1000}).encode()
    status, reply = post_raw(serve_toy, path, body, max_body_bytes=1000)
    assert status == 413
    assert reply.get("error", reply)["code"] == 413


def test_overload_is_503_in_both_protocols_and_passes(serve_toy, scripted):
    """One request may be in the engine: the second is refused while the first runs."""

    async def main():
        gate = asyncio.Event()
        executor = scripted([11], gate=gate)
        async with serve_toy(executor=executor, max_concurrent_requests=1) as server:
            first = asyncio.create_task(server.post(LMI, {"inputs": "a"}))
            await server.until(lambda: server.scheduler.num_running == 1)
            lmi = await server.post(LMI, {"inputs": "a"})
            openai = await server.post(OPENAI, {"prompt": "a", "stream": True})
            gate.set()
            return lmi, openai, await first, await server.post(LMI, {"inputs": "a"})

    lmi, openai, first, later = asyncio.run(main())
    assert first[0] == later[0] == 200
    assert lmi[0] == openai[0] == 503
    assert lmi[1]["Retry-After"] == openai[1]["Retry-After"] == "1"
    reply = json.loads(lmi[2])
    assert (reply["code"], reply["type"]) == (503, "WlmCapacityException")
    assert reply["message"].startswith("Worker queue capacity exceeded for model: toy")
    assert json.loads(openai[2])["error"]["type"] == "Service Unavailable"
    for name, answer in (("lmi", lmi), ("openai", openai)):
        assert find_format(name).error(503, answer[2]).kind == "overloaded"


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails_before_the_first_token_gives_a_real_status(serve_toy, scripted, stream):
    async def main():
        async with serve_toy(executor=scripted([11], fails_at_step=0)) as server:
            lmi = await server.post(LMI, {"inputs": "a", "stream": stream})
            openai = await server.post(OPENAI, {"prompt": "a", "stream": stream})
            async with server.client.get("/ping") as ping, server.client.get("/health") as health:
                return lmi, openai, ping.status, health.status

    lmi, openai, ping, health = asyncio.run(main())
    assert (lmi[0], json.loads(lmi[2])) == (424, {"code": 424, "error": "a rank died"})
    assert openai[0] == 500
    assert json.loads(openai[2])["error"]["type"] == "InternalServerError"
    assert (ping, health) == (500, 503)


@pytest.mark.parametrize(
    ("name", "body"), [("lmi", {"inputs": "a", "stream": True}), ("openai", {"prompt": "a", "stream": True})]
)
def test_an_engine_that_fails_later_ends_the_stream_with_an_error(serve_toy, scripted, name, body):
    wire_format = find_format(name)

    async def main():
        async with serve_toy(executor=scripted([11], fails_at_step=2)) as server:
            return await server.post(wire_format.path, body)

    status, _, stream = asyncio.run(main())
    assert status == 200
    splitter = wire_format.new_splitter()
    events = [wire_format.parse(payload) for payload in splitter.feed(stream)]
    assert [event.num_tokens for event in events[:3]] == [1, 1, 0]
    assert (events[2].error, events[2].error_kind) == ("a rank died", "server_error")
    assert splitter.close() == []


def test_fields_that_mean_nothing_here_are_named_in_the_reply(serve_toy, caplog):
    async def main():
        async with serve_toy() as server:
            lmi = await server.post(LMI, {"inputs": "a", "parameters": {"max_new_tokens": 1, "typical": 1, "n": 1}})
            openai = await server.post(OPENAI, {"prompt": "a", "user": "me", "x\r\ny": 1, "stream": True})
            return lmi[1], openai[1]

    lmi, openai = asyncio.run(main())
    assert lmi["X-Ignored-Parameters"] == "typical"
    assert openai["X-Ignored-Parameters"] == "x%0D%0Ay"
    assert "typical" in caplog.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"inputs": "t31999"}),
        (OPENAI, {"prompt": "t31999"}),
        (OPENAI, {"prompt": [31_999]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "t31999"}]}),
    ],
)
def test_a_token_that_the_model_lacks_is_refused_before_it_harms_anybody(serve_toy, path, body):
    """A tokenizer may have tokens (a pad token, say) that the embedding has no row for."""

    async def main():
        async with serve_toy(app_options={"vocab_size": 31_990}) as server:
            refused = await server.post(path, body)
            return refused, await server.post("/invocations", {"inputs": "a"})

    refused, other = asyncio.run(main())
    assert refused[0] == 400
    assert b"ids go from 0 to 31989" in refused[2]
    assert other[0] == 200


@pytest.mark.parametrize(("seed", "expected"), [(-(2**63), -(2**63)), (-1, None), (0, 0)])
def test_a_seed_may_be_any_whole_number_and_minus_one_is_none(seed, expected):
    """As vLLM and OpenAI's clients have it: 64 bits with a sign."""
    completion = CompletionCall.read({"prompt": "a", "seed": seed})
    lmi = LmiCall.read({"inputs": "a", "parameters": {"seed": seed}})
    sampling = completion.sampling_with(None), lmi.sampling(())
    assert [each.seed for each in sampling] == [expected, expected]


@pytest.mark.parametrize("path", [LMI, OPENAI, "/generate", "/endpoints/any/invocations"])
@pytest.mark.parametrize("field", ["inputs", "prompt", "parameters", "stream", "min_p", "zzz"])
def test_a_value_nested_too_deeply_is_no_bug_of_the_server(serve_toy, caplog, path, field):
    """orjson reads up to 1,024 brackets and writes up to 254."""
    deep = "[" * 600 + "]" * 600
    body = f'{{"inputs": "a", "prompt": "a", "parameters": {{"min_p": {deep}}}, "{field}": {deep}}}'
    status, _ = post_raw(serve_toy, path, body.encode())
    assert status in (200, 400, 422, 424)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", [LMI, OPENAI, "/endpoints/any/invocations"])
def test_a_body_that_is_not_packed_as_it_says_gets_400(serve_toy, caplog, path):
    async def main():
        async with serve_toy() as server:
            headers = {"Content-Encoding": "gzip"}
            async with server.client.post(path, data=b"{}", headers=headers) as response:
                text = await response.text()
            return response.status, text, (await server.post(LMI, {"inputs": "a"}))[0]

    status, text, other = asyncio.run(main())
    assert (status, other) == (400, 200)
    assert "the body cannot be read: Can not decode content-encoding: gzip" in text
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /%zz\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 20_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_and_not_logged_as_a_bug(serve_toy, caplog, sent):
    async def main():
        async with serve_toy() as server:
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            line = await reader.readline()
            writer.close()
            return line, (await server.post(LMI, {"inputs": "a"}))[0]

    line, other = asyncio.run(main())
    assert b" 400 " in line
    assert other == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_bug_of_the_server_is_logged_with_its_traceback(serve_toy, caplog):
    async def broken(request):
        raise KeyError("a bug")

    async def main():
        async with (
            serve_toy(extend=lambda app: app.router.add_get("/broken", broken)) as server,
            server.client.get("/broken") as response,
        ):
            return response.status

    assert asyncio.run(main()) == 500
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info[0] is KeyError


@pytest.mark.parametrize(
    ("parameters", "ignored"), [({"do_sample": False, "temperature": 0.5}, ["temperature"]), ({"temperature": 0}, [])]
)
def test_a_temperature_without_sampling_is_named_as_ignored(parameters, ignored):
    assert LmiCall.read({"inputs": "a", "parameters": parameters}).ignored == ignored


@pytest.mark.parametrize("path", [LMI, OPENAI, "/nowhere", "/ping"])
@pytest.mark.parametrize("expected", [b"200-ok", b"\xff"])
def test_what_a_request_may_not_expect_is_refused_in_words(serve_toy, caplog, path, expected):
    async def main():
        async with serve_toy() as server:
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            line = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n".encode()
            writer.write(line + b"Expect: " + expected + b"\r\n\r\n{}")
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            return answer

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"417"
    assert "Expect may only be 100-continue" in json.dumps(json.loads(body))
    assert caplog.records == []


def test_a_fault_of_the_server_is_500_in_the_protocols_words_and_logged_once(serve_toy, caplog, byte_codec):
    class Broken(type(byte_codec)):
        def encode(self, text, **options):
            raise ZeroDivisionError("secret of the inside")

    async def main():
        async with serve_toy(codec=Broken()) as server:
            return [await server.post(path, {"inputs": "a", "prompt": "a"}) for path in (LMI, OPENAI, "/generate", LMI)]

    answers = asyncio.run(main())
    assert [status for status, *_ in answers] == [500] * 4
    lmi, openai, tgi, _ = (json.loads(body) for _, _, body in answers)
    assert lmi["type"] == "InternalServerException"
    assert openai["error"]["type"] == "InternalServerError"
    assert tgi["error_type"] == "generation"
    assert "secret" not in json.dumps([lmi, openai, tgi])
    assert [record.message.partition(" at ")[0] for record in caplog.records] == [
        "a fault of the server: ZeroDivisionError"
    ]


def test_a_prompt_that_is_too_long_by_its_bytes_is_refused_unread(serve_toy, scripted, byte_codec):
    """512 tokens of one byte each fit; what follows them is never encoded."""
    seen = []

    class Codec(type(byte_codec)):
        def encode(self, text, **options):
            seen.append(len(text))
            return super().encode(text, **options)

    async def main():
        async with serve_toy(executor=scripted(b"a"), codec=Codec()) as server:
            call = {"prompt": "a" * 513, "max_tokens": 1}
            refused = await server.post("/v1/completions", call)
            cut = await server.post("/v1/completions", call | {"truncate_prompt_tokens": 3})
            return refused, cut, await server.post("/tokenize", {"prompt": "a" * 513})

    refused, cut, counted = asyncio.run(main())
    assert refused[0] == 400
    assert "maximum context length is 512 tokens" in json.loads(refused[2])["error"]["message"]
    assert json.loads(cut[2])["usage"]["prompt_tokens"] == 3
    assert json.loads(counted[2])["count"] == 513
    assert seen == [513, 513]


def test_a_prompt_that_is_cut_at_the_limit_is_told_of_by_its_characters(serve_toy, scripted):
    """Its tokens beyond the limit are not counted, so no number of them is stated."""

    async def main():
        async with serve_toy(executor=scripted(b"a"), codec=PlainTokenizer()) as server:
            call = {"prompt": "a " * 900, "max_tokens": 1}
            return await server.post("/v1/completions", call)

    status, _, body = asyncio.run(main())
    assert status == 400
    message = json.loads(body)["error"]["message"]
    assert "512 tokens" in message
    assert "of 1800 characters" in message
    assert "513" not in message


def test_a_health_check_is_answered_while_a_long_prompt_is_encoded(serve_toy):
    begun, may_end = threading.Event(), threading.Event()

    class Codec(PlainTokenizer):
        def encode(self, text, **options):
            begun.set()
            assert may_end.wait(120)
            return super().encode(text, **options)

    async def main():
        async with serve_toy(codec=Codec()) as server:
            call = asyncio.create_task(server.post("/invocations", {"inputs": "a " * 9000}))
            await asyncio.to_thread(begun.wait, 10)
            async with server.client.get("/ping") as ping:
                status = ping.status
            may_end.set()
            return status, (await call)[0]

    assert asyncio.run(main()) == (200, 400)


def test_a_long_prompt_counts_while_it_is_encoded_though_its_client_has_left():
    """Else clients that leave at once would have any number of them encoded side by side."""
    may_end = threading.Event()

    async def main():
        loop, begun = asyncio.get_running_loop(), asyncio.Queue()
        loop.set_default_executor(ThreadPoolExecutor(3))

        class Codec(PlainTokenizer):
            def encode(self, text, **options):
                loop.call_soon_threadsafe(begun.put_nowait, None)
                assert may_end.wait(120)
                return super().encode(text, **options)

        state = ServerState(None, Codec(), "toy", 512, 32_000)
        left = [asyncio.create_task(state.encode("a " * 6000)) for _ in range(2)]
        for _ in left:
            await begun.get()
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        third = asyncio.create_task(state.encode("a " * 6000))
        await asyncio.sleep(0)
        begins = asyncio.create_task(begun.get())
        behind = loop.run_in_executor(None, int)
        done, _ = await asyncio.wait({begins, behind}, return_when=asyncio.FIRST_COMPLETED)
        may_end.set()
        with pytest.raises(CapacityError):
            await third
        await begins
        return done == {behind}

    assert asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "prompt"),
        ("/invocations", "inputs"),
        ("/endpoints/any/invocations", "inputs"),
        ("/generate", "inputs"),
        ("/generate_stream", "inputs"),
    ],
)
def test_nothing_of_a_refused_prompt_waits_for_a_garbage_collection(serve_toy, path, field):
    """Full ones are so rare in a server that what they free would be a leak."""
    made = []

    class Ids:
        pass

    class Codec(PlainTokenizer):
        def encode(self, text, **options):
            ids = Ids()
            made.append(weakref.ref(ids))
            return super().encode(text, **options)

    async def main():
        text = "a " * 6000
        call = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {field: text}
        async with serve_toy(codec=Codec()) as server:
            gc.collect()
            gc.disable()
            try:
                status, *_ = await server.post(path, call)
                await server.post(path, {field: "b", "messages": []})  # the handler has gone on
                return status, made[0]()
            finally:
                gc.enable()

    status, left = asyncio.run(main())
    assert status in (200, 400, 413, 422, 424)
    assert left is None


TOO_LONG = "a " * 9000


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/v1/nowhere", {}, 404),
        ("PUT", "/invocations", {}, 405),
        ("POST", "/v1/completions", [], 400),
        ("POST", "/v1/completions", {"prompt": TOO_LONG}, 400),
        ("POST", "/v1/completions", {"prompt": "a", "n": 1000}, 400),
        ("POST", "/v1/chat/completions", {"messages": [], "tools": [{"type": "x"}]}, 400),
        ("POST", "/invocations", {"inputs": 1}, 400),
        ("POST", "/endpoints/any/invocations", {"inputs": 1}, 424),
        ("POST", "/endpoints/any/invocations-response-stream", {"inputs": TOO_LONG}, 424),
        ("POST", "/generate", {"inputs": "a", "parameters": {"stop": ["x"] * 99}}, 422),
        ("POST", "/generate_stream", {"inputs": TOO_LONG}, 200),
    ],
)
def test_no_refused_request_waits_for_a_garbage_collection(serve_toy, method, path, body, expected):
    async def main():
        async with serve_toy() as server:
            gc.collect()
            gc.disable()
            try:
                async with server.client.request(method, path, json=body) as response:
                    await response.read()
                async with server.client.get("/ping") as later:  # the handler has gone on
                    await later.read()
                objects = gc.get_objects()
                requests = [each for each in objects if isinstance(each, web.BaseRequest)]
                return response.status, [each for each in requests if each.path == path]
            finally:
                gc.enable()

    status, left = asyncio.run(main())
    assert status == expected
    assert left == []


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/invocations", "/generate_stream"),
        "/endpoints/any/invocations-response-stream",
    ],
)
@pytest.mark.parametrize("leaves", [False, True])
def test_no_ended_stream_waits_for_a_garbage_collection(serve_toy, slow_steps, path, leaves):
    async def main():
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
        if not path.startswith("/v1/"):
            body = {"inputs": "a", "parameters": {"max_new_tokens": 8}}
        async with serve_toy(executor=slow_steps) as server:
            gc.collect()
            gc.disable()
            try:
                async with server.client.post(path, json={**body, "stream": True}) as response:
                    await response.content.readany()
                    if leaves:
                        response.close()
                    else:
                        await response.read()
                await server.until(lambda: server.scheduler.num_running == 0)
                async with server.client.get("/ping") as later:  # the handler has gone on
                    await later.read()
                objects = gc.get_objects()
                return response.status, [x for x in objects if isinstance(x, Generation)]
            finally:
                gc.enable()

    status, left = asyncio.run(main())
    assert status == 200
    assert left == []
