"""`lmi-bench compile`: decode steps compiled ahead of time, for `--artefact`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.cli.options.engine import BatchingOptions, ModelOptions, stated_settings
from lmi_bench.cli.options.spread import spread_options


@spread_options
def compile_steps(
    *,
    model: Annotated[str, typer.Argument(help="A demo model or a Hugging Face folder.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder; what it has of the same kind already is kept."),
    ],
    shapes: Annotated[
        str | None,
        typer.Option(
            help="SEQUENCESxTOKENS of context, as in 1x512,8x512. (default: 1, 4 and 16 sequences "
            "at a quarter and the whole of the model's length)"
        ),
    ] = None,
    model_options: ModelOptions,
    batching: BatchingOptions,
) -> None:
    """Compile a model's decode steps (torch.export, AOTInductor) and compare them with eager ones.

    `serve`, `sweep` and `generate` take the folder with --artefact and start without compiling.
    It fits one model shape, number formats, quantization, --tp, --block-size, kind of processor or
    GPU, and version of torch; not one set of weights. Steps of sizes between the shapes are padded
    to the next one; larger ones, and prompts, run as they do without it.
    """
    from lmi_bench.core.scenario import parse_scenario
    from lmi_bench.jobs.compile import run

    stated = stated_settings(model_options, batching) | {"compile": True}
    if shapes is not None:
        stated["compile_shapes"] = shapes
    run(model, parse_scenario({"engine": stated}, source="compile").engine, out)
