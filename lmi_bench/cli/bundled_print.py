"""What the bundled engine's commands print: timing, scores, variants, perplexity, profiles."""

from __future__ import annotations

import math

import typer

from lmi_bench.analysis.results.confidence import CalibrationTable, confidence
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.core.errors import EXIT_FAILED
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.jobs.bundled import AS_TRAINED, SIZES_BYTES, AllReduces, Perplexities
from lmi_bench.jobs.generate import Generated, RankedChoice
from lmi_bench.jobs.optimize.recipe import JobPlan
from lmi_bench.jobs.optimize.run import Optimized
from lmi_bench.jobs.settings.bundled import GenerateSettings
from lmi_bench.report.formats import MISSING, number
from lmi_bench.report.optimization import optimization_tables


def print_generated(settings: GenerateSettings, done: Generated) -> None:
    """The text's timing, scores and end; exits with an error if it ended unexpectedly."""
    say("")  # ends the text's line
    stats = done.stats
    if stats.draft_acceptance_frac is not None:
        note(
            f"speculation: {stats.draft_acceptance_frac:.1%} of {stats.drafted_tokens} drafted "
            f"tokens accepted, {stats.tokens_per_decode:.2f} tokens a step"
        )
    timing = ""
    if done.seconds is not None:
        speed = done.tokens / done.seconds if done.seconds else 0.0
        timing = (
            f" and {done.seconds:.2f} s: {speed:.1f} tok/s, first token after "
            f"{1e3 * done.first_token_s:.0f} ms"
        )
    noun = "request" if done.requests == 1 else "requests"
    note(
        f"{done.tokens} tokens in {done.requests} {noun}{timing}, ended by {done.finish_reason}; "
        f"{done.back_end_note}"
    )
    if settings.scores.logprobs is not None:
        for token in done.scores:
            others = ", ".join(f"{text!r} {value:.3f}" for text, value in token.likeliest)
            line = f"{token.text!r} {token.logprob:.3f}"
            note(f"{line}; likeliest {others}" if others else line)
    if settings.scores.confidence and done.scores:
        logprobs = [token.logprob for token in done.scores]
        note(
            f"confidence {confidence(logprobs):.3g} = exp(mean log-probability) of "
            f"{len(logprobs)} tokens; joint log-probability {math.fsum(logprobs):.2f}. Models are "
            "overconfident (--questions measures by how much): use it for comparisons"
        )
    end = _end(done, settings.sampling.max_new_tokens)
    if settings.scores.expect_end and done.finish_reason not in settings.scores.expect_end:
        warn(f"{end}; expected: {' or '.join(settings.scores.expect_end)} (--expect-end)")
        raise typer.Exit(EXIT_FAILED)
    note(end)


def _end(done: Generated, max_new_tokens: int) -> str:
    """Why the text ended, and what to do about it."""
    match done.finish_reason:
        case "length" if done.tokens < max_new_tokens * done.requests:
            return (
                "cut off: prompt and text fill the model's context of "
                f"{done.context_tokens:,} tokens"
            )
        case "length":
            return (
                f"cut off: the limit of --max-new-tokens {max_new_tokens} was reached; raise it, "
                "or continue with --until-done"
            )
        case "stop_sequence" if done.stop_string is None:
            return "ended by a stop token"
        case "stop_sequence":
            return f"ended by the stop text {done.stop_string!r}, not by the model"
        case "context_full":
            return "cut off: the model's context is full"
        case reason:
            return f"ended by the model ({reason})"


def print_choices(ranked: list[RankedChoice]) -> None:
    """The choices, the likeliest first."""
    print_table(
        "Choices by joint log-probability",
        [
            {
                "choice": each.choice.strip(),
                "tokens": each.tokens,
                "joint log-probability": f"{each.joint_logprob:.3f}",
                "confidence": f"{each.confidence:.3g}",
                "share of the choices": f"{each.share:.1%}",
            }
            for each in ranked
        ],
        left=("choice",),
    )


