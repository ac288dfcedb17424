"""A sweep: level after level against one target, each saved when it ends.

What cuts a level short ends the sweep after it; a cancellation in mid-level loses that level only,
and the run resumes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lmi_bench.core.clock import is_virtual
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.records import LevelRun
from lmi_bench.core.run_store import RunStore
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.level_runner import LevelRunner, Progress, StopRules
from lmi_bench.loadgen.run.levels import NextLevel, in_order
from lmi_bench.loadgen.run.target import Target, resolve

if TYPE_CHECKING:
    from lmi_bench.loadgen.run.worker_pool import WorkerPool
    from lmi_bench.loadgen.watch.server_watch import ServerWatch

__all__ = ["Progress", "StopRules", "Summarise", "SweepResult", "run_sweep"]

Summarise = Callable[[LevelRun], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The lines of all finished levels, and the rule that ended the sweep early, if one did."""

    levels: list[dict[str, Any]]
    stopped_by: str | None


async def run_sweep(
    levels: Sequence[LevelSpec] | NextLevel,
    target: Target,
    store: RunStore | None,
    *,
    prompts: Prompts,
    summarise: Summarise,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_level: Callable[[LevelRun, dict[str, Any]], None] = lambda _run, _line: None,
    stop_rules: StopRules | None = None,
    timeout_s: float | None = 60.0,
    spacing_s: float = 0.0,
    seed: int = 0,
    workers: WorkerPool | None = None,
    server: ServerWatch | None = None,
) -> SweepResult:
    """Run the levels that the store does not hold yet; returns the lines of all.

    levels      a list, or a rule that picks the next level from the finished ones' lines
    store       where each level is saved when it ends; None keeps nothing on disk
    summarise   makes a level's line; `level`, `attempt` and `stopped_by` are set if it does not
    on_level    called when a level is saved
    spacing_s   seconds between the first sends of a closed loop's users
    workers     send the levels that one process cannot, or all; they open their own target
    server      asked for its own view of each level

    Raises EngineError and other LmiBenchErrors of the target itself; a request's failure is a
    record. Cancelled in mid-level it leaves the levels before it.
    """
    rules = stop_rules or StopRules()
    next_level = levels if callable(levels) else in_order(levels)
    lines: list[dict[str, Any]] = list(store.levels) if store is not None else []
    stopped_by = _stopped_by(lines) if rules.ends_sweep else None
    while stopped_by is None and (spec := next_level(lines)) is not None:
        attempt = store.next_attempt(spec.index) if store is not None else 1
        started_at = datetime.now(UTC)
        # A search looks at each answer as it ends, in this process; caps count what is in flight
        # here.
        capped = spec.max_in_flight is not None or spec.max_sessions is not None
        capped = capped or resolve(target).max_connections is not None
        watched = rules.watch(spec) is not None or capped
        count = 1 if workers is None or watched else workers.count_for(spec, lines)
        try:
            if workers is not None and count > 1:
                run = await workers.run_level(
                    spec,
                    attempt,
                    count,
                    rules=rules,
                    on_progress=on_progress,
                    timeout_s=timeout_s,
                    spacing_s=spacing_s,
                    seed=seed,
                    before_start=None if server is None else server.begin,
                )
            else:
                runner = LevelRunner(spec, target, prompts, rules, on_progress, timeout_s)
                run = await runner.run(
                    attempt,
                    spacing_s=spacing_s,
                    seed=seed,
                    before_start=None if server is None else server.begin,
                )
            if server is not None:
                await server.end()
                run = replace(run, server=server.summary(run.records))
        except BaseExceptionGroup as group:  # a task group wraps even a single error
            raise _first_error(group) from group
        finally:
            if server is not None:
                server.abandon()
        line = {
            "level": spec.index,
            "attempt": attempt,
            "stopped_by": run.stopped_by,
            **summarise(run),
            **_by_the_wall_clock(started_at),
        }
        if store is not None:
            store.append_level(run.records, line)
        lines.append(line)
        on_level(run, line)
        stopped_by = _stopped_by(lines) if rules.ends_sweep else None
    return SweepResult(lines, stopped_by)


def _by_the_wall_clock(started_at: datetime) -> dict[str, str]:
    """When a level ran, warm-up included, for looking it up in other logs; none in virtual time."""
    if is_virtual():
        return {}
    times = {"started_at": started_at, "ended_at": datetime.now(UTC)}
    return {name: at.isoformat(timespec="milliseconds") for name, at in times.items()}


def _stopped_by(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The rule that ended the sweep with its last level; a level cut by its duration is whole."""
    reason = lines[-1].get("stopped_by") if lines else None
    return None if reason in (None, "duration", "decided") else str(reason)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error worth showing: a known failure if there is one, else the first of all."""
    found: list[BaseException] = []

    def walk(exc: BaseException) -> None:
        if isinstance(exc, BaseExceptionGroup):
            for part in exc.exceptions:
                walk(part)
        else:
            found.append(exc)

    walk(group)
    return next((exc for exc in found if isinstance(exc, LmiBenchError)), found[0])
