"""CloudWatch metrics of a SageMaker endpoint during each level.

SageMaker writes one value a minute, so a level gets the minutes that it touches, and the number of
them that other levels touch too. Latencies come in microseconds. Metrics: AWS/SageMaker
and /aws/sagemaker/Endpoints, "Monitor Amazon SageMaker AI with CloudWatch".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.level import CloudWatch, Level
from lmi_bench.loadgen.aws.access import error_text

PERIOD = timedelta(minutes=1)
US_PER_MS = 1000.0
_INVOCATIONS, _INSTANCES = "AWS/SageMaker", "/aws/sagemaker/Endpoints"
_QUERIES = (
    ("invocations", _INVOCATIONS, "Invocations", "Sum"),
    ("errors_4xx", _INVOCATIONS, "Invocation4XXErrors", "Sum"),
    ("errors_5xx", _INVOCATIONS, "Invocation5XXErrors", "Sum"),
    ("model_latency_sum", _INVOCATIONS, "ModelLatency", "Sum"),
    ("model_latency_count", _INVOCATIONS, "ModelLatency", "SampleCount"),
    ("overhead_latency_sum", _INVOCATIONS, "OverheadLatency", "Sum"),
    ("overhead_latency_count", _INVOCATIONS, "OverheadLatency", "SampleCount"),
    ("gpu_utilization", _INSTANCES, "GPUUtilization", "Average"),
    ("gpu_memory", _INSTANCES, "GPUMemoryUtilization", "Average"),
    ("cpu_utilization", _INSTANCES, "CPUUtilization", "Average"),
)
_COUNTS = ("invocations", "errors_4xx", "errors_5xx")
_MEANS = ("gpu_utilization", "gpu_memory", "cpu_utilization")
Series = Mapping[datetime, float]


@dataclass(frozen=True, slots=True)
class LevelSpan:
    """Start and end of a level by the wall clock (UTC)."""

    level: int
    attempt: int
    start: datetime
    end: datetime

    @property
    def minutes(self) -> list[datetime]:
        """The minutes that it touches."""
        first = self.start.astimezone(UTC).replace(second=0, microsecond=0)
        return [first + place * PERIOD for place in range((self.end - first) // PERIOD + 1)]


def level_spans(lines: Sequence[Level]) -> list[LevelSpan]:
    """The spans of finished levels, those without times are left out."""
    return [
        LevelSpan(
            line.index,
            line.attempt,
            datetime.fromisoformat(line.started_at),
            datetime.fromisoformat(line.ended_at),
        )
        for line in lines
        if line.started_at and line.ended_at
    ]


def read_levels(
    client: Any, endpoint_name: str, variant: str, spans: Sequence[LevelSpan]
) -> list[CloudWatch]:
    """The known values of each level; raises LmiBenchError if AWS refuses."""
    if not spans:
        return []
    series = _series(client, endpoint_name, variant, spans)
    users = Counter(minute for span in spans for minute in span.minutes)
    return [_of_level(span, series, users) for span in spans]


def _series(
    client: Any, endpoint_name: str, variant: str, spans: Sequence[LevelSpan]
) -> dict[str, Series]:
    """Values by minute of each query, over all levels."""
    from botocore.exceptions import BotoCoreError, ClientError

    minutes = [minute for span in spans for minute in span.minutes]
    asked: dict[str, Any] = {
        "StartTime": min(minutes),
        "EndTime": max(minutes) + PERIOD,
        "MetricDataQueries": [
            {
                "Id": name,
                "MetricStat": {
                    "Metric": {
                        "Namespace": namespace,
                        "MetricName": metric,
                        "Dimensions": [
                            {"Name": "EndpointName", "Value": endpoint_name},
                            {"Name": "VariantName", "Value": variant},
                        ],
                    },
                    "Period": int(PERIOD.total_seconds()),
                    "Stat": statistic,
                },
            }
            for name, namespace, metric, statistic in _QUERIES
        ],
    }
    found: dict[str, dict[datetime, float]] = {}
    try:
        for reply in client.get_paginator("get_metric_data").paginate(**asked):
            for result in reply["MetricDataResults"]:
                kept = found.setdefault(result["Id"], {})
                pairs = zip(result["Timestamps"], result["Values"], strict=True)
                kept |= {when.astimezone(UTC): float(value) for when, value in pairs}
    except (ClientError, BotoCoreError) as exc:
        raise LmiBenchError(f"CloudWatch: {error_text(exc)}") from exc
    return dict(found)


def _of_level(
    span: LevelSpan, series: Mapping[str, Series], users: Mapping[datetime, int]
) -> CloudWatch:
    minutes = span.minutes

    def values(name: str) -> list[float]:
        return [series[name][m] for m in minutes if m in series.get(name, {})]

    known: dict[str, Any] = {name: sum(values(name)) for name in _COUNTS if values(name)}
    for name in ("model_latency", "overhead_latency"):
        count = sum(values(f"{name}_count"))
        if count:
            known[f"{name}_mean_ms"] = sum(values(f"{name}_sum")) / count / US_PER_MS
    for name in _MEANS:
        if values(name):
            known[f"{name}_mean_percent"] = sum(values(name)) / len(values(name))
    return CloudWatch(
        level=span.level,
        attempt=span.attempt,
        first_minute=minutes[0].isoformat(),
        minutes=len(minutes),
        shared_minutes=sum(users[minute] > 1 for minute in minutes),
        **known,
    )
