"""Fits an engine's profile to measured cells, and writes down what the fit has and has not learnt.

Few parameters, each with a prior: the fit moves the logarithm of each from its prior by as much as
the cells can tell, under a robust loss, so that one odd cell does not carry it away. What the
cells cannot tell keeps its prior, and the profile says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmi_bench.analysis.fit.cell_files import cell_to_json
from lmi_bench.analysis.fit.fit import Fit, fit_cells
from lmi_bench.analysis.level.cells import MEASURED, MeasuredLevel, predict_cell
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, EngineProfile, unidentified_note

__all__ = ["MeasuredLevel", "calibrate_profile", "log_errors", "predict_cell", "profile_of_fit"]

_IDENTIFIED = 0.7  # a posterior wider than this part of its prior has learnt nothing
_LEAST_RESIDUAL = 0.03  # no engine repeats itself more closely than that


def log_errors(profile: EngineProfile, cell: MeasuredLevel) -> list[float]:
    """ln(predicted / measured) of each figure that the cell has, always in the same order."""
    predicted = predict_cell(profile, cell)
    errors = []
    for metric in MEASURED:
        measured = cell.measured(metric)
        if measured is not None:
            errors.append(math.log(predicted.value(metric) / measured))
    return errors


def calibrate_profile(
    base: EngineProfile,
    cells: Sequence[MeasuredLevel],
    *,
    version: str | None = None,
    fitted_on: str,
    fitted_date: str,
) -> EngineProfile:
    """The profile that explains the cells best, starting from `base` and its uncertainty as prior.

    The result's `log_sd` and `log_correlation` are the posterior's; `notes` name the parameters
    that the cells did not identify. Raises InputError without a usable cell.
    """
    return profile_of_fit(
        fit_cells(base, cells), version=version, fitted_on=fitted_on, fitted_date=fitted_date
    )


def profile_of_fit(
    fit: Fit,
    *,
    version: str | None = None,
    fitted_on: str,
    fitted_date: str,
    keep_levels: bool = False,
) -> EngineProfile:
    """The fitted profile with its uncertainty and provenance.

    keep_levels  let the profile hold its cells, so that predictions are corrected by them
    """
    sd = np.sqrt(np.diag(fit.covariance))
    parameters = [index for index, name in enumerate(fit.names) if name in PARAMETER_NAMES]
    kept = [
        fit.names[index]
        for index in parameters
        if sd[index] > _IDENTIFIED * fit.prior_sd[index] and fit.names[index] in _REPORTED
    ]
    whole = np.eye(len(PARAMETER_NAMES))
    places = [PARAMETER_NAMES.index(fit.names[index]) for index in parameters]
    block = fit.covariance[np.ix_(parameters, parameters)]
    whole[np.ix_(places, places)] = block / np.outer(sd[parameters], sd[parameters])
    spread = 1.4826 * float(np.median(np.abs(fit.residuals)))  # the robust standard deviation
    profile = fit.profile
    return replace(
        profile,
        version=profile.version if version is None else version,
        fitted_on=fitted_on,
        fitted_date=fitted_date,
        accelerators=tuple(
            dict.fromkeys(cell.setup.instance.accelerator.name for cell in fit.cells)
        ),
        models=tuple(dict.fromkeys(cell.setup.shape.name for cell in fit.cells)),
        log_sd={fit.names[index]: float(sd[index]) for index in parameters},
        log_correlation=tuple(tuple(row) for row in whole.tolist()),
        residual_log_sd=max(spread, _LEAST_RESIDUAL),
        error_scale=fit.scales.times if keep_levels else profile.error_scale,
        ttft_error_scale=fit.scales.ttft if keep_levels else profile.ttft_error_scale,
        levels=tuple(cell_to_json(cell) for cell in fit.cells) if keep_levels else (),
        fitted_cells=(),
        notes=unidentified_note(kept),
    )


# Time outside the engine matters to nothing but the time to first token.
_REPORTED = frozenset(PARAMETER_NAMES) - {"request_overhead_s"}
