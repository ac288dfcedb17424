"""Do the books of a sweep balance? Each doubt is one plain sentence with its numbers.

Checked: Little's law, a closed loop's lone request, throughput that falls with the load, levels
that did not deliver their load, failures, token counts that disagree.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmi_bench.analysis.results.sweep_curve import sweep_curve
from lmi_bench.core.level import Level

# Clocks of events and sends agree to well under a percent; published sweeps repeat their
# throughput within 8 % (p90).
LITTLE_TOLERANCE = 0.02
SINGLE_REQUEST_TOLERANCE = 0.05
REPEAT_TOLERANCE = 0.08
_DELIVERED_SHARE = 0.7
OFFERED_TOLERANCE = 0.05
LENGTH_TOLERANCE = 0.01
PREFIX_HIT_TOLERANCE = 0.01
FAILED_SHARE = 0.5
"""Share of failed requests above which a level says nothing of the rest."""


def check_levels(levels: Sequence[Level]) -> list[str]:
    """Warnings about a run's levels, in the order of the levels; empty if all is well."""
    warnings = [warning for line in levels for warning in check_level(line)]
    return warnings + _check_monotone(levels)


def check_level(line: Level) -> list[str]:
    """Warnings about one level."""
    name = line.name
    warnings = []
    if not line.valid:
        reason = line.invalid_reason or "the load generator gave no reason"
        warnings.append(f"{name} is invalid: {reason}")
    if line.stopped_by not in (None, "decided"):  # a search decides on purpose
        warnings.append(
            f"{name} was cut short by {line.stopped_by}: {line.sent} requests were sent"
        )
    if line.errors:
        examples = line.error_examples or {}
        kinds = ", ".join(
            f"{n} {kind}" + (f": {examples[kind][0]}" if examples.get(kind) else "")
            for kind, n in line.errors_by_kind.items()
        )
        warnings.append(
            f"{name}: {line.errors} of {line.sent} requests failed"
            + (f" ({kinds})" if kinds else "")
            + "; they are in no latency"
        )
    if line.attempts_left_out:
        left_out = line.attempts_left_out
        warnings.append(
            f"{name}: {left_out} of {left_out + (line.attempts or 1)} attempts were invalid "
            "and are left out (the reasons are in levels.jsonl)"
        )
    warnings += _check_lengths(line, name)
    warnings += _check_ends(line, name)
    warnings += _check_held(line, name)
    warnings += _check_little(line, name)
    warnings += _check_single_request(line, name)
    if line.server is not None:
        warnings += [f"{name}: {text}" for text in line.server.warnings or ()]
    return warnings


def has_failed(line: Level) -> bool:
    """Whether a level is no measurement: most of its requests failed, or too many to go on."""
    return line.stopped_by == "errors" or line.failed > FAILED_SHARE * line.sent


def _check_lengths(line: Level, name: str) -> list[str]:
    """Answers of other lengths than planned, and prompts that a cache knew before."""
    warnings = []
    found = line.unplanned_lengths
    if found:
        asked, got = found.asked_tokens_mean, found.output_tokens_mean
        if abs(got - asked) > LENGTH_TOLERANCE * asked:
            what = "shorter" if got < asked else "longer"
            warnings.append(
                f"{name}: {found.requests} answers were not of the planned length: {got:.4g} "
                f"tokens on average instead of {asked:.4g}; {what} answers are another workload"
            )
    counts = line.unequal_counts
    if counts:
        server, chunks = counts.server_tokens, counts.chunk_tokens
        if abs(chunks - server) > LENGTH_TOLERANCE * server:
            warnings.append(
                f"{name}: {server:,} tokens were counted ({_counted_by(line)}), {chunks:,} came as "
                "chunks of their own: throughput and TPOT are by that count, ITL is between chunks"
            )
    cached = line.cached_prompt_frac or 0.0
    if cached > PREFIX_HIT_TOLERANCE and not line.cached_prompt_expected:
        warnings.append(
            f"{name}: {cached:.1%} of the prompt tokens came from the server's prefix cache: TTFT "
            "is lower than with prompts that it has not seen"
        )
    return warnings


