"""Reads the catalog's CSV files; every row names its source."""

from __future__ import annotations

import csv
from importlib import resources

Row = dict[str, str]


def read_rows(name: str) -> list[Row]:
    """The rows of `catalog/data/NAME`, each a mapping from column name to text."""
    path = resources.files("lmi_bench.catalog").joinpath("data").joinpath(name)
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def number_or_none(text: str) -> float | None:
    """A cell as a number; None if it is empty, which means unknown, not zero."""
    return float(text) if text.strip() else None


def count_or_zero(text: str) -> int:
    """A cell as a count; 0 if it is empty, such as the experts of a dense model."""
    return int(text) if text.strip() else 0
