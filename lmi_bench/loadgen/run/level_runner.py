"""One level: prepare requests, open connections, warm up, start the clock, run the loop, judge.

Garbage collection is off while the clock runs, and nothing is retried.
"""

import asyncio
import functools
import gc
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from lmi_bench.core.host import without_collection
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.workload import ClosedLoop, LevelSpec, PlannedRequest, arrival_times_s
from lmi_bench.loadgen.prompts.agents import AgentSessions
from lmi_bench.loadgen.prompts.dialogues import Dialogues, first_numbers
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.level_parts import WHOLE, LevelPart, Share, merge_parts
from lmi_bench.loadgen.run.loops import SessionLoop, run_closed_loop, run_open_loop
from lmi_bench.loadgen.run.self_check import LoopWatch
from lmi_bench.loadgen.run.sender import Measured, Sender, StallGuard
from lmi_bench.loadgen.run.target import Resolved, Target

PREPARED_REQUESTS = 16_384
PREPARED_TOKENS = 4_000_000
"""Maximum requests, and prompt tokens, prepared before a level starts. The rest are made when they
are sent, which delays the loop's reads each time."""
REPORT_EVERY_S = 0.05
OPEN_LOOP_CONNECTIONS = 64
"""Connections opened before an open-loop level; more are opened on demand."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a level early, and the sweep after it.

    first_timeout    stop at the first time-out: the target is past its limit
    max_error_share  maximum share of failed requests. Failures return sooner than answers, so a
                     level with a fixed number of requests stops only when the share is certain; a
                     level with a fixed duration is judged after `min_requests` requests. That of
                     all is meant: a worker leaves the verdict to the sweep
    ends_sweep       False: the sweep continues with the next level
    watch            gives a function that sees each answer of a level when it ends (decoded for it,
                     on the loop) and returns True when enough is known: `stopped_by` is then
                     `watch_says`. Several processes tell the sweep of each answer
    """

    first_timeout: bool = True
    max_error_share: float | None = 0.5
    min_requests: int = 10
    ends_sweep: bool = True
    watch: Callable[[LevelSpec], Callable[[RequestRecord], bool] | None] | None = None
    watch_says: str = "decided"

    def too_many_errors(self, errors: int, ended: int, planned: int | None) -> bool:
        """Whether so many failures among the ended requests are too many for the level."""
        if self.max_error_share is None or (planned is None and ended < self.min_requests):
            return False
        return errors > self.max_error_share * (planned or ended)


