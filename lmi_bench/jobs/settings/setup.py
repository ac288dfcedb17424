"""Settings of the commands before a first sweep: doctor, selftest, init, catalog."""

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import Settings, option
from lmi_bench.jobs.settings.sweep import API_KEY, HEADER


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """What is examined beside this machine."""

    target: str | None = option("URL of an endpoint to examine too; it gets a real request of two tokens.")
    api_key: str | None = option(API_KEY)
    header: tuple[str, ...] = option(HEADER, value=())
    runs: Path = option("Folder in which run folders will be written.", value=Path("runs"))


@dataclass(frozen=True, slots=True)
class InitSettings:
    """Answers that are stated as options, and the file; `init` asks for the others."""

    file: Path = option("Scenario file to write.", value=Path("scenario.yaml"), argument=True, metavar="[FILE]")
    kind: str | None = option("Purpose: endpoint (a server), engine (bundled), simulated (an instance) or plan.")
    target: str | None = option("Target: URL, sagemaker:NAME, sim:INSTANCE or engine.")
    model: str | None = option("Model: a catalog name, a folder, or the name that the endpoint knows.", "--model", "-m")
    input_tokens: str | None = option(
        "Prompt length in tokens, or a distribution such as normal(622,100).", "--input-tokens", "--isl"
    )
    output_tokens: str | None = option("Output length in tokens, or a distribution.", "--output-tokens", "--osl")
    concurrency: str | None = option("Users of a closed loop, a level each: 1,2,4; or auto.")
    rate: str | None = option("Requests per second of an open loop, a level each: 0.5,1.")
    slo: tuple[str, ...] = option("SLO such as ttft_p90<=1s; repeatable.", value=())
    yes: bool = option("Defaults instead of questions.", "--yes", "-y", value=False)
    force: bool = option("Replacement of a file that exists.", value=False)


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    """Which rows of a table are shown."""

    text: str = option("Text that a row contains.", value="", argument=True, metavar="[TEXT]")
    gpu: str | None = option("Accelerator, such as H100 (of instances, accelerators, prices).")
    min_memory_gib: float | None = option(
        "Minimum memory of all accelerators of a row in GiB (of instances, accelerators)."
    )
    family: str | None = option("Beginning of the name, such as g5 or llama.")
    region: str | None = option("Region (of prices).")
    platform: str | None = option("Platform: sagemaker or ec2 (of prices and images).")


@dataclass(frozen=True, slots=True)
class RefreshSettings:
    """Whose prices are downloaded."""

    region: str = option("Region whose prices are downloaded.", value="us-east-1")
    file: Path | None = option("Offer file of AWS that was downloaded before, instead of the API.")


@dataclass(frozen=True, slots=True)
class SelftestSettings(Settings):
    """How far the load is raised."""

    streams: int = option("Maximum number of streams to try.", value=4096, must="16 or more")
