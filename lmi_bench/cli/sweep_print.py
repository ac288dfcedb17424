"""What sweep, its matrix, compare and workload print: levels, knees, SLOs, cost, differences."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.results.compare import Difference
from lmi_bench.analysis.results.knee import NONE_RECOMMENDED, noise_of, taken_of
from lmi_bench.analysis.results.repeats import parse_until, pooled_run, unmet_until
from lmi_bench.analysis.results.sweep_curve import SweepCurve, sweep_curve, work_per_s
from lmi_bench.analysis.search.next_level import SATURATED_GAIN
from lmi_bench.cli.console import Terminal, fail, note, print_table, say, warn
from lmi_bench.core.findings import Knee, SloAnswer, recommended_knee
from lmi_bench.core.level import Level
from lmi_bench.core.load import load_name
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import GOOD_SHARE, Slo, parse_slo
from lmi_bench.jobs.matrix import Cell, MatrixResult
from lmi_bench.jobs.sweep.result import SloOptions, SweepResult, best_good_share, slo_outcome
from lmi_bench.report import text as run_text
from lmi_bench.report.formats import MISSING, metric_title, number
from lmi_bench.report.slo_text import met_and_missed, search_headline, slo_headline
from lmi_bench.report.tables import levels as tables
from lmi_bench.report.tables.extras import engine_rows, known_rows, session_rows, spread_rows, steadiness_line

if TYPE_CHECKING:  # loads the planner
    from lmi_bench.jobs.results import Comparison, Summary
    from lmi_bench.jobs.sweep.against import Contest


def print_sweep(result: SweepResult) -> None:
    """Print what was measured, or what is left of a sweep that was interrupted."""
    folder, levels = result.folder, result.levels
    if result.interrupted:
        print_table("Levels", tables.level_rows(levels), give_way=tables.LEVEL_GIVE_WAY)
        kept = f"{len(levels)} finished level(s) kept in {folder}"
        note(f"interrupted: {kept}; continue with --resume --out {folder}")
        return
    if result.nothing_answered:
        fail(f"no request was answered{_first_error(result)}; the records are in {folder}")
        return
    assert result.pooled is not None  # a sweep that was not interrupted has a run
    pooled, knees = result.pooled, result.knees
    say(*answer_lines(result))
    _print_measured(pooled.levels, [] if result.all_failed else knees)
    print_table("Spread over attempts, 95 %", spread_rows(pooled.levels), left=("level", "metric"))
    if (until := result.scenario.load.until) is not None:
        warn(*unmet_until(levels, parse_until(until)))
    print_slos(pooled, result.slos, result.slo_options)
    if (verdict := _slo_verdict(result)) is not None:
        say(verdict)
    if result.answer is not None:
        _print_answer(result, result.answer)
    if len(pooled.levels) == 1 and not result.all_failed:
        say(run_text.level_block(pooled.levels[0]))
    if result.failed:
        failed = f"{sum(x.failed for x in levels):,} of {sum(x.sent for x in levels):,}"
        fail(f"no level is usable: {failed} requests failed{_first_error(result)}")


def _slo_verdict(result: SweepResult) -> str | None:
    """The highest load within the SLOs, of a search or of the levels; None without SLOs."""
    assert result.pooled is not None
    found = search_headline(result.answer) or slo_headline(
        result.pooled.levels, result.pooled.records, result.slos, failures=result.slo_options.failures
    )
    if found is None:
        return None
    unknown = result.answer is not None and result.slo_outcome == "not measured"
    doubt = "not measured (too few requests); so far: " if unknown else ""
    return doubt + found.line


def _print_answer(result: SweepResult, answer: SloAnswer) -> None:
    levels = result.levels
    if (cost := cost_at(levels, answer)) is not None:
        say(cost)
    searched = result.scenario.load.search is not None
    if answer.value is not None and answer.first_breach is None and not searched:
        note("no SLO broke up to the highest level; --search concurrency tries higher loads")
    beside = [x for x in levels if x.load.on(answer.load) in (answer.value, answer.first_breach)]
    if doubtful := dict.fromkeys(line.name for line in beside if not line.valid):
        warn(f"the answer depends on invalid levels: {', '.join(doubtful)}")


def _first_error(result: SweepResult) -> str:
    """The first failed request's message, as the rest of a sentence."""
    for records in () if result.run is None else result.run.records:
        for record in records:
            if not record.ok:
                return f": {record.status}: {record.error}"
    return ""


