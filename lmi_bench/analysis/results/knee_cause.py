"""Why a sweep bends where it does, and the one change that moves the bend.

A cause is named only if a fact shows it: the load generator's self-check, requests that the server
refused or queued, a limit between the knee and the next level, or the part of the step model that
binds there. Without such a fact the cause is `unknown`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.analysis.results.sweep_curve import LevelPoint, SweepCurve
from lmi_bench.catalog.tables import read_rows

_CAUSES = {row["cause"]: row for row in read_rows("causes.csv", "analysis")}
CAUSE_TITLES = {cause: row["title"] for cause, row in _CAUSES.items() if row["title"]}
CHANGES = {cause: row["change"] for cause, row in _CAUSES.items() if row["change"]}

_TEXTS = {row["name"]: row for row in read_rows("knee_texts.csv", "analysis")}

_WAITING, _FULL_CACHE = 1.0, 0.9
"""Least mean number of waiting requests, and least share of the KV cache in use, that count."""


@dataclass(frozen=True, slots=True)
class KneeFacts:
    """What is known about the server besides the sweep; None where it is not known.

    b_max           sequences that the KV cache is sure to hold, at full length
    b_max_expected  sequences it holds on average, at half their output
    b_star          batch at which a decode step turns compute-bound; infinite if it never does
    max_batch       the server's own limit on running sequences
    binding         load of a level -> the part of the step model that binds there
                    (compute, bandwidth, host or link)
    """

    b_max: float | None = None
    b_max_expected: float | None = None
    b_star: float | None = None
    max_batch: float | None = None
    binding: Mapping[float, str] = field(default_factory=dict)


def found_by(name: str, /, **figures: Any) -> tuple[str, str]:
    """The rule or the cause that a text of knee_texts.csv belongs to, and the text."""
    row = _TEXTS[name]
    return row["rule_or_cause"], row["text"].format(**figures)


def say(name: str, /, **figures: Any) -> str:
    """A text of knee_texts.csv."""
    return found_by(name, **figures)[1]


def find_cause(curve: SweepCurve, load: float, facts: KneeFacts) -> tuple[str, str]:
    """The cause of a knee at `load` and the change that moves it."""
    beyond = curve.beyond(load)
    if beyond is None:
        return found_by("not reached", at=curve.name(load))
    reason = (beyond.line.invalid_reason or "").lower()
    if not beyond.line.valid and reason.startswith(("client", "generator")):
        return "client", CHANGES["client"]
    errors = beyond.line.errors_by_kind
    refused = errors.get("overloaded", 0) + errors.get("throttled", 0)
    if refused:
        return found_by("refused", refused=refused, at=curve.name(beyond.load))
    cap = _cap(beyond, facts) or _queue(beyond)
    if cap is not None:
        return cap
    binding = facts.binding.get(beyond.load)
    if binding is not None and binding in CHANGES:
        return binding, CHANGES[binding]
    if facts.b_star is not None and facts.b_star < (beyond.concurrency or 0.0):
        return "compute", CHANGES["compute"]
    return found_by("no fact")


def _cap(beyond: LevelPoint, facts: KneeFacts) -> tuple[str, str] | None:
    """The lower limit on running sequences that the next level exceeds.

    For the KV cache it is the expected number, since that many run on average.
    """
    if beyond.concurrency is None:
        return None
    memory = facts.b_max_expected if facts.b_max_expected is not None else facts.b_max
    slots = facts.max_batch
    if slots is not None and slots < beyond.concurrency and (memory is None or slots <= memory):
        return found_by("slots", slots=slots)
    if memory is not None and memory < beyond.concurrency:
        return "kv_memory", f"{CHANGES['kv_memory']} (it holds about {memory:.3g} sequences)"
    return None


def _queue(beyond: LevelPoint) -> tuple[str, str] | None:
    """The cause by the server's own metrics of the next level, if requests waited there."""
    server = beyond.line.server
    if server is None:
        return None
    waiting = (server.waiting.mean if server.waiting else None) or 0.0
    running = server.running.max if server.running else None
    full = (server.kv_usage_frac.max if server.kv_usage_frac else None) or 0.0
    if server.preemptions or (waiting >= _WAITING and full >= _FULL_CACHE):
        return "kv_memory", f"{CHANGES['kv_memory']} (its metrics: {full:.0%} in use)"
    if waiting < _WAITING or not running:
        return None
    return found_by("queue", running=running, waiting=waiting)
