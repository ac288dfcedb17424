"""Anthropic's and OpenAI's newer APIs over HTTP: cut anywhere, failing anywhere, with their key."""

from __future__ import annotations

import json

import pytest

from tests.faults.misbehaving import LAST_CHUNK, STREAM_HEAD, chunk, document, record_of, records_of

pytestmark = pytest.mark.usefixtures("receiver")


def frame(type_: str, **content: object) -> bytes:
    """A named event, as both APIs write it."""
    data = json.dumps({"type": type_, **content}, ensure_ascii=False)
    return f"event: {type_}\ndata: {data}\n\n".encode()


def delta(kind: str, field: str, text: str) -> bytes:
    return frame("content_block_delta", index=0, delta={"type": kind, field: text})


USAGE = {"input_tokens": 3, "cache_read_input_tokens": 1, "output_tokens": 1}
BEGIN = frame("message_start", message={"type": "message", "content": [], "usage": USAGE})
PING = frame("ping")
END = frame("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}) + frame("message_stop")
TEXT = [delta("text_delta", "text", each) for each in ("für ", "日本", "!")]
MESSAGE = b"".join(
    [
        BEGIN,
        frame("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        PING,
        *TEXT,
        frame("content_block_stop", index=0),
        END,
    ]
)
RESPONSE = b"".join(
    [
        frame("response.created", response={"status": "in_progress"}),
        *(frame("response.output_text.delta", delta=each) for each in ("für ", "日本", "!")),
        frame(
            "response.completed",
            response={
                "status": "completed",
                "usage": {"input_tokens": 4, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 1}},
            },
        ),
    ]
)
BOTH = pytest.mark.parametrize(("protocol", "answer"), [("anthropic", MESSAGE), ("openai-responses", RESPONSE)])


@BOTH
def test_an_answer_cut_in_every_line_and_character_is_the_same_answer(protocol, answer):
    """Every byte is a chunk of its own: no line and none of the UTF-8 characters comes whole."""
    steps = [STREAM_HEAD, *(chunk(answer[i : i + 1]) for i in range(len(answer))), LAST_CHUNK]
    cut = record_of(steps, protocol=protocol)
    whole = record_of([STREAM_HEAD + chunk(answer) + LAST_CHUNK], protocol=protocol)
    for record in (cut, whole):
        assert (record.status, record.input_tokens, record.output_tokens) == ("ok", 4, 3)
        assert record.exchange.text == "für 日本!"
        assert len(record.token_times_s) == 3
        assert record.exchange.cached_tokens == 1


@BOTH
def test_a_stream_that_breaks_off_is_no_answer_and_keeps_what_came(protocol, answer):
    """The cut is before the event that ends the answer, which both begin with its name."""
    mark = b"event: message_delta" if protocol == "anthropic" else b"event: response.completed"
    broken = answer[: answer.index(mark)]
    record = record_of([STREAM_HEAD + chunk(broken) + LAST_CHUNK], protocol=protocol)
    assert (record.status, len(record.token_times_s)) == ("broken_stream", 3)


@pytest.mark.parametrize(
    ("protocol", "begin", "error"),
    [
        (
            "anthropic",
            BEGIN + TEXT[0],
            frame("error", error={"type": "overloaded_error", "message": "Overloaded"}) + b"data: [DONE]\n\n",
        ),
        (
            "openai-responses",
            frame("response.output_text.delta", delta="a"),
            frame("error", error={"type": "overloaded_error", "message": "Overloaded"}),
        ),
    ],
)
def test_an_error_in_mid_stream_is_the_requests_error_and_ends_nothing_else(protocol, begin, error):
    failing = [STREAM_HEAD + chunk(begin), 0.02, chunk(error) + LAST_CHUNK]
    good = [STREAM_HEAD + chunk(MESSAGE if protocol == "anthropic" else RESPONSE) + LAST_CHUNK]
    (failed, next_one), _ = records_of(failing, good, protocol=protocol)
    assert (failed.status, len(failed.token_times_s)) == ("overloaded", 1)
    assert "Overloaded" in (failed.error or "")
    assert next_one.ok


def test_thinking_comes_before_the_first_token_of_the_answer():
    steps = [
        STREAM_HEAD + chunk(BEGIN + delta("thinking_delta", "thinking", "Hm")),
        0.1,
        chunk(delta("signature_delta", "signature", "Eq") + PING),
        0.1,
        chunk(TEXT[0] + END) + LAST_CHUNK,
    ]
    exchange = record_of(steps, protocol="anthropic").exchange
    thought_s, answer_s = exchange.token_times_s
    assert exchange.first_answer_s == answer_s
    assert answer_s - thought_s >= 0.19  # the pauses; the signature and the ping are no token
    assert (exchange.text, exchange.thought_chars, exchange.reasoning_tokens) == ("Hmfür ", 2, 1)


def test_a_whole_message_is_an_answer_without_times_inside_it():
    body = {
        "type": "message",
        "content": [{"type": "text", "text": "für"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 4, "output_tokens": 2},
    }
    record = record_of([document("200 OK", json.dumps(body).encode())], protocol="anthropic", stream=False)
    assert (record.status, record.output_tokens, record.exchange.text) == ("ok", 2, "für")
    assert not record.exchange.streamed


def test_a_key_goes_into_its_header_alone_and_follows_no_redirect():
    from lmi_bench.targets.bench import Access

    redirect = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /v1/messages?again\r\n"
    (record,), server = records_of(
        [redirect + b"Content-Length: 0\r\n\r\n"],
        protocol="anthropic",
        headers=Access("sesame-1234567").all_headers("anthropic"),
    )
    assert not record.ok
    (request,) = server.requests  # the redirect was not followed
    head = request.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert head[0] == "POST /v1/messages HTTP/1.1"
    assert [line for line in head if "sesame" in line] == ["x-api-key: sesame-1234567"]
    assert "anthropic-version: 2023-06-01" in head