def answer_lines(result: SweepResult) -> Iterator[str]:
    """What was measured, knee, most throughput, SLOs, biggest doubt and the next command."""
    assert result.pooled is not None
    levels, curve = result.pooled.levels, sweep_curve(result.pooled.levels)
    scenario = result.pooled.manifest.scenario
    took_s = math.fsum(line.wall_s or 0.0 for line in result.levels)
    yield (
        f"measured: {scenario.model} at {redact_text(scenario.target or '')}, "
        f"{len(levels)} level(s), {sum(line.sent for line in result.levels):,} requests in "
        f"{number(took_s)} s"
    )
    for known, name in ((line.known, line.name) for line in levels if line.known):
        between = f"{number(known.low_ms)} to {number(known.high_ms)} ms (95 %)"
        doubt = "" if known.reached else f", not within {known.asked:.0%} yet: more requests"
        yield f"  {metric_title(known.metric)}: {between} at {name}{doubt}"
    yield f"  knee: {_knee_text(result.knees, curve)}"
    if (best := curve.best) is not None:
        yield f"  most: {_level_text(best.line)} at {best.line.name}"
    if (verdict := _slo_verdict(result)) is not None:
        yield f"  {verdict.partition(', ')[0]}"
    yield f"  doubt: {_doubt(levels, curve)}"
    yield f"  next: lmi-bench report {result.folder}"


def _knee_text(knees: Sequence[Knee], curve: SweepCurve) -> str:
    knee = recommended_knee(knees)
    if knee is None or knee.load is None:
        reasons = (each.why.partition(NONE_RECOMMENDED)[2] for each in knees)
        return f"cannot tell: {next(filter(None, reasons), 'no level is within the limits')}"
    speeds = (f": {_level_text(each.line)}" for each in curve.points if each.load == knee.load)
    bound = ">= " if knee.high is None else ""
    between = "" if knee.high is None else f" ({tables.knee_interval(knee)})"
    return f"{bound}{load_name(knee.axis, knee.load)}{between}{next(speeds, '')}"


def _level_text(line: Level) -> str:
    what, metric = ("input tok/s", "e2e") if line.is_tokenless else ("tok/s", "ttft")
    speed, found = f"{number(work_per_s(line))} {what}", line.of(metric)
    named, value_ms = ("p90", found.p90) if found.p90 is not None else ("mean", found.mean)
    return speed if value_ms is None else f"{speed}, {metric.upper()} {named} {number(value_ms)} ms"


def _doubt(levels: Sequence[Level], curve: SweepCurve) -> str:
    """The first reason to distrust the curve: noise, a warning, or loads that were not tried."""
    noise, name = noise_of(levels)
    taken = taken_of(levels)
    warnings = check_levels(levels)
    if taken > SATURATED_GAIN:
        return f"others took {taken:.0%} of this machine's CPU time, which the server lacked"
    if noise > SATURATED_GAIN:  # a difference that hides a gain of this size
        return f"{name} differed by {noise:.0%} in throughput when it was measured again"
    if warnings:
        return warnings[0]
    rates = [point.throughput_tokens_per_s or 0.0 for point in curve.usable]
    if len(rates) > 1 and rates[-1] > (1 + SATURATED_GAIN) * max(rates[:-1]):
        return f"throughput still grew at {curve.usable[-1].line.name}, the highest level"
    return "no check failed; one run does not show how much runs differ: --repeat 3"


def _print_measured(levels: list[Level], knees: list[Knee]) -> None:
    """Levels by rising load, knees, and warnings."""
    levels = sorted(levels, key=lambda line: line.load.value)
    print_table("Levels", tables.level_rows(levels), give_way=tables.LEVEL_GIVE_WAY)
    print_table(
        "Knee by rule (* recommended)",
        tables.knee_rows(sweep_curve(levels).axis, knees),
        left=("rule", "what binds", "why"),
    )
    print_table("Conversations", session_rows(levels), whole=("level",), give_way=("first turn p90", "turns mean"))
    print_table("Engine", engine_rows(levels), whole=("level",))
    print_table("Percentile asked for, 95 %", known_rows(levels), left=("level", "metric"))
    note(*run_text.replica_lines(levels))
    warn(*check_levels(levels))
    facts = run_text.generator_line, steadiness_line, run_text.token_counts_line, run_text.ttft_parts_line, cheapest
    say(*filter(None, (fact(levels) for fact in facts)))


