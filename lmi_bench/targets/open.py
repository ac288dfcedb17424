"""Opens the target that a scenario names.

Engines and the planner are imported only for targets that need them.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import ENGINE_TARGET, Scenario
from lmi_bench.targets.applies import idle_beside_engine, kind_of, refuse_idle
from lmi_bench.targets.bench import NO_ACCESS, Access, Bench

if TYPE_CHECKING:
    from lmi_bench.engine.chrome_trace import ChromeTrace


def open_bench(
    scenario: Scenario, access: Access = NO_ACCESS, listener: Listener = SILENT, *, trace: "ChromeTrace | None" = None
) -> Bench:
    """The scenario's target, checked and loaded; raises InputError if that fails.

    access  credentials for an endpoint
    trace   filled by an engine in this process
    """
    refuse_idle(kind_of(scenario.target), ["step_trace"] if trace else [], scenario.engine)
    match kind_of(scenario.target):
        case "simulated":
            from lmi_bench.targets.simulated import simulated_bench

            bench = simulated_bench(scenario, trace)
        case "sagemaker":
            from lmi_bench.targets.sagemaker import sagemaker_bench

            bench = sagemaker_bench(scenario, access, listener)
        case "url":
            from lmi_bench.targets.http import http_bench

            bench = http_bench(scenario, access, listener)
        case _ if scenario.target == ENGINE_TARGET:
            from lmi_bench.targets.bundled import engine_bench

            bench = engine_bench(scenario, listener, trace)
        case _:
            raise InputError(
                f"target {scenario.target!r} is unknown; write engine, sim:INSTANCE "
                "(such as sim:ml.g5.2xlarge), a URL (http://host:port) or sagemaker:NAME"
            )
    return replace(bench, notes=(*bench.notes, *idle_beside_engine(scenario)))
