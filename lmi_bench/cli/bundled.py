"""The bundled engine's commands: serve, generate, optimize, compile, convert, perplexity ..."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lmi_bench.cli.command import JsonFile, spread_options
from lmi_bench.cli.console import heard, note, print_table, say, terminal, write_json
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.bundled import (
    AttentionSettings,
    CollectiveSettings,
    CompileSettings,
    ConvertSettings,
    GenerateSettings,
    OptimizeSettings,
    PerplexitySettings,
    ServeSettings,
)

if TYPE_CHECKING:
    from lmi_bench.engine.server.app import Listening

profile = typer.Typer(
    name="profile", help="Time single operations of this machine.", no_args_is_help=True
)


@spread_options
def serve(settings: ServeSettings) -> None:
    """Serve a model over HTTP: LMI, OpenAI, TGI and SageMaker's runtime paths, until Ctrl-C.

    With --executor simulated --instance ml.g5.2xlarge --model llama-2-7b it answers with the
    predicted timing of that instance and needs no GPU.

    Without an option, TGI's limits are read from the environment: MAX_CONCURRENT_REQUESTS,
    MAX_TOTAL_TOKENS, MAX_INPUT_TOKENS (or MAX_INPUT_LENGTH), MAX_BATCH_PREFILL_TOKENS,
    MAX_BATCH_TOTAL_TOKENS. With --serving-properties or OPTION_ variables, the settings are read
    as an LMI container reads them: an option overrides the file, the file the environment.
    """
    from lmi_bench.jobs.serve import serve as run

    with terminal() as listener:

        def on_ready(where: Listening, model: str) -> None:
            listener.close()
            if where.warning is not None:
                listener.warn(where.warning)
            say(f"serving {model} at {where.url}  (Ctrl-C ends it)")

        served = run(settings, listener, on_ready=on_ready)
    if served is not None:
        stats = served.stats
        note(
            f"generated {stats.done.generation_tokens:,} tokens in {stats.done.steps:,} steps; "
            f"{stats.used_blocks:,} of {stats.total_blocks:,} KV blocks in use at the end"
        )
        for line in served.notes:
            note(line)


@spread_options
def generate(settings: GenerateSettings) -> None:
    """Generate text with the bundled engine: the text on stdout, figures on stderr."""
    from lmi_bench.cli.bundled_print import print_choices, print_confidence, print_generated
    from lmi_bench.jobs.generate import answer_questions, rank_choices
    from lmi_bench.jobs.generate import generate as run

    with terminal() as listener:

        def show(text: str) -> None:
            listener.close()  # a progress line and the text would share the terminal's line
            sys.stdout.write(text)
            sys.stdout.flush()

        generated, ranked, table = None, None, None
        if settings.scores.questions is not None:
            table = answer_questions(settings, listener)
        elif settings.scores.choices:
            ranked = rank_choices(settings, listener)
        else:
            generated = run(settings, listener, on_text=show)
    if table is not None:
        print_confidence(table)
    if ranked is not None:
        print_choices(ranked)
    if generated is not None:
        print_generated(settings, generated)


@spread_options
def optimize(
    settings: OptimizeSettings,
    listed: Annotated[
        bool, Option("List of the techniques and the devices that each works on.", ("--list",))
    ] = False,
    plan: Annotated[
        bool,
        Option(
            "Plan only: the memory of each variant and the cheapest machine for it. --model may "
            "be a catalog name."
        ),
    ] = False,
) -> None:
    """Apply a recipe's techniques and measure each: quality, speed, memory and price.

    Every variant is loaded, scored on a text, compared with the baseline's greedy output and
    swept. The folder gets optimize.json, report.html, a run folder for each variant, and the
    quantized weights of variants with `save: true`, ready for `lmi-bench serve --model`.
    """
    from lmi_bench.cli.bundled_print import print_optimized, print_plan

    if listed:
        from lmi_bench.jobs.optimize.run import TECHNIQUES

        titles = ("recipe", "technique", "works on")
        rows = [dict(zip(titles, row, strict=True)) for row in TECHNIQUES]
        print_table("Techniques; a variant combines any of them", rows, left=titles)
    elif plan:
        from lmi_bench.jobs.optimize.recipe import plan_job

        print_plan(plan_job(settings))
    else:
        from lmi_bench.jobs.optimize.run import optimize as run

        found = heard(run, settings)
        print_optimized(found)


@spread_options
def compile_steps(settings: CompileSettings) -> None:
    """Compile a model's decode steps (torch.export, AOTInductor) and compare them with eager ones.

    `serve`, `sweep` and `generate` take the folder with --artefact and start without compiling.
    It fits one model shape, number formats, quantization, --tp, --block-size, kind of processor or
    GPU, and version of torch, but any weights. A step between two shapes is padded to the larger
    one; larger steps, and prompts, run without compiled steps.
    """
    from lmi_bench.jobs.bundled import compile_steps as run

    compiled = heard(run, settings)
    rows = [
        {
            "sequences": f"{each.shape.sequences}",
            "context tokens": f"{each.shape.context_tokens:,}",
            "largest logit difference": f"{each.largest:.2g}",
            "of logits' spread": f"{each.largest / each.spread:.1%}" if each.spread else "",
            "same likeliest token": f"{each.same_frac:.0%}",
        }
        for each in compiled.differences
    ]
    print_table("Compiled steps against eager ones, random contexts", rows)
    say(f"compiled steps: {compiled.folder}   use them with: --artefact {compiled.folder}")


@spread_options
def convert(settings: ConvertSettings) -> None:
    """Copy a model folder with .bin files into one with safetensors, which the engine needs.

    torch's restricted unpickler reads the pickle: it loads tensors and runs no code. The weights
    of both folders are hashed and compared.
    """
    from lmi_bench.jobs.bundled import convert as run

    converted = heard(run, settings)
    say(f"{converted.folder}: the same weights, sha256 {converted.sha256}")


@spread_options
def perplexity(settings: PerplexitySettings, json_file: JsonFile = None) -> None:
    """Measure the perplexity of a text by window length, with and without RoPE scaling.

    The text is cut into windows of each length, and each window is scored alone. A longer window
    lowers the perplexity within the positions that the model was trained for. Beyond them, with
    RoPE scaling, it may rise.
    """
    from lmi_bench.cli.bundled_print import print_perplexities
    from lmi_bench.jobs.bundled import perplexity as run

    found = heard(run, settings)
    print_perplexities(found)
    write_json(json_file, found.to_json(), "figures")


@profile.command()
@spread_options
def collectives(settings: CollectiveSettings) -> None:
    """Time the all-reduce of tensor parallelism by size, and fit latency + bytes / rate."""
    from lmi_bench.cli.bundled_print import print_collectives
    from lmi_bench.jobs.bundled import time_collectives

    found = heard(time_collectives, settings)
    print_collectives(found)
    if settings.out is not None:
        say(f"times: {settings.out}")


@profile.command()
@spread_options
def attention(settings: AttentionSettings) -> None:
    """Time a prompt's attention with its whole score matrix and in tiles, and count the bytes."""
    from lmi_bench.core.host import usable_cores
    from lmi_bench.core.units import MIB
    from lmi_bench.jobs.bundled import FLOAT32_BYTES, time_attention

    found = heard(time_attention, settings)
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
                "most apart": f"{times.worst_difference:.0e}",
            }
            for shape, times in found
        ],
    )
    note(
        "whole: every score is in memory; tiled: none is (FlashAttention). MiB: moved at least, "
        "when the scores do not fit a cache; FLOP/B: arithmetic intensity"
    )
