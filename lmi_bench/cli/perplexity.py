"""`lmi-bench perplexity`: how well a model knows a text, by the length that it reads at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def perplexity(
    model: Annotated[str, typer.Option("--model", "-m", help="A demo model or a folder.")],
    lengths: Annotated[
        str, typer.Option(help="Tokens read at once, as in 128,256,512.")
    ] = "128,256,512",
    rope_scaling: Annotated[
        list[str] | None,
        typer.Option(
            help="Also with stretched positions: linear:2, dynamic:4, yarn:4. Repeatable."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text, or JSON lines with `text` or `prompt`. (default: built in)"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Most tokens of the text that are scored.")
    ] = 8192,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    quantize: Annotated[
        str, typer.Option(help="Weights: none, int8, awq-int4, awq-int3, smoothquant or fp8.")
    ] = "none",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures as JSON.")
    ] = None,
) -> None:
    """Perplexity of a text by the length read at once, with and without RoPE scaling.

    The text is cut into windows of each length, and each window is scored alone. A model that
    knows its positions gets better with length; one that is stretched beyond what it was trained
    on may get worse, which its speed does not show.
    """
    from lmi_bench.jobs.perplexity import run_perplexity

    run_perplexity(
        model,
        lengths,
        rope_scaling or [],
        text=text,
        max_tokens=max_tokens,
        dtype=dtype,
        quantize=quantize,
        json_file=json_file,
    )
