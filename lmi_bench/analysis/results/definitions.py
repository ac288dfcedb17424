"""The formula of each metric (definitions.csv), shown with every output that has the metric.

Other tools give the same names to other formulas.
"""

from typing import Final

from lmi_bench.catalog.tables import read_rows

DEFINITIONS: Final = tuple(read_rows("definitions.csv", "analysis.results"))
"""Of each metric its key in levels.jsonl, title, unit, formula, a note for the reader, and the name
(vllm_key) under which `vllm bench serve` prints the same formula; empty if none does."""
