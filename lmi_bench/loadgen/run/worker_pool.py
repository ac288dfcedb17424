"""The sweep's side of its workers: one level's plan over several processes, merged exactly.

One core carries some 80,000 token events a second. Beyond it the plan is split by number
(`level_parts.Share`) over processes here or on other hosts (`hosts`). All begin at one instant,
each by its own CLOCK_MONOTONIC; the offsets of other hosts' clocks are measured before, during and
after each level (`HostClock`), and their error is part of the level's report. Latencies are
differences on one host and need no common clock.

While a level runs each worker is pinged four times a second: one that is gone, that does not
answer, whose clock has stepped or that gets too little of a core is named within two seconds.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from lmi_bench.core.clock import alarm
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.host import usable_cores
from lmi_bench.core.level import Level
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.units import s_to_ms
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.run import channel as channels
from lmi_bench.loadgen.run.hosts import JOIN, LOCAL, PIPE_SECRET, Host, Launched, let_in
from lmi_bench.loadgen.run.level_parts import LevelPart, Share, merge_parts
from lmi_bench.loadgen.run.level_runner import LevelOrder, Progress

MAX_CORE_SHARE = 0.6
"""Share of a core above which `auto` takes another worker: beyond some 0.8 times become late."""
START_LIMIT_S = 60.0  # of a process
START_DELAY_S = 0.05
"""Least time from the moment when all workers are ready to the level's start, so that the message
reaches each before; over a network four round trips."""
PING_EVERY_S = 0.25
SILENT_S = 1.5
"""Time without an answer after which a worker counts as lost."""
PINGS, PING_GAP_S = 8, 0.01
"""Pings of a host's clock before and after a level."""
MAX_LATE_FRAC = 0.3
"""Share of a second that a worker's loop may be late before it is named."""
_LOST = "the level in flight is lost; continue with --resume"
MAX_DRIFT = 1e-3
"""Seconds a second: kernels let time services slew a clock by 500 ppm, and there are two clocks."""


