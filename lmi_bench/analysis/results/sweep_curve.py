"""The curve of a sweep: one point a level, from its line of levels.jsonl and its records.

A point that was cut short or whose load was not delivered says nothing about the server's
throughput; `usable` is False for it and the knees pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.latency import request_latency, samples_needed
from lmi_bench.core.level import Level
from lmi_bench.core.load import LoadAxis, load_name
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.units import s_to_ms

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LevelPoint:
    """One level of a sweep.

    load                     concurrency, or req/s where the sweep is over rates
    concurrency              requests in flight: as asked, or by Little's law where rates are asked
    throughput_tokens_per_s  None where nothing was completed
    latency_ms_per_token     the upper latency of the level: p90 with failed requests as endless;
                             None where nothing was completed
    latency_is               how that latency was taken, for the reader
    request_ms_per_token     shape (requests,), one value a request, infinite for a failed one;
                             None where the records are not at hand
    request_tokens           shape (requests,), output tokens, 0 for a failed request
    """

    load: float
    concurrency: float | None
    throughput_tokens_per_s: float | None
    latency_ms_per_token: float | None
    latency_is: str
    usable: bool
    line: Level
    request_ms_per_token: FloatArray | None = None
    request_tokens: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SweepCurve:
    """The levels of a sweep in rising order of load; `axis` says what the load is."""

    axis: LoadAxis
    points: tuple[LevelPoint, ...]

    @property
    def usable(self) -> tuple[LevelPoint, ...]:
        """The points that say something about the server."""
        return tuple(point for point in self.points if point.usable)

    def beyond(self, load: float) -> LevelPoint | None:
        """The next level above a load, usable or not: where things changed."""
        return next((point for point in self.points if point.load > load), None)

    def name(self, load: float) -> str:
        """A load as people say it: `concurrency 32`, `2.5 req/s`."""
        return load_name(self.axis, load)


def sweep_curve(
    levels: Sequence[Level],
    records: Sequence[Sequence[RequestRecord]] | None = None,
) -> SweepCurve:
    """The curve of a run's levels; a level that ran twice counts with its last attempt.

    records  one sequence a level, in the order of `levels`
    """
    by_concurrency = any(line.load.concurrency is not None for line in levels)
    axis: LoadAxis = "concurrency" if by_concurrency else "rate_per_s"
    latest: dict[float, LevelPoint] = {}
    for index, line in enumerate(levels):
        load = line.load.on(axis)
        if load is not None:
            here = records[index] if records is not None and index < len(records) else None
            latest[load] = _point(load, line, here)
    return SweepCurve(axis, tuple(latest[load] for load in sorted(latest)))


def _point(load: float, line: Level, records: Sequence[RequestRecord] | None) -> LevelPoint:
    latency, latency_is = _upper_latency_ms(line)
    throughput = line.throughput_tokens_per_s
    per_request: FloatArray | None = None
    tokens: FloatArray | None = None
    if records:
        open_loop = line.load.is_open
        per_request, tokens = _request_arrays(records, open_loop=open_loop)
        upper = upper_quantile(per_request, 0.9)
        few = len(per_request) < samples_needed(0.9)
        latency, latency_is = upper, f"p90 (of {len(per_request)})" if few else "p90"
    usable = bool(line.valid and not line.is_cut_short and throughput)
    return LevelPoint(
        load=load,
        concurrency=line.load.concurrency or line.mean_concurrency,
        throughput_tokens_per_s=throughput,
        latency_ms_per_token=latency,
        latency_is=latency_is,
        usable=usable,
        line=line,
        request_ms_per_token=per_request,
        request_tokens=tokens,
    )


def _upper_latency_ms(line: Level) -> tuple[float | None, str]:
    """p90 of a level's line, or what stands in for it where too few requests were sent.

    With at least a tenth of the requests failed, the p90 of all requests is endless.
    """
    statistics = line.of("latency_per_token")
    if line.failed >= 0.1 * max(1, line.sent):
        return np.inf, "p90 over all requests, failed ones endless"
    if statistics.p90 is not None:
        return statistics.p90, "p90"
    if statistics.max is not None:
        return statistics.max, "the slowest request, too few for a p90"
    return None, ""


def _request_arrays(
    records: Sequence[RequestRecord], *, open_loop: bool
) -> tuple[FloatArray, FloatArray]:
    latency_ms, tokens = [], []
    for record in records:
        value = (
            request_latency(record, open_loop=open_loop).latency_s_per_token if record.ok else None
        )
        latency_ms.append(np.inf if value is None else s_to_ms(value))
        tokens.append(0.0 if value is None else float(record.output_tokens))
    return np.array(latency_ms), np.array(tokens)


def upper_quantile(values: FloatArray, quantile: float) -> float:
    """Linear quantile of values, shape (n,), of which some may be infinite.

    Infinite as soon as an infinite value takes part in it, where numpy would give NaN.
    """
    ordered = np.sort(values)
    position = quantile * (len(ordered) - 1)
    low, high = int(np.floor(position)), int(np.ceil(position))
    if low == high or not np.isfinite(ordered[high]):
        return float(ordered[high])
    return float(ordered[low] + (position - low) * (ordered[high] - ordered[low]))