def _counted_by(line: Level) -> str:
    """Who says how many tokens there were; a run of another tool or of old knows no better."""
    counted = line.generator.token_counts
    return f"by the {counted}" if counted else "by the server"


def _check_ends(line: Level, name: str) -> list[str]:
    """Answers without a finish_reason beside others with one: a proxy may have ended them."""
    unsaid = line.without_finish_reason or 0
    completed = line.completed
    if not 0 < unsaid < completed:
        return []  # a server that never gives one has cut nothing
    return [
        f"{name}: {unsaid} of {completed} answers ended without a finish_reason, the others have "
        "one: they may have been cut on their way, and count as completed"
    ]


def _check_held(line: Level, name: str) -> list[str]:
    """Requests that a cap made wait: the load that was asked for was not offered."""
    held = line.held
    asked, achieved = line.generator.asked_load, line.generator.achieved_load
    if not held or line.load.rate_per_s is None or not asked or achieved is None:
        return []
    if achieved >= asked * (1 - OFFERED_TOLERANCE):
        return []
    return [
        f"{name}: the cap held {held.requests} requests back, {held.mean_ms:.0f} ms on "
        f"average: {achieved:.3g} of {asked:.3g} req/s were sent"
    ]


def _check_little(line: Level, name: str) -> list[str]:
    """throughput * latency, in requests in flight, cannot exceed the concurrency asked for."""
    asked, mean = line.load.concurrency, line.mean_concurrency
    if asked is None or mean is None or line.sessions:
        return []
    if mean > asked * (1 + LITTLE_TOLERANCE):
        return [
            f"{name}: Little's law gives {mean:.3g} requests in flight, more than the {asked} that "
            "were asked for; times or counts are wrong"
        ]
    few_requests = line.sent < 5 * asked
    cut = line.stopped_by or line.errors
    if mean < asked * _DELIVERED_SHARE and not cut:
        hint = (
            "use more requests a user"
            if few_requests
            else "is --connections below the users? else look at the load generator's delay"
        )
        return [
            f"{name}: only {mean:.3g} requests were in flight on average; ramp and drain weigh "
            f"on the whole-level figures: {hint}"
        ]
    return []


def _check_single_request(line: Level, name: str) -> list[str]:
    """One user at a time: throughput = 1 / (mean latency per token), weighted by tokens."""
    throughput, mean = line.throughput_tokens_per_s, line.mean_concurrency
    if line.sessions:
        return []  # who thinks leaves the endpoint idle
    if line.load.concurrency != 1 or not throughput or not mean or line.errors:
        return []
    if mean < 1 - SINGLE_REQUEST_TOLERANCE:
        return [
            f"{name}: the endpoint stood idle {1 - mean:.0%} of the time between requests, so "
            f"{throughput:.4g} tok/s is below 1 / latency = {throughput / mean:.4g} tok/s"
        ]
    return []


def _check_monotone(levels: Sequence[Level]) -> list[str]:
    """Throughput that falls by more than a repeat would: the server thrashes or is throttled."""
    curve = sweep_curve(levels)
    warnings = []
    best = None
    for point in curve.usable:
        value = point.throughput_tokens_per_s or 0.0
        if best is not None and value < best[1] * (1 - REPEAT_TOLERANCE):
            warnings.append(
                f"throughput falls from {best[1]:.4g} tok/s at {curve.name(best[0])} to "
                f"{value:.4g} at {curve.name(point.load)}, more than repeats differ "
                f"({REPEAT_TOLERANCE:.0%}): look for preemption, throttling or a noisy host"
            )
        if best is None or value > best[1]:
            best = (point.load, value)
    return warnings
