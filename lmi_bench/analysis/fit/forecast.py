"""Forecasts one load: figures with 80 % intervals, what limits it, and why latencies are withheld.

`cells` predicts equal requests; others are simulated by the engine's own scheduler.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np

from lmi_bench.analysis.fit.fit import Fit
from lmi_bench.analysis.fit.uncertainty import FIGURE_METRICS, Estimate, Uncertainty, shown_value, under_load
from lmi_bench.analysis.level.cells import predict_cell, regime_of
from lmi_bench.analysis.level.simulator import Pool, simulate_level
from lmi_bench.analysis.level.two_pools import simulate_pools
from lmi_bench.analysis.model.capacity import planned_model_for, scheduler_config_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import ROUTED_S, Setup
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.level import LATENCY_KEY, Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord, counted
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.router import Router

_SIMULATED_METRICS: Final[dict[str, Metric]] = {**FIGURE_METRICS, "ttft_p90_ms": "ttft_mean_s"}
_PARTS, _STUDENT = 10, 1.383  # parts of a level, and the 90 % quantile for their mean
CAUSES = {row["cause"]: row["limits"] for row in read_rows("causes.csv", "analysis") if row["limits"]}


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted figures of one load, and their uncertainty.

    figures        estimates by key; means unless the key says p90; None where withheld, where too
                   few requests were simulated, and for the TPOT of answers of one token
    cell, regime   of equal requests; None where they are simulated
    requests       simulated ones; errors: those that failed
    prefix_hit     share of the prompt tokens found in the prefix cache, 0 to 1; None without one
    """

    load: Load
    figures: Mapping[str, Estimate | None]
    uncertainty: Uncertainty
    cell: MeasuredLevel | None = None
    regime: str | None = None
    requests: int = 0
    errors: int = 0
    prefix_hit: Estimate | None = None

    @property
    def load_name(self) -> str:
        """Users or rate, for display."""
        rate, digits = self.load.rate_per_s, ".6g" if self.regime else ".4g"
        name = f"{self.load.concurrency}" if rate is None else f"{rate:{digits}}/s"
        is_recorded = self.load.arrivals == "trace" and not self.load.sessions
        return f"trace, {name}" if is_recorded else name

    def to_json(self) -> dict[str, Any]:
        """The forecast as one object; intervals as predicted, low, high."""
        more: dict[str, Any] = {"requests": self.requests, "errors": self.errors}
        if self.regime is not None:
            more = {"regime": self.regime, "cause": CAUSES[self.regime]}
        if self.prefix_hit is not None:
            more["prefix_hit_share"] = self.prefix_hit.to_json()
        sure = self.uncertainty
        figures = {**self.figures, "capacity_tokens_per_s": sure.capacity_tokens_per_s}
        return {
            "concurrency": self.load.concurrency,
            "rate_per_s": self.load.rate_per_s,
            **more,
            "load_share": sure.load_share,
            "withheld": sure.withheld,
            **{key: None if each is None else each.to_json() for key, each in figures.items()},
        }


def forecast(fit: Fit, cell: MeasuredLevel) -> Forecast:
    """The forecast of a load. Raises InputError where it cannot run."""
    sure = Uncertainty.of(fit, cell)
    predicted = predict_cell(fit.profile, cell)
    values: dict[str, float | None] = {
        key: shown_value(metric, predicted.value(metric)) for key, metric in FIGURE_METRICS.items()
    }
    if cell.output_tokens == 1:
        values["tpot_ms"] = None
    return Forecast(
        cell.load,
        figures=_figures(sure, values, (cell.rate_per_s or 0.0) * cell.output_tokens),
        uncertainty=sure,
        cell=cell,
        regime=regime_of(fit.profile, cell, predict_cell(fit.profile, cell, smooth=True)),
    )


def _figures(sure: Uncertainty, values: Mapping[str, float | None], offered: float) -> dict[str, Estimate | None]:
    """The values, by key, with their intervals; None where a latency is withheld or missing.

    offered  output tokens each second that arrive: the throughput of a stable queue; 0: unknown
    """
    if offered and sure.withheld is None:
        values = {**values, "throughput_tokens_per_s": offered}
    return {key: sure.around(_SIMULATED_METRICS[key], value) if value else None for key, value in values.items()}


