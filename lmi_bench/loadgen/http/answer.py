"""What the bytes of a response mean: tokens, times, usage, or why it is no answer.

Works on the kept reads after the response has ended, when the time it takes no longer matters.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools

from lmi_bench.core.errors import TARGET_ERROR_KINDS, TargetError, TargetErrorKind
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.units import MS_PER_S
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.wire.event import WireEvent, WireFormat
from lmi_bench.wire.json_format import clip

Read = tuple[int, bytes | None, bytes, int]
"""One read: user time in CLOCK_MONOTONIC ns, the kernel's control message, bytes, and the time
after which they came (0: not known)."""

KernelTime = Callable[[bytes | None, int], int | None]
"""(control message, user ns) to the kernel's CLOCK_MONOTONIC ns, or None without one."""

NS_PER_S = 1e9
_Stamp = tuple[float, float, float, bool]
"""When a read's bytes came; by how much that may be too late; by how much the read was late, or a
bound of it; whether the kernel's time was requested and is missing. Seconds."""
_PROXY_WANTS_USER, _GATEWAYS, _NO_SUCH_PATH = 407, (502, 503, 504), (404, 405, 501)
_FAILED_REASONS: Mapping[str, TargetErrorKind] = {
    "error": "server_error",
    "abort": "cancelled",
    "cancelled": "cancelled",
}
_STATED: Final = ("finish_reason", "input_tokens", "output_tokens", "cached_tokens")
"""Fields of an event of which the last value counts for the answer."""


@dataclass(frozen=True, slots=True)
class Received:
    """The reads of a response, and what is known of its request.

    sent_by_ns  when the request had left for certain; 0: with `sent_ns`
    connect_s   time to open its connection, if one was opened; tls_s: of the handshake alone
    held_s      wait for a connection before it was sent
    """

    reads: Sequence[Read]
    status: int
    num_bytes: int
    sent_ns: int
    sent_by_ns: int = 0
    connect_s: float | None = None
    tls_s: float | None = None
    held_s: float = 0.0
    adapter: str | None = None

    @property
    def looks_failed(self) -> bool:
        """Whether it should be decoded at once, because it may be a failure.

        An error under status 200 comes as one of the last events.
        """
        if self.status >= 300:
            return True
        return any(b"rror" in read[2] or b"xception" in read[2] for read in self.reads[-2:])


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
        """The body bytes among `data`. Raises TargetError if it is no HTTP/1.1 response."""
        self.parts = []
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            raise TargetError("malformed_frame", f"not an HTTP/1.1 response: {exc}") from exc
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


def said_by(proxy: str, status: int, headers: Mapping[bytes, bytes]) -> str:
    """Whose words an answer is that came through a forwarding proxy; empty: the server's.

    headers  named in small letters. `Via` tells nothing: it is in answers of both
    """
    if status == _PROXY_WANTS_USER:
        return f"the environment's proxy {proxy} itself (HTTP_PROXY gives it user and password): "
    if {b"proxy-authenticate", b"x-squid-error"} & headers.keys():
        return f"the environment's proxy {proxy} itself: "
    is_page = status >= 400 and headers.get(b"content-type", b"").startswith(b"text/html")
    if status in _GATEWAYS or (is_page and status not in _NO_SUCH_PATH):
        return f"the environment's proxy {proxy} or what is behind it: "
    return ""


def is_close_delimited(reads: Sequence[Read]) -> bool:
    """Whether the response that these reads hold ends with the connection."""
    response = _Response()
    try:
        for _, _, data, _ in reads:
            response.feed(data)
    except TargetError:
        return False
    framed = {b"content-length", b"transfer-encoding"} & response.headers.keys()
    return response.headers_complete and not framed


