"""`lmi-bench generate`: text from the bundled engine, as it comes."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.errors import EXIT_FAILED
from lmi_bench.jobs.settings.generate import GenerateSettings

if TYPE_CHECKING:
    from lmi_bench.analysis.results.confidence import CalibrationTable
    from lmi_bench.jobs.choices import RankedChoice
    from lmi_bench.jobs.generate import Generated


@spread_options
def generate(settings: GenerateSettings) -> None:
    """Generate text with the bundled engine: the text on stdout, figures on stderr."""
    from lmi_bench.cli.console import terminal
    from lmi_bench.jobs.choices import answer_questions, rank_choices
    from lmi_bench.jobs.generate import generate as run

    with terminal() as listener:

        def show(text: str) -> None:
            listener.close()  # a progress line and the text would share the terminal's line
            sys.stdout.write(text)
            sys.stdout.flush()

        generated, ranked, table = None, None, None
        if settings.questions is not None:
            table = answer_questions(settings, listener)
        elif settings.choices:
            ranked = rank_choices(settings, listener)
        else:
            generated = run(settings, listener, on_text=show)
    if table is not None:
        _print_calibration(table)
    if ranked is not None:
        _print_choices(ranked)
    if generated is not None:
        _print_figures(settings, generated)


def _print_figures(settings: GenerateSettings, done: Generated) -> None:
    from lmi_bench.analysis.results.confidence import confidence
    from lmi_bench.cli.console import note, say, warn

    say("")  # ends the text's line
    stats = done.stats
    if stats.draft_acceptance_frac is not None:
        note(
            f"speculation: {stats.draft_acceptance_frac:.1%} of {stats.drafted_tokens} drafted "
            f"tokens held, {stats.tokens_per_decode:.2f} tokens a step"
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
    if settings.logprobs is not None:
        for token in done.scores:
            others = ", ".join(f"{text!r} {value:.3f}" for text, value in token.likeliest)
            line = f"{token.text!r} {token.logprob:.3f}"
            note(f"{line}; likeliest {others}" if others else line)
    if settings.confidence and done.scores:
        logprobs = [token.logprob for token in done.scores]
        note(
            f"confidence {confidence(logprobs):.3g} = exp(mean log-probability) of "
            f"{len(logprobs)} tokens; joint log-probability {math.fsum(logprobs):.2f}. Models are "
            "overconfident: compare, do not trust (--questions shows by how much)"
        )
    end = _end(done, settings.sampling.max_new_tokens)
    if settings.expect_end and done.finish_reason not in settings.expect_end:
        warn(f"{end}; --expect-end {' or '.join(settings.expect_end)} is not what happened")
        raise typer.Exit(EXIT_FAILED)
    note(end)


def _end(done: Generated, max_new_tokens: int) -> str:
    """Why the text ends where it does, and what to do if it should not."""
    match done.finish_reason:
        case "length" if done.tokens < max_new_tokens * done.requests:
            return (
                "cut off: prompt and text fill the model's context of "
                f"{done.context_tokens:,} tokens"
            )
        case "length":
            return (
                f"cut off: --max-new-tokens {max_new_tokens} were used up and the model had not "
                "ended; raise it, or ask on with --until-done"
            )
        case "stop_sequence" if done.stop_string is None:
            return "ended by a stop token"
        case "stop_sequence":
            return f"ended by the stop text {done.stop_string!r}, not by the model"
        case "context_full":
            return "cut off: the model's context is full"
        case reason:
            return f"ended by the model ({reason})"


def _print_choices(ranked: list[RankedChoice]) -> None:
    from lmi_bench.cli.console import print_table

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


def _print_calibration(table: CalibrationTable) -> None:
    from lmi_bench.cli.console import print_table, say

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
