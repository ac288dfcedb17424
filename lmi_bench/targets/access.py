"""Credentials for an endpoint: used, but never written to a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmi_bench.core.errors import InputError
from lmi_bench.core.redaction import REDACTED, redact

_LONG_CHARS = 16


@dataclass(frozen=True, slots=True)
class Access:
    """A bearer token, and headers for every request."""

    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def all_headers(self) -> dict[str, str]:
        """Headers to send; an Authorization header overrides the key."""
        named = {name.lower() for name in self.headers}
        if self.api_key is None or "authorization" in named:
            return dict(self.headers)
        return {"Authorization": f"Bearer {self.api_key}", **self.headers}

    def secrets(self) -> tuple[str, ...]:
        """Values that must not be written: the key, and header values that look like one. A short
        value under a harmless name is not redacted: numbers may contain it."""
        found = [] if self.api_key is None else [self.api_key]
        for name, value in self.headers.items():
            if redact({name: value})[name] == REDACTED or len(value) >= _LONG_CHARS:
                found += [value, value.rpartition(" ")[2]]
        return tuple(value for value in found if value)


NO_ACCESS = Access()


def read_headers(lines: Sequence[str]) -> dict[str, str]:
    """Headers from 'Name: value' lines; raises InputError for any other line.

    >>> read_headers(["X-Team: a: b"])
    {'X-Team': 'a: b'}
    """
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise InputError("--header: write 'Name: value', such as -H 'X-Team: search'")
        headers[name.strip()] = value.strip()
    return headers
