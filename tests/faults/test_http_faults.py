"""Every way in which a server can misbehave ends in the right bucket, with no hang."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import pytest

from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.loadgen.run.target import Resolved
from lmi_bench.wire.format import find_format
from tests.faults import misbehaving
from tests.faults.misbehaving import (
    DONE,
    LAST_CHUNK,
    REQUEST,
    STREAM_HEAD,
    chunk,
    document,
    event,
    good_answer,
    record_of,
    records_of,
    usage,
)
from tests.loadgen.sending import measure

pytestmark = pytest.mark.usefixtures("receiver")

OVERLOADED = b'{"error": {"message": "queue is full", "type": "x", "code": 503}}'


def test_the_good_answer_is_good():
    record = record_of([good_answer()])
    assert (record.status, record.output_tokens, record.input_tokens) == ("ok", 3, 4)
    assert record.exchange.finish_reason == "length"


def test_an_answer_cut_into_single_bytes_is_the_same_answer():
    answer = good_answer()
    record = record_of([step for i in range(len(answer)) for step in (answer[i : i + 1], 0.0)])
    assert (record.status, record.output_tokens, len(record.token_times_s)) == ("ok", 3, 3)


def test_a_frame_in_two_halves_is_a_token_when_its_second_half_comes():
    whole = chunk(event(" b"))
    record = record_of(
        [
            STREAM_HEAD + chunk(event(" a")),
            0.05,
            whole[:20],
            0.1,
            whole[20:],
            chunk(event(" c", "length")) + chunk(DONE) + LAST_CHUNK,
        ]
    )
    assert record.ok
    first_s, second_s, _ = record.token_times_s
    assert second_s - first_s >= 0.14


def test_a_character_cut_in_two_is_whole_again():
    frame = event("é☃")
    cut = frame.index("é".encode()) + 1
    record = record_of(
        [STREAM_HEAD + chunk(frame[:cut]), 0.02, chunk(frame[cut:]), chunk(event(" c", "length")) + LAST_CHUNK]
    )
    assert (record.status, record.output_tokens) == ("ok", 2)


def test_comment_and_empty_frames_are_no_tokens():
    silent = (b": keep-alive\n\n", b"\n\n", b"event: ping\n\n", b"data: \n\n", b"data:\n\n", b"data:   \n\n")
    noise = b"".join(map(chunk, silent))
    record = record_of([STREAM_HEAD + noise, 0.02, noise + good_answer()[len(STREAM_HEAD) :]])
    assert (record.status, len(record.token_times_s)) == ("ok", 3)


def test_a_role_only_chunk_is_no_token():
    role = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
    token = b'data: {"choices": [{"index": 0, "delta": {"content": " a"}}]}\n\n'
    last = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
    record = record_of(
        [STREAM_HEAD + chunk(role), 0.1, chunk(token) + chunk(last) + chunk(DONE) + LAST_CHUNK], protocol="openai-chat"
    )
    assert (record.status, record.output_tokens) == ("ok", 1)
    assert record.token_times_s[0] - record.sent_s >= 0.09


def test_several_tokens_in_one_frame_are_counted_by_the_usage():
    record = record_of([STREAM_HEAD + chunk(event(" a b", "length")) + chunk(usage(4, 2)) + LAST_CHUNK])
    assert (record.output_tokens, len(record.token_times_s)) == (2, 1)


def test_wrong_json_is_a_malformed_frame_and_keeps_what_came():
    record = record_of([STREAM_HEAD + chunk(event(" a")) + chunk(b"data: {broken\n\n") + LAST_CHUNK])
    assert record.status == "malformed_frame"
    assert len(record.token_times_s) == 1


def test_an_error_event_under_status_200_is_a_failure():
    failed = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    record = record_of([STREAM_HEAD + chunk(event(" a")) + chunk(failed) + LAST_CHUNK])
    assert record.status == "server_error"
    assert "out of memory" in record.error
    assert len(record.token_times_s) == 1


def test_lmi_errors_in_a_stream_are_failures():
    head = STREAM_HEAD.replace(b"text/event-stream", b"application/jsonlines")
    line = b'{"code": 424, "error": "invoke handler failure"}\n'
    record = record_of([head + chunk(line) + LAST_CHUNK], protocol="lmi")
    assert record.status != "ok"
    assert "invoke handler failure" in record.error


@pytest.mark.parametrize(
    ("answer", "came"),
    [
        ([None], 0),
        ([STREAM_HEAD, None], 0),
        ([STREAM_HEAD + chunk(event(" a")), 0.02, None], 1),
        ([STREAM_HEAD + chunk(event(" a")) + b"1f\r\ndata: {", None], 1),
        ([STREAM_HEAD + chunk(event(" a")) + LAST_CHUNK], 1),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + event(" a"), None], 1),
    ],
    ids=["no answer", "head only", "mid-stream", "mid-chunk", "no last event", "short body"],
)
def test_a_stream_that_breaks_off_keeps_what_came(answer, came):
    record = record_of(answer)
    assert record.status == "broken_stream"
    assert len(record.token_times_s) == came


def test_a_body_that_ends_with_the_connection_is_whole():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    frames = event(" a") + event(" b", "length") + DONE
    record = record_of([head + frames, None])
    assert (record.status, record.output_tokens) == ("ok", 2)


def test_an_endless_stream_is_a_time_out_and_the_server_is_hung_up_on():
    def endless():
        yield STREAM_HEAD
        while True:
            yield chunk(event(" a"))
            yield 0.05

    records, server = records_of(endless(), timeout_s=0.4)
    assert records[0].status == "timeout"
    assert "tokens came" in records[0].error
    assert 4 <= len(records[0].token_times_s) <= 9
    assert server.broken_off == 1


def test_an_answer_far_longer_than_its_tokens_can_be_is_cut_off():
    """64 KiB and 4 KiB for each of three tokens; a fast server would fill the memory."""
    script = [STREAM_HEAD, *[chunk(event("x" * 20_000))] * 100]
    record = record_of(script)
    assert record.status == "malformed_frame"
    assert "more than 77,824 bytes" in record.error


def test_an_answer_with_twenty_log_probs_a_token_is_not_cut_off():
    """The longest words of a vocabulary, each with its bytes, as OpenAI's chat sends them."""
    rank = {"token": " internationalization", "logprob": -12.345678901234567, "bytes": [105] * 21}
    scores = {"content": [rank | {"top_logprobs": [rank] * 20}]}
    frames = []
    for reason in (*[None] * 99, "length"):
        choice = {"delta": {"content": "x"}, "logprobs": scores, "finish_reason": reason}
        frames.append(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    script = [STREAM_HEAD, *map(chunk, frames), chunk(DONE) + LAST_CHUNK]
    request = replace(REQUEST, output_tokens=100)
    record = record_of(script, protocol="openai-chat", request=request)
    assert (record.error, record.output_tokens) == (None, 100)


def test_the_vector_of_an_embedding_is_no_answer_of_tokens():
    vector = json.dumps({"data": [{"embedding": [-0.0123456789012345] * 16_384}]}).encode()
    assert record_of([document("200 OK", vector)], protocol="embeddings").error is None


def test_the_start_of_an_endless_error_is_enough():
    """As of a 422 that repeats a long prompt."""
    body = document("422 Unprocessable Entity", b'{"message": "' + b"no " * 100_000)
    record, after = records_of([body], [good_answer()])[0]
    assert (record.status, after.status) == ("client_error", "ok")
    assert record.error.startswith("HTTP 422: ")


@pytest.mark.parametrize("head", [[], [STREAM_HEAD, chunk(b": waiting\n\n")]])
def test_a_first_token_that_does_not_come_in_time_is_a_time_out_of_its_own(head):
    """Headers and comments are no token; once one came, the answer may take its time."""
    late, slow = records_of(
        [*head, 0.5, None],
        [STREAM_HEAD, chunk(event(" a")), 0.3, chunk(event(" b", "length")) + LAST_CHUNK],
        first_token_timeout_s=0.15,
    )[0]
    assert (late.status, late.error) == ("timeout", "no first token within 0.15 s")
    assert (slow.status, slow.output_tokens) == ("ok", 2)


def test_headers_that_never_come_are_a_time_out():
    record = record_of([b"HTTP/1.1 200 OK\r\n", 3.0], timeout_s=0.2)
    assert record.status == "timeout"
    assert record.error == "no first token within 0.2 s"


def test_slow_headers_only_delay():
    record = record_of([b"HTTP/1.1 200 OK\r\nContent-", 0.1, good_answer()[len("HTTP/1.1 200 OK\r\nContent-") :]])
    assert record.ok
    assert record.token_times_s[0] - record.sent_s >= 0.09


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("503 Service Unavailable", "overloaded"),
        ("429 Too Many Requests", "throttled"),
        ("500 Internal Server Error", "server_error"),
        ("400 Bad Request", "client_error"),
        ("499 Client Closed Request", "cancelled"),
        ("401 Unauthorized", "client_error"),
    ],
)
def test_a_status_is_counted_in_its_bucket_with_the_servers_words(status, kind):
    record = record_of([document(status, OVERLOADED)])
    assert record.status == kind
    assert status[:3] in record.error
    assert "queue is full" in record.error


