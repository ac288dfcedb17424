"""Fits an engine's profile to measured cells of a closed loop.

Few parameters, each with a prior: the fit moves the logarithm of each from its prior by as much as
the cells can tell, under a robust loss, so that one odd cell does not carry it away. What the
cells cannot tell keeps its prior, and the profile says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lmi_bench.analysis.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.closed_loop import ClosedLoopLoad, ClosedLoopRun, run_closed_loop
from lmi_bench.analysis.profiles import (
    PARAMETER_NAMES,
    EngineProfile,
    StepParameters,
    unidentified_note,
)
from lmi_bench.catalog.instances import Instance
from lmi_bench.errors import InputError
from lmi_bench.model_shape import ModelShape

MEASURED = (
    "throughput_tokens_per_s",
    "latency_p90_s_per_token",
    "latency_mean_s_per_token",
    "ttft_mean_s",
    "tpot_mean_s",
)
_NOISE = 0.05  # relative noise of one published or measured figure
_MOST_SHARE = 0.98
_IDENTIFIED = 0.7  # a posterior wider than this part of its prior has learnt nothing
_MOST_EVALUATIONS = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured level of equal requests; None is what was not measured.

    replicas                     copies that share the users evenly
    max_sequences                sequences that ran together at most, where it is known
    latency_*_s_per_token        end-to-end time / output tokens: 90th percentile, mean
    ttft_mean_s, tpot_mean_s     time to the first token, and of each later one
    latency_rounded_down_s       step to which the published latency was cut, 0 for none
    """

    shape: ModelShape
    instance: Instance
    tensor_parallel: int
    dtype: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int
    throughput_tokens_per_s: float | None = None
    latency_p90_s_per_token: float | None = None
    latency_mean_s_per_token: float | None = None
    ttft_mean_s: float | None = None
    tpot_mean_s: float | None = None
    replicas: int = 1
    max_sequences: int | None = None
    latency_rounded_down_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellPrediction:
    """The same figures as predicted, for the whole cell."""

    throughput_tokens_per_s: float
    latency_p90_s_per_token: float
    latency_mean_s_per_token: float
    ttft_mean_s: float
    tpot_mean_s: float
    peak_sequences: int


