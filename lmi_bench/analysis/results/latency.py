"""One level's numbers from its records: latencies, throughput, errors.

Seconds go in, milliseconds come out under keys that say so. Latencies and tokens are those of
completed requests; failed ones are counted by kind and never shorten a latency. The formulas are in
`definitions`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.window import steady_window
from lmi_bench.core.level import (
    QUANTILES,
    GeneratorReport,
    Held,
    Level,
    Metric,
    ServerMetrics,
    Sessions,
    Statistics,
    UnequalCounts,
    UnplannedLengths,
)
from lmi_bench.core.records import GeneratorCheck, LevelRun, RequestRecord
from lmi_bench.core.units import MS_PER_S

MAX_UNSURE_SHARE = 0.01
"""Share of the tokens whose times late reads hide, above which an ITL p99 is only an interval."""

MAX_EXAMPLES, MAX_EXAMPLE_CHARS = 3, 300
"""Of the messages of each kind of failure that a level's line keeps."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """The latencies of one completed request, in seconds; None where it has no such latency.

    ttft_s, e2e_s, latency_s_per_token  from the due time in an open loop, from the send in a
                                        closed one
    itl_s                               shape (events - 1,), gaps between its token events
    ttft_answer_s                       like ttft_s, of the first token after the reasoning
    """

    ttft_s: float | None
    ttft_from_sent_s: float | None
    dispatch_delay_s: float
    itl_s: FloatArray
    tpot_s: float | None
    e2e_s: float | None
    latency_s_per_token: float | None
    ttft_answer_s: float | None = None
    e2e_from_sent_s: float | None = None


_NO_GAPS: FloatArray = np.empty(0)


def token_events_s(record: RequestRecord) -> FloatArray:
    """Times of the events that carried at least one token; shape (events,), seconds."""
    times = np.asarray(record.token_times_s, dtype=np.float64)
    counts = np.asarray(record.exchange.token_counts)
    return times if counts.all() else times[counts > 0]


def request_latency(record: RequestRecord, *, open_loop: bool) -> RequestLatency:
    """The latencies of one completed request.

    A request with one output token, or whose tokens came in one event, has neither TPOT nor ITL:
    zero would read as infinitely fast. An answer that was not streamed has no TTFT.
    """
    times = token_events_s(record)
    delay_s = record.sent_s - record.due_s
    if not times.size:
        return RequestLatency(None, None, delay_s, _NO_GAPS, None, None, None)
    start_s = record.due_s if open_loop else record.sent_s
    first_s, last_s = float(times[0]), float(times[-1])
    tokens = record.output_tokens
    has_gaps = times.size > 1 and tokens > 1
    answer_s = record.exchange.first_answer_s
    return RequestLatency(
        ttft_s=first_s - start_s if record.exchange.streamed else None,
        ttft_from_sent_s=first_s - record.sent_s if record.exchange.streamed else None,
        dispatch_delay_s=delay_s,
        itl_s=np.diff(times) if has_gaps else _NO_GAPS,
        tpot_s=(last_s - first_s) / (tokens - 1) if has_gaps else None,
        e2e_s=last_s - start_s,
        latency_s_per_token=(last_s - start_s) / tokens if tokens else None,
        ttft_answer_s=None if answer_s is None else answer_s - start_s,
        e2e_from_sent_s=last_s - record.sent_s,
    )


def samples_needed(quantile: float) -> int:
    """Samples below which a quantile is not shown: the least n with quantile ** n <= 0.05.

    With fewer, all samples lie below the true quantile more than once in twenty, so that no
    statistic of the sample bounds it.

    >>> [samples_needed(q) for q in (0.5, 0.9, 0.95, 0.99)]
    [5, 29, 59, 299]
    """
    return math.ceil(math.log(0.05) / math.log(quantile))


def summarise_ms(values_s: Sequence[float] | FloatArray) -> Statistics:
    """Statistics of seconds, in milliseconds; a quantile that n does not support is None.

    values_s  shape (n,), seconds
    The standard deviation is the population's.
    """
    values = np.asarray(values_s, dtype=np.float64) * MS_PER_S
    n = int(values.size)
    needed = {name: samples_needed(quantile) for name, quantile in QUANTILES.items()}
    unsupported = {
        name: f"needs {least} samples, has {n}" for name, least in needed.items() if n < least
    }
    if not n:
        return Statistics(n=0, unsupported=unsupported)
    p50, p90, p95, p99 = (
        None if name in unsupported else float(np.quantile(values, quantile))
        for name, quantile in QUANTILES.items()
    )
    return Statistics(
        mean=float(values.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        min=float(values.min()),
        max=float(values.max()),
        std=float(values.std()),
        n=n,
        unsupported=unsupported,
    )


def wall_time_s(records: Iterable[RequestRecord]) -> float:
    """First send to last event over all requests, seconds; 0.0 where nothing came back.

    A failed request occupied the server too: it lasts until its last token or until it was given
    up, whichever is later.
    """
    first_s, last_s = math.inf, -math.inf
    for record in records:
        first_s = min(first_s, record.sent_s)
        if len(record.token_times_s):
            last_s = max(last_s, record.token_times_s[-1])
        if not record.ok and record.ended_s is not None:
            last_s = max(last_s, record.ended_s)
    return max(0.0, last_s - first_s) if math.isfinite(first_s) else 0.0


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _error_examples(failed: Sequence[RequestRecord]) -> dict[str, list[str]]:
    """The first messages of each kind of failure, each once, in the order of the sends."""
    examples: dict[str, list[str]] = {}
    for record in sorted(failed, key=lambda record: record.sent_s):
        said = examples.setdefault(record.status, [])
        message = (record.error or "")[:MAX_EXAMPLE_CHARS]
        if message and message not in said and len(said) < MAX_EXAMPLES:
            said.append(message)
    return dict(sorted(examples.items()))


def summarise_level(run: LevelRun) -> Level:
    """What a level that ran measured."""
    spec = run.spec
    completed = [record for record in run.records if record.ok]
    failed = [record for record in run.records if not record.ok]
    latencies = [request_latency(record, open_loop=spec.load.is_open) for record in completed]
    e2e_s = _present(each.e2e_s for each in latencies)

    wall_s = wall_time_s(run.records)
    output_tokens = sum(record.output_tokens for record in completed)
    input_tokens = sum(record.input_tokens for record in completed)

    def per_second(amount: float) -> float | None:
        return amount / wall_s if wall_s > 0 else None

    mean_concurrency = per_second(math.fsum(e2e_s))
    reasoning = sum(record.exchange.reasoning_tokens for record in completed)
    held_s = [record.exchange.held_s for record in run.records if record.exchange.held_s]
    by_replica = Counter(r.exchange.replica for r in run.records if r.exchange.replica is not None)
    return Level(
        index=spec.index,
        attempt=run.attempt,
        load=spec.load,
        requests=len(run.records),
        errors=len(failed),
        errors_by_kind=dict(sorted(Counter(record.status for record in failed).items())),
        error_examples=_error_examples(failed) if failed else None,
        output_tokens=output_tokens,
        input_tokens=input_tokens,
        wall_s=wall_s,
        throughput_tokens_per_s=per_second(output_tokens),
        total_throughput_tokens_per_s=per_second(input_tokens + output_tokens),
        request_throughput_per_s=per_second(len(completed)),
        steady=steady_window(completed),
        valid=run.check.valid,
        invalid_reason=run.check.reason if not run.check.valid else None,
        stopped_by=run.stopped_by,
        latency=_latency(run, latencies, reasoning=reasoning > 0),
        reasoning_tokens=reasoning or None,
        reasoning_token_share=_reasoning_share(completed, reasoning),
        mean_concurrency=mean_concurrency,
        little_law_ratio=_little_law_ratio(run, mean_concurrency, e2e_s),
        retries=sum(record.exchange.retries for record in run.records),
        generator=_generator(run.check),
        server=None if run.server is None else ServerMetrics.from_json(run.server, "server"),
        engine=None if run.engine is None else dict(run.engine),
        unplanned_lengths=_unplanned_lengths(completed),
        unequal_counts=_unequal_counts(completed),
        cached_prompt_frac=_cached_prompt_frac(completed),
        without_finish_reason=_without_reason(run.check, completed) or None,
        sessions=summarise_sessions(run) if spec.load.sessions else None,
        max_in_flight=spec.max_in_flight,
        held=Held(len(held_s), float(np.mean(held_s)) * MS_PER_S) if held_s else None,
        requests_by_replica={str(n): by_replica[n] for n in sorted(by_replica)} or None,
    )


def _latency(
    run: LevelRun, latencies: Sequence[RequestLatency], *, reasoning: bool
) -> dict[Metric, Statistics]:
    """The statistics of each metric; `ttft_answer` only where requests reasoned."""
    gaps = [each.itl_s for each in latencies if each.itl_s.size]
    values_s: dict[Metric, Sequence[float] | FloatArray] = {
        "ttft": _present(each.ttft_s for each in latencies),
        "ttft_from_sent": _present(each.ttft_from_sent_s for each in latencies),
        "dispatch_delay": [each.dispatch_delay_s for each in latencies],
        "tpot": _present(each.tpot_s for each in latencies),
        "e2e": _present(each.e2e_s for each in latencies),
        "e2e_from_sent": _present(each.e2e_from_sent_s for each in latencies),
        "latency_per_token": _present(each.latency_s_per_token for each in latencies),
        "connect": run.connect_s,
        "tls": run.tls_s,
    }
    if reasoning:
        values_s["ttft_answer"] = _present(each.ttft_answer_s for each in latencies)
    found = {metric: summarise_ms(values) for metric, values in values_s.items()}
    itl = summarise_ms(np.concatenate(gaps) if gaps else _NO_GAPS)
    return {**found, "itl": _without_hidden_p99(itl, run.check)}


def _without_reason(check: GeneratorCheck, completed: Sequence[RequestRecord]) -> int:
    """Streamed answers of a server that ended, and not in the middle, without saying why."""
    if not check.receiver:
        return 0
    return sum(
        record.exchange.streamed and record.exchange.finish_reason is None for record in completed
    )


def _unplanned_lengths(completed: Sequence[RequestRecord]) -> UnplannedLengths | None:
    known = [record for record in completed if record.asked_tokens]
    other = [record for record in known if record.output_tokens != record.asked_tokens]
    if not other:
        return None
    return UnplannedLengths(
        requests=len(other),
        asked_tokens_mean=float(np.mean([record.asked_tokens for record in known])),
        output_tokens_mean=float(np.mean([record.output_tokens for record in known])),
    )


def _unequal_counts(completed: Sequence[RequestRecord]) -> UnequalCounts | None:
    streamed = [record for record in completed if record.exchange.streamed]
    counted = [(record.output_tokens, sum(record.exchange.token_counts)) for record in streamed]
    unequal = sum(stated != came for stated, came in counted)
    if not unequal:
        return None
    return UnequalCounts(
        requests=unequal,
        server_tokens=sum(stated for stated, _ in counted),
        chunk_tokens=sum(came for _, came in counted),
    )


def _cached_prompt_frac(completed: Sequence[RequestRecord]) -> float | None:
    """Share of the prompt tokens that came from the prefix cache, by answers that state it."""
    stated = [record for record in completed if record.exchange.cached_tokens is not None]
    prompt_tokens = sum(record.input_tokens for record in stated)
    cached = sum(record.exchange.cached_tokens or 0 for record in stated)
    return cached / prompt_tokens if prompt_tokens else None


def summarise_sessions(run: LevelRun) -> Sessions:
    """A level's conversations: how many, how long, and what first and later turns waited for."""
    records = [record for record in run.records if record.session is not None]
    turns = Counter(record.session for record in records)
    failed = {record.session for record in records if not record.ok}
    ttft_s: dict[bool, list[float]] = {True: [], False: []}
    for record in records:
        open_loop = run.spec.load.is_open
        value_s = request_latency(record, open_loop=open_loop).ttft_s if record.ok else None
        if value_s is not None:
            ttft_s[record.turn == 0].append(value_s)
    return Sessions(
        started=len(turns),
        failed=len(failed),
        turns_mean=len(records) / len(turns) if turns else None,
        ttft_first_turn_ms=summarise_ms(ttft_s[True]),
        ttft_later_turns_ms=summarise_ms(ttft_s[False]),
    )


