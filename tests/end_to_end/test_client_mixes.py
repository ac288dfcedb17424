"""Adapters, session headers and the reset of the prefix cache, from options to the wire."""

import asyncio
import contextlib
import json
import threading
from collections import Counter, defaultdict

import pytest
from aiohttp import web

from tests.end_to_end.commands import lmi_bench
from tests.loadgen.aws.runtime_server import runtime_server

FRAMES = (
    b'data: {"object":"text_completion","choices":[{"index":0,"text":" a","finish_reason":null}]}'
    b"\n\n"
    b'data: {"object":"text_completion","choices":[{"index":0,"text":" b",'
    b'"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


@contextlib.contextmanager
def served(**routes):
    """A server of completions in a thread; gives its URL and what it was asked, in order."""
    asked = []

    async def complete(request):
        asked.append((request.path, request.headers, await request.json()))
        return web.Response(body=FRAMES, content_type="text/event-stream")

    async def models(_request):
        return web.json_response({"data": [{"id": each} for each in ("base", "a", "b")]})

    def answering(status):
        async def answer(request):
            asked.append((request.path, request.headers, await request.read()))
            return web.Response(status=status)

        return answer

    async def start():
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/v1/models", models)
        for path, status in routes.items():
            app.router.add_post(f"/{path}", answering(status))
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
        yield f"http://127.0.0.1:{port}", asked
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def sweep(url, out, *options, expect=0):
    return lmi_bench(
        *("sweep", url, "--isl", "4", "--osl", "2", "--workers", "1", "--out", out),
        *(() if "--concurrency" in options else ("--concurrency", "2")),
        *options,
        expect=expect,
    )


def test_adapters_are_asked_for_in_exact_shares_and_the_records_name_them(tmp_path):
    with served() as (url, asked):
        sweep(url, tmp_path / "run", "--adapters", "a:3,b:1", "--requests-per-level", "38")
    lines = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # 38 and the first request of each of two users: 40
    assert Counter(each["adapter"] for each in records) == {"a": 30, "b": 10}
    of_level = [body["model"] for _, _, body in asked][-40:]
    assert Counter(of_level) == {"a": 30, "b": 10}


def test_a_conversation_keeps_its_adapter_and_sends_its_own_id_at_every_turn(tmp_path):
    options = ("--turns", "3", "--sessions-per-level", "8", "--adapters", "a,b")
    with served() as (url, asked):
        sweep(url, tmp_path / "run", *options, "--session-header", "X-Session-ID", "--concurrency", "2,4")
    turns = defaultdict(list)
    for _, headers, body in asked:
        if (session := headers.get("X-Session-ID")) is not None:
            turns[session].append(body["model"])
    assert len(turns) == 16  # no conversation of the second level has an id of the first
    assert all(len(models) == 3 and len(set(models)) == 1 for models in turns.values())
    assert Counter(models[0] for models in turns.values()) == {"a": 8, "b": 8}


def test_an_adapter_that_the_server_lacks_is_named_before_the_sweep(tmp_path):
    with runtime_server(step_s=0.001) as url:
        said = sweep(url, tmp_path / "run", "--adapters", "toy:1,sql:1", expect=2).stderr
    assert "with model 'sql' (it has toy)" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("route", ["reset_prefix_cache", "flush_cache"])
def test_the_prefix_cache_is_emptied_between_the_warm_up_and_the_level(tmp_path, route):
    with served(**{route: 200}) as (url, asked):
        sweep(
            url,
            tmp_path / "run",
            "--reset-prefix-cache",
            "--concurrency",
            "1,2",
            "--requests-per-level",
            "4",
            "--warmup-requests",
            "2",
        )
    kinds = "".join("R" if path == f"/{route}" else "c" for path, *_ in asked)
    # each level: two of warm-up, the reset, then 4 requests and the first of each user
    assert kinds.endswith("cc" + "R" + "c" * 5 + "cc" + "R" + "c" * 6)
    assert kinds.count("R") == 3  # the first one asks whether the server can


def test_a_server_that_cannot_empty_its_cache_is_named_before_anything_is_written(tmp_path):
    with served(flush_cache=400) as (url, _):
        said = sweep(url, tmp_path / "run", "--reset-prefix-cache", expect=2).stderr
    assert "VLLM_SERVER_DEV_MODE=1" in said
    assert "(/reset_prefix_cache: HTTP 404, /flush_cache: HTTP 400)" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--session-header", "X-Session-ID"), "session_header needs conversations"),
        (("--session-header", "X: y", "--turns", "2"), "session_header"),
        (("--adapters", "a:x"), "--adapters: 'a:x': write NAME"),
        (("--adapters", "a:0"), "greater than 0"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(tmp_path, options, said):
    with served() as (url, asked):
        assert said in sweep(url, tmp_path / "run", *options, expect=2).stderr
    assert not asked


@pytest.mark.parametrize(
    "options", [("--adapters", "a"), ("--session-header", "X-S", "--turns", "2"), ("--reset-prefix-cache",)]
)
def test_an_engine_in_this_process_takes_none_of_them(tmp_path, options):
    said = sweep("sim:ml.g5.2xlarge", tmp_path / "run", "-m", "llama-3-8b", *options, expect=2)
    assert f"{options[0]} is for" in said.stderr
