"""A recommendation against what was measured under its planned load.

Each predicted figure has an interval; a measured one lies inside or outside it. The SLOs are judged
on the measured level alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.fit.uncertainty import Z80
from lmi_bench.analysis.results.goodput import check_slo
from lmi_bench.core.level import Level
from lmi_bench.core.slo import METRICS, STATISTICS, parse_slo

_THROUGHPUT = "throughput_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Verified:
    """One figure: predicted with its interval, and as measured.

    verdict  inside, outside, or unknown where nothing was predicted or measured
    """

    name: str
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None

    @property
    def verdict(self) -> str:
        """Where the measured value lies."""
        if self.low is None or self.high is None or self.measured is None:
            return "unknown"
        return "inside" if self.low <= self.measured <= self.high else "outside"

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "name": self.name,
            "predicted": self.predicted,
            "low": self.low,
            "high": self.high,
            "measured": self.measured,
            "verdict": self.verdict,
        }


def compare_figures(
    candidate: Mapping[str, Any], line: Level, *, share: float
) -> Iterator[Verified]:
    """The candidate's figures against a level's line.

    share  of the planned load that the target carried, above 0 and at most 1
    """
    yield _throughput(candidate.get(_THROUGHPUT) or {}, line, share)
    for metric in METRICS:
        for statistic in STATISTICS:
            figure = candidate.get(f"{metric}_{statistic}_ms")
            if isinstance(figure, Mapping):
                yield Verified(
                    f"{metric}_{statistic}_ms",
                    figure.get("predicted"),
                    figure.get("low"),
                    figure.get("high"),
                    line.of(metric).value(statistic),
                )


def _throughput(figure: Mapping[str, Any], line: Level, share: float) -> Verified:
    """In an open loop what arrives decides it, so its interval is that of a Poisson count."""
    measured = line.steady.throughput_tokens_per_s or line.throughput_tokens_per_s
    predicted, low, high = (figure.get(key) for key in ("predicted", "low", "high"))
    if predicted is None or low is None or high is None:
        return Verified(_THROUGHPUT, None, None, None, measured)
    if low == high and line.requests:
        half = Z80 * predicted / math.sqrt(line.requests)
        low, high = predicted - half, predicted + half
    return Verified(_THROUGHPUT, predicted * share, low * share, high * share, measured)


def slo_verdicts(slos: list[str], line: Level) -> list[dict[str, Any]]:
    """Each SLO on the measured level: pass, fail or unsupported."""
    results = [check_slo(line, parse_slo(text)) for text in slos]
    return [
        {
            "slo": str(result.slo),
            "measured_ms": result.measured_ms,
            "verdict": result.verdict,
            "reason": result.reason or None,
        }
        for result in results
    ]
