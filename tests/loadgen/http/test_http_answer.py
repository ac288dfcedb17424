"""Decoding: however the reads were cut, the answer is one, each token with its read's time."""

from __future__ import annotations

import contextlib
import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.analysis.results.columns import request_ms
from lmi_bench.core.errors import TargetError
from lmi_bench.core.records import RequestRecord
from lmi_bench.loadgen.http.answer import Received, decode_answer
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.wire.format import FORMAT_NAMES, find_format
from lmi_bench.wire.sagemaker import SageMakerFormat, StreamFailure
from tests.faults.misbehaving import DONE, LAST_CHUNK, STREAM_HEAD, chunk, event, good_answer, usage

OPENAI = find_format("openai")
TEXTS = (" a", " é☃", " c")
ANSWER = (
    STREAM_HEAD
    + b"".join(chunk(event(text)) for text in TEXTS[:-1])
    + chunk(event(TEXTS[-1], "length"))
    + chunk(usage(4, 3))
    + chunk(DONE)
    + LAST_CHUNK
)
# Each token is there with the last byte of its frame, which two bytes of the chunk's end follow.
TOKEN_ENDS = [ANSWER.index(event(text)) + len(event(text)) for text in TEXTS[:-1]]
TOKEN_ENDS.append(ANSWER.index(event(TEXTS[-1], "length")) + len(event(TEXTS[-1], "length")))


def _decode(reads, *, kernel_time=None, signals=None, whole=True):
    return decode_answer(
        OPENAI,
        Received(reads, 200, 0, sent_ns=0),
        kernel_time=kernel_time,
        signals=signals or ReceiveSignals(),
        whole=whole,
    )


@given(st.sets(st.integers(1, len(ANSWER) - 1)))
def test_any_cut_gives_the_same_answer_with_the_times_of_the_completing_reads(cuts):
    edges = [0, *sorted(cuts), len(ANSWER)]
    reads = [
        (second * 10**9, None, ANSWER[start:end], 0) for second, (start, end) in enumerate(pairwise(edges), start=1)
    ]
    signals = ReceiveSignals()
    exchange = _decode(reads, signals=signals)
    assert exchange.text == "".join(TEXTS)
    assert (exchange.input_tokens, exchange.output_tokens) == (4, 3)
    expected = [next(i for i, edge in enumerate(edges) if edge >= end) for end in TOKEN_ENDS]
    assert tuple(exchange.token_times_s) == tuple(float(second) for second in expected)
    assert signals.tokens == 3
    assert signals.merged == 3 - len(set(expected))


@given(st.integers(0, len(ANSWER) - 1))
def test_what_broke_off_anywhere_keeps_the_tokens_that_were_there(cut):
    """A last frame counts without its blank line: the end of the stream ends it, too."""
    exchange = _decode([(10**9, None, ANSWER[:cut], 0)], whole=False)
    assert len(exchange.token_times_s) == sum(end - len(b"\n\n") <= cut for end in TOKEN_ENDS)


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_target_error_and_never_in_another(noise):
    """None of these is a whole answer: a frame of the protocol does not come by chance."""
    with pytest.raises(TargetError) as caught:
        _decode([(10**9, None, STREAM_HEAD + chunk(noise + b"\n\n") + LAST_CHUNK, 0)])
    assert caught.value.exchange is not None


def test_kernel_times_replace_user_times_and_the_difference_is_noted():
    reads = [(2_000_000_000, b"k", good_answer(), 0)]
    signals = ReceiveSignals()
    exchange = _decode(reads, kernel_time=lambda control, user_ns: user_ns - 500_000_000, signals=signals)
    assert tuple(exchange.token_times_s) == (1.5, 1.5, 1.5)
    assert list(signals.delays_s) == [0.5]
    assert signals.without_stamp == 0


def test_a_read_without_a_stamp_keeps_its_user_time_and_its_bound():
    reads = [(2_000_000_000, None, good_answer(), 1_900_000_000)]
    signals = ReceiveSignals()
    exchange = _decode(reads, kernel_time=lambda control, user_ns: None, signals=signals)
    assert tuple(exchange.token_times_s) == (2.0, 2.0, 2.0)
    assert list(signals.delays_s) == pytest.approx([0.1])
    assert signals.without_stamp == 1


def test_nothing_after_the_end_counts():
    answer = STREAM_HEAD + chunk(event(" a", "length")) + chunk(DONE) + chunk(event(" x"))
    exchange = _decode([(10**9, None, answer + LAST_CHUNK, 0)])
    assert exchange.text == " a"


@pytest.mark.parametrize(
    ("reason", "kind"), [("error", "server_error"), ("abort", "cancelled"), ("cancelled", "cancelled")]
)
def test_an_answer_that_the_server_gave_up_is_a_failure(reason, kind):
    answer = STREAM_HEAD + chunk(event(" a", reason)) + chunk(DONE) + LAST_CHUNK
    with pytest.raises(TargetError, match=reason) as caught:
        _decode([(10**9, None, answer, 0)])
    assert caught.value.kind == kind


