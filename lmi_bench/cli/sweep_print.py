"""What a sweep prints: levels, knees, SLOs, cost, and what is to be doubted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.results.repeats import parse_until, unmet_until
from lmi_bench.cli.console import fail, note, print_table, say, warn
from lmi_bench.cli.slo_print import print_slos
from lmi_bench.core.findings import Knee, SloAnswer
from lmi_bench.core.level import Level
from lmi_bench.core.load import load_name
from lmi_bench.jobs.sweep.result import SweepResult
from lmi_bench.report.formats import number
from lmi_bench.report.slo_text import describe_answer, spread_rows
from lmi_bench.report.text import (
    LEVEL_GIVE_WAY,
    engine_rows,
    generator_line,
    knee_rows,
    level_block,
    level_rows,
    replica_lines,
    session_rows,
    token_counts_line,
)


def print_sweep(result: SweepResult) -> None:
    """Print what was measured, or what is left of a sweep that was interrupted."""
    folder, levels = result.folder, result.levels
    if result.interrupted:
        _print_levels(levels)
        kept = f"{len(levels)} finished level(s) kept in {folder}"
        note(f"interrupted: {kept}; continue with --resume --out {folder}")
        return
    if result.nothing_answered:
        fail(f"no request was answered{_first_error(result)}; the records are in {folder}")
        return
    assert result.pooled is not None  # a sweep that was not interrupted has a run
    pooled, knees = result.pooled, result.knees
    _print_measured(pooled.levels, [] if result.all_failed else knees)
    print_table("Spread over attempts, 95 %", spread_rows(pooled.levels), left=("level", "metric"))
    if (until := result.scenario.load.until) is not None:
        for text in unmet_until(levels, parse_until(until)):
            warn(text)
    print_slos(pooled, result.slos, result.slo_options, verdict=result.answer is None)
    if result.answer is not None:
        _print_answer(result, result.answer)
    if pooled.levels and not result.all_failed:
        say(level_block(_best_level(pooled.levels, knees)))
    say(f"run folder: {folder}   next: lmi-bench report {folder}")
    if result.failed:
        fail(f"no level is usable: {_failures(levels)}{_first_error(result)}")


def _print_answer(result: SweepResult, answer: SloAnswer) -> None:
    levels = result.levels
    say(describe_answer(answer))
    if (cost := cost_at(levels, answer)) is not None:
        say(cost)
    searched = result.scenario.load.search is not None
    if answer.value is not None and answer.first_breach is None and not searched:
        note("no SLO broke up to where the levels end; --search concurrency goes on beyond")
    if doubtful := _invalid_beside(answer, levels):
        warn(f"the answer rests on levels that are invalid: {', '.join(doubtful)}")


def _failures(levels: Sequence[Level]) -> str:
    errors, requests = sum(x.failed for x in levels), sum(x.sent for x in levels)
    return f"{errors:,} of {requests:,} requests failed"


def _invalid_beside(answer: SloAnswer, levels: Sequence[Level]) -> list[str]:
    """Names of the levels on both sides of a search's answer that the generator could not hold."""
    beside = (answer.value, answer.first_breach)
    lines = [line for line in levels if line.load.on(answer.load) in beside]
    return list(dict.fromkeys(line.name for line in lines if not line.valid))


def _first_error(result: SweepResult) -> str:
    """The first failed request's message, as the rest of a sentence."""
    for records in () if result.run is None else result.run.records:
        for record in records:
            if not record.ok:
                return f": {record.status}: {record.error}"
    return ""


def _best_level(levels: list[Level], knees: list[Knee]) -> Level:
    """The level to paste: that of the recommended knee, else the one with the most tokens/s."""
    knee = next((knee for knee in knees if knee.recommended), None)
    for line in levels:
        if knee is not None and line.load.on(knee.axis) == knee.load:
            return line
    return max(levels, key=lambda line: line.throughput_tokens_per_s or 0.0)


def _print_levels(levels: list[Level]) -> None:
    print_table("Levels", level_rows(levels), give_way=LEVEL_GIVE_WAY)


def _print_measured(levels: list[Level], knees: list[Knee]) -> None:
    """Levels by rising load, knees, and what is to be doubted."""
    levels = sorted(levels, key=lambda line: line.load.value)
    _print_levels(levels)
    print_table(
        "Knee by rule (* recommended)",
        knee_rows(knees),
        left=("rule", "cause", "change", "why"),
    )
    print_table(
        "Conversations",
        session_rows(levels),
        whole=("level",),
        give_way=("first turn p90", "turns mean"),
    )
    print_table("Engine", engine_rows(levels), whole=("level",))
    for text in replica_lines(levels):
        note(text)
    for text in check_levels(levels):
        warn(text)
    if (own_error := generator_line(levels)) is not None:
        say(own_error)
    if (counts := token_counts_line(levels)) is not None:
        say(counts)
    if (cost := cheapest(levels)) is not None:
        say(cost)


def cost_at(lines: Sequence[Level], answer: SloAnswer) -> str | None:
    """What output costs at the load of an answer, for people; None where nothing is priced."""
    at = [line for line in lines if line.load.on(answer.load) == answer.value]
    return f"  there {_costs(at[-1])}" if at and _is_priced(at[-1]) else None


def cheapest(lines: Sequence[Level]) -> str | None:
    """The level at which output costs least, for people; None where nothing is priced."""
    priced = [line for line in lines if _is_priced(line) and line.valid]
    if not priced:
        return None
    best = min(priced, key=lambda line: line.usd_per_1m_output_tokens or math.inf)
    return (
        f"cheapest at {load_name(best.load.axis, best.load.value)}: {_costs(best)}; the sweep took "
        f"{number(lines[-1].spent_usd, 2)} USD"
    )


def _is_priced(level: Level) -> bool:
    return level.usd_per_1m_output_tokens is not None


def _costs(level: Level) -> str:
    return (
        f"{level.usd_per_1m_output_tokens:.2f} USD per 1M output tokens, "
        f"{level.usd_per_1m_total_tokens:.2f} per 1M in and out, at "
        f"{level.price_usd_per_hour:.2f} USD an hour"
    )
