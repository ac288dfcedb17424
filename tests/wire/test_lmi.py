"""The LMI protocol reads all three eras; payloads are written by hand after djl-serving."""

import json

import pytest

from lmi_bench.core.errors import TargetError
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.format import find_format

LMI = find_format("lmi")


def read_stream(stream):
    splitter = LMI.new_splitter()
    payloads = splitter.feed(stream) + splitter.close()
    return [LMI.parse(payload) for payload in payloads]


def test_era_b_streams_one_token_a_line():
    stream = (
        b'{"token": {"id": 304, "text": "Deep ", "log_prob": -0.052}}\n'
        b'{"token": {"id": 2, "text": "", "log_prob": -0.69, "special_token": true}, '
        b'"generated_text": "Deep ", "details": {"finish_reason": "eos_token", '
        b'"generated_tokens": 2, "inputs": "a"}}\n'
    )
    assert read_stream(stream) == [
        WireEvent(text="Deep ", token_ids=(304,), token_count=1),
        WireEvent(token_ids=(2,), token_count=1, finish_reason="eos_token", output_tokens=2, end=True),
    ]


def test_era_a_leaves_falsy_fields_out_and_every_line_is_still_a_token():
    stream = (
        b'{"token": {"id": 5, "log_prob": -0.1}}\n'
        b'{"token": {"text": "a", "log_prob": -0.2}}\n'
        b'{"token": {"log_prob": -0.3}}\n'
        b'{"token": {}, "generated_text": "a", "details": {"finish_reason": "length"}}'
    )
    events = read_stream(stream)
    assert [event.num_tokens for event in events] == [1, 1, 1, 1]
    assert [event.token_ids for event in events] == [(5,), (), (), ()]
    assert [event.end for event in events] == [False, False, False, True]
    assert events[-1].finish_reason == "length"


def test_era_c_counts_one_too_many_and_ends_with_blank_lines():
    stream = (
        b'{"index": 0, "token": {"id": 791, "text": "The", "logprob": -0.9}, '
        b'"generated_text": null, "details": null}\n'
        b'{"index": 0, "token": {"id": 2, "text": ".", "logprob": -0.1}, '
        b'"generated_text": "The.", "details": {"finish_reason": "length", "seed": null, '
        b'"generated_tokens": 3, "input_length": 5}}\n\n\n'
    )
    assert read_stream(stream) == [
        WireEvent(text="The", token_ids=(791,)),
        WireEvent(text=".", token_ids=(2,), finish_reason="length", input_tokens=5, output_tokens=2, end=True),
    ]


def test_the_last_line_ends_the_answer_also_without_details():
    line = b'{"token": {"id": 2, "text": ".", "log_prob": -0.1}, "generated_text": "a."}'
    assert LMI.parse(line) == WireEvent(text=".", token_ids=(2,), token_count=1, end=True)


def test_output_formatter_sse_is_read_too():
    stream = (
        b'data: {"token": {"id": 7, "text": "a", "log_prob": -0.1}}\n\n'
        b'data: {"token": {"id": 8, "text": "b", "log_prob": -0.1}, "generated_text": "ab"}\n\n'
    )
    assert [event.text for event in read_stream(stream)] == ["a", "b"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"generated_text": "ab", "details": {"finish_reason": "length", "generated_tokens": 2}}',
        b'[{"generated_text": "ab", "details": {"finish_reason": "length", "generated_tokens": 2}}]',
    ],
    ids=["object", "array of one"],
)
def test_the_body_of_an_unstreamed_answer_is_one_event(body):
    assert LMI.parse(body) == WireEvent(text="ab", token_count=2, finish_reason="length", output_tokens=2, end=True)


def test_an_unstreamed_answer_of_era_a_omits_the_id_of_token_0():
    body = b"""{"generated_text": "ab", "details": {"generated_tokens": 2,
        "tokens": [{"text": "a"}, {"id": 7, "text": "b"}]}}"""
    assert LMI.parse(body).token_ids == (7,)


def test_era_c_leaves_the_reason_of_an_unstreamed_answer_open():
    body = (
        b'{"generated_text": "ab", "details": {"finish_reason": null, "generated_tokens": 2, '
        b'"seed": null, "prefill": [], "tokens": [{"id": 1, "text": "a", "logprob": -1.0}, '
        b'{"id": 2, "text": "b", "logprob": -1.0}]}}'
    )
    assert LMI.parse(body) == WireEvent(text="ab", token_ids=(1, 2), token_count=2, output_tokens=2, end=True)


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b'{"code": 424, "error": "boom"}', "server_error", "boom"),
        (b'{"error": {"message": "boom", "code": 400}}', "client_error", "boom"),
        (b'{"code": 503, "type": "WlmCapacityException", "message": "full"}', "overloaded", "full"),
        (
            b'{"generated_text": null, "error": "boom", "code": 400, "details": {"finish_reason": "error"}}',
            "client_error",
            "boom",
        ),
    ],
)
def test_an_error_line_under_status_200_is_an_error(line, kind, message):
    assert LMI.parse(line) == WireEvent(error=message, error_kind=kind, end=True)


def test_a_failed_token_line_is_an_error_and_no_token():
    line = (
        b'{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true, '
        b'"error_msg": "boom"}, "generated_text": "a", "details": {"finish_reason": "error"}}'
    )
    event = LMI.parse(line)
    assert (event.error, event.error_kind, event.num_tokens) == ("boom", "server_error", 0)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (424, b'{"code": 424, "error": "boom"}', "server_error"),
        (503, b'{"code": 503, "type": "WlmCapacityException", "message": "full"}', "overloaded"),
        (503, b'{"code": 503, "type": "WlmException", "message": "loading"}', "server_error"),
        (400, b'{"code": 400, "type": "TranslateException", "message": "Time out in: 240"}', "overloaded"),
        (400, b'{"code": 400, "type": "BadRequestException", "message": "x"}', "client_error"),
        (429, b"", "throttled"),
        (507, b'{"code": 507, "message": "CUDA out of memory"}', "server_error"),
    ],
)
def test_a_status_falls_into_its_bucket(status, body, kind):
    assert LMI.error(status, body).kind == kind


@pytest.mark.parametrize("payload", [b"{", b"null", b'"token"', b"{}", b'{"token": 3}', b'{"generated_text": null}'])
def test_nonsense_is_a_malformed_frame(payload):
    with pytest.raises(TargetError) as caught:
        LMI.parse(payload)
    assert caught.value.kind == "malformed_frame"


def test_the_request_forces_the_length_in_every_era():
    request = PlannedRequest(0, 0.0, 2, 9, prompt_text="five six")
    assert json.loads(LMI.request_body(request, model="m")) == {
        "inputs": "five six",
        "parameters": {
            "max_new_tokens": 9,
            "do_sample": False,
            "details": True,
            "ignore_eos_token": True,
            "ignore_eos": True,
        },
        "stream": True,
    }
