"""Levels of unlike requests predicted: the engine's own scheduler, step by step in predicted time.

For mixes, drawn lengths, traces and shared prefixes, which closed forms do not follow. The interval
comes from profiles drawn from the uncertainty of the constants, and from what the model misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmi_bench.analysis.fit.fit import Z80, Estimate
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.capacity import planned_model_for, scheduler_config_for
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.speculation import Speculation, SpeculativeModel
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.scenario import Scenario
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.loadgen.prompts.prompts import NoText
from lmi_bench.loadgen.run.levels import levels_of
from lmi_bench.models.shape import ModelShape
from lmi_bench.targets.parts import make_router
from lmi_bench.targets.prompts import longest_request, make_prompts

Line = Mapping[str, Any]
_DRAWS = 8
_LEAST_LOG_SD = 0.03
_KEYS = {
    "throughput_tokens_per_s": None,
    "latency_ms_per_token": "mean",
    "latency_p90_ms_per_token": "p90",
    "tpot_ms": "mean",
    "ttft_ms": "mean",
    "ttft_p90_ms": "p90",
}
_SOURCE = {"latency_p90_ms_per_token": "latency_ms_per_token", "ttft_p90_ms": "ttft_ms"}


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of the model under a profile, and what is the same of all copies.

    shared_tokens  with which every prompt begins; an engine with prefix caching computes them once
    """

    shape: ModelShape
    instance: Instance
    tensor_parallel: int
    dtype: str
    kv_dtype: str | None
    speculation: Speculation | None
    replicas: int
    router: str
    shared_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedForecast:
    """One load foretold by simulation; None where too few requests support a figure."""

    load: str
    concurrency: int | None
    rate_per_s: float | None
    requests: int
    errors: int
    figures: Mapping[str, Estimate | None]

    def to_json(self) -> dict[str, Any]:
        """The forecast as one object; intervals as predicted, low, high."""
        content: dict[str, Any] = {
            "concurrency": self.concurrency,
            "rate_per_s": self.rate_per_s,
            "requests": self.requests,
            "errors": self.errors,
        }
        for key, figure in self.figures.items():
            content[key] = (
                None
                if figure is None
                else {"predicted": figure.value, "low": figure.low, "high": figure.high}
            )
        return content


def simulate_forecasts(
    copy: Copy,
    profile: EngineProfile,
    scenario: Scenario,
    *,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> list[SimulatedForecast]:
    """Each load of the scenario foretold. Raises InputError for what cannot run.

    progress  called with the levels that are done and all levels
    """
    total = longest_request(scenario)
    prompts = make_prompts(scenario, NoText(), None, "")
    forecasts = []
    levels = levels_of(scenario)
    for number, given in enumerate(levels):
        progress(number, len(levels))
        spec = replace(given, warmup_requests=0)

        def request(number: int, spec: LevelSpec = spec) -> PlannedRequest:
            return prompts.request(spec, number)

        def line_of(world: EngineProfile, spec: LevelSpec = spec, take: Any = request) -> Line:
            return _line(copy, world, spec, take, total, scenario.seed)

        forecasts.append(_forecast(profile, spec, line_of))
    return forecasts


def _line(
    copy: Copy,
    profile: EngineProfile,
    spec: LevelSpec,
    request: Callable[[int], PlannedRequest],
    total_tokens: int,
    seed: int,
) -> Line:
    """The simulated level as the line that a sweep would write."""
    common = (copy.shape, copy.instance, copy.tensor_parallel, copy.dtype, profile)
    more: dict[str, Any] = {"kv_dtype": copy.kv_dtype, "speculation": copy.speculation}
    config = scheduler_config_for(*common, total_tokens, **more)
    if copy.shared_tokens:
        config = replace(config, prefix_caching=True)
    model = planned_model_for(*common, **more)
    spoken = copy.speculation
    return summarise_level(
        simulate_level(
            spec,
            request,
            config,
            model.real_steps if isinstance(model, SpeculativeModel) else model,
            seed=seed,
            replicas=copy.replicas,
            router=make_router(copy.router),
            draft_tokens=0 if spoken is None else spoken.draft_tokens,
            draft_acceptance=0.0 if spoken is None else spoken.acceptance,
            shared_tokens=copy.shared_tokens,
        )
    )


def _forecast(
    profile: EngineProfile, spec: LevelSpec, line_of: Callable[[EngineProfile], Line]
) -> SimulatedForecast:
    said = line_of(profile)
    others = [line_of(world) for world in profile.draws(_DRAWS, seed=0)]
    figures: dict[str, Estimate | None] = {}
    for key in _KEYS:
        value = _value(said, key)
        drawn = [_value(line, key) for line in others]
        logs = [math.log(each) for each in drawn if each]
        if not value or not logs:
            figures[key] = None
            continue
        sd = math.hypot(float(np.std(logs)), max(profile.residual_log_sd, _LEAST_LOG_SD))
        factor = math.exp(Z80 * sd)
        figures[key] = Estimate(value, value / factor, value * factor)
    load = f"{spec.concurrency}" if spec.concurrency is not None else f"{spec.rate_per_s:.4g}/s"
    return SimulatedForecast(
        load if spec.load.arrivals != "trace" else f"trace, {load}",
        spec.concurrency,
        spec.rate_per_s,
        int(said["requests"]),
        int(said["errors"]),
        figures,
    )


def _value(line: Line, key: str) -> float | None:
    statistic = _KEYS[key]
    found = line[_SOURCE.get(key, key)]
    value = found if statistic is None else found[statistic]
    return None if value is None else float(value)
