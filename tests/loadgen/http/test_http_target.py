"""The streaming client against real sockets: where it sends, what it times, what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import socket
import ssl
import threading
import time

import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.loadgen.http.endpoint import parse_endpoint
from lmi_bench.loadgen.http.kernel_time import clock_offset_ns, stamping_socket
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, TextCounter, common_words
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.loadgen.run.target import Resolved
from lmi_bench.report.text import token_counts_line
from lmi_bench.wire.format import find_format
from tests.faults.misbehaving import (
    DONE,
    LAST_CHUNK,
    REQUEST,
    STREAM_HEAD,
    chunk,
    event,
    good_answer,
    records_of,
    serving,
    usage,
)
from tests.loadgen.http.tls_pair import tls_pair
from tests.loadgen.sending import measure

OPENAI = find_format("openai")


def _has_kernel_time() -> bool:
    stamping = stamping_socket()
    if stamping is not None:
        stamping.close()
    return stamping is not None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", ("localhost", 8000, "/v1/completions")),
        ("http://localhost:8000/", ("localhost", 8000, "/v1/completions")),
        ("http://localhost:8000/v1", ("localhost", 8000, "/v1/completions")),
        ("https://gate.example/openai/v1/", ("gate.example", 443, "/openai/v1/completions")),
        ("https://gate.example/predictions/m", ("gate.example", 443, "/predictions/m")),
        ("http://[::1]:80/v1", ("::1", 80, "/v1/completions")),
        ("http://bücher.example/v1", ("xn--bcher-kva.example", 80, "/v1/completions")),
    ],
)
def test_a_url_leads_to_the_protocols_path(url, expected):
    endpoint = parse_endpoint(url, OPENAI)
    assert (endpoint.host, endpoint.port, endpoint.path) == expected


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://host/", "http://", "http://host:port", "htp://ada:secret@host", "ada:secret@host:1"],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InputError, match=r"http|URL") as refused:
        parse_endpoint(url, OPENAI)
    assert "secret" not in str(refused.value)


def test_credentials_in_the_url_become_a_header():
    """RFC 7617: Basic, then base64 of `user:pass`."""
    endpoint = parse_endpoint("http://Aladdin:open%20sesame@host/", OPENAI)
    assert endpoint.authorization == "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="
    assert "Aladdin" not in endpoint.authority


def test_the_request_carries_model_lengths_and_headers():
    _, server = records_of([good_answer()], headers={"authorization": "Bearer abc", "X-Run": "7"})
    head, body = server.requests[0].split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/completions HTTP/1.1"
    assert f"Host: 127.0.0.1:{server.port}" in lines
    assert "authorization: Bearer abc" in lines
    assert "X-Run: 7" in lines
    content = json.loads(body)
    assert content["model"] == "m"
    assert content["max_tokens"] == 3
    assert content["stream"] is True


@pytest.mark.parametrize("headers", [{"X-A": "b\r\nX-C: d"}, {"X A": "b"}, {"X:": "b"}])
def test_a_header_that_would_break_out_of_its_line_is_refused(headers):
    with pytest.raises(InputError, match="header"):
        HttpTarget("http://host", OPENAI, model="m", headers=headers)


def test_virtual_time_is_refused():
    async def main():
        async with HttpTarget("http://127.0.0.1:1", OPENAI, model="m") as target:
            await target.open(1)

    with pytest.raises(InputError, match="virtual time"):
        run_virtual(main())


def test_connections_are_opened_ahead_and_used_again():
    async def main():
        async with serving(lambda number: [good_answer()]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m") as target:
                await target.open(3)
                opened = server.connections
                for _ in range(5):
                    exchange = await target.send(REQUEST)
                return opened, server.connections, exchange.connect_s

    opened, connections, connect_s = run_on_sockets(main())
    assert (opened, connections, connect_s) == (3, 3, None)


def test_opening_a_connection_is_timed_apart_from_the_answer():
    async def main():
        async with serving(lambda number: [good_answer()]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m") as target:
                return await target.send(REQUEST)

    exchange = run_on_sockets(main())
    assert exchange.connect_s > 0
    assert exchange.token_times_s[0] > exchange.sent_s


@pytest.mark.parametrize("run", [run_on_sockets, asyncio.run])
def test_a_prompt_larger_than_the_sockets_buffer_arrives_whole(run):
    text = "x" * 8_000_000

    async def main():
        async with serving(lambda number: [good_answer()]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m") as target:
                request = PlannedRequest(0, 0.0, 4, 3, prompt_text=text)
                record = (await measure(Resolved(target).send, request, 0.0)).record()
                return record.status, json.loads(server.requests[0].split(b"\r\n\r\n", 1)[1])

    status, body = run(main())
    assert status == "ok"
    assert body["prompt"] == text


class _TokensFromAThread:
    """Answers one request with three tokens 50 ms apart, and knows when it wrote them: the first
    when it may, and the others when `read` is set."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.written_s = []
        self.asked, self.may_write, self.wrote, self.read = (threading.Event() for _ in range(4))
        self.thread = threading.Thread(target=self._serve)

    def _serve(self):
        connection, _ = self.listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(65536)
            connection.sendall(STREAM_HEAD)
            self.asked.set()
            for text, reason in ((" a", None), (" b", None), (" c", "length")):
                time.sleep(0.05)
                self.may_write.wait()
                self.written_s.append(time.monotonic())
                connection.sendall(chunk(event(text, reason)))
                self.wrote.set()
                self.read.wait()
            connection.sendall(chunk(DONE) + LAST_CHUNK)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.thread.join()
        self.listener.close()


