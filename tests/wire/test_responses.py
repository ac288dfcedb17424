"""OpenAI's Responses API, as its reference and vLLM write it."""

import json

import pytest

from lmi_bench.core.errors import TargetError
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.format import WireEvent, find_format

RESPONSES = find_format("openai-responses")
USAGE = {
    "input_tokens": 36,
    "input_tokens_details": {"cached_tokens": 16},
    "output_tokens": 87,
    "output_tokens_details": {"reasoning_tokens": 5},
    "total_tokens": 123,
}
COUNTS = {"input_tokens": 36, "output_tokens": 87, "cached_tokens": 16}


def parse(**event):
    return RESPONSES.parse(json.dumps(event).encode())


def test_a_prompt_is_the_input_and_nothing_is_stored():
    request = PlannedRequest(0, 0.0, 3, 20, prompt_text="To be", ignore_eos=False)
    assert json.loads(RESPONSES.request_body(request, model="m", stream=False)) == {
        "model": "m",
        "input": "To be",
        "max_output_tokens": 20,
        "stream": False,
        "store": False,
    }


def test_a_conversation_is_a_list_of_messages_and_a_length_is_forced_by_ignore_eos():
    messages = (("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"))
    request = PlannedRequest(0, 0.0, 9, 20, prompt_text="Why?", messages=messages)
    body = json.loads(RESPONSES.request_body(request, model="m"))
    assert body["input"] == [{"role": role, "content": text} for role, text in messages]
    assert body["ignore_eos"] is True


@pytest.mark.parametrize(
    ("type_", "reasoning"),
    [
        ("response.output_text.delta", False),
        ("response.refusal.delta", False),
        ("response.function_call_arguments.delta", False),
        ("response.reasoning_text.delta", True),
        ("response.reasoning_summary_text.delta", True),
    ],
)
def test_a_delta_is_a_token_of_the_answer_or_of_its_reasoning(type_, reasoning):
    found = parse(type=type_, delta="a", item_id="i", output_index=0, sequence_number=4)
    assert found == WireEvent(text="a", reasoning=reasoning)


@pytest.mark.parametrize(
    "type_",
    ["response.created", "response.in_progress", "response.output_text.done", "response.new"],
)
def test_events_without_content_say_nothing(type_):
    assert parse(type=type_, text="all of it", response={"status": "in_progress"}) == WireEvent()


@pytest.mark.parametrize(
    ("type_", "response", "reason"),
    [
        ("response.completed", {"status": "completed"}, "completed"),
        (
            "response.incomplete",
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "max_output_tokens",
        ),
    ],
)
def test_the_last_event_states_the_counts_and_the_reason(type_, response, reason):
    found = parse(type=type_, response=response | {"usage": USAGE, "output": [{"text": "x"}]})
    assert found == WireEvent(finish_reason=reason, end=True, **COUNTS)


def test_a_whole_response_is_one_event():
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm. "}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Yes"}]},
        {"type": "function_call", "name": "look", "arguments": '{"at":1}'},
    ]
    found = parse(object="response", status="completed", error=None, output=output, usage=USAGE)
    assert found == WireEvent(text='Hm. Yes{"at":1}', finish_reason="completed", end=True, **COUNTS)


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        ({"type": "error", "code": "server_error", "message": "Oops"}, "server_error", "Oops"),
        ({"type": "error", "code": "rate_limit_exceeded", "message": "Slow"}, "throttled", "Slow"),
        (
            {
                "type": "response.failed",
                "response": {"error": {"code": "rate_limit_exceeded", "message": "Slow"}},
            },
            "throttled",
            "Slow",
        ),
        (
            {"type": "response.failed", "response": {"status": "failed", "error": None}},
            "server_error",
            "the response failed",
        ),
        (
            {"object": "response", "status": "failed", "error": {"message": "Oops"}},
            "server_error",
            "Oops",
        ),
        ({"error": {"message": "bad", "code": 400}}, "client_error", "bad"),
    ],
)
def test_a_failure_in_a_stream_is_an_error_with_its_category(event, kind, message):
    assert parse(**event) == WireEvent(error=message, error_kind=kind, end=True)


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": 5},
        {"type": "response.output_text.delta"},
        {"type": "response.output_text.delta", "delta": ["a"]},
        {"type": "response.completed"},
        {"type": "response.completed", "response": {"usage": {"output_tokens": 1.5}}},
        {"type": "response.completed", "response": {"status": {}}},
        {"type": "response.failed", "response": "no"},
        {"object": "response", "output": None},
        {"object": "response", "output": [{"content": "text"}]},
        {"object": "response", "output": [{"arguments": 3}]},
    ],
)
def test_a_wrong_event_is_a_malformed_frame(event):
    with pytest.raises(TargetError) as caught:
        RESPONSES.parse(json.dumps(event).encode())
    assert caught.value.kind == "malformed_frame"
