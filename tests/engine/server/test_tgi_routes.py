"""TGI's routes over a real engine; expected bodies are written after router/src of TGI 3."""

import asyncio
import json
from dataclasses import replace

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, ValidationError

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.format import find_format

STREAM = "/generate_stream"
UNARY = "/generate"


def events_of(body):
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data:") for block in blocks)
    return [json.loads(block.removeprefix("data:")) for block in blocks]


def post(serve_toy, path, body, **settings):
    async def main():
        async with serve_toy(**settings) as server:
            return await server.post(path, body)

    return asyncio.run(main())


def call(inputs="one two three", **parameters):
    return {"inputs": inputs, "parameters": parameters}


def test_a_stream_has_an_event_a_token_and_the_last_has_the_text_and_details(serve_toy, scripted):
    status, headers, body = post(serve_toy, STREAM, call(max_new_tokens=2, details=True), executor=scripted([11, 12]))
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    assert events_of(body) == [
        {
            "index": 1,
            "token": {"id": 11, "text": " t11", "logprob": -0.5, "special": False},
            "generated_text": None,
            "details": None,
        },
        {
            "index": 2,
            "token": {"id": 12, "text": " t12", "logprob": -0.5, "special": False},
            "generated_text": " t11 t12",
            "details": {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 3},
        },
    ]


def test_details_of_a_stream_come_only_where_asked_for(serve_toy):
    _, _, body = post(serve_toy, STREAM, call(max_new_tokens=3))
    assert [event["details"] for event in events_of(body)] == [None] * 3
    assert events_of(body)[-1]["generated_text"] is not None


def test_an_unstreamed_reply_is_an_object_with_details_where_asked_for(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            plain = await server.post(UNARY, call(max_new_tokens=2))
            detailed = await server.post(UNARY, call(max_new_tokens=2, details=True))
            return plain, detailed

    plain, detailed = asyncio.run(main())
    assert json.loads(plain[2]) == {"generated_text": " t11 t12"}
    assert json.loads(detailed[2]) == {
        "generated_text": " t11 t12",
        "details": {
            "finish_reason": "length",
            "generated_tokens": 2,
            "seed": None,
            "prefill": [],
            "tokens": [
                {"id": 11, "text": " t11", "logprob": -0.5, "special": False},
                {"id": 12, "text": " t12", "logprob": -0.5, "special": False},
            ],
        },
    }
    headers = detailed[1]
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("3", "2")
    assert int(headers["x-total-time"]) >= int(headers["x-inference-time"])
    assert 0 < float(headers["x-compute-time"]) < 10


def test_the_root_answers_with_an_array_of_one_or_a_stream_and_the_prompt_before_it(serve_toy):
    async def main():
        async with serve_toy() as server:
            whole = await server.post("/", call("t1 t2", max_new_tokens=1))
            stream = await server.post("/", call("t1 t2", max_new_tokens=1) | {"stream": True})
            without = await server.post("/", call("t1 t2", max_new_tokens=1, return_full_text=False))
            async with server.client.get("/") as response:
                return whole, stream, without, (response.status, await response.read())

    whole, stream, without, health = asyncio.run(main())
    (reply,) = json.loads(whole[2])
    (event,) = events_of(stream[2])
    (bare,) = json.loads(without[2])
    assert reply["generated_text"].startswith("t1 t2 t")
    assert event["generated_text"] == reply["generated_text"] == "t1 t2" + bare["generated_text"]
    assert health == (200, b"")


def test_info_states_the_model_and_the_limits(serve_toy):
    async def info(**settings):
        async with serve_toy(**settings) as server, server.client.get("/info") as response:
            return await response.json()

    stated = asyncio.run(info(max_model_len=256, max_input_tokens=100, max_concurrent_requests=7))
    assert stated["model_id"] == "toy"
    assert (stated["max_input_tokens"], stated["max_total_tokens"]) == (100, 256)
    assert stated["max_concurrent_requests"] == 7
    assert stated["model_pipeline_tag"] == "text-generation"
    assert stated["router"] != "text-generation-router"
    assert asyncio.run(info(max_model_len=256))["max_input_tokens"] == 255


@pytest.mark.parametrize(
    ("parameters", "text", "reason", "count"),
    [
        ({}, "abc", "eos_token", 4),
        ({"stop": ["bc"]}, "abc", "stop_sequence", 3),
        ({"stop": ["zz", "b"]}, "ab", "stop_sequence", 2),
        ({"max_new_tokens": 2}, "ab", "length", 2),
    ],
)
def test_what_ends_an_answer_is_told_and_a_stop_sequence_is_kept(
    serve_toy, scripted, byte_codec, parameters, text, reason, count
):
    """The script is a, b, c, end of sequence, whose own name stands in its token alone."""

    async def main():
        async with serve_toy(executor=scripted([*b"abc", 0]), codec=byte_codec) as server:
            body = call("x", details=True, **parameters)
            return await server.post(UNARY, body), await server.post(STREAM, body)

    whole, stream = asyncio.run(main())
    reply = json.loads(whole[2])
    assert reply["generated_text"] == text
    assert reply["details"]["finish_reason"] == reason
    assert reply["details"]["generated_tokens"] == count
    events = events_of(stream[2])
    assert events[-1]["generated_text"] == text
    assert events[-1]["details"]["finish_reason"] == reason
    assert [event["index"] for event in events] == list(range(1, count + 1))
    last = events[-1]["token"]
    assert last["special"] == (reason == "eos_token")
    assert (last["text"] == "</s>") == last["special"]
    assert "".join(e["token"]["text"] for e in events if not e["token"]["special"]) == text


def test_a_length_that_nobody_names_is_the_rest_of_the_context(serve_toy):
    _, _, body = post(serve_toy, UNARY, call("a b c d", details=True), max_model_len=64)
    assert json.loads(body)["details"]["generated_tokens"] == 60


def test_the_end_of_a_prompt_is_kept_where_it_is_cut(serve_toy):
    _, _, body = post(serve_toy, STREAM, call("a b c d", truncate=3, max_new_tokens=1, details=True))
    assert events_of(body)[0]["details"]["input_length"] == 3


def test_the_likeliest_tokens_stand_beside_the_chosen_one(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11])) as server:
            body = call(max_new_tokens=1, details=True, top_n_tokens=2)
            return await server.post(UNARY, body), await server.post(STREAM, body)

    whole, stream = asyncio.run(main())
    expected = [
        {"id": 11, "text": " t11", "logprob": -0.5, "special": False},
        {"id": 12, "text": " t12", "logprob": -1.5, "special": False},
    ]
    assert json.loads(whole[2])["details"]["top_tokens"] == [expected]
    assert events_of(stream[2])[0]["top_tokens"] == expected


