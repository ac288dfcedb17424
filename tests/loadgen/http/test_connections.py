"""How connections are used: kept, opened for each request, or a limited number of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from dataclasses import replace

import pytest

from lmi_bench.loadgen.http.endpoint import find_addresses
from lmi_bench.loadgen.http.native_harvest import choose_receive
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.loadgen.run.target import Resolved
from lmi_bench.wire.format import find_format
from tests.faults.misbehaving import DONE, LAST_CHUNK, REQUEST, STREAM_HEAD, chunk, event, good_answer, serving
from tests.loadgen.sending import measure

ANSWER_S = 0.1
TOO_LARGE = b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def at_once(connections, *, requests):
    """Records of requests sent together, and the server that answers each after 0.1 s."""

    async def main():
        async with serving(lambda _: [ANSWER_S, good_answer()]) as server:
            url = f"http://127.0.0.1:{server.port}"
            target = HttpTarget(url, find_format("openai"), model="m", connections=connections)
            async with target:
                await target.open_level(requests)
                opened = server.connections
                now_s = asyncio.get_running_loop().time()
                found = await asyncio.gather(*(measure(Resolved(target).send, REQUEST, now_s) for _ in range(requests)))
                again = await measure(Resolved(target).send, REQUEST, now_s)
                records = [each.record() for each in (*found, again)]
        return records, server, opened

    return run_on_sockets(main())


def test_kept_connections_are_opened_ahead_and_used_again():
    records, server, opened = at_once("reuse", requests=4)
    assert [record.status for record in records] == ["ok"] * 5
    assert server.connections == 4
    assert opened <= 4
    assert not any(record.exchange.held_s for record in records)


def test_a_new_connection_for_each_request_is_timed_and_not_held_against_anyone():
    records, server, opened = at_once("per-request", requests=4)
    assert opened == 0
    assert server.connections == 5
    for record in records:
        assert record.exchange.connect_s is not None
        assert record.exchange.held_s == pytest.approx(record.exchange.connect_s)


def test_of_two_connections_the_third_request_waits_for_one():
    records, server, _ = at_once(2, requests=4)
    assert server.connections == 2
    held = sorted(record.exchange.held_s for record in records[:4])
    assert held[1] < ANSWER_S / 2
    assert held[2] >= ANSWER_S * 0.9


def test_the_address_is_looked_up_once_for_all_connections(monkeypatch):
    """A look-up may try several addresses of a host: not with every connection at once."""

    looked_up = []

    async def look_up(host, port):
        looked_up.append(host)
        return await find_addresses(host, port)

    monkeypatch.setattr("lmi_bench.loadgen.http.endpoint.find_addresses", look_up)

    async def main():
        async with serving(lambda _: [good_answer()]) as server:
            url = f"http://localhost:{server.port}"
            async with HttpTarget(url, find_format("openai"), model="m") as target:
                await target.open_level(16)

    run_on_sockets(main())
    assert looked_up == ["localhost"]


def _hanging_up(listener, opened, hang_up, hung_up, *, tls=None):
    """Answers each connection once; the first two are closed when they are told to be."""

    def serve(plain, number):
        with tls.wrap_socket(plain, server_side=True) if tls else plain as sock:
            data = b""
            while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                if not (part := sock.recv(65536)):
                    return
                data += part
            sock.sendall(good_answer())
            (hang_up if number < 2 else ended).wait(120)
            if tls:  # says that it ends, and does not wait for the answer to that
                sock.setblocking(False)
                with contextlib.suppress(OSError):
                    sock.unwrap()
        hung_up.release()

    ended = threading.Event()
    threads = []
    with contextlib.suppress(OSError):  # the listener is closed
        while True:
            sock, _ = listener.accept()
            threads.append(threading.Thread(target=serve, args=(sock, len(opened))))
            opened.append(sock)
            threads[-1].start()
    ended.set()
    for thread in threads:
        thread.join()


def _after_a_hang_up(ask, *, tls=None, **options):
    """What `ask` gives for a target whose two connections were closed while the loop did not look,
    and the number of connections that were opened."""
    opened, hang_up, hung_up = [], threading.Event(), threading.Semaphore(0)

    async def main(url):
        async with HttpTarget(url, find_format("openai"), model="m", **options) as target:
            await target.open_level(2)
            await asyncio.gather(*(target.send(REQUEST) for _ in range(2)))
            hang_up.set()
            for _ in range(2):
                hung_up.acquire(timeout=120)  # blocks: the loop does not look at its sockets
            return await ask(target)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = (listener, opened, hang_up, hung_up)
        server = threading.Thread(target=_hanging_up, args=arguments, kwargs={"tls": tls})
        server.start()
        try:
            scheme = "https" if tls else "http"
            found = run_on_sockets(main(f"{scheme}://localhost:{listener.getsockname()[1]}"))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join()
    return found, len(opened)


def test_connections_that_the_server_gave_up_between_levels_are_replaced_before_the_next():
    """As uvicorn does after five idle seconds, while this process is busy with its summary."""

    async def next_level(target):
        await target.open_level(2)
        return await asyncio.gather(*(target.send(REQUEST) for _ in range(2)))

    exchanges, opened = _after_a_hang_up(next_level)
    assert opened == 4
    assert all(exchange.connect_s is None for exchange in exchanges), "opened within the level"


@pytest.mark.parametrize("reader", ["python", "native", "tls"])
def test_no_request_is_sent_on_a_connection_that_the_server_gave_up_meanwhile(reader, request):
    options = {}
    if reader == "native":
        options["native"] = choose_receive("auto").library or pytest.skip("no native receiver")
    if reader == "tls":
        key, cert = request.getfixturevalue("certificate")
        options |= {"cacert": str(cert), "tls": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)}
        options["tls"].load_cert_chain(cert, key)
    exchange, opened = _after_a_hang_up(lambda target: target.send(REQUEST), **options)
    assert opened == 3
    assert exchange.connect_s is not None


def test_a_level_knows_the_model_of_the_run_before_it():
    def script(number):
        named = event(" a", "length").replace(b"{", b'{"model": "%b", ' % (b"mmxm"[number:][:1]), 1)
        return [STREAM_HEAD, chunk(named), chunk(DONE), LAST_CHUNK]

    async def main():
        async with serving(script) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, find_format("openai"), model="m") as target:
                for _ in range(4):
                    await target.open_level(1)
                    await target.send(REQUEST)
                    yield target.end_level().other_model

    async def all_of_them():
        return [found async for found in main()]

    assert run_on_sockets(all_of_them()) == ["", "", "'x', the run's first of 'm'", ""]


@pytest.mark.parametrize("receive", ["native", "python"])
@pytest.mark.parametrize(("reply", "kind"), [(TOO_LARGE, "client_error"), (b"", "broken_stream")], ids=["413", "none"])
def test_a_refusal_that_comes_before_the_request_has_left_is_its_answer(receive, reply, kind):
    """A server that closes with bytes unread resets the connection; what it said before counts."""
    long = replace(REQUEST, prompt_text="a" * 8_000_000)
    native = choose_receive("auto").library if receive == "native" else None

    def refuse(listener):
        with listener.accept()[0] as sock:
            sock.recv(4096)
            sock.sendall(reply)

    async def main(port):
        url = f"http://127.0.0.1:{port}"
        async with HttpTarget(url, find_format("openai"), model="m", native=native) as target:
            return (await measure(target.send, long, 0.0)).record()

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that it cannot leave whole
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        refusing = threading.Thread(target=refuse, args=(listener,))
        refusing.start()
        record = run_on_sockets(main(listener.getsockname()[1]))
        refusing.join()
    assert record.status == kind, record.error