def _chat_stream(*deltas):
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} for delta, reason in deltas]
    frames = [b"data: " + json.dumps(part).encode() + b"\n\n" for part in chunks] + [DONE]
    return [STREAM_HEAD] + [chunk(frame) for frame in frames] + [LAST_CHUNK]


def test_the_first_token_of_the_answer_is_told_from_the_first_thought():
    """Role at 2 s, thoughts at 3 and 4 s, the answer from 5 s on: two first tokens."""
    parts = _chat_stream(
        ({"role": "assistant", "content": ""}, None),
        ({"reasoning_content": "hm"}, None),
        ({"reasoning": "so"}, None),
        ({"content": "Yes"}, None),
        ({"content": "."}, "stop"),
    )
    reads = [(i * 10**9, None, part, 0) for i, part in enumerate(parts, start=1)]
    exchange = decode_answer(
        find_format("openai-chat"), Received(reads, 200, 0, sent_ns=0), kernel_time=None, signals=ReceiveSignals()
    )
    assert tuple(exchange.token_times_s) == (3.0, 4.0, 5.0, 6.0)
    assert exchange.first_answer_s == 5.0
    assert exchange.reasoning_tokens == 2
    assert exchange.text[exchange.thought_chars :] == "Yes."


@pytest.mark.parametrize(("hidden", "tpot_ms"), [(500, 1000.0), (0, 2000 / 502)])
def test_thoughts_that_are_counted_and_not_shown_came_before_the_first_token(hidden, tpot_ms):
    """Three tokens from 2 s on, one a second, of 503 that the server counts."""
    counts = {"completion_tokens": 503, "completion_tokens_details": {"reasoning_tokens": hidden}}
    last = b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"
    parts = _chat_stream(*(({"content": word}, None) for word in "abc"))
    parts[-2:] = [chunk(last), chunk(DONE), LAST_CHUNK]
    reads = [(i * 10**9, None, part, 0) for i, part in enumerate(parts, start=1)]
    exchange = decode_answer(
        find_format("openai-chat"), Received(reads, 200, 0, sent_ns=0), kernel_time=None, signals=ReceiveSignals()
    )
    assert (exchange.reasoning_tokens, sum(exchange.token_counts)) == (hidden, 3 + hidden)
    record = RequestRecord(0, 0.0, exchange, output_tokens=503)
    assert request_ms(record, "tpot", open_loop=False) == pytest.approx(tpot_ms)


def test_an_answer_without_thoughts_has_one_first_token():
    exchange = _decode([(10**9, None, ANSWER, 0)])
    assert exchange.first_answer_s is None
    assert exchange.streamed


def test_a_web_page_is_called_one_and_not_a_broken_stream():
    page = b"<html><body>Welcome to nginx</body></html>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 42\r\n\r\n"
    with pytest.raises(TargetError, match=r"a web page came .*Welcome to nginx") as caught:
        _decode([(1_000, None, head + page, 0)])
    assert caught.value.kind == "malformed_frame"


def test_a_redirect_says_that_it_is_not_followed_and_a_page_is_one_short_line():
    body = b"<html>\n <h1>Moved</h1>\n" + b"x" * 900
    head = b"HTTP/1.1 302 Found\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(TargetError, match="HTTP 302: a redirect, which is not followed") as caught:
        _decode([(1_000, None, head + body, 0)])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("status", "kind"), [(200, "malformed_frame"), (503, "overloaded")])
@pytest.mark.parametrize("stream", [True, False])
def test_an_encoding_that_nobody_asked_for_is_named(status, kind, stream):
    head = b"HTTP/1.1 %d .\r\nContent-Encoding: GZip\r\nContent-Length: %d\r\n\r\n"
    body = gzip.compress(event(" a", "length") + DONE)
    received = Received([(1, None, head % (status, len(body)) + body, 0)], status, 0, sent_ns=0)
    with pytest.raises(TargetError, match="content-encoding gzip, which was not asked") as caught:
        decode_answer(OPENAI, received, kernel_time=None, signals=ReceiveSignals(), stream=stream)
    assert caught.value.kind == kind


def test_the_encoding_that_changes_nothing_is_none():
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: identity\r\n\r\n")
    answer = good_answer().replace(STREAM_HEAD, head)
    assert _decode([(1, None, answer, 0)]).text == " a b c"


NAMING = {
    "openai": {"choices": [{"text": "a", "finish_reason": "length"}]},
    "openai-chat": {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]},
    "openai-responses": {"object": "response", "output": [{"arguments": "a"}]},
    "anthropic": {"type": "message", "content": [{"type": "text", "text": "a"}]},
    "embeddings": {"data": [{"embedding": [0.5]}]},
    "lmi": {"generated_text": "a", "details": {"generated_tokens": 1}},
    "tgi": {"generated_text": "a", "details": {"generated_tokens": 1}},
}