@pytest.mark.parametrize(
    ("parameters", "sampled"),
    [
        (None, True),
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.5}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
    ],
)
def test_a_seed_is_named_where_something_is_drawn(serve_toy, parameters, sampled):
    """Whether to sample follows TGI: yes where `parameters` is left out, no where it is empty."""
    body = {"inputs": "a"}
    if parameters is not None:
        body["parameters"] = parameters | {"details": True, "max_new_tokens": 1}
        _, _, reply = post(serve_toy, UNARY, body)
        seed = json.loads(reply)["details"]["seed"]
        assert (seed is not None) == sampled
        body["parameters"] |= {"seed": 7, "do_sample": True}
        _, _, reply = post(serve_toy, UNARY, body)
        assert json.loads(reply)["details"]["seed"] == 7
        return
    seen = []

    async def main():
        async with serve_toy(max_model_len=8) as server:
            submit = server.engine.submit

            def noted(token_ids, sampling, **options):
                seen.append(sampling)
                return submit(token_ids, sampling, **options)

            server.engine.submit = noted
            return await server.post(UNARY, body)

    assert asyncio.run(main())[0] == 200
    assert (seen[0].temperature, seen[0].max_new_tokens) == (1.0, 7)


def test_of_several_answers_the_likeliest_is_given_and_the_others_stand_in_its_details(serve_toy, scripted):
    class Unlike(type(scripted([11]))):
        """Tokens of the second sequence are likelier."""

        async def execute(self, batch):
            outputs = await super().execute(batch)
            return [replace(out, token_ids=(20 + out.seq_id,), logprobs=(-0.9 + 0.5 * out.seq_id,)) for out in outputs]

    body = call(best_of=2, do_sample=True, details=True, max_new_tokens=2)
    status, _, reply = post(serve_toy, UNARY, body, executor=Unlike([11]))
    assert status == 200
    best = json.loads(reply)
    (other,) = best["details"]["best_of_sequences"]
    assert best["generated_text"] == " t21 t21"
    assert other["generated_text"] == " t20 t20"
    assert other["finish_reason"] == best["details"]["finish_reason"] == "length"
    assert other["seed"] != best["details"]["seed"]


