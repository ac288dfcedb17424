"""A level that several processes send: how it is split, and how the parts are merged.

The plan is split by number, so that the parts hold the same requests as the whole; merging keeps
every sample, so that a percentile of the merged level is the percentile of all of them.
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lmi_bench.core.level import KNOWN
from lmi_bench.core.records import LevelRun, RequestRecord, with_start_marked
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.run.self_check import LoopWatch, check_level


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a level that worker `index` of `of` sends.

    Closed loop: every `of`-th user, and of each round of requests the same places. Open loop:
    every `of`-th request.
    """

    index: int = 0
    of: int = 1

    def users(self, spec: LevelSpec) -> int:
        """Users of a closed loop that are this worker's; of an open loop one place in a round."""
        return len(self._places(spec))

    def num_requests(self, spec: LevelSpec) -> int | None:
        """Requests that are this worker's; None where only the duration is fixed."""
        if spec.num_requests is None:
            return None
        rounds, rest = divmod(spec.num_requests, self._round(spec))
        places = self._places(spec)
        return rounds * len(places) + sum(place < rest for place in places)

    def number(self, spec: LevelSpec, index: int) -> int:
        """The level's number of this worker's request `index`."""
        places = self._places(spec)
        rounds, place = divmod(index, len(places))
        return rounds * self._round(spec) + places[place]

    def numbers(self, spec: LevelSpec) -> Iterator[int]:
        """This worker's numbers, in order; without an end where only the duration is fixed."""
        count = self.num_requests(spec)
        for index in itertools.count() if count is None else range(count):
            yield self.number(spec, index)

    def _round(self, spec: LevelSpec) -> int:
        return self.of if spec.concurrency is None else spec.concurrency

    def _places(self, spec: LevelSpec) -> range:
        return range(self.index, self._round(spec), self.of)


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class LevelPart:
    """One process's part of a level; its times are relative to the common start.

    sender  the process's name, if there are several
    fault   why it cannot be trusted, besides what its own records show
    """

    records: tuple[RequestRecord, ...]
    signals: ReceiveSignals
    watch: LoopWatch
    stopped_by: str | None
    sender: str | None = None
    fault: str | None = None


def merge_parts(
    spec: LevelSpec, attempt: int, parts: Sequence[LevelPart], *, max_error_share: float | None
) -> LevelRun:
    """Merge the parts of a level: all records in request order, judged as a whole.

    Each of several processes is also judged alone: one that is in doubt makes the level invalid.

    max_error_share  share of failed requests above which the level counts as stopped by errors
    """
    sent = [record for part in parts for record in part.records]
    records = with_start_marked(tuple(sorted(sent, key=lambda each: each.request_id)), spec)
    signals = functools.reduce(operator.add, (part.signals for part in parts))
    watch = LoopWatch()
    watch.lags_s = [lag_s for part in parts for lag_s in part.watch.lags_s]
    watch.cpu_share = max(part.watch.cpu_share for part in parts)
    watch.virtual = all(part.watch.virtual for part in parts)
    verdicts, reasons = ("decided", KNOWN), [each.stopped_by for each in parts if each.stopped_by]
    stopped_by = min(reasons, key=verdicts.__contains__, default=None)  # a failure comes first
    if stopped_by in verdicts and len(records) == spec.num_requests:
        stopped_by = None  # all had been sent when the verdict was reached: nothing was cut
    errors, limit = sum(not record.ok for record in records), max_error_share
    if stopped_by is None and limit is not None and errors > limit * len(records):
        stopped_by = "errors"
    planned = None if spec.duration_s is None else spec.num_requests
    if stopped_by is None and planned is not None and len(records) < planned:
        stopped_by = "duration"
    run = LevelRun(
        spec=spec,
        attempt=attempt,
        records=records,
        stopped_by=stopped_by,
        connect_s=tuple(signals.connect_s),
        tls_s=tuple(signals.tls_s),
    )
    check = check_level(spec, records, watch, signals, workers=len(parts))
    for part in (part for part in parts if part.sender):
        reason = check_level(spec, part.records, part.watch, part.signals).reason
        reason = reason and f"{reason} ({part.sender})"
        if part.fault is not None:
            reason = f"client: {part.sender}: {part.fault}"
        if reason is not None:
            return replace(run, check=replace(check, valid=False, reason=reason))
    return replace(run, check=check)
