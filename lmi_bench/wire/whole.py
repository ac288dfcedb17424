"""No framing: the whole body is one payload, whatever its content type says."""

from __future__ import annotations

from lmi_bench.errors import TargetError
from lmi_bench.units import MIB

MAX_BODY_BYTES = 64 * MIB


class WholeSplitter:
    """Yields the body when it has ended."""

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._body = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Nothing yet. Raises TargetError("malformed_frame") if the body exceeds the bound."""
        self._body += data
        if len(self._body) > self._max_body_bytes:
            raise TargetError(
                "malformed_frame", f"the answer is longer than {self._max_body_bytes:,} bytes"
            )
        return []

    def close(self) -> list[bytes]:
        """The body, if there is one."""
        body = bytes(self._body)
        self._body.clear()
        return [body] if body.strip() else []