VALIDATION = [
    ({"inputs": ""}, "`inputs` cannot be empty"),
    (call(best_of=3, do_sample=True), "`best_of` must be > 0 and <= 2. Given: 3"),
    (call(best_of=2), "you must use sampling when `best_of` is > 1"),
    (call(best_of=2, do_sample=True, seed=1), "`seed` must not be set when `best_of` > 1"),
    (call(temperature=0), "`temperature` must be strictly positive"),
    (call(repetition_penalty=0), "`repetition_penalty` must be strictly positive"),
    (call(frequency_penalty=2.5), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    (call(top_p=1.0), "`top_p` must be > 0.0 and < 1.0"),
    (call(typical_p=0.0), "`typical_p` must be > 0.0 and < 1.0"),
    (call(typical_p=0.5), "`typical_p` is not supported by this server"),
    (call(top_k=0), "`top_k` must be strictly positive"),
    (call(max_new_tokens=0), "`max_new_tokens` must be strictly positive"),
    (call(stop=["a"] * 17), "`stop` supports up to 16 stop sequences. Given: 17"),
    (call(top_n_tokens=21), "`top_n_tokens` must be >= 0 and <= 20. Given: 21"),
    (call(truncate=0), "`truncate` must be strictly positive and less than 30. Given: 0"),
    (call(watermark=True), "`watermark` is not supported by this server"),
    (call(grammar={"type": "regex", "value": "a"}), "grammar is not supported"),
    (call(adapter_id="x"), "`adapter_id` is not supported by this server, which has no adapters"),
    (
        call(max_new_tokens=30),
        "`inputs` tokens + `max_new_tokens` must be <= 32. Given: 3 `inputs` tokens and 30 `max_new_tokens`",
    ),
    (call("a " * 31, max_new_tokens=1), "`inputs` must have less than 30 tokens. Given: 31"),
    (call(" "), "the prompt has no tokens: send at least one"),
]
LIMITS = {"max_model_len": 32, "max_input_tokens": 30}


@pytest.mark.parametrize(("body", "message"), VALIDATION)
def test_a_value_out_of_range_gets_tgis_words_with_422_or_as_an_event(serve_toy, body, message):
    async def main():
        async with serve_toy(**LIMITS) as server:
            return await server.post(UNARY, body), await server.post(STREAM, body)

    whole, stream = asyncio.run(main())
    expected = {"error": f"Input validation error: {message}", "error_type": "validation"}
    assert (whole[0], json.loads(whole[2])) == (422, expected)
    assert stream[0] == 200
    if body.get("parameters", {}).get("best_of"):  # which a stream refuses in any case
        expected["error"] = "Input validation error: `best_of` != 1 is not supported when streaming tokens"
    assert events_of(stream[2]) == [expected]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"inputs": ', "not valid JSON"),
        (b"{}", "inputs must be a string"),
        (b'{"inputs": ["a"]}', "inputs must be a string"),
        (b'{"inputs": "a", "parameters": 3}', "parameters must be an object"),
        (b'{"inputs": "a", "parameters": {"stop": 5}}', "stop must be a list"),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": -1}}', "max_new_tokens must be at"),
        (b'{"inputs": "a", "parameters": {"temperature": "hot"}}', "must be a number"),
        (b'{"inputs": "a", "parameters": {"details": 1}}', "details must be true or false"),
        (b'{"inputs": "a", "stream": "yes"}', "stream must be true or false"),
    ],
)
@pytest.mark.parametrize("path", ["/", UNARY, STREAM])
def test_a_body_of_the_wrong_shape_gets_422_also_for_a_stream(serve_toy, path, body, message):
    async def main():
        async with serve_toy() as server, server.client.post(path, data=body) as response:
            return response.status, json.loads(await response.read())

    status, reply = asyncio.run(main())
    assert (status, reply["error_type"]) == (422, "validation")
    assert message in reply["error"]


def test_what_a_stream_cannot_give_is_refused_in_tgis_words(serve_toy):
    stream = post(serve_toy, STREAM, call(decoder_input_details=True))
    (event,) = events_of(stream[2])
    assert event["error"].endswith("`decoder_input_details` == true is not supported when streaming tokens")
    whole = post(serve_toy, UNARY, call(decoder_input_details=True, details=True))
    assert whole[0] == 422


def test_a_full_server_is_overloaded_with_429_or_as_an_event_under_200(serve_toy, slow_steps):
    async def main():
        async with serve_toy(executor=slow_steps, max_concurrent_requests=1) as server:
            first = asyncio.create_task(server.post(UNARY, call(max_new_tokens=20)))
            await server.until(lambda: server.scheduler.num_running == 1)
            whole = await server.post(UNARY, call(max_new_tokens=1))
            stream = await server.post(STREAM, call(max_new_tokens=1))
            return whole, stream, await first

    whole, stream, first = asyncio.run(main())
    overloaded = {"error": "Model is overloaded", "error_type": "overloaded"}
    assert (whole[0], json.loads(whole[2])) == (429, overloaded)
    assert (stream[0], events_of(stream[2])) == (200, [overloaded])
    assert first[0] == 200


