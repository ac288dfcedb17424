"""The OpenAI protocols read what vLLM and its kin send; the payloads are written out by hand."""

import json

import pytest

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.format import find_format
from lmi_bench.wire.openai import OpenAiCompletionsFormat

OPENAI = find_format("openai")
CHAT = find_format("openai-chat")


def read_stream(wire_format, stream):
    splitter = wire_format.new_splitter()
    payloads = splitter.feed(stream) + splitter.close()
    return [wire_format.parse(payload) for payload in payloads]


_HEAD = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
COMPLETION_STREAM = (
    _HEAD + b'"choices":[{"index":0,"text":" one","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null}]}\n\n'
    b": keep-alive\n\n" + _HEAD + b'"choices":[{"index":0,"text":" two","logprobs":null,"finish_reason":"length",'
    b'"stop_reason":null}]}\n\n'
    + _HEAD
    + b'"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n'
    b"data: [DONE]\n\n"
)


def test_prompts_go_as_token_ids_unless_the_server_takes_none():
    request = PlannedRequest(0, 0.0, input_tokens=2, output_tokens=4, prompt_text="to be", prompt_token_ids=(7, 8))
    for wire_format, prompt in ((OPENAI, [7, 8]), (OpenAiCompletionsFormat(token_ids=False), "to be")):
        assert json.loads(wire_format.request_body(request, model="m"))["prompt"] == prompt


def test_a_completion_stream_is_read_to_its_usage():
    assert read_stream(OPENAI, COMPLETION_STREAM) == [
        WireEvent(text=" one", model="m"),
        WireEvent(text=" two", model="m", finish_reason="length"),
        WireEvent(model="m", input_tokens=5, output_tokens=2),
        WireEvent(end=True),
    ]


def chat_chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode()


def test_a_chat_stream_counts_no_role_only_chunk():
    events = [
        CHAT.parse(payload)
        for payload in (
            chat_chunk({"role": "assistant", "content": ""}),
            chat_chunk({"role": "assistant", "content": None}),
            chat_chunk({"reasoning": "hm"}),
            chat_chunk({"reasoning_content": "so"}),
            chat_chunk({"content": "Yes"}),
            chat_chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
            chat_chunk({}, "stop"),
        )
    ]
    assert [event.num_tokens for event in events] == [0, 0, 1, 1, 1, 1, 0]
    assert "".join(event.text for event in events) == "hmsoYes{}"
    assert events[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "finish_reason": "stop"},
        {"index": 0, "delta": None, "finish_reason": "stop"},
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    ],
)
def test_the_last_choice_of_a_chat_may_lack_its_delta(choice):
    event = CHAT.parse(json.dumps({"choices": [choice]}).encode())
    assert (event.num_tokens, event.finish_reason) == (0, "stop")


def test_a_content_in_parts_is_read_to_its_text():
    parts = [{"type": "thinking", "thinking": [{"text": "h"}, {"text": "m"}]}, {"text": " Yes"}]
    assert CHAT.parse(chat_chunk({"content": parts})) == WireEvent(text="hm Yes")


def test_a_refusal_and_a_call_of_the_older_kind_are_what_the_model_said():
    deltas = (
        {"refusal": "I can't", "content": None},
        {"function_call": {"name": "look", "arguments": ""}, "content": None},
        {"function_call": {"arguments": "{}"}},
    )
    events = [CHAT.parse(chat_chunk(delta)) for delta in deltas]
    assert [event.num_tokens for event in events] == [1, 1, 1]
    assert [event.text for event in events] == ["I can't", "look", "{}"]


def test_an_empty_chunk_is_no_token_but_ids_make_one():
    """Incomplete characters and held-back stop strings give chunks without text."""
    empty = b'{"object":"text_completion","choices":[{"index":0,"text":"","finish_reason":null}]}'
    assert OPENAI.parse(empty).num_tokens == 0
    with_ids = b'{"object":"text_completion","choices":[{"index":0,"text":"","finish_reason":null,"token_ids":[7,8]}]}'
    assert OPENAI.parse(with_ids).num_tokens == 2
    assert OPENAI.parse(with_ids).token_ids == (7, 8)


def test_usage_on_a_chunk_is_the_count_so_far():
    payload = (
        b'{"object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":null}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'
    )
    assert OPENAI.parse(payload) == WireEvent(text="a", input_tokens=3, output_tokens=4)


def test_the_usage_field_of_openai_itself_is_null_on_the_other_chunks():
    payload = b'{"object":"text_completion","choices":[{"index":0,"text":"a"}],"usage":null}'
    assert OPENAI.parse(payload) == WireEvent(text="a")


