"""Which level comes next: a fixed list, or whatever a rule makes of the levels before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lmi_bench.core.level import Level, NextLevel
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import DEFAULT_OPEN_LOOP_REQUESTS, Scenario
from lmi_bench.core.traces import Trace, read_trace
from lmi_bench.core.workload import LevelSpec, of_sessions
from lmi_bench.loadgen.prompts.dialogues import num_turns


def levels_of(scenario: Scenario) -> list[LevelSpec]:
    """The levels that a scenario names, in its order.

    A closed-loop level sends requests_per_level, or concurrency * requests_per_user; an open-loop
    level that names neither a number nor a duration sends 100.
    """
    load = scenario.load
    if scenario.workload.trace is not None and load.concurrency is None:
        return _trace_levels(scenario, read_trace(Path(scenario.workload.trace)))
    timed = load.duration_s is not None
    levels: list[LevelSpec] = []
    for concurrency in load.concurrency_levels:
        num_requests = load.requests_per_level
        if num_requests is None and not timed:
            num_requests = concurrency * load.requests_per_user
        levels.append(
            LevelSpec(
                index=len(levels),
                load=Load(concurrency=concurrency),
                num_requests=num_requests,
                duration_s=load.duration_s,
                warmup_requests=load.warmup_requests,
                max_in_flight=load.max_in_flight,
            )
        )
    for rate_per_s in load.rate_per_s or ():
        num_requests = load.requests_per_level
        if num_requests is None and not timed:
            num_requests = DEFAULT_OPEN_LOOP_REQUESTS
        levels.append(
            LevelSpec(
                index=len(levels),
                load=Load(
                    rate_per_s=rate_per_s,
                    arrivals=load.arrivals,
                    burstiness=load.burstiness,
                    ramp_s=load.ramp_s,
                ),
                num_requests=num_requests,
                duration_s=load.duration_s,
                warmup_requests=load.warmup_requests,
                max_in_flight=load.max_in_flight,
            )
        )
    as_sessions = session_levels(scenario)
    return levels if as_sessions is None else [as_sessions(level) for level in levels]


def session_levels(scenario: Scenario) -> Callable[[LevelSpec], LevelSpec] | None:
    """What makes a level one of conversations; None where requests stand alone.

    A level holds sessions_per_level of them; else as many as give requests_per_level, or
    requests_per_user for each user.
    """
    load = scenario.load
    if not scenario.workload.has_sessions:
        return None
    turns = num_turns(scenario.workload, scenario.seed)

    def as_sessions(spec: LevelSpec) -> LevelSpec:
        count = load.sessions_per_level
        by_user = load.requests_per_level is None and load.duration_s is None
        if count is None and spec.concurrency is not None and by_user:
            count = spec.concurrency * load.requests_per_user
        return of_sessions(spec, turns, num_sessions=count, max_sessions=load.max_sessions)

    return as_sessions


def _trace_levels(scenario: Scenario, trace: Trace) -> list[LevelSpec]:
    """A level for each speed (1 is as recorded), or each mean rate that is asked for."""
    load = scenario.load
    rates = load.rate_per_s or [speed * trace.rate_per_s for speed in load.speed]
    most = len(trace.requests)
    return [
        LevelSpec(
            index=index,
            load=Load(rate_per_s=rate_per_s, arrivals="trace"),
            num_requests=min(most, load.requests_per_level or most),
            duration_s=load.duration_s,
            warmup_requests=load.warmup_requests,
            max_in_flight=load.max_in_flight,
        )
        for index, rate_per_s in enumerate(rates)
    ]


def in_order(levels: Sequence[LevelSpec]) -> NextLevel:
    """The rule that takes the levels one after the other, leaving out those that are finished."""

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        done = {level.index for level in finished}
        return next((level for level in levels if level.index not in done), None)

    return next_level
