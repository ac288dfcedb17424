"""Reads the catalog's data files: one CSV a table, every row with its source."""

from __future__ import annotations

import csv
from importlib import resources

Row = dict[str, str]


def read_rows(name: str) -> list[Row]:
    """The rows of `catalog/data/NAME`, each a mapping from column to text."""
    path = resources.files("lmi_bench.catalog").joinpath("data").joinpath(name)
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def number_or_none(text: str) -> float | None:
    """A cell as a number; an empty cell is unknown, never zero."""
    return float(text) if text.strip() else None


def count_or_zero(text: str) -> int:
    """A cell that counts things which a row may lack altogether, such as experts."""
    return int(text) if text.strip() else 0
