"""A target that is ready to be measured."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.core.level import Level
from lmi_bench.core.scenario import Scenario
from lmi_bench.loadgen.aws.cloudwatch import LevelSpan
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.target import Target

Main = Callable[[Target], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Bench:
    """A target that is ready to be measured, and everything that depends on its kind.

    scenario    as it will run: nothing in it is left to be found
    run         runs a coroutine over the target on the clock that the target needs
    knee_facts  what is known of the server, for the levels given
    usd_per_hour, count_instances  price of all its instances, and how many answer now, if known
    secrets     values that must never reach a file
    open_target, metrics_url, metrics_headers  of a server elsewhere: a connection of one's own to
                it, for worker processes, and where it may keep its metrics
    cloudwatch  what CloudWatch says of an endpoint in each of these spans
    """

    scenario: Scenario
    title: str
    facts: dict[str, Any]
    prompts: Callable[[str], Prompts]
    run: Callable[[Main], Any]
    knee_facts: Callable[[Sequence[Level]], KneeFacts]
    notes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    spacing_s: float = 0.0
    salted: bool = True
    usd_per_hour: float | None = None
    count_instances: Callable[[], int | None] | None = None
    open_target: Callable[[], AbstractAsyncContextManager[Target]] | None = None
    metrics_url: str | None = None
    cloudwatch: Callable[[Sequence[LevelSpan]], list[dict[str, Any]]] | None = None
    metrics_headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def new_salt(self) -> str:
        """What makes this run's prompts unlike those of every other run."""
        return secrets.token_hex(4) if self.salted else ""
