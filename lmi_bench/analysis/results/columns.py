"""A level's requests as columns, so that a report of many requests looks at each of them once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmi_bench.core.records import STATUS_OK, RequestRecord
from lmi_bench.core.request_line import StoredRecords
from lmi_bench.core.units import MS_PER_S

FloatArray = NDArray[np.float64]
Values = tuple[FloatArray, NDArray[np.int64]]
"""Values, and the row of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The requests of a level; row i is request i, and `latency` gives what follows from a row.

    status           shape (n,), text; ok: whether it is the one of a complete answer
    counted          shape (n,), bool: no user's first request of a closed loop (`records.counted`)
    due_s, sent_s    shape (n,)
    ended_s          shape (n,), NaN where the request ended with its last token
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
    tokens: FloatArray
    streamed: NDArray[np.bool_]
    times_s: FloatArray
    counts: FloatArray
    owner: NDArray[np.int64]
    last_s: FloatArray
    found: dict[tuple[str, bool], Values] = field(default_factory=dict, repr=False)

    def values_ms(self, metric: str, *, open_loop: bool) -> Values:
        """The metric of each answered request that has it and counts, as `request_latency` has it,
        and its row; `itl` has a value for each gap. Made once; not to be changed."""
        if (metric, open_loop) not in self.found:
            self.found[metric, open_loop] = self._values_ms(metric, open_loop=open_loop)
        return self.found[metric, open_loop]

    def _values_ms(self, metric: str, *, open_loop: bool) -> Values:
        has_tokens = self.counts > 0
        times_s, owner = self.times_s[has_tokens], self.owner[has_tokens]
        sizes = np.bincount(owner, minlength=len(self.ok))
        ended = (sizes > 0) | ((metric == "e2e") & ~np.isnan(self.ended_s))  # also without tokens
        here = np.flatnonzero(self.ok & self.counted & ended)
        ends, known_s = np.cumsum(sizes)[here], np.append(times_s, np.nan)
        first_s, tokens = known_s[ends - sizes[here]], self.tokens[here]
        last_s = np.where(sizes[here] > 0, known_s[ends - 1], self.ended_s[here])
        wide = (sizes[here] > 1) & (tokens > 1)
        if metric == "itl":
            has_gaps = np.zeros(len(self.ok), dtype=bool)
            has_gaps[here[wide]] = True
            within = (owner[1:] == owner[:-1]) & has_gaps[owner[1:]]
            return np.diff(times_s)[within] * MS_PER_S, owner[1:][within]
        start_s = (self.due_s if open_loop else self.sent_s)[here]
        with np.errstate(divide="ignore", invalid="ignore"):
            values_s, known = {
                "ttft": (first_s - start_s, self.streamed[here]),
                "tpot": ((last_s - first_s) / (tokens - 1), wide),
                "e2e": (last_s - start_s, np.ones(len(here), dtype=bool)),
                "latency_per_token": ((last_s - start_s) / tokens, tokens > 0),
            }[metric]
        return values_s[known] * MS_PER_S, here[known]

    @property
    def wall_s(self) -> float:
        """Seconds from the first send to the last event, a failure's end included."""
        ends_s = np.concatenate([self.last_s, self.ended_s[~self.ok | np.isnan(self.last_s)]])
        ends_s = ends_s[~np.isnan(ends_s)]
        return max(0.0, float(ends_s.max() - self.sent_s.min())) if ends_s.size else 0.0


def columns_of(records: Sequence[RequestRecord]) -> Columns:
    """The columns of a level's requests; those of stored ones are made once."""
    if not isinstance(records, StoredRecords):
        return _columns(
            (r.status, r.due_s, r.sent_s, r.ended_s, r.output_tokens, r.exchange.streamed,
             r.token_times_s, r.exchange.token_counts, r.at_start)
            for r in records
        )  # fmt: skip
    if records.kept is None:
        records.kept = _columns(
            (each["status"], each["due_s"], each["sent_s"], each.get("ended_s"),
             each["output_tokens"], each.get("streamed", True), each["token_times_s"],
             each["token_counts"], each.get("at_start", False))
            for each in records.lines
        )  # fmt: skip
    kept: Columns = records.kept
    return kept


def _columns(rows: Iterable[tuple[Any, ...]]) -> Columns:
    parts = list(zip(*rows, strict=True)) or [()] * 9
    status, due_s, sent_s, ended_s, tokens, streamed, times_s, counts, at_start = parts
    sizes = np.fromiter(map(len, times_s), np.int64, len(times_s))
    flat_s, flat = _flat(times_s, sizes), _flat(counts, sizes)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    last_s = np.full(len(sizes), np.nan)
    last_s[sizes > 0] = flat_s[np.cumsum(sizes)[sizes > 0] - 1]
    stated = np.asarray(tokens, dtype=np.float64)
    counted = np.bincount(owner, weights=flat, minlength=len(sizes))
    return Columns(
        status=status,
        ok=np.array([each == STATUS_OK for each in status], dtype=bool),
        counted=~np.asarray(at_start, dtype=bool),
        due_s=np.asarray(due_s, dtype=np.float64),
        sent_s=np.asarray(sent_s, dtype=np.float64),
        ended_s=np.asarray(ended_s, dtype=np.float64),  # None becomes NaN
        tokens=np.where(stated == 0, counted, stated),
        streamed=np.asarray(streamed, dtype=bool),
        times_s=flat_s,
        counts=flat,
        owner=owner,
        last_s=last_s,
    )


def _flat(rows: Sequence[Sequence[Any]], sizes: NDArray[np.int64]) -> FloatArray:
    return np.fromiter(chain.from_iterable(rows), np.float64, int(sizes.sum()))
