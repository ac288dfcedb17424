"""CloudWatch metrics of a SageMaker endpoint during each level.

SageMaker writes one value a minute, so a level gets the minutes that it touches, and the number of
them that other levels touch too. Latencies come in microseconds. The first chunk is of streamed
answers. Use of GPUs and cores comes as a sum over those of an instance or component, 0 to 100 each.
Source: "Monitor Amazon SageMaker AI with CloudWatch".
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.level import Level
from lmi_bench.core.server_metrics import CloudWatch
from lmi_bench.loadgen.aws.access import error_text, refusals

PERIOD = timedelta(minutes=1)
US_PER_MS = 1000.0
_INVOCATIONS = "AWS/SageMaker"
_ROWS = read_rows("cloudwatch_metrics.csv", "loadgen")
_COUNTS, _LATENCIES, _SHARES = (
    {row["name"]: row["metric"] for row in _ROWS if row["kind"] == kind} for kind in ("count", "latency", "share")
)
_QUERIES = (
    *((name, metric, "Sum") for name, metric in _COUNTS.items()),
    *((f"{name}_sum", metric, "Sum") for name, metric in _LATENCIES.items()),
    *((f"{name}_count", metric, "SampleCount") for name, metric in _LATENCIES.items()),
    *((name, metric, "Average") for name, metric in _SHARES.items()),
)
Series = Mapping[datetime, float]


@dataclass(frozen=True, slots=True)
class Watched:
    """The variant or inference component whose metrics are read.

    devices, cores  that one instance or component has; None: unknown, so their use is not read
    """

    endpoint_name: str
    variant: str
    component: str | None = None
    devices: int | None = None
    cores: int | None = None


def timed_levels(lines: Sequence[Level]) -> list[Level]:
    """The levels whose start and end by the wall clock are known."""
    return [line for line in lines if line.started_at and line.ended_at]


def _minutes(line: Level) -> list[datetime]:
    """The minutes that a level touches (UTC)."""
    start, end = (datetime.fromisoformat(each or "") for each in (line.started_at, line.ended_at))
    first = start.astimezone(UTC).replace(second=0, microsecond=0)
    return [first + place * PERIOD for place in range((end - first) // PERIOD + 1)]


def read_levels(client: Any, watched: Watched, lines: Sequence[Level]) -> list[CloudWatch]:
    """The known values of each level, all with times; raises LmiBenchError if AWS refuses."""
    users = Counter(minute for line in lines for minute in _minutes(line))
    series = _series(client, watched, users)
    return [_of_level(line, series, users, watched) for line in lines]


def _series(client: Any, watched: Watched, minutes: Collection[datetime]) -> dict[str, Series]:
    """Values by minute of each query, over all levels."""
    if watched.component is None:
        kind, whose = "Endpoints", {"EndpointName": watched.endpoint_name, "VariantName": watched.variant}
    else:
        kind, whose = "InferenceComponents", {"InferenceComponentName": watched.component}
    dimensions = [{"Name": name, "Value": value} for name, value in whose.items()]

    def query(name: str, metric: str, statistic: str) -> dict[str, Any]:
        namespace = f"/aws/sagemaker/{kind}" if name in _SHARES else _INVOCATIONS
        of = {"Namespace": namespace, "MetricName": metric, "Dimensions": dimensions}
        period_s = int(PERIOD.total_seconds())
        return {"Id": name, "MetricStat": {"Metric": of, "Period": period_s, "Stat": statistic}}

    asked = {"StartTime": min(minutes), "EndTime": max(minutes) + PERIOD}
    queries = [query(*each) for each in _QUERIES]
    found: dict[str, dict[datetime, float]] = {}
    try:
        pages = client.get_paginator("get_metric_data")
        for reply in pages.paginate(**asked, MetricDataQueries=queries):
            for result in reply["MetricDataResults"]:
                kept = found.setdefault(result["Id"], {})
                pairs = zip(result["Timestamps"], result["Values"], strict=True)
                kept |= {when.astimezone(UTC): float(value) for when, value in pairs}
    except refusals() as exc:
        raise LmiBenchError(f"CloudWatch: {error_text(exc)}") from exc
    return dict(found)


def _of_level(line: Level, series: Mapping[str, Series], users: Mapping[datetime, int], watched: Watched) -> CloudWatch:
    minutes = _minutes(line)

    def values(name: str) -> list[float]:
        return [series[name][m] for m in minutes if m in series.get(name, {})]

    known: dict[str, Any] = {name: sum(values(name)) for name in _COUNTS if values(name)}
    for name in _LATENCIES:
        count = sum(values(f"{name}_count"))
        if count:
            known[f"{name}_mean_ms"] = sum(values(f"{name}_sum")) / count / US_PER_MS
    for name in _SHARES:
        number = watched.cores if name == "cpu_utilization" else watched.devices
        if values(name) and number:
            known[f"{name}_mean_percent"] = sum(values(name)) / len(values(name)) / number
    return CloudWatch(
        level=line.index,
        attempt=line.attempt,
        first_minute=minutes[0].isoformat(),
        minutes=len(minutes),
        shared_minutes=sum(users[minute] > 1 for minute in minutes),
        **known,
    )
