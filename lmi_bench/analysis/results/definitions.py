"""The formula of each metric (definitions.csv), shown with every output that has the metric.

Other tools give the same names to other formulas.
"""

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric: its key in levels.jsonl, its formula, and a note for the reader.

    vllm_key  the name under which `vllm bench serve` prints the same formula; empty if none does
    """

    key: str
    title: str
    unit: str
    formula: str
    note: str
    vllm_key: str


_TABLE = resources.files(__package__).joinpath("definitions.csv").read_text(encoding="utf-8")
DEFINITIONS = tuple(Definition(**row) for row in csv.DictReader(_TABLE.splitlines()))
