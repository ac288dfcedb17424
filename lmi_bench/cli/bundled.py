"""The bundled engine's commands: serve, generate, optimize, compile, convert, perplexity ..."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lmi_bench.cli.command import JsonFile, spread_options
from lmi_bench.cli.console import Terminal, note, print_table, run_job, say, warn, write_json
from lmi_bench.core.errors import EXIT_FAILED
from lmi_bench.core.option import Option
from lmi_bench.core.units import MIB, bytes_to_gib
from lmi_bench.jobs.settings import bundled

if TYPE_CHECKING:
    from lmi_bench.catalog.instances import Instance
    from lmi_bench.engine.server.app import Listening
    from lmi_bench.jobs.generate import Generated
    from lmi_bench.jobs.optimize.recipe import MemoryNeed

profile = typer.Typer(name="profile", help="Time single operations of this machine.", no_args_is_help=True)


@spread_options
def serve(settings: bundled.ServeSettings) -> None:
    """Serve a model over HTTP: LMI, OpenAI, TGI and SageMaker's runtime paths, until Ctrl-C.

    With --executor simulated --instance ml.g5.2xlarge --model llama-2-7b it answers with the
    predicted timing of that instance and needs no GPU.

    Without an option, TGI's limits are read from the environment: MAX_CONCURRENT_REQUESTS,
    MAX_TOTAL_TOKENS, MAX_INPUT_TOKENS (or MAX_INPUT_LENGTH), MAX_BATCH_PREFILL_TOKENS,
    MAX_BATCH_TOTAL_TOKENS. With --serving-properties or OPTION_ variables, the settings are read
    as an LMI container reads them: an option overrides the file, the file the environment.
    """
    from lmi_bench.jobs.serve import serve as run

    with Terminal() as listener:

        def on_ready(where: Listening, model: str) -> None:
            listener.close()
            if where.warning is not None:
                listener.warn(where.warning)
            say(f"serving {model} at {where.url}  (Ctrl-C ends it)")

        stats, notes = run(settings, listener, on_ready=on_ready)
    note(
        f"generated {stats.done.generation_tokens:,} tokens in {stats.done.steps:,} steps; "
        f"{stats.used_blocks:,} of {stats.total_blocks:,} KV blocks in use at the end"
    )
    note(*notes)


@spread_options
def generate(settings: bundled.GenerateSettings) -> None:
    """Generate text with the bundled engine: the text on stdout, figures on stderr."""
    from lmi_bench.jobs.generate import answer_questions, rank_choices
    from lmi_bench.jobs.generate import generate as run

    if settings.questions is not None:
        table = run_job(answer_questions, settings)
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
    elif settings.choices:
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
                for each in run_job(rank_choices, settings)
            ],
            left=("choice",),
        )
    else:
        with Terminal() as listener:

            def show(text: str) -> None:
                listener.close()  # a progress line and the text would share the terminal's line
                sys.stdout.write(text)
                sys.stdout.flush()

            generated = run(settings, listener, on_text=show)
        _print_generated(settings, generated)


def _print_generated(settings: bundled.GenerateSettings, done: Generated) -> None:
    """The text's timing, scores and end; exits with an error if it ended unexpectedly."""
    from lmi_bench.analysis.results.confidence import confidence

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
        timing = f" and {done.seconds:.2f} s: {speed:.1f} tok/s, first token after {1e3 * done.first_token_s:.0f} ms"
    noun = "request" if done.requests == 1 else "requests"
    note(f"{done.tokens} tokens in {done.requests} {noun}{timing}, ended by {done.finish_reason}; {done.back_end_note}")
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
            "overconfident (--questions measures by how much): use it for comparisons"
        )
    end = _end(done, settings.sampling.max_new_tokens)
    if settings.expect_end and done.finish_reason not in settings.expect_end:
        warn(f"{end}; expected: {' or '.join(settings.expect_end)} (--expect-end)")
        raise typer.Exit(EXIT_FAILED)
    note(end)


def _end(done: Generated, max_new_tokens: int) -> str:
    """Why the text ended, and what to do about it."""
    match done.finish_reason:
        case "length" if done.tokens < max_new_tokens * done.requests:
            return f"cut off: prompt and text fill the model's context of {done.context_tokens:,} tokens"
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


