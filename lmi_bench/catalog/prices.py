"""Chooses each instance's price: the user's price list first, else SageMaker's or EC2's.

A price list is YAML:

    prices:
      - instance: ml.g5.2xlarge
        usd_per_hour: 1.42            # on demand, one machine
        region: eu-west-1
        date: 2026-11-01
        component: Hosting            # optional; also `source`
        savings_plan_usd_per_hour: 1.01   # optional; also reserved_ and spot_usd_per_hour
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError

Platform = Literal["sagemaker", "ec2"]

_RATES = {
    "savings_plan_usd_per_hour": "savings-plan",
    "reserved_usd_per_hour": "reserved",
    "spot_usd_per_hour": "spot",
}
_NEEDED = ("instance", "usd_per_hour", "region", "date")
_OPTIONAL = ("component", "source", *_RATES)
STALE_DAYS = 90
"""Age in days from which a price is called old."""


def load_price_list(path: Path) -> dict[str, Instance]:
    """Read a user's price list: instances by type. Raises InputError that names the entry."""
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as exc:
        raise InputError(f"the price list {path} is not YAML: {exc}") from exc
    entries = content.get("prices") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(
            f"the price list {path} has no entries: write `prices:` and a list of mappings with "
            f"{', '.join(_NEEDED)}"
        )
    priced: dict[str, Instance] = {}
    for index, entry in enumerate(entries):
        instance = _from_entry(entry, f"{path}, entry {index + 1}", path)
        if instance.instance_type in priced:
            raise InputError(f"{path}: {instance.instance_type} is listed twice")
        priced[instance.instance_type] = instance
    return priced


def _from_entry(entry: object, where: str, path: Path) -> Instance:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: expected a mapping with {', '.join(_NEEDED)}, got {entry!r}")
    missing = [name for name in _NEEDED if entry.get(name) in (None, "")]
    unknown = [str(name) for name in entry if name not in (*_NEEDED, *_OPTIONAL)]
    if missing or unknown:
        faults = [f"{', '.join(missing)} missing"] if missing else []
        faults += [f"{', '.join(unknown)} unknown"] if unknown else []
        raise InputError(f"{where}: {'; '.join(faults)}; keys are {', '.join(_NEEDED + _OPTIONAL)}")
    return replace(
        find_instance(str(entry["instance"])),
        price_usd_per_hour=_price(entry, "usd_per_hour", where),
        price_region=str(entry["region"]),
        price_date=str(entry["date"]),
        price_component=str(entry.get("component") or "not stated"),
        price_source=str(entry.get("source") or f"price list {path.name}"),
        rates_usd_per_hour=tuple(
            (kind, _price(entry, key, where)) for key, kind in _RATES.items() if key in entry
        ),
    )


def _price(entry: Mapping[Any, Any], key: str, where: str) -> float:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise InputError(f"{where}: {key} must be a number of USD above 0, got {value!r}")
    return float(value)


def price_day(instance: Instance) -> dt.date | None:
    """The day of the instance's price; None if its source states none."""
    found = re.search(r"\d{4}-\d{2}-\d{2}", instance.price_date)
    return dt.date.fromisoformat(found.group()) if found else None


def on_platform(instance: Instance, platform: Platform) -> Instance:
    """The instance with its price on that platform; without a price if the catalog has none."""
    if platform == "sagemaker" or instance.accelerator.vendor == "cpu":
        return instance
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


def reprice(
    instances: Iterable[Instance],
    *,
    platform: Platform = "sagemaker",
    price_list: Mapping[str, Instance] | None = None,
) -> tuple[Instance, ...]:
    """The instances, each with the user's price if given, else the platform's."""
    own = price_list or {}
    return tuple(
        own.get(instance.instance_type) or on_platform(instance, platform) for instance in instances
    )
