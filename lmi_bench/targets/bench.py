"""What opens a target beside its scenario, and the target that is then ready to be measured.

Credentials are never written to a file.
"""

import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import Level
from lmi_bench.core.redaction import REDACTED, redact
from lmi_bench.core.scenario import AUTO, Scenario
from lmi_bench.core.server_metrics import CloudWatch
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.target import Target
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

    def __post_init__(self) -> None:
        key = (self.api_key or "").strip() or None  # a file's last newline is no part of it
        object.__setattr__(self, "api_key", key)

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


Main = Callable[[Target], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Bench:
    """A target that is ready to be measured, with everything that depends on its kind.

    scenario         as it will run: protocol, model and lengths are known
    prompts          the prompts with a salt
    run              runs a coroutine with the target, on the clock that the target needs
    knee_facts       known limits of the server, for the given levels
    secrets          values that must never reach a file
    spacing_s        time between the starts of two users
    salted           True if each run's prompts must differ from those of every other run
    usd_per_hour     price of all instances, if known
    count_instances  counts the instances that answer now
    asked            what a remote server has answered to the test requests, so that another process
                     can open it without them (`Access`); None: no other process can
    metrics_url      where a remote server may publish its metrics
    cloudwatch       reads CloudWatch's metrics of an endpoint, for each of the given spans
    tls_context      certificates that are accepted; None: those the system trusts
    before_level     to be called before each level, such as to empty the server's cache
    """

    scenario: Scenario
    title: str
    facts: dict[str, Any]
    prompts: Callable[[str], Prompts]
    run: Callable[[Main], Any]
    knee_facts: Callable[[Sequence[Level]], KneeFacts]
    notes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)
    spacing_s: float = 0.0
    salted: bool = True
    usd_per_hour: float | None = None
    count_instances: Callable[[], int | None] | None = None
    asked: Mapping[str, Any] | None = None
    metrics_url: str | None = None
    tls_context: ssl.SSLContext | None = None
    cloudwatch: Callable[[Sequence[Level]], list[CloudWatch]] | None = None
    before_level: Callable[[], None] | None = None
    metrics_headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def new_salt(self) -> str:
        """Text that makes this run's prompts differ from those of every other run."""
        return secrets.token_hex(4) if self.salted else ""