def cost_at(lines: Sequence[Level], answer: SloAnswer) -> str | None:
    """The cost of output at the load of an answer; None without a price."""
    at = [line for line in lines if line.load.on(answer.load) == answer.value]
    return f"  there {_costs(at[-1])}" if at and _is_priced(at[-1]) else None


def cheapest(lines: Sequence[Level]) -> str | None:
    """The level with the cheapest output; None without a price."""
    priced = [line for line in lines if _is_priced(line) and line.valid]
    if not priced:
        return None
    best = min(priced, key=lambda line: line.usd_per_1m_output_tokens or math.inf)
    return (
        f"cheapest at {load_name(best.load.axis, best.load.value)}: {_costs(best)}; the sweep took "
        f"{number(max(line.spent_usd or 0.0 for line in lines), 2)} USD"
    )


def _is_priced(level: Level) -> bool:
    return level.usd_per_1m_output_tokens is not None


def _costs(level: Level) -> str:
    return (
        f"{level.usd_per_1m_output_tokens:.2f} USD per 1M output tokens, "
        f"{level.usd_per_1m_total_tokens:.2f} per 1M in and out, at "
        f"{level.price_usd_per_hour:.2f} USD an hour"
    )


def print_slos(run: Run, slos: Sequence[Slo], options: SloOptions) -> None:
    """Print goodput and each SLO by level, the lowest load first."""
    if not slos and not options.limits:
        return
    ordered = sorted(zip(run.levels, run.records, strict=True), key=lambda pair: pair[0].load.value)
    lines, records = [line for line, _ in ordered], [kept for _, kept in ordered]
    fields = tables.slo_fields(lines, records, slos, options.limits, options.failures)
    limits = ", ".join(limit.of_a_request for limit in options.limits)
    by = limits or ", ".join(map(str, slos))
    rows = tables.named_rows(fields, lines)
    print_table(f"Goodput: requests that meet {by}", rows, left=("level",))
    outcome, best = slo_outcome(run, slos, options), best_good_share(run, options.limits)
    if not slos and outcome == "missed":
        say(
            f"goodput missed: no level has {GOOD_SHARE:.0%} of its requests within {limits}; "
            f"the best has {best or 0:.1%}"
        )
    elif not slos and outcome == "not measured":
        say(f"goodput not measured: no valid level has answers that show {limits}; those in one piece show e2e alone")


def print_changes(contest: "Contest") -> None:
    """Print what two targets in turn have shown, a line for each level, and what to do next."""
    folders = [str(side.folder) for side in contest.sides]
    if contest.interrupted:
        note(f"interrupted: the same command with --resume goes on; kept: {', '.join(folders)}")
    say(*[str(each) for each in contest.changes] or ["no round has a valid level on both sides"])
    if len(folders) > 1:
        say(f"  next: lmi-bench compare {' '.join(folders)}")


def print_cell(listener: Terminal, name: str, result: SweepResult | None) -> None:
    """Print the heading of a cell that begins, or its result when it is over."""
    if result is None:
        say(f"\n== {name} ==")
        return
    listener.close()  # a progress line would be drawn over the tables
    print_sweep(result)


def print_matrix(result: MatrixResult) -> None:
    """Print the table over all cells, and where the report is."""
    print_table(
        "Matrix",
        [*map(_row, result.cells)],
        whole=("target", "payload"),
        left=("knee", "at", "highest under SLO", "state"),
        give_way=("USD/1M out", "ms/token there", "at"),
    )
    say(*(f"{each.title} failed: {each.error}" for each in result.cells if each.error))
    if result.report is not None:
        say(f"matrix folder: {result.folder}   report: {result.report}")
    if result.interrupted:
        note(f"interrupted: continue with --matrix {result.file} --resume --out {result.folder}")


