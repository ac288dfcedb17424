"""The framings of response streams: JSON lines, server-sent events, and either by its first byte.

Buffers hold bytes, so that a character split across two reads is complete before it is decoded.
Server-sent events follow the WHATWG HTML standard, section 9.2, with one deviation: an event
without its closing blank line at the end of the stream is returned, not dropped, since some servers
omit that line; the parser rejects it if its object is incomplete.
"""

from lmi_bench.core.errors import TargetError
from lmi_bench.core.units import MIB
from lmi_bench.wire.event import Splitter

MAX_PAYLOAD_BYTES = 16 * MIB
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_EVENT_BEGINS = (b":", b"d", b"e", b"i", b"r", b"\xef")
"""First byte of a comment, of the fields data, event, id and retry, or of a byte order mark."""


class JsonLinesSplitter:
    """Yields each non-blank line without its newline and surrounding white space. LMI's async mode
    ends with blank lines; the last line needs no newline."""

    _unfinished = b""

    def feed(self, data: bytes) -> list[bytes]:
        if not self._unfinished and data.endswith(b"\n") and data.count(b"\n") == 1:
            line = data.strip()  # fast path: nearly every read is exactly one line
            return [line] if line else []
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > MAX_PAYLOAD_BYTES:
            raise _too_long("a line")
        return [line for line in map(bytes.strip, lines) if line]

    def close(self) -> list[bytes]:
        """The last line, if it has no newline."""
        return self.feed(b"\n")


class SseSplitter:
    """Yields the data of each event; ignores comments and the fields event, id and retry.

    Lines end with LF, CR LF or CR; one space after the colon is part of the framing; several data
    lines of one event are joined by LF.
    """

    def __init__(self) -> None:
        self._unfinished = b""
        self._skip_line_feed = False
        self._first_line = True
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
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
        if len(self._unfinished) + self._data_bytes > MAX_PAYLOAD_BYTES:
            raise _too_long("an event")
        return payloads

    def close(self) -> list[bytes]:
        """The data of an event without its closing blank line."""
        return self.feed(b"\n\n")

    def _only_event(self, data: bytes) -> bytes | None:
        """Fast path: the data of a read that is exactly one plain event, as nearly all are."""
        if (
            data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.count(b"\n") == 2
            and b"\r" not in data
            and not self._unfinished
            and not self._data
            and 8 < len(data) <= MAX_PAYLOAD_BYTES
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


class EitherSplitter:
    """Passes all data to one of the two splitters, chosen by the first non-blank byte.

    A container's settings decide which framing it sends (`output_formatter`, an OpenAI body on
    `/invocations`), and SageMaker passes it on.
    """

    def __init__(self) -> None:
        self._chosen: Splitter | None = None

    def feed(self, data: bytes) -> list[bytes]:
        if self._chosen is None:
            data = data.lstrip(_BLANK)
            if not data:
                return []
            events = data.startswith(_EVENT_BEGINS)
            self._chosen = SseSplitter() if events else JsonLinesSplitter()
        return self._chosen.feed(data)

    def close(self) -> list[bytes]:
        return [] if self._chosen is None else self._chosen.close()


def _too_long(what: str) -> TargetError:
    text = f"{what} of the stream is longer than {MAX_PAYLOAD_BYTES:,} bytes"
    return TargetError("malformed_frame", text)
