"""What a sweep prints: levels, knees, SLOs, cost, and what is to be doubted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmi_bench.analysis.results.checks import check_levels, level_name
from lmi_bench.analysis.results.knee import Knee
from lmi_bench.analysis.results.repeats import parse_until, unmet_until
from lmi_bench.analysis.search.slo_boundary import SloAnswer
from lmi_bench.cli.console import fail, note, print_table, say, warn
from lmi_bench.cli.slo_print import print_slos
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


def _failures(levels: Sequence[Mapping[str, Any]]) -> str:
    errors, requests = (sum(line[key] for line in levels) for key in ("errors", "requests"))
    return f"{errors:,} of {requests:,} requests failed"


def _invalid_beside(answer: SloAnswer, levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the levels on both sides of a search's answer that the generator could not hold."""
    beside = (answer.value, answer.first_breach)
    lines = [line for line in levels if line.get(answer.load) in beside]
    return list(dict.fromkeys(level_name(line) for line in lines if not line.get("valid", True)))


def _first_error(result: SweepResult) -> str:
    """The first failed request's message, as the rest of a sentence."""
    for records in () if result.run is None else result.run.records:
        for record in records:
            if not record.ok:
                return f": {record.status}: {record.error}"
    return ""


def _best_level(levels: list[dict[str, Any]], knees: list[Knee]) -> dict[str, Any]:
    """The level to paste: that of the recommended knee, else the one with the most tokens/s."""
    knee = next((knee for knee in knees if knee.recommended), None)
    for line in levels:
        if knee is not None and line.get(knee.axis) == knee.load:
            return line
    return max(levels, key=lambda line: line.get("throughput_tokens_per_s") or 0.0)


def _print_levels(levels: list[dict[str, Any]]) -> None:
    print_table("Levels", level_rows(levels), give_way=LEVEL_GIVE_WAY)


def _load(line: Mapping[str, Any]) -> float:
    """What a level asked for; levels that were picked as the sweep went were run in any order."""
    return float(line.get("concurrency") or line.get("rate_per_s") or 0.0)


def _print_measured(levels: list[dict[str, Any]], knees: list[Knee]) -> None:
    """Levels by rising load, knees, and what is to be doubted."""
    levels = sorted(levels, key=_load)
    _print_levels(levels)
    print_table(
        "Knee by rule (* recommended)",
        knee_rows([knee.to_dict() for knee in knees]),
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


def cost_at(lines: Sequence[Mapping[str, Any]], answer: SloAnswer) -> str | None:
    """What output costs at the load of an answer, for people; None where nothing is priced."""
    at = [line for line in lines if line.get(answer.load) == answer.value]
    cost = at[-1].get("usd_per_1m_output_tokens") if at else None
    if cost is None:
        return None
    return (
        f"  there {cost:.2f} USD per 1M output tokens, "
        f"{at[-1]['usd_per_1m_total_tokens']:.2f} per 1M in and out, at "
        f"{at[-1]['price_usd_per_hour']:.2f} USD an hour"
    )


def cheapest(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The level at which output costs least, for people; None where nothing is priced."""
    priced = [
        line for line in lines if line.get("usd_per_1m_output_tokens") is not None and line["valid"]
    ]
    if not priced:
        return None
    best = min(priced, key=lambda line: float(line["usd_per_1m_output_tokens"]))
    load = (
        f"concurrency {best['concurrency']}"
        if best["concurrency"] is not None
        else f"{best['rate_per_s']:g} req/s"
    )
    return (
        f"cheapest at {load}: {best['usd_per_1m_output_tokens']:.2f} USD per 1M output tokens, "
        f"{best['usd_per_1m_total_tokens']:.2f} per 1M in and out, at "
        f"{best['price_usd_per_hour']:.2f} USD an hour; the sweep took "
        f"{number(lines[-1]['spent_usd'], 2)} USD"
    )
