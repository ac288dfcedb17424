"""The native receiver and the Python one: the same records of the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import signal
import socket
import ssl
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.loadgen.http import connection as connection_module
from lmi_bench.loadgen.http import native_harvest, native_tls
from lmi_bench.loadgen.http.connection import Connection
from lmi_bench.loadgen.http.kernel_time import SO_TIMESTAMPNS, stamping_socket
from lmi_bench.loadgen.http.native_harvest import choose_receive
from lmi_bench.loadgen.http.receive import receiver_of, run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.wire.format import find_format
from tests.faults.misbehaving import DONE, LAST_CHUNK, REQUEST, STREAM_HEAD, chunk, event, good_answer, serving, usage
from tests.loadgen.http.tls_pair import tls_pair

CHOICE = choose_receive("auto")
pytestmark = pytest.mark.skipif(CHOICE.library is None, reason=f"receiver: {CHOICE.note}")
OPENAI = find_format("openai")
LIMIT_BYTES = 300_000


def conversation(pieces, *, native: bool, requests: int = 1, session=None):
    """What a connection made of these writes: per request its bytes, reads, state, or its error.

    Each piece is written when the one before it has been read, so that both see the same reads.

    session  gives a TLS session's layer at the client, and what to send for a plain piece
    """

    async def main():
        loop = asyncio.get_running_loop()
        receiver = receiver_of(loop)
        if native:
            receiver.use_native(CHOICE.library)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        ours.setblocking(False)
        layer, encrypted = session() if session else (None, lambda piece: [piece])
        connection = Connection(ours, receiver, layer, 0.0)
        assert connection.native is native
        seen = []
        for _ in range(requests):
            sent_ns, ended = connection.start(b"GET / HTTP/1.1\r\n\r\n")
            for piece in pieces:
                if piece is None:
                    theirs.close()
                elif ended.done():
                    break
                else:
                    for part in encrypted(piece):
                        await loop.run_in_executor(None, theirs.sendall, part)
                        await asyncio.sleep(0.002)
                # Until it was read: the fetch of its bytes is the selector's.
                await asyncio.sleep(0.002)
            try:
                await asyncio.wait_for(ended, 120)
                error = None
            except TargetError as exc:
                error = (exc.kind, str(exc))
            reads = list(connection.reads)
            assert [connection.reads[i] for i in range(len(reads))] == reads
            assert connection.reads[-2:] == reads[-2:]
            assert all(sent_ns <= user_ns <= time.monotonic_ns() for user_ns, _, _, _ in reads)
            assert all(bound_ns <= user_ns for user_ns, _, _, bound_ns in reads)
            seen.append(
                (
                    [data for _, _, data, _ in reads],
                    [control is not None and len(control) for _, control, _, _ in reads],
                    connection.num_bytes,
                    connection.status,
                    connection.reusable,
                    error,
                )
            )
        await asyncio.sleep(0.002)
        left_open = connection.fd >= 0
        connection.close()
        theirs.close()
        return seen, left_open

    stamping = stamping_socket()  # held, so that the kernel stamps from the first read on
    try:
        return run_on_sockets(main())
    finally:
        if stamping is not None:
            stamping.close()


GOOD = [STREAM_HEAD, *map(chunk, (event(" a"), event(" b"), event(" c", "length"), DONE)), LAST_CHUNK]
WHOLE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SCRIPTS = {
    "event by event": GOOD,
    "in one piece": [b"".join(GOOD)],
    "several events a read": [STREAM_HEAD, GOOD[1] + GOOD[2], GOOD[3] + GOOD[4] + GOOD[5]],
    "frames cut in halves": [p for piece in GOOD for p in (piece[:7], piece[7:]) if p],
    "the end cut after each byte": [*GOOD[:-1], *(LAST_CHUNK[i : i + 1] for i in range(5))],
    "trailers": [*GOOD[:-1], b"0\r\nX-Took: 3\r\n\r\n"],
    "JSON lines": [STREAM_HEAD, chunk(b'{"token": 1}\n'), chunk(b'{"token": 2}\n'), LAST_CHUNK],
    "counted": [WHOLE_HEAD + b"Content-Length: 6\r\n\r\n", b'{"a"', b":1"[:2]],
    "close-delimited": [WHOLE_HEAD + b"\r\n", b"data: x\n\n\r\n", b"tail", None],
    "closed in mid-stream": [*GOOD[:3], None],
    "closed before a response": [None],
    "not HTTP": [b"SSH-2.0-x\r\n"],
    "bytes after the end": [*GOOD[:-1], LAST_CHUNK + b"HTTP/1.1 500 no\r\n\r\n"],
    "interim response": [b"HTTP/1.1 100 Continue\r\n\r\n", *GOOD],
    "asked to close": [GOOD[0][:-2] + b"Connection: close\r\n\r\n", *GOOD[1:]],
    "a large event": [STREAM_HEAD, chunk(event("x" * 50_000)), chunk(DONE), LAST_CHUNK],
    "too large": [STREAM_HEAD, *[chunk(event("y" * 50_000))] * 8],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_receivers_make_the_same_of_the_same_bytes(name, monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_ANSWER_BYTES", LIMIT_BYTES)
    script = SCRIPTS[name]
    again = 3 if name in ("event by event", "in one piece", "trailers") else 1
    python, native = (conversation(script, native=wanted, requests=again) for wanted in (False, True))
    assert _joined(native) == _joined(python)
    if all(piece is None or len(piece) < 4096 for piece in script):
        assert native == python  # read by read, stamps too


def _joined(result):
    """The same without where the network cut it, which is chance for what fills a buffer."""
    seen, left_open = result
    return [(b"".join(data), *rest) for data, _, *rest in seen], left_open


def test_a_server_that_writes_faster_than_anyone_reads_is_given_up_within_its_limit():
    """Full reads one after the other: without an end the receiver would stay with this stream."""
    frames = chunk(event("x" * 200)) * 500

    def write(theirs):
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(frames)

    async def main():
        receiver = receiver_of(asyncio.get_running_loop())
        receiver.use_native(CHOICE.library)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        ours.setblocking(False)
        connection = Connection(ours, receiver, None, 0.0)
        _, ended = connection.start(b"GET / HTTP/1.1\r\n\r\n", most_bytes=LIMIT_BYTES)
        theirs.sendall(STREAM_HEAD)
        writer = threading.Thread(target=write, args=(theirs,))
        writer.start()
        with pytest.raises(TargetError, match="more than 300,000 bytes"):
            await asyncio.wait_for(ended, 120)
        theirs.close()
        writer.join()
        return connection.num_bytes

    assert run_on_sockets(main()) <= LIMIT_BYTES + 2 * 65_536


def test_an_answer_of_megabytes_is_kept_whole_and_its_memory_given_back():
    body = random.Random(1).randbytes(3_000_000)
    head = WHOLE_HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    (first, second), left_open = conversation([head + body], native=True, requests=2)
    assert b"".join(first[0]) == b"".join(second[0]) == head + body
    assert (first[2], left_open) == (len(head) + len(body), True)


def _answers(native: bool, timestamps: str | None):
    """Three answers on two connections, each token written apart."""
    frames = [event(" a"), event(" b"), event(" c", "length"), usage(4, 3), DONE]
    script = [STREAM_HEAD, *(step for frame in frames for step in (chunk(frame), 0.003))]

    async def main():
        async with serving(lambda number: [*script, LAST_CHUNK]) as server:
            url = f"http://127.0.0.1:{server.port}"
            library = CHOICE.library if native else None
            target = HttpTarget(url, OPENAI, model="m", timestamps=timestamps, native=library)
            async with target:
                await target.open_level(2)
                exchanges = await asyncio.gather(*(target.send(REQUEST) for _ in range(2)))
                exchanges.append(await target.send(REQUEST))
                return exchanges, target.end_level(), server.connections

    return run_on_sockets(main())


@pytest.mark.parametrize("timestamps", [None, "user"])
def test_answers_read_natively_have_the_times_and_bounds_of_those_read_in_python(timestamps):
    python, python_signals, _ = _answers(False, timestamps)
    native, signals, connections = _answers(True, timestamps)
    assert (signals.receiver, python_signals.receiver) == ("native", "python")
    assert signals.timestamps == python_signals.timestamps
    assert connections == 2
    for ours, theirs in zip(native, python, strict=True):
        assert (ours.text, ours.token_counts, ours.output_tokens) == (" a b c", (1, 1, 1), 3)
        assert ours.text == theirs.text
        gaps = [b - a for a, b in zip(ours.token_times_s, ours.token_times_s[1:], strict=False)]
        assert min(gaps) > 0.002
        assert 0 < ours.ttft_bound_s < 0.1
    assert max(signals.late_s) < 0.1
    assert min(signals.delays_s) >= 0


def test_ordinary_sockets_timers_and_threads_are_served_beside_native_streams():
    async def main():
        async with serving(lambda number: [STREAM_HEAD, chunk(event(" a")), 0.2, None]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m", native=CHOICE.library) as target:
                answer = asyncio.create_task(target.send(REQUEST))
                loop = asyncio.get_running_loop()
                start_s = loop.time()
                ticks = []
                for _ in range(5):
                    await asyncio.sleep(0.01)
                    ticks.append(loop.time() - start_s)
                seven = await asyncio.to_thread(lambda: 7)
                with pytest.raises(TargetError, match="in the middle"):
                    await answer
                return ticks, seven

    ticks, seven = run_on_sockets(main())
    assert seven == 7
    assert all(ticks[i] >= 0.01 * (i + 1) for i in range(5))


def test_a_prompt_larger_than_the_sockets_buffer_leaves_in_parts():
    async def main():
        async with serving(lambda number: [good_answer()]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m", native=CHOICE.library) as target:
                await target.send(replace(REQUEST, prompt_text="x" * 8_000_000))
                return len(server.requests[0])

    assert run_on_sockets(main()) > 8_000_000


def test_ctrl_c_ends_a_wait_for_tokens():
    async def main():
        async with serving(lambda number: [STREAM_HEAD, 30.0]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m", native=CHOICE.library) as target:
                threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
                await target.send(REQUEST)

    start_s = time.monotonic()
    # a run in the background inherits that it ignores Ctrl-C
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_sockets(main())
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert time.monotonic() - start_s < 10


def test_an_end_that_comes_with_the_last_bytes_is_seen_although_it_has_no_edge_of_its_own():
    """Tokens, then tokens and the end at once: the loop was busy when both arrived."""

    async def main():
        receiver = receiver_of(asyncio.get_running_loop())
        receiver.use_native(CHOICE.library)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = Connection(ours, receiver, None, 0.0)
        _, ended = connection.start(b"GET / HTTP/1.1\r\n\r\n")
        theirs.recv(100)
        theirs.sendall(STREAM_HEAD)
        await asyncio.sleep(0.01)
        theirs.sendall(chunk(event(" a")))
        theirs.close()  # before the selector runs again
        with pytest.raises(TargetError, match="in the middle"):
            await asyncio.wait_for(ended, 120)
        return b"".join(read[2] for read in connection.reads)

    assert run_on_sockets(main()) == STREAM_HEAD + chunk(event(" a"))


def test_closing_the_loop_leaves_nothing_that_dangles():
    """A connection that outlives its loop holds nothing and can still be closed."""
    kept = []

    async def main():
        receiver = receiver_of(asyncio.get_running_loop())
        receiver.use_native(CHOICE.library)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = Connection(ours, receiver, None, 0.0)
        connection.start(b"GET / HTTP/1.1\r\n\r\n")
        theirs.sendall(STREAM_HEAD + chunk(event(" a")))
        await asyncio.sleep(0.01)
        kept.extend((connection, ours, theirs))

    run_on_sockets(main())
    connection, ours, theirs = kept
    connection.keep_reads()
    assert list(connection.reads) == []
    ours.close()
    theirs.close()


def test_without_a_compiler_python_reads_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    choice = choose_receive("auto")
    assert choice.library is None
    assert choice.note.startswith("python; not native, because no C compiler is installed")
    with pytest.raises(InputError, match="--receive auto or python"):
        choose_receive("native")
    assert choose_receive("python").note == "python"


def _over_tls(certificate, version, cut):
    """A session's layer, and what its server sends for a piece, in parts of `cut` bytes.

    SSH's first words are sent as they are, which is no record; `bye` at an end ends the session with
    the text before it.
    """

    def made():
        server, sent, layer = tls_pair(certificate, version)

        def encrypted(piece):
            if piece.startswith(b"SSH"):
                return [piece]
            said = piece.removesuffix(b"bye")
            if said:
                server.write(said)
            if said != piece:
                with contextlib.suppress(ssl.SSLWantReadError):
                    server.unwrap()
            cipher = sent.read()
            return [cipher[at : at + cut] for at in range(0, len(cipher), cut)]

        return layer, encrypted

    return made


TLS_SCRIPTS = SCRIPTS | {
    "bad record": [*GOOD[:3], b"SSH-2.0-x\r\n", *GOOD[3:]],
    "bad first": [b"SSH-2.0-x\r\n"],
    "says goodbye": [*GOOD[:3], b"bye"],
    "close-delimited by goodbye": [WHOLE_HEAD + b"\r\n", b"data: x\n\nbye"],
}


@pytest.mark.parametrize(
    ("name", "version"),
    [(name, ssl.TLSVersion.TLSv1_3) for name in TLS_SCRIPTS]
    + [(name, ssl.TLSVersion.TLSv1_2) for name in ("event by event", "in one piece", "bad record", "says goodbye")],
)
def test_both_receivers_decrypt_the_same(name, version, monkeypatch, certificate):
    monkeypatch.setattr(connection_module, "MAX_ANSWER_BYTES", LIMIT_BYTES)
    cut = 64 if name in ("in one piece", "counted", "says goodbye") else 1_000_000
    session = _over_tls(certificate, version, cut)
    again = 3 if name in ("event by event", "in one piece") else 1
    python, native = (
        conversation(TLS_SCRIPTS[name], native=wanted, requests=again, session=session) for wanted in (False, True)
    )
    assert _joined(native) == _joined(python)
    if cut == 64:  # a record in several reads is there with the last of them
        assert native == python


def test_without_an_openssl_in_reach_python_decrypts_and_says_why(monkeypatch):
    assert choose_receive("auto", tls=True).note == "native"
    monkeypatch.setattr(native_tls, "why_not", lambda: "this Python's OpenSSL cannot be reached from C")
    assert choose_receive("auto", tls=True).note == (
        "python; not native, because this Python's OpenSSL cannot be reached from C"
    )


def test_a_python_of_another_layout_is_found_out_in_a_child(monkeypatch, tmp_path):
    other = Path(native_tls.__file__).read_text("utf-8").replace("__basicsize__ +", "__basicsize__ + 8 +")
    (tmp_path / "other.py").write_text(other, "utf-8")
    monkeypatch.setattr(native_tls, "__file__", str(tmp_path / "other.py"))
    assert native_tls.why_not.__wrapped__() == "this Python's OpenSSL cannot be reached from C"


def test_a_descriptor_beyond_those_seen_so_far_finds_its_buffer():
    """The table of streams grows with the descriptors' numbers."""
    epoll = select.epoll()
    harvester = native_harvest.NativeHarvester(CHOICE.library, epoll.fileno())
    try:
        streams = [harvester.add(fd) for fd in (3, 700, 5000, 3)]
        assert [stream.num_bytes for stream in streams] == [0, 0, 0, 0]
        assert list(harvester.wait(0.0, None, 4)) == []
    finally:
        harvester.close()
        epoll.close()


def test_a_broken_epoll_is_an_error_not_a_spin():
    epoll = select.epoll()
    harvester = native_harvest.NativeHarvester(CHOICE.library, epoll.fileno())
    epoll.close()
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            list(harvester.wait(1.0, None, 1))
    finally:
        harvester.close()


def test_a_compiler_that_fails_is_a_reason_not_a_crash(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'harvest.c:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "error: no such thing" in choose_receive("auto").note
    assert issubclass(NativeUnavailableError, Exception)
