"""One level: its requests made and its connections opened, then warm-up, clock, loop and judgement.

Garbage collection rests while the clock runs, and nothing is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from lmi_bench.engine.engine_stats import EngineStats
from lmi_bench.loadgen.closed_loop import run_closed_loop
from lmi_bench.loadgen.measure import Measured
from lmi_bench.loadgen.open_loop import run_open_loop
from lmi_bench.loadgen.prompts import Prompts
from lmi_bench.loadgen.self_check import LoopWatch, ReceiveSignals, check_level
from lmi_bench.loadgen.target import Target
from lmi_bench.records import LevelRun, RequestRecord
from lmi_bench.workload import ClosedLoop, LevelSpec, PlannedRequest, arrival_times_s

PREPARED_REQUESTS = 4096
"""Most requests that are made before a level starts; the rest are made as they are sent."""
OPEN_LOOP_CONNECTIONS = 64
"""Connections opened before an open-loop level; more are opened as they are needed."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a level early, and the sweep after it.

    first_timeout    a request that timed out: the target is past its limit
    max_error_share  share of failed requests that a level may have. Failures come back sooner than
                     answers, so a level of a known number of requests is only cut short when the
                     share is certain; one of a fixed duration from `min_requests` ended ones on
    ends_sweep       False: the next level is picked by the rule of levels all the same
    watch            what looks at a level's answers as they end (they are decoded for it, on the
                     loop) and says when nothing more need be sent: `stopped_by` is then "decided"
    """

    first_timeout: bool = True
    max_error_share: float | None = 0.5
    min_requests: int = 10
    ends_sweep: bool = True
    watch: Callable[[LevelSpec], Callable[[RequestRecord], bool] | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a level is: plain values for whoever shows them.

    total     requests of the level, None when only its duration is fixed
    tokens    that came so far; reads instead, where answers are decoded later
    state     "warm-up", "running" or "finished"
    """

    level: int
    label: str
    state: str
    done: int
    total: int | None
    errors: int
    elapsed_s: float
    tokens: int


@runtime_checkable
class LevelAware(Protocol):
    """A target that prepares for a level and says afterwards what its receiver saw."""

    async def open_level(self, connections: int) -> None:
        """Have this many connections open before the level's clock starts."""
        ...

    def end_level(self) -> ReceiveSignals:
        """What was seen since `open_level`; asked when all answers are decoded."""
        ...


@runtime_checkable
class EngineWatched(Protocol):
    """A target whose engine can be looked into."""

    def engine_stats(self) -> EngineStats:
        """The engine's counts at this moment."""
        ...


