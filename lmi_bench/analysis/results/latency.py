"""One level's numbers from its records: latencies, throughput, errors.

Seconds go in, milliseconds come out under keys that say so. Latencies and tokens are those of
completed requests; failed requests are only counted, by kind. Latencies leave out the first request
of each user of a closed loop (`counted`). The formulas are in `definitions`.

The time to first token is split into client, network, server queue and prefill. The server's part
comes from its answers (vLLM's per-request metrics, an engine in this process) or from its /metrics
page, whose histograms give means over the level. What is measured on one clock is subtracted from
what is measured on another, never one clock's reading from the other's, so the clocks need not
agree.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.columns import Columns, columns_of
from lmi_bench.analysis.results.pauses import pauses
from lmi_bench.analysis.results.quantiles import FloatArray
from lmi_bench.analysis.results.window import first_token_step, speed_step, steady_window
from lmi_bench.core import level
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.server_metrics import ServerMetrics, TtftSplit
from lmi_bench.core.steadiness import SpeedStep
from lmi_bench.core.units import MS_PER_S

MAX_OTHERS_FRAC = 0.02
"""Largest difference of the server's number of first tokens from ours, as a share. With a larger
one others use the server, and its means are not those of our requests."""

_Server = tuple[float, float | None, float | None, str]
"""Queue, prefill and the rest of the server's TTFT, ms (None: not known apart); the source."""


def ttft_split(run: LevelRun, columns: Columns) -> TtftSplit | None:
    """The parts of the mean TTFT; None where the server states none, or served others too."""
    ttft_s, rows = columns.values_s("ttft_from_sent", open_loop=False)
    every = columns.values_s("ttft_from_sent", open_loop=False, counted_only=False)
    page = _of_metrics(run.server, every[0].size)
    found = _of_answers(run, rows.tolist(), page) if rows.size else None
    if found is None:  # the page's means are those of all requests
        (ttft_s, rows), found = every, page
    if found is None or not ttft_s.size:
        return None
    queue_ms, prefill_ms, other_ms, source = found
    rest_ms = float(ttft_s.mean()) * MS_PER_S - queue_ms - (prefill_ms or 0.0) - (other_ms or 0.0)
    late_s = (columns.sent_s - columns.due_s)[rows] if run.spec.load.is_open else np.zeros(1)
    return TtftSplit(
        client_ms=float(late_s.mean()) * MS_PER_S,
        network_ms=None if prefill_ms is None else rest_ms,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        other_ms=rest_ms if prefill_ms is None else other_ms,
        bound_ms=run.check.ttft_error_bound_ms,
        requests=ttft_s.size,
        source=source,
    )


def _of_answers(run: LevelRun, rows: list[int], page: _Server | None) -> _Server | None:
    """The answers' own times; what these leave out is that of the page, if it states all."""
    exchanges = [run.records[row].exchange for row in rows]
    stages_s = np.array([(each.queue_s, each.prefill_s) for each in exchanges], dtype=float)
    queue_ms, prefill_ms = (stages_s.mean(axis=0) * MS_PER_S).tolist()
    stated = queue_ms + prefill_ms >= 0  # not a number where an answer states none
    return (queue_ms, prefill_ms, page and page[2], "answers") if stated else None


def _of_metrics(server: ServerMetrics | None, answers: int) -> _Server | None:
    if server is None or (queue_ms := server.queue_mean_ms) is None:
        return None
    if abs((server.first_tokens or 0.0) - answers) > MAX_OTHERS_FRAC * answers:
        return None
    rest_ms = None if server.ttft_mean_ms is None else server.ttft_mean_ms - queue_ms  # TGI states none
    if (prefill_ms := server.prefill_mean_ms) is None:
        return queue_ms, rest_ms, None, "metrics"
    return queue_ms, prefill_ms, None if rest_ms is None else round(rest_ms - prefill_ms, 6) + 0.0, "metrics"


MAX_UNSURE_SHARE = 0.01
"""Share of tokens whose times late reads hide, above which an ITL p99 is only an interval."""

MAX_EXAMPLES, MAX_EXAMPLE_CHARS = 3, 300
"""Number and length of the messages that a level's line keeps of each kind of failure."""