@spread_options
def optimize(
    settings: bundled.OptimizeSettings,
    listed: Annotated[bool, Option("List of the techniques and the devices that each works on.", ("--list",))] = False,
    plan: Annotated[
        bool,
        Option("Plan only: the memory of each variant and the cheapest machine for it. --model may be a catalog name."),
    ] = False,
) -> None:
    """Apply a recipe's techniques and measure each: quality, speed, memory and price.

    Every variant is loaded, scored on a text, compared with the baseline's greedy output and
    swept. The folder gets optimize.json, report.html, a run folder for each variant, and the
    quantized weights of variants with `save: true`, ready for `lmi-bench serve --model`.
    """
    if listed:
        from lmi_bench.jobs.optimize.run import TECHNIQUES

        print_table("Techniques; a variant combines any of them", TECHNIQUES, left=tuple(TECHNIQUES[0]))
    elif plan:
        from lmi_bench.jobs.optimize.recipe import plan_job

        _print_plan(*plan_job(settings))
    else:
        from lmi_bench.jobs.optimize.run import optimize as run
        from lmi_bench.report.optimization import optimization_tables

        folder, variants = run_job(run, settings)
        for table in optimization_tables(variants):
            columns = [column.title for column in table.columns]
            texts = ([cell.text for cell in row.cells] for row in table.rows)
            rows = [dict(zip(columns, each, strict=True)) for each in texts]
            print_table(table.caption, rows, left=columns[:1])
            if table.note:
                note(table.note)
        say(f"report: {folder / 'report.html'}   numbers: {folder / 'optimize.json'}")


def _print_plan(model: str, needs: Sequence[tuple[MemoryNeed, Instance | None]], best: Instance | None) -> None:
    rows = [
        {
            "variant": need.name,
            "prepare GiB": f"{bytes_to_gib(need.prepare_bytes):.1f}",
            "measure GiB": f"{bytes_to_gib(need.measure_bytes):.1f}",
            "cheapest machine": "none" if machine is None else machine.instance_type,
            "USD/h": "" if machine is None else f"{machine.price_usd_per_hour:.2f}",
        }
        for need, machine in needs
    ]
    print_table(f"{model}: what the job needs", rows, left=("variant", "cheapest machine"))
    if best is None:
        note("no machine of the catalog fits the largest variant: leave it out, or split the model")
        return
    note(
        f"one machine for the whole job: {best.instance_type} ({best.num_accelerators} x "
        f"{best.accelerator.name}), {best.price_usd_per_hour:.2f} USD/h ({best.price_provenance})"
    )


@spread_options
def compile_steps(settings: bundled.CompileSettings) -> None:
    """Compile a model's decode steps (torch.export, AOTInductor) and compare them with eager ones.

    `serve`, `sweep` and `generate` take the folder with --artefact and start without compiling.
    It fits one model shape, number formats, quantization, --tp, --block-size, kind of processor or
    GPU, and version of torch, but any weights. A step between two shapes is padded to the larger
    one; larger steps, and prompts, run without compiled steps.
    """
    from lmi_bench.jobs.bundled import compile_steps as run

    rows = [
        {
            "sequences": f"{each.shape.sequences}",
            "context tokens": f"{each.shape.context_tokens:,}",
            "largest logit difference": f"{each.largest:.2g}",
            "of logits' spread": f"{each.largest / each.spread:.1%}" if each.spread else "",
            "same likeliest token": f"{each.same_frac:.0%}",
        }
        for each in run_job(run, settings)
    ]
    print_table("Compiled steps against eager ones, random contexts", rows)
    say(f"compiled steps: {settings.out}   use them with: --artefact {settings.out}")


@spread_options
def convert(settings: bundled.ConvertSettings) -> None:
    """Copy a model folder with .bin files into one with safetensors, which the engine needs.

    torch's restricted unpickler reads the pickle: it loads tensors and runs no code. The weights
    of both folders are hashed and compared.
    """
    from lmi_bench.jobs.bundled import convert as run

    say(f"{settings.out}: the same weights, sha256 {run_job(run, settings)}")


