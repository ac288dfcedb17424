"""What `verify` needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """A recommendation, and the target on which its load is replayed."""

    recommendation: Annotated[
        Path,
        Option("Plan to verify, written by `recommend --json`.", argument=True, metavar="REC.json"),
    ]
    target: Annotated[
        str, Option("Target to measure: a URL, sagemaker:NAME, engine, or sim:INSTANCE.")
    ]
    share: Annotated[
        float | None,
        Option(
            "Share of the planned load that the target gets, 0 to 1.",
            default="1; sim: that of one replica",
        ),
    ] = None
    requests: Annotated[
        int | None,
        Option(
            "Number of requests to send.", default="enough for every SLO's quantile, at least 300"
        ),
    ] = None
    model: Annotated[
        str | None,
        Option("Model name that the target knows.", ("--model", "-m"), default="the plan's"),
    ] = None
    api_key: Annotated[
        str | None, Option("Key sent as a bearer token; never written to a file.")
    ] = None
    seed: Annotated[int, Option("Random seed of arrivals and prompts.")] = 0
    out: Annotated[
        Path | None, Option("Run folder.", ("--out", "-o"), default="runs/verify-NAME")
    ] = None
    update_profile: Annotated[
        Path | None,
        Option(
            "Profile to write: the plan's, fitted to this measurement too. A file that exists is "
            "fitted further.",
            metavar="P.json",
        ),
    ] = None