@dataclass(slots=True)
class _Collector:
    """Events of one answer, with the time of each that holds a token.

    late_s  by how much each of these times may be too late, at most; inf: not known
    stated  what the server said of the whole answer, as fields of an Exchange
    """

    times_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stated: dict[str, Any] = field(default_factory=dict)
    error: WireEvent | None = None
    model: str | None = None
    reasoning_tokens: int = 0
    stated_reasoning: int = 0
    thought_chars: int = 0
    answered: bool = False
    first_answer_s: float | None = None
    streamed: bool = True
    tokenless: bool = False
    ended: bool = False

    def add(self, event: WireEvent, time_s: float, late_s: float) -> None:
        """Take an event; nothing counts after the last one."""
        if self.ended:
            return
        for name in _STATED:
            if (value := getattr(event, name)) is not None:
                self.stated[name] = value
        if event.queue_ms is not None and event.prefill_ms is not None:
            self.stated["queue_s"] = event.queue_ms / MS_PER_S
            self.stated["prefill_s"] = event.prefill_ms / MS_PER_S
        self.stated_reasoning = event.reasoning_tokens or self.stated_reasoning
        self.model = self.model or (event.model if isinstance(event.model, str) else None)
        self.ended, self.tokenless = event.end, event.tokenless
        if event.error is not None:
            self.error = event
            self.ended = True
            return
        if num_tokens := event.num_tokens:
            self._add_tokens(num_tokens, event.text, time_s, late_s, event.reasoning)

    def count_hidden(self) -> None:
        """Count reasoning that the server has counted and not shown: it came before the answer."""
        hidden, whole = self.stated_reasoning, self.stated.get("output_tokens") or 0
        if hidden and self.counts and not self.reasoning_tokens and sum(self.counts) + hidden <= whole:
            self.reasoning_tokens, self.first_answer_s = hidden, self.times_s[0]
            self.counts[0] += hidden

    def add_plain(self, text: str, time_s: float, late_s: float) -> None:
        """Take one token of the answer proper that says nothing else."""
        if not self.ended:
            self._add_tokens(1, text, time_s, late_s, False)

    def _add_tokens(self, num_tokens: int, text: str, time_s: float, late_s: float, reasoning: bool) -> None:
        if not reasoning:
            self.answered = True
            if self.reasoning_tokens and self.first_answer_s is None:
                self.first_answer_s = time_s
        else:
            self.reasoning_tokens += num_tokens
            if not self.answered:  # later reasoning stays in the text
                self.thought_chars += len(text)
        self.times_s.append(time_s)
        self.late_s.append(late_s)
        self.counts.append(num_tokens)
        self.texts.append(text)


def decode_answer(
    wire_format: WireFormat,
    received: Received,
    *,
    kernel_time: KernelTime | None,
    signals: ReceiveSignals,
    clock_bound_ns: int = 0,
    stream: bool = True,
    whole: bool = True,
    proxy: str | None = None,
) -> Exchange:
    """The exchange of a response.

    kernel_time     None: the reads' user times count
    clock_bound_ns  by how much a kernel time may be off
    stream          False: the answer was requested in one piece
    whole           False: the response broke off; what came is returned, and nothing is judged
    proxy           name of the one that forwarded the request, and may have answered itself

    Raises TargetError, with what had arrived, if the response is not a complete answer.
    """
    response, collector = _Response(), _Collector()
    reads = list(received.reads)
    stamps = _stamps(reads, kernel_time, clock_bound_ns)
    ended_s = stamps[-1][0] if stamps else None
    sending_s = max(0, received.sent_by_ns - received.sent_ns) / NS_PER_S

    def exchange() -> Exchange:
        return Exchange(
            sent_s=received.sent_ns / NS_PER_S,
            token_times_s=tuple(collector.times_s),
            token_counts=tuple(collector.counts),
            text="".join(collector.texts),
            ended_s=ended_s,
            connect_s=received.connect_s,
            tls_s=received.tls_s,
            ttft_bound_s=sending_s + collector.late_s[0] if collector.late_s else None,
            first_answer_s=collector.first_answer_s,
            reasoning_tokens=collector.reasoning_tokens,
            streamed=collector.streamed,
            held_s=received.held_s,
            thought_chars=collector.thought_chars,
            adapter=received.adapter,
            **collector.stated,
        )

    try:
        bodies = [response.feed(read[2]) for read in reads]
        body = b"".join(bodies)
        if encoding := _unasked_encoding(response.headers):
            body = encoding.encode()
        if response.headers_complete and not 200 <= response.status < 300:
            error = wire_format.error(response.status, body, response.headers)
            by = said_by(proxy, response.status, response.headers) if proxy else ""
            raise TargetError(error.kind, f"{by}{error}")
        if encoding:
            raise TargetError("malformed_frame", encoding)
        content_type = response.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type == b"text/html":
            why = f"a web page came instead of an answer: is the address right? {clip(body)}"
            raise TargetError("malformed_frame", why)
        collector.streamed = stream
        if stream:
            document = _document_in_place_of_stream(wire_format, content_type, body)
        else:
            document = wire_format.parse(body) if whole and reads else None
        if document is not None:
            collector.add(document, *stamps[-1][:2])
            collector.streamed, collector.ended = False, True
        elif stream:
            _collect_stream(wire_format, bodies, reads, stamps, collector, signals)
            collector.count_hidden()
        if whole:
            signals.saw_model(received.adapter or "", collector.model)
            _judge(collector)
            signals.add_answer(collector.times_s, collector.late_s)
    except TargetError as exc:
        if exc.exchange is None:
            exc.exchange = exchange()
        if whole:
            raise
    except Exception as exc:  # nothing that a server sends may end a sweep
        if whole:
            why = f"the answer cannot be read: {type(exc).__name__}"
            raise TargetError("malformed_frame", why, exchange=exchange()) from exc
    return exchange()


