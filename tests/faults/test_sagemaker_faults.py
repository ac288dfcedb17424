"""A SageMaker endpoint, and TGI, that misbehave: each failure ends in its bucket with what came."""

from __future__ import annotations

import asyncio
import json

import pytest
from botocore.credentials import Credentials

from lmi_bench.loadgen.aws.access import AwsAccess
from lmi_bench.loadgen.aws.target import Invocation, SageMakerTarget
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.run.target import Resolved
from lmi_bench.wire.format import find_format
from lmi_bench.wire.sagemaker import payload_part
from tests.faults.misbehaving import LAST_CHUNK, REQUEST, STREAM_HEAD, chunk, document, record_of, serving
from tests.loadgen.sending import measure
from tests.wire.exception_frames import stream_exception

HEAD = STREAM_HEAD.replace(b"text/event-stream", b"application/vnd.amazon.eventstream")


def line(text, last=False):
    content = {"token": {"id": 7, "text": text, "log_prob": -0.1}}
    if last:
        content |= {"generated_text": "x", "details": {"finish_reason": "length"}}
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def good():
    parts = [payload_part(part) for part in (line("a"), line("b"), line("c", last=True))]
    return [HEAD, *map(chunk, parts), LAST_CHUNK]


def sagemaker_record(script, *, timeout_s=5.0):
    async def main():
        async with serving(lambda number: script) as server:
            url = f"http://127.0.0.1:{server.port}"
            access = AwsAccess("us-east-1", url, False, Credentials("AKIDEXAMPLE", "s"), None)
            target = SageMakerTarget(access, Invocation("m"), find_format("lmi"), model="m")
            async with target:
                now_s = asyncio.get_running_loop().time()
                measured = await measure(Resolved(target).send, REQUEST, now_s, timeout_s=timeout_s)
            await server.idle()
            return measured.record()

    return run_on_sockets(main())


def test_a_good_stream_is_good_however_its_bytes_arrive():
    data = b"".join(good())
    byte_by_byte = [data[i : i + 1] for i in range(len(data))]
    for script in (good(), [data], byte_by_byte):
        record = sagemaker_record(script)
        assert (record.status, record.output_tokens) == ("ok", 3)


def exception(kind, **detail):
    return chunk(stream_exception(kind, json.dumps(detail).encode()))


FIRST = chunk(payload_part(line("a")))
TORN = chunk(payload_part(b'{"token": {"id": 8, "te'))  # parts and the container's lines do not align
BAD_CRC = payload_part(line("b"))[:-1] + b"\x00"


@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        ([exception("ModelStreamError", ErrorCode="ModelInvocationTimeExceeded")], "timeout"),
        ([exception("ModelStreamError", ErrorCode="StreamBroken")], "broken_stream"),
        ([exception("InternalStreamFailure", Message="oh")], "server_error"),
        ([TORN, exception("ModelStreamError", ErrorCode="ModelInvocationTimeExceeded")], "timeout"),
        ([chunk(BAD_CRC)], "malformed_frame"),
        ([chunk(b"data: {}\n\n" * 3)], "malformed_frame"),
        ([chunk(payload_part(line("b", last=True))[:-9])], "broken_stream"),
        ([TORN], "malformed_frame"),
        ([chunk(payload_part(b'{"code": 424, "error": "died"}\n'))], "server_error"),
        ([], "broken_stream"),
    ],
)
def test_a_stream_that_fails_after_its_first_token_keeps_it(rest, kind):
    record = sagemaker_record([HEAD, FIRST, *rest, LAST_CHUNK])
    assert record.status == kind
    assert record.output_tokens == 1


def test_a_stream_that_stands_still_times_out_with_what_came():
    record = sagemaker_record([HEAD, FIRST, 5.0], timeout_s=0.2)
    assert (record.status, record.output_tokens) == ("timeout", 1)


def test_a_connection_that_breaks_off_keeps_what_came():
    record = sagemaker_record([HEAD, FIRST, None])
    assert (record.status, record.output_tokens) == ("broken_stream", 1)


@pytest.mark.parametrize(
    ("status", "name", "body", "kind"),
    [
        ("400 Bad Request", "ThrottlingException", {}, "throttled"),
        ("503 Service Unavailable", "ServiceUnavailable", {}, "overloaded"),
        ("429 Too Many Requests", "ModelNotReadyException", {}, "overloaded"),
        ("403 Forbidden", "AccessDeniedException", {"Message": "no"}, "client_error"),
        ("400 Bad Request", "ValidationError", {"Message": "no endpoint"}, "client_error"),
        ("500 Internal Server Error", "InternalFailure", {}, "server_error"),
        ("424 Failed Dependency", "ModelError", {"OriginalStatusCode": 429}, "throttled"),
        ("424 Failed Dependency", "ModelError", {"OriginalStatusCode": 503}, "overloaded"),
        ("424 Failed Dependency", "ModelError", {"OriginalStatusCode": 0}, "timeout"),
        ("424 Failed Dependency", "ModelError", {"OriginalStatusCode": 400}, "client_error"),
        ("424 Failed Dependency", "ModelError", {"OriginalStatusCode": 500}, "server_error"),
    ],
)
def test_each_refusal_has_its_bucket(status, name, body, kind):
    header = b"x-amzn-ErrorType: " + name.encode()
    record = sagemaker_record([document(status, json.dumps(body).encode(), header)])
    assert record.status == kind
    assert name in record.error


@pytest.mark.parametrize(
    ("error_type", "kind"),
    [("overloaded", "overloaded"), ("validation", "client_error"), ("generation", "server_error")],
)
def test_tgis_errors_come_under_status_200_and_are_errors_still(error_type, kind):
    event = b"data: " + json.dumps({"error": "no", "error_type": error_type}).encode() + b"\n\n"
    record = record_of([STREAM_HEAD, chunk(event), LAST_CHUNK], protocol="tgi")
    assert (record.status, record.output_tokens) == (kind, 0)
