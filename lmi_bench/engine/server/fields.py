"""Reads and checks a request's JSON fields, and finds those that nothing has read."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import orjson

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server.state import MAX_STOP_STRINGS

_SHOWN_CHARS = 80
_T = TypeVar("_T")

NEUTRAL: Final[Mapping[str, Any]] = {
    "min_p": 0,
    "length_penalty": 1,
    "prompt_logprobs": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
"""vLLM's parameters that no route supports: accepted if the value has no effect."""


def load_json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InputError if it is not one."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InputError(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise InputError(f"the body must be a JSON object, got {_show(value)}")
    return value


def given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


class Fields:
    """The fields of one JSON object. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The unchecked value; None if it is missing."""
        self._read.add(name)
        return self.values.get(name)

    def _typed(self, name: str, kinds: tuple[type, ...], what: str) -> Any:
        """The value if it has one of these types; None if it is missing."""
        value = self.raw(name)
        if value is None or type(value) in kinds:
            return value
        if isinstance(value, bool) or not isinstance(value, kinds):  # bool is a subclass of int
            raise InputError(f"{name} must be {what}, got {_show(value)}")
        return value

    def integer(self, name: str, default: _T, *, minimum: int | None = None) -> int | _T:
        if name not in self.values:  # the fast path of most fields
            return default
        value: int | None = self._typed(name, (int,), "an integer")
        if value is None:
            return default
        if minimum is not None and value < minimum:
            raise InputError(f"{name} must be at least {minimum}, got {value}")
        return value

    def seed(self, name: str) -> int | None:
        """Any integer; None for -1, which means a random seed, as in vLLM."""
        value = self.integer(name, None)
        return None if value == -1 else value

    def number(self, name: str, default: _T) -> float | _T:
        if name not in self.values:
            return default
        value = self._typed(name, (float, int), "a number")
        return default if value is None else float(value)

    def flag(self, name: str, default: _T) -> bool | _T:
        if name not in self.values:
            return default
        value: bool | None = self._typed(name, (bool,), "true or false")
        return default if value is None else value

    def strings(self, name: str, *, at_most: int) -> tuple[str, ...]:
        """A string, or a list of strings; none of them empty."""
        value = self._typed(name, (str, list), "a list of non-empty strings")
        values = [value] if isinstance(value, str) else value or ()
        if not all(isinstance(v, str) and v for v in values):
            raise InputError(f"{name} must be a list of non-empty strings, got {_show(value)}")
        if len(values) > at_most:
            raise InputError(f"{name} has {len(values)} strings: at most {at_most} are allowed")
        return tuple(values)

    def token_ids(self, name: str, *, at_most: int) -> tuple[int, ...]:
        value = self._typed(name, (list,), "a list of token ids") or ()
        if not all(type(v) is int and v >= 0 for v in value):
            raise InputError(f"{name} must be a list of token ids, got {_show(value)}")
        if len(value) > at_most:
            raise InputError(f"{name} has {len(value)} ids: at most {at_most} are allowed")
        return tuple(value)

    def section(self, name: str) -> "Fields":
        """A nested object; empty if it is missing."""
        return Fields(self._typed(name, (dict,), "an object") or {})

    def vllm_sampling(self, **own: Any) -> SamplingParams:
        """The sampling settings, from the parameters that OpenAI's and LMI's requests share with
        vLLM, and from `own` ones."""
        return SamplingParams(
            stop_token_ids=self.token_ids("stop_token_ids", at_most=MAX_STOP_STRINGS),
            top_k=max(0, self.integer("top_k", 0, minimum=-1)),
            top_p=self.number("top_p", 1.0),
            repetition_penalty=self.number("repetition_penalty", 1.0),
            presence_penalty=self.number("presence_penalty", 0.0),
            frequency_penalty=self.number("frequency_penalty", 0.0),
            seed=self.seed("seed"),
            **own,
        )

    def refuse_unless_neutral(self, neutral: Mapping[str, Any]) -> None:
        """Raise InputError for unsupported fields, unless their value has no effect."""
        for name in [name for name in neutral if name in self.values]:
            sent, value = self.raw(name), neutral[name]
            if sent is not None and sent != value:
                raise InputError(
                    f"{name}={_show(sent)} is not supported by this server: "
                    f"omit {name} or set it to {_show(value)}"
                )

    def unread(self) -> list[str]:
        """Names of fields that nothing has read: the server does not know them."""
        return [name for name in self.values if name not in self._read]


def _show(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
