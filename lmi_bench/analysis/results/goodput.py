"""SLOs: the share of requests that meet all of them, and whether a level does.

A request is judged by its own value of the metric (for ITL by the SLO's statistic over its own
gaps); a level by the statistic over its requests. A failed request meets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lmi_bench.analysis.results.latency import RequestLatency, request_latency, wall_time_s
from lmi_bench.core.level import QUANTILES, Level
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo
from lmi_bench.core.units import s_to_ms

Verdict = Literal["pass", "fail", "unsupported"]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every SLO, out of those sent."""

    good: int
    requests: int
    per_s: float | None

    @property
    def share(self) -> float | None:
        """Share of the requests sent, 0 to 1; None if none was sent."""
        return self.good / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class SloResult:
    """One SLO against one level; `measured_ms` is None and `reason` says why if unsupported."""

    slo: Slo
    verdict: Verdict
    measured_ms: float | None
    reason: str = ""

    @property
    def slack_ms(self) -> float | None:
        """Limit minus measured; negative if missed."""
        return None if self.measured_ms is None else self.slo.limit_ms - self.measured_ms


def goodput(records: Sequence[RequestRecord], slos: Sequence[Slo], *, open_loop: bool) -> Goodput:
    """How many requests of a level meet every SLO, and how many a second."""
    good = sum(
        1
        for record in records
        if record.ok and _meets_all(request_latency(record, open_loop=open_loop), slos)
    )
    wall_s = wall_time_s(records)
    return Goodput(good, len(records), good / wall_s if wall_s > 0 else None)


def check_slo(line: Level, slo: Slo) -> SloResult:
    """Whether a level's line meets an SLO.

    `unsupported` where the level has too few requests for the quantile: neither a pass nor a fail
    can be claimed, unless even the fastest request is over the limit.
    """
    statistics = line.of(slo.metric)
    value = statistics.value(slo.statistic)
    if value is not None:
        return SloResult(slo, "pass" if value <= slo.limit_ms else "fail", float(value))
    least = statistics.min
    reason = statistics.why_missing(slo.statistic) or "no request has this latency"
    if least is not None and least > slo.limit_ms:
        return SloResult(slo, "fail", None, f"even the least, {least:.4g} ms, is over; {reason}")
    return SloResult(slo, "unsupported", None, reason)


def _meets_all(latency: RequestLatency, slos: Sequence[Slo]) -> bool:
    return all(_meets(latency, slo) for slo in slos)


def _meets(latency: RequestLatency, slo: Slo) -> bool:
    """A metric that a request does not have (TPOT of one token) cannot be missed."""
    value_s = _own_value_s(latency, slo)
    return value_s is None or s_to_ms(value_s) <= slo.limit_ms


def _own_value_s(latency: RequestLatency, slo: Slo) -> float | None:
    if slo.metric == "itl":
        if not latency.itl_s.size:
            return None
        if slo.statistic == "mean":
            return float(latency.itl_s.mean())
        return float(np.quantile(latency.itl_s, QUANTILES[slo.statistic]))
    values = {
        "ttft": latency.ttft_s,
        "tpot": latency.tpot_s,
        "e2e": latency.e2e_s,
        "latency_per_token": latency.latency_s_per_token,
    }
    return values[slo.metric]
