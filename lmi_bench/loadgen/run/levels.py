"""The next level: from a fixed list, or by a rule that sees the finished levels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lmi_bench.core.level import Level, NextLevel
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import DEFAULT_OPEN_LOOP_REQUESTS, Scenario
from lmi_bench.core.traces import Trace, read_trace
from lmi_bench.core.workload import (
    USUAL_REQUESTS_PER_USER,
    LevelSpec,
    closed_loop_requests,
    of_sessions,
    with_start,
)
from lmi_bench.loadgen.prompts.agents import AgentSessions
from lmi_bench.loadgen.prompts.dialogues import num_turns
from lmi_bench.loadgen.prompts.prompts import no_text


def levels_of(scenario: Scenario) -> list[LevelSpec]:
    """The levels that a scenario names, in its order.

    A closed-loop level sends requests_per_level, or concurrency * requests_per_user (if neither is
    stated see `closed_loop_requests`), and first one for each user (`with_start`); an open-loop
    level without a number or a duration sends 100.
    """
    load = scenario.load
    if scenario.workload.trace is not None and load.concurrency is None:
        return _trace_levels(scenario, read_trace(Path(scenario.workload.trace)))
    closed = [Load(concurrency=users) for users in load.concurrency_levels]
    arrivals = {name: getattr(load, name) for name in ("arrivals", "burstiness", "ramp_s")}
    opened = [Load(rate_per_s=rate_per_s, **arrivals) for rate_per_s in load.rate_per_s or ()]
    levels = [_level(scenario, index, each) for index, each in enumerate((*closed, *opened))]
    as_sessions = session_levels(scenario)
    return levels if as_sessions is None else [as_sessions(level) for level in levels]


def _level(scenario: Scenario, index: int, load: Load, most: int | None = None) -> LevelSpec:
    """A level with the scenario's limits; `most`: requests of its trace."""
    given = scenario.load
    num_requests = given.requests_per_level
    if most is not None:
        num_requests = min(most, num_requests or most)
    elif num_requests is None and given.duration_s is None:
        num_requests = DEFAULT_OPEN_LOOP_REQUESTS
        if load.concurrency is not None:
            num_requests = closed_loop_requests(load.concurrency, given.requests_per_user)
    spec = LevelSpec(
        index=index,
        load=load,
        num_requests=num_requests,
        duration_s=given.duration_s,
        warmup_requests=given.warmup_requests,
        max_in_flight=given.max_in_flight,
    )
    return with_start(spec)


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
        if workload.begins_within:  # the warm-up primes the cache, once for each lane
            primed = max(spec.warmup_requests, spec.concurrency or 0)
            spec = replace(spec, warmup_requests=primed, start_requests=0)
        return of_sessions(spec, turns_here, num_sessions=count, max_sessions=load.max_sessions)

    return as_sessions


def _trace_levels(scenario: Scenario, trace: Trace) -> list[LevelSpec]:
    """A level for each speed (1 is as recorded), or for each given mean rate."""
    load = scenario.load
    rates = load.rate_per_s or [speed * trace.rate_per_s for speed in load.speed]
    loads = (Load(rate_per_s=rate_per_s, arrivals="trace") for rate_per_s in rates)
    most = len(trace.requests)
    return [_level(scenario, index, load, most) for index, load in enumerate(loads)]


def in_order(levels: Sequence[LevelSpec]) -> NextLevel:
    """The rule that takes the levels one after the other, leaving out those that are finished."""

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        done = {level.index for level in finished}
        return next((level for level in levels if level.index not in done), None)

    return next_level
