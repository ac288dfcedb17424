"""Reads a stream as JSON lines or server-sent events, detected from its first byte.

A container's settings decide which it sends (`output_formatter`, an OpenAI body on
`/invocations`), and SageMaker passes it on.
"""

from __future__ import annotations

from lmi_bench.wire.event import Splitter
from lmi_bench.wire.json_lines import JsonLinesSplitter
from lmi_bench.wire.sse import SseSplitter

_BLANK = b" \t\r\n"
_EVENT_BEGINS = (b":", b"d", b"e", b"i", b"r", b"\xef")
"""First byte of a comment, of the fields data, event, id and retry, or of a byte order mark."""


class EitherSplitter:
    """Passes all data to one of the two splitters, chosen by the first non-blank byte."""

    def __init__(self) -> None:
        self._chosen: Splitter | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by these bytes."""
        if self._chosen is None:
            data = data.lstrip(_BLANK)
            if not data:
                return []
            events = data.startswith(_EVENT_BEGINS)
            self._chosen = SseSplitter() if events else JsonLinesSplitter()
        return self._chosen.feed(data)

    def close(self) -> list[bytes]:
        """Payloads completed by the end of the stream."""
        return [] if self._chosen is None else self._chosen.close()