def test_a_server_that_does_not_stream_is_read_whole():
    body = (
        b'{"object": "text_completion", "choices": [{"index": 0, "text": " a b", '
        b'"finish_reason": "length"}], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}'
    )
    record = record_of([document("200 OK", body)])
    assert (record.status, record.output_tokens, len(record.token_times_s)) == ("ok", 2, 1)


def test_an_answer_without_a_token_is_short():
    record = record_of([STREAM_HEAD + chunk(event("", "stop")) + chunk(DONE) + LAST_CHUNK])
    assert record.status == "short_output"


def test_something_that_is_not_http_is_malformed():
    assert record_of([b"SSH-2.0-OpenSSH_9.6\r\n"]).status == "malformed_frame"


def test_an_interim_response_is_passed_over():
    record = record_of([b"HTTP/1.1 100 Continue\r\n\r\n", 0.02, good_answer()])
    assert (record.status, record.output_tokens) == ("ok", 3)


def test_a_refused_connection_is_a_connect_error():
    async def main():
        with socket.socket() as sock:  # bound, never listening: every connect is refused
            sock.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with HttpTarget(url, find_format("openai"), model="m", native=misbehaving.NATIVE) as target:
                await target.open(2)
                return (await measure(Resolved(target).send, REQUEST, 0.0)).record()

    record = run_on_sockets(main())
    assert record.status == "connect"
    assert "refused" in record.error


