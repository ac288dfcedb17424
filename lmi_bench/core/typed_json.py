"""Values of known dataclasses as JSON text and back, checked: messages between processes."""

import functools
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json

_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def encode(value: Any) -> bytes:
    """A dataclass as a JSON object, an array as a list; every bit of a float is kept."""
    return to_json(value, fallback=list)


def decode(kind: type, text: bytes) -> Any:
    """The value of a class; raises ValueError if the text is not one of its values."""
    return _adapter(kind).validate_json(text, strict=True)