@spread_options
def perplexity(settings: bundled.PerplexitySettings, json_file: JsonFile = None) -> None:
    """Measure the perplexity of a text by window length, with and without RoPE scaling.

    The text is cut into windows of each length, and each window is scored alone. A longer window
    lowers the perplexity within the positions that the model was trained for. Beyond them, with
    RoPE scaling, it may rise.
    """
    from lmi_bench.jobs.bundled import AS_TRAINED
    from lmi_bench.jobs.bundled import perplexity as run
    from lmi_bench.report.formats import MISSING, number

    found = run_job(run, settings)
    rows = []
    for length in found.lengths:
        cells = {"tokens at once": f"{length:,}"}
        for scaling, scores in found.scores.items():
            at = scores.get(length)
            name = scaling or AS_TRAINED
            cells[f"{name}: all"] = MISSING if at is None else number(at.perplexity, 4)
            cells[f"{name}: 2nd half"] = MISSING if at is None else number(at.far_perplexity, 4)
        rows.append(cells)
    print_table(f"Perplexity of {found.settings.model}, trained for {found.max_positions:,} positions", rows)
    if any(length not in scores for scores in found.scores.values() for length in found.lengths):
        note(f"{MISSING}: longer than the text or the trained positions (see --rope-scaling)")
    write_json(json_file, found.to_json(), "figures")


@profile.command()
@spread_options
def collectives(settings: bundled.CollectiveSettings) -> None:
    """Time the all-reduce of tensor parallelism by size, and fit latency + bytes / rate."""
    from lmi_bench.jobs.bundled import SIZES_BYTES, time_collectives

    def shown(value: float) -> str:
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

    found = run_job(time_collectives, settings)
    print_table(
        f"All-reduce of {found.ranks} ranks, us a call (float32 arrays, median of {found.rounds} rounds)",
        [
            {
                "KiB": size // 1024,
                **{name.replace("_", " "): shown(times_s[i] * 1e6) for name, times_s in found.times_s.items()},
            }
            for i, size in enumerate(SIZES_BYTES)
        ],
    )
    print_table(
        "time = latency + bytes / rate",
        [
            {
                "transport": name.replace("_", " "),
                "latency us": shown(fit.latency_s * 1e6),
                "rate GB/s": shown(fit.bytes_per_s / 1e9),
                "worst error %": round(100 * fit.worst_error_frac),
            }
            for name, fit in found.fits.items()
        ],
        left=("transport",),
    )
    if settings.out is not None:
        say(f"times: {settings.out}")


@profile.command()
@spread_options
def attention(settings: bundled.AttentionSettings) -> None:
    """Time a prompt's attention with its whole score matrix and in tiles, and count the bytes."""
    from lmi_bench.core.host import usable_cores
    from lmi_bench.jobs.bundled import FLOAT32_BYTES, time_attention

    print_table(
        f"Attention of one layer over a prompt ({settings.heads} heads of {settings.head_dim}, "
        f"float32, {usable_cores()} threads, median of {settings.rounds})",
        [
            {
                "tokens": f"{shape.tokens:,}",
                "whole ms": f"{1e3 * times.whole_s:.1f}",
                "tiled ms": f"{1e3 * times.tiled_s:.1f}",
                "ratio": f"{times.whole_s / times.tiled_s:.1f}",
                "whole MiB": f"{shape.whole_bytes(FLOAT32_BYTES) / MIB:,.0f}",
                "tiled MiB": f"{shape.tiled_bytes(FLOAT32_BYTES) / MIB:,.0f}",
                "whole FLOP/B": f"{shape.flop / shape.whole_bytes(FLOAT32_BYTES):,.0f}",
                "tiled FLOP/B": f"{shape.flop / shape.tiled_bytes(FLOAT32_BYTES):,.0f}",
                "largest difference": f"{times.worst_difference:.0e}",
            }
            for shape, times in run_job(time_attention, settings)
        ],
    )
    note(
        "whole: every score is in memory; tiled: none is (FlashAttention). MiB: moved at least, "
        "when the scores do not fit a cache; FLOP/B: arithmetic intensity"
    )
