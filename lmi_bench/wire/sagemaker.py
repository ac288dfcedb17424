"""SageMaker's runtime: a container's protocol in other frames, and with other errors.

InvokeEndpoint returns the container's response; InvokeEndpointWithResponseStream wraps it in an
AWS event stream:

    total length u32, headers length u32, CRC-32 of these 8 bytes, headers, payload, CRC-32 of all
    before it; big-endian; a header: name length u8, name, 7 (a string), value length u16, value

botocore decodes it. Frames, reads and the container's own lines do not align: the payload parts
are joined and split again by the container's framing. An exception frame is not part of the
container's response; it becomes a `StreamFailure`.

A container's error reaches the client as ModelError, status 424, with the cause in
OriginalStatusCode: 429 and 503 are the container's own, 0 is an invocation timeout. Throttling by
SageMaker itself is status 400. Source of the errors: botocore's sagemaker-runtime model.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import Any

from lmi_bench.core.errors import TargetError, TargetErrorKind
from lmi_bench.wire.event import NO_HEADERS, Splitter, WireEvent, WireFormat
from lmi_bench.wire.framing import EitherSplitter
from lmi_bench.wire.json_format import DONE, describe_status, error_kinds, load_object, status_kind

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_STRING = 7
_ERROR_TYPE = b"x-amzn-errortype"
_KINDS: Mapping[str, TargetErrorKind] = error_kinds("sagemaker")


class StreamFailure(bytes):
    """The payload of the frame that ends a stream early; `code` names the exception."""

    code: str

    def __new__(cls, code: str, payload: bytes) -> "StreamFailure":
        failure = super().__new__(cls, payload)
        failure.code = code
        return failure


class Unfinished(bytes):
    """What an early end left of an event: all but its line's end, or less, which says nothing."""


class EventStreamSplitter:
    """Yields the container's own payloads, and a StreamFailure if SageMaker ends the stream.

    inner  the container's framing, inside the payload parts
    """

    def __init__(self, inner: Splitter) -> None:
        from botocore.eventstream import EventStreamBuffer  # 0.1 s to load

        self._buffer: Any = EventStreamBuffer()
        self._inner = inner
        self._unread_bytes = 0
        self._failure: TargetError | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by these bytes. Raises TargetError("malformed_frame") for a wrong
        length or CRC, after the payloads before it have been returned."""
        from botocore.eventstream import ParserError

        self._raise_failure()
        payloads: list[bytes] = []
        self._buffer.add_data(data)
        self._unread_bytes += len(data)
        try:
            for message in self._buffer:
                self._unread_bytes -= message.prelude.total_length
                payloads += self._take(message)
        except TargetError as exc:
            self._failure = exc
        except (ParserError, ValueError, LookupError, struct.error) as exc:
            self._failure = TargetError("malformed_frame", f"not an AWS event-stream frame: {exc}")
        if not payloads:
            self._raise_failure()
        return payloads

    def close(self) -> list[bytes]:
        """Payloads completed by the end; raises TargetError("broken_stream") within a frame."""
        self._raise_failure()
        if self._unread_bytes:
            raise TargetError(
                "broken_stream", f"the stream ended {self._unread_bytes} bytes into an event-stream frame"
            )
        return self._inner.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take(self, message: Any) -> list[bytes]:
        headers, payload = message.headers, message.payload
        kind = headers.get(":message-type")
        if kind == "event":
            is_part = headers.get(":event-type") == "PayloadPart"
            return self._inner.feed(payload) if is_part else []
        unfinished = map(Unfinished, self._inner.close())
        if kind == "exception":
            return [*unfinished, StreamFailure(str(headers.get(":exception-type")), payload)]
        message_text = str(headers.get(":error-message", "")).encode()
        return [*unfinished, StreamFailure(str(headers.get(":error-code", "error")), message_text)]


def payload_part(data: bytes) -> bytes:
    """A frame that carries part of the container's response."""
    headers = {":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
    return encode_frame({**headers, ":message-type": "event"}, data)


def encode_frame(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Encode one frame; every header is a string."""
    block = b""
    for name, value in headers.items():
        raw_name, raw_value = name.encode(), value.encode()
        sizes = struct.pack("!BH", _STRING, len(raw_value))
        block += bytes([len(raw_name)]) + raw_name + sizes + raw_value
    prelude = struct.pack("!II", len(block) + len(payload) + 16, len(block))
    frame = prelude + struct.pack("!I", zlib.crc32(prelude)) + block + payload
    return frame + struct.pack("!I", zlib.crc32(frame))


class SageMakerFormat:
    """The container's protocol inside InvokeEndpoint, with or without a response stream."""

    def __init__(self, container: WireFormat) -> None:
        self.container = container
        self.name, self.request_body = container.name, container.request_body
        self.path = "/"  # unused: the operation's path contains the endpoint's name

    def new_splitter(self) -> Splitter:
        return EventStreamSplitter(EitherSplitter())

    def parse(self, payload: bytes) -> WireEvent:
        """Read a container payload, or SageMaker's reason for ending the stream."""
        if isinstance(payload, Unfinished) and load_object(bytes(payload)) is None and payload != DONE:
            return WireEvent()  # torn: the failure behind it says why
        if not isinstance(payload, StreamFailure):
            return self.container.parse(bytes(payload))
        detail = load_object(bytes(payload)) or {}  # orjson rejects subclasses of bytes
        code = str(detail.get("ErrorCode") or payload.code)
        message = detail.get("Message") or detail.get("message") or payload.decode(errors="replace")
        kind = _KINDS.get(code, _KINDS.get(payload.code, "server_error"))
        return WireEvent(error=f"{code}: {message}"[:500], error_kind=kind, end=True)

    def plain_text(self, payload: bytes) -> str | None:
        return None if isinstance(payload, StreamFailure | Unfinished) else self.container.plain_text(payload)

    def error(self, status: int, body: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS) -> TargetError:
        """The category of a failed request: by the error's name and the container's status."""
        reply = load_object(body) or {}
        stated = headers.get(_ERROR_TYPE, b"").decode("latin-1")
        stated = stated or str(reply.get("__type") or reply.get("code") or "")
        name = stated.split(":")[0].rsplit("#", 1)[-1]  # no URI behind it, no name space before it
        if name == "ModelError":
            return self._model_error(status, body, reply)
        kind = _KINDS.get(name, status_kind(status))
        described = describe_status(status, body)
        return TargetError(kind, f"{name}: {described}" if name else described)

    def _model_error(self, status: int, body: bytes, reply: dict[str, Any]) -> TargetError:
        original = reply.get("OriginalStatusCode")
        if not isinstance(original, int):
            return TargetError("server_error", f"ModelError: {describe_status(status, body)}")
        if original == 0:
            message = str(reply.get("Message") or reply.get("message") or "no answer in time")[:500]
            return TargetError("timeout", f"ModelError, the invocation timed out: {message}")
        cause = self.container.error(original, str(reply.get("OriginalMessage") or "").encode())
        return TargetError(cause.kind, f"ModelError, the container answered {cause}")