def test_the_body_of_an_unstreamed_answer_is_one_event():
    body = (
        b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" one two",'
        b'"finish_reason":"length"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
    )
    assert OPENAI.parse(body) == WireEvent(
        text=" one two", finish_reason="length", input_tokens=5, output_tokens=2, end=True
    )
    chat = (
        b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"Yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
        b'"completion_tokens":1}}'
    )
    assert CHAT.parse(chat) == WireEvent(text="Yes", finish_reason="stop", input_tokens=5, output_tokens=1, end=True)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b'{"error":{"message":"boom","type":"InternalServerError","code":500}}', "server_error"),
        (b'{"error":{"message":"boom","type":"Service Unavailable","code":503}}', "overloaded"),
        (b'{"error":{"message":"boom","type":"x","code":"rate_limit"}}', "server_error"),
        (b'{"error":{"message":"boom","http_status_code":422}}', "client_error"),
        (b'{"object":"error","message":"boom","code":400}', "client_error"),
        (b'{"error":"boom"}', "server_error"),
        (b'{"error":{"message":"boom","code":"503"}}', "overloaded"),
        (b'{"error":{"message":"boom","code":"rate_limit_exceeded"}}', "throttled"),
        (b'{"error":{"message":"boom","code":null,"type":"overloaded_error"}}', "overloaded"),
        (b'{"error":{"message":"boom","code":{"a":[]},"type":[]}}', "server_error"),
    ],
)
def test_an_error_event_under_status_200_is_an_error(payload, kind):
    assert OPENAI.parse(payload) == WireEvent(error="boom", error_kind=kind, end=True)


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices":[{"text":"ha',
        b"",
        b"[]",
        b"17",
        b"{}",
        b'{"choices":[3]}',
        b'{"choices":null}',
        b'{"choices":[{"index":0}]}',
        b'{"choices":[{"text":5}]}',
        b"\xff\xfe",
        b'{"choices":[{"text":"a","finish_reason":["x"]}]}',
        b'{"choices":[{"text":"a","finish_reason":7}]}',
        *(
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%s}}' % count
            for count in (b'"x"', b"-5", b"2.5", b"1e30", b"99999999999999999999", b"true")
        ),
    ],
)
def test_nonsense_is_a_malformed_frame(payload):
    with pytest.raises(TargetError) as caught:
        OPENAI.parse(payload)
    assert caught.value.kind == "malformed_frame"


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, b'{"error":{"message":"too long","code":400}}', "client_error", "HTTP 400: too long"),
        (401, b'{"error":"Unauthorized"}', "client_error", "HTTP 401: Unauthorized"),
        (404, b'{"message":"no model"}', "client_error", "HTTP 404: no model"),
        (429, b"slow down", "throttled", "HTTP 429: slow down"),
        (500, b"", "server_error", "HTTP 500"),
        (502, b"<html>\xff</html>", "server_error", "HTTP 502: <html>\ufffd</html>"),
        (503, b'{"error":{"message":"full","code":503}}', "overloaded", "HTTP 503: full"),
    ],
)
def test_a_status_falls_into_its_bucket_with_the_servers_words(status, body, kind, message):
    error = OPENAI.error(status, body)
    assert (error.kind, str(error)) == (kind, message)


def test_token_ids_are_sent_as_the_prompt_so_that_its_length_is_exact():
    request = PlannedRequest(0, 0.0, 3, 8, prompt_token_ids=(5, 6, 7), prompt_text="five six")
    assert json.loads(OPENAI.request_body(request, model="m")) == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "min_tokens": 8,
    }


def test_text_is_sent_where_no_ids_are_planned_and_nothing_forces_a_length():
    request = PlannedRequest(0, 0.0, 3, 8, prompt_text="five six", ignore_eos=False)
    assert json.loads(OPENAI.request_body(request, model="m", stream=False)) == {
        "model": "m",
        "prompt": "five six",
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": False,
    }
    chat = json.loads(CHAT.request_body(request, model="m", stream=False))
    assert chat["messages"] == [{"role": "user", "content": "five six"}]
    assert chat["max_completion_tokens"] == 8


@pytest.mark.parametrize("name", ["openai", "openai-chat", "lmi"])
def test_a_request_without_a_prompt_is_refused_before_it_is_sent(name):
    with pytest.raises(InputError, match="request 4 has"):
        find_format(name).request_body(PlannedRequest(4, 0.0, 3, 8), model="m")


def test_an_unknown_protocol_names_the_known_ones():
    with pytest.raises(InputError, match=r"'grpc'.*openai, openai-chat, lmi"):
        find_format("grpc")


@pytest.mark.parametrize(
    ("delta", "reasoning"),
    [
        ({"reasoning": "hm"}, True),
        ({"reasoning_content": "hm", "content": ""}, True),
        ({"reasoning": "hm", "content": "Yes"}, False),
        ({"content": "Yes"}, False),
        ({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}, False),
        ({"role": "assistant", "content": ""}, False),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}, True),
        ({"content": [{"type": "text", "text": "Yes"}]}, False),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"text": "Yes"}]}, False),
    ],
)
def test_a_chunk_of_thought_alone_is_reasoning(delta, reasoning):
    assert CHAT.parse(chat_chunk(delta)).reasoning is reasoning


def test_the_usage_may_say_what_the_prefix_cache_knew():
    usage = {"prompt_tokens": 100, "completion_tokens": 4}
    told = {**usage, "prompt_tokens_details": {"cached_tokens": 96}}
    for content, cached in ((usage, None), (told, 96)):
        payload = json.dumps({"choices": [], "usage": content}).encode()
        assert OPENAI.parse(payload).cached_tokens == cached


