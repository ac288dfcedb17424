"""Settings of the commands before a first sweep: doctor, catalog."""

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import option
from lmi_bench.jobs.settings.sweep import API_KEY, HEADER


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """What is examined beside this machine."""

    target: str | None = option(
        "URL of an endpoint to examine too; it gets a real request of two tokens."
    )
    api_key: str | None = option(API_KEY)
    header: tuple[str, ...] = option(HEADER, value=())
    runs: Path = option("Folder in which run folders will be written.", value=Path("runs"))


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
