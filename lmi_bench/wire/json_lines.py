"""JSON lines: one object a line, the framing of LMI streams.

The buffer holds bytes, so that a character cut in two by a read is whole again before anything
decodes it. Blank lines carry nothing (LMI's async mode ends with some), and a last line without
its newline counts.
"""

from __future__ import annotations

from lmi_bench.core.errors import TargetError
from lmi_bench.core.units import MIB

MAX_LINE_BYTES = 16 * MIB


class JsonLinesSplitter:
    """Yields each line that is not blank, without its newline and outer white space."""

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._unfinished = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that these bytes completed.

        Raises TargetError("malformed_frame") if one line exceeds the bound.
        """
        if not self._unfinished and data.endswith(b"\n") and data.count(b"\n") == 1:
            line = data.strip()  # a read of one line, as nearly every read is
            return [line] if line else []
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > self._max_line_bytes:
            raise TargetError(
                "malformed_frame",
                f"a line of the stream is longer than {self._max_line_bytes:,} bytes",
            )
        return [line for line in map(bytes.strip, lines) if line]

    def close(self) -> list[bytes]:
        """The last line, if no newline ended it."""
        line, self._unfinished = self._unfinished.strip(), b""
        return [line] if line else []