@dataclass(frozen=True, slots=True)
class LevelOrder:
    """A level to send, whole or a worker's share of it.

    timeout_s  seconds from sending to the end of the answer; None: no limit
    spacing_s  seconds between the first sends of a closed loop's users
    tells      a worker tells of each request that ends, for the sweep's `watch`
    """

    spec: LevelSpec
    rules: StopRules
    timeout_s: float | None
    spacing_s: float
    seed: int
    share: Share = WHOLE
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a level, for display.

    state       "warm-up", "running", "decoding" (all answers have come) or "finished"
    total       requests of the level; None if only its duration is fixed
    tokens      tokens so far, or reads if answers are decoded later
    """

    level: int
    label: str
    state: str
    done: int
    total: int | None
    errors: int
    elapsed_s: float
    tokens: int
    stopped_by: str | None = None


@dataclass(eq=False)
class LevelRunner:
    """One level: its requests, its loop, and the rules that stop it early."""

    order: LevelOrder
    target: Target
    prompts: Prompts
    on_progress: Callable[[Progress], None]

    def __post_init__(self) -> None:
        order = self.order
        self._spec = spec = order.spec
        self._rules = rules = order.rules
        self._share = share = order.share
        self._resolved = Resolved(self.target)
        self._is_decided = None if rules.watch is None else rules.watch(spec)
        self.watch = LoopWatch()
        guard = StallGuard() if order.timeout_s is None else None
        self._sender = functools.partial(Sender, timeout_s=order.timeout_s, guard=guard)
        limits = [n for n in (spec.max_in_flight, self._resolved.max_connections) if n]
        self._max_in_flight = min(limits, default=None)
        self._num_requests = share.num_requests(spec)
        self._users = share.users(spec)
        self._reported_s = -math.inf
        self._prepared: dict[int, PlannedRequest] = {}
        self._start_s = 0.0
        self._done = 0
        self._errors = 0
        self._tokens = 0
        self._stopped_by: str | None = None
        self._engine: Mapping[str, float | None] | None = None
        self._stop: Callable[[], None] = lambda: None

    async def run(self, attempt: int, before_start: Callable[[], Awaitable[None]]) -> LevelRun:
        """Send the whole level; awaits `before_start` when all is ready."""

        async def start() -> float:
            await before_start()
            return asyncio.get_running_loop().time()

        part = await self.run_part(start)
        run = merge_parts(self._spec, attempt, [part], max_error_share=self._rules.max_error_share)
        return replace(run, engine=self._engine)

    async def run_part(self, start: Callable[[], Awaitable[float]]) -> LevelPart:
        """Send this process's share of the level.

        start  awaited when all is ready; returns the level's start on the loop's clock
        """
        resolved, engine_stats = self._resolved, self._resolved.engine_stats
        self._prepare()
        if resolved.open_level is not None:
            await resolved.open_level(self._connections())
        await self._warm_up()
        before = None if engine_stats is None else engine_stats()
        gc.collect()
        with without_collection():  # its pauses would show in the latencies
            self._start_s = await start()
            with self.watch.watching():
                self._report("running")
                if self._spec.load.sessions:
                    measured = await self._sessions()
                elif self._spec.concurrency is not None:
                    measured = await self._closed()
                else:
                    measured = await self._open()
        self._report("decoding")
        records = tuple(item.record().shifted(self._start_s) for item in measured)
        signals = resolved.end_level()
        self._errors = sum(not record.ok for record in records)
        self._tokens = sum(record.output_tokens for record in records)
        self._report("finished")
        if engine_stats is not None and before is not None:
            self._engine = engine_stats().since(before)
        return LevelPart(records, signals, self.watch, self._stopped_by)

    def stop(self, reason: str) -> None:
        """Send nothing more; requests in flight finish."""
        if self._stopped_by is None:
            self._stopped_by = reason
        self._stop()

    def _prepare(self) -> None:
        if self._spec.load.sessions:  # a dialogue's text depends on the answers before it
            if isinstance(self.prompts, AgentSessions):
                planned = itertools.islice(self._session_numbers(), PREPARED_REQUESTS)
                self.prompts.prepare(self._spec, planned, PREPARED_TOKENS)
            return
        known = self._num_requests or 2 * self._users
        tokens = 0
        for index in range(min(known, PREPARED_REQUESTS)):
            number = self._share.number(self._spec, index)
            request = self.prompts.request(self._spec, number)
            self._prepared[number] = request
            tokens += request.input_tokens
            if tokens > PREPARED_TOKENS:
                break

    def _request(self, number: int) -> PlannedRequest:
        return self._prepared.pop(number, None) or self.prompts.request(self._spec, number)

    def _connections(self) -> int:
        most = OPEN_LOOP_CONNECTIONS if self._spec.concurrency is None else self._users
        most = min(most, self._max_in_flight or most)
        return most if self._num_requests is None else min(most, self._num_requests)

    async def _warm_up(self) -> None:
        numbers = range(self._share.index, self._spec.warmup_requests, self._share.of)
        if not numbers:
            return
        self._report("warm-up")
        users = max(1, min(self._connections(), len(numbers)))
        await run_closed_loop(
            self._sender(self._resolved.send),
            ClosedLoop(concurrency=users, num_requests=len(numbers)),
            lambda index: self.prompts.request(self._spec, -1 - numbers[index]),
            start_s=asyncio.get_running_loop().time(),
        )

    async def _closed(self) -> list[Measured]:
        share, spacing_s = self._share, self.order.spacing_s
        users = ClosedLoop(concurrency=self._users, num_requests=self._num_requests, duration_s=self._spec.duration_s)
        self._stop = users.stop
        return await run_closed_loop(
            self._sender(self._resolved.send, max_in_flight=self._max_in_flight),
            users,
            lambda index: self._request(share.number(self._spec, index)),
            start_s=self._start_s + share.index * spacing_s,
            spacing_s=share.of * spacing_s,
            on_ended=self._ended,
        )

    async def _open(self) -> list[Measured]:
        stop = asyncio.Event()
        self._stop = stop.set
        return await run_open_loop(
            self._sender(self._resolved.send, max_in_flight=self._max_in_flight),
            self._arrivals(),
            start_s=self._start_s,
            on_ended=self._ended,
            stop=stop,
        )

    async def _sessions(self) -> list[Measured]:
        """This process's conversations: every `of`-th of them, whole."""
        spec, source, share = self._spec, self.prompts, self._share
        spacing_s = self.order.spacing_s
        assert isinstance(source, Dialogues | AgentSessions)  # as the level's load
        loop = SessionLoop(
            self._sender(self.target.send, max_in_flight=self._max_in_flight),
            start_s=self._start_s,
            duration_s=spec.duration_s,
            on_ended=self._ended,
        )
        self._stop = loop.stop
        begins = (functools.partial(source.begin, spec, session, first) for session, first in self._session_numbers())
        if spec.concurrency is not None:
            return await loop.run_closed(
                begins, self._users, first_s=share.index * spacing_s, spacing_s=share.of * spacing_s
            )
        times = itertools.islice(self._times(spec.num_sessions), share.index, None, share.of)
        return await loop.run_open(zip(begins, times, strict=False), spec.max_sessions)

    def _session_numbers(self) -> Iterator[tuple[int, int]]:
        """This process's sessions: their numbers, and those of their first requests."""
        source, share = self.prompts, self._share
        if isinstance(source, AgentSessions):
            turns = source.turns_at(self._spec)
        else:
            assert isinstance(source, Dialogues)
            turns = source.num_turns
        numbers = first_numbers(turns, self._spec.num_sessions)
        return itertools.islice(numbers, share.index, None, share.of)

    def _arrivals(self) -> Iterator[PlannedRequest]:
        """The requests in order of arrival; those of a trace are due at their recorded times."""
        spec, share = self._spec, self._share
        if spec.load.arrivals == "trace":
            limit_s = math.inf if spec.duration_s is None else spec.duration_s
            planned = map(self._request, () if spec.num_requests is None else share.numbers(spec))
            yield from itertools.takewhile(lambda each: each.arrival_s < limit_s, planned)
            return
        for number, arrival_s in enumerate(self._times(spec.num_requests)):
            if number % share.of == share.index:
                yield replace(self._request(number), arrival_s=arrival_s)

    def _times(self, count: int | None) -> Iterator[float]:
        """When an open loop's requests or conversations are due, after the level's start."""
        spec = self._spec
        seed = self.order.seed + spec.repeat
        return arrival_times_s(spec.load, seed=seed, num_requests=count, duration_s=spec.duration_s)

    def _ended(self, measured: Measured) -> bool:
        """Count a request that ended; False when a rule ends the level."""
        self._done += 1
        self._tokens += measured.num_tokens
        status = measured.known_status
        self._errors += status != "ok"
        if self._stopped_by is None:
            if status == "timeout" and self._rules.first_timeout:
                self._stopped_by = "timeout"
            elif self._share.of == 1 and self._rules.too_many_errors(self._errors, self._done, self._num_requests):
                self._stopped_by = "errors"
        if self._is_decided is not None and self._is_decided(measured.record()):
            self._stopped_by = self._stopped_by or self._rules.watch_says
        self._report("running")
        return self._stopped_by is None

    def _report(self, state: str) -> None:
        now_s = asyncio.get_running_loop().time()
        soon = now_s - self._reported_s < REPORT_EVERY_S and self._stopped_by is None
        if state == "running" and self._done and soon:
            return  # throttle: drawing is slower than a request
        self._reported_s = now_s
        self.on_progress(
            Progress(
                level=self._spec.index,
                label=self._spec.load.name,
                state=state,
                done=self._done,
                total=self._num_requests,
                errors=self._errors,
                elapsed_s=0.0 if state == "warm-up" else now_s - self._start_s,
                tokens=self._tokens,
                stopped_by=self._stopped_by,
            )
        )
