"""`lmi-bench predict`: throughput and latency of a machine that is not rented yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def predict(
    model: Annotated[str, typer.Option("--model", "-m", help="A catalog name.")],
    instance: Annotated[str, typer.Option(help="Such as ml.g5.12xlarge.")],
    input_tokens: Annotated[int, typer.Option("--input-tokens", "--isl", help="Prompt length.")],
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", "--osl", help="Tokens to generate.")
    ],
    tensor_parallel: Annotated[int, typer.Option("--tp", help="Devices of one copy.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Copies that share the load.")] = 1,
    concurrency: Annotated[
        str | None, typer.Option(help="Users of a closed loop, such as 1,8,64.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second of an open loop, such as 0.5,2.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the weights: float16, bfloat16, float8, int8, int4.")
    ] = "float16",
    profile: Annotated[
        str | None,
        typer.Option(
            help="A file of `calibrate`, or tgi-2023, vllm-0.12, vllm-0.19. (default: tgi-2023)"
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the predictions to this file.")
    ] = None,
) -> None:
    """Predict throughput and latency with 80 % intervals, and what binds.

    Beyond 80 % of the predicted capacity an open loop gets its capacity and no latency.
    """
    from lmi_bench.cli.predict_run import Question, run

    run(
        Question(
            model=model,
            instance=instance,
            tensor_parallel=tensor_parallel,
            replicas=replicas,
            dtype=dtype,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            concurrencies=concurrency,
            rates=rate,
            profile=profile,
        ),
        json_file=json_file,
    )
