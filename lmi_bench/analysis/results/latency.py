"""One level's numbers from its records: latencies, throughput, errors.

Seconds go in, milliseconds come out under keys that say so. Latencies and tokens are those of
completed requests; failed requests are only counted, by kind. Latencies leave out the first request
of each user of a closed loop (`counted`). The formulas are in `definitions`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.window import steady_window
from lmi_bench.core.level import (
    METRICS,
    QUANTILES,
    GeneratorReport,
    Held,
    Level,
    Metric,
    Sessions,
    Statistics,
    UnequalCounts,
    UnplannedLengths,
)
from lmi_bench.core.records import LevelRun, RequestRecord, counted
from lmi_bench.core.units import MS_PER_S

MAX_UNSURE_SHARE = 0.01
"""Share of tokens whose times late reads hide, above which an ITL p99 is only an interval."""

MAX_EXAMPLES, MAX_EXAMPLE_CHARS = 3, 300
"""Number and length of the messages that a level's line keeps of each kind of failure."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """The latencies of one completed request, in seconds; None where it has no such latency.

    ttft_s, e2e_s, latency_s_per_token  from the due time in an open loop, from the send in a
                                        closed one
    itl_s                               shape (events - 1,), gaps between its token events
    ttft_answer_s                       like ttft_s, but to the first token after the reasoning
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

    def values_ms(self, metric: str) -> FloatArray:
        """Its values of a metric in milliseconds: its gaps for `itl`, else one value or none."""
        value_s = getattr(self, _FIELD[metric])  # type: ignore[index]
        return _NO_GAPS if value_s is None else np.atleast_1d(value_s) * MS_PER_S


_NO_GAPS: FloatArray = np.empty(0)
_FIELD: Mapping[Metric, str] = {
    metric: "latency_s_per_token" if metric == "latency_per_token" else f"{metric}_s"
    for metric in METRICS
    if metric not in ("connect", "tls")
}


