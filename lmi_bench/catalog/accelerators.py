"""Accelerators with their data sheets' figures: dense, per device, in base units."""

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from lmi_bench.catalog.tables import Index, Row, number_or_none, read_rows
from lmi_bench.core.units import MIB

LinkKind = Literal["none", "pcie", "nvlink", "neuronlink", "xgmi"]

_GIGA = 1e9
_TERA = 1e12
_BFLOAT16_SINCE: Final = 8.0  # compute capability


@dataclass(frozen=True, slots=True)
class Link:
    """The interconnect between the devices of one machine.

    bytes_per_s  per device and direction; None if no source states it
    is_shared    PCIe only: all traffic between devices crosses one host bridge; otherwise each pair
                 of neighbours has its own path. None: unknown, planned as the latter
    """

    kind: LinkKind
    bytes_per_s: float | None = None
    is_shared: bool | None = None


NO_LINK = Link("none")
_LINKS: Final[dict[str, LinkKind]] = {"NVLink": "nvlink", "Infinity Fabric": "xgmi", "NeuronLink": "neuronlink"}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. None means that no source states the figure; it is never guessed.

    memory_bytes             as the device reports it, not the marketed size
    bandwidth_bytes_per_s    bandwidth of the device memory
    *_flop_per_s             dense peak of the matrix units in that compute type
    device_link, pcie_link   between devices of a machine: NVLink, NeuronLink or xGMI, and PCIe
    compute_capability       CUDA's, such as 8.6
    multiprocessors          units that run blocks of threads: SMs, AMD's compute units
    host                     architecture of the machine's processor
    """

    name: str
    vendor: str
    memory_bytes: int
    bandwidth_bytes_per_s: float | None
    float16_flop_per_s: float | None
    bfloat16_flop_per_s: float | None
    float8_flop_per_s: float | None
    device_link: Link
    pcie_link: Link
    source: str
    aliases: tuple[str, ...] = ()
    float32_flop_per_s: float | None = None
    float4_flop_per_s: float | None = None
    multiprocessors: int | None = None
    compute_capability: float | None = None
    host: str = "x86_64"

    @property
    def has_bfloat16(self) -> bool:
        """Whether its units compute in bfloat16; of a device without CUDA, True."""
        return self.compute_capability is None or self.compute_capability >= _BFLOAT16_SINCE

    def peak_flop_per_s(self, compute_dtype: str) -> float | None:
        """Dense peak for matrix products in this type; None if unsupported or unknown."""
        peak: float | None = getattr(self, f"{compute_dtype}_flop_per_s")
        return peak


def _from_row(row: Row) -> Accelerator:
    kind = next((_LINKS[name] for name in _LINKS if row["link"].startswith(name)), None)
    one_way = number_or_none(row["link_gb_s_one_way"], _GIGA)
    return Accelerator(
        name=row["accelerator"],
        vendor=row["vendor"],
        memory_bytes=int(row["memory_reported_mib"]) * MIB,
        bandwidth_bytes_per_s=number_or_none(row["bandwidth_gb_s"], _GIGA),
        float16_flop_per_s=number_or_none(row["fp16_dense_tflops"], _TERA),
        bfloat16_flop_per_s=number_or_none(row["bf16_dense_tflops"], _TERA),
        float8_flop_per_s=number_or_none(row["fp8_dense_tflops"], _TERA),
        device_link=Link(kind, one_way) if kind else NO_LINK,
        pcie_link=Link("pcie", number_or_none(row["pcie_gb_s_one_way"], _GIGA)),
        source=row["source"],
        aliases=tuple(filter(None, row["aliases"].split(";"))),
        float4_flop_per_s=number_or_none(row["fp4_dense_tflops"], _TERA),
        multiprocessors=int(row["multiprocessors"]) if row["multiprocessors"] else None,
        compute_capability=number_or_none(row["compute_capability"]),
        host=row["host"],
    )


@cache
def all_accelerators() -> tuple[Accelerator, ...]:
    """All accelerators in the catalog, in table order."""
    return tuple(_from_row(row) for row in read_rows("accelerators.csv"))


_INDEX = Index(
    "accelerator",
    "Give one of the catalog's names.",
    all_accelerators,
    names=lambda accelerator: (accelerator.name, *accelerator.aliases),
)


def is_accelerator(name: str) -> bool:
    """Whether the catalog has an accelerator of exactly this name."""
    return any(name == each.name for each in all_accelerators())


def find_accelerator(name: str) -> Accelerator:
    """Find an accelerator by name or alias; raises InputError with the nearest names."""
    return _INDEX.find(name)