class LevelRunner:
    """One level: its requests, its loop, and the rules that cut it short."""

    def __init__(
        self,
        spec: LevelSpec,
        target: Target,
        prompts: Prompts,
        rules: StopRules,
        on_progress: Callable[[Progress], None],
        timeout_s: float | None,
    ) -> None:
        self._spec = spec
        self._target = target
        self._prompts = prompts
        self._rules = rules
        self._is_decided = rules.watch(spec)
        self._on_progress = on_progress
        self._timeout_s = timeout_s
        self._prepared: dict[int, PlannedRequest] = {}
        self._start_s = 0.0
        self._done = 0
        self._errors = 0
        self._tokens = 0
        self._stopped_by: str | None = None

    async def run(self, attempt: int, *, spacing_s: float, seed: int) -> LevelRun:
        spec, target = self._spec, self._target
        loop = asyncio.get_running_loop()
        self._prepare()
        if isinstance(target, LevelAware):
            await target.open_level(self._connections())
        await self._warm_up()
        before = target.engine_stats() if isinstance(target, EngineWatched) else None
        watch = LoopWatch()
        with _no_collections(), watch.watching():
            self._start_s = loop.time()
            self._report("running")
            if spec.concurrency is not None:
                measured = await self._closed(spec.concurrency, spacing_s)
            else:
                measured = await self._open(seed)
        records = tuple(item.record().shifted(self._start_s) for item in measured)
        signals = target.end_level() if isinstance(target, LevelAware) else ReceiveSignals()
        self._errors = sum(not record.ok for record in records)
        self._tokens = sum(record.output_tokens for record in records)
        if self._stopped_by == "decided" and len(records) == spec.num_requests:
            self._stopped_by = None  # the verdict fell when all had been sent: nothing was cut
        if self._stopped_by is None and self._too_many_errors(len(records), at_end=True):
            self._stopped_by = "errors"
        self._report("finished")
        return LevelRun(
            spec=spec,
            attempt=attempt,
            records=records,
            stopped_by=self._stopped_by or self._cut_by_duration(len(records)),
            check=check_level(spec, records, watch, signals),
            engine=_engine_change(target, before),
        )

    def _prepare(self) -> None:
        known = self._spec.num_requests or 2 * (self._spec.concurrency or 1)
        for number in range(min(known, PREPARED_REQUESTS)):
            self._prepared[number] = self._prompts.request(self._spec, number)

    def _request(self, number: int) -> PlannedRequest:
        prepared = self._prepared.pop(number, None)
        return prepared or self._prompts.request(self._spec, number)

    def _connections(self) -> int:
        most = self._spec.concurrency or OPEN_LOOP_CONNECTIONS
        return min(most, self._spec.num_requests or most)

    async def _warm_up(self) -> None:
        number = self._spec.warmup_requests
        if not number:
            return
        self._report("warm-up")
        await run_closed_loop(
            self._target,
            ClosedLoop(concurrency=min(self._connections(), number), num_requests=number),
            lambda index: self._prompts.request(self._spec, -1 - index),
            start_s=asyncio.get_running_loop().time(),
            timeout_s=self._timeout_s,
        )

    async def _closed(self, concurrency: int, spacing_s: float) -> list[Measured]:
        users = ClosedLoop(
            concurrency=concurrency,
            num_requests=self._spec.num_requests,
            duration_s=self._spec.duration_s,
        )
        return await run_closed_loop(
            self._target,
            users,
            self._request,
            start_s=self._start_s,
            spacing_s=spacing_s,
            timeout_s=self._timeout_s,
            on_ended=self._ended,
        )

    async def _open(self, seed: int) -> list[Measured]:
        return await run_open_loop(
            self._target,
            self._arrivals(seed),
            start_s=self._start_s,
            timeout_s=self._timeout_s,
            on_ended=self._ended,
        )

    def _arrivals(self, seed: int) -> Iterator[PlannedRequest]:
        spec = self._spec
        if spec.rate_per_s is None:
            raise ValueError("an open loop needs a rate")
        if spec.arrivals == "trace":
            yield from self._recorded()
            return
        times = arrival_times_s(
            spec.rate_per_s,
            process=spec.arrivals,
            seed=seed + spec.repeat,
            num_requests=spec.num_requests,
            duration_s=spec.duration_s,
            burstiness=spec.burstiness,
            ramp_s=spec.ramp_s,
        )
        for number, arrival_s in enumerate(times):
            yield replace(self._request(number), arrival_s=arrival_s)

    def _recorded(self) -> Iterator[PlannedRequest]:
        """The trace's requests, each due when its prompt says."""
        for number in range(self._spec.num_requests or 0):
            request = self._request(number)
            limit_s = self._spec.duration_s
            if limit_s is not None and request.arrival_s >= limit_s:
                return
            yield request

    def _ended(self, measured: Measured) -> bool:
        """Count a request that ended; False when a rule ends the level."""
        self._done += 1
        self._tokens += measured.num_tokens
        status = measured.known_status
        self._errors += status != "ok"
        if self._stopped_by is None:
            if status == "timeout" and self._rules.first_timeout:
                self._stopped_by = "timeout"
            elif self._too_many_errors(self._done):
                self._stopped_by = "errors"
        if self._is_decided is not None and self._is_decided(measured.record()):
            self._stopped_by = self._stopped_by or "decided"
        self._report("running")
        return self._stopped_by is None

    def _too_many_errors(self, ended: int, *, at_end: bool = False) -> bool:
        limit = self._rules.max_error_share
        if limit is None:
            return False
        if at_end or self._spec.num_requests is None:
            enough = at_end or ended >= self._rules.min_requests
            return enough and self._errors > limit * ended
        return self._errors > limit * self._spec.num_requests

    def _cut_by_duration(self, sent: int) -> str | None:
        spec = self._spec
        both = spec.num_requests is not None and spec.duration_s is not None
        return "duration" if both and sent < (spec.num_requests or 0) else None

    def _report(self, state: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._on_progress(
            Progress(
                level=self._spec.index,
                label=self._spec.label,
                state=state,
                done=self._done,
                total=self._spec.num_requests,
                errors=self._errors,
                elapsed_s=0.0 if state == "warm-up" else now_s - self._start_s,
                tokens=self._tokens,
            )
        )


def _engine_change(target: Target, before: EngineStats | None) -> Mapping[str, float | None] | None:
    if before is None or not isinstance(target, EngineWatched):
        return None
    return target.engine_stats().since(before)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collection while the clock runs: a pause of one would land in the latencies.

    Freezing alone would not do, since the collector walks what was made since.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
