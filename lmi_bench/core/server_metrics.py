"""What a server, its host and CloudWatch say about a level, and the parts of its TTFT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmi_bench.core.json_value import OPTIONAL, JsonValue, key_of


@dataclass(frozen=True, slots=True)
class Gauge(JsonValue):
    """A server's gauge during a level: its mean over time, and its highest value."""

    mean: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class Power(JsonValue):
    """Energy of the accelerators during a level; `valid` is False if the level was too short."""

    gpus: int | None = None
    energy_j: float | None = None
    mean_power_w: float | None = None
    gpu_use_frac: float | None = None
    joules_per_output_token: float | None = None
    source: str | None = None
    valid: bool | None = None


@dataclass(frozen=True, slots=True)
class CloudWatch(JsonValue):
    """CloudWatch metrics of a level (cloudwatch.json), summed or averaged over its minutes.

    first_minute    ISO 8601, UTC; the key is `from`
    shared_minutes  minutes that other levels touch, too
    first_chunk     of streamed answers: the server's own TTFT
    utilization     of one GPU or core, 0 to 100
    """

    level: int | None = None
    attempt: int | None = None
    first_minute: str | None = field(default=None, metadata=key_of("from"))
    minutes: int | None = None
    shared_minutes: int | None = None
    invocations: float | None = field(default=None, metadata=OPTIONAL)
    errors_4xx: float | None = field(default=None, metadata=OPTIONAL)
    errors_5xx: float | None = field(default=None, metadata=OPTIONAL)
    model_latency_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    overhead_latency_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    first_chunk_latency_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    first_chunk_model_latency_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    first_chunk_overhead_latency_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    mid_stream_errors: float | None = field(default=None, metadata=OPTIONAL)
    gpu_utilization_mean_percent: float | None = field(default=None, metadata=OPTIONAL)
    gpu_memory_mean_percent: float | None = field(default=None, metadata=OPTIONAL)
    cpu_utilization_mean_percent: float | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class ServerMetrics(JsonValue):
    """Summary of the server's own metrics of a level; None: the server did not report it.

    sources  addresses of the metrics pages; unreachable: those that failed, and why
    first_tokens  answers that `ttft_mean_ms` (else `queue_mean_ms`) holds: other clients', too
    queue_mean_ms, prefill_mean_ms  accepted to first step, and first step to first token
    skew     requests of the busiest replica over the mean
    cpu_taken_frac  share of this machine's CPU time that others took, if the server is on it
    """

    sources: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    running: Gauge | None = field(default=None, metadata=OPTIONAL)
    waiting: Gauge | None = field(default=None, metadata=OPTIONAL)
    kv_usage_frac: Gauge | None = field(default=None, metadata=OPTIONAL)
    requests: float | None = field(default=None, metadata=OPTIONAL)
    preemptions: float | None = field(default=None, metadata=OPTIONAL)
    prefix_cache_hit_rate: float | None = field(default=None, metadata=OPTIONAL)
    ttft_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    first_tokens: float | None = field(default=None, metadata=OPTIONAL)
    queue_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    prefill_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    client_ttft_mean_ms: float | None = field(default=None, metadata=OPTIONAL)
    client_minus_server_ttft_ms: float | None = field(default=None, metadata=OPTIONAL)
    requests_by_replica: Mapping[str, float | None] | None = field(default=None, metadata=OPTIONAL)
    skew: float | None = field(default=None, metadata=OPTIONAL)
    cpu_taken_frac: float | None = field(default=None, metadata=OPTIONAL)
    warnings: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    unreachable: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    power: Power | None = field(default=None, metadata=OPTIONAL)
    cloudwatch: CloudWatch | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class TtftSplit(JsonValue):
    """The parts of a level's mean TTFT, ms; they add up to it.

    client_ms   sent later than it was due (open loop): the wait for a connection or the client
    network_ms  between client and server, both ways, with the handling of HTTP
    queue_ms    accepted by the server to its first step
    prefill_ms  first step to first token; None, as `network_ms`, where only the queue is stated
    other_ms    the rest of the server's own TTFT, by /metrics, or of ours by a queue alone. None
                where it is not known apart: it is in `prefill_ms` of /metrics without prefill
                times, in `network_ms` of answers alone
    bound_ms    error of the client's part of it, at most: how late reads and sends may have been
    requests    streamed and complete answers; first ones of users count only with `metrics`
    source      of the server's times: `answers` or `metrics`
    """

    client_ms: float
    network_ms: float | None
    queue_ms: float
    prefill_ms: float | None
    other_ms: float | None
    bound_ms: float | None
    requests: int
    source: str
