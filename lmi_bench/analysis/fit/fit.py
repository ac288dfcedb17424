"""Fits a profile's parameters to cells; `uncertainty` says how sure its predictions then are.

The logarithms of the parameters have a normal prior around the base profile. A robust least-squares
fit moves them; its Jacobian gives their posterior (Laplace's approximation). What is left is a
`discrepancy` whose scale is found by its marginal likelihood.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lmi_bench.analysis.fit.cell_files import cell_from_json
from lmi_bench.analysis.fit.discrepancy import (
    UNSCALED,
    ErrorScales,
    Observation,
    error_covariance,
    find_scales,
    observations_of,
)
from lmi_bench.analysis.level.cells import (
    CellPrediction,
    MeasuredLevel,
    Metric,
    predict_cell,
    slots_for,
)
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, EngineProfile, StepParameters
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.scheduling.config import KvLayout

_MOST_SHARE = 0.98
_STEP = 0.02  # of a logarithm, for derivatives
_SLOW_HOST_SD = 1.0
_OPEN_STEP = 0.05  # an open loop's simulation is not smooth
_MOST_EVALUATIONS = 25
_USUAL_SCALE = (0.8, 1.3)
_MOST_RESCALINGS, _SAME_SCALE = 3, 0.2
_OVERHEADS_S = np.geomspace(2e-3, 0.2, 15)
_RESERVE_STEPS = (-0.04, -0.02, 0.02, 0.04, 0.06)  # of a device's memory
_STEP_TOKENS, SCHEDULER_BATCHES = (2048, 8192), (128, 256, 1024)
_WORTH_A_SETTING = 2.0  # of cost: a setting is not moved for nothing
_HOST_PREFIX = "host_factor:"


def free_parameters(
    base: EngineProfile, cells: Sequence[MeasuredLevel]
) -> tuple[list[str], list[float]]:
    """Names of what a fit may move, and the prior standard deviation of each one's logarithm."""
    names = [name for name in PARAMETER_NAMES if base.log_sd.get(name, 0.0) > 0]
    sd = [base.log_sd[name] for name in names]
    hosts = [name for name, _ in Counter(_host(cell) for cell in cells).most_common()]
    unseen = [host for host in hosts if host not in base.accelerators]
    if not base.accelerators:
        unseen = unseen[1:]  # the most measured machine is the reference of the others
    if base.host_factor_log_sd > 0:
        names += [_HOST_PREFIX + host for host in unseen]
        sd += [base.host_factor_log_sd] * len(unseen)
    return names, sd


def _host(cell: MeasuredLevel) -> str:
    return cell.setup.instance.accelerator.name


def log_value(profile: EngineProfile, name: str) -> float:
    """Logarithm of a free parameter's value."""
    if name.startswith(_HOST_PREFIX):
        return math.log(profile.host_factors.get(name.removeprefix(_HOST_PREFIX), 1.0))
    return math.log(max(getattr(profile.parameters, name), 1e-12))


def with_logs(
    base: EngineProfile, names: Sequence[str], logs: NDArray[np.float64]
) -> EngineProfile:
    """The base with those parameters' logarithms."""
    values = {name: getattr(base.parameters, name) for name in PARAMETER_NAMES}
    hosts = dict(base.host_factors)
    for name, log in zip(names, logs.tolist(), strict=True):
        if name.startswith(_HOST_PREFIX):
            hosts[name.removeprefix(_HOST_PREFIX)] = math.exp(log)
        else:
            values[name] = min(math.exp(log), 1.0) if name.endswith("_share") else math.exp(log)
    return replace(base, parameters=StepParameters(**values), host_factors=hosts)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A profile fitted to cells, with what is known of its errors.

    names, covariance   free parameters and the posterior covariance of their logarithms
    prior_sd            of the same logarithms, before
    scales              of the model's errors and noise, 1 as expected before the fit
    residuals           ln(measured / predicted) of each observation, shape (n,)
    """

    profile: EngineProfile
    names: tuple[str, ...]
    prior_sd: NDArray[np.float64]
    covariance: NDArray[np.float64]
    scales: ErrorScales
    cells: tuple[MeasuredLevel, ...]
    observations: tuple[Observation, ...]
    residuals: NDArray[np.float64]

    def error_left(
        self, left: Sequence[Observation], right: Sequence[Observation]
    ) -> NDArray[np.float64]:
        """Covariance of the model's errors that the measured cells leave."""
        remains = error_covariance(left, right)
        if self.observations:
            within = error_covariance(self.observations, self.observations)
            within += np.diag([item.noise_sd**2 for item in self.observations])
            known = np.linalg.solve(within, error_covariance(self.observations, right))
            remains = remains - error_covariance(left, self.observations) @ known
        return np.asarray(np.outer(self.scales.of(left), self.scales.of(right)) * remains)


