"""The levels of a scenario of unlike requests, foretold one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lmi_bench.analysis.fit.forecast import SimulatedForecast, simulated_forecast
from lmi_bench.analysis.level.cells import MeasuredLevel
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.scenario import Scenario
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.router import make_router
from lmi_bench.loadgen.prompts.prompts import NoText
from lmi_bench.loadgen.run.levels import levels_of
from lmi_bench.targets.prompts import longest_request, make_prompts


def simulate_forecasts(
    setup: MeasuredLevel,
    profile: EngineProfile,
    scenario: Scenario,
    *,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> list[SimulatedForecast]:
    """Each load of the scenario foretold. Raises InputError for what cannot run.

    progress  called with the levels that are done and all levels
    """
    prompts = make_prompts(scenario, NoText(), None, "")
    forecasts = []
    levels = levels_of(scenario)
    for number, given in enumerate(levels):
        progress(number, len(levels))
        spec = replace(given, warmup_requests=0)

        def request(number: int, spec: LevelSpec = spec) -> PlannedRequest:
            return prompts.request(spec, number)

        forecasts.append(
            simulated_forecast(
                setup,
                profile,
                spec,
                request,
                total_tokens=longest_request(scenario),
                seed=scenario.seed,
                router=make_router(scenario.engine.router),
            )
        )
    return forecasts