def samples_needed(quantile: float) -> int:
    """Samples below which a quantile is not shown: the least n with quantile ** n <= 0.05.

    With fewer, all samples lie below the true quantile in more than one case out of twenty.

    >>> [samples_needed(q) for q in (0.5, 0.9, 0.95, 0.99)]
    [5, 29, 59, 299]
    """
    return math.ceil(math.log(0.05) / math.log(quantile))


def summarise_ms(values_s: Sequence[float] | FloatArray) -> level.Statistics:
    """Statistics in milliseconds of values in seconds, shape (n,).

    A quantile that n does not support is None. The standard deviation is the population's.
    """
    values = np.asarray(values_s, dtype=np.float64) * MS_PER_S
    n = int(values.size)
    needed = {name: samples_needed(quantile) for name, quantile in level.QUANTILES.items()}
    unsupported = {name: f"needs {least} samples, has {n}" for name, least in needed.items() if n < least}
    shown = {name: quantile for name, quantile in level.QUANTILES.items() if name not in unsupported}
    found: dict[str, Any] = {}
    if n:
        found = dict(zip(shown, np.quantile(values, list(shown.values())).tolist(), strict=True))
        found |= {name: float(getattr(np, name)(values)) for name in ("mean", "min", "max", "std")}
    return level.Statistics(**found, n=n, unsupported=unsupported)


def _error_examples(failed: Sequence[RequestRecord]) -> dict[str, list[str]]:
    """The first distinct messages of each kind of failure, in the order of the sends."""
    examples: dict[str, list[str]] = {}
    for record in sorted(failed, key=lambda record: record.sent_s):
        known = examples.setdefault(record.status, [])
        message = (record.error or "")[:MAX_EXAMPLE_CHARS]
        if message and message not in known and len(known) < MAX_EXAMPLES:
            known.append(message)
    return dict(sorted(examples.items()))


def summarise_level(run: LevelRun) -> level.Level:
    """The line of levels.jsonl of a level that ran."""
    spec, columns = run.spec, columns_of(run.records)
    completed = [record for record in run.records if record.ok]
    failed = [record for record in run.records if not record.ok]
    wall_s, at_start = columns.wall_s, int((~columns.counted).sum())
    e2e_s, _ = columns.values_s("e2e", open_loop=spec.load.is_open, counted_only=False)
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
    return level.Level(
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
        **_steadiness(run, columns),
        valid=run.check.valid is not False,
        invalid_reason=run.check.reason if run.check.valid is False else None,
        stopped_by=run.stopped_by,
        latency=_latency(run, columns, reasoning=reasoning > 0),
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
        sessions=_sessions(run, columns) if spec.load.sessions else None,
        ttft_split=ttft_split(run, columns),
        max_in_flight=spec.max_in_flight,
        held=_held(run.records),
        requests_by_replica=_by_replica(run.records),
    )


def _steadiness(run: LevelRun, columns: Columns) -> dict[str, Any]:
    asked = np.array([record.input_tokens for record in run.records], dtype=float)
    step, alike = speed_step(columns), not run.spec.load.sessions  # whose prompts are in part cached
    if step is None and alike:
        step = first_token_step(columns, asked)
    return {
        "steady": steady_window(columns),
        "speed_step": step if isinstance(step, SpeedStep) else None,
        "speed_unknown": step if isinstance(step, str) else None,
        "pauses": pauses(columns, asked) if alike else None,
    }


def _held(records: Sequence[RequestRecord]) -> level.Held | None:
    """Requests that waited for a free place under the limit in flight, and their mean wait."""
    held_s = [record.exchange.held_s for record in records if record.exchange.held_s]
    return level.Held(len(held_s), float(np.mean(held_s)) * MS_PER_S) if held_s else None


def _by_replica(records: Sequence[RequestRecord]) -> dict[str, int] | None:
    """Requests of each replica; None where none is named."""
    counts = Counter(r.exchange.replica for r in records if r.exchange.replica is not None)
    return {str(number): counts[number] for number in sorted(counts)} or None


def _latency(run: LevelRun, columns: Columns, *, reasoning: bool) -> dict[level.Metric, level.Statistics]:
    """The statistics of each metric; `ttft_answer` only where requests reasoned."""
    found: dict[level.Metric, level.Statistics] = {
        "connect": summarise_ms(run.connect_s),
        "tls": summarise_ms(run.tls_s),
    }
    for metric in level.METRICS:
        if metric not in found and (metric != "ttft_answer" or reasoning):
            values_s, _ = columns.values_s(metric, open_loop=run.spec.load.is_open)
            found[metric] = summarise_ms(values_s)
    found["itl"] = _without_hidden_p99(found["itl"], run.check)
    return found


