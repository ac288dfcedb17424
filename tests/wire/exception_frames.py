"""Frames that end an event stream with an exception."""

from __future__ import annotations

from lmi_bench.wire.sagemaker import encode_frame


def stream_exception(kind: str, payload: bytes) -> bytes:
    """The frame that ends a stream with an exception, such as ModelStreamError."""
    return encode_frame(
        {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}, payload
    )
