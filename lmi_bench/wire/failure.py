"""Classifies failed responses: the category of a status, the message in a body."""

from __future__ import annotations

from typing import Any

import orjson

from lmi_bench.core.errors import TargetErrorKind

_MAX_MESSAGE_CHARS, _MAX_PLAIN_CHARS = 500, 200


def status_kind(status: int) -> TargetErrorKind:
    """The category of a non-2xx HTTP status.

    429 is throttling, 503 overload, 499 a request cancelled on the way, any other 4xx a client
    error and the rest server errors; so is 424, which LMI and SageMaker use for a failed model.
    """
    if status == 429:
        return "throttled"
    if status == 503:
        return "overloaded"
    if status == 499:
        return "cancelled"
    if 400 <= status < 500 and status != 424:
        return "client_error"
    return "server_error"


def load_object(payload: bytes) -> dict[str, Any] | None:
    """The JSON object in a payload or in an array of one; None if there is none."""
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) else None


def find_message(reply: dict[str, Any]) -> str:
    """The readable message in an error object: `message` or `error`, nested or not."""
    for key in ("message", "error"):
        value = reply.get(key)
        if isinstance(value, dict):
            return find_message(value)
        if isinstance(value, str) and value:
            return value[:_MAX_MESSAGE_CHARS]
    return orjson.dumps(reply).decode()[:_MAX_MESSAGE_CHARS]


def describe_status(status: int, body: bytes) -> str:
    """One line about a failed request: the status and the server's message."""
    reply = load_object(body)
    if reply is not None:
        message = find_message(reply)
    else:
        text = body[:_MAX_MESSAGE_CHARS].decode("utf-8", errors="replace")
        message = " ".join(text.split())[:_MAX_PLAIN_CHARS]
    if 300 <= status < 400:
        message = f"a redirect, which is not followed: is the address right? {message}".strip()
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


def clip(payload: bytes) -> str:
    """The start of a payload, safe to print."""
    return repr(payload[:120].decode("utf-8", errors="replace"))
