"""The target that a scenario names, opened.

Engines and the planner are loaded where a target is one: a URL's first request waits for none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import ENGINE_TARGET, SAGEMAKER_PREFIX, SIMULATED_PREFIX, Scenario
from lmi_bench.targets.access import NO_ACCESS, Access
from lmi_bench.targets.applies import idle_beside_engine, kind_of, refuse_idle
from lmi_bench.targets.bench import Bench

if TYPE_CHECKING:
    from lmi_bench.engine.chrome_trace import ChromeTrace


def open_bench(
    scenario: Scenario,
    access: Access = NO_ACCESS,
    listener: Listener = SILENT,
    *,
    trace: ChromeTrace | None = None,
) -> Bench:
    """The scenario's target, checked and loaded; raises InputError where it cannot be.

    access  what an endpoint wants to see before it answers
    trace   written by the engine, where it runs in this process
    """
    refuse_idle(kind_of(scenario.target), ["step_trace"] if trace else [], scenario.engine)
    bench = _open(scenario, access, listener, trace)
    return replace(bench, notes=(*bench.notes, *idle_beside_engine(scenario)))


def _open(
    scenario: Scenario, access: Access, listener: Listener, trace: ChromeTrace | None
) -> Bench:
    target = scenario.target
    if target == ENGINE_TARGET:
        from lmi_bench.targets.bundled import engine_bench

        return engine_bench(scenario, listener, trace)
    if target.startswith(SIMULATED_PREFIX):
        from lmi_bench.targets.simulated import simulated_bench

        return simulated_bench(scenario, trace)
    if target.startswith(SAGEMAKER_PREFIX):
        from lmi_bench.targets.sagemaker import sagemaker_bench

        return sagemaker_bench(scenario, access, listener)
    if "://" in target:
        from lmi_bench.targets.http import http_bench

        return http_bench(scenario, access, listener)
    raise InputError(
        f"target {target!r} is not understood; write engine, sim:INSTANCE "
        "(such as sim:ml.g5.2xlarge), a URL (http://host:port) or sagemaker:NAME"
    )
