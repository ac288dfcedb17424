"""JSON lines or server-sent events, told apart by how the stream begins.

One container sends either, as its settings say (`output_formatter`, an OpenAI body on
`/invocations`), and SageMaker passes on whatever it sends.
"""

from __future__ import annotations

from lmi_bench.wire.event import Splitter
from lmi_bench.wire.json_lines import JsonLinesSplitter
from lmi_bench.wire.sse import SseSplitter

_BLANK = b" \t\r\n"
_EVENT_BEGINS = (b":", b"d", b"e", b"i", b"r", b"\xef")
"""First byte of a comment, of the fields data, event, id and retry, or of a byte order mark."""


class EitherSplitter:
    """Hands everything to one of the two framings, chosen by the first byte that is not blank."""

    def __init__(self) -> None:
        self._chosen: Splitter | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that these bytes completed."""
        if self._chosen is None:
            data = data.lstrip(_BLANK)
            if not data:
                return []
            events = data.startswith(_EVENT_BEGINS)
            self._chosen = SseSplitter() if events else JsonLinesSplitter()
        return self._chosen.feed(data)

    def close(self) -> list[bytes]:
        """What the end of the stream completes."""
        return [] if self._chosen is None else self._chosen.close()