def test_a_host_without_an_address_is_a_connect_error():
    async def main():
        url = "http://host.invalid:8000"
        async with HttpTarget(url, find_format("openai"), model="m", native=misbehaving.NATIVE) as target:
            return (await measure(Resolved(target).send, REQUEST, 0.0)).record()

    record = run_on_sockets(main())
    assert record.status == "connect"
    assert "host.invalid" in record.error


def test_a_server_that_does_not_answer_the_connect_is_given_up():
    async def main():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen(0)
            place = sock.getsockname()
            fillers = []
            try:  # fill the accept queue, so that the next SYN is dropped
                for _ in range(4):
                    filler = socket.socket()
                    filler.setblocking(False)
                    filler.connect_ex(place)
                    fillers.append(filler)
                url = f"http://127.0.0.1:{place[1]}"
                async with HttpTarget(url, find_format("openai"), model="m", connect_timeout_s=0.2) as target:
                    return (await measure(Resolved(target).send, REQUEST, 0.0)).record()
            finally:
                for filler in fillers:
                    filler.close()

    record = run_on_sockets(main())
    assert record.status == "connect"
    assert "0.2 s" in record.error


def test_a_port_that_never_answers_the_handshake_is_a_tls_error():
    """The connection stood, since the system took it: that is not the network's fault."""

    async def main():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen(1)
            url = f"https://127.0.0.1:{sock.getsockname()[1]}"
            async with HttpTarget(url, find_format("openai"), model="m", connect_timeout_s=0.2) as target:
                return (await measure(Resolved(target).send, REQUEST, 0.0)).record()

    record = run_on_sockets(main())
    assert record.status == "tls"
    assert "handshake was not over within 0.2 s" in record.error


def test_plain_http_behind_https_is_a_tls_error():
    async def main():
        async def handle(reader, writer):
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with HttpTarget(url, find_format("openai"), model="m", native=misbehaving.NATIVE) as target:
            record = (await measure(Resolved(target).send, REQUEST, 0.0)).record()
        server.close()
        return record

    assert run_on_sockets(main()).status == "tls"


def test_after_a_failure_the_next_request_opens_another_connection():
    records, server = records_of(
        [good_answer()],
        [STREAM_HEAD + chunk(event(" a")), None],
        [good_answer()],
        [document("503 Service Unavailable", OVERLOADED)],
        [good_answer()],
    )
    assert [r.status for r in records] == ["ok", "broken_stream", "ok", "overloaded", "ok"]
    assert server.connections == 2  # a refused request with a whole answer keeps its connection


def test_a_connection_that_the_server_closed_between_requests_is_replaced():
    async def main():
        from tests.faults.misbehaving import serving

        async with serving(lambda number: [good_answer(), None]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, find_format("openai"), model="m", native=misbehaving.NATIVE) as target:
                statuses = []
                for _ in range(3):
                    statuses.append((await measure(Resolved(target).send, REQUEST, 0.0)).record().status)
                    await asyncio.sleep(0.05)  # the close is seen while nothing is in flight
                return statuses, server.connections

    statuses, connections = run_on_sockets(main())
    assert statuses == ["ok", "ok", "ok"]
    assert connections == 3


def test_a_server_that_keeps_no_connection_and_does_not_say_so_is_told_from_a_broken_one():
    """tinyproxy 1.11 does, and whether the close is seen before the next request is chance."""
    hint = "(it had answered on it: --connections per-request uses none twice)"
    (_, kept), _ = records_of([good_answer()], [None])
    (new,), _ = records_of([None])
    assert (kept.status, new.status) == ("broken_stream", "broken_stream")
    assert (hint in kept.error, hint in new.error) == (True, False)


def test_connection_close_is_heeded():
    answer = good_answer().replace(b"chunked\r\n", b"chunked\r\nConnection: close\r\n")
    records, server = records_of([answer, None], [answer, None])
    assert [record.status for record in records] == ["ok", "ok"]
    assert server.connections == 2
