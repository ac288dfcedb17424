"""Warnings about a run's levels: each doubt is one plain sentence with its numbers.

Checked: Little's law, a single user's idle time, throughput that falls with the load, levels that
did not deliver their load, failures, token counts that disagree.
"""

from collections.abc import Iterator, Sequence

from lmi_bench.analysis.results.sweep_curve import sweep_curve
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
FAILED_SHARE = 0.5
"""Share of failed requests above which the others are no measurement of the level."""


def check_levels(levels: Sequence[Level]) -> list[str]:
    """Warnings about a run's levels, in the order of the levels; empty if all is well."""
    warnings = [warning for line in levels for warning in check_level(line)]
    return [*warnings, *_check_monotone(levels)]


def check_level(line: Level) -> list[str]:
    """Warnings about one level."""
    name = line.name
    warnings = []
    if not line.valid:
        reason = line.invalid_reason or "the load generator gave no reason"
        warnings.append(f"{name} is invalid: {reason}")
    if line.stopped_by not in (None, "decided", KNOWN):  # on purpose
        warnings.append(
            f"{name} was cut short by {line.stopped_by}: {line.sent} requests were sent"
        )
    checks = (
        _check_failures, _check_start, _check_attempts, _check_lengths, _check_ends, _check_held,
        _check_little, _check_single_request, _check_steady,
    )  # fmt: skip
    texts = [text for check in checks for text in check(line)]
    if line.server is not None:
        texts += line.server.warnings or ()
    return warnings + [f"{name}: {text}" for text in texts]


def has_failed(line: Level) -> bool:
    """Whether a level is no measurement: most of its requests failed, or too many to go on."""
    return line.stopped_by == "errors" or line.failed > FAILED_SHARE * line.sent


def _check_start(line: Level) -> Iterator[str]:
    """Whether the first requests of the users had to stay in the latencies."""
    users = line.load.concurrency or 0
    if line.start_requests == 0 and users > 1:
        yield (
            f"only {line.sent} requests for {users} users: latencies count the first request of "
            "each, which waited behind those of the others; send at least 2 for each user"
        )


def _check_failures(line: Level) -> Iterator[str]:
    if not line.errors:
        return
    examples = line.error_examples or {}
    kinds = ", ".join(
        f"{n} {kind}" + (f": {examples[kind][0]}" if examples.get(kind) else "")
        for kind, n in line.errors_by_kind.items()
    )
    shown = f" ({kinds})" if kinds else ""
    yield f"{line.errors} of {line.sent} requests failed{shown}; they are in no latency"


def _check_attempts(line: Level) -> Iterator[str]:
    left_out = line.attempts_left_out
    if left_out:
        yield (
            f"of {len(left_out) + (line.attempts or 1)} attempts left out: {', '.join(left_out)}; "
            "their figures are in levels.jsonl"
        )


def _check_lengths(line: Level) -> Iterator[str]:
    """Answers of other lengths than planned, and prompts that a cache knew before."""
    found = line.unplanned_lengths
    if found:
        asked, got = found.asked_tokens_mean, found.output_tokens_mean
        if abs(got - asked) > LENGTH_TOLERANCE * asked:
            what = "shorter" if got < asked else "longer"
            yield (
                f"{found.requests} answers were not of the planned length: {got:.4g} tokens on "
                f"average instead of {asked:.4g}; {what} answers are another workload"
            )
    counts = line.unequal_counts
    if counts:
        server, chunks = counts.server_tokens, counts.chunk_tokens
        if abs(chunks - server) > LENGTH_TOLERANCE * server:
            counter = line.generator.token_counts or "server"
            yield (
                f"{server:,} tokens were counted (by the {counter}), but the chunks add up to "
                f"{chunks:,}: throughput and TPOT use the count, ITL is the time between chunks"
            )
    cached = line.cached_prompt_frac or 0.0
    if cached > PREFIX_HIT_TOLERANCE and not line.cached_prompt_expected:
        yield (
            f"{cached:.1%} of the prompt tokens came from the server's prefix cache: TTFT is "
            "lower than with prompts that it has not seen"
        )


