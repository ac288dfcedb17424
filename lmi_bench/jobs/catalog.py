"""What `catalog` does: the catalog's rows as tables, and the download of today's prices."""

import datetime as dt
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lmi_bench.analysis.fit.uncertainty import Z80
from lmi_bench.analysis.model.measured_level import marks_of
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, EngineProfile
from lmi_bench.catalog.accelerators import all_accelerators
from lmi_bench.catalog.fresh_prices import FRESH_SOURCE, FreshPrice, save_fresh_prices
from lmi_bench.catalog.instances import all_instances
from lmi_bench.catalog.models import all_model_entries
from lmi_bench.catalog.prices import STALE_DAYS, on_platform, price_day
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.durable import parsed_json, read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Listener
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.deploy.images import all_images
from lmi_bench.jobs.settings.setup import CatalogSettings, RefreshSettings
from lmi_bench.report.tables.levels import value_at
from lmi_bench.targets.profiles import SHIPPED, find_profile, kept_profiles

Row = dict[str, Any]

_SERVICES: Final = {"AmazonSageMaker": "sagemaker", "AmazonEC2": "ec2"}
_FILTERS: Final = {
    "AmazonSageMaker": {"productFamily": "ML Instance", "component": "Hosting"},
    "AmazonEC2": {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"},
}
_FORMS: Final[Mapping[str, Callable[[Any], object]]] = {
    "": lambda value: value,
    "billions": lambda count: round(count / 1e9, 2),
    "GiB": lambda num_bytes: round(bytes_to_gib(num_bytes), 1),
    "GiB of all": lambda machine: _FORMS["GiB"](machine.num_accelerators * machine.accelerator.memory_bytes),
    "Gbit/s": lambda bits: bits / 1e9,
    "GB/s": lambda num_bytes: round(num_bytes / 1e9),
    "TFLOP/s": lambda flop: round(flop / 1e12, 1),
    "USD": lambda price: round(price, 4),
    "component": lambda text: text.removeprefix("component "),
    "yes or no": lambda text: "yes" if text else "no",
    "~ or nothing": lambda flag: "~" if flag else "",
}
_PRICE_REGION: Final = "us-east-1"
"""Where the price list API answers, for the prices of all regions."""


def catalog_table(name: str, settings: CatalogSettings) -> tuple[list[Row], str]:
    """The matching rows of a table: `models`, `instances`, `profiles`, `profile` (that one) ...

    Returns rows with the same keys, units in the keys, and a warning about them, or no text.
    """
    if name == "profile" or (name == "profiles" and settings.text.lower() in kept_profiles() | SHIPPED):
        return [*_constants(find_profile(settings.text))], ""
    if name == "images":
        rows = [*_images(settings.region)]
        settings = replace(settings, region=None)
    else:
        items: dict[str, Callable[[], Iterable[Any]]] = {
            "models": all_model_entries,
            "instances": all_instances,
            "profiles": _profiles,
            "accelerators": all_accelerators,
            "prices": _prices,
        }
        rows = [*_listed(name, items[name]())]
    rows = [row for row in rows if _matches(row, settings)]
    old = [row["date"] for row in rows if row.pop("age days", 0) > STALE_DAYS]
    if not old:
        return rows, ""
    undated = sum(not row["date"] for row in rows)
    return rows, (
        f"{len(old)} of {len(rows)} prices are older than {STALE_DAYS} days, the oldest of "
        f"{min(old)}, and {undated} have no date: lmi-bench catalog refresh gets today's"
    )


def _matches(row: Row, settings: CatalogSettings) -> bool:
    text = " ".join(str(value) for value in row.values()).lower()
    if settings.text.lower() not in text:
        return False
    wanted = {
        "accelerator": ("--gpu", settings.gpu),
        "region": ("--region", settings.region),
        "platform": ("--platform", settings.platform),
        "memory GiB": ("--min-memory-gib", settings.min_memory_gib),
    }
    for column, (flag, value) in wanted.items():
        if value is not None and column not in row:
            raise InputError(f"{flag} {value}: these rows have no {column}; leave it out")
        whole = rf"\b{re.escape(str(value))}\b"  # L4 is not L40S, A100 is A100-40
        if isinstance(value, str) and not re.search(whole, row[column], re.IGNORECASE):
            return False
    name = str(next(iter(row.values()))).removeprefix("ml.").lower()
    if settings.family is not None and not name.startswith(settings.family.lower()):
        return False
    least = settings.min_memory_gib
    return least is None or row["memory GiB"] >= least


def _listed(name: str, items: Iterable[Any]) -> Iterator[Row]:
    """A row for each item, with the columns that data/catalog_columns.csv gives this table.

    A column's value is at a path in the item, the first that is known of several, or the item.
    """
    columns = [row for row in read_rows("catalog_columns.csv", "jobs") if row["table"] == name]
    sorted_by = sorted((row["sorted"], row["value"]) for row in columns if row["sorted"])
    for item in sorted(items, key=lambda each: [value_at(each, path) for _, path in sorted_by]):
        row: Row = {}
        for column in columns:
            paths = column["value"].split()
            values = (value_at(item, path) for path in paths)
            known = next((each for each in values if each is not None), None if paths else item)
            row[column["column"]] = None if known is None else _FORMS[column["form"]](known)
        yield row


def _profiles() -> Iterator[Row]:
    for name, profile in (kept_profiles() | SHIPPED).items():
        yield {
            "name": name,
            "profile": profile,
            "date": profile.fitted_date if profile.accelerators else "",
            "figures": len(profile.fitted_cells or marks_of(profile.levels)),
            "devices": ", ".join(profile.accelerators) or f"any of {', '.join(profile.vendors)}",
            "models": ", ".join(profile.models) or "any",
        }


def _constants(profile: EngineProfile) -> Iterator[Row]:
    """The constants of one profile, each with its 80 % interval."""
    for name in PARAMETER_NAMES:
        value, sd = getattr(profile.parameters, name), Z80 * profile.log_sd.get(name, 0.0)
        ends = value * math.exp(-sd), value * math.exp(sd)
        if limit := profile.up_to.get(name):
            ends = max(0.0, value - sd * limit), value + sd * limit
        value, low, high = (float(f"{each:.4g}") for each in (value, *ends))
        yield {"constant": name, "value": value, "low": low, "high": high, "source": profile.fitted_on}


def _prices() -> Iterator[Row]:
    today = dt.datetime.now(tz=dt.UTC).date()
    for platform in ("sagemaker", "ec2"):
        for machine in all_instances():
            each = on_platform(machine, platform)
            if each.price_usd_per_hour is not None:
                day = price_day(each)
                date, age_days = (str(day), (today - day).days) if day else ("", 0)
                yield {"machine": each, "platform": platform, "date": date, "age_days": age_days}


def _images(region: str | None) -> Iterator[Row]:
    """The images; of a region those that AWS publishes there, with their addresses for tags."""
    columns = ("platform", "engine version", "arch", "date", "source")
    for each in sorted(all_images(), key=lambda each: (each.family, each.date, each.tag)):
        if region is None or each.is_in(region):
            named = {"tag": each.tag} if region is None else {"address": each.uri(region)}
            row = {column: getattr(each, column.replace(" ", "_")) for column in columns}
            yield {"family": each.family, **named, **row}


def refresh(settings: RefreshSettings, listener: Listener) -> tuple[Path, str, Mapping[str, int]]:
    """Get the prices of the catalog's instances and write the user's file.

    Returns the file, the prices' date, and how many of them each platform got. Raises InputError if
    they cannot be had whole; the file is unchanged then.
    """
    found: dict[tuple[str, str], FreshPrice] = {}
    if settings.file is not None:
        service, day, products = _offer(settings.file)
        source = f"{FRESH_SOURCE} {settings.file.name}"
        found |= _fresh(products, service, settings.region, day, source)
    else:
        source, day = f"{FRESH_SOURCE} API", str(dt.datetime.now(tz=dt.UTC).date())
        for service in _SERVICES:
            listener.step(f"asking {source} for {service} in {settings.region}")
            products = _download(service, settings.region)
            found |= _fresh(products, service, settings.region, day, source)
    return save_fresh_prices(found), day, Counter(platform for _, platform in found)


def _download(service: str, region: str) -> list[Any]:
    """All products of a service in a region."""
    from lmi_bench.loadgen.aws.access import error_text, open_aws_access, refusals

    wanted = {"regionCode": region, **_FILTERS[service]}
    filters = [{"Type": "TERM_MATCH", "Field": key, "Value": text} for key, text in wanted.items()]
    try:
        # the runtime's address is not used: stating one allows a machine without a region
        access = open_aws_access(f"https://runtime.sagemaker.{_PRICE_REGION}.amazonaws.com")
        client = replace(access, region=_PRICE_REGION).client("pricing")
        pages = client.get_paginator("get_products").paginate(
            ServiceCode=service, Filters=filters, FormatVersion="aws_v1"
        )
        return [json.loads(each) for page in pages for each in page["PriceList"]]
    except (*refusals(), ValueError, KeyError) as exc:
        text = " ".join(error_text(exc).split())
        raise InputError(f"no prices of {service}, and nothing is changed: {text}") from exc


def _offer(path: Path) -> tuple[str, str, list[Any]]:
    """Service, date and products of an offer file, as the API gives products."""
    try:
        offer = parsed_json(read_text(path))
        on_demand = offer["terms"]["OnDemand"]
        products = [
            {"product": product, "terms": {"OnDemand": on_demand.get(sku, {})}}
            for sku, product in offer["products"].items()
        ]
        service, day = offer["offerCode"], str(dt.date.fromisoformat(offer["publicationDate"][:10]))
        if service not in _SERVICES:
            raise ValueError(f"it is of {service}")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(f"{path} is no offer file of {' or '.join(_SERVICES)} ({type(exc).__name__}: {exc})") from exc
    return service, day, products


def _fresh(
    products: Iterable[Any], service: str, region: str, day: str, source: str
) -> dict[tuple[str, str], FreshPrice]:
    """The catalog's instances among the products; raises InputError if there are none."""
    platform = _SERVICES[service]
    names = [row["instance_type"] for row in read_rows("instances.csv")]
    known = {name.removeprefix("ml."): name for name in names}
    prices: dict[str, set[float]] = {}
    wanted = {"regionCode": region, **_FILTERS[service]}
    try:
        for each in products:
            attributes = each["product"]["attributes"]
            has = {"productFamily": each["product"].get("productFamily"), **attributes}
            if any(has.get(name) != text for name, text in wanted.items()):
                continue
            name = attributes.get("instanceName") or attributes.get("instanceType", "")
            kind = known.get(re.sub(r"^ml\.|-Hosting$", "", name))
            if kind is not None:
                prices.setdefault(kind, set()).update(_hourly(each["terms"].get("OnDemand", {})))
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise InputError(f"the products of {service} are in an unknown form: {exc!r}") from exc
    found = {
        (kind, platform): FreshPrice(kind, platform, values.pop(), region, day, source)
        for kind, values in prices.items()
        if len(values) == 1  # several: it is not known which one is the instance's
    }
    if not found:
        raise InputError(
            f"no price of the catalog's instances among {service}'s in {region}: is it a region "
            "of AWS, such as us-east-1?"
        )
    return found


def _hourly(terms: Mapping[str, Any]) -> Iterator[float]:
    for term in terms.values():
        for dimension in term["priceDimensions"].values():
            usd = float(dimension["pricePerUnit"].get("USD", 0))
            if usd > 0 and dimension["unit"].lower().startswith(("hr", "hour")):
                yield usd
