"""Anthropic's Messages API, as its reference and the engines that imitate it write it."""

import json

import pytest

from lmi_bench.core.errors import TargetError
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.format import find_format, own_headers

ANTHROPIC = find_format("anthropic")


def parse(**event):
    return ANTHROPIC.parse(json.dumps(event).encode())


def test_a_conversation_is_sent_with_its_system_prompt_apart():
    messages = (("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"))
    body = json.loads(
        ANTHROPIC.request_body(PlannedRequest(0, 0.0, 9, 5, prompt_text="Why?", messages=messages), model="claude")
    )
    assert body == {
        "model": "claude",
        "max_tokens": 5,
        "system": "Be short.",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Why?"},
        ],
        "stream": True,
    }


def test_a_prompt_from_a_cache_counts_as_input():
    """The API's `input_tokens` are those after the last cache breakpoint: 21 + 188 + 2000."""
    usage = {
        "input_tokens": 21,
        "cache_creation_input_tokens": 188,
        "cache_read_input_tokens": 2000,
        "output_tokens": 1,
    }
    assert parse(type="message_start", message={"usage": usage}) == WireEvent(input_tokens=2209, cached_tokens=2000)


def test_counts_that_a_server_has_only_at_the_end_are_taken_from_there():
    zero = {"input_tokens": 0, "output_tokens": 0}
    assert parse(type="message_start", message={"usage": zero}) == WireEvent()
    last = {"input_tokens": 30, "output_tokens": 7}
    assert parse(type="message_delta", delta={"stop_reason": "max_tokens"}, usage=last) == WireEvent(
        finish_reason="max_tokens", input_tokens=30, output_tokens=7
    )


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ({"type": "text_delta", "text": "a"}, WireEvent(text="a")),
        ({"type": "thinking_delta", "thinking": "h"}, WireEvent(text="h", reasoning=True)),
        ({"type": "input_json_delta", "partial_json": '{"x'}, WireEvent(text='{"x')),
        ({"type": "signature_delta", "signature": "EqQB"}, WireEvent()),
        ({"type": "citations_delta", "citation": {}}, WireEvent()),
    ],
)
def test_each_kind_of_delta_adds_what_was_generated(delta, expected):
    assert parse(type="content_block_delta", index=0, delta=delta) == expected


@pytest.mark.parametrize("type_", ["ping", "content_block_stop", "an_event_of_next_year"])
def test_events_without_content_say_nothing(type_):
    assert parse(type=type_) == WireEvent()


def test_a_whole_message_is_one_event():
    content = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
        {"type": "text", "text": "Yes"},
        {"type": "tool_use", "id": "t", "name": "look", "input": {"at": 1}},
    ]
    usage = {"input_tokens": 4, "output_tokens": 9}
    assert parse(type="message", content=content, stop_reason="tool_use", usage=usage) == WireEvent(
        text="Hm. Yeslook", finish_reason="tool_use", input_tokens=4, output_tokens=9, end=True
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("overloaded_error", "overloaded"),
        ("rate_limit_error", "throttled"),
        ("invalid_request_error", "client_error"),
        ("authentication_error", "client_error"),
        ("api_error", "server_error"),
        ("internal_error", "server_error"),
    ],
)
def test_an_error_in_a_stream_has_the_category_of_its_name(name, kind):
    found = parse(type="error", error={"type": name, "message": "Sorry"})
    assert found == WireEvent(error="Sorry", error_kind=kind, end=True)


def test_529_is_overload():
    body = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    assert str(ANTHROPIC.error(529, body)) == "HTTP 529: Overloaded"
    assert ANTHROPIC.error(529, body).kind == "overloaded"


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": "content_block_delta"},
        {"type": "content_block_delta", "delta": None},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": 5}},
        {"type": "content_block_delta", "delta": {"type": {}, "text": ""}},
        {"type": "content_block_start", "content_block": ["text"]},
        {"type": "message_start", "message": {"usage": {"input_tokens": "21"}}},
        {"type": "message_start", "message": {"usage": {"input_tokens": 1.5}}},
        {"type": "message_delta", "usage": {"output_tokens": -1}},
        {"type": "message_delta", "usage": {"output_tokens": 2**40}},
        {"type": "message_delta", "delta": {"stop_reason": 7}},
        {"type": "message_delta", "delta": [], "usage": 3},
        {"type": "message", "content": 4},
        {"type": "error", "error": {"code": "9" * 5000}},
    ],
)
def test_a_wrong_event_is_a_malformed_frame(event):
    with pytest.raises(TargetError) as caught:
        ANTHROPIC.parse(json.dumps(event).encode())
    assert caught.value.kind == "malformed_frame"


def test_the_key_is_sent_as_the_api_takes_it_with_its_version():
    assert own_headers("anthropic", "k") == {"anthropic-version": "2023-06-01", "x-api-key": "k"}
    assert own_headers("openai-responses", "k") == {"Authorization": "Bearer k"}
    assert own_headers("openai", None) == {}
