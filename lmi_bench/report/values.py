"""The content of a report as plain values: numbers are already text, charts are series.

The renderers (HTML, text, charts) place these and decide nothing about the content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.findings import Knee
from lmi_bench.core.slo import Slo
from lmi_bench.report.table import Table

Band = tuple[float, float]
"""The ends of an interval."""
THROUGHPUT, LATENCY = ("throughput_tokens_per_s", ""), ("latency_ms_per_token", "upper")
"""Keys of a curve's values."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric: its key in levels.jsonl, its formula, and a note for the reader: other tools give
    the same names to other formulas.

    vllm_key  the name under which `vllm bench serve` prints the same formula; empty if none does
    """

    key: str
    title: str
    unit: str
    formula: str
    note: str
    vllm_key: str


DEFINITIONS = tuple(Definition(**row) for row in read_rows("definitions.csv", "analysis.results"))


@dataclass(frozen=True, slots=True)
class Headline:
    """One of the numbers to read first."""

    label: str
    value: str
    unit: str
    detail: str
    tone: str = ""

    @property
    def line(self) -> str:
        """In one line: `capacity: 14.1 req/s, within the SLOs`."""
        label = self.label[:1].lower() + self.label[1:]
        text = f"{label}: {self.value} {self.unit}".rstrip()
        return f"{text}, {self.detail}" if self.detail else text


@dataclass(frozen=True, slots=True)
class Curve:
    """One run as series over its levels, each of the same length; None where there is no value.

    axis        "concurrency" or "rate_per_s"; loads in rising order
    knees       over the same axis; their loads are levels' or, for the theory, between two
    simulated   predicted by the step-time model instead of measured
    values      THROUGHPUT -> tok/s, (key of levels.jsonl, statistic) -> ms; statistic "upper" is
                the p90, or the slowest request where too few were sent
    bands       likewise, the 80 % intervals of a prediction
    ttft_parts  name of a part of the mean TTFT -> ms; empty where the server does not state its own
    """

    label: str
    axis: str
    simulated: bool
    loads: tuple[float, ...]
    valid: tuple[bool, ...]
    values: Mapping[tuple[str, str], tuple[float | None, ...]]
    knees: tuple[Knee, ...] = ()
    slos: tuple[Slo, ...] = ()
    bands: Mapping[tuple[str, str], tuple[Band | None, ...]] = field(default_factory=dict)
    ttft_parts: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """Named facts in the order in which to read them."""

    title: str
    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RunView:
    """One run; `explored` is the data of the views that the page draws."""

    anchor: str
    requests: int
    subtitle: str
    headlines: tuple[Headline, ...]
    levels: Table
    details: tuple[Table, ...]
    knees: Table
    slos: Table | None
    generator: Table
    more: tuple[Table, ...]
    warnings: tuple[str, ...]
    environment: tuple[Facts, ...]
    scenario_yaml: str
    curve: Curve
    explored: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecommendationView:
    """One recommendation; its headline is bad where no candidate meets the SLOs.

    answer    what to read after the headline: cost, capacity, SLOs, attainment
    rejected  candidates by kind of reason, which is the table's caption
    roof      roofline of a device of the fleet (`explore.fleet_roofline`)
    """

    anchor: str
    title: str
    subtitle: str
    why: str
    headline: Headline
    answer: tuple[Headline, ...]
    figures: Table | None
    candidates: Table | None
    more_candidates: Table | None
    unlisted: int
    rejected: tuple[Table, ...]
    more: tuple[Table, ...]
    provenance: tuple[Facts, ...]
    warnings: tuple[str, ...] = ()
    explored: Sequence[Any] = ()
    rate_per_s: float | None = None
    roof: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ReportView:
    """A whole report.

    verdicts  of each run against the first; unjudged: why others have none
    """

    title: str
    generated_at: str
    version: str
    headlines: tuple[Headline, ...]
    runs: tuple[RunView, ...]
    comparison: Table | None
    recommendations: tuple[RecommendationView, ...]
    tables: tuple[Table, ...] = ()
    verdicts: tuple[Table, ...] = ()
    unjudged: tuple[str, ...] = ()
    definitions: tuple[Definition, ...] = DEFINITIONS