def print_confidence(table: CalibrationTable) -> None:
    """The model's confidence beside its share of right answers."""
    print_table(
        "The likeliest answer: how sure the model is, and how often it is right",
        [
            {
                "share given": f"{row.low_frac:.0%} to {row.high_frac:.0%}",
                "questions": row.count,
                "mean share": f"{row.mean_confidence:.1%}",
                "right": f"{row.right_frac:.1%}",
                "too sure by": f"{row.mean_confidence - row.right_frac:+.1%}",
            }
            for row in table.rows
        ],
        left=("share given",),
    )
    say(
        f"{table.right} of {table.count} right ({table.right_frac:.1%}), mean share "
        f"{table.mean_confidence:.1%}; expected calibration error {table.expected_error:.1%}"
    )


def print_optimized(found: Optimized) -> None:
    """The tables of the variants, and where the report is."""
    for table in optimization_tables(found.variants):
        titles = [column.title for column in table.columns]
        rows = [dict(zip(titles, (c.text for c in row.cells), strict=True)) for row in table.rows]
        print_table(table.caption, rows, left=titles[:1])
        if table.note:
            note(table.note)
    say(f"report: {found.folder / 'report.html'}   numbers: {found.folder / 'optimize.json'}")


def print_plan(plan: JobPlan) -> None:
    """The memory of each variant and the cheapest machines."""
    rows = [
        {
            "variant": need.name,
            "prepare GiB": f"{bytes_to_gib(need.prepare_bytes):.1f}",
            "measure GiB": f"{bytes_to_gib(need.measure_bytes):.1f}",
            "cheapest machine": "none" if machine is None else machine.instance_type,
            "USD/h": "" if machine is None else f"{machine.price_usd_per_hour:.2f}",
        }
        for need, machine in plan.needs
    ]
    print_table(f"{plan.model}: what the job needs", rows, left=("variant", "cheapest machine"))
    best = plan.machine
    if best is None:
        note("no machine of the catalog fits the largest variant: leave it out, or split the model")
        return
    note(
        f"one machine for the whole job: {best.instance_type} ({best.num_accelerators} x "
        f"{best.accelerator.name}), {best.price_usd_per_hour:.2f} USD/h ({best.price_provenance})"
    )


def print_perplexities(found: Perplexities) -> None:
    """Perplexity by window length and RoPE scaling."""
    rows = []
    for length in found.lengths:
        cells = {"tokens at once": f"{length:,}"}
        for scaling, scores in found.scores.items():
            at = scores.get(length)
            name = scaling or AS_TRAINED
            cells[f"{name}: all"] = MISSING if at is None else number(at.perplexity, 4)
            cells[f"{name}: 2nd half"] = MISSING if at is None else number(at.far_perplexity, 4)
        rows.append(cells)
    print_table(
        f"Perplexity of {found.settings.model}, trained for {found.max_positions:,} positions", rows
    )
    if any(length not in scores for scores in found.scores.values() for length in found.lengths):
        note(f"{MISSING}: longer than the text or the trained positions (see --rope-scaling)")


def print_collectives(found: AllReduces) -> None:
    """Times of an all-reduce by size, and their fit."""
    print_table(
        f"All-reduce of {found.ranks} ranks, us a call (float32 arrays, median of "
        f"{found.rounds} rounds)",
        [
            {
                "KiB": size // 1024,
                **{
                    name.replace("_", " "): _shown(times_s[i] * 1e6)
                    for name, times_s in found.times_s.items()
                },
            }
            for i, size in enumerate(SIZES_BYTES)
        ],
    )
    print_table(
        "time = latency + bytes / rate",
        [
            {
                "transport": name.replace("_", " "),
                "latency us": _shown(fit.latency_s * 1e6),
                "rate GB/s": _shown(fit.bytes_per_s / 1e9),
                "worst error %": round(100 * fit.worst_error_frac),
            }
            for name, fit in found.fits.items()
        ],
        left=("transport",),
    )


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
