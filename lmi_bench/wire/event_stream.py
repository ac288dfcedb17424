"""AWS event streams: the framing of InvokeEndpointWithResponseStream.

    total length u32, headers length u32, CRC-32 of these 8 bytes, headers, payload, CRC-32 of all
    before it; big-endian; a header: name length u8, name, 7 (a string), value length u16, value

botocore decodes it. Frames, reads and the container's own lines do not align: the payload parts
are joined and split again by the container's framing. An exception frame is not part of the
container's response; it becomes a `StreamFailure`.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import Any

from lmi_bench.core.errors import TargetError
from lmi_bench.wire.event import Splitter

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_STRING = 7


class StreamFailure(bytes):
    """The payload of the frame that ends a stream early; `code` names the exception."""

    code: str

    def __new__(cls, code: str, payload: bytes) -> "StreamFailure":
        failure = super().__new__(cls, payload)
        failure.code = code
        return failure


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
                "broken_stream",
                f"the stream ended {self._unread_bytes} bytes into an event-stream frame",
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
        unfinished = self._inner.close()
        if kind == "exception":
            return [*unfinished, StreamFailure(str(headers.get(":exception-type")), payload)]
        message_text = str(headers.get(":error-message", "")).encode()
        return [*unfinished, StreamFailure(str(headers.get(":error-code", "error")), message_text)]


def payload_part(data: bytes) -> bytes:
    """A frame that carries part of the container's response."""
    return encode_frame(
        {
            ":event-type": "PayloadPart",
            ":content-type": "application/octet-stream",
            ":message-type": "event",
        },
        data,
    )


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