def _row(each: Cell) -> dict[str, str]:
    unknown = ("knee", "best tok/s", "at", "ms/token there", "highest under SLO", "USD/1M out")
    row = {"target": each.target, "payload": each.payload}
    row |= dict.fromkeys(unknown, MISSING) | {"state": each.state}
    run = each.run
    if run is None or not run.levels:
        return row
    pooled = pooled_run(run)
    curve = sweep_curve(pooled.levels)
    knee = recommended_knee(run.knees or ())
    if knee is not None and knee.axis == curve.axis and knee.load is not None:
        row["knee"] = f"{'>= ' if knee.high is None else ''}{load_name(curve.axis, knee.load)}"
    answer = run.slo_answer
    if answer is not None and answer.value is not None:
        row["highest under SLO"] = load_name(answer.load, answer.value)
    else:
        slos = [parse_slo(text) for text in run.manifest.scenario.slo]
        met = met_and_missed(pooled.levels, pooled.records, slos)[0] if slos else None
        if met is not None:
            row["highest under SLO"] = met.name
    if (best := curve.best) is not None:
        row["best tok/s"] = number(best.throughput_tokens_per_s)
        row["at"] = load_name(curve.axis, best.load)
        row["ms/token there"] = number(best.latency_ms_per_token)
    prices = (line.usd_per_1m_output_tokens for line in pooled.levels if line.valid)
    row["USD/1M out"] = number(min((each for each in prices if each is not None), default=None))
    return row


def print_comparison(comparison: "Comparison") -> None:
    """Each difference with its interval and verdict, and the scaling efficiency."""
    title = f"{comparison.b} against {comparison.a}"
    print_table(
        title,
        [_difference_row(each) for each in comparison.differences],
        left=("metric",),
        whole=("level",),
        give_way=("A", "B", "sees"),
    )
    counts = Counter(each.verdict for each in comparison.differences)
    say(f"{title}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if (scaling := comparison.scaling) is not None:
        edge = "; a best level is the highest that was run, so more load may change it"
        say(
            f"{scaling.many} copies give {number(scaling.many_tokens_per_s)} tok/s at their best "
            f"level, {scaling.few} {number(scaling.few_tokens_per_s)}: scaling efficiency "
            f"{scaling.efficiency_frac:.0%} (aggregate / (copies x one copy's))" + (edge if scaling.edge else "")
        )
    note(
        "intervals: 95 % each, paired bootstrap over requests; verdicts: 95 % for all together "
        "(Holm); sees: the smallest change that 80 of 100 such comparisons claim. Runs vary "
        "more than requests do: repeat them"
    )


def _difference_row(each: Difference) -> dict[str, str]:
    known = each.change is not None and each.low is not None and each.high is not None
    return {
        "level": each.level,
        "metric": f"{each.metric}, {each.unit}",
        "A": number(each.a),
        "B": number(each.b),
        "change": f"{each.change:+.1%}" if known else MISSING,
        "95 %": f"{each.low:+.1%} to {each.high:+.1%}" if known else each.reason,
        "verdict": each.verdict,
        "sees": MISSING if each.detectable is None else f"{each.detectable:.0%}",
    }


def print_workload(found: "Summary") -> None:
    """The kinds of request, rates and prefixes of a source, and what it does not contain."""
    rows = [
        {
            "input tokens": f"{kind.input_tokens:,}",
            "output tokens": f"{kind.output_tokens:,}",
            "share": f"{kind.share:.1%}",
        }
        for kind in found.kinds
    ]
    print_table("Kinds of request", rows)
    say(*_facts(found), *found.notes, *(f"not known: {text}" for text in found.unknown))


def _facts(found: "Summary") -> Iterator[str]:
    tokens_in = sum(kind.input_tokens * kind.share for kind in found.kinds)
    tokens_out = sum(kind.output_tokens * kind.share for kind in found.kinds)
    yield (
        f"mean lengths: {tokens_in:,.0f} in / {tokens_out:,.0f} out"
        + ("" if found.correlation is None else f", correlation {found.correlation:+.2f}")
    )
    if found.peak_per_s is not None and found.mean_per_s is not None:
        yield (f"rate: {found.peak_per_s:,.4g} req/s in the busiest five minutes, {found.mean_per_s:,.4g} on average")
    if found.bursts is not None and found.bursts.shape is not None:
        yield f"burstiness {found.bursts.shape:.3g} (1 is Poisson), by {found.bursts.how}"
    if found.shared_tokens is not None and found.repeated is not None:
        yield (
            f"shared prefix: {found.shared_tokens:,} tokens of at least half of the prompts; "
            f"{found.repeated:.0%} of all prompt text repeats the beginning of another prompt"
        )
