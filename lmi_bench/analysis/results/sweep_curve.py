"""The curve of a sweep: one point a level, from its line of levels.jsonl and its records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.quantiles import FloatArray, upper_quantile
from lmi_bench.core.level import Level
from lmi_bench.core.load import LoadAxis, load_name
from lmi_bench.core.records import RequestRecord


@dataclass(frozen=True, slots=True, eq=False)
class LevelPoint:
    """One level of a sweep.

    load                     concurrency, or req/s where the sweep is over rates
    concurrency              requests in flight: as requested, or by Little's law for a rate
    throughput_tokens_per_s  of the input if the answers have no tokens, which then have no latency
                             per token; None where no request was completed
    latency_ms_per_token     p90 with failed requests as infinitely slow; None where no request was
                             completed
    latency_is               the statistic that this latency is, for display
    usable                   False where the level was cut short or its load was not delivered: it
                             says nothing about the server's throughput, and no knee is there
    requests                 shape (2, requests): ms/token, infinite for a failed request, and
                             output tokens, then 0; None where the records are missing. An array,
                             since the interval of a knee draws its columns a thousand times
    """

    load: float
    concurrency: float | None
    throughput_tokens_per_s: float | None
    latency_ms_per_token: float | None
    latency_is: str
    usable: bool
    line: Level
    requests: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SweepCurve:
    """The levels of a sweep by increasing load.

    axis  the unit of the points' loads, and of loads between them, such as a fitted knee
    """

    axis: LoadAxis
    points: tuple[LevelPoint, ...]

    @property
    def usable(self) -> tuple[LevelPoint, ...]:
        """The points that show the server's throughput."""
        return tuple(point for point in self.points if point.usable)

    @property
    def best(self) -> LevelPoint | None:
        """The usable point with the most throughput; None without one."""
        return max(self.usable, key=lambda point: point.throughput_tokens_per_s or 0.0, default=None)

    def beyond(self, load: float) -> LevelPoint | None:
        """The next level above a load, usable or not."""
        return next((point for point in self.points if point.load > load), None)

    def name(self, load: float) -> str:
        """The name of a load on the axis: `concurrency 32`, `2.5 req/s`."""
        return load_name(self.axis, load)


def work_per_s(line: Level) -> float | None:
    """Tokens per second: of the output, or of the input if the answers have none."""
    whole, output = line.total_throughput_tokens_per_s, line.throughput_tokens_per_s
    return whole if line.is_tokenless else output


def sweep_curve(levels: Sequence[Level], records: Sequence[Sequence[RequestRecord]] | None = None) -> SweepCurve:
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
    requests = None
    if records and not line.is_tokenless:
        columns = columns_of(records)
        values_ms, rows = columns.values_ms("latency_per_token", open_loop=line.load.is_open)
        found = np.vstack([np.full(len(records), np.inf), np.zeros(len(records))])
        found[:, rows] = values_ms, columns.tokens[rows]
        if count := int(columns.counted.sum()):
            requests = found[:, columns.counted]
            latency = upper_quantile(requests[0], 0.9)
            latency_is = f"p90 (of {count})" if count < samples_needed(0.9) else "p90"
    return LevelPoint(
        load=load,
        concurrency=line.load.concurrency or line.mean_concurrency,
        throughput_tokens_per_s=work_per_s(line),
        latency_ms_per_token=latency,
        latency_is=latency_is,
        usable=bool(line.valid and not line.is_cut_short and work_per_s(line)),
        line=line,
        requests=requests,
    )


def _upper_latency_ms(line: Level) -> tuple[float | None, str]:
    """p90 of a level's line, or its maximum where too few requests were sent.

    The p90 over all requests is infinite if at least a tenth of them failed.
    """
    statistics = line.of("latency_per_token")
    if line.failed >= 0.1 * max(1, line.sent):
        return np.inf, "p90 over all requests, failed ones as infinite"
    if statistics.p90 is not None:
        return statistics.p90, "p90"
    if statistics.max is not None:
        return statistics.max, "the slowest request, too few for a p90"
    return None, ""
