"""Forecasts of one load: figures with 80 % intervals, what binds, and why it is silent.

Like requests are followed by `cells`; mixes, drawn lengths, traces and shared prefixes, which that
does not follow, by the engine's own scheduler, step by step in predicted time. How sure either is
says `uncertainty`, by the load that it stands for: requests of the mean lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lmi_bench.analysis.fit.fit import Fit
from lmi_bench.analysis.fit.uncertainty import Estimate, Uncertainty, under_load
from lmi_bench.analysis.level.cells import MeasuredLevel, Metric, predict_cell, regime_of
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.capacity import planned_model_for, scheduler_config_for
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.router import Router

_KEYS: Final[dict[str, Metric]] = {
    "throughput_tokens_per_s": "throughput_tokens_per_s",
    "latency_ms_per_token": "latency_mean_s_per_token",
    "latency_p90_ms_per_token": "latency_p90_s_per_token",
    "tpot_ms": "tpot_mean_s",
    "ttft_ms": "ttft_mean_s",
}
_TTFT_P90: Final = "ttft_p90_ms"
_SIMULATED_KEYS: Final[dict[str, Metric]] = {**_KEYS, _TTFT_P90: "ttft_mean_s"}
CAUSES = {
    "bandwidth": "reading weights and cache from memory",
    "compute": "arithmetic",
    "host": "the host: launching steps and keeping sequences",
    "link": "the link between the devices",
    "kv_memory": "KV-cache memory: more is asked for at once than sequences fit",
    "batch_limit": "the engine's limit on running sequences (max_rolling_batch_size)",
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """One load foretold.

    figures     by key, means unless the key says p90; None where withheld
    capacity    output tokens each second with every slot busy
    load_share  of an open loop, offered over capacity
    """

    cell: MeasuredLevel
    regime: str
    figures: Mapping[str, Estimate | None]
    capacity_tokens_per_s: Estimate
    load_share: float | None
    withheld: str | None

    def to_json(self) -> dict[str, Any]:
        """The forecast as one object; intervals as predicted, low, high."""
        content: dict[str, Any] = {
            "concurrency": self.cell.concurrency or None,
            "rate_per_s": self.cell.rate_per_s,
            "regime": self.regime,
            "cause": CAUSES[self.regime],
            "load_share": self.load_share,
            "withheld": self.withheld,
        }
        capacity = {"capacity_tokens_per_s": self.capacity_tokens_per_s}
        return {**content, **_figures_json({**self.figures, **capacity})}


def _figures_json(figures: Mapping[str, Estimate | None]) -> dict[str, Any]:
    return {key: None if each is None else each.to_json() for key, each in figures.items()}


def forecast(fit: Fit, cell: MeasuredLevel) -> Forecast:
    """What is to be expected of the load. Raises InputError where it cannot run."""
    sure = Uncertainty.of(fit, cell, list(_KEYS.values()))
    predicted = predict_cell(fit.profile, cell)
    figures: dict[str, Estimate | None] = {}
    for key, metric in _KEYS.items():
        figure = sure.factors[metric].around(predicted.value(metric))
        if metric != "throughput_tokens_per_s":
            figures[key] = None if sure.withheld else figure.in_ms()
        else:
            figures[key] = figure
    return Forecast(
        cell=cell,
        regime=regime_of(fit.profile, cell, predict_cell(fit.profile, cell, smooth=True)),
        figures=figures,
        capacity_tokens_per_s=sure.capacity_tokens_per_s,
        load_share=sure.load_share,
        withheld=sure.withheld,
    )


@dataclass(frozen=True, slots=True)
class SimulatedForecast:
    """One load foretold by simulation; a figure is None where it is withheld or rests on too few
    requests."""

    load: str
    concurrency: int | None
    rate_per_s: float | None
    requests: int
    errors: int
    figures: Mapping[str, Estimate | None]
    capacity_tokens_per_s: Estimate
    load_share: float | None
    withheld: str | None

    def to_json(self) -> dict[str, Any]:
        """The forecast as one object; intervals as predicted, low, high."""
        content: dict[str, Any] = {
            "concurrency": self.concurrency,
            "rate_per_s": self.rate_per_s,
            "requests": self.requests,
            "errors": self.errors,
            "load_share": self.load_share,
            "withheld": self.withheld,
        }
        capacity = {"capacity_tokens_per_s": self.capacity_tokens_per_s}
        return {**content, **_figures_json({**self.figures, **capacity})}


def simulated_forecast(
    setup: MeasuredLevel,
    profile: EngineProfile,
    spec: LevelSpec,
    request: Callable[[int], PlannedRequest],
    *,
    total_tokens: int,
    seed: int,
    router: Router,
) -> SimulatedForecast:
    """One level of unlike requests foretold. Raises InputError for what cannot run.

    setup         what serves; its cached tokens are those that every prompt begins with
    total_tokens  of the longest request, input and output
    """
    line = _simulated_line(setup, profile, spec, request, total_tokens, seed, router)
    requests = [request(number) for number in range(spec.num_requests or line["requests"])]
    sure = _uncertainty(setup, profile, spec, requests)
    figures: dict[str, Estimate | None] = {}
    for key, metric in _SIMULATED_KEYS.items():
        value = _value(line, key)
        silent = sure.withheld is not None and metric != "throughput_tokens_per_s"
        figures[key] = None if not value or silent else sure.factors[metric].around(value)
    load = f"{spec.concurrency}" if spec.concurrency is not None else f"{spec.rate_per_s:.4g}/s"
    return SimulatedForecast(
        load=load if spec.load.arrivals != "trace" else f"trace, {load}",
        concurrency=spec.concurrency,
        rate_per_s=spec.rate_per_s,
        requests=int(line["requests"]),
        errors=int(line["errors"]),
        figures=figures,
        capacity_tokens_per_s=sure.capacity_tokens_per_s,
        load_share=sure.load_share,
        withheld=sure.withheld,
    )


def _uncertainty(
    setup: MeasuredLevel,
    profile: EngineProfile,
    spec: LevelSpec,
    requests: Sequence[PlannedRequest],
) -> Uncertainty:
    """Of requests of the mean lengths at the same load."""
    input_tokens = max(1, round(_mean([each.input_tokens for each in requests])))
    mean = replace(
        setup,
        input_tokens=input_tokens,
        output_tokens=max(1, round(_mean([each.output_tokens for each in requests]))),
        cached_tokens=min(setup.cached_tokens, input_tokens - 1),
    )
    load = under_load(mean, profile, concurrency=spec.concurrency, rate_per_s=spec.rate_per_s)
    lengths = {(each.input_tokens, each.output_tokens) for each in requests}
    return Uncertainty.of(profile, load, list(_KEYS.values()), spread=len(lengths) > 1)


def _mean(values: Sequence[int]) -> float:
    return math.fsum(values) / len(values)


def _simulated_line(
    setup: MeasuredLevel,
    profile: EngineProfile,
    spec: LevelSpec,
    request: Callable[[int], PlannedRequest],
    total_tokens: int,
    seed: int,
    router: Router,
) -> Mapping[str, Any]:
    """The simulated level as the line that a sweep would write."""
    config = scheduler_config_for(setup.setup, profile, total_tokens)
    if setup.cached_tokens:
        config = replace(config, prefix_caching=True)
    model = planned_model_for(setup.setup, profile)
    return summarise_level(
        simulate_level(
            spec,
            request,
            config,
            model,
            seed=seed,
            replicas=setup.replicas,
            router=router,
            speculation=setup.setup.speculation,
            shared_tokens=setup.cached_tokens,
        )
    ).to_json()


def _value(line: Mapping[str, Any], key: str) -> float | None:
    """A figure of a level's line in the unit of its key."""
    if key == "throughput_tokens_per_s":
        return float(line[key])
    statistic = "p90" if "_p90" in key else "mean"
    found = line[key.replace("_p90", "")][statistic]
    return None if found is None else float(found)
