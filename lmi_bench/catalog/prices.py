"""Chooses each instance's price: the user's price list first, else SageMaker's or EC2's.

A price list is YAML, or CSV with the same names as columns. An entry prices a machine of the
catalog, or describes another one that is built of the catalog's accelerators:

    prices:
      - instance: ml.g5.2xlarge
        usd_per_hour: 1.42            # on demand, one machine
        region: eu-west-1
        date: 2026-11-01
        component: Hosting            # optional; also `source`
        savings_plan_usd_per_hour: 1.01   # optional; also reserved_ and spot_usd_per_hour
      - machine: mi300x-8
        accelerator: MI300X
        accelerators: 8
        usd_per_hour: 16.0
        interconnect: device          # optional: device (the default), pcie, shared-pcie or none
        network_gbit_per_s: 3200      # optional; also link_gb_per_s (one way), region, date
"""

import datetime as dt
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lmi_bench.catalog.accelerators import NO_LINK, find_accelerator
from lmi_bench.catalog.instances import Instance, all_instances, bare_machine, find_instance
from lmi_bench.catalog.tables import number_or_none, read_rows
from lmi_bench.core.durable import parsed_yaml, read_text, table_rows
from lmi_bench.core.errors import InputError

Platform = Literal["sagemaker", "ec2", "file"]

_RATES = {"savings_plan_usd_per_hour": "savings-plan", "reserved_usd_per_hour": "reserved", "spot_usd_per_hour": "spot"}
_NEEDED = ("instance", "usd_per_hour", "region", "date")
_OPTIONAL = ("component", "source", *_RATES)
_MACHINE = ("machine", "accelerator", "accelerators", "usd_per_hour")
_MORE = ("interconnect", "link_gb_per_s", "network_gbit_per_s", "region", "date")
_MOST_ACCELERATORS = 1024
STALE_DAYS = 90
"""Age in days from which a price is called old."""


def load_price_list(path: Path) -> dict[str, Instance]:
    """Read a user's price list: instances by type. Raises InputError that names the entry."""
    text = read_text(path)
    is_table = path.suffix.lower() == ".csv"
    content = _table(text, path) if is_table else parsed_yaml(text, f"the price list {path}")
    entries = content.get("prices") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(
            f"the price list {path} has no entries: write `prices:` and a list of mappings with "
            f"{', '.join(_NEEDED)}, or {', '.join(_MACHINE)}"
        )
    priced: dict[str, Instance] = {}
    for index, entry in enumerate(entries):
        instance = _from_entry(entry, f"{path}, entry {index + 1}", path)
        if instance.instance_type in priced:
            raise InputError(f"{path}: {instance.instance_type} is listed twice")
        priced[instance.instance_type] = instance
    return priced


