"""TGI's own protocol; the payloads are written by hand after router/src/lib.rs of TGI 3."""

import json

import pytest

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.format import find_format

TGI = find_format("tgi")
STREAM = (
    b'data:{"index":1,"token":{"id":791,"text":"The","logprob":-0.9,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
    b": keep-alive\n\n"
    b'data: {"index":2,"token":{"id":2,"text":"</s>","logprob":-0.1,"special":true},'
    b'"generated_text":"The","details":{"finish_reason":"eos_token","generated_tokens":2,'
    b'"seed":null,"input_length":5}}\n\n'
)


def read_stream(wire_format, stream):
    splitter = wire_format.new_splitter()
    return [wire_format.parse(p) for p in splitter.feed(stream) + splitter.close()]


EVENTS = [
    WireEvent(text="The", token_ids=(791,), token_count=1),
    WireEvent(token_ids=(2,), token_count=1, finish_reason="eos_token", input_tokens=5, output_tokens=2, end=True),
]


def test_a_stream_has_one_token_an_event_and_no_end_mark():
    assert read_stream(TGI, STREAM) == EVENTS


def test_the_lmi_protocol_reads_tgis_stream_with_the_same_counts():
    """On `/invocations`; era C's count, one too many, is told by its index 0."""
    events = read_stream(find_format("lmi"), STREAM)
    assert [event.num_tokens for event in events] == [1, 1]
    assert events[-1].output_tokens == 2
    assert events[-1].end


def test_the_unstreamed_answer_is_one_event_also_in_an_array_of_one():
    body = (
        b'{"generated_text":"The cat","details":{"finish_reason":"length","generated_tokens":2,'
        b'"seed":null,"prefill":[],"tokens":[{"id":791,"text":"The"},{"id":5,"text":" cat"}]}}'
    )
    expected = WireEvent(
        text="The cat", token_ids=(791, 5), token_count=2, finish_reason="length", output_tokens=2, end=True
    )
    assert TGI.parse(body) == expected
    assert TGI.parse(b"[" + body + b"]") == expected
    assert find_format("tgi", stream=False).path == "/generate"
    assert TGI.path == "/generate_stream"


def test_the_prefill_of_an_unstreamed_answer_counts_the_prompt():
    body = b"""{"generated_text": "a", "details": {"generated_tokens": 1, "tokens": [{"id": 5}],
        "prefill": [{"id": 1}, {"id": 2}, {"id": 3}]}}"""
    event = find_format("tgi").parse(body)
    assert (event.input_tokens, event.token_ids) == (3, (5,))


@pytest.mark.parametrize(
    ("error_type", "kind"),
    [
        ("overloaded", "overloaded"),
        ("validation", "client_error"),
        ("generation", "server_error"),
        ("incomplete_generation_stream", "server_error"),
    ],
)
def test_an_error_event_under_status_200_ends_in_its_bucket(error_type, kind):
    payload = json.dumps({"error": "boom", "error_type": error_type}).encode()
    assert TGI.parse(payload) == WireEvent(error="boom", error_kind=kind, end=True)


@pytest.mark.parametrize(
    ("status", "error_type", "kind"),
    [
        (429, "overloaded", "overloaded"),
        (422, "validation", "client_error"),
        (424, "generation", "server_error"),
        (429, None, "throttled"),
    ],
)
def test_a_status_ends_in_its_bucket(status, error_type, kind):
    body = json.dumps({"error": "boom", "error_type": error_type}).encode()
    error = TGI.error(status, body)
    assert (error.kind, str(error)) == (kind, f"HTTP {status}: boom")


@pytest.mark.parametrize("payload", [b"{", b"{}", b'{"token":{}}', b'{"token":3}', b'"x"'])
def test_nonsense_is_a_malformed_frame(payload):
    with pytest.raises(TargetError) as caught:
        TGI.parse(payload)
    assert caught.value.kind == "malformed_frame"


def test_the_request_asks_for_details_and_needs_a_text():
    request = PlannedRequest(0, 0.0, 2, 3, prompt_text="a b")
    assert json.loads(TGI.request_body(request, model="m")) == {
        "inputs": "a b",
        "parameters": {"max_new_tokens": 3, "do_sample": False, "details": True},
        "stream": True,
    }
    with pytest.raises(InputError, match="prompt_text"):
        TGI.request_body(PlannedRequest(0, 0.0, 2, 3, prompt_token_ids=[1, 2]), model="m")
