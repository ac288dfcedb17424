"""Listening and stopping: where, for how long, and what is said about it."""

import asyncio
import os
import resource
import signal
import socket
import time
import urllib.request

import aiohttp
import pytest
from aiohttp import web

from lmi_bench.core.errors import InputError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.server.app import build_app, check_address, exposure_warning, listening, serve
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.jobs.serve import serve as serve_model
from lmi_bench.jobs.settings.bundled import ServeSettings
from tests.end_to_end.commands import Server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_the_answers_that_run(slow_steps, number):
    """The signal comes when the first of ten lines has been read; all ten arrive."""

    async def read_all(url):
        async with aiohttp.ClientSession(url) as client:
            call = {"inputs": "a", "parameters": {"max_new_tokens": 10}, "stream": True}
            async with client.post("/invocations", json=call) as response:
                lines = [await response.content.readline()]
                os.kill(os.getpid(), number)
                return lines + [line async for line in response.content]

    async def main():
        ready = asyncio.get_running_loop().create_future()
        async with AsyncEngine(Scheduler(SchedulerConfig(num_blocks=64)), slow_steps) as engine:
            app = build_app(engine, PlainTokenizer(), model_name="toy", max_model_len=512)
            async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                group.create_task(serve(app, port=0, on_ready=ready.set_result, engine=engine))
                where = await ready
                reading = group.create_task(read_all(where.url))
            with pytest.raises(aiohttp.ClientConnectorError):
                await read_all(where.url)
            return where, reading.result()

    where, lines = asyncio.run(main())
    assert len(lines) == 10
    assert b"generated_text" in lines[-1]
    assert where.host == "127.0.0.1"
    assert where.warning is None


def test_an_answer_that_never_ends_is_waited_for_no_longer_than_stated():
    """A timer of one and a half times that still runs when the server has ended."""

    async def main():
        asked = asyncio.Event()

        async def never(_):
            asked.set()
            await asyncio.sleep(60)

        app = web.Application()
        app.router.add_get("/", never)
        async with listening(app, port=0, shutdown_timeout_s=0.4) as where:
            _, writer = await asyncio.open_connection(where.host, where.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await asked.wait()
            late = asyncio.create_task(asyncio.sleep(0.6))
        in_time = not late.done()
        writer.close()
        await late
        return in_time

    assert asyncio.run(main())


def test_a_server_without_files_for_more_connections_says_so_once(tmp_path):
    """The limit is the hard one, whatever the shell's is; each second accepting fails thousands of
    times, and when connections have ended others are answered."""
    simulated = ("--executor", "simulated", "--model", "qwen3-8b", "--instance", "ml.g5.2xlarge")
    said = tmp_path / "stderr"
    with said.open("w") as stderr:
        server = Server(
            *(*simulated, "--max-model-len", "2048"),
            before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 64)),
            stderr=stderr,
        )
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (64, 64)
    host, _, port = server.url.removeprefix("http://").partition(":")
    several = [socket.create_connection((host, int(port))) for _ in range(80)]
    while "Too many open files" not in said.read_text():
        assert server.process.poll() is None
        time.sleep(0.05)
    for each in several:
        each.close()
    with urllib.request.urlopen(f"{server.url}/ping", timeout=120) as answer:
        assert answer.status == 200
    assert server.stop()[0] == 0
    assert said.read_text().count("Too many open files") == 1
    assert "wait until others end (ulimit -n: 64)" in said.read_text()
    assert "Traceback" not in said.read_text()


def test_a_port_in_use_is_one_clear_line():
    async def main():
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            async with listening(web.Application(), port=port):
                pass

    with pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1:\d+.*--port"):
        asyncio.run(main())


def test_an_address_is_checked_before_anything_is_loaded_for_it():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"127\.0\.0\.1:{port}: Address already in use; .*--port"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    with pytest.raises(InputError, match="--port must be 0 to 65535, got 99999"):
        check_address("127.0.0.1", 99_999)
    with pytest.raises(InputError, match="choose another --host"):
        check_address("192.0.2.1", 0)  # TEST-NET-1: of no machine


