"""Hundreds of random requests, good and bad, against a cache of ten blocks: nothing is lost."""

import asyncio
import json
import random
from collections import Counter

import pytest

NUM_REQUESTS = 400
NUM_CLIENTS = 24
ANSWERED_OR_REFUSED = {200, 400, 404, 405, 413, 503}
JUNK = (None, True, -1, 0, 2**40, 2**70, 1.5, "", "x", [], [""], [1, "a"], {}, {"a": 1}, "\x00é日")


def random_call(draw):
    """Method, path and body; about a third of them wrong in some way."""
    num_words = draw.choice((1, 3, 3, 20, 40, 60, 100, 140, 200, 5000))
    text = " ".join(["word"] * num_words)
    length = draw.choice((1, 2, 7, 20, 30, 60, 150))
    parameters = {
        "ignore_eos": draw.random() < 0.5,
        "temperature": draw.choice((0, 0.7, 1)),
        "seed": draw.randrange(9),
    }
    stop = draw.choice((None, None, None, [" t1001"], ["t10", " t2"], ["zzz"]))
    stream = draw.random() < 0.6
    if draw.random() < 0.5:
        path = draw.choice(("/invocations", "/invocations", "/predictions/toy"))
        parameters |= {"max_new_tokens": length, "details": True, "stop_sequences": stop}
        body = {"inputs": text, "parameters": parameters, "stream": stream}
        inner = parameters
    else:
        path = "/v1/completions"
        prompt = text if draw.random() < 0.5 else list(range(num_words))
        body = {"prompt": prompt, "max_tokens": length, "stop": stop, "stream": stream}
        body |= parameters | {"stream_options": {"include_usage": True}}
        if draw.random() < 0.3:
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": text}], "top_logprobs": 0}
            del body["prompt"]
        inner = body
    if draw.random() < 0.25:
        inner[draw.choice((*inner, "new\nfield", "n", "min_tokens", "logprobs"))] = draw.choice(
            JUNK
        )
    raw = json.dumps(body).encode()
    if draw.random() < 0.05:
        raw = raw[: draw.randrange(len(raw))]
    if draw.random() < 0.05:
        path = draw.choice(("/predictions/other", "/nowhere", "/v1/nowhere", "/ping"))
    return path, raw


@pytest.mark.parametrize("policy", ["rolling", "dynamic"])
def test_random_requests_are_all_answered_or_refused_and_leave_nothing(serve_toy, caplog, policy):
    """Ten blocks of 16 tokens and 24 clients force preemption and waiting; one request in eight
    is given up by its client, some of them in the middle of a stream.
    """
    draw = random.Random(11)
    calls = [random_call(draw) for _ in range(NUM_REQUESTS)]
    patience_s = [draw.uniform(0, 0.1) if draw.random() < 0.12 else 8.0 for _ in calls]
    outcomes = Counter()

    async def send(server, path, raw):
        while True:
            async with server.client.post(path, data=raw) as response:
                body = await response.read()
            assert response.status in ANSWERED_OR_REFUSED, (path, raw[:200], body)
            if response.status != 503:
                break
            outcomes["overloaded"] += 1
            await asyncio.sleep(0.02)
        if response.status == 200 and b'"finish_reason"' in body and path != "/ping":
            assert b'"error"' not in body
            assert body.endswith((b"}", b"}\n", b"data: [DONE]\n\n"))
            return "answered"
        return "refused" if response.status != 200 else "other"

    async def client(server, work):
        for (path, raw), patience in work:
            try:
                async with asyncio.timeout(patience):
                    outcomes[await send(server, path, raw)] += 1
            except TimeoutError:
                assert patience < 8, f"no answer: {path} {raw[:200]}"
                outcomes["given up"] += 1

    async def main():
        settings = {"num_blocks": 10, "max_model_len": 200, "policy": policy, "batch_size": 4}
        settings |= {"max_batch_delay_s": 0.002, "max_concurrent_requests": 20}
        async with serve_toy(max_body_bytes=20_000, **settings) as server:
            work = iter(list(zip(calls, patience_s, strict=True)))
            await asyncio.gather(*(client(server, work) for _ in range(NUM_CLIENTS)))
            await server.until(lambda: server.engine.stats().running == 0)
            await server.until(lambda: server.engine.stats().waiting == 0)
            await server.until(lambda: server.scheduler.used_blocks == 0)
            server.scheduler.audit()
            assert server.scheduler.free_blocks == 10
            last = {"inputs": "a", "parameters": {"max_new_tokens": 5}}
            assert (await server.post("/invocations", last))[0] == 200
            return server.engine.stats()

    stats = asyncio.run(main())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert outcomes.total() - outcomes["overloaded"] == NUM_REQUESTS
    assert outcomes["answered"] > NUM_REQUESTS // 4
    assert outcomes["refused"] > NUM_REQUESTS // 10
    assert outcomes["given up"] > NUM_REQUESTS // 50
    assert outcomes["overloaded"] > 0
    assert policy != "rolling" or stats.preemptions > 0