def _against_a_thread(blocked_s: float, timestamps: str | None = None):
    with _TokensFromAThread() as server:

        async def main():
            url = f"http://127.0.0.1:{server.listener.getsockname()[1]}"
            async with HttpTarget(url, OPENAI, model="m", timestamps=timestamps) as target:
                await target.open_level(1)

                async def block():
                    while not server.asked.is_set():
                        await asyncio.sleep(0.005)
                    server.may_write.set()
                    server.wrote.wait(60)
                    time.sleep(blocked_s)
                    server.read.set()

                blocker = asyncio.create_task(block())
                record = (await measure(Resolved(target).send, REQUEST, 0.0)).record()
                await blocker
                return record, target.end_level()

        record, signals = run_on_sockets(main())
    return record, signals, server.written_s


@pytest.mark.skipif(not _has_kernel_time(), reason="this host gives no kernel receive times")
def test_kernel_time_is_true_although_the_loop_was_blocked():
    """A loop that is blocked for 60 ms more sees a token late; the kernel did not."""
    record, signals, written_s = _against_a_thread(blocked_s=0.06)
    assert signals.timestamps == "kernel"
    for seen_s, wrote_s in zip(record.token_times_s, written_s, strict=True):
        assert 0 <= seen_s - wrote_s < 0.01
    assert max(signals.delays_s) > 0.02  # the self-check knows that it was late


@pytest.mark.skipif(not _has_kernel_time(), reason="this host gives no kernel receive times")
def test_a_step_just_before_an_answer_ends_moves_none_of_its_times(monkeypatch):
    """Its answer is decoded at once, as in a conversation, before the clock is due to be sampled."""
    ahead_ns = [500_000_000]  # the real-time clock's first offset; it is then stepped back

    def offset_ns():
        at_ns, now_ns, width_ns = clock_offset_ns()
        return at_ns, now_ns + (ahead_ns.pop() if ahead_ns else 0), width_ns

    monkeypatch.setattr("lmi_bench.loadgen.http.kernel_time.clock_offset_ns", offset_ns)
    monkeypatch.setattr("lmi_bench.loadgen.http.target.SAMPLE_EVERY_S", 1000.0)
    (record,), _ = records_of([good_answer()])
    assert record.token_times_s[0] >= record.sent_s


def test_user_time_is_late_by_the_block_and_its_bound_says_so():
    record, signals, written_s = _against_a_thread(blocked_s=0.06, timestamps="user")
    late_s = record.token_times_s[0] - written_s[0]
    assert signals.timestamps == "user"
    assert late_s > 0.02
    assert record.exchange.ttft_bound_s >= late_s - 0.002


@pytest.mark.parametrize("timestamps", [None, "user"])
def test_times_are_right_on_a_plain_asyncio_loop(timestamps):
    with _TokensFromAThread() as server:
        server.may_write.set()
        server.read.set()

        async def main():
            url = f"http://127.0.0.1:{server.listener.getsockname()[1]}"
            async with HttpTarget(url, OPENAI, model="m", timestamps=timestamps) as target:
                return await target.send(REQUEST)

        exchange = asyncio.run(main())
    for seen_s, wrote_s in zip(exchange.token_times_s, server.written_s, strict=True):
        assert 0 <= seen_s - wrote_s < 0.02


def _over_tls(certificate, *, trusted: bool):
    key, cert = certificate
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(cert, key)

    async def handle(reader, writer):
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            for piece in (STREAM_HEAD, chunk(event(" a")), chunk(event(" b", "length"))):
                writer.write(piece)
                await asyncio.sleep(0.02)
            writer.write(chunk(DONE) + LAST_CHUNK)
        await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=server_context)
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        async with HttpTarget(url, OPENAI, model="m", cacert=str(cert) if trusted else None) as target:
            records = [(await measure(Resolved(target).send, REQUEST, 0.0)).record() for _ in range(2)]
        server.close()
        return records

    return run_on_sockets(main())


