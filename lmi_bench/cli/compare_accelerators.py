"""`lmi-bench compare-accelerators`: accelerators in four steps, machines by latency and cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lmi_bench.core.errors import InputError

if TYPE_CHECKING:
    from lmi_bench.catalog.prices import Platform


def compare_accelerators(
    model: Annotated[str, typer.Option("--model", "-m", help="A catalog name.")],
    input_tokens: Annotated[
        int, typer.Option("--input-tokens", "--isl", help="Prompt length.")
    ] = 256,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", "--osl", help="Tokens to generate.")
    ] = 256,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: float16, bfloat16, float8, int8, int4, mxfp4. (default: the "
            "checkpoint's, at most 16 bits)"
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="A file of `calibrate`, or a shipped profile's name. (default: tgi-2023)"
        ),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Your prices, over the catalog's.")
    ] = None,
    platform: Annotated[str, typer.Option(help="Whose prices: sagemaker or ec2.")] = "sagemaker",
    top: Annotated[int, typer.Option(help="Rows of each table.")] = 12,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write to this file.")] = None,
) -> None:
    """B*, KV at B*, devices needed, price per GB/s; then predicted latency, throughput and cost.

    The predictions are the engine profile's until you measure: `sweep`, then `recommend RUN_DIR`.
    """
    from lmi_bench.jobs.accelerators import run
    from lmi_bench.jobs.money import Money

    if platform not in ("sagemaker", "ec2"):
        raise InputError(f"--platform {platform}: use sagemaker or ec2")
    if input_tokens < 1 or output_tokens < 1 or top < 1:
        raise InputError("--input-tokens, --output-tokens and --top must be at least 1")
    run(
        model=model,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        dtype=dtype,
        profile=profile,
        money=Money(prices=prices, platform=cast("Platform", platform)),
        top=top,
        json_file=json_file,
    )
