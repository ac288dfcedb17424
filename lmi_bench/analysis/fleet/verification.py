"""A recommendation against a measurement under its planned load.

A measured figure is inside or outside the interval. The measured level alone judges the SLOs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.fit.uncertainty import Z80, Estimate
from lmi_bench.analysis.fleet.answer import Candidate, Question
from lmi_bench.core.level import Level
from lmi_bench.core.slo import METRICS, STATISTICS

_THROUGHPUT = "throughput_tokens_per_s"
_ENDS = ("predicted", "low", "high")
_OUTSIDE, _BY_CHANCE = 0.2, 0.05  # share outside an 80 % interval; chance that counts as none


@dataclass(frozen=True, slots=True)
class Verified:
    """One figure: predicted with its interval, and measured."""

    name: str
    figure: Estimate | None
    measured: float | None

    @property
    def verdict(self) -> str:
        """`inside` or `outside` the interval; `unknown` without a prediction or measurement."""
        if self.figure is None or self.measured is None:
            return "unknown"
        return "inside" if self.figure.low <= self.measured <= self.figure.high else "outside"

    def to_json(self) -> dict[str, Any]:
        figure = dict.fromkeys(_ENDS) if self.figure is None else self.figure.to_json()
        return {"name": self.name, **figure, "measured": self.measured, "verdict": self.verdict}


def contradicts(figures: Sequence[Verified]) -> bool:
    """Whether more figures lie outside than 80 % intervals leave by chance (binomial, 5 %)."""
    from scipy.special import bdtrc  # 0.2 s to load

    known = [each for each in figures if each.verdict != "unknown"]
    outside = sum(each.verdict == "outside" for each in known)
    return outside > 0 and float(bdtrc(outside - 1, len(known), _OUTSIDE)) < _BY_CHANCE


def compare_figures(candidate: Candidate, question: Question, line: Level, *, share: float) -> Iterator[Verified]:
    """The candidate's figures against a level's line.

    share  of the planned load on the target, above 0 and at most 1
    """
    yield _throughput(candidate.figures.get(_THROUGHPUT), question, line, share)
    for metric in METRICS:
        for statistic in STATISTICS:
            name = f"{metric}_{statistic}_ms"
            if name in candidate.figures:
                measured = line.of(metric).value(statistic)
                yield Verified(name, candidate.figures[name], measured)


def _throughput(figure: Estimate | None, question: Question, line: Level, share: float) -> Verified:
    """Arrivals and lengths decide an open loop's throughput, so its interval is that of their sum.

    Squared relative error of the sum of n outputs with gamma gaps: (1 / burstiness + cv**2) / n;
    cv is the relative spread of the lengths (compound renewal process).
    """
    measured = line.steady.throughput_tokens_per_s or line.throughput_tokens_per_s
    if figure is not None and figure.low == figure.high and line.requests:
        gaps, mean = 1 / question.burstiness, question.output_tokens
        total = sum(kind.share for kind in question.kinds)
        spread = sum(k.share * (k.output_tokens / mean - 1) ** 2 for k in question.kinds)
        requests = line.requests * (line.steady.share or 1.0)
        variance = (gaps + (spread / total if total else 0.0)) / requests
        half = Z80 * figure.value * math.sqrt(variance)
        figure = Estimate(figure.value, figure.value - half, figure.value + half)
    return Verified(_THROUGHPUT, None if figure is None else figure.times(share), measured)
