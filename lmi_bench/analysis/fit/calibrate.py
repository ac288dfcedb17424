"""Makes a calibrated profile from a fit to measured cells, with its uncertainty and provenance."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from lmi_bench.analysis.fit.fit import Fit
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, EngineProfile

_IDENTIFIED = 0.7  # a posterior wider than this share of the prior is not identified
_LEAST_RESIDUAL = 0.03  # repeated measurements of one engine differ by as much


def profile_of_fit(
    fit: Fit,
    *,
    version: str | None = None,
    fitted_on: str,
    fitted_date: str,
    keep_levels: bool = False,
) -> EngineProfile:
    """The fitted profile with its uncertainty and provenance.

    `log_sd` and `log_correlation` are the posterior's; `notes` name unidentified parameters.

    keep_levels  whether the profile holds its cells, so that they correct its predictions
    """
    sd = np.sqrt(np.diag(fit.covariance))
    parameters = [index for index, name in enumerate(fit.names) if name in PARAMETER_NAMES]
    kept = [
        fit.names[index]
        for index in parameters
        if sd[index] > _IDENTIFIED * fit.prior_sd[index] and fit.names[index] in _NAMED_IN_NOTES
    ]
    whole = np.eye(len(PARAMETER_NAMES))
    places = [PARAMETER_NAMES.index(fit.names[index]) for index in parameters]
    block = fit.covariance[np.ix_(parameters, parameters)]
    whole[np.ix_(places, places)] = block / np.outer(sd[parameters], sd[parameters])
    note = f"not identified by the profile's cells, so near their priors: {', '.join(kept)}"
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
        levels=fit.cells if keep_levels else (),
        formats=tuple(dict.fromkeys(cell.setup.dtype for cell in fit.cells)),
        fitted_lengths=_lengths(fit.cells),
        fitted_cells=(),
        notes=(note,) if kept else (),
    )


def _lengths(cells: Sequence[MeasuredLevel]) -> tuple[tuple[int, ...], ...]:
    """The least and the most of each part of the cells' extents."""
    parts = [[n for n in each if n is not None] for each in zip_longest(*(c.extent for c in cells))]
    return tuple(map(min, parts)), tuple(map(max, parts))


# Parameters that the notes name; the time outside the engine affects only the time to first token.
_NAMED_IN_NOTES = frozenset(PARAMETER_NAMES) - {"request_overhead_s"}
