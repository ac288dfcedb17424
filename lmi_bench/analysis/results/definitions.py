"""The formula of each metric (definitions.csv), shown with every output that has the metric.

Other tools give the same names to other formulas.
"""

from dataclasses import dataclass

from lmi_bench.catalog.tables import read_rows


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


DEFINITIONS = tuple(Definition(**row) for row in read_rows("definitions.csv", "analysis.results"))
