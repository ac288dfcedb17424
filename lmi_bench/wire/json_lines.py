"""JSON lines: one object per line, the framing of LMI streams.

The buffer holds bytes, so that a character split across two reads is complete before it is
decoded. Blank lines are skipped (LMI's async mode ends with some); a last line needs no newline.
"""

from __future__ import annotations

from lmi_bench.core.errors import TargetError
from lmi_bench.core.units import MIB

MAX_LINE_BYTES = 16 * MIB


class JsonLinesSplitter:
    """Yields each non-blank line without its newline and surrounding white space."""

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._unfinished = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Lines completed by these bytes.

        Raises TargetError("malformed_frame") if a line exceeds `max_line_bytes`.
        """
        if not self._unfinished and data.endswith(b"\n") and data.count(b"\n") == 1:
            line = data.strip()  # fast path: nearly every read is exactly one line
            return [line] if line else []
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > self._max_line_bytes:
            raise TargetError(
                "malformed_frame",
                f"a line of the stream is longer than {self._max_line_bytes:,} bytes",
            )
        return [line for line in map(bytes.strip, lines) if line]

    def close(self) -> list[bytes]:
        """The last line, if it has no newline."""
        line, self._unfinished = self._unfinished.strip(), b""
        return [line] if line else []
