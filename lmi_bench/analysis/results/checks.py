"""Warnings about a run's levels: each doubt is one plain sentence (level_warnings.csv).

Checked: Little's law, a single user's idle time, throughput that falls with the load, levels that
did not deliver their load, failures, token counts that disagree.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from lmi_bench.analysis.results.sweep_curve import sweep_curve
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.level import KNOWN, Level

# Clocks of events and sends agree to well under a percent; published sweeps repeat their
# throughput within 8 % (p90).
LITTLE_TOLERANCE = 0.02
SINGLE_REQUEST_TOLERANCE = 0.05
REPEAT_TOLERANCE = 0.08
_DELIVERED_SHARE = 0.7
OFFERED_TOLERANCE = 0.05
LENGTH_TOLERANCE = 0.01
PREFIX_HIT_TOLERANCE = 0.01

_TEXTS: Final = {row["warning"]: row["text"] for row in read_rows("level_warnings.csv", "analysis")}
_Doubts = Iterator[tuple[str, dict[str, Any]]]
"""Names of warnings, and what their texts hold beside the level's own figures."""


def check_levels(levels: Sequence[Level]) -> list[str]:
    """Warnings about a run's levels, in the order of the levels; empty if all is well."""
    warnings = [warning for line in levels for warning in check_level(line)]
    return [*warnings, *(_TEXTS[name].format(**values) for name, values in _check_monotone(levels))]


def check_level(line: Level) -> list[str]:
    """Warnings about one level."""
    checks = (_check_requests, _check_lengths, _check_load, _check_single_request, _check_steady)
    doubts = [doubt for check in checks for doubt in check(line)]
    texts = [_TEXTS[name].format(line=line, **values) for name, values in doubts]
    server = () if line.server is None else line.server.warnings or ()
    return texts + [f"{line.name}: {text}" for text in server]


def _check_requests(line: Level) -> _Doubts:
    """A level cut short, failures, and first requests that had to stay in the latencies."""
    if not line.valid:
        yield "invalid", {"reason": line.invalid_reason or "the load generator gave no reason"}
    if line.stopped_by not in (None, "decided", KNOWN):  # on purpose
        yield "cut short", {}
    if line.errors:
        examples = line.error_examples or {}
        kinds = ", ".join(
            f"{n} {kind}" + (f": {examples[kind][0]}" if examples.get(kind) else "")
            for kind, n in line.errors_by_kind.items()
        )
        yield "failures", {"kinds": f" ({kinds})" if kinds else ""}
    if line.start_requests == 0 and (line.load.concurrency or 0) > 1:
        yield "start", {}
    left_out = line.attempts_left_out
    if left_out:
        of = len(left_out) + (line.attempts or 1)
        yield "attempts", {"of": of, "left_out": ", ".join(left_out)}


def _check_lengths(line: Level) -> _Doubts:
    """Answers of other lengths than planned, prompts that a cache knew before, and answers without
    a finish_reason beside others with one: a proxy may have cut them."""
    found, counts = line.unplanned_lengths, line.unequal_counts
    if found:
        asked, got = found.asked_tokens_mean, found.output_tokens_mean
        if abs(got - asked) > LENGTH_TOLERANCE * asked:
            what = "shorter" if got < asked else "longer"
            yield "lengths", {"asked": asked, "got": got, "what": what}
    if counts:
        server, chunks = counts.server_tokens, counts.chunk_tokens
        if abs(chunks - server) > LENGTH_TOLERANCE * server:
            counter = line.generator.token_counts or "server"
            yield "counts", {"server": server, "chunks": chunks, "counter": counter}
    cached = line.cached_prompt_frac or 0.0
    if cached > PREFIX_HIT_TOLERANCE and not line.cached_prompt_expected:
        yield "cached", {}
    if 0 < (line.without_finish_reason or 0) < line.completed:  # one that never gives it cuts none
        yield "ends", {}


def _check_load(line: Level) -> _Doubts:
    """Requests that waited because of a cap: the requested load was not offered. And throughput *
    latency, in requests in flight, cannot exceed the requested concurrency."""
    rate, achieved = line.generator.asked_load, line.generator.achieved_load
    is_capped = line.held is not None and line.load.is_open
    if is_capped and rate and achieved is not None and achieved < rate * (1 - OFFERED_TOLERANCE):
        yield "held", {"asked": rate, "achieved": achieved}
    asked, mean = line.load.concurrency, line.mean_concurrency
    if asked is None or mean is None or line.sessions:
        return
    if mean > asked * (1 + LITTLE_TOLERANCE):
        yield "above Little", {"asked": asked, "mean": mean}
    elif mean < asked * _DELIVERED_SHARE and not (line.stopped_by or line.errors):
        few = line.sent < 5 * asked
        yield "few in flight, few requests" if few else "few in flight", {"mean": mean}


def _check_single_request(line: Level) -> _Doubts:
    """One user at a time: throughput = 1 / (mean latency per token), weighted by tokens."""
    throughput, mean = line.throughput_tokens_per_s, line.mean_concurrency
    if line.sessions:
        return  # a user's think time leaves the endpoint idle
    if line.load.concurrency != 1 or not throughput or not mean or line.errors:
        return
    if mean < 1 - SINGLE_REQUEST_TOLERANCE:
        yield "idle", {"idle": 1 - mean, "throughput": throughput, "pace": throughput / mean}


_STEP_OF = {"itl": "between tokens", "ttft": "to first token"}


def _check_steady(line: Level) -> _Doubts:
    """A step in the speed: the figures mix two servers. And pauses of all streams."""
    step = line.speed_step
    again = "; measure it again" if line.attempts is None else f", in {line.attempts} attempts"
    if step is not None:
        way, of = "rose" if step.change > 0 else "fell", _STEP_OF.get(step.of, step.of)
        yield "step", {"way": way, "of": of, "size": abs(step.change), "again": again}
    if line.pauses is not None and line.wall_s:
        when = ", ".join(f"{at_s:.3g}" for at_s in line.pauses.at_s)
        yield "pauses", {"share": line.pauses.total_s / line.wall_s, "when": when}


def _check_monotone(levels: Sequence[Level]) -> _Doubts:
    """Throughput that falls by more than repeats differ: the server thrashes or is throttled."""
    curve = sweep_curve(levels)
    best_load, best = 0.0, 0.0
    for point in curve.usable:
        value = point.throughput_tokens_per_s or 0.0
        if value < best * (1 - REPEAT_TOLERANCE):
            places = {"best_at": curve.name(best_load), "at": curve.name(point.load)}
            yield "falls", {"best": best, "value": value, "tolerance": REPEAT_TOLERANCE, **places}
        if value > best:
            best_load, best = point.load, value