def simulated_forecast(
    setup: MeasuredLevel,
    profile: EngineProfile,
    spec: LevelSpec,
    request: Callable[[int], PlannedRequest],
    *,
    total_tokens: int,
    seed: int,
    router: Router,
    prefix_caching: bool = False,
) -> Forecast:
    """The forecast of one level of unequal requests. Raises InputError for what cannot run.

    setup           the copies that serve, or both pools
    total_tokens    tokens of the longest request, input and output
    router          between copies; a pool's next worker is the one with the fewest requests
    prefix_caching  the engine finds equal beginnings of the requests' token ids; not with pools
    """
    own = pool_of(setup.setup, setup.replicas, profile, total_tokens)
    outside = profile.parameters.request_overhead_s
    if setup.prefill is not None:
        first = pool_of(setup.prefill.setup, setup.prefill.workers, profile, total_tokens, prompts_alone=True)
        run = simulate_pools(
            spec,
            request,
            first,
            own,
            setup.prefill.transfer_s,
            seed=seed,
            overhead_s=max(ROUTED_S, outside),
            links=setup.prefill.setup.devices,
        )
    else:
        run = simulate_level(
            spec,
            request,
            replace(own.config, prefix_caching=prefix_caching),
            own.step_time,
            seed=seed,
            replicas=own.workers,
            router=router,
            speculation=own.speculation,
            overhead_s=outside,
        )
    level = summarise_level(run)
    planned = map(request, range(spec.num_requests or level.sent))
    lengths = [(each.input_tokens, each.output_tokens) for each in planned]
    hit = hit_share(counted(run.records)) if prefix_caching else None
    sure = _uncertainty(setup, profile, spec, lengths, 0.0 if hit is None else hit.value)
    offered = (spec.rate_per_s or 0.0) * fmean(output for _, output in lengths)
    values = {key: _value(level, key) for key in _SIMULATED_METRICS}
    return Forecast(
        spec.load,
        figures=_figures(sure, values, offered),
        uncertainty=sure,
        requests=level.sent,
        errors=level.failed,
        prefix_hit=hit,
    )


def pool_of(
    setup: Setup, workers: int, profile: EngineProfile, total_tokens: int, *, prompts_alone: bool = False
) -> Pool:
    """Equal workers of a set-up for requests of at most so many tokens."""
    config = scheduler_config_for(setup, profile, total_tokens, prompts_alone=prompts_alone)
    return Pool(workers, config, planned_model_for(setup, profile), setup.speculation)


def hit_share(records: Sequence[RequestRecord]) -> Estimate:
    """Share of prompt tokens that a prefix cache holds, by the means of ten parts in order of time.

    The 80 % interval is Student's with nine degrees of freedom; it covers the traffic, not the
    size of the cache, which the profile knows to about 10 %.
    """
    pairs = [(each.exchange.cached_tokens, each.input_tokens) for each in records]
    cached, tokens = np.array([pair for pair in pairs if pair[0] is not None]).reshape(-1, 2).T
    value = float(cached.sum() / tokens.sum()) if tokens.sum() else 0.0
    if len(tokens) < 2 * _PARTS:
        return Estimate(value, 0.0, 1.0)
    starts = [len(tokens) * part // _PARTS for part in range(_PARTS)]
    shares = np.add.reduceat(cached, starts) / np.add.reduceat(tokens, starts)
    half = _STUDENT * stdev(shares.tolist()) / _PARTS**0.5
    return Estimate(value, max(0.0, value - half), min(1.0, value + half))


def _uncertainty(
    setup: MeasuredLevel, profile: EngineProfile, spec: LevelSpec, lengths: Sequence[tuple[int, int]], prefix_hit: float
) -> Uncertainty:
    """The uncertainty of requests of the mean lengths and cached tokens at the same load."""
    input_tokens = max(1, round(fmean(prompt for prompt, _ in lengths)))
    mean = replace(
        setup,
        input_tokens=input_tokens,
        output_tokens=max(1, round(fmean(output for _, output in lengths))),
        cached_tokens=min(round(prefix_hit * input_tokens), input_tokens - 1),
    )
    load = under_load(mean, profile, spec.load)
    return Uncertainty.of(profile, load, spread=len(set(lengths)) > 1)


def _value(level: Level, key: str) -> float | None:
    """A figure of a level in the unit of its key."""
    if key == "throughput_tokens_per_s":
        return level.throughput_tokens_per_s
    metric = next(m for m, name in LATENCY_KEY.items() if name == key.replace("_p90", ""))
    return level.of(metric).value("p90" if "_p90" in key else "mean")
