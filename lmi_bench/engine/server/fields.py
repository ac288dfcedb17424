"""Reads and checks a request's JSON fields, and finds those that nothing has read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from lmi_bench.core.errors import InputError

_SHOWN_CHARS = 80


def load_json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InputError if it is not one."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InputError(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise InputError(f"the body must be a JSON object, got {_show(value)}")
    return value


class Fields:
    """The fields of one JSON object. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The unchecked value; None if it is missing."""
        self._read.add(name)
        return self.values.get(name)

    def integer(self, name: str, default: int, *, minimum: int | None = None) -> int:
        """An integer, at least `minimum`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{name} must be an integer, got {_show(value)}")
        if minimum is not None and value < minimum:
            raise InputError(f"{name} must be at least {minimum}, got {value}")
        return value

    def optional_integer(self, name: str, *, minimum: int | None = None) -> int | None:
        """An integer or None."""
        return None if self.raw(name) is None else self.integer(name, 0, minimum=minimum)

    def seed(self, name: str) -> int | None:
        """Any integer; None for -1, which means a random seed, as in vLLM."""
        value = self.optional_integer(name)
        return None if value == -1 else value

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{name} must be a number, got {_show(value)}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number or None."""
        return None if self.raw(name) is None else self.number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, got {_show(value)}")
        return value

    def strings(self, name: str, *, at_most: int) -> tuple[str, ...]:
        """A string, or a list of strings; none of them empty."""
        value = self.raw(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise InputError(f"{name} must be a list of non-empty strings, got {_show(value)}")
        if len(values) > at_most:
            raise InputError(f"{name} has {len(values)} strings: at most {at_most} are allowed")
        return tuple(values)

    def token_ids(self, name: str, *, at_most: int) -> tuple[int, ...]:
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
            raise InputError(f"{name} must be a list of token ids, got {_show(value)}")
        if len(value) > at_most:
            raise InputError(f"{name} has {len(value)} ids: at most {at_most} are allowed")
        return tuple(value)

    def section(self, name: str) -> Fields:
        """A nested object; empty if it is missing."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise InputError(f"{name} must be an object, got {_show(value)}")
        return Fields(value or {})

    def refuse_unless_neutral(self, neutral: Mapping[str, Any]) -> None:
        """Raise InputError for unsupported fields, unless their value has no effect."""
        for name, value in neutral.items():
            given = self.raw(name)
            if given is not None and given != value:
                raise InputError(
                    f"{name}={_show(given)} is not supported by this server: "
                    f"omit {name} or set it to {_show(value)}"
                )

    def unread(self) -> list[str]:
        """Names of fields that nothing has read: the server does not know them."""
        return [name for name in self.values if name not in self._read]


def _show(value: Any) -> str:
    """A value as JSON, truncated."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
