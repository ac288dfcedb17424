"""SageMaker's errors by name and by the container's own status, as botocore's model has them."""

import json

import pytest

from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.format import find_format
from lmi_bench.wire.sagemaker import SageMakerFormat, payload_part
from tests.wire.exception_frames import stream_exception

LMI = SageMakerFormat(find_format("lmi"))


def read_stream(wire_format, stream):
    splitter = wire_format.new_splitter()
    return [wire_format.parse(p) for p in splitter.feed(stream) + splitter.close()]


@pytest.mark.parametrize(
    ("status", "name", "kind"),
    [
        (400, "ThrottlingException", "throttled"),
        (503, "ServiceUnavailable", "overloaded"),
        (429, "ModelNotReadyException", "overloaded"),
        (429, "", "throttled"),
        (400, "ValidationError", "client_error"),
        (403, "AccessDeniedException", "client_error"),
        (403, "InvalidSignatureException", "client_error"),
        (403, "ExpiredTokenException", "client_error"),
        (500, "InternalFailure", "server_error"),
        (530, "InternalDependencyException", "server_error"),
        (424, "ModelError", "server_error"),
    ],
)
def test_an_error_by_name_ends_in_its_bucket(status, name, kind):
    error = LMI.error(status, b'{"message": "boom"}', {b"x-amzn-errortype": name.encode()})
    assert error.kind == kind
    assert "boom" in str(error)
    assert name in str(error)


@pytest.mark.parametrize("name", ["ThrottlingException:http://x/y", "com.amazonaws.sagemaker#ThrottlingException"])
def test_a_name_may_carry_a_uri_or_a_name_space_and_stand_in_the_body(name):
    assert LMI.error(400, b"{}", {b"x-amzn-errortype": name.encode()}).kind == "throttled"
    assert LMI.error(400, json.dumps({"__type": name}).encode()).kind == "throttled"


@pytest.mark.parametrize(
    ("original", "said", "kind"),
    [
        (429, "slow down", "throttled"),
        (503, '{"code":503,"type":"WlmCapacityException","message":"full"}', "overloaded"),
        (503, '{"code":503,"type":"WlmException","message":"not up"}', "server_error"),
        (400, '{"code":400,"message":"bad"}', "client_error"),
        (400, '{"type":"TranslateException","message":"Time out in: 240"}', "overloaded"),
        (424, '{"code":424,"error":"died"}', "server_error"),
        (507, "", "server_error"),
        (500, "oom", "server_error"),
        (0, "", "timeout"),
    ],
)
def test_a_model_error_is_what_the_container_answered(original, said, kind):
    body = {"Message": "m", "OriginalStatusCode": original, "OriginalMessage": said}
    error = LMI.error(424, json.dumps(body).encode(), {b"x-amzn-errortype": b"ModelError"})
    assert error.kind == kind


@pytest.mark.parametrize(
    ("exception", "detail", "kind"),
    [
        ("ModelStreamError", {"ErrorCode": "ModelInvocationTimeExceeded"}, "timeout"),
        ("ModelStreamError", {"ErrorCode": "StreamBroken"}, "broken_stream"),
        ("ModelStreamError", {}, "server_error"),
        ("InternalStreamFailure", {}, "server_error"),
    ],
)
def test_an_exception_in_the_stream_ends_in_its_bucket(exception, detail, kind):
    line = b'{"token": {"id": 1, "text": "a", "log_prob": -0.1}}\n'
    failure = json.dumps(detail | {"Message": "boom"}).encode()
    first, last = read_stream(LMI, payload_part(line) + stream_exception(exception, failure))
    assert first.text == "a"
    assert (last.error_kind, last.end) == (kind, True)
    assert "boom" in last.error


def test_openai_chunks_come_as_lines_or_as_events():
    """LMI cuts `data: ` off and turns [DONE] into a blank line; vLLM's own container does not."""
    chat = SageMakerFormat(find_format("openai-chat"))
    chunk = b'{"choices":[{"index":0,"delta":{"content":"Yes"},"finish_reason":"stop"}]}'
    expected = WireEvent(text="Yes", finish_reason="stop")
    assert read_stream(chat, payload_part(chunk + b"\n\n\n")) == [expected]
    events = b"data: " + chunk + b"\n\ndata: [DONE]\n\n"
    assert read_stream(chat, payload_part(events)) == [expected, WireEvent(end=True)]


def test_the_answer_of_invoke_endpoint_is_the_containers_own():
    event = LMI.parse(b'{\n "generated_text": "a b",\n "details": {"generated_tokens": 2}}')
    assert (event.text, event.num_tokens, event.end) == ("a b", 2, True)
