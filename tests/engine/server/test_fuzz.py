"""Hundreds of random requests, good and bad, against a cache of ten blocks: nothing is lost.

benchmarks/soak.py sends ten thousand of the same to `lmi-bench serve`.
"""

import asyncio
import random
from collections import Counter

import pytest

from benchmarks.support.random_calls import ANSWERED_OR_REFUSED, Lengths, is_answered, is_overloaded, random_call
from benchmarks.support.served import cut_short
from lmi_bench.engine.simulated import SimulatedExecutor

NUM_REQUESTS = 240
NUM_CLIENTS = 24
LIMIT_S = 120  # a busy machine may take its time; a lost request takes for ever


class ShortStep:
    def step_time_s(self, shape):
        return 0.0002


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "rolling"},
        {"policy": "dynamic", "batch_size": 4, "max_batch_delay_s": 0.002},
        {"policy": "rolling", "prefix_caching": True, "chunked_prefill": True},
    ],
    ids=["rolling", "dynamic", "prefix caching"],
)
def test_random_requests_are_all_answered_or_refused_and_leave_nothing(serve_toy, caplog, settings):
    """Ten blocks of 16 tokens and 24 clients force preemption and waiting; one request in eight
    is given up by its client, some of them in the middle of a stream.
    """
    draw = random.Random(11)
    calls = [random_call(draw, Lengths()) for _ in range(NUM_REQUESTS)]
    outcomes = Counter()

    async def send(server, call):
        while True:
            async with server.client.post(call.path, data=call.body) as response:
                body = await response.read()
            assert response.status in ANSWERED_OR_REFUSED, (call.path, call.body[:200], body)
            if not is_overloaded(response.status, body):
                break
            outcomes["overloaded"] += 1
            await asyncio.sleep(0.02)
        if response.status == 200 and b'"finish_reason"' in body and call.path != "/ping":
            assert b'"error"' not in body
            if not call.path.endswith("-response-stream"):  # whose frames end in a checksum
                assert body.endswith((b"}", b"}]", b"}\n", b"}\n\n", b"data: [DONE]\n\n"))
            return "answered"
        return "other" if is_answered(response.status, body) else "refused"

    async def client(server, work):
        for call in work:
            if call.cut:
                await cut_short(server.url, call)
                outcomes["cut short"] += 1
                continue
            try:
                async with asyncio.timeout(call.patience_s or LIMIT_S):
                    outcomes[await send(server, call)] += 1
            except TimeoutError:
                assert call.patience_s is not None, f"no answer: {call.path} {call.body[:200]}"
                outcomes["given up"] += 1

    async def main():
        settings_ = {"num_blocks": 10, "max_model_len": 200, "max_concurrent_requests": 20}
        async with serve_toy(
            max_body_bytes=20_000, executor=SimulatedExecutor(ShortStep()), **settings_ | settings
        ) as server:
            work = iter(calls)
            await asyncio.gather(*(client(server, work) for _ in range(NUM_CLIENTS)))
            await server.until(lambda: server.engine.stats().running == 0)
            await server.until(lambda: server.engine.stats().waiting == 0)
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            server.engine.audit()
            assert server.scheduler.blocks.num_free == 10
            last = {"inputs": "a", "parameters": {"max_new_tokens": 5}}
            assert (await server.post("/invocations", last))[0] == 200
            return server.engine.stats().done

    stats = asyncio.run(main())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert outcomes.total() - outcomes["overloaded"] == NUM_REQUESTS
    assert outcomes["answered"] > NUM_REQUESTS // 4
    assert outcomes["refused"] > NUM_REQUESTS // 10
    assert outcomes["given up"] > NUM_REQUESTS // 50
    assert outcomes["cut short"] > 0
    assert outcomes["overloaded"] > 0
    assert settings["policy"] != "rolling" or stats.preemptions > 0
