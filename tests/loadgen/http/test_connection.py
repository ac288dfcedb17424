"""A connection's framing: the end of a response, wherever the network cuts it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from lmi_bench.core.errors import TargetError
from lmi_bench.loadgen.http import connection as connection_module
from lmi_bench.loadgen.http.connection import Connection
from lmi_bench.loadgen.http.receive import LoopReceiver


def test_a_long_stream_is_parsed_to_its_end_however_its_last_bytes_are_cut():
    """Chunks of events are kept unparsed; the end must be seen wherever the network cuts it."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    frame = b"data: x\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(frame), frame)
    for cut in range(1, 6):
        end = b"0\r\n\r\n"
        reads = [head, chunk, chunk, chunk + end[: 5 - cut], end[5 - cut :]]

        async def main(reads=reads):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            connection = Connection(ours, LoopReceiver(asyncio.get_running_loop()), None, 0.0)
            _, ended = connection.start(b"GET / HTTP/1.1\r\n\r\n")
            for data in reads:
                assert not ended.done()
                theirs.sendall(data)
                await asyncio.sleep(0.002)
            await asyncio.wait_for(ended, 120)
            assert b"".join(read[2] for read in connection.reads) == b"".join(reads)
            assert connection.num_bytes == sum(map(len, reads))
            assert (connection.status, connection.reusable) == (200, True)
            connection.close()
            theirs.close()

        asyncio.run(main())


def test_an_endless_stream_of_whole_chunks_is_cut_off(monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_ANSWER_BYTES", 2000)
    frame = b"data: " + b"x" * 92 + b"\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(frame), frame)

    async def main():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = Connection(ours, LoopReceiver(asyncio.get_running_loop()), None, 0.0)
        _, ended = connection.start(b"GET / HTTP/1.1\r\n\r\n")
        theirs.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(40):
            if ended.done():
                break
            theirs.sendall(chunk)
            await asyncio.sleep(0.001)
        with pytest.raises(TargetError, match="more than 2,000 bytes"):
            await asyncio.wait_for(ended, 120)
        theirs.close()

    asyncio.run(main())


def test_an_answer_that_ends_with_its_connection_has_its_status():
    """As HAProxy's own errors: a client that sees no status would not retry."""

    async def main():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = Connection(ours, LoopReceiver(asyncio.get_running_loop()), None, 0.0)
        _, ended = connection.start(b"GET / HTTP/1.1\r\n\r\n")
        theirs.recv(100)
        theirs.sendall(b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\n\r\nno server")
        theirs.close()
        await asyncio.wait_for(ended, 120)
        assert (connection.status, connection.reusable) == (503, False)
        connection.close()

    asyncio.run(main())


def test_a_connection_whose_request_was_not_sent_whole_is_not_used_again():
    """A gateway may refuse by the head alone; what is left would run into the next request."""

    async def main(size):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = Connection(ours, LoopReceiver(asyncio.get_running_loop()), None, 0.0)
        _, ended = connection.start(b"POST / HTTP/1.1\r\n\r\n" + bytes(size))
        theirs.sendall(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n")
        await asyncio.wait_for(ended, 120)
        assert connection.status == 429
        reusable = connection.reusable
        connection.close()
        theirs.close()
        return reusable

    assert asyncio.run(main(100))
    assert not asyncio.run(main(16 * 2**20))
