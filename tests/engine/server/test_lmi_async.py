"""Replies as djl-serving's async mode gives them since 0.35, faults of counting included."""

import asyncio
import json
import urllib.request

import pytest

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.engine.server.lmi_routes import Replies
from lmi_bench.engine.server.state import ServerState
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.wire.format import find_format
from tests.loadgen.aws.runtime_server import runtime_server

REQUEST = PlannedRequest(0, 0.0, input_tokens=3, output_tokens=4, prompt_text="a b c")


@pytest.fixture(scope="module")
def url():
    with runtime_server(app_options={"replies": Replies("async")}) as url:
        yield url


def post(url, **body):
    request = urllib.request.Request(
        url + "/invocations", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.headers["Content-Type"], reply.read()


def test_a_stream_names_logprob_and_index_and_ends_with_blank_lines(url):
    parameters = {"max_new_tokens": 4, "details": True}
    kind, data = post(url, inputs="a b c", parameters=parameters, stream=True)
    assert kind == "application/jsonlines"
    assert data.endswith(b"}\n\n\n")
    lines = [json.loads(line) for line in data.splitlines() if line]
    assert len(lines) == 4
    assert all(line["index"] == 0 and set(line["token"]) == {"id", "text", "logprob"} for line in lines)
    assert [line["generated_text"] for line in lines[:-1]] == [None] * 3
    assert lines[-1]["generated_text"] == "".join(line["token"]["text"] for line in lines)
    assert lines[-1]["details"] == {"finish_reason": "length", "seed": None, "generated_tokens": 5, "input_length": 3}


def test_an_unstreamed_answer_counts_right_and_gives_no_reason(url):
    parameters = {"max_new_tokens": 4, "details": True}
    _, data = post(url, inputs="a b c", parameters=parameters)
    details = json.loads(data)["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (4, None)
    assert len(details["tokens"]) == 4


@pytest.mark.parametrize("stream", [True, False])
def test_our_client_counts_its_tokens_right_all_the_same(url, stream):
    async def main():
        target = HttpTarget(url, find_format("lmi"), model="toy", stream=stream)
        async with target:
            return await target.send(REQUEST)

    exchange = run_on_sockets(main())
    assert exchange.output_tokens == 4
    assert exchange.input_tokens == (3 if stream else None)


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.6),
        ({"seed": 3}, 0.6),
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 0.6),
        ({"temperature": 0.2}, 0.2),
        ({"temperature": 0}, 0.0),
        ({"do_sample": None}, 0.6),
    ],
)
def test_tokens_are_drawn_as_vllm_draws_them(serve_toy, monkeypatch, parameters, temperature):
    """The model's own settings hold; the rolling batch is greedy unless a field asks to draw."""
    codec, asked = PlainTokenizer(), []
    codec.sampling = {"temperature": 0.6}
    submit = ServerState.submit

    def seen(self, prompt, **options):
        asked.append(prompt.sampling.temperature)
        return submit(self, prompt, **options)

    monkeypatch.setattr(ServerState, "submit", seen)

    async def main(kind):
        options = {"app_options": {"replies": Replies(kind)}, "codec": codec}
        async with serve_toy(**options) as server:
            body = {"inputs": "a", "parameters": parameters | {"max_new_tokens": 1}}
            status, headers, _ = await server.post("/invocations", body)
            assert (status, "X-Ignored-Parameters" in headers) == (200, False)

    asyncio.run(main("async"))
    asyncio.run(main("rolling"))
    drawn = parameters.get("do_sample") or "temperature" in parameters
    assert asked == [temperature, (parameters.get("temperature", 1.0) if drawn else 0.0)]