def _unplanned_lengths(completed: Sequence[RequestRecord]) -> level.UnplannedLengths | None:
    known = [record for record in completed if record.asked_tokens and record.output_tokens]
    other = [record for record in known if record.output_tokens != record.asked_tokens]
    if not other:
        return None
    return level.UnplannedLengths(
        requests=len(other),
        asked_tokens_mean=float(np.mean([record.asked_tokens for record in known])),
        output_tokens_mean=float(np.mean([record.output_tokens for record in known])),
    )


def _unequal_counts(completed: Sequence[RequestRecord]) -> level.UnequalCounts | None:
    streamed = [record for record in completed if record.exchange.streamed]
    counted = [(record.output_tokens, sum(record.exchange.token_counts)) for record in streamed]
    unequal = sum(stated != came for stated, came in counted)
    if not unequal:
        return None
    return level.UnequalCounts(
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


def _sessions(run: LevelRun, columns: Columns) -> level.Sessions:
    """A level's conversations: their number and length, and the TTFT of first and later turns."""
    records = [record for record in run.records if record.session is not None]
    ttft_s, rows = columns.values_s("ttft", open_loop=run.spec.load.is_open)
    sent = [run.records[row] for row in rows]
    turns = np.array([-1 if each.session is None else each.turn for each in sent], dtype=np.int64)
    by_session: dict[int | None, list[RequestRecord]] = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    whole = [
        each for each in by_session.values() if each[0].of_turns == len(each) and all(record.ok for record in each)
    ]
    return level.Sessions(
        started=len(by_session),
        failed=sum(any(not record.ok for record in each) for each in by_session.values()),
        turns_mean=len(records) / len(by_session) if by_session else None,
        ttft_first_turn_ms=summarise_ms(ttft_s[turns == 0]),
        ttft_later_turns_ms=summarise_ms(ttft_s[turns > 0]),
        ttft_by_turns=_by_turns(turns + 1, ttft_s),
        finished=len(whole),
        time_to_finish_ms=summarise_ms(
            [
                max(r.ended_s or r.token_times_s[-1] for r in each) - min(r.due_s for r in each)
                for each in whole
                if any(r.turn == 0 for r in each)  # else it began in its middle
            ]
        ),
    )


def _by_turns(turns: NDArray[np.int64], ttft_s: FloatArray) -> tuple[level.Turns, ...]:
    """TTFT by bands of turns that double, without empty ones; turns count from 1."""
    ends = [1 << power for power in range(int(turns.max(initial=1) - 1).bit_length() + 1)]
    bands = [(end // 2 + 1, end, ttft_s[(turns > end // 2) & (turns <= end)]) for end in ends]
    return tuple(level.Turns(first, last, summarise_ms(found_s)) for first, last, found_s in bands if found_s.size)


def _without_hidden_p99(itl_ms: level.Statistics, check: level.GeneratorReport) -> level.Statistics:
    """The ITL statistics, without a p99 where late reads hide it: only an interval is known."""
    unsure_share, interval_ms = check.unsure_share or 0.0, check.itl_p99_interval_ms
    if unsure_share <= MAX_UNSURE_SHARE or interval_ms is None:
        return itl_ms
    reason = (
        f"between {interval_ms[0]:.1f} and {interval_ms[1]:.1f} ms: the "
        f"generator read {unsure_share:.1%} of the tokens together with later "
        "ones"
    )
    return replace(itl_ms, p99=None, unsupported={**(itl_ms.unsupported or {}), "p99": reason})


def _little_law_ratio(run: LevelRun, mean_concurrency: float | None, e2e_s: FloatArray) -> float | None:
    """Mean concurrency over the one that Little's law gives for the requested load."""
    load = run.spec.load
    if mean_concurrency is None or not e2e_s.size or load.sessions:
        return None
    asked = load.value * math.fsum(e2e_s) / len(e2e_s) if load.is_open else load.value
    return mean_concurrency / asked if asked > 0 else None
