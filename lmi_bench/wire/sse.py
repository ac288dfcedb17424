"""Server-sent events: the framing of OpenAI streams.

Source: the WHATWG HTML standard, section 9.2 (server-sent events). One deviation: an event without
its closing blank line at the end of the stream is returned, not dropped, since some servers omit
that line; the parser rejects it if its object is incomplete.
"""

from __future__ import annotations

from lmi_bench.core.errors import TargetError
from lmi_bench.core.units import MIB

MAX_EVENT_BYTES = 16 * MIB
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseSplitter:
    """Yields the data of each event; ignores comments and the fields event, id and retry.

    Lines end with LF, CR LF or CR; one space after the colon is part of the framing; several data
    lines of one event are joined by LF.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._unfinished = b""
        self._skip_line_feed = False
        self._first_line = True
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events completed by these bytes.

        Raises TargetError("malformed_frame") if an event exceeds `max_event_bytes`.
        """
        if self._skip_line_feed and data:  # a CR ended the last read: its LF may follow now
            self._skip_line_feed = False
            data = data.removeprefix(b"\n")
        if not data:
            return []
        if (payload := self._only_event(data)) is not None:
            return [payload]
        lines = (self._unfinished + data).splitlines(keepends=True)
        self._skip_line_feed = data.endswith(b"\r")
        self._unfinished = b"" if data.endswith((b"\n", b"\r")) else lines.pop()
        payloads: list[bytes] = []
        for line in lines:
            self._take_line(line.rstrip(b"\r\n"), payloads)
        if len(self._unfinished) + self._data_bytes > self._max_event_bytes:
            raise TargetError(
                "malformed_frame",
                f"an event of the stream is longer than {self._max_event_bytes:,} bytes",
            )
        return payloads

    def close(self) -> list[bytes]:
        """The data of an event without its closing blank line."""
        payloads: list[bytes] = []
        if self._unfinished:
            self._take_line(self._unfinished, payloads)
            self._unfinished = b""
        self._take_line(b"", payloads)
        return payloads

    def _only_event(self, data: bytes) -> bytes | None:
        """Fast path: the data of a read that is exactly one plain event, as nearly all are."""
        if (
            data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.count(b"\n") == 2
            and b"\r" not in data
            and not self._unfinished
            and not self._data
            and 8 < len(data) <= self._max_event_bytes
        ):
            self._first_line = False
            return data[6:-2]
        return None

    def _take_line(self, line: bytes, payloads: list[bytes]) -> None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if self._data:
                payloads.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._data_bytes = 0
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._data_bytes += len(value)