def request_latency(record: RequestRecord, *, open_loop: bool) -> RequestLatency:
    """The latencies of one completed request.

    A request with one output token, or whose tokens came in one event, has neither TPOT nor ITL:
    zero would read as infinitely fast. An answer that was not streamed has no TTFT; one without
    tokens (an embedding) ends when its last byte has come.
    """
    times = np.asarray(record.token_times_s, dtype=np.float64)
    counts = np.asarray(record.exchange.token_counts)
    if not counts.all():
        times = times[counts > 0]  # events without a token
    delay_s = record.sent_s - record.due_s
    start_s = record.due_s if open_loop else record.sent_s
    if not times.size:
        end_s = record.ended_s
        e2e_s, own_s = (None if end_s is None else end_s - s for s in (start_s, record.sent_s))
        return RequestLatency(None, None, delay_s, _NO_GAPS, None, e2e_s, None, None, own_s)
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

    With fewer, all samples lie below the true quantile in more than one case out of twenty.

    >>> [samples_needed(q) for q in (0.5, 0.9, 0.95, 0.99)]
    [5, 29, 59, 299]
    """
    return math.ceil(math.log(0.05) / math.log(quantile))


def summarise_ms(values_s: Sequence[float] | FloatArray) -> Statistics:
    """Statistics in milliseconds of values in seconds, shape (n,).

    A quantile that n does not support is None. The standard deviation is the population's.
    """
    values = np.asarray(values_s, dtype=np.float64) * MS_PER_S
    n = int(values.size)
    quantiles: dict[str, Any] = {}
    unsupported = {}
    for name, quantile in QUANTILES.items():
        if n < (needed := samples_needed(quantile)):
            unsupported[name] = f"needs {needed} samples, has {n}"
        else:
            quantiles[name] = float(np.quantile(values, quantile))
    if not n:
        return Statistics(n=0, unsupported=unsupported)
    return Statistics(
        mean=float(values.mean()),
        **quantiles,
        min=float(values.min()),
        max=float(values.max()),
        std=float(values.std()),
        n=n,
        unsupported=unsupported,
    )


def wall_time_s(records: Iterable[RequestRecord]) -> float:
    """Seconds from the first send to the last event; 0.0 where no request got a response.

    A failed request counts too: until its last token or its failure, the later of both; an answer
    without tokens until its end.
    """
    first_s, last_s = math.inf, -math.inf
    for record in records:
        first_s = min(first_s, record.sent_s)
        if len(record.token_times_s):
            last_s = max(last_s, record.token_times_s[-1])
        if record.ended_s is not None and not (record.ok and len(record.token_times_s)):
            last_s = max(last_s, record.ended_s)
    return max(0.0, last_s - first_s) if math.isfinite(first_s) else 0.0


def _error_examples(failed: Sequence[RequestRecord]) -> dict[str, list[str]]:
    """The first distinct messages of each kind of failure, in the order of the sends."""
    examples: dict[str, list[str]] = {}
    for record in sorted(failed, key=lambda record: record.sent_s):
        known = examples.setdefault(record.status, [])
        message = (record.error or "")[:MAX_EXAMPLE_CHARS]
        if message and message not in known and len(known) < MAX_EXAMPLES:
            known.append(message)
    return dict(sorted(examples.items()))


def summarise_level(run: LevelRun) -> Level:
    """The line of levels.jsonl of a level that ran."""
    spec = run.spec
    completed = [record for record in run.records if record.ok]
    failed = [record for record in run.records if not record.ok]
    latencies = [request_latency(record, open_loop=spec.load.is_open) for record in completed]
    e2e_s = [each.e2e_s for each in latencies if each.e2e_s is not None]
    of_load = [each for each, of in zip(latencies, completed, strict=True) if not of.at_start]
    at_start = len(run.records) - len(counted(run.records))
    wall_s = wall_time_s(run.records)
    output_tokens = sum(record.output_tokens for record in completed)
    input_tokens = sum(record.input_tokens for record in completed)

    def per_second(amount: float) -> float | None:
        return amount / wall_s if wall_s > 0 else None

    mean_concurrency = per_second(math.fsum(e2e_s))
    answers = [record.exchange for record in completed]
    reasoning = sum(each.reasoning_tokens for each in answers)
    # the share is of the tokens that arrived as events, since servers count differently
    streamed = sum(sum(each.token_counts) for each in answers)
    unfinished = sum(each.streamed and each.finish_reason is None for each in answers)
    return Level(
        index=spec.index,
        attempt=run.attempt,
        load=spec.load,
        requests=len(run.records),
        start_requests=at_start if at_start or spec.start_requests else None,
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
        valid=run.check.valid is not False,
        invalid_reason=run.check.reason if run.check.valid is False else None,
        stopped_by=run.stopped_by,
        latency=_latency(run, of_load, reasoning=reasoning > 0),
        reasoning_tokens=reasoning or None,
        reasoning_token_share=reasoning / streamed if reasoning else None,
        mean_concurrency=mean_concurrency,
        little_law_ratio=_little_law_ratio(run, mean_concurrency, e2e_s),
        retries=sum(record.exchange.retries for record in run.records),
        generator=run.check,
        server=run.server,
        engine=None if run.engine is None else dict(run.engine),
        unplanned_lengths=_unplanned_lengths(completed),
        unequal_counts=_unequal_counts(completed),
        cached_prompt_frac=_cached_prompt_frac(completed),
        # of answers over sockets; an engine in this process always gives a reason
        without_finish_reason=(unfinished if run.check.receiver else 0) or None,
        sessions=_sessions(run) if spec.load.sessions else None,
        max_in_flight=spec.max_in_flight,
        held=_held(run.records),
        requests_by_replica=_by_replica(run.records),
    )


def _held(records: Sequence[RequestRecord]) -> Held | None:
    """Requests that waited for a free place under the limit in flight, and their mean wait."""
    held_s = [record.exchange.held_s for record in records if record.exchange.held_s]
    return Held(len(held_s), float(np.mean(held_s)) * MS_PER_S) if held_s else None


def _by_replica(records: Sequence[RequestRecord]) -> dict[str, int] | None:
    """Requests of each replica; None where none is named."""
    counts = Counter(r.exchange.replica for r in records if r.exchange.replica is not None)
    return {str(number): counts[number] for number in sorted(counts)} or None


def _latency(
    run: LevelRun, latencies: Sequence[RequestLatency], *, reasoning: bool
) -> dict[Metric, Statistics]:
    """The statistics of each metric; `ttft_answer` only where requests reasoned."""
    found: dict[Metric, Statistics] = {
        "connect": summarise_ms(run.connect_s),
        "tls": summarise_ms(run.tls_s),
    }
    for metric, field in _FIELD.items():
        values = [value for each in latencies if (value := getattr(each, field)) is not None]
        if metric == "itl":
            gaps = np.concatenate(values) if values else _NO_GAPS
            found[metric] = _without_hidden_p99(summarise_ms(gaps), run.check)
        elif metric != "ttft_answer" or reasoning:
            found[metric] = summarise_ms(values)
    return found


def _unplanned_lengths(completed: Sequence[RequestRecord]) -> UnplannedLengths | None:
    known = [record for record in completed if record.asked_tokens and record.output_tokens]
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
    """Share of prompt tokens found in the prefix cache, over the answers that state it."""
    stated = [record for record in completed if record.exchange.cached_tokens is not None]
    prompt_tokens = sum(record.input_tokens for record in stated)
    cached = sum(record.exchange.cached_tokens or 0 for record in stated)
    return cached / prompt_tokens if prompt_tokens else None


def _sessions(run: LevelRun) -> Sessions:
    """A level's conversations: their number and length, and the TTFT of first and later turns."""
    records = [record for record in run.records if record.session is not None]
    started = {record.session for record in records}
    first_s: list[float] = []
    later_s: list[float] = []
    for record in counted(records):
        open_loop = run.spec.load.is_open
        value_s = request_latency(record, open_loop=open_loop).ttft_s if record.ok else None
        if value_s is not None:
            (later_s if record.turn else first_s).append(value_s)
    by_session: dict[int | None, list[RequestRecord]] = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    whole = [
        each
        for each in by_session.values()
        if each[0].of_turns == len(each) and all(record.ok for record in each)
    ]
    return Sessions(
        started=len(started),
        failed=len({record.session for record in records if not record.ok}),
        turns_mean=len(records) / len(started) if started else None,
        ttft_first_turn_ms=summarise_ms(first_s),
        ttft_later_turns_ms=summarise_ms(later_s),
        finished=len(whole),
        time_to_finish_ms=summarise_ms(
            [
                max(r.ended_s or r.token_times_s[-1] for r in each) - min(r.due_s for r in each)
                for each in whole
            ]
        ),
    )


def _without_hidden_p99(itl_ms: Statistics, check: GeneratorReport) -> Statistics:
    """The ITL statistics, without a p99 where late reads hide it: only an interval is known."""
    unsure_share, interval_ms = check.unsure_share or 0.0, check.itl_p99_interval_ms
    if unsure_share <= MAX_UNSURE_SHARE or interval_ms is None:
        return itl_ms
    reason = (
        f"between {interval_ms[0]:.1f} and {interval_ms[1]:.1f} ms: the generator read "
        f"{unsure_share:.1%} of the tokens together with later ones"
    )
    return replace(itl_ms, p99=None, unsupported={**(itl_ms.unsupported or {}), "p99": reason})


def _little_law_ratio(
    run: LevelRun, mean_concurrency: float | None, e2e_s: Sequence[float]
) -> float | None:
    """Mean concurrency over the one that Little's law gives for the requested load."""
    load = run.spec.load
    if mean_concurrency is None or not e2e_s or load.sessions:
        return None
    asked = load.value * math.fsum(e2e_s) / len(e2e_s) if load.is_open else load.value
    return mean_concurrency / asked if asked > 0 else None
