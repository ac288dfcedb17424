"""A profile's forecast of one load: figures with 80 % intervals, regime, why it is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmi_bench.analysis.fit.fit import Estimate, Fit
from lmi_bench.analysis.fit.validation import is_silent, load_share
from lmi_bench.analysis.fleet.operating_point import LATENCY_LOAD_LIMIT
from lmi_bench.analysis.level.cells import (
    Cell,
    Metric,
    capacity_tokens_per_s,
    predict_cell,
    regime_of,
    slots_for,
)
from lmi_bench.core.units import s_to_ms

_KEYS: dict[str, tuple[Metric, bool]] = {
    "throughput_tokens_per_s": ("throughput_tokens_per_s", False),
    "latency_ms_per_token": ("latency_mean_s_per_token", True),
    "latency_p90_ms_per_token": ("latency_p90_s_per_token", True),
    "tpot_ms": ("tpot_mean_s", True),
    "ttft_ms": ("ttft_mean_s", True),
}
_LASTING_REQUESTS = 1 << 20  # of one copy: more than any cache holds
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

    cell: Cell
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
        for key, figure in {
            **self.figures,
            "capacity_tokens_per_s": self.capacity_tokens_per_s,
        }.items():
            content[key] = (
                None
                if figure is None
                else {"predicted": figure.value, "low": figure.low, "high": figure.high}
            )
        return content


def forecast(fit: Fit, cell: Cell) -> Forecast:
    """What is to be expected of the load. Raises InputError where it cannot run.

    Capacity and silence are of a load that lasts, however few requests the cell has.
    """
    lasting = replace(cell, num_requests=max(cell.num_requests, _LASTING_REQUESTS * cell.replicas))
    metrics = [metric for metric, _ in _KEYS.values()]
    estimates = fit.estimates(cell, metrics)
    silent = is_silent(fit, lasting)
    figures: dict[str, Estimate | None] = {}
    for key, (metric, in_ms) in _KEYS.items():
        figure = estimates[metric]
        if in_ms:
            figure = Estimate(*(s_to_ms(v) for v in (figure.value, figure.low, figure.high)))
        figures[key] = None if silent and in_ms else figure
    share = None if cell.rate_per_s is None else load_share(fit, lasting)
    return Forecast(
        cell=cell,
        regime=regime_of(fit.profile, cell, predict_cell(fit.profile, cell, smooth=True)),
        figures=figures,
        capacity_tokens_per_s=_capacity(fit, lasting),
        load_share=share,
        withheld=(
            f"the load is {share:.0%} of the predicted capacity: beyond {LATENCY_LOAD_LIMIT:.0%} a "
            "small capacity error is a large latency error"
            if silent and share is not None
            else None
        ),
    )


def _capacity(fit: Fit, cell: Cell) -> Estimate:
    """With the relative interval of a time per token in a copy whose every slot is busy."""
    value = capacity_tokens_per_s(fit.profile, cell)
    users = slots_for(fit.profile, cell) * cell.replicas
    busy = replace(cell, rate_per_s=None, arrivals_s=(), concurrency=users, num_requests=users)
    step = fit.estimates(busy, ["tpot_mean_s"])["tpot_mean_s"]
    return Estimate(value, value * step.value / step.high, value * step.value / step.low)