def predict_cell(profile: EngineProfile, cell: Cell) -> CellPrediction:
    """What the profile expects of the cell; its users are spread evenly over the copies."""
    model = step_time_model_for(
        cell.shape, cell.instance, cell.tensor_parallel, cell.dtype, profile
    )
    limit = cell.max_sequences
    if limit is None:
        total_tokens = cell.input_tokens + cell.output_tokens
        config = scheduler_config_for(
            cell.shape, cell.instance, cell.tensor_parallel, cell.dtype, profile, total_tokens
        )
        blocks = math.ceil(total_tokens / config.block_size)
        limit = min(config.num_blocks // blocks, config.max_rolling_batch_size)
    runs: list[ClosedLoopRun] = []
    for users in _shares(cell.concurrency, cell.replicas):
        requests = max(1, round(cell.num_requests * users / cell.concurrency))
        load = ClosedLoopLoad(users, requests, cell.input_tokens, cell.output_tokens)
        runs.append(
            run_closed_loop(
                model, load, max_sequences=limit, max_prefill_tokens=profile.max_prefill_tokens
            )
        )
    e2e_s = np.concatenate([run.e2e_s for run in runs])
    ttft_s = np.concatenate([run.ttft_s for run in runs])
    wall_s = max(run.wall_s for run in runs)
    return CellPrediction(
        throughput_tokens_per_s=len(e2e_s) * cell.output_tokens / wall_s,
        latency_p90_s_per_token=float(np.quantile(e2e_s, 0.9)) / cell.output_tokens,
        latency_mean_s_per_token=float(e2e_s.mean()) / cell.output_tokens,
        ttft_mean_s=float(ttft_s.mean()),
        tpot_mean_s=float((e2e_s - ttft_s).mean()) / max(1, cell.output_tokens - 1),
        peak_sequences=max(run.peak_sequences for run in runs),
    )


def _shares(users: int, replicas: int) -> Iterator[int]:
    """Users of each copy that has any, as even as whole users allow."""
    for index in range(min(replicas, users)):
        yield users // replicas + (1 if index < users % replicas else 0)


def log_errors(profile: EngineProfile, cell: Cell) -> list[float]:
    """ln(predicted / measured) of each figure that the cell has, always in the same order."""
    predicted = predict_cell(profile, cell)
    cut_s = cell.latency_rounded_down_s / 2  # the expected part that the rounding took away
    errors = []
    for name in MEASURED:
        measured = getattr(cell, name)
        if measured is not None:
            added = cut_s if name == "latency_p90_s_per_token" else 0.0
            errors.append(math.log(getattr(predicted, name) / (measured + added)))
    return errors


def calibrate_profile(
    base: EngineProfile,
    cells: Sequence[Cell],
    *,
    version: str | None = None,
    fitted_on: str,
    fitted_date: str,
) -> EngineProfile:
    """The profile that explains the cells best, starting from `base` and its uncertainty as prior.

    The result's `log_sd` and `log_correlation` are the posterior's; `notes` name the parameters
    that the cells did not identify. Raises InputError without a usable cell.
    """
    if not any(log_errors(base, cell) for cell in cells):
        raise InputError("calibration needs at least one measured cell with a throughput")
    free = [name for name in PARAMETER_NAMES if base.log_sd.get(name, 0.0) > 0]
    start = np.log([getattr(base.parameters, name) for name in free])
    prior_sd = np.array([base.log_sd[name] for name in free])

    def with_logs(logs: NDArray[np.float64]) -> EngineProfile:
        values = {name: getattr(base.parameters, name) for name in PARAMETER_NAMES}
        values.update(zip(free, np.exp(logs).tolist(), strict=True))
        return replace(base, parameters=StepParameters(**values))

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        profile = with_logs(logs)
        errors = np.array([error for cell in cells for error in log_errors(profile, cell)])
        return np.concatenate([_robust(errors / _NOISE), (logs - start) / prior_sd])

    most = np.array([math.log(_MOST_SHARE) if n.endswith("_share") else np.inf for n in free])
    fit = least_squares(
        residuals,
        np.minimum(start, most - 1e-6),
        bounds=(np.full(len(free), -np.inf), most),
        max_nfev=_MOST_EVALUATIONS,
    )
    fitted = with_logs(fit.x)
    errors = np.array([error for cell in cells for error in log_errors(fitted, cell)])
    spread = 1.4826 * float(np.median(np.abs(errors)))  # the robust standard deviation
    covariance = _posterior(np.asarray(fit.jac), len(free), max(1.0, spread / _NOISE))
    sd = np.sqrt(np.diag(covariance))
    kept = [
        name
        for name, after, before in zip(free, sd, prior_sd, strict=True)
        if after > _IDENTIFIED * before
    ]
    return replace(
        fitted,
        version=base.version if version is None else version,
        fitted_on=fitted_on,
        fitted_date=fitted_date,
        accelerators=tuple(dict.fromkeys(cell.instance.accelerator.name for cell in cells)),
        log_sd=dict(zip(free, sd.tolist(), strict=True)),
        log_correlation=_embedded(covariance, free),
        residual_log_sd=max(spread, _NOISE),
        notes=unidentified_note(kept),
    )


def _robust(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Errors whose square grows only linearly beyond 1 (soft L1); the prior stays quadratic."""
    squares = 2 * (np.sqrt(1 + errors**2) - 1)
    return np.asarray(np.sign(errors) * np.sqrt(squares), dtype=np.float64)


def _posterior(
    jacobian: NDArray[np.float64], num_free: int, noise_factor: float
) -> NDArray[np.float64]:
    """Covariance of the logarithms: cells widened to the misfit that they show, prior as it is."""
    jac = np.array(jacobian, dtype=np.float64)
    jac[:-num_free] /= noise_factor
    return np.asarray(np.linalg.inv(jac.T @ jac), dtype=np.float64)


def _embedded(
    covariance: NDArray[np.float64], free: Sequence[str]
) -> tuple[tuple[float, ...], ...]:
    """Correlations in the order of PARAMETER_NAMES; parameters that are not free stand alone."""
    whole = np.eye(len(PARAMETER_NAMES))
    places = [PARAMETER_NAMES.index(name) for name in free]
    sd = np.sqrt(np.diag(covariance))
    whole[np.ix_(places, places)] = covariance / np.outer(sd, sd)
    return tuple(tuple(row) for row in whole.tolist())