def test_an_answer_over_tls_is_read_and_timed_token_by_token(certificate):
    for record in _over_tls(certificate, trusted=True):
        assert (record.status, record.output_tokens) == ("ok", 2)
        assert record.token_times_s[1] - record.token_times_s[0] > 0.01


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_records_are_read_however_they_are_cut(certificate, version):
    server, sent, layer = tls_pair(certificate, version)
    texts = [b"a" * 3, b"b" * 20_000, b"c", b"d" * 230, b"e" * 70_000]
    for cut in (1, 5, 6, 29, 1_000_000):
        cipher = b""
        for text in texts:  # the long ones are several records
            server.write(text)
            cipher += sent.read()
        parts = [cipher[at : at + cut] for at in range(0, len(cipher), cut)]
        read = [layer.decrypt(part) for part in parts]
        assert b"".join(read) == b"".join(texts)
        assert read[-1] != b""  # what a read completes is not left for the next one
        assert not layer.ended


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_end_of_a_tls_session_is_seen_with_the_data_before_it(certificate, version):
    server, sent, layer = tls_pair(certificate, version)
    server.write(b"last")
    with contextlib.suppress(ssl.SSLWantReadError):
        server.unwrap()
    assert layer.decrypt(sent.read()) == b"last"
    assert layer.ended
    _, _, other = tls_pair(certificate, version)
    assert other.decrypt(b"") == b""
    assert other.ended


def test_an_untrusted_certificate_is_a_tls_error(certificate):
    record = _over_tls(certificate, trusted=False)[0]
    assert record.status == "tls"
    assert "self-signed" in record.error


def test_a_sweep_over_http_counts_every_request():
    runs = []

    async def main():
        async with serving(lambda number: [0.01, good_answer()]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m") as target:
                await run_sweep(
                    [LevelSpec(0, Load(concurrency=4), num_requests=20, warmup_requests=2)],
                    target,
                    None,
                    prompts=SyntheticPrompts([Lengths(4, 3)], common_words, seed=0),
                    summarise=summarise_level,
                    on_level=lambda run, line: runs.append(run),
                    spacing_s=0.001,
                )
                return len(server.requests), server.connections

    sent, connections = run_on_sockets(main())
    assert sent == 22
    assert connections == 4
    assert [record.request_id for record in runs[0].records] == list(range(20))
    assert all(record.ok for record in runs[0].records)
    assert min(record.sent_s for record in runs[0].records) < 0.05


def test_answers_beyond_the_memory_for_undecoded_ones_are_decoded_at_once(monkeypatch):
    monkeypatch.setattr("lmi_bench.loadgen.http.target.MAX_UNDECODED_BYTES", 1000)

    async def main():
        async with serving(lambda number: [good_answer()]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m") as target:
                return [await measure(Resolved(target).send, REQUEST, 0.0) for _ in range(4)]

    measured = run_on_sockets(main())
    assert len(good_answer()) > 500  # so that one answer fits in the memory and two do not
    assert [item.record().output_tokens for item in measured] == [3, 3, 3, 3]


class Letters:
    """A tokenizer of one token a letter, which puts one more before every text."""

    def encode(self, text):
        return [0, *map(ord, text)]


def test_the_tokenizer_counts_where_the_server_does_not_and_only_there():
    """Two chunks of seven letters; with a usage of 4 tokens that counts, whatever the letters."""
    chunks = STREAM_HEAD + chunk(event(" abc")) + chunk(event(" de", "length"))
    end = chunk(DONE) + LAST_CHUNK
    counter = pickle.loads(pickle.dumps(TextCounter(Letters())))  # as worker processes get it
    silent, stated = records_of([chunks + end], [chunks + chunk(usage(4, 4)) + end], count_tokens=counter)[0]
    assert (silent.output_tokens, silent.exchange.token_counts) == (7, (1, 1))
    assert stated.output_tokens == 4
    assert records_of([chunks + end])[0][0].output_tokens == 2


@pytest.mark.parametrize(
    ("stated", "counter", "named"),
    [(True, TextCounter(Letters()), "server"), (False, TextCounter(Letters()), "tokenizer"), (False, None, "chunks")],
)
def test_a_level_names_who_counted_its_tokens(stated, counter, named):
    counts = chunk(usage(4, 1)) if stated else b""
    answer = STREAM_HEAD + chunk(event(" abc", "length")) + counts + chunk(DONE) + LAST_CHUNK

    async def main():
        async with serving(lambda _: [answer]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m", count_tokens=counter) as target:
                result = await run_sweep(
                    [LevelSpec(0, Load(concurrency=2), num_requests=4)],
                    target,
                    None,
                    prompts=SyntheticPrompts([Lengths(4, 1)], common_words, seed=0),
                    summarise=summarise_level,
                )
        return result

    lines = run_on_sockets(main())
    assert lines[0].generator.token_counts == named
    assert named in token_counts_line(lines)


def test_a_cancelled_sweep_hangs_up_on_the_server():
    async def main():
        async with serving(lambda number: [STREAM_HEAD, 5.0]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, OPENAI, model="m") as target:
                task = asyncio.create_task(
                    run_sweep(
                        [LevelSpec(0, Load(concurrency=8), num_requests=8)],
                        target,
                        None,
                        prompts=SyntheticPrompts([Lengths(4, 3)], common_words, seed=0),
                        summarise=summarise_level,
                    )
                )
                while len(server.requests) < 8:
                    await asyncio.sleep(0.01)
                loop = asyncio.get_running_loop()
                start_s = loop.time()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return loop.time() - start_s

    assert run_on_sockets(main()) < 1.0