def _answer_of(protocol, model, signals, adapter=None):
    body = json.dumps(NAMING[protocol] | {"model": model}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    received = Received([(1, None, answer, 0)], 200, 0, sent_ns=0, adapter=adapter)
    decode_answer(find_format(protocol), received, kernel_time=None, signals=signals, stream=False)


@pytest.mark.parametrize("protocol", NAMING)
def test_a_model_that_changes_in_mid_run_is_seen_where_answers_name_it(protocol):
    signals = ReceiveSignals()
    for model in ("m", None, "", 7, "m", "m-int4", "m"):
        _answer_of(protocol, model, signals)
    said = "" if protocol in ("lmi", "tgi") else "'m-int4', the run's first of 'm'"
    assert signals.other_model == said


def test_each_adapter_has_a_name_of_its_own_and_workers_compare_theirs():
    first, second, third = ReceiveSignals(), ReceiveSignals(), ReceiveSignals()
    for signals, adapter, model in ((first, None, "m"), (first, "a", "a"), (second, "b", "b"), (third, "a", "other")):
        _answer_of("openai", model, signals, adapter)
    assert (first + second).other_model == ""
    assert (first + second + third).other_model == "'other', the run's first of 'a'"


_DEEP = b"[" * 1000 + b"]" * 1000
_HOSTILE = (_DEEP, b"[{}]", b"{}", b"-1", b"1e308", b"true", b"123456789012345678901", b'"\\u0000"')
_CHOICE = {"index": 0, "text": "a", "delta": {"content": "a"}, "finish_reason": "stop"}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "input_tokens": 1, "output_tokens": 1}
_TOKEN = {"id": 1, "text": "a", "special": False, "error_msg": None}
_DETAILS = {"finish_reason": "length", "generated_tokens": 1, "input_length": 1}
_ERROR = {"message": "m", "type": "t", "code": 500}
_REPLIES = (
    {"choices": [_CHOICE], "usage": _USAGE, "metrics": {"queue_time_ms": 1}, "model": "m"},
    {"choices": [_CHOICE | {"message": {"content": "a", "tool_calls": [{"function": {}}]}}]},
    {"index": 0, "token": _TOKEN, "details": _DETAILS, "generated_text": "a"},
    {"generated_text": "a", "details": _DETAILS | {"tokens": [_TOKEN], "prefill": []}},
    {"type": "message_start", "message": {"usage": _USAGE, "model": "m", "content": []}},
    {"type": "message", "content": [{"type": "text", "text": "a"}], "usage": _USAGE},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
    {"type": "response.completed", "response": {"usage": _USAGE, "status": "completed"}},
    {"type": "response.failed", "response": {"error": _ERROR}},
    {"object": "response", "output": [{"type": "message", "content": [{"text": "a"}]}]},
    {"data": [{"embedding": [0.5]}], "usage": _USAGE},
    {"error": _ERROR, "error_type": "overloaded", "code": 1},
    {"ErrorCode": "e", "Message": "m", "OriginalStatusCode": 429, "OriginalMessage": "m"},
    {"__type": "ModelError", "OriginalStatusCode": 0, "Message": "m"},
)


def _with_one_replaced(value):
    """The value as often as it has parts, each time with a mark in place of another one."""
    yield "@"
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        for replaced in _with_one_replaced(inner):
            copy = value.copy()
            copy[key] = replaced
            yield copy


@pytest.mark.parametrize("name", [*FORMAT_NAMES, "sagemaker"])
@pytest.mark.parametrize("status", [200, 424])
@pytest.mark.parametrize("stream", [True, False])
def test_nothing_that_a_reply_holds_ends_more_than_its_request(name, status, stream):
    """Every part of every reply, in turn, is what nobody expects there."""
    form = SageMakerFormat(find_format("lmi")) if name == "sagemaker" else find_format(name)
    if name == "sagemaker":  # of whose frames each failure is one
        form.new_splitter = lambda: _Failures()
    for reply in _REPLIES:
        for damaged in _with_one_replaced(reply):
            for hostile in _HOSTILE:
                body = b"data: " * stream + json.dumps(damaged).encode().replace(b'"@"', hostile)
                head = b"HTTP/1.1 %d .\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
                received = Received([(1, None, head + body, 0)], status, 0, sent_ns=0)
                with contextlib.suppress(TargetError):
                    decode_answer(form, received, kernel_time=None, signals=ReceiveSignals(), stream=stream)


class _Failures:
    def feed(self, data):
        return [StreamFailure("code", data.removeprefix(b"data: "))]

    def close(self):
        return []
