"""Prices that `catalog refresh` downloaded: a file of the user's, beside the catalog's own."""

import datetime as dt
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from lmi_bench.core.durable import parsed_json, read_text, write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import check_types

FOLDER_VARIABLE: Final = "LMI_BENCH_DATA"
FRESH_SOURCE: Final = "AWS price list"
"""Beginning of the source of each downloaded price."""


@dataclass(frozen=True, slots=True)
class FreshPrice:
    """On-demand price of one machine on one platform (sagemaker or ec2), in a region on a day."""

    instance: str
    platform: str
    usd_per_hour: float
    region: str
    date: str
    source: str


def fresh_prices_file() -> Path:
    """$LMI_BENCH_DATA/prices.json, by default in the user's data folder (XDG)."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named) / "prices.json"
    # where there is no home folder, this stays a path that does not exist
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111
    return Path(base, "lmi-bench", "prices.json")


@cache
def fresh_prices() -> Mapping[tuple[str, str], FreshPrice]:
    """Downloaded prices by instance and platform; empty without a file.

    Raises InputError for a file that cannot be used.
    """
    path = fresh_prices_file()
    if not os.path.exists(path):  # noqa: PTH110  false also without permission
        return {}
    try:
        content = parsed_json(read_text(path))
        prices = [FreshPrice(**each) for each in content["prices"]]
        for each, row in zip(prices, content["prices"], strict=True):
            check_types(FreshPrice, row, each.instance)
            dt.date.fromisoformat(each.date)
            if not 0 < each.usd_per_hour < 1e6:
                raise ValueError(f"{each.usd_per_hour} USD for {each.instance}")
    except (ValueError, KeyError, TypeError, InputError) as exc:
        raise InputError(f"{path} is no price file ({exc}): remove it, or write it again with catalog refresh") from exc
    return {(each.instance, each.platform): each for each in prices}


def save_fresh_prices(prices: Mapping[tuple[str, str], FreshPrice]) -> Path:
    """Write the file at once; prices of other instances and platforms stay in it."""
    try:
        known = dict(fresh_prices())
    except InputError:  # it is replaced
        known = {}
    rows = [asdict(each) for _, each in sorted((known | dict(prices)).items())]
    path = fresh_prices_file()
    write_text(path, json.dumps({"schema": 1, "prices": rows}, indent=1) + "\n")
    fresh_prices.cache_clear()
    return path
