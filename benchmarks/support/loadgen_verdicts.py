"""What the accuracy benchmark has to show, held against what it measured.

Each claim is a limit on medians over a row's runs, but "holds", which is asked of every run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PACED = {"ttft_p50": 0.1, "ttft_p99": 0.5, "from_read_p99": 0.5, "itl_p50": 0.1, "itl_p99": 0.5, "throughput": 0.2}
HARD = {"ttft_p99": 0.5, "from_read_p99": 0.5, "itl_p99": 1.0}
MANY_PER_S = 80_000
MANY_TLS_PER_S = 60_000
PLAIN = ("", "TLS")
SAME_PERCENTILES = 1.0
IN_TURN = "one worker, in turn with two"
PERCENTILES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
LOOSEST_BOUND_FRAC = 0.001

Measured = Sequence[tuple[Any, Sequence[Any]]]
"""Rows of the table with the results of their runs."""


def verdicts(measured: Measured) -> Iterator[str]:
    """A Markdown table, a line a claim whose rows were measured."""
    yield "| claim | asked | measured | shown |"
    yield "|---|---|---|---|"
    for claim in (paced, many, burnt, refused, bounds_hold, bounds_tight, two_workers):
        for name, asked, found, shown in claim(measured):
            yield f"| {name} | {asked} | {found} | {'yes' if shown else 'no'} |"


Verdict = tuple[str, str, str, bool]


def _over(row: Any) -> str:
    return f", {row.what}" if row.what else ""


def _median(results: Sequence[Any], name: str) -> float:
    return statistics.median(getattr(result, name) for result in results)


def _limits(results: Sequence[Any], limits: dict[str, float]) -> tuple[str, str, bool]:
    found = {name: _median(results, name) for name in limits}
    names = {name: name.replace("_", " ").replace("ttft", "TTFT").replace("itl", "ITL") for name in limits}
    names |= {"throughput": "tok/s", "from_read_p99": "TTFT p99 from the server's read"}
    return (
        ", ".join(f"{names[name]} {limit:g} %" for name, limit in limits.items()),
        ", ".join(f"{value:+.2f}" for value in found.values()),
        all(abs(found[name]) <= limit for name, limit in limits.items()),
    )


def _rows(measured: Measured, wanted: Callable[[Any], bool]) -> Iterator[tuple[Any, Sequence[Any]]]:
    return ((row, results) for row, results in measured if wanted(row))


def paced(measured: Measured) -> Iterator[Verdict]:
    for row, results in _rows(measured, lambda row: row.streams <= 1024 and row.what in PLAIN):
        asked, found, shown = _limits(results, PACED)
        yield f"{row.streams:,} streams{_over(row)}", asked, found, shown


def many(measured: Measured) -> Iterator[Verdict]:
    for row, results in _rows(measured, lambda row: row.streams > 1024 and row.what in PLAIN):
        per_s = _median(results, "events_per_s")
        asked, found, shown = _limits(results, HARD)
        least = MANY_TLS_PER_S if row.what == "TLS" else MANY_PER_S
        shown = shown and per_s >= least
        yield (
            f"{row.streams:,} streams on a core{_over(row)}",
            f">= {least:,} events/s, {asked}",
            (f"{per_s:,.0f}, {found}"),
            shown,
        )


def burnt(measured: Measured) -> Iterator[Verdict]:
    for row, results in _rows(measured, lambda row: row.burn and row.timestamps is None):
        asked, found, shown = _limits(results, HARD)
        yield f"{row.streams:,} streams, {row.what}", asked, found, shown


def refused(measured: Measured) -> Iterator[Verdict]:
    for row, results in _rows(measured, lambda row: row.what == "past the ceiling"):
        invalid = sum(not result.valid for result in results)
        yield (
            f"{row.streams:,} streams, {row.what}",
            "marked invalid",
            (f"{invalid} of {len(results)} runs"),
            invalid == len(results),
        )


def bounds_hold(measured: Measured) -> Iterator[Verdict]:
    known = [result for _, results in measured for result in results if result.holds is not None]
    held = sum(result.holds for result in known)
    if known:
        yield (
            "bound of the self-check",
            "at least the error, in every run",
            (f"{held} of {len(known)} runs"),
            held == len(known),
        )


def bounds_tight(measured: Measured) -> Iterator[Verdict]:
    """Of levels that the self-check lets pass: a bound on a refused one is not for use."""
    for name in ("ttft", "itl"):
        shares = []
        for _, results in measured:
            for result in results:
                bound_ms = getattr(result, f"{name}_bound_ms")
                if bound_ms is None or result.holds is None or not result.valid:
                    continue
                error_ms = abs(getattr(result, f"{name}_error_ms"))
                least_ms = LOOSEST_BOUND_FRAC * result.reported_ms[f"{name}_p99"]
                shares.append(bound_ms / max(3 * error_ms, least_ms))
        if shares:
            middle = statistics.median(shares)
            yield (
                f"bound of the {name.upper()} p99",
                ("at most max(3 x error, 0.1 %) at the median"),
                f"{middle:.2f} of that",
                middle <= 1.0,
            )


def two_workers(measured: Measured) -> Iterator[Verdict]:
    """Beside one: as each reported, and each against what the server did in its own runs.

    A server that was late in the one's runs and not in the two's has really sent other gaps.
    """
    both = [results for row, results in measured if row.workers == 2]
    one = [results for row, results in measured if row.what == IN_TURN]
    for results in both:
        for what, of in (("as reported", _reported), ("each over its truth", _over_truth)):
            apart = [100 * (of(results, name) / of(one[0], name) - 1) for name in PERCENTILES]
            yield (
                f"two workers beside one, 512 streams, {what}",
                f"TTFT and ITL p50, p99 within {SAME_PERCENTILES:g} %",
                ", ".join(f"{value:+.2f}" for value in apart),
                all(abs(value) <= SAME_PERCENTILES for value in apart),
            )


def _reported(results: Sequence[Any], name: str) -> float:
    return statistics.median(result.reported_ms[name] for result in results)


def _over_truth(results: Sequence[Any], name: str) -> float:
    return statistics.median(result.reported_ms[name] / result.true_ms[name] for result in results)