class HostClock:
    """How far a host's CLOCK_MONOTONIC is ahead of ours, seconds, as an interval.

    A ping leaves at our time s and reaches them at their time a; its answer leaves at their time t
    and reaches us at our time r. The offset (theirs - ours) is then between t - r and a - s, however
    long either way took: no symmetry is assumed. Where the kernel tells a and r, a busy loop on
    either side is no part of it. Intervals of several pings are intersected; between them the known
    one widens, since two clocks drift apart by at most `MAX_DRIFT`. An answer outside it shows that
    a clock has stepped.

    shared  it is our own clock
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self._low_s, self._high_s = (0.0, 0.0) if shared else (-math.inf, math.inf)
        self._known_at_s = 0.0
        self._used_s = 0.0
        self.error_s = 0.0
        self.round_trip_s = 0.0

    def begin_level(self) -> float:
        """The offset to use for a level: the middle of what is known. Resets `error_s`."""
        self._used_s = 0.0 if self.shared else (self._low_s + self._high_s) / 2
        self.error_s = self._distance_s()
        return self._used_s

    def add(self, sent_s: float, arrived_s: float, at_s: float, read_s: float) -> float:
        """Add a ping; returns by how much the clock has stepped at least, 0.0 if it need not have.

        `error_s` becomes the largest error that the level's offset may have had so far.
        """
        if self.shared:
            return 0.0
        self.round_trip_s = read_s - sent_s
        drift_s = MAX_DRIFT * (read_s - self._known_at_s)
        low_s, high_s = self._low_s - drift_s, self._high_s + drift_s
        moved_s = MAX_DRIFT * self.round_trip_s  # at most, while the ping was under way
        seen_low_s, seen_high_s = at_s - read_s - moved_s, arrived_s - sent_s + moved_s
        step_s = max(0.0, seen_low_s - high_s, low_s - seen_high_s)
        if step_s:
            low_s, high_s = seen_low_s, seen_high_s
        self._low_s, self._high_s = max(low_s, seen_low_s), min(high_s, seen_high_s)
        self._known_at_s = read_s
        self.error_s = max(self.error_s, self._distance_s())
        return step_s

    def _distance_s(self) -> float:
        """Largest distance of the offset in use from what is known now."""
        return max(self._high_s - self._used_s, self._used_s - self._low_s)


@dataclass(eq=False)
class _Worker:
    """Our end of one worker.

    sending   it is due to answer within `SILENT_S`
    in_level  its clock must not step
    fault     why this level cannot be trusted: a step of its clock, a late start
    """

    number: int
    channel: channels.Channel
    clock: HostClock
    tell: Callable[[str], None]
    answers: asyncio.Queue[channels.Message | LmiBenchError] = field(default_factory=asyncio.Queue)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    sending: bool = False
    in_level: bool = False
    is_short_of_core: bool = False
    fault: str | None = None

    def order(self, order: LevelOrder) -> None:
        """Have it prepare a level."""
        self.channel.listen(self._heard)
        self.channel.send(order)

    def begin(self, at_s: float) -> None:
        """Have it begin the level at this time of ours."""
        self.sending = self.in_level = True
        self.is_short_of_core, self.fault = False, None
        self.channel.send(channels.Start(at_s + self.clock.begin_level()))

    async def ask_time(self) -> None:
        """Ping it until it is heard; raises LmiBenchError if it is silent."""
        if not self.answers.empty():
            return  # such as its end, which `expect` tells
        self.heard.clear()
        self.channel.send(channels.Ping(asyncio.get_running_loop().time()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S):
                await self.heard.wait()
        if not self.heard.is_set():  # after a time without reads both may hold
            raise LmiBenchError(f"{self.channel.name} has not answered for {SILENT_S:g} s: {_LOST}")

    def _heard(self, message: channels.Message | LmiBenchError) -> None:
        self.heard.set()
        if not isinstance(message, channels.Ping):
            self.answers.put_nowait(message)
            return
        name = self.channel.name
        step_s = self.clock.add(message.sent_s, message.arrived_s, message.at_s, self.channel.heard_s)
        fault = f"its clock has stepped by {s_to_ms(step_s):,.0f} ms or more" if step_s else message.fault
        if fault and self.in_level and self.fault is None:
            self.fault = fault
            self.tell(f"{name}: {self.fault}: the level is invalid")
        if message.late_frac > MAX_LATE_FRAC and self.sending and not self.is_short_of_core:
            self.is_short_of_core = True
            self.tell(f"{name} gets too little of a core: its loop was late for {message.late_frac:.0%} of a second")

    async def expect(self, *kinds: type[channels.Message]) -> channels.Message:
        """Its next message; raises an error that names it if it has failed or ended."""
        answer = await self.answers.get()
        if isinstance(answer, channels.ClosedError):
            raise LmiBenchError(f"{answer}: {_LOST}")
        if isinstance(answer, LmiBenchError):
            raise answer
        if not isinstance(answer, kinds):
            raise LmiBenchError(f"{self.channel.name} sent {type(answer).__name__} out of turn")
        return answer

    async def part(self, on_news: Callable[[int, channels.News], None]) -> LevelPart:
        """Its part of the level, when it has sent it."""
        kinds = Progress, RequestRecord, LevelPart
        while isinstance(answer := await self.expect(*kinds), channels.News):
            self.sending &= isinstance(answer, RequestRecord) or answer.state == "running"
            on_news(self.number, answer)
        assert isinstance(answer, LevelPart)
        self.sending = False
        return answer


@dataclass(eq=False)
class WorkerPool:
    """Processes that send levels together, until `close`.

    count    workers of every level, or "auto": as many as the level before shows to be needed. A
             level has at most one a user, and auto at most one a core
    hosts    where they run, and send all levels; empty: here, and a single one is not needed
    listen   address for those that dial in
    check    raises if no worker can dial in any more
    listener hears who is awaited, is refused, or cannot be trusted
    """

    job: channels.Job
    count: int | Literal["auto"] = "auto"
    _: KW_ONLY
    hosts: Sequence[Host] = ()
    listen: tuple[str, int] = ("127.0.0.1", 0)
    listener: Listener = SILENT
    check: Callable[[], None] = lambda: None
    _workers: dict[int, _Worker] = field(default_factory=dict, init=False)

    def count_for(self, spec: LevelSpec, finished: Sequence[Level]) -> int:
        """Workers that a level should have, after the finished levels' lines."""
        most = spec.concurrency or spec.num_requests or 2**31
        count = len(self.hosts) or self.count
        if count != "auto":
            return min(count, most)
        return min(_needed(spec, finished), usable_cores(), most)

    def open(self, count: int | None = None) -> None:
        """Have this many workers, all that are stated by default; waits until each has the target.

        Raises InputError that names the host that cannot be used; the pool is then to be closed.
        """
        numbers = range(len(self._workers), len(self.hosts) if count is None else count)
        hosts = {n: self.hosts[n] if self.hosts else LOCAL for n in numbers}
        launched = []
        for n, host in hosts.items():
            if host != JOIN:
                launched.append(Launched(host, f"worker {n} ({host.name})"))
                self._add(n, launched[-1], host)
        for each in launched:
            with alarm(START_LIMIT_S, each.process.kill):
                each.greet(PIPE_SECRET)
        joining = [n for n, host in hosts.items() if host == JOIN]
        for n, channel in let_in(self.listen, joining, self.listener, self.check):
            self._add(n, channel, JOIN)
        names = dict.fromkeys(self.job.headers, "")  # of headers whose values a pipe alone carries
        for n, host in hosts.items():
            job = replace(self.job, headers=names) if host == JOIN else self.job
            self._workers[n].channel.send(job)
        for n in numbers:
            self._workers[n].channel.receive(channels.Ready)

    def _add(self, number: int, channel: channels.Channel, host: Host) -> None:
        clock = HostClock(shared=host == LOCAL)
        self._workers[number] = _Worker(number, channel, clock, self.listener.warn)

    async def run_level(
        self,
        order: LevelOrder,
        attempt: int,
        count: int,
        on_progress: Callable[[Progress], None],
        before_start: Callable[[], Awaitable[None]],
    ) -> LevelRun:
        """Send a level with `count` workers.

        Raises LmiBenchError when a worker is lost: the level is then lost, and the pool starts
        over.
        """
        try:
            self.open(max(count, len(self._workers)))
            workers = [self._workers[number] for number in range(count)]
            parts = await self._collect(workers, order, on_progress, before_start)
            await _measure_clocks(workers)
        except BaseException:
            self.close()
            raise
        for place, worker in enumerate(workers):
            worker.in_level = False
            fault = parts[place].fault or worker.fault
            parts[place] = replace(parts[place], sender=worker.channel.name, fault=fault)
        run = merge_parts(order.spec, attempt, parts, max_error_share=order.rules.max_error_share)
        bound_ms = s_to_ms(max(worker.clock.error_s for worker in workers)) or None
        return replace(run, check=replace(run.check, clock_error_bound_ms=bound_ms))

    async def _collect(
        self,
        workers: Sequence[_Worker],
        order: LevelOrder,
        on_progress: Callable[[Progress], None],
        before_start: Callable[[], Awaitable[None]],
    ) -> list[LevelPart]:
        rules, watch = order.rules, order.rules.watch  # which no message can carry
        is_decided = watch and watch(order.spec)
        order = replace(order, rules=replace(rules, watch=None), tells=is_decided is not None)
        for worker in workers:
            worker.order(replace(order, share=Share(worker.number, len(workers))))
        for worker in workers:
            await worker.expect(channels.Ready)
        await before_start()
        await _measure_clocks(workers)
        delay_s = max(START_DELAY_S, 4 * max(worker.clock.round_trip_s for worker in workers))
        at_s = asyncio.get_running_loop().time() + delay_s
        for worker in workers:
            worker.begin(at_s)
        states: dict[int, Progress] = {}
        stopped_by: str | None = None

        def on_news(number: int, news: channels.News) -> None:
            nonlocal stopped_by
            if isinstance(news, RequestRecord):
                if is_decided is None or not is_decided(news):
                    return
                news = replace(states[number], stopped_by=rules.watch_says)
            states[number] = news
            so_far = states.values()
            done, errors = sum(each.done for each in so_far), sum(each.errors for each in so_far)
            reason = news.stopped_by
            if reason is None and rules.too_many_errors(errors, done, order.spec.num_requests):
                reason = "errors"
            if reason and stopped_by is None:
                stopped_by = reason
                for other in workers:
                    other.channel.send(channels.Stop(reason))
            on_progress(
                Progress(
                    level=order.spec.index,
                    label=order.spec.load.name,
                    state="running",
                    done=done,
                    total=order.spec.num_requests,
                    errors=errors,
                    elapsed_s=max(each.elapsed_s for each in so_far),
                    tokens=sum(each.tokens for each in so_far),
                )
            )

        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(_watch(worker)) for worker in workers]
            tasks = [group.create_task(worker.part(on_news)) for worker in workers]
            await asyncio.wait(tasks)
            for each in watching:
                each.cancel()
        return [task.result() for task in tasks]

    def close(self) -> None:
        """End the workers: close their channels, and terminate those that do not exit."""
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.channel.close()
        for worker in workers.values():
            if isinstance(worker.channel, Launched):
                worker.channel.end()


async def _measure_clocks(workers: Sequence[_Worker]) -> None:
    """Ping the workers whose clock is not ours."""
    others = [worker for worker in workers if not worker.clock.shared]
    for _ in range(PINGS if others else 0):
        async with asyncio.TaskGroup() as group:
            for worker in others:
                group.create_task(worker.ask_time())
        await asyncio.sleep(PING_GAP_S)


async def _watch(worker: _Worker) -> None:
    """Ping a worker while it sends; raises LmiBenchError if it does not answer."""
    while worker.sending:
        await worker.ask_time()
        await asyncio.sleep(PING_EVERY_S)


def _needed(spec: LevelSpec, finished: Sequence[Level]) -> int:
    """Workers that keep each core's share below the limit, going by the last level."""
    if not finished:
        return 1
    last = finished[-1]
    share, workers = last.generator.cpu_share or 0.0, last.generator.workers or 1
    before = last.load.on(spec.load.axis)
    grown = spec.load.value / before if before else 1.0
    return max(1, math.ceil(share * workers * grown / MAX_CORE_SHARE))
