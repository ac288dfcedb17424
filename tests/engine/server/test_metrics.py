"""`/metrics` in the Prometheus text format, with vLLM's names and honest counts."""

import asyncio

import pytest

from lmi_bench.engine.server.state import SECONDS_BOUNDS, TOKENS_BOUNDS, Histogram

LABELS = 'model_name="toy",engine="0"'


async def scrape(server):
    async with server.client.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
    assert len(dict(samples)) == len(samples)
    return {name: float(value) for name, value in samples}


def test_counts_after_two_requests(serve_toy):
    """3 + 2 prompt tokens, 30 + 16 generated ones: the two protocols' default lengths."""

    async def main():
        async with serve_toy() as server:
            await server.post("/invocations", {"inputs": "a b c"})
            await server.post("/v1/completions", {"prompt": [1, 2], "stream": True})
            return await scrape(server)

    samples = asyncio.run(main())
    expected = {
        f"vllm:num_requests_running{{{LABELS}}}": 0,
        f"vllm:num_requests_waiting{{{LABELS}}}": 0,
        f"vllm:kv_cache_usage_perc{{{LABELS}}}": 0,
        f"vllm:num_preemptions_total{{{LABELS}}}": 0,
        f"vllm:prompt_tokens_total{{{LABELS}}}": 5,
        f"vllm:generation_tokens_total{{{LABELS}}}": 46,
        f'vllm:request_success_total{{{LABELS},finished_reason="length"}}': 2,
        f"vllm:request_prompt_tokens_sum{{{LABELS}}}": 5,
        f'vllm:request_prompt_tokens_bucket{{{LABELS},le="2"}}': 1,
        f'vllm:request_prompt_tokens_bucket{{{LABELS},le="4"}}': 2,
        f"vllm:request_generation_tokens_sum{{{LABELS}}}": 46,
        f"vllm:time_to_first_token_seconds_count{{{LABELS}}}": 2,
        f"vllm:inter_token_latency_seconds_count{{{LABELS}}}": 29 + 15,
        f"vllm:e2e_request_latency_seconds_count{{{LABELS}}}": 2,
    }
    assert {name: samples[name] for name in expected} == expected


def test_every_sample_belongs_to_a_type_of_its_own_name(serve_toy):
    """Prometheus reads a sample whose name no TYPE line has as untyped: a counter's line names
    it with its `_total`, a histogram's without `_bucket`, `_sum` and `_count`."""

    async def main():
        async with serve_toy() as server:
            await server.post("/invocations", {"inputs": "a b c"})
            async with server.client.get("/metrics") as response:
                return await response.text()

    lines = asyncio.run(main()).splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    for line in lines:
        if line.startswith("#"):
            continue
        name = line.partition("{")[0]
        base, _, part = name.rpartition("_")
        assert name in kinds or (part in ("bucket", "sum", "count") and kinds[base] == "histogram")
        assert (kinds.get(name) == "counter") == name.endswith("_total")


def test_the_parts_of_a_request_add_up(serve_toy, slow_steps):
    """Steps of 20 ms: prefill takes one, decode four, the whole at least five."""

    async def main():
        async with serve_toy(executor=slow_steps) as server:
            await server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 5})
            return await scrape(server)

    samples = asyncio.run(main())

    def total_s(name):
        return samples[f"vllm:{name}_sum{{{LABELS}}}"]

    queue, prefill = total_s("request_queue_time_seconds"), total_s("request_prefill_time_seconds")
    decode, whole = total_s("request_decode_time_seconds"), total_s("e2e_request_latency_seconds")
    assert queue + prefill + decode == pytest.approx(whole)
    assert queue + prefill == pytest.approx(total_s("time_to_first_token_seconds"))
    assert decode == pytest.approx(total_s("inter_token_latency_seconds"))
    assert prefill >= 0.019
    assert decode >= 4 * 0.019


def test_gauges_show_what_runs_and_what_waits(serve_toy, slow_steps):
    async def main():
        async with serve_toy(executor=slow_steps, max_rolling_batch_size=1) as server:
            call = {"inputs": "a", "parameters": {"max_new_tokens": 100}}
            tasks = [asyncio.create_task(server.post("/invocations", call)) for _ in range(3)]
            await server.until(lambda: server.scheduler.num_waiting == 2)
            samples = await scrape(server)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            return samples

    samples = asyncio.run(main())
    assert samples[f"vllm:num_requests_running{{{LABELS}}}"] == 1
    assert samples[f"vllm:num_requests_waiting{{{LABELS}}}"] == 2
    assert 0 < samples[f"vllm:kv_cache_usage_perc{{{LABELS}}}"] < 0.1


def test_buckets_are_cumulative_and_hold_their_bound():
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 9.0):
        histogram.observe(value)
    assert list(histogram.samples("x", 'a="b"')) == [
        'x_bucket{a="b",le="1"} 2',
        'x_bucket{a="b",le="2"} 3',
        'x_bucket{a="b",le="5"} 4',
        'x_bucket{a="b",le="+Inf"} 5',
        'x_sum{a="b"} 17',
        'x_count{a="b"} 5',
    ]


def test_the_bounds_are_round_numbers_in_order():
    assert SECONDS_BOUNDS[:4] == (0.001, 0.002, 0.005, 0.01)
    assert SECONDS_BOUNDS[-1] == 500
    assert TOKENS_BOUNDS[-1] == 131072
    for bounds in (SECONDS_BOUNDS, TOKENS_BOUNDS):
        assert sorted(set(bounds)) == list(bounds)