def test_a_stream_has_its_status_while_it_still_waits_for_a_place(serve_toy, slow_steps):
    async def main():
        async with serve_toy(executor=slow_steps, max_rolling_batch_size=1) as server:
            first = asyncio.create_task(server.post(UNARY, call(max_new_tokens=40)))
            await server.until(lambda: server.scheduler.num_running == 1)
            async with server.client.post(STREAM, json=call(max_new_tokens=1)) as response:
                waiting = server.scheduler.num_waiting
                events = events_of(await response.read())
            await first
            return response.status, waiting, len(events)

    assert asyncio.run(main()) == (200, 1, 1)


@pytest.mark.parametrize("fails_at_step", [0, 2])
def test_an_engine_that_fails_is_told_in_tgis_words(serve_toy, scripted, fails_at_step):
    async def main():
        async with serve_toy(executor=scripted([11], fails_at_step=fails_at_step)) as server:
            stream = await server.post(STREAM, call(max_new_tokens=9))
            whole = await server.post(UNARY, call(max_new_tokens=9))
            async with server.client.get("/health") as response:
                return stream, whole, (response.status, await response.json())

    stream, whole, health = asyncio.run(main())
    *tokens, error = events_of(stream[2])
    assert len(tokens) == fails_at_step
    expected = {"error": "Request failed during generation: a rank died", "error_type": "generation"}
    assert (stream[0], error) == (200, expected)
    assert (whole[0], json.loads(whole[2])) == (424, expected)
    assert health == (503, {"error": "unhealthy", "error_type": "healthcheck"})


def test_a_wrong_method_and_a_field_that_means_nothing_here(serve_toy):
    async def main():
        async with serve_toy() as server:
            ignored = await server.post(UNARY, call(max_new_tokens=1, stop_sequences=["a"]))
            async with server.client.get(UNARY) as response:
                return ignored, (response.status, await response.json())

    ignored, wrong = asyncio.run(main())
    assert ignored[1]["X-Ignored-Parameters"] == "stop_sequences"
    assert wrong == (405, {"error": "/generate accepts POST", "error_type": "validation"})


def test_a_stream_that_nobody_reads_any_more_frees_its_blocks(serve_toy, slow_steps):
    async def main():
        async with serve_toy(executor=slow_steps) as server:
            async with server.client.post(STREAM, json=call(max_new_tokens=400)) as response:
                await response.content.readline()
                held = server.scheduler.blocks.num_used
                response.close()
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            server.scheduler.audit()
            return held

    assert asyncio.run(main()) > 0


@pytest.mark.parametrize("stream", [True, False])
def test_the_client_format_reads_its_own_server(serve_toy, stream):
    tgi = find_format("tgi", stream=stream)
    planned = PlannedRequest(0, 0.0, 5, 9, prompt_text="a b c d e")

    async def main():
        async with serve_toy() as server:
            body = tgi.request_body(planned, model="toy", stream=stream)
            async with server.client.post(tgi.path, data=body) as response:
                return await response.read()

    data = asyncio.run(main())
    if stream:
        splitter = tgi.new_splitter()
        events = [tgi.parse(payload) for payload in splitter.feed(data) + splitter.close()]
        assert sum(event.num_tokens for event in events) == 9
        assert events[-1].input_tokens == 5
    else:
        events = [tgi.parse(data)]
    assert (events[-1].output_tokens, events[-1].finish_reason) == (9, "length")
    assert events[-1].end


def test_hugging_faces_own_client_generates_streams_and_reads_the_errors(serve_toy, scripted, slow_steps):
    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            client = InferenceClient(model=server.url)

            def use():
                text = client.text_generation("a b", max_new_tokens=2, return_full_text=False)
                whole = client.text_generation("a b", max_new_tokens=2, details=True, seed=3, do_sample=True)
                stream = list(client.text_generation("a b", max_new_tokens=2, details=True, stream=True))
                with pytest.raises(ValidationError, match="strictly positive"):
                    client.text_generation("a b", temperature=0.0)
                with pytest.raises(ValidationError, match="strictly positive"):
                    list(client.text_generation("a b", top_k=-1, stream=True))
                return text, whole, stream

            return await asyncio.to_thread(use)

    text, whole, stream = asyncio.run(main())
    assert text == " t11 t12"
    assert whole.generated_text == "a b t11 t12"
    assert (whole.details.finish_reason, whole.details.seed) == ("length", 3)
    assert [token.id for token in whole.details.tokens] == [11, 12]
    assert [event.token.text for event in stream] == [" t11", " t12"]
    assert stream[-1].details.input_length == 2

    async def full():
        async with serve_toy(executor=slow_steps, max_concurrent_requests=1) as server:
            client = InferenceClient(model=server.url)
            first = asyncio.create_task(server.post(UNARY, call(max_new_tokens=20)))
            await server.until(lambda: server.scheduler.num_running == 1)
            with pytest.raises((OverloadedError, HfHubHTTPError), match="overloaded"):
                await asyncio.to_thread(client.text_generation, "a", max_new_tokens=1)
            await first

    asyncio.run(full())
