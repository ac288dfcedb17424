"""What each metric means, as a formula: printed with every output that shows the metric.

Peers give the same names to other formulas, so the formula is the definition and the name is not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric: its key in levels.jsonl, the formula, and what to know when reading it.

    vllm_key  the name under which `vllm bench serve` prints the same formula; empty if none does
    """

    key: str
    title: str
    unit: str
    formula: str
    note: str = ""
    vllm_key: str = ""


DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "throughput_tokens_per_s",
        "Throughput",
        "tok/s",
        "output tokens of completed requests / wall",
        "wall = first send to last event of the level, connects excluded; ramp and drain are in it",
        "output_throughput",
    ),
    Definition(
        "steady_throughput_tokens_per_s",
        "Steady throughput",
        "tok/s",
        "output tokens in the steady window / length of the window",
        "the window drops ramp and drain: it is chosen by MSER on the rate of token events",
    ),
    Definition(
        "total_throughput_tokens_per_s",
        "Total-token throughput",
        "tok/s",
        "(input + output tokens of completed requests) / wall",
        "never compared with throughput, which counts output tokens alone",
        "total_token_throughput",
    ),
    Definition(
        "request_throughput_per_s",
        "Request throughput",
        "req/s",
        "completed requests / wall",
        "",
        "request_throughput",
    ),
    Definition(
        "ttft_ms",
        "TTFT",
        "ms",
        "first token - due (open loop) or - sent (closed loop)",
        "open loop counts from the due time, so a late sender cannot hide the delay it caused",
        "ttft_ms (closed loop)",
    ),
    Definition(
        "ttft_answer_ms",
        "TTFT of the answer",
        "ms",
        "first token after the reasoning - due (open loop) or - sent (closed loop)",
        "over the requests that reasoned and came to an answer; TTFT counts reasoning as tokens",
    ),
    Definition(
        "ttft_from_sent_ms",
        "TTFT from sent",
        "ms",
        "first token - sent",
        "equal to TTFT in a closed loop",
        "ttft_ms",
    ),
    Definition(
        "dispatch_delay_ms",
        "Dispatch delay",
        "ms",
        "sent - due",
        "what the load generator itself added; in a closed loop a request is due when its user "
        "is free",
    ),
    Definition(
        "itl_ms",
        "ITL",
        "ms",
        "time between consecutive token events of one stream",
        "pooled over all requests; an event is one chunk of the server and may hold several tokens",
        "itl_ms",
    ),
    Definition(
        "tpot_ms",
        "TPOT",
        "ms",
        "(last token - first token) / (output tokens - 1)",
        "one value a request; needs two events and two tokens",
        "tpot_ms",
    ),
    Definition(
        "e2e_ms",
        "E2E latency",
        "ms",
        "last token - due (open loop) or - sent (closed loop)",
        "",
        "e2el_ms (closed loop)",
    ),
    Definition(
        "e2e_from_sent_ms",
        "E2E latency from sent",
        "ms",
        "last token - sent",
        "equal to E2E latency in a closed loop",
        "e2el_ms",
    ),
    Definition(
        "latency_ms_per_token",
        "Latency per token",
        "ms/token",
        "E2E latency / output tokens",
        "one value a request; it holds the wait and the prefill, so it exceeds TPOT",
    ),
    Definition(
        "mean_concurrency",
        "Mean concurrency",
        "requests",
        "sum of E2E latencies of completed requests / wall",
        "Little's law; below the asked concurrency by the ramp, the drain and failed requests",
    ),
    Definition(
        "little_law_ratio",
        "Little's law ratio",
        "",
        "mean concurrency / asked concurrency, or / (asked rate * mean E2E) in an open loop",
        "above 1 the books do not balance; well below 1 the load was not delivered",
    ),
    Definition(
        "goodput_per_s",
        "Goodput",
        "req/s",
        "requests that meet every SLO / wall",
        "failed requests count as misses",
        "request_goodput",
    ),
    Definition(
        "percentiles",
        "Percentiles",
        "",
        "linear interpolation between order statistics; shown if n >= ln 0.05 / ln q",
        "p50 needs 5 samples, p90 29, p95 59, p99 299: with fewer, the largest of all samples "
        "lies below the true quantile more than once in twenty",
    ),
)
