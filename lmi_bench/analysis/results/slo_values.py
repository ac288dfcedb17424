"""One latency statistic of one level from its records, with failed requests left out or endless.

Values are milliseconds. `infinite` counts a failed request as an answer that never comes, so that
one success of a hundred requests does not read as a fast level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.latency import RequestLatency, request_latency
from lmi_bench.analysis.results.sweep_curve import upper_quantile
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.units import MS_PER_S

FloatArray = NDArray[np.float64]
FailureRule = Literal["exclude", "infinite"]
UNTOLD_NOISE = 1.0
FAILURE_RULES: tuple[FailureRule, ...] = ("exclude", "infinite")


def request_values_ms(
    records: Sequence[RequestRecord],
    metric: str,
    *,
    open_loop: bool,
    failures: FailureRule = "exclude",
) -> list[FloatArray]:
    """What each request adds to a metric's sample, in milliseconds, one array a request.

    metric    a metric of the SLO grammar
    returns   one value a request, or its gaps for `itl`; requests without the metric (a TPOT of
              one token) are left out. A failed request under `infinite` adds one endless value,
              for `itl` as many as an answered request has gaps on average.
    """
    kept = [
        own_values_ms(request_latency(record, open_loop=open_loop), metric)
        for record in records
        if record.ok
    ]
    kept = [values for values in kept if values.size]
    if failures == "infinite":
        size = round(float(np.mean([values.size for values in kept]))) if kept else 1
        endless = np.full(max(1, size), np.inf)
        kept += [endless for record in records if not record.ok]
    return kept


def own_values_ms(latency: RequestLatency, metric: str) -> FloatArray:
    """A completed request's own values of a metric, in milliseconds; empty where it has none."""
    if metric == "itl":
        return latency.itl_s * MS_PER_S
    value_s = {
        "ttft": latency.ttft_s,
        "tpot": latency.tpot_s,
        "e2e": latency.e2e_s,
        "latency_per_token": latency.latency_s_per_token,
    }[metric]
    return np.empty(0) if value_s is None else np.array([value_s * MS_PER_S])


def statistic_ms(values_ms: FloatArray, statistic: str) -> float:
    """Mean or linear quantile of values of which some may be endless; shape (n,), n at least 1.

    Unlike a level's line it is given for any n: whether n supports it is the caller's question.
    """
    if statistic == "mean":
        return float(values_ms.mean())
    return upper_quantile(values_ms, QUANTILES[statistic])


def log_noise(values_ms: FloatArray, statistic: str, *, samples: int) -> float:
    """Standard deviation of the logarithm of a statistic, by the values it was taken from.

    A quantile's is half the distance between the two that lie one standard error of a share,
    sqrt(q (1 - q) / n), on either side of it (Woodruff 1952); a mean's is that of its values over
    sqrt(n). Where the values do not tell (one only, or an endless one so near) it is 1.

    samples  independent values: requests, where each of them adds many gaps
    """
    if samples < 2:
        return UNTOLD_NOISE
    if statistic == "mean":
        mean = float(values_ms.mean())
        if not 0 < mean < math.inf:
            return UNTOLD_NOISE
        return min(UNTOLD_NOISE, float(values_ms.std(ddof=1)) / (mean * math.sqrt(samples)))
    q = QUANTILES[statistic]
    error = math.sqrt(q * (1 - q) / samples)
    below, above = max(0.0, q - error), min(1.0, q + error)
    low, high = upper_quantile(values_ms, below), upper_quantile(values_ms, above)
    if low <= 0 or not math.isfinite(high):
        return UNTOLD_NOISE
    return min(UNTOLD_NOISE, math.log(high / low) * error / (above - below))


def level_statistic_ms(
    records: Sequence[RequestRecord],
    metric: str,
    statistic: str,
    *,
    open_loop: bool,
    failures: FailureRule = "exclude",
) -> float | None:
    """A statistic over a level's requests, in milliseconds; None if no request has the metric."""
    values = request_values_ms(records, metric, open_loop=open_loop, failures=failures)
    return statistic_ms(np.concatenate(values), statistic) if values else None
