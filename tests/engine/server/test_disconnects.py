"""A client that goes away frees what it held, whatever its request was doing."""

import asyncio
import json
import socket
import struct

import pytest

LMI = "/invocations"
LONG_LMI = {"inputs": "a b c", "parameters": {"max_new_tokens": 400}}
LONG_OPENAI = {"prompt": "a b c", "max_tokens": 400, "stream": True}


@pytest.mark.parametrize(
    ("path", "body"), [(LMI, LONG_LMI | {"stream": True}), ("/v1/completions", LONG_OPENAI)], ids=["lmi", "openai"]
)
def test_a_stream_that_nobody_reads_any_more_frees_its_blocks(serve_toy, slow_steps, path, body):
    async def main():
        async with serve_toy(executor=slow_steps) as server:
            async with server.client.post(path, json=body) as response:
                await response.content.readline()
                held = server.scheduler.blocks.num_used
                response.close()
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            server.scheduler.audit()
            return held, server.engine.stats().done.generation_tokens

    held, generated = asyncio.run(main())
    assert held > 0
    assert generated < 100  # 400 were asked for


def test_a_client_that_waits_for_an_unstreamed_answer_can_leave(serve_toy, slow_steps):
    async def main():
        async with serve_toy(executor=slow_steps) as server:
            task = asyncio.create_task(server.post(LMI, LONG_LMI))
            await server.until(lambda: server.scheduler.num_running == 1)
            task.cancel()
            await asyncio.wait([task])
            await server.until(lambda: server.scheduler.num_running == 0)
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            async with server.client.get("/metrics") as response:
                return await response.text()

    assert 'finished_reason="abort"} 1' in asyncio.run(main())


def test_a_request_in_the_queue_leaves_it_with_its_client(serve_toy, slow_steps):
    """One slot: the second waits, goes away, and the first is answered in full."""

    async def main():
        async with serve_toy(executor=slow_steps, max_rolling_batch_size=1) as server:
            call = {"inputs": "a", "parameters": {"max_new_tokens": 10}}
            first = asyncio.create_task(server.post(LMI, call))
            await server.until(lambda: server.scheduler.num_running == 1)
            second = asyncio.create_task(server.post(LMI, LONG_LMI))
            await server.until(lambda: server.scheduler.num_waiting == 1)
            second.cancel()
            await asyncio.wait([second])
            await server.until(lambda: server.scheduler.num_waiting == 0)
            reply = await first
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            return reply

    status, _, body = asyncio.run(main())
    assert status == 200
    assert len(json.loads(body)["generated_text"].split()) == 10


def test_a_connection_cut_in_the_middle_of_a_request_harms_nobody(serve_toy):
    async def main():
        async with serve_toy() as server:
            host, port = server.url.removeprefix("http://").split(":")
            for sent in (b"", b"POST /invoc", b"POST /invocations HTTP/1.1\r\nContent-Length: 99"):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            reply = await server.post(LMI, {"inputs": "a"})
            return reply[0], server.scheduler.blocks.num_used

    assert asyncio.run(main()) == (200, 0)


def test_a_reset_between_two_writes_is_no_bug_of_the_server(serve_toy, scripted, caplog):
    """The client resets its connection in the second step, in which the first token is sent: a
    write meets the reset, or a closed connection. Nobody is left to tell, nothing is logged.
    """
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    reset_on_close = struct.pack("ii", 1, 0)

    async def main():
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)

        def close_client(step):
            if step == 1:
                client.close()

        executor = scripted([11], on_step=close_client)
        async with serve_toy(executor=executor) as server:
            host, port = server.url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            client.sendall(head + body)
            await server.until(lambda: executor.num_steps > 1 and server.engine.outstanding == 0)
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            return (await server.post(LMI, {"inputs": "a"}))[0]

    assert asyncio.run(main()) == 200
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []
