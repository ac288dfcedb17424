"""What the bytes of a response meant: tokens, times, usage, or why it is no answer.

Works on what was kept while the response came in, when the clock no longer matters.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import httptools

from lmi_bench.errors import TARGET_ERROR_KINDS, TargetError, TargetErrorKind
from lmi_bench.records import Exchange
from lmi_bench.wire.event import WireEvent, WireFormat

Read = tuple[int, bytes | None, bytes, int]
"""One read: user time in CLOCK_MONOTONIC ns, the kernel's control message, bytes, and the time
after which they came (0: not known)."""

KernelTime = Callable[[bytes | None, int], int | None]
"""(control message, user ns) to the kernel's CLOCK_MONOTONIC ns, or None where it has none."""

NS_PER_S = 1e9
_FAILED_REASONS = ("error", "abort")


@dataclass(slots=True)
class ReadSignals:
    """What decoding learns about the receiver, over many answers.

    delays_ns       user time - kernel time of each read with tokens, or its upper bound
    tokens, merged  token events in all, and those that shared a read with a later one
    without_stamp   reads with tokens for which the kernel's time was wanted and not to be had
    """

    delays_ns: array[int] = field(default_factory=lambda: array("q"))
    tokens: int = 0
    merged: int = 0
    without_stamp: int = 0


class _Stamp(NamedTuple):
    """When a read's bytes came, by how much it was read late, and whether its stamp is missing."""

    time_s: float
    delay_ns: int
    missing: bool


class _Response:
    """Takes a response apart; called by the C parser."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.headers_complete = False

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code())

    def on_message_begin(self) -> None:
        self.headers = {}
        self.headers_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.headers_complete = True

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def feed(self, data: bytes) -> bytes:
        """The body bytes among `data`."""
        self.parts = []
        self.parser.feed_data(data)
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


def is_close_delimited(reads: Sequence[Read]) -> bool:
    """Whether the response that these reads hold ends with the connection."""
    response = _Response()
    try:
        for _, _, data, _ in reads:
            response.feed(data)
    except httptools.HttpParserError:
        return False
    framed = {b"content-length", b"transfer-encoding"} & response.headers.keys()
    return response.headers_complete and not framed


class _Collector:
    """Events of one answer, with the time of each that holds a token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.counts: list[int] = []
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.error: WireEvent | None = None
        self.reasoning_tokens = 0
        self.first_answer_s: float | None = None
        self.streamed = True
        self.ended = False

    def add(self, event: WireEvent, time_s: float) -> bool:
        """Take an event; whether it held a token."""
        if self.ended:
            return False
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
        if event.input_tokens is not None:
            self.input_tokens = event.input_tokens
        if event.output_tokens is not None:
            self.output_tokens = event.output_tokens
        self.ended = event.end
        if event.error is not None:
            self.error = event
            self.ended = True
            return False
        num_tokens = event.num_tokens
        if num_tokens:
            if event.reasoning:
                self.reasoning_tokens += num_tokens
            elif self.reasoning_tokens and self.first_answer_s is None:
                self.first_answer_s = time_s
            self.times_s.append(time_s)
            self.counts.append(num_tokens)
            self.texts.append(event.text)
        return num_tokens > 0


def decode_answer(
    wire_format: WireFormat,
    reads: Sequence[Read],
    *,
    sent_ns: int,
    connect_s: float | None,
    kernel_time: KernelTime | None,
    signals: ReadSignals,
    stream: bool = True,
    whole: bool = True,
) -> Exchange:
    """The exchange of a response.

    kernel_time  None: the reads' user times count
    stream       False: the answer was asked for whole
    whole        False: the response broke off; what came is returned, and nothing is judged

    Raises TargetError, with what had come, where the response is not a full answer.
    """
    response, collector = _Response(), _Collector()
    stamps = [_stamp(read, kernel_time) for read in reads]
    ended_s = stamps[-1].time_s if stamps else None

    def exchange() -> Exchange:
        return Exchange(
            sent_s=sent_ns / NS_PER_S,
            token_times_s=tuple(collector.times_s),
            token_counts=tuple(collector.counts),
            text="".join(collector.texts),
            finish_reason=collector.finish_reason,
            input_tokens=collector.input_tokens,
            output_tokens=collector.output_tokens,
            ended_s=ended_s,
            connect_s=connect_s,
            first_answer_s=collector.first_answer_s,
            reasoning_tokens=collector.reasoning_tokens,
            streamed=collector.streamed,
        )

    try:
        bodies = [response.feed(read[2]) for read in reads]
        if response.headers_complete and not 200 <= response.status < 300:
            raise wire_format.error(response.status, b"".join(bodies), response.headers)
        collector.streamed = stream
        if not stream:
            if whole:
                collector.add(wire_format.parse(b"".join(bodies)), ended_s or 0.0)
                collector.ended = True
        elif not _collect_document(wire_format, response, b"".join(bodies), collector, ended_s):
            _collect_stream(wire_format, bodies, stamps, collector, signals)
        if whole:
            _judge(collector)
    except TargetError as exc:
        if exc.exchange is None:
            exc.exchange = exchange()
        if whole:
            raise
    except httptools.HttpParserError as exc:
        if whole:
            raise TargetError(
                "malformed_frame", f"not an HTTP/1.1 response: {exc}", exchange=exchange()
            ) from exc
    return exchange()


def _collect_document(
    wire_format: WireFormat,
    response: _Response,
    body: bytes,
    collector: _Collector,
    time_s: float | None,
) -> bool:
    """Read an answer of one JSON document, all tokens at its end; whether it was one.

    Servers that cannot stream send it whatever was asked for. Lines under its content type are
    left to be read as lines.
    """
    kind = response.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" or time_s is None:
        return False
    try:
        event = wire_format.parse(body)
    except TargetError:
        return False
    collector.add(event, time_s)
    collector.streamed = False
    collector.ended = True
    return True


def _collect_stream(
    wire_format: WireFormat,
    bodies: Sequence[bytes],
    stamps: Sequence[_Stamp],
    collector: _Collector,
    signals: ReadSignals,
) -> None:
    splitter = wire_format.new_splitter()
    for body, stamp in zip(bodies, stamps, strict=True):
        if not body:
            continue
        here = 0
        for payload in splitter.feed(body):
            here += collector.add(wire_format.parse(payload), stamp.time_s)
        if here:
            signals.tokens += here
            signals.merged += here - 1
            signals.delays_ns.append(stamp.delay_ns)
            signals.without_stamp += stamp.missing
    if stamps:
        for payload in splitter.close():
            collector.add(wire_format.parse(payload), stamps[-1].time_s)


def _stamp(read: Read, kernel_time: KernelTime | None) -> _Stamp:
    user_ns, control, _, bound_ns = read
    stamp_ns = None if kernel_time is None else kernel_time(control, user_ns)
    if stamp_ns is not None:
        return _Stamp(stamp_ns / NS_PER_S, user_ns - stamp_ns, False)
    return _Stamp(
        user_ns / NS_PER_S, user_ns - bound_ns if bound_ns else 0, kernel_time is not None
    )


def _judge(collector: _Collector) -> None:
    """Raise TargetError unless the events are a full answer."""
    error = collector.error
    if error is not None:
        kind = error.error_kind if error.error_kind in TARGET_ERROR_KINDS else "server_error"
        raise TargetError(cast("TargetErrorKind", kind), f"in the stream: {error.error}")
    if collector.finish_reason in _FAILED_REASONS:
        raise TargetError(
            "server_error", f"the server ended the answer with {collector.finish_reason!r}"
        )
    if not collector.ended and collector.finish_reason is None:
        raise TargetError(
            "broken_stream",
            f"the answer stopped after {sum(collector.counts)} tokens without its last event",
        )
    if not collector.counts:
        raise TargetError("short_output", "the answer holds no token")