def _unasked_encoding(headers: Mapping[bytes, bytes]) -> str:
    """What hides a response's bytes; empty: nothing."""
    name = headers.get(b"content-encoding", b"identity")[:40].decode("latin-1").strip().lower()
    return "" if name in ("", "identity") else f"content-encoding {name}, which was not asked for"


def _document_in_place_of_stream(wire_format: WireFormat, content_type: bytes, body: bytes) -> WireEvent | None:
    """An answer of one JSON document, which servers that cannot stream send all the same.

    Lines of JSON under its content type are left to the stream's reader.
    """
    if content_type == b"application/json":
        with contextlib.suppress(TargetError):
            return wire_format.parse(body)
    return None


def _collect_stream(
    wire_format: WireFormat,
    bodies: Sequence[bytes],
    reads: Sequence[Read],
    stamps: Sequence[_Stamp],
    collector: _Collector,
    signals: ReceiveSignals,
) -> None:
    splitter = wire_format.new_splitter()
    plain_text, parse = wire_format.plain_text, wire_format.parse
    late_s, counts = collector.late_s, collector.counts
    for index, body in enumerate(bodies):
        if not body:
            continue
        time_s, bound_s, delay_s, missing = stamps[index]
        before = len(counts)
        for payload in splitter.feed(body):
            text = plain_text(payload)
            if text is not None:
                collector.add_plain(text, time_s, bound_s)
            elif payload.strip():  # an event without data keeps a connection open and says nothing
                collector.add(parse(payload), time_s, bound_s)
        here = len(counts) - before
        if here:
            signals.delays_s.append(delay_s)
            signals.without_stamp += missing
            if here > 1:  # all but the last may have come earlier, yet not before the last harvest
                since_s = max(reads[index][3] / NS_PER_S, stamps[index - 1][0] if index else 0.0)
                early_s = bound_s + max(0.0, time_s - since_s) if since_s else math.inf
                late_s[before:-1] = [early_s] * (here - 1)
                signals.merged += here - 1
    for payload in splitter.close():
        if payload.strip():
            collector.add(parse(payload), *stamps[-1][:2])


def _stamps(reads: Sequence[Read], kernel_time: KernelTime | None, clock_bound_ns: int) -> list[_Stamp]:
    clock_bound_s = clock_bound_ns / NS_PER_S
    found: list[_Stamp] = []
    for user_ns, control, _, bound_ns in reads:
        if kernel_time is not None:
            stamp_ns = kernel_time(control, user_ns)
            if stamp_ns is not None:
                delay_s = (user_ns - stamp_ns) / NS_PER_S
                found.append((stamp_ns / NS_PER_S, clock_bound_s, delay_s, False))
                continue
        late_s = (user_ns - bound_ns) / NS_PER_S if bound_ns else math.inf
        found.append((user_ns / NS_PER_S, late_s, late_s, kernel_time is not None))
    return found


def _judge(collector: _Collector) -> None:
    """Raise TargetError unless the events are a full answer."""
    error = collector.error
    if error is not None:
        kind = error.error_kind if error.error_kind in TARGET_ERROR_KINDS else "server_error"
        raise TargetError(cast("TargetErrorKind", kind), f"in the stream: {error.error}")
    finish_reason = collector.stated.get("finish_reason")
    failed = _FAILED_REASONS.get(finish_reason or "")
    if failed is not None:
        raise TargetError(failed, f"the server ended the answer with {finish_reason!r}")
    if not collector.ended and finish_reason is None:
        why = f"the answer stopped after {sum(collector.counts)} tokens without its last event"
        raise TargetError("broken_stream", why)
    if not collector.counts and not collector.tokenless:
        raise TargetError("short_output", "the answer holds no token")