def test_a_trace_is_opened_before_anything_is_loaded_for_it(tmp_path):
    missing = tmp_path / "missing" / "trace.json"
    with pytest.raises(InputError, match="--step-trace: cannot write"):
        serve_model(ServeSettings(model="no-such-model", port=0, step_trace=missing), on_ready=print)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone_is_no_risk(host):
    assert exposure_warning(host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "bench.example"])
def test_serving_beyond_this_machine_is_said(host):
    assert host in exposure_warning(host)
    assert "without authentication" in exposure_warning(host)


def test_small_writes_are_not_collected_by_the_kernel(serve_toy):
    """TCP_NODELAY is set: a token's line leaves when it is written."""

    async def probe(request):
        sock = request.transport.get_extra_info("socket")
        return web.json_response(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def main():
        extend = lambda app: app.router.add_get("/probe", probe)  # noqa: E731
        async with serve_toy(extend=extend) as server, server.client.get("/probe") as response:
            return await response.json()

    assert asyncio.run(main()) != 0


def test_ping_and_health_of_a_server_that_is_well(serve_toy):
    async def main():
        async with serve_toy() as server:
            statuses = []
            for method, path in (("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/ping"), ("GET", "/health")):
                async with server.client.request(method, path) as response:
                    statuses.append(response.status)
            return statuses

    assert asyncio.run(main()) == [200, 200, 200, 200]


def test_localhost_names_the_address_that_it_took(serve_toy):
    """A name may stand for two addresses with two free ports: the one shown is the one meant."""

    async def main():
        async with listening(web.Application(), "localhost", 0) as where:
            _, writer = await asyncio.open_connection(where.host, where.port)
            writer.close()
            await writer.wait_closed()
            return where

    where = asyncio.run(main())
    assert where.host in ("127.0.0.1", "::1")
    assert where.warning is None


@pytest.mark.parametrize("fair_by", [None, "X-Client"])
def test_a_client_with_a_backlog_delays_no_other_where_clients_take_turns(serve_toy, scripted, fair_by):
    """One slot, six requests of `much` in the queue, then one of `little`: second, or last."""
    gate, ended = asyncio.Event(), []

    async def main():
        executor = scripted([11], gate=gate)
        settings = {"max_rolling_batch_size": 1, "app_options": {"fair_by": fair_by}}
        async with serve_toy(executor=executor, **settings) as server:

            async def send(client):
                body = {"prompt": "a", "max_tokens": 2}
                headers = {"X-Client": client}
                path = "/v1/completions"
                async with server.client.post(path, json=body, headers=headers) as reply:
                    await reply.read()
                    ended.append(client)

            stats = server.engine.stats
            tasks = []
            for number, client in enumerate(["much"] * 7 + ["little"]):
                tasks.append(asyncio.create_task(send(client)))
                await server.until(lambda n=number: stats().running + stats().waiting == n + 1)
            gate.set()
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert ended.index("little") == (7 if fair_by is None else 1)


def test_a_client_has_no_more_than_its_share_of_slots_and_queue(serve_toy, scripted):
    """Of four slots and eight requests `much` has half: the slots of `little` are free."""
    gate = asyncio.Event()
    statuses = []

    async def main():
        executor = scripted([11], gate=gate)
        limits = {"max_rolling_batch_size": 4, "max_concurrent_requests": 8, "client_share": 0.5}
        options = {"app_options": {"fair_by": "X-Client"}}
        async with serve_toy(executor=executor, **limits, **options) as server:

            async def send(client):
                body = {"prompt": "a", "max_tokens": 2}
                headers = {"X-Client": client}
                path = "/v1/completions"
                async with server.client.post(path, json=body, headers=headers) as reply:
                    statuses.append((client, reply.status))
                    await reply.read()

            stats = server.engine.stats
            tasks = [asyncio.create_task(send("much")) for _ in range(4)]
            await server.until(lambda: stats().running + stats().waiting == 4)
            await send("much")  # the fifth is refused at once
            tasks += [asyncio.create_task(send("little")) for _ in range(2)]
            await server.until(lambda: stats().running + stats().waiting == 6)
            gate.set()
            await asyncio.gather(*tasks)
            return server.engine.stats()

    done = asyncio.run(main())
    assert statuses[0] == ("much", 503)
    assert sorted(statuses[1:]) == [("little", 200)] * 2 + [("much", 200)] * 4
    assert done.done.peak_running == 4  # two of each
    assert done.waiting == done.running == 0