@pytest.mark.parametrize(("stated", "read"), [(12.5, 12.5), (0, 0.0), (None, None), (-1, None), ("12", None)])
def test_the_server_may_state_how_long_a_request_waited(stated, read):
    metrics = {"queue_time_ms": stated, "time_to_first_token_ms": 85.2, "mean_itl_ms": 9.1}
    event = OPENAI.parse(json.dumps({"choices": [], "metrics": metrics}).encode())
    assert (event.queue_ms, event.prefill_ms) == (read, 85.2)


@pytest.mark.parametrize("key", [b"error", b"a"])
def test_an_error_nested_without_end_has_a_message_all_the_same(key):
    body = (b'{"%b":' % key) * 1000 + b"1" + b"}" * 1000
    assert str(OPENAI.error(500, body)).startswith("HTTP 500")


def test_a_code_of_thousands_of_digits_is_a_malformed_frame():
    with pytest.raises(TargetError) as caught:
        OPENAI.parse(b'{"error": {"code": "' + b"9" * 5000 + b'"}}')
    assert caught.value.kind == "malformed_frame"


EMBEDDINGS = find_format("embeddings")


def test_one_text_is_sent_without_a_length():
    request = PlannedRequest(0, 0.0, 3, 20, prompt_text="To be", prompt_token_ids=(1, 2, 3))
    body = json.loads(EMBEDDINGS.request_body(request, model="bge"))
    assert body == {"model": "bge", "input": "To be"}
    with pytest.raises(InputError, match="no prompt_text"):
        EMBEDDINGS.request_body(PlannedRequest(0, 0.0, 3, 20), model="bge")


@pytest.mark.parametrize("vector", [[0.1, -0.2], "zczMPc3MTL4="])
def test_a_vector_is_a_whole_answer_without_tokens(vector):
    """As numbers, or as base64."""
    body = {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector}],
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }
    found = EMBEDDINGS.parse(json.dumps(body).encode())
    assert found == WireEvent(input_tokens=8, output_tokens=0, tokenless=True, end=True)
    assert found.num_tokens == 0


def test_an_error_object_is_an_error():
    found = EMBEDDINGS.parse(b'{"error": {"message": "too long", "code": 400}}')
    assert found == WireEvent(error="too long", error_kind="client_error", end=True)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"data": []},
        {"data": [{"embedding": []}]},
        {"data": [{"embedding": None}]},
        {"data": ["x"]},
        {"data": 3},
        {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 1.5}},
        {"data": [{"embedding": [0.1]}], "usage": 3},
    ],
)
def test_a_reply_without_a_vector_is_a_malformed_frame(body):
    with pytest.raises(TargetError) as caught:
        EMBEDDINGS.parse(json.dumps(body).encode())
    assert caught.value.kind == "malformed_frame"


RESPONSES = find_format("openai-responses")
USAGE = {
    "input_tokens": 36,
    "input_tokens_details": {"cached_tokens": 16},
    "output_tokens": 87,
    "output_tokens_details": {"reasoning_tokens": 5},
    "total_tokens": 123,
}
COUNTS = {"input_tokens": 36, "output_tokens": 87, "cached_tokens": 16, "reasoning_tokens": 5}


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
    "type_", ["response.created", "response.in_progress", "response.output_text.done", "response.new"]
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


def test_a_response_of_vllm_states_its_times_with_its_end():
    """`--enable-per-request-metrics`, as the other routes give them."""
    times = {"queue_time_ms": 12.3, "time_to_first_token_ms": 85.2, "generation_time_ms": 1240.5}
    response = {"object": "response", "status": "completed", "output": [], "usage": USAGE, "metrics": times}
    for event in (parse(type="response.completed", response=response), parse(**response)):
        assert (event.queue_ms, event.prefill_ms, event.end) == (12.3, 85.2, True)


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        ({"type": "error", "code": "server_error", "message": "Oops"}, "server_error", "Oops"),
        ({"type": "error", "code": "rate_limit_exceeded", "message": "Slow"}, "throttled", "Slow"),
        (
            {"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "Slow"}}},
            "throttled",
            "Slow",
        ),
        (
            {"type": "response.failed", "response": {"status": "failed", "error": None}},
            "server_error",
            "the response failed",
        ),
        ({"object": "response", "status": "failed", "error": {"message": "Oops"}}, "server_error", "Oops"),
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


@pytest.mark.parametrize(
    ("wire_format", "stream"), [(OPENAI, COMPLETION_STREAM), (CHAT, b"data: " + chat_chunk({"content": "a"}, "stop"))]
)
def test_json_lines_of_the_same_chunks_are_read_alike(wire_format, stream):
    """LMI's containers cut `data: ` off for a body of OpenAI's (djl-serving 0.35)."""
    events = [line for line in stream.split(b"\n") if line[:6] == b"data: " and b"DONE" not in line]
    lines = b"".join(line.removeprefix(b"data: ") + b"\n" for line in events)
    expected = [event for event in read_stream(wire_format, stream) if not event.end]
    assert read_stream(wire_format, lines) == expected