def _without_hidden_p99(itl_ms: Statistics, check: GeneratorCheck) -> Statistics:
    """An ITL p99 that late reads hide is only known to lie in an interval."""
    if check.unsure_share <= MAX_UNSURE_SHARE or check.itl_p99_interval_s is None:
        return itl_ms
    low, high = (second * MS_PER_S for second in check.itl_p99_interval_s)
    reason = (
        f"between {low:.1f} and {high:.1f} ms: the generator read {check.unsure_share:.1%} of the "
        "tokens together with later ones"
    )
    return replace(itl_ms, p99=None, unsupported={**(itl_ms.unsupported or {}), "p99": reason})


def _generator(check: GeneratorCheck) -> GeneratorReport:
    """The self-check with its error bounds in milliseconds."""
    shown = asdict(check)
    for name in ("ttft", "ttft_p50", "itl", "itl_p50"):
        bound_s = shown.pop(f"{name}_error_bound_s")
        shown[f"{name}_error_bound_ms"] = None if bound_s is None else bound_s * MS_PER_S
    interval_s = shown.pop("itl_p99_interval_s")
    shown["itl_p99_interval_ms"] = (
        None if interval_s is None else [second * MS_PER_S for second in interval_s]
    )
    return GeneratorReport(**shown)


def _reasoning_share(completed: Sequence[RequestRecord], reasoning: int) -> float | None:
    """Reasoning of the tokens that came as events, since servers count differently."""
    streamed = sum(sum(record.exchange.token_counts) for record in completed)
    return reasoning / streamed if reasoning else None


def _little_law_ratio(
    run: LevelRun, mean_concurrency: float | None, e2e_s: Sequence[float]
) -> float | None:
    """Mean concurrency over what Little's law makes of the load that was asked for."""
    if mean_concurrency is None or not e2e_s or run.spec.load.sessions:
        return None
    if run.spec.concurrency is not None:
        return mean_concurrency / run.spec.concurrency
    assert run.spec.rate_per_s is not None  # a level has one of the two
    asked = run.spec.rate_per_s * math.fsum(e2e_s) / len(e2e_s)
    return mean_concurrency / asked if asked > 0 else None
