"""A sweep: level after level against one target, each saved when it ends.

A stop rule that ends a level early ends the sweep, too; a cancellation loses only the level that is
running, and the run resumes there. The next level comes from a fixed list, or from a rule that sees
the finished levels.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmi_bench.core.clock import is_virtual
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.level import WHOLE, Level, NextLevel
from lmi_bench.core.load import LoadAxis
from lmi_bench.core.records import LevelRun
from lmi_bench.core.run_store import RunStore
from lmi_bench.core.scenario import Scenario
from lmi_bench.core.traces import Trace, read_trace
from lmi_bench.core.workload import USUAL_REQUESTS_PER_USER, LevelSizes, LevelSpec, of_sessions
from lmi_bench.loadgen.prompts.agents import AgentSessions
from lmi_bench.loadgen.prompts.dialogues import num_turns
from lmi_bench.loadgen.prompts.prompts import Prompts, no_text
from lmi_bench.loadgen.run.level_runner import LevelOrder, LevelRunner, Progress, StopRules
from lmi_bench.loadgen.run.target import Resolved, Target
from lmi_bench.loadgen.run.worker_pool import WorkerPool
from lmi_bench.loadgen.watch.server_watch import ServerWatch


def levels_of(scenario: Scenario) -> list[LevelSpec]:
    """The levels that a scenario names, in its order.

    A closed-loop level sends requests_per_level, or concurrency * requests_per_user (if neither is
    stated see `LevelSizes`), and first one for each user (`with_start`); an open-loop
    level without a number or a duration sends 100.
    """
    load = scenario.load
    if scenario.workload.trace is not None and load.concurrency is None:
        return _trace_levels(scenario, read_trace(Path(scenario.workload.trace)))
    axis: LoadAxis = "rate_per_s" if load.rate_per_s else "concurrency"
    sizes, loads = level_sizes(scenario), load.rate_per_s or load.concurrency_levels
    return [sizes.level(i, axis, one, sizes.requests(axis, one)) for i, one in enumerate(loads)]


def level_sizes(scenario: Scenario) -> LevelSizes:
    """What a level of the scenario has at any load."""
    names = {each.name for each in fields(LevelSizes)} - {"as_sessions"}
    own: dict[str, Any] = {name: getattr(scenario.load, name) for name in names}
    return LevelSizes(**own, as_sessions=session_levels(scenario))


def session_levels(scenario: Scenario) -> Callable[[LevelSpec], LevelSpec] | None:
    """A function that turns a level into one of conversations; None for single requests.

    A level has sessions_per_level conversations; else enough for requests_per_level, or
    requests_per_user for each user.
    """
    load = scenario.load
    if not scenario.workload.has_sessions:
        return None
    workload, seed = scenario.workload, scenario.seed
    agents = AgentSessions.of(workload, no_text, seed=seed) if workload.has_agents else None
    turns = num_turns(workload, seed)

    def as_sessions(spec: LevelSpec) -> LevelSpec:
        count = load.sessions_per_level
        by_user = load.requests_per_level is None and load.duration_s is None
        if count is None and spec.concurrency is not None and by_user:
            count = spec.concurrency * (load.requests_per_user or USUAL_REQUESTS_PER_USER)
        turns_here = turns if agents is None else agents.turns_at(spec)
        if agents is not None and workload.begins_within:  # the warm-up primes the cache
            primed = max(spec.warmup_requests, len(agents.primed(spec)))
            spec = replace(spec, warmup_requests=primed, start_requests=0)
        return of_sessions(spec, turns_here, num_sessions=count, max_sessions=load.max_sessions)

    return as_sessions


def _trace_levels(scenario: Scenario, trace: Trace) -> list[LevelSpec]:
    """A level for each speed (1 is as recorded), or for each given mean rate, which is that of the
    requests that it sends."""
    load, end_s = scenario.load, scenario.load.duration_s or math.inf
    most = min(len(trace.requests), load.requests_per_level or len(trace.requests))
    if load.rate_per_s:
        levels = [(rate, math.ceil(min(most, end_s * rate))) for rate in load.rate_per_s]
    else:
        sent = [sum(each.at_s < end_s * speed for each in trace.requests[:most]) for speed in load.speed]
        levels = [(speed * trace.rate_of(number), number) for speed, number in zip(load.speed, sent, strict=True)]
    sizes = replace(level_sizes(scenario), arrivals="trace", burstiness=1.0, ramp_s=0.0)
    return [sizes.level(index, "rate_per_s", *level) for index, level in enumerate(levels)]


def in_order(levels: Sequence[LevelSpec]) -> NextLevel:
    """The rule that takes the levels one after the other, leaving out those that are finished."""

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        done = {level.index for level in finished}
        return next((level for level in levels if level.index not in done), None)

    return next_level


Summarise = Callable[[LevelRun], Level]


async def run_sweep(
    levels: Sequence[LevelSpec] | NextLevel,
    target: Target,
    store: RunStore | None,
    *,
    prompts: Prompts,
    summarise: Summarise,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_level: Callable[[LevelRun, Level], None] = lambda _run, _level: None,
    stop_rules: StopRules | None = None,
    timeout_s: float | None = 60.0,
    spacing_s: float = 0.0,
    seed: int = 0,
    workers: WorkerPool | None = None,
    server: ServerWatch | None = None,
    before_level: Callable[[], None] | None = None,
) -> list[Level]:
    """Run the levels that the store does not contain yet; returns all levels.

    levels      a list, or a rule that picks the next level from the finished ones
    store       saves each level when it ends; None: nothing is written to disk
    spacing_s   seconds between the first sends of a closed loop's users
    workers     processes for the levels that one process cannot send, or for all levels; each opens
                its own target
    before_level  called in a thread after a level's warm-up, before its first request; where the
                warm-up primes the cache, before it

    Raises the target's own errors; a failed request is a record. Cancelled during a level, it
    keeps the levels before it.
    """
    rules = stop_rules or StopRules()
    next_level = levels if callable(levels) else in_order(levels)
    finished: list[Level] = list(store.levels) if store is not None else []
    while not has_ended(finished, rules) and (spec := next_level(finished)) is not None:
        attempt = store.next_attempt(spec.index) if store is not None else 1
        started_at = datetime.now(UTC)
        order = LevelOrder(spec, rules, timeout_s, spacing_s, seed)
        has_hosts = workers is not None and bool(workers.hosts)
        capped = spec.max_in_flight is not None or spec.max_sessions is not None
        capped = capped or Resolved(target).max_connections is not None
        # a cap counts the requests in flight, which one process alone can do
        pool = workers if has_hosts or not capped else None
        count = 1 if pool is None else pool.count_for(spec, finished)
        primes = isinstance(prompts, AgentSessions) and prompts.begins_within
        async with _observed(server, None if primes else before_level) as before_start:
            if primes and before_level is not None:
                await asyncio.to_thread(before_level)
            if pool is not None and (count > 1 or has_hosts):
                run = await pool.run_level(order, attempt, count, on_progress, before_start)
            else:
                runner = LevelRunner(order, target, prompts, on_progress)
                run = await runner.run(attempt, before_start)
        if server is not None:
            run = replace(run, server=server.summary(run.records))
        level = _by_the_wall_clock(summarise(run), started_at)
        if store is not None:
            store.append_level(run.records, level)
        finished.append(level)
        on_level(run, level)
    return finished


@contextlib.asynccontextmanager
async def _observed(
    server: ServerWatch | None, before_level: Callable[[], None] | None
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Run one level inside, the server watch around it; gives what to await before its start."""

    async def begin() -> None:
        if before_level is not None:
            await asyncio.to_thread(before_level)
        if server is not None:
            await server.begin()

    try:
        yield begin
        if server is not None:
            await server.end()
    except BaseExceptionGroup as group:  # a task group wraps even a single error
        raise first_error(group) from group
    finally:
        if server is not None:
            server.abandon()


def _by_the_wall_clock(level: Level, started_at: datetime) -> Level:
    """The level with its start and end, for other logs; virtual time has neither and is steady."""
    if is_virtual():
        return replace(level, speed_unknown=None)
    started, ended = (at.isoformat(timespec="milliseconds") for at in (started_at, datetime.now(UTC)))
    return replace(level, started_at=started, ended_at=ended)


def has_ended(finished: Sequence[Level], rules: StopRules) -> bool:
    """Whether a rule ended the sweep with its last level; one cut by its duration is whole."""
    reason = finished[-1].stopped_by if finished and rules.ends_sweep else None
    return reason not in (*WHOLE, "decided")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: a known failure if there is one, otherwise the first error."""
    found: BaseException = group.subgroup(LmiBenchError) or group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