def derivatives(
    profile: EngineProfile, cell: MeasuredLevel, names: Sequence[str], metrics: Sequence[Metric]
) -> NDArray[np.float64]:
    """d ln(figure) / d ln(parameter), shape (metrics, names)."""
    step = _STEP if cell.rate_per_s is None else _OPEN_STEP
    base = predict_cell(profile, cell, smooth=True)
    logs = np.array([log_value(profile, name) for name in names])
    columns = []
    for index, name in enumerate(names):
        moved = logs.copy()
        down = name.endswith("_share") and logs[index] + step > 0
        moved[index] += -step if down else step
        other = predict_cell(with_logs(profile, names, moved), cell, smooth=True)
        columns.append(
            [
                math.log(other.value(metric) / base.value(metric)) / (-step if down else step)
                for metric in metrics
            ]
        )
    return np.array(columns).T.reshape(len(metrics), len(names))


def fit_cells(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """Fit the base's parameters to the cells; raises InputError without a usable figure."""
    observations = observations_of(cells)
    names, sd = free_parameters(base, cells)
    prior_sd = np.array(sd)
    if not observations:
        raise InputError("calibration needs at least one measured cell with a throughput")
    base = _with_best_reserve(base, cells)
    profile = _fit_steps(base, names, prior_sd, cells)
    paged = base.kv_layout is KvLayout.PAGED  # how the servers of that kind are bounded
    if paged and any(cell.rate_per_s is not None for cell in cells):
        profile, base = _with_best_settings(profile, base, names, prior_sd, cells)
    again = _with_best_reserve(profile, cells)
    if again.reserve_bytes != profile.reserve_bytes:
        profile = _fit_steps(
            replace(base, reserve_bytes=again.reserve_bytes), names, prior_sd, cells
        )
    profile = _with_best_overhead(profile, base, cells)
    base = with_settings(base, profile)
    told = _Told.by(profile, base, names, prior_sd, cells)
    for _ in range(_MOST_RESCALINGS):
        if _USUAL_SCALE[0] <= told.likeliest <= _USUAL_SCALE[1]:
            break  # cells as exact as expected have been weighed right
        before = told.likeliest
        profile = _fit_steps(base, names, prior_sd, cells, at=profile, scale=before)
        profile = _with_best_overhead(profile, base, cells)
        told = _Told.by(profile, base, names, prior_sd, cells)
        if abs(math.log(told.likeliest / before)) < _SAME_SCALE:
            break
    residuals, jacobian, scales = told.residuals, told.jacobian, told.scales
    observations = observations_of(cells, profile)
    error = error_covariance(observations, observations)
    error += np.diag([item.noise_sd**2 for item in observations])
    widths = scales.of(observations)
    precision = np.diag(1 / prior_sd**2)
    scaled = np.outer(widths, widths) * error
    precision = precision + jacobian.T @ np.linalg.solve(scaled, jacobian)
    return Fit(
        profile=profile,
        names=tuple(names),
        prior_sd=prior_sd,
        covariance=np.asarray(np.linalg.inv(precision), dtype=np.float64),
        scales=scales,
        cells=tuple(cells),
        observations=tuple(observations),
        residuals=residuals,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """What is left after a fit, how it depends on the parameters, and the scale of its errors.

    likeliest  by which cells are weighed against the prior; scales: by which intervals are widened
    """

    residuals: NDArray[np.float64]
    jacobian: NDArray[np.float64]
    likeliest: float
    scales: ErrorScales

    @classmethod
    def by(
        cls,
        profile: EngineProfile,
        base: EngineProfile,
        names: list[str],
        prior_sd: NDArray[np.float64],
        cells: Sequence[MeasuredLevel],
    ) -> _Told:
        residuals = _residuals(profile, cells)
        jacobian = np.concatenate(
            [derivatives(profile, cell, names, _metrics(cell)) for cell in cells if _metrics(cell)]
        )
        moved = np.array([log_value(profile, name) - log_value(base, name) for name in names])
        observations = observations_of(cells, profile)
        likeliest, scales = find_scales(observations, jacobian, residuals, moved, prior_sd)
        return cls(residuals, jacobian, likeliest, scales)


def prior_fit(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """The base as it is: what is predicted before anything is measured.

    cells  whose accelerators decide which host factors are open
    """
    names, sd = free_parameters(base, cells)
    prior_sd = np.array(sd)
    covariance = np.diag(prior_sd**2)
    own = [index for index, name in enumerate(names) if name in PARAMETER_NAMES]
    places = [PARAMETER_NAMES.index(names[index]) for index in own]
    covariance[np.ix_(own, own)] = base.log_covariance()[np.ix_(places, places)]
    return Fit(base, tuple(names), prior_sd, covariance, UNSCALED, (), (), np.zeros(0))


def fit_of_profile(profile: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """A calibrated profile as the fit that it came from: its levels correct their neighbours.

    cells  to be predicted; raises InputError where a level of the profile cannot be read
    """
    fit = prior_fit(profile, cells)
    known = [cell_from_json(content, profile.machine) for content in profile.levels]
    if not known:
        return fit
    return replace(
        fit,
        scales=ErrorScales(profile.error_scale, profile.ttft_error_scale),
        cells=tuple(known),
        observations=tuple(observations_of(known, profile)),
        residuals=_residuals(profile, known),
    )


def _metrics(cell: MeasuredLevel) -> list[Metric]:
    return [item.metric for item in observations_of([cell])]


def _residuals(
    profile: EngineProfile, cells: Sequence[MeasuredLevel], *, smooth: bool = False
) -> NDArray[np.float64]:
    """ln(measured / predicted) of every figure; times out of reach count as far off."""
    errors = []
    for cell in cells:
        metrics = _metrics(cell)
        if not metrics:
            continue
        predicted: CellPrediction = predict_cell(profile, cell, smooth=smooth)
        for metric in metrics:
            measured = cell.measured(metric)
            assert measured is not None
            errors.append(math.log(measured / predicted.value(metric)))
    return np.array(errors)


def _fit_steps(
    base: EngineProfile,
    names: list[str],
    prior_sd: NDArray[np.float64],
    cells: Sequence[MeasuredLevel],
    *,
    most_evaluations: int = _MOST_EVALUATIONS,
    at: EngineProfile | None = None,
    scale: float = 1.0,
) -> EngineProfile:
    """The robust fit. Times to first token count only where they are smooth in the parameters."""
    observations = observations_of(cells)
    start = np.array([log_value(base, name) for name in names])
    simulated = any(cell.length_spread for cell in cells)
    weights = np.array(
        [
            0.0
            if simulated and item.metric == "ttft_mean_s" and item.cell.rate_per_s is None
            else 1 / item.total_sd
            for item in observations
        ]
    )
    if not weights.any():
        weights[:] = [1 / item.total_sd for item in observations]
    weights /= scale

    def residuals(z: NDArray[np.float64]) -> NDArray[np.float64]:
        profile = with_logs(base, names, start + z * prior_sd)
        return np.concatenate([_robust(_residuals(profile, cells, smooth=True) * weights), z])

    step = _OPEN_STEP if any(cell.rate_per_s is not None for cell in cells) else _STEP

    def jacobian(z: NDArray[np.float64]) -> NDArray[np.float64]:
        return _differences(residuals, z, step / prior_sd)

    most = np.array([math.log(_MOST_SHARE) if n.endswith("_share") else np.inf for n in names])
    upper = np.maximum((most - start) / prior_sd, 1e-3)
    begins = [np.zeros(len(names))]
    if at is not None:
        begins = [(np.array([log_value(at, name) for name in names]) - start) / prior_sd]
    elif not base.chunked_prefill and "host_per_layer_s" in names:
        # a host that the GPU hides has no slope: begin once from where it shows
        begins.append(begins[0].copy())
        begins[1][names.index("host_per_layer_s")] = _SLOW_HOST_SD
    fits = [
        least_squares(
            residuals,
            np.minimum(begin, upper - 1e-6),
            jac=jacobian,
            bounds=(np.full(len(names), -np.inf), upper),
            max_nfev=most_evaluations,
            ftol=1e-4,
            xtol=1e-4,
        )
        for begin in begins
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    return with_logs(base, names, start + best.x * prior_sd)


def _differences(
    function: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    at: NDArray[np.float64],
    steps: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Forward differences, shape (values, parameters)."""
    base = function(at)
    columns = []
    for index, step in enumerate(steps):
        moved = at.copy()
        moved[index] += step
        columns.append((function(moved) - base) / step)
    return np.array(columns).T


def _robust(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Errors whose square grows only linearly beyond 1 (soft L1); the prior stays quadratic."""
    squares = 2 * (np.sqrt(1 + errors**2) - 1)
    return np.asarray(np.sign(errors) * np.sqrt(squares), dtype=np.float64)


def _misfit(
    profile: EngineProfile, cells: Sequence[MeasuredLevel], *, ttft_only: bool = False
) -> float:
    """Sum of the robust squares; infinite where a cell that was measured does not fit."""
    try:
        errors = _residuals(profile, cells, smooth=not ttft_only)
    except CapacityError:
        return math.inf
    items = observations_of(cells)
    total = 0.0
    for item, error in zip(items, errors, strict=True):
        if (item.metric == "ttft_mean_s") == ttft_only:
            total += 2 * (math.sqrt(1 + (error / item.total_sd) ** 2) - 1)
    return total


def _with_best_settings(
    profile: EngineProfile,
    base: EngineProfile,
    names: list[str],
    prior_sd: NDArray[np.float64],
    cells: Sequence[MeasuredLevel],
) -> tuple[EngineProfile, EngineProfile]:
    """Scheduler settings that no table states, found by their effect on an overloaded open loop.

    Returns the fitted profile, and the base with the same settings.
    """
    best, best_base = profile, base
    best_cost = _cost(profile, base, names, prior_sd, cells)
    for name, values in (
        ("max_prefill_tokens", _STEP_TOKENS),
        ("max_batch_size", SCHEDULER_BATCHES),
    ):
        for value in values:
            if value == getattr(best_base, name):
                continue
            setting: dict[str, Any] = {name: value}
            option = replace(best_base, **setting)
            start = with_settings(best, option)
            fitted = _fit_steps(option, names, prior_sd, cells, most_evaluations=3, at=start)
            cost = _cost(fitted, option, names, prior_sd, cells)
            if cost < best_cost - _WORTH_A_SETTING:
                best, best_base, best_cost = fitted, option, cost
    return best, best_base


def with_settings(profile: EngineProfile, settings: EngineProfile) -> EngineProfile:
    """The profile's parameters under the scheduler settings of another."""
    return replace(settings, parameters=profile.parameters, host_factors=profile.host_factors)


def _cost(
    profile: EngineProfile,
    base: EngineProfile,
    names: Sequence[str],
    prior_sd: NDArray[np.float64],
    cells: Sequence[MeasuredLevel],
) -> float:
    """Misfit of all figures and of the parameters from their prior."""
    moved = np.array([log_value(profile, name) - log_value(base, name) for name in names])
    misfit = _misfit(profile, cells) + _misfit(profile, cells, ttft_only=True)
    return misfit + float(np.sum((moved / prior_sd) ** 2))


def _with_best_reserve(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> EngineProfile:
    """The reserve that explains cells near the cache's limit; as it is where none is."""
    near = []
    for cell in cells:
        if cell.max_sequences is not None or cell.rate_per_s is not None:
            continue
        try:
            slots = slots_for(base, cell)
        except CapacityError:
            slots = 0
        if cell.concurrency > 0.7 * cell.replicas * slots:
            near.append(cell)
    if not near:
        return base
    memory = max(cell.setup.instance.accelerator.memory_bytes for cell in near)
    options = [base] + [
        replace(base, reserve_bytes=max(0.0, base.reserve_bytes + share * memory))
        for share in _RESERVE_STEPS
    ]
    return min(options, key=lambda option: _misfit(option, near))


def _with_best_overhead(
    profile: EngineProfile, base: EngineProfile, cells: Sequence[MeasuredLevel]
) -> EngineProfile:
    """The time outside the engine that explains the times to first token, prior included."""
    told = [cell for cell in cells if cell.ttft_mean_s is not None]
    sd = base.log_sd.get("request_overhead_s", 0.0)
    if not told or not sd:
        return profile
    centre = base.parameters.request_overhead_s

    def cost(overhead_s: float) -> float:
        option = replace(
            profile, parameters=replace(profile.parameters, request_overhead_s=overhead_s)
        )
        return _misfit(option, told, ttft_only=True) + (math.log(overhead_s / centre) / sd) ** 2

    best = min((float(value) for value in _OVERHEADS_S), key=cost)
    return replace(profile, parameters=replace(profile.parameters, request_overhead_s=best))
