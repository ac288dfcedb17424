"""What `verify` needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import REQUIRED, option


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """A recommendation, and the target on which its load is replayed."""

    recommendation: Path = option(
        "Plan to verify, written by `recommend --json`.",
        value=REQUIRED,
        argument=True,
        metavar="REC.json",
    )
    target: str = option(
        "Target to measure: a URL, sagemaker:NAME, engine, or sim:INSTANCE.", value=REQUIRED
    )
    share: float | None = option(
        "Share of the planned load that the target gets, 0 to 1.",
        default="1; sim: that of one replica",
    )
    requests: int | None = option(
        "Number of requests to send.", default="enough for every SLO's quantile, at least 300"
    )
    model: str | None = option(
        "Model name that the target knows.", "--model", "-m", default="the plan's"
    )
    api_key: str | None = option("Key sent as a bearer token; never written to a file.")
    seed: int = option("Random seed of arrivals and prompts.", value=0)
    out: Path | None = option("Run folder.", "--out", "-o", default="runs/verify-NAME")
    update_profile: Path | None = option(
        "Profile to write: the plan's, fitted to this measurement too. A file that exists is "
        "fitted further.",
        metavar="P.json",
    )