def _check_ends(line: Level) -> Iterator[str]:
    """Answers without a finish_reason beside others with one: a proxy may have cut them."""
    without = line.without_finish_reason or 0
    if 0 < without < line.completed:  # a server that never gives one has cut nothing
        yield (
            f"{without} of {line.completed} answers ended without a finish_reason, the others "
            "have one: they may have been cut on their way, and count as completed"
        )


def _check_held(line: Level) -> Iterator[str]:
    """Requests that waited because of a cap: the requested load was not offered."""
    held = line.held
    asked, achieved = line.generator.asked_load, line.generator.achieved_load
    if not held or not line.load.is_open or not asked or achieved is None:
        return
    if achieved < asked * (1 - OFFERED_TOLERANCE):
        yield (
            f"the cap held {held.requests} requests back, {held.mean_ms:.0f} ms on average: "
            f"{achieved:.3g} of {asked:.3g} req/s were sent"
        )


def _check_little(line: Level) -> Iterator[str]:
    """throughput * latency, in requests in flight, cannot exceed the requested concurrency."""
    asked, mean = line.load.concurrency, line.mean_concurrency
    if asked is None or mean is None or line.sessions:
        return
    if mean > asked * (1 + LITTLE_TOLERANCE):
        yield (
            f"Little's law gives {mean:.3g} requests in flight, more than the {asked} that were "
            "asked for; times or counts are wrong"
        )
    elif mean < asked * _DELIVERED_SHARE and not (line.stopped_by or line.errors):
        hint = (
            "use more requests a user"
            if line.sent < 5 * asked
            else "is --connections below the users? else look at the load generator's delay"
        )
        yield (
            f"only {mean:.3g} requests were in flight on average; ramp and drain weigh on the "
            f"whole-level figures: {hint}"
        )


def _check_single_request(line: Level) -> Iterator[str]:
    """One user at a time: throughput = 1 / (mean latency per token), weighted by tokens."""
    throughput, mean = line.throughput_tokens_per_s, line.mean_concurrency
    if line.sessions:
        return  # a user's think time leaves the endpoint idle
    if line.load.concurrency != 1 or not throughput or not mean or line.errors:
        return
    if mean < 1 - SINGLE_REQUEST_TOLERANCE:
        yield (
            f"the endpoint stood idle {1 - mean:.0%} of the time between requests, so "
            f"{throughput:.4g} tok/s is below 1 / latency = {throughput / mean:.4g} tok/s"
        )


def _check_steady(line: Level) -> Iterator[str]:
    """A step in the speed: the figures mix two servers."""
    step = line.speed_step
    again = "; measure it again" if line.attempts is None else f", in {line.attempts} attempts"
    if step is not None:
        yield (
            f"not steady: the time between tokens {'rose' if step.change > 0 else 'fell'} by "
            f"{abs(step.change):.0%} at {step.at_s:.3g} s and stayed there: compilation, a cold "
            f"cache, throttling or another tenant{again}"
        )


def _check_monotone(levels: Sequence[Level]) -> Iterator[str]:
    """Throughput that falls by more than repeats differ: the server thrashes or is throttled."""
    curve = sweep_curve(levels)
    best_load, best = 0.0, 0.0
    for point in curve.usable:
        value = point.throughput_tokens_per_s or 0.0
        if value < best * (1 - REPEAT_TOLERANCE):
            yield (
                f"throughput falls from {best:.4g} tok/s at {curve.name(best_load)} to "
                f"{value:.4g} at {curve.name(point.load)}, more than repeats differ "
                f"({REPEAT_TOLERANCE:.0%}): look for preemption, throttling or a noisy host"
            )
        if value > best:
            best_load, best = point.load, value
