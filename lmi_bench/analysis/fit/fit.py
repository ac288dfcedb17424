"""Fits a profile's parameters to cells; `uncertainty` gives the intervals of its predictions.

A robust least-squares fit with a normal prior of the logarithms; its Jacobian gives the posterior
(Laplace's approximation). The remainder is a `discrepancy`, scaled by its marginal likelihood.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lmi_bench.analysis.fit.discrepancy import (
    OUTLIER,
    UNSCALED,
    ErrorScales,
    Observation,
    error_covariance,
    find_scales,
    measured_covariance,
    observations_of,
)
from lmi_bench.analysis.level.cells import can_run, predict_cell, slots_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import (
    HOST_PREFIX,
    PARAMETER_NAMES,
    EngineProfile,
    ProfileKey,
    carried,
    log_value,
    with_logs,
)
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.model.step_costs import step_costs
from lmi_bench.analysis.results.quantiles import FloatArray
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.scheduling.config import KvLayout

_MOST_SHARE = 0.98
_STEP = 0.02  # change of a logarithm, for derivatives
_SLOW_HOST_SD = 1.0
_OPEN_STEP = 0.05  # an open loop's simulation is not smooth
_MOST_EVALUATIONS = 25
_USUAL_SCALE = (0.8, 1.3)
_MOST_RESCALINGS, _SAME_SCALE = 3, 0.2
_OVERHEADS_S = np.geomspace(2e-3, 0.2, 15)
_RESERVE_STEPS = (-0.04, -0.02, 0.02, 0.04, 0.06)  # shares of a device's memory
_STEP_TOKENS, SCHEDULER_BATCHES = (2048, 8192), (128, 256, 1024)
_WORTH_A_SETTING = 2.0  # least gain in cost for which a setting is changed


@dataclass(frozen=True, slots=True, eq=False)
class _Prior:
    """The base profile whose parameters are fitted, and the cells that they are fitted to.

    names  the free parameters; sd: prior standard deviations of their logarithms
    """

    base: EngineProfile
    names: tuple[str, ...]
    sd: FloatArray
    cells: tuple[MeasuredLevel, ...]

    @classmethod
    def of(cls, base: EngineProfile, cells: Sequence[MeasuredLevel]) -> "_Prior":
        names = [name for name in PARAMETER_NAMES if base.log_sd.get(name, 0.0) > 0]
        sd = [base.log_sd[name] for name in names]
        counts = Counter(cell.setup.instance.accelerator.name for cell in cells)
        hosts = [name for name, _ in counts.most_common()]
        unseen = [host for host in hosts if host not in base.accelerators]
        if not base.accelerators:
            unseen = unseen[1:]  # the most measured machine is the reference of the others
        if base.host_factor_log_sd > 0:
            names += [HOST_PREFIX + host for host in unseen]
            sd += [base.host_factor_log_sd] * len(unseen)
        return cls(base, tuple(names), np.array(sd), tuple(cells))

    def cost(self, profile: EngineProfile) -> float:
        """Misfit of all figures and of the parameters from their prior."""
        misfit = _misfit(profile, self.cells) + _misfit(profile, self.cells, ttft_only=True)
        return misfit + _distance(profile, self.base, self.names, self.sd)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fitted profile, its uncertainty, and the cells that correct their neighbours.

    names, covariance   the free parameters, and the covariance of their logarithms in this order
    prior_sd            standard deviations of the same logarithms before the fit
    scales              factors on the model's expected errors and noise
    residuals           ln(measured / predicted) of each observation, shape (n,)
    jacobian            their derivatives by the parameters, shape (n, names)
    gain                derivatives of the fitted parameters by the residuals, shape (names, n)
    """

    profile: EngineProfile
    names: tuple[str, ...]
    prior_sd: FloatArray
    covariance: FloatArray
    scales: ErrorScales
    cells: tuple[MeasuredLevel, ...]
    observations: tuple[Observation, ...]
    residuals: FloatArray
    jacobian: FloatArray
    gain: FloatArray

    def error_left(self, left: Sequence[Observation], right: Sequence[Observation]) -> FloatArray:
        """Covariance of the model's errors that the measured cells leave."""
        remains = error_covariance(left, right, self.scales)
        if self.observations:
            known = error_covariance(self.observations, right, self.scales)
            gain = np.linalg.solve(measured_covariance(self.observations, self.scales), known)
            remains = remains - error_covariance(left, self.observations, self.scales) @ gain
        return remains

    def corrected(self, wanted: Sequence[Observation], slopes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean of the model's errors by the measured cells (outliers are clipped), and the variance
        of the corrected figures by the parameters and the errors together.

        slopes  derivatives of the figures by the parameters, shape (wanted, names)

        The parameters follow the cells as if these had no offsets in common. Their error is then
        that of the fit's own estimate: what an offset moved, and what the correction takes back.
        """
        shift: FloatArray = np.zeros(len(wanted))
        apart, spread = slopes, self.covariance
        errors: FloatArray = np.diag(error_covariance(wanted, wanted, self.scales))
        if self.observations:
            within = measured_covariance(self.observations, self.scales)
            plain = measured_covariance(self.observations, self.scales, offsets=False)
            across = error_covariance(wanted, self.observations, self.scales)
            taken = np.linalg.solve(within, across.T).T
            limits = OUTLIER * np.sqrt(np.diag(within))
            shift = np.asarray(taken @ np.clip(self.residuals, -limits, limits), dtype=np.float64)
            apart = slopes - taken @ self.jacobian
            spread = spread - self.gain @ plain @ self.gain.T
            taken = taken + apart @ self.gain
            errors = errors + np.sum((taken @ within - 2 * across) * taken, axis=1)
        return shift, errors + np.sum(apart @ spread * apart, axis=1)

    def cost(self, base: EngineProfile) -> float:
        """Misfit of all figures, and of the parameters from those of `base`."""
        pairs = zip(self.residuals.tolist(), self.observations, strict=True)
        misfit = _robust_sum(error / item.total_sd for error, item in pairs)
        return misfit + _distance(self.profile, base, self.names, self.prior_sd)


def _logs(profile: EngineProfile, names: Sequence[str]) -> FloatArray:
    return np.array([log_value(profile, name) for name in names])


def _distance(profile: EngineProfile, base: EngineProfile, names: Sequence[str], sd: FloatArray) -> float:
    return float(np.sum(((_logs(profile, names) - _logs(base, names)) / sd) ** 2))


def derivatives(
    profile: EngineProfile, cell: MeasuredLevel, names: Sequence[str], metrics: Sequence[Metric]
) -> FloatArray:
    """d ln(figure) / d ln(parameter), shape (metrics, names)."""
    step = _STEP if cell.rate_per_s is None else _OPEN_STEP
    base = predict_cell(profile, cell, smooth=True)
    logs = _logs(profile, names)
    columns = []
    for index, name in enumerate(names):
        moved = logs.copy()
        change = -step if name.endswith("_share") and logs[index] + step > 0 else step
        moved[index] += change
        other_profile = with_logs(profile, names, moved)
        if cell.prefill is None and _same_times(profile, other_profile, cell.setup):
            columns.append([0.0] * len(metrics))
            continue
        other = predict_cell(other_profile, cell, smooth=True)
        columns.append([math.log(other.value(metric) / base.value(metric)) / change for metric in metrics])
    return np.array(columns).T.reshape(len(metrics), len(names))


def _same_times(one: EngineProfile, other: EngineProfile, setup: Setup) -> bool:
    """Whether profiles that differ in their parameters give a set-up the same times."""
    if setup.speculation is not None:
        return False
    overheads = {each.parameters.request_overhead_s for each in (one, other)}
    return len(overheads) == 1 and step_costs(setup, one) == step_costs(setup, other)


def fit_cells(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """Fit the base's parameters to the cells; raises InputError without a usable figure."""
    if not observations_of(cells):
        raise InputError("calibration needs at least one measured cell with a throughput")
    base = carried(base, (cell.setup for cell in cells))
    prior = _Prior.of(_with_best_reserve(base, cells), cells)
    profile = _fit_steps(prior)
    paged = prior.base.kv_layout is KvLayout.PAGED  # only these servers have such settings
    if paged and any(cell.rate_per_s is not None for cell in cells):
        profile, prior = _with_best_settings(profile, prior)
    again = _with_best_reserve(profile, cells)
    if again.reserve_bytes != profile.reserve_bytes:
        reserved = replace(prior.base, reserve_bytes=again.reserve_bytes)
        profile = _fit_steps(replace(prior, base=reserved))
    profile = _with_best_overhead(profile, prior)
    prior = replace(prior, base=with_settings(prior.base, profile))
    known, likeliest, scales = _remainder(profile, prior)
    for _ in range(_MOST_RESCALINGS):
        if _USUAL_SCALE[0] <= likeliest <= _USUAL_SCALE[1]:
            break  # the cells are as exact as expected, so their weights are right
        before = likeliest
        profile = _fit_steps(prior, at=profile, scale=before)
        profile = _with_best_overhead(profile, prior)
        known, likeliest, scales = _remainder(profile, prior)
        if abs(math.log(likeliest / before)) < _SAME_SCALE:
            break
    observations, _, jacobian = known
    weighted = np.linalg.solve(measured_covariance(observations, scales, offsets=False), jacobian)
    precision = np.diag(1 / prior.sd**2) + jacobian.T @ weighted
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    gain = covariance @ weighted.T
    return Fit(profile, prior.names, prior.sd, covariance, scales, prior.cells, *known, gain)


_Figures = tuple[tuple[Observation, ...], FloatArray, FloatArray]
"""Figures of measured cells, ln(measured / predicted), and its derivatives by the parameters."""


def _figures_of(profile: EngineProfile, names: Sequence[str], cells: Sequence[MeasuredLevel]) -> _Figures:
    slopes = [derivatives(profile, cell, names, found) for cell in cells if (found := _metrics(cell))]
    observations = tuple(observations_of(cells, profile))
    return observations, _residuals(profile, cells), np.concatenate(slopes)


def _remainder(profile: EngineProfile, prior: _Prior) -> tuple[_Figures, float, ErrorScales]:
    """What a fit leaves, the common scale that weights cells against prior, and the intervals'."""
    known = _figures_of(profile, prior.names, prior.cells)
    moved = _logs(profile, prior.names) - _logs(prior.base, prior.names)
    return known, *find_scales(*known, moved, prior.sd)


def prior_fit(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """The base profile as a fit, for predictions before any measurement.

    cells  the cells to predict; their accelerators decide which host factors are free
    """
    base = carried(base, (cell.setup for cell in cells))
    prior = _Prior.of(base, cells)
    covariance, none = base.log_covariance(prior.names, prior.sd), np.zeros((0, len(prior.names)))
    return Fit(base, prior.names, prior.sd, covariance, UNSCALED, (), (), np.zeros(0), none, none.T)


def fit_of_profile(profile: EngineProfile, cells: Sequence[MeasuredLevel]) -> Fit:
    """A calibrated profile as the fit that made it: its levels correct their neighbours.

    cells  the cells to predict
    """
    fit = prior_fit(profile, cells)
    if not profile.levels:
        return fit
    scales = ErrorScales(profile.error_scale, profile.ttft_error_scale)
    rest = repr(replace(profile, levels=()))  # some fields are dicts
    known = _at_levels(ProfileKey((profile.levels, rest), profile), fit.names)
    plain = measured_covariance(known[0], scales, offsets=False)
    gain = profile.log_covariance(fit.names, fit.prior_sd) @ np.linalg.solve(plain, known[2]).T
    start = fit.profile, fit.names, fit.prior_sd, fit.covariance
    return Fit(*start, scales, profile.levels, *known, gain)


@lru_cache(maxsize=32)
def _at_levels(known: ProfileKey, names: tuple[str, ...]) -> _Figures:
    return _figures_of(known.profile, names, known.profile.levels)


def _metrics(cell: MeasuredLevel) -> list[Metric]:
    return [item.metric for item in observations_of([cell])]


def _residuals(profile: EngineProfile, cells: Sequence[MeasuredLevel], *, smooth: bool = False) -> FloatArray:
    """ln(measured / predicted) of every figure of the cells."""
    errors = []
    for cell in cells:
        metrics = _metrics(cell)
        if not metrics:
            continue
        predicted = predict_cell(profile, cell, smooth=smooth)
        for metric in metrics:
            measured = cell.measured(metric)
            assert measured is not None
            errors.append(math.log(measured / predicted.value(metric)))
    return np.array(errors)


def _fit_steps(
    prior: _Prior, *, most_evaluations: int = _MOST_EVALUATIONS, at: EngineProfile | None = None, scale: float = 1.0
) -> EngineProfile:
    """The robust fit. Times to first token count only where they are smooth in the parameters."""
    from scipy.optimize import least_squares  # 0.4 s to load

    base, names, cells = prior.base, prior.names, prior.cells
    observations = observations_of(cells)
    start = _logs(base, names)
    simulated = any(cell.length_spread for cell in cells)
    weights = np.array([1 / item.total_sd for item in observations])
    rough = np.array([simulated and item.is_ttft and item.cell.rate_per_s is None for item in observations])
    if not rough.all():
        weights[rough] = 0.0
    weights /= scale

    def residuals(z: FloatArray) -> FloatArray:
        profile = with_logs(base, names, start + z * prior.sd)
        return np.concatenate([_robust(_residuals(profile, cells, smooth=True) * weights), z])

    step = _OPEN_STEP if any(cell.rate_per_s is not None for cell in cells) else _STEP

    def jacobian(z: FloatArray) -> FloatArray:
        base, steps = residuals(z), step / prior.sd  # forward differences
        return np.array([residuals(z + moved) - base for moved in np.diag(steps)]).T / steps

    most = np.array([math.log(_MOST_SHARE) if n.endswith("_share") else np.inf for n in names])
    upper = np.maximum((most - start) / prior.sd, 1e-3)
    lower = np.array([-start[i] if n in base.up_to else -np.inf for i, n in enumerate(names)])
    lower = lower / prior.sd - 1e-3  # a value of 0 is inside
    begins = [np.zeros(len(names))]
    if at is not None:
        begins = [(_logs(at, names) - start) / prior.sd]
    elif not base.chunked_prefill and "host_per_layer_s" in names:
        # a host time hidden by the GPU has no slope: also start where it shows
        begins.append(begins[0].copy())
        begins[1][names.index("host_per_layer_s")] = _SLOW_HOST_SD
    fits = [
        least_squares(
            residuals,
            np.clip(begin, lower + 1e-6, upper - 1e-6),
            jac=jacobian,
            bounds=(lower, upper),
            max_nfev=most_evaluations,
            ftol=1e-4,
            xtol=1e-4,
        )
        for begin in begins
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    return with_logs(base, names, start + best.x * prior.sd)


def _robust(errors: FloatArray) -> FloatArray:
    """Errors with a square that grows only linearly beyond 1 (soft L1)."""
    squares = 2 * (np.sqrt(1 + errors**2) - 1)
    return np.asarray(np.sign(errors) * np.sqrt(squares), dtype=np.float64)


def _robust_sum(ratios: Iterable[float]) -> float:
    return sum(2 * (math.sqrt(1 + ratio**2) - 1) for ratio in ratios)


def _misfit(profile: EngineProfile, cells: Sequence[MeasuredLevel], *, ttft_only: bool = False) -> float:
    """Sum of the robust squares; infinite where a measured cell exceeds the memory."""
    try:
        errors = _residuals(profile, cells, smooth=not ttft_only)
    except CapacityError:
        return math.inf
    return _robust_sum(
        error / item.total_sd
        for item, error in zip(observations_of(cells), errors.tolist(), strict=True)
        if item.is_ttft == ttft_only
    )


def _with_best_settings(profile: EngineProfile, prior: _Prior) -> tuple[EngineProfile, _Prior]:
    """Scheduler settings that no table states, found by their effect on an overloaded open loop.

    Returns the fitted profile, and the prior with the same settings.
    """
    best, best_prior, best_cost = profile, prior, prior.cost(profile)
    for name, values in (("max_prefill_tokens", _STEP_TOKENS), ("max_batch_size", SCHEDULER_BATCHES)):
        for value in values:
            if value == getattr(best_prior.base, name):
                continue
            setting: dict[str, Any] = {name: value}
            option = replace(prior, base=replace(best_prior.base, **setting))
            start = with_settings(best, option.base)
            fitted = _fit_steps(option, most_evaluations=3, at=start)
            cost = option.cost(fitted)
            if cost < best_cost - _WORTH_A_SETTING:
                best, best_prior, best_cost = fitted, option, cost
    return best, best_prior


def with_settings(profile: EngineProfile, settings: EngineProfile) -> EngineProfile:
    """The profile's parameters under the scheduler settings of another."""
    return replace(settings, parameters=profile.parameters, host_factors=profile.host_factors)


def _with_best_reserve(base: EngineProfile, cells: Sequence[MeasuredLevel]) -> EngineProfile:
    """The base with the reserve that best explains the cells near the cache's limit, if any."""
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
        replace(base, reserve_bytes=max(0.0, base.reserve_bytes + share * memory)) for share in _RESERVE_STEPS
    ]
    options[1:] = [each for each in options[1:] if all(can_run(each, cell) for cell in cells)]
    return min(options, key=lambda option: _misfit(option, near))


def _with_best_overhead(profile: EngineProfile, prior: _Prior) -> EngineProfile:
    """The profile with the time outside the engine that best explains the TTFTs and the prior."""
    # what routers of separate pools and their transfers add hides it there
    known = [c for c in prior.cells if c.ttft_mean_s is not None and c.prefill is None]
    sd = prior.base.log_sd.get("request_overhead_s", 0.0)
    if not known or not sd:
        return profile
    centre = prior.base.parameters.request_overhead_s

    def at(overhead_s: float) -> EngineProfile:
        parameters = replace(profile.parameters, request_overhead_s=overhead_s)
        return replace(profile, parameters=parameters)

    def cost(overhead_s: float) -> float:
        misfit = _misfit(at(overhead_s), known, ttft_only=True)
        return misfit + (math.log(overhead_s / centre) / sd) ** 2

    return at(min(_OVERHEADS_S.tolist(), key=cost))
