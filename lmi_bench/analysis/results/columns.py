"""A level's requests as columns: the latencies of each request, found for all of them at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.quantiles import FloatArray
from lmi_bench.core.records import STATUS_OK, RequestRecord, StoredRecords
from lmi_bench.core.units import MS_PER_S

Values = tuple[FloatArray, NDArray[np.integer[Any]]]
"""Values, and the row of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The requests of a level; row i is request i.

    status           shape (n,), text; ok: whether it is the one of a complete answer
    counted          shape (n,), bool: no user's first request of a closed loop (`records.counted`)
    due_s, sent_s    shape (n,)
    ended_s          shape (n,), NaN where the request ended with its last token
    first_answer_s   shape (n,), first token after the reasoning; NaN without any
    tokens           shape (n,), output tokens
    streamed         shape (n,), bool
    times_s, counts  shape (events,): time and tokens of each event, request after request
    owner            shape (events,): the row of each event
    last_s           shape (n,), time of the last event; NaN without one
    """

    status: Sequence[str]
    ok: NDArray[np.bool_]
    counted: NDArray[np.bool_]
    due_s: FloatArray
    sent_s: FloatArray
    ended_s: FloatArray
    first_answer_s: FloatArray
    tokens: FloatArray
    streamed: NDArray[np.bool_]
    times_s: FloatArray
    counts: NDArray[np.int32]
    owner: NDArray[np.integer[Any]]
    last_s: FloatArray
    found: dict[bool, Mapping[str, FloatArray]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.status)

    def each_s(self, *, open_loop: bool) -> Mapping[str, FloatArray]:
        """The latencies of each request by metric but `itl`, shape (n,); NaN where it has none.

        open_loop  counted from the due time instead of the send, `*_from_sent` aside

        A failed request has none. A request with one output token, or whose tokens came in one
        event, has no TPOT: zero would read as infinitely fast. An answer that was not streamed has
        no TTFT; one without tokens (an embedding) ends when its last byte has come. Made once.
        """
        if open_loop not in self.found:
            self.found[open_loop] = self._each_s(self.due_s if open_loop else self.sent_s)
        return self.found[open_loop]

    def _each_s(self, start_s: FloatArray) -> Mapping[str, FloatArray]:
        times_s, owner = self._token_events
        first_s, end_s = np.full((2, len(self.ok)), np.nan)
        first_s[owner[::-1]], end_s[owner] = times_s[::-1], times_s  # the last one written stays
        has_tokens = ~np.isnan(end_s)
        came_first = np.ones(len(self.ok))  # tokens; reasoning that is not shown comes with the answer's first
        came_first[owner[::-1]] = self.counts[self.counts > 0][::-1]
        later = self.tokens - np.where(self.first_answer_s == first_s, came_first, 1)
        end_s = np.where(has_tokens, end_s, self.ended_s)
        shown = {
            "ttft": (first_s - start_s, self.streamed),
            "ttft_from_sent": (first_s - self.sent_s, self.streamed),
            "ttft_answer": (self.first_answer_s - start_s, has_tokens),
            "dispatch_delay": (self.sent_s - self.due_s, self.ok),
            "tpot": ((end_s - first_s) / np.maximum(later, 1), self._has_gaps),
            "e2e": (end_s - start_s, self.ok),
            "e2e_from_sent": (end_s - self.sent_s, self.ok),
            "latency_per_token": ((end_s - start_s) / np.maximum(self.tokens, 1), has_tokens & (self.tokens > 0)),
        }
        return {metric: np.where(self.ok & known, values_s, np.nan) for metric, (values_s, known) in shown.items()}

    @property
    def _token_events(self) -> Values:
        """Times of the events that carry tokens, and their rows."""
        has_tokens = self.counts > 0
        return (self.times_s, self.owner) if has_tokens.all() else (self.times_s[has_tokens], self.owner[has_tokens])

    @property
    def _has_gaps(self) -> NDArray[np.bool_]:
        """Whether there is time between two tokens of an answer, shape (n,)."""
        events = np.bincount(self._token_events[1], minlength=len(self.ok))
        return np.asarray(self.ok & (events > 1) & (self.tokens > 1))

    def values_s(self, metric: str, *, open_loop: bool, counted_only: bool = True) -> Values:
        """The metric of each answered request that has it (and counts), and its row.

        `itl` has a value for each gap between two events of an answer.
        """
        if metric == "itl":
            times_s, owner = self._token_events
            within = (owner[1:] == owner[:-1]) & self._has_gaps[owner[1:]]
            values_s, rows = np.diff(times_s)[within], owner[1:][within]
        else:
            each_s = self.each_s(open_loop=open_loop)[metric]
            rows = np.flatnonzero(~np.isnan(each_s))
            values_s = each_s[rows]
        kept = self.counted[rows] | (not counted_only)
        return values_s[kept], rows[kept]

    def values_ms(self, metric: str, *, open_loop: bool) -> Values:
        """`values_s` in milliseconds."""
        values_s, rows = self.values_s(metric, open_loop=open_loop)
        return values_s * MS_PER_S, rows

    def by_request_ms(self, metric: str, *, open_loop: bool) -> list[FloatArray]:
        """The values of each request, whether it counts or not; empty where it has none."""
        values_s, rows = self.values_s(metric, open_loop=open_loop, counted_only=False)
        ends = np.cumsum(np.bincount(rows, minlength=len(self.ok)))
        return np.split(values_s * MS_PER_S, ends)[:-1]

    @property
    def wall_s(self) -> float:
        """Seconds from the first send to the last event; 0.0 where no request got a response.

        A failed request counts too: until its last token or its failure, the later of both; an
        answer without tokens until its end.
        """
        ends_s = np.concatenate([self.last_s, self.ended_s[~self.ok | np.isnan(self.last_s)]])
        ends_s = ends_s[~np.isnan(ends_s)]
        return max(0.0, float(ends_s.max() - self.sent_s.min())) if ends_s.size else 0.0


def request_ms(record: RequestRecord, metric: str, *, open_loop: bool) -> float | None:
    """A metric of one request, any but `itl`; None where it has none."""
    values_ms, _ = columns_of([record]).values_ms(metric, open_loop=open_loop)
    return float(values_ms[0]) if values_ms.size else None


_EXCHANGED = ("first_answer_s", "streamed", "token_counts")
_OF_ITSELF = ("status", "due_s", "sent_s", "ended_s", "output_tokens", "token_times_s", "at_start")
_OF_RECORD = attrgetter(*_OF_ITSELF, *(f"exchange.{name}" for name in _EXCHANGED))
_OF_LINE = itemgetter(*_OF_ITSELF, *_EXCHANGED)
_ABSENT = {"ended_s": None, "first_answer_s": None, "streamed": True, "at_start": False}


def columns_of(records: Sequence[RequestRecord] | Columns) -> Columns:
    """The columns of a level's requests; those of stored ones are made once."""
    if isinstance(records, Columns):
        return records
    if not isinstance(records, StoredRecords):
        return _columns(map(_OF_RECORD, records))
    if records.kept is None:
        records.kept = _columns(_OF_LINE({**_ABSENT, **each}) for each in records.lines)
    kept: Columns = records.kept
    return kept


