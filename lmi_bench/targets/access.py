"""What opens an endpoint beside its scenario; credentials are never written to a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.redaction import REDACTED, redact
from lmi_bench.core.scenario import AUTO
from lmi_bench.wire.format import own_headers

_LONG_CHARS = 16


@dataclass(frozen=True, slots=True)
class Access:
    """A key, and headers for every request.

    asked  the `Bench.asked` of another process, whose scenario it is: nothing is asked again
    """

    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    asked: Mapping[str, Any] | None = None

    def all_headers(self, protocol: str = AUTO) -> dict[str, str]:
        """Headers to send in a protocol; those that were stated override its own."""
        stated = {name.lower() for name in self.headers}
        own = own_headers(protocol, self.api_key)
        return {name: own[name] for name in own if name.lower() not in stated} | dict(self.headers)

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
