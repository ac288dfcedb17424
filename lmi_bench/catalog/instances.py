"""Instance types: their accelerators, and their hourly price with its region and date."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from lmi_bench.catalog.accelerators import NO_LINK, Accelerator, Link, find_accelerator
from lmi_bench.catalog.fresh_prices import fresh_prices
from lmi_bench.catalog.tables import Index, Row, number_or_none, read_rows
from lmi_bench.core.units import GIB


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance type. A price of None is unknown.

    link                 the fastest interconnect that all its accelerators share
    host_memory_bytes    memory of the host, not of the accelerators
    price_usd_per_hour   on-demand price of one machine in `price_region`, as of `price_date`
    price_component      priced service: Hosting, Training, BatchTransform, EC2
    price_range_usd_per_hour   of an estimated price, as `prices.hosting_price` makes it; else None
    rates_usd_per_hour   known prices of other purchase options, by kind
    neuron_cores         AWS silicon: cores that the tensor-parallel degree counts; else None
    network_bits_per_s   sustained rate of the network; None if unknown
    """

    instance_type: str
    accelerator: Accelerator
    num_accelerators: int
    link: Link
    vcpus: int
    host_memory_bytes: int
    price_usd_per_hour: float | None = None
    price_region: str = ""
    price_date: str = ""
    price_source: str = ""
    price_component: str = ""
    price_range_usd_per_hour: tuple[float, float] | None = None
    rates_usd_per_hour: tuple[tuple[str, float], ...] = ()
    ec2_price_usd_per_hour: float | None = None
    ec2_price_source: str = ""
    ec2_price_region: str = "us-east-1"
    neuron_cores: int | None = None
    network_bits_per_s: float | None = None
    source: str = ""

    @property
    def is_estimated(self) -> bool:
        """Whether the price is an estimate, which every output marks with `~`."""
        return self.price_range_usd_per_hour is not None

    @property
    def has_endpoints(self) -> bool:
        """Whether SageMaker serves endpoints on it; EC2's own machines have no `ml.`."""
        return self.instance_type.startswith("ml.") or not self.ec2_price_source

    @property
    def price_provenance(self) -> str | None:
        """Region, date and source of the price, as text for display; None without a price."""
        if self.price_usd_per_hour is None:
            return None
        component = f", {self.price_component}" if self.price_component else ""
        return f"{self.price_region}, {self.price_date}{component}: {self.price_source}"


_SHARED: Final = {"yes": True, "no": False, "": None}
_ONLY_VIRTUAL: Final = frozenset({"A10G"})


def bare_machine(accelerator: Accelerator, count: int) -> Instance:
    """A machine of which only the accelerators are known, with their best interconnect.

    PCIe devices are assumed to reach each other without crossing the host, except those that are
    sold only in virtual machines.
    """
    link = accelerator.device_link
    if link.bytes_per_s is None:
        link = replace(accelerator.pcie_link, is_shared=accelerator.name in _ONLY_VIRTUAL)
    return Instance(
        instance_type=f"{count} x {accelerator.name}",
        accelerator=accelerator,
        num_accelerators=count,
        link=link,
        vcpus=0,
        host_memory_bytes=0,
    )


_SUMMED: Final = (
    *("num_accelerators", "vcpus", "host_memory_bytes", "network_bits_per_s"),
    *("price_usd_per_hour", "ec2_price_usd_per_hour"),
)


def joined(instance: Instance, hosts: int) -> Instance:
    """`hosts` machines of one type as one, with the price of all; itself for one."""
    if hosts == 1:
        return instance
    between = instance.price_range_usd_per_hour
    numbers = {name: getattr(instance, name) for name in _SUMMED}
    return replace(
        instance,
        instance_type=f"{hosts} x {instance.instance_type}",
        price_range_usd_per_hour=between and (hosts * between[0], hosts * between[1]),
        rates_usd_per_hour=tuple((kind, hosts * rate) for kind, rate in instance.rates_usd_per_hour),
        **{name: value and hosts * value for name, value in numbers.items()},
    )


def _link_of(row: Row, accelerator: Accelerator) -> Link:
    text = row["interconnect"]
    if text.startswith("none"):
        return NO_LINK
    if not text.startswith("PCIe"):
        return accelerator.device_link
    return replace(accelerator.pcie_link, is_shared=_SHARED[row["pcie_shared"]])


def _from_row(row: Row) -> Instance:
    accelerator = find_accelerator(row["accelerator"])
    return Instance(
        instance_type=row["instance_type"],
        accelerator=accelerator,
        num_accelerators=int(row["accelerators"]),
        link=_link_of(row, accelerator),
        vcpus=int(row["vcpu"]),
        host_memory_bytes=int(float(row["host_memory_gib"]) * GIB),
        price_usd_per_hour=number_or_none(row["sagemaker_usd_per_hour"]),
        price_region=row["sagemaker_region"],
        price_date=row["sagemaker_date"],
        price_source=row["sagemaker_source"],
        price_component=row["sagemaker_component"] or ("component not stated" if row["sagemaker_usd_per_hour"] else ""),
        ec2_price_usd_per_hour=number_or_none(row["ec2_usd_per_hour_us_east_1"]),
        ec2_price_source=row["ec2_source"],
        neuron_cores=int(row["neuron_cores"]) if row["neuron_cores"] else None,
        network_bits_per_s=number_or_none(row["network_gbps"], 1e9),
        source=row["spec_source"],
    )


@cache
def all_instances() -> tuple[Instance, ...]:
    """All instance types in the catalog, in table order, each with its newest price."""
    return tuple(_with_fresh_prices(_from_row(row)) for row in read_rows("instances.csv"))


def _with_fresh_prices(instance: Instance) -> Instance:
    """The instance with the downloaded prices that are newer than the catalog's."""
    fresh = fresh_prices()
    hosting = fresh.get((instance.instance_type, "sagemaker"))
    if hosting is not None and hosting.date > _day(instance.price_date):
        instance = replace(
            instance,
            price_usd_per_hour=hosting.usd_per_hour,
            price_region=hosting.region,
            price_date=hosting.date,
            price_source=hosting.source,
            price_component="Hosting",
        )
    virtual = fresh.get((instance.instance_type, "ec2"))
    if virtual is not None and virtual.date > _day(instance.ec2_price_source):
        instance = replace(
            instance,
            ec2_price_usd_per_hour=virtual.usd_per_hour,
            ec2_price_region=virtual.region,
            ec2_price_source=f"{virtual.source} (generated {virtual.date})",
        )
    return instance


def _day(text: str) -> str:
    """The first date in a text, for comparison; empty without one, which is older than any."""
    found = re.search(r"\d{4}-\d{2}-\d{2}", text)
    return found.group() if found else ""


_INDEX = Index(
    "instance",
    "Give a type such as ml.g5.2xlarge.",
    all_instances,
    names=lambda row: (row.instance_type, row.instance_type.removeprefix("ml.")),
)


def endpoint_quota(instance_type: str, machines: int) -> str:
    """The quota of an AWS account that an endpoint needs, as Service Quotas names it."""
    return f"'{instance_type} for endpoint usage', {machines}"


def find_instance(name: str) -> Instance:
    """Find an instance type, with or without `ml.`; raises InputError with the nearest names.

    >>> find_instance("2 x ml.p5.48xlarge").num_accelerators  # as `joined` names them
    16
    """
    hosts, sign, one = name.partition(" x ")
    if sign and hosts.isdecimal() and int(hosts) > 1:
        return joined(_INDEX.find(one), int(hosts))
    return _INDEX.find(name)