def _columns(rows: Iterable[tuple[Any, ...]]) -> Columns:
    parts = list(zip(*rows, strict=True)) or [()] * 10
    status, due_s, sent_s, ended_s, tokens, times_s, at_start, answer_s, streamed, counts = parts
    sizes = np.fromiter(map(len, times_s), np.int64, len(times_s))
    flat_s = np.frombuffer(b"".join(times_s))
    flat = np.fromiter(chain.from_iterable(counts), np.int32, len(flat_s))
    owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    last_s = np.full(len(sizes), np.nan)
    last_s[owner] = flat_s
    stated = np.asarray(tokens, dtype=np.float64)
    counted = np.bincount(owner, weights=flat, minlength=len(sizes))
    return Columns(
        status=status,
        ok=np.array([each == STATUS_OK for each in status], dtype=bool),
        counted=~np.asarray(at_start, dtype=bool),
        due_s=np.asarray(due_s, dtype=np.float64),
        sent_s=np.asarray(sent_s, dtype=np.float64),
        ended_s=np.asarray(ended_s, dtype=np.float64),  # None becomes NaN
        first_answer_s=np.asarray(answer_s, dtype=np.float64),
        tokens=np.where(stated == 0, counted, stated),
        streamed=np.asarray(streamed, dtype=bool),
        times_s=flat_s,
        counts=flat,
        owner=owner,
        last_s=last_s,
    )
