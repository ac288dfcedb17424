"""What people are told where that is longer than a line: the rows of data/texts.csv by name.

A row holds what was found, with its numbers, and what to do. tests/core/test_texts.py compares each
row with the call that uses it.
"""

import csv
import functools
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


@functools.cache
def texts() -> Mapping[str, str]:
    """The texts by name, with `{fields}` as str.format takes them."""
    table = (files("lmi_bench.core") / "data" / "texts.csv").read_text(encoding="utf-8")
    return {row["name"]: row["text"] for row in csv.DictReader(table.splitlines())}


def say(name: str, /, **figures: Any) -> str:
    """The text of this name with its fields filled in."""
    return texts()[name].format(**figures)
