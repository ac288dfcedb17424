"""Settings of the commands before a first sweep: doctor, init."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import option
from lmi_bench.jobs.settings.sweep import API_KEY


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """What is examined beside this machine."""

    target: str | None = option(
        "URL of an endpoint to examine too; it gets a real request of two tokens."
    )
    api_key: str | None = option(API_KEY)
    header: tuple[str, ...] = option(
        "Header of every request, 'Name: value'; repeatable.", "--header", "-H", value=()
    )
    runs: Path = option("Folder in which run folders will be written.", value=Path("runs"))


@dataclass(frozen=True, slots=True)
class InitSettings:
    """Answers that are stated as options, and the file; `init` asks for the others."""

    file: Path = option(
        "Scenario file to write.", value=Path("scenario.yaml"), argument=True, metavar="[FILE]"
    )
    kind: str | None = option(
        "Purpose: endpoint (a server), engine (bundled), simulated (an instance) or plan."
    )
    target: str | None = option("Target: URL, sagemaker:NAME, sim:INSTANCE or engine.")
    model: str | None = option(
        "Model: a catalog name, a folder, or the name that the endpoint knows.", "--model", "-m"
    )
    input_tokens: str | None = option(
        "Prompt length in tokens, or a distribution such as normal(622,100).",
        "--input-tokens",
        "--isl",
    )
    output_tokens: str | None = option(
        "Output length in tokens, or a distribution.", "--output-tokens", "--osl"
    )
    concurrency: str | None = option("Users of a closed loop, a level each: 1,2,4; or auto.")
    rate: str | None = option("Requests per second of an open loop, a level each: 0.5,1.")
    slo: tuple[str, ...] = option("SLO such as ttft_p90<=1s; repeatable.", value=())
    yes: bool = option("Defaults instead of questions.", "--yes", "-y", value=False)
    force: bool = option("Replacement of a file that exists.", value=False)