def _table(text: str, path: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of a CSV file as entries, without empty cells."""
    rows = [
        {
            name.strip(): parsed_yaml(cell, f"{path}: {name} {cell}")
            for name, cell in row.items()
            if name and (cell or "").strip()
        }
        for row in table_rows(text, path)
    ]
    return {"prices": [row for row in rows if row]}


def _from_entry(entry: object, where: str, path: Path) -> Instance:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: expected a mapping with {', '.join(_NEEDED)}, got {entry!r}")
    is_new = "accelerator" in entry or "machine" in entry
    needed, more = (_MACHINE, _MORE) if is_new else (_NEEDED, ())
    missing = [name for name in needed if entry.get(name) in (None, "")]
    unknown = [str(name) for name in entry if name not in (*needed, *_OPTIONAL, *more)]
    if missing or unknown:
        faults = [f"{', '.join(missing)} missing"] if missing else []
        faults += [f"{', '.join(unknown)} unknown"] if unknown else []
        keys = ", ".join((*needed, *_OPTIONAL, *more))
        raise InputError(f"{where}: {'; '.join(faults)}; keys are {keys}")
    machine = _machine(entry, where) if is_new else find_instance(str(entry["instance"]))
    return replace(
        machine,
        price_usd_per_hour=_price(entry, "usd_per_hour", where),
        price_region=str(entry.get("region") or "no region"),
        price_date=str(entry.get("date") or "undated"),
        price_component=str(entry.get("component") or "price list"),
        price_source=str(entry.get("source") or f"price list {path.name}"),
        rates_usd_per_hour=tuple((kind, _price(entry, key, where)) for key, kind in _RATES.items() if key in entry),
    )


def _machine(entry: Mapping[Any, Any], where: str) -> Instance:
    """A machine that the catalog does not have, of the catalog's accelerators."""
    accelerator, count = find_accelerator(str(entry["accelerator"])), entry["accelerators"]
    if type(count) is not int or not 1 <= count <= _MOST_ACCELERATORS:
        raise InputError(f"{where}: accelerators must be 1 to {_MOST_ACCELERATORS}, got {count!r}")
    name, machine = str(entry["machine"]), bare_machine(accelerator, count)
    plain = name.lower().removeprefix("ml.")
    known = next((each for each in all_instances() if each.instance_type.removeprefix("ml.") == plain), machine)
    if (known.accelerator, known.num_accelerators) != (accelerator, count):
        theirs = bare_machine(known.accelerator, known.num_accelerators).instance_type
        raise InputError(f"{where}: {name} is {theirs} in the catalog, not {machine.instance_type}: name it otherwise")
    kind = str(entry.get("interconnect") or "device")
    links = {
        "device": machine.link,
        "pcie": replace(accelerator.pcie_link, is_shared=False),
        "shared-pcie": replace(accelerator.pcie_link, is_shared=True),
        "none": NO_LINK,
    }
    if kind not in links:
        raise InputError(f"{where}: interconnect {kind!r}: use {', '.join(links)}")
    link = links[kind]
    if "link_gb_per_s" in entry:
        link = replace(link, bytes_per_s=_price(entry, "link_gb_per_s", where) * 1e9)
    rate = "network_gbit_per_s"
    return replace(
        machine,
        instance_type=name,
        link=link if count > 1 else NO_LINK,
        network_bits_per_s=_price(entry, rate, where) * 1e9 if rate in entry else None,
        source=where,
    )


def _price(entry: Mapping[Any, Any], key: str, where: str) -> float:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        unit = "" if key.endswith("_s") else " of USD"
        raise InputError(f"{where}: {key} must be a number{unit} above 0, got {value!r}")
    return float(value)


def price_day(instance: Instance) -> dt.date | None:
    """The day of the instance's price; None if its source states none."""
    found = re.search(r"\d{4}-\d{2}-\d{2}", instance.price_date)
    return dt.date.fromisoformat(found.group()) if found else None


def on_platform(instance: Instance, platform: Platform) -> Instance:
    """The instance with its price on that platform; without a price if none is known.

    A price of SageMaker hosting is estimated where only EC2's or another component's is known.
    """
    if instance.accelerator.vendor == "cpu":
        return instance
    if platform == "sagemaker":
        return hosting_price(instance)
    generated = re.search(r"generated (\d{4}-\d{2}-\d{2})", instance.ec2_price_source)
    known = instance.ec2_price_usd_per_hour is not None
    return replace(
        instance,
        price_usd_per_hour=instance.ec2_price_usd_per_hour,
        price_region=instance.ec2_price_region if known else "",
        price_date=generated.group(1) if generated else "",
        price_component="EC2" if known else "",
        price_source=instance.ec2_price_source if known else "",
        rates_usd_per_hour=(),
    )


def hosting_price(instance: Instance) -> Instance:
    """The instance with a hosting price: stated, or estimated with its range.

    estimate = price of another component, else EC2's times the median ratio of the family
    range    = EC2's times the least and greatest ratio of all families with that letter
    """
    known, virtual = instance.price_usd_per_hour, instance.ec2_price_usd_per_hour
    if instance.price_component == "Hosting" or not instance.has_endpoints or virtual is None:
        return instance
    family = instance.instance_type.split(".")[1]
    kind, ratios = re.split(r"\d", family)[0], _hosting_ratios()  # `p` of `p5en`
    of_kind = [each for name in ratios if re.match(rf"{kind}\d", name) for each in ratios[name]]
    if not of_kind:
        return instance
    ratio = statistics.median(ratios.get(family, of_kind))
    ends = [virtual * min(of_kind), virtual * max(of_kind)]
    if known is not None:
        return replace(instance, price_range_usd_per_hour=(min(known, *ends), max(known, *ends)))
    there = on_platform(instance, "ec2")
    return replace(
        there,
        price_usd_per_hour=virtual * ratio,
        price_component=f"EC2 x {ratio:.3g}",
        price_source=f"estimated: {virtual:g} of {there.price_source} times {ratio:.3g}, the ratio "
        f"of hosting to EC2 ({min(of_kind):.3g} to {max(of_kind):.3g} in {kind} families)",
        price_range_usd_per_hour=(ends[0], ends[1]),
        rates_usd_per_hour=instance.rates_usd_per_hour,
    )


@cache
def _hosting_ratios() -> Mapping[str, Sequence[float]]:
    """SageMaker's price over EC2's of each family's machines, where the catalog has both."""
    found: dict[str, list[float]] = {}
    for row in read_rows("instances.csv"):
        if ratio := number_or_none(row["sagemaker_to_ec2_ratio"]):
            found.setdefault(row["instance_type"].split(".")[1], []).append(ratio)
    return found


def reprice(
    instances: Iterable[Instance] | None = None,
    *,
    platform: Platform = "sagemaker",
    price_list: Mapping[str, Instance] | None = None,
) -> tuple[Instance, ...]:
    """The instances, each with the user's price if given, else the platform's.

    instances  None: all of the platform; on `file` those of the price list, on SageMaker those
               with endpoints
    """
    own = price_list or {}
    if platform == "file":
        chosen = own.values() if instances is None else instances
        return tuple(each for each in chosen if each.instance_type in own)
    return tuple(
        own.get(instance.instance_type) or on_platform(instance, platform)
        for instance in (all_instances() if instances is None else instances)
        if platform == "ec2" or instance.has_endpoints
    )
