"""An embeddings endpoint from the command line to the report: requests, input tokens and ends."""

import asyncio
import contextlib
import json
import threading

import pytest
from aiohttp import web

from tests.end_to_end.commands import lmi_bench

WAIT_S = 0.02


@contextlib.contextmanager
def served():
    """A server that counts a prompt's words and answers each after 20 ms, four at a time."""

    async def start():
        free = asyncio.Semaphore(4)

        async def embed(request):
            body = await request.json()
            async with free:
                await asyncio.sleep(WAIT_S)
            count = len(body["input"].split())
            data = [{"object": "embedding", "index": 0, "embedding": [0.5] * 64}]
            return web.json_response({"data": data, "usage": {"prompt_tokens": count}})

        app = web.Application()
        app.router.add_post("/v1/embeddings", embed)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield f"http://127.0.0.1:{port}"
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


SWEEP = ("--protocol", "embeddings", "-m", "bge", "--isl", "16", "--workers", "1")


def test_a_level_of_embeddings_has_requests_input_tokens_and_ends_alone(tmp_path):
    """38 requests and the first of each of two users, of 16 words: 640 tokens in, none out."""
    run, options = tmp_path / "run", ("--concurrency", "2", "--requests-per-level", "38")
    with served() as url:
        limit = ("--slo", "e2e_p50<=2s")
        done = lmi_bench("sweep", url, *SWEEP, *options, *limit, "--out", run, expect=(0, 2))
    (level,) = map(json.loads, (run / "levels.jsonl").read_text().splitlines())
    assert (done.returncode == 0) is level["valid"]
    assert (level["requests"], level["errors"]) == (40, 0)
    assert (level["input_tokens"], level["output_tokens"]) == (640, 0)
    assert level["throughput_tokens_per_s"] == 0
    assert level["total_throughput_tokens_per_s"] == pytest.approx(640 / level["wall_s"])
    assert level["request_throughput_per_s"] == pytest.approx(40 / level["wall_s"])
    counts = {name: level[f"{name}_ms"]["n"] for name in ("ttft", "itl", "tpot", "e2e")}
    assert counts == {"ttft": 0, "itl": 0, "tpot": 0, "e2e": 38}
    assert level["e2e_ms"]["min"] >= 1000 * WAIT_S
    assert not level.get("unplanned_lengths")
    block = done.stdout[done.stdout.index("Serving Benchmark Result") :]
    assert "Time to first token" not in block
    assert "Per output token" not in block
    assert "P90 E2E (ms):" in block
    assert "input tok/s" in done.stdout
    assert "E2E ms p90" in done.stdout
    if level["valid"]:  # else a busy machine
        assert "highest level within the SLOs: ≥ 2 concurrent requests" in done.stdout
    assert "planned length" not in done.stderr


def test_the_report_shows_what_embeddings_have(tmp_path):
    run, page = tmp_path / "run", tmp_path / "page.md"
    with served() as url:
        lmi_bench("sweep", url, *SWEEP, "--concurrency", "1,2,4,8", "--requests-per-level", "32", "--out", run)
    lmi_bench("report", run, "-o", tmp_path / "page.html", "--markdown", page)
    text = page.read_text()
    assert "16 tokens in, none out" in text
    assert "input tok/s" in text
    assert "E2E, ms p90" in text
    assert "TTFT, ms" not in text
    done = lmi_bench("compare", run, run, expect=(0, 2))  # 2: a busy machine left no valid level
    assert done.returncode == 0 or "no valid level in common: none against none" in done.stderr
    done = lmi_bench("gate", run, "--slo", "e2e_p90<=5s", expect=(0, 2))  # 2: a busy machine
    assert done.stdout.count("ok   concurrency") == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--osl", "8"), "--output-tokens: an embedding has no tokens"),
        (("--turns", "2"), "--turns: an embedding has no tokens"),
        (("--slo", "ttft_p90<=1s"), "ttft_p90<=1000ms: an embedding has no tokens"),
        (("--goodput", "tpot:5"), "tpot_mean<=5ms: an embedding has no tokens"),
    ],
)
def test_what_needs_tokens_of_output_is_refused(tmp_path, options, said):
    done = lmi_bench("sweep", "http://127.0.0.1:9", *SWEEP, *options, expect=2, cwd=tmp_path)
    assert said in done.stderr
