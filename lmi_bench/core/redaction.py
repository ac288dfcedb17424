"""Removes secrets from everything that is written: keys, tokens, passwords, credentials in URLs.

They are found by the name of a field or flag, by the shape of a value, and as the exact secrets
that the program was given. So a run's files can be attached to a bug report without a review.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"
_ANYWHERE_CHARS, _WHOLE_WORD_CHARS = 12, 4
"""Lengths from which a secret is removed anywhere, and as a whole word. A shorter one is a
placeholder for a server without keys (`x`, `1`), and part of other words and numbers."""

_HEADER_NAME = (
    r"api[-_]?key|apikey|x[-_]api[-_]key|authorization|proxy[-_]authorization|bearer|password"
    r"|passwd|secret|[a-z_-]*secret[-_]?(?:access[-_]?)?key|access[-_]?token|auth[-_]?token"
    r"|session[-_]?token|security[-_]?token|hf[-_]?token|cookie|set[-_]cookie|signature"
    r"|x-amz-security-token|x-amz-signature|x-amz-credential"
)
_NAME = rf"{_HEADER_NAME}|token|key"  # too common in prose to be taken for a header there
_SECRET_FIELD = re.compile(rf"(?:{_NAME})", re.IGNORECASE)
_SECRET_FLAG = re.compile(rf"--?(?:{_NAME})", re.IGNORECASE)
_FLAG_WITH_VALUE = re.compile(rf"(--?(?:{_NAME})=).+", re.IGNORECASE | re.DOTALL)
_HEADER = re.compile(rf"(?i)\b((?:{_HEADER_NAME})\s*:\s*)(?=\S)[^\r\n\"']+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_URL_USER = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_QUERY_NAME = rf"{_NAME}|sig|code|auth"  # as gateways and Azure name them
_URL_QUERY = re.compile(rf"([?&](?:{_QUERY_NAME})=)[^&\s#\"']+", re.IGNORECASE)
_KNOWN_SHAPE = re.compile(r"\b(?:sk-[A-Za-z0-9_-]{12,}|hf_[A-Za-z0-9]{12,}|A[SK]IA[A-Z0-9]{16})\b")


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """The text with every secret replaced by `<redacted>`.

    secrets  values that must not appear anywhere; of 4 to 11 characters only as whole words, and
             shorter ones are ignored
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _ANYWHERE_CHARS:
            text = text.replace(secret, REDACTED)
        elif len(secret) >= _WHOLE_WORD_CHARS:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", lambda _: REDACTED, text)
    text = _FLAG_WITH_VALUE.sub(rf"\g<1>{REDACTED}", text)
    text = _HEADER.sub(rf"\g<1>{REDACTED}", text)
    text = _BEARER.sub(rf"\g<1> {REDACTED}", text)
    text = _URL_USER.sub(r"\g<1>", text)
    text = _URL_QUERY.sub(rf"\g<1>{REDACTED}", text)
    return _KNOWN_SHAPE.sub(REDACTED, text)


def redact(value: Any, secrets: Sequence[str] = ()) -> Any:
    """A copy of plain JSON values without secrets: field values, list items, flags and URLs."""
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: (
                REDACTED
                if isinstance(item, str) and item and _SECRET_FIELD.fullmatch(str(key))
                else redact(item, secrets)
            )
            for key, item in value.items()
        }
    if not isinstance(value, list | tuple):
        return value
    out: list[Any] = []
    hide_next = False
    for item in value:  # a flag such as `--api-key` hides the one after it
        out.append(REDACTED if hide_next and isinstance(item, str) else redact(item, secrets))
        hide_next = isinstance(item, str) and _SECRET_FLAG.fullmatch(item) is not None
    return out
