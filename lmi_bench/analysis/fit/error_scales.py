"""How large a fit's errors are against what was expected: one scale for times, one for TTFT.

Times per token and throughputs are off by the same steps, so one scale serves both. The time to
first token hangs on how requests fall together, which the step times do not tell: it has its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fit.discrepancy import Observation, error_covariance

OUTLIER = 2.5  # standard deviations that one figure counts for at most

_TIMES = np.geomspace(0.65, 2.5, 15)  # published levels repeat no better than the least
_TTFTS = np.geomspace(0.4, 2.5, 12)
_USUAL, _LOG_SD = 0.7, 0.5


@dataclass(frozen=True, slots=True)
class ErrorScales:
    """Factors of the deviations that `discrepancy` states: of a time to first token, of others."""

    times: float = 1.0
    ttft: float = 1.0

    def of(self, items: Sequence[Observation]) -> NDArray[np.float64]:
        """Of each figure, shape (items,)."""
        return np.array([self.ttft if item.is_ttft else self.times for item in items])


UNSCALED: Final = ErrorScales()


def find_scales(
    observations: Sequence[Observation],
    jacobian: NDArray[np.float64],
    residuals: NDArray[np.float64],
    moved: NDArray[np.float64],
    prior_sd: NDArray[np.float64],
) -> tuple[float, ErrorScales]:
    """The likeliest common scale of error and noise, and each scale's root of the mean square.

    jacobian   d ln(figure) / d ln(parameter), shape (observations, parameters)
    residuals  ln(measured / predicted), shape (observations,)
    moved      of each parameter's logarithm from its prior, shape (parameters,)

    All under their posterior. A few cells leave them open, and what is open widens: their best
    fit alone looks more exact than it is. That is a matter of intervals; it gives the prior no
    more weight against the cells, which the common scale weighs. None is below what published
    levels repeat within, however well a few cells agree.
    """
    error = error_covariance(observations, observations)
    error += np.diag([item.noise_sd**2 for item in observations])
    limits = OUTLIER * np.sqrt(np.diag(error))
    surprise = np.clip(residuals, -limits, limits) + jacobian @ moved
    explained = jacobian @ np.diag(prior_sd**2) @ jacobian.T
    told = any(item.is_ttft for item in observations)

    def cost(times: float, ttft: float) -> float:
        widths = ErrorScales(times, ttft).of(observations)
        covariance = explained + np.outer(widths, widths) * error
        _, determinant = np.linalg.slogdet(covariance)
        return float(determinant + surprise @ np.linalg.solve(covariance, surprise))

    common = min(_TIMES.tolist(), key=lambda scale: cost(scale, scale) + _prior_cost(scale))
    grid = list(itertools.product(_TIMES.tolist(), _TTFTS.tolist() if told else [_USUAL]))
    costs = [cost(*pair) + sum(map(_prior_cost, pair)) for pair in grid]
    weights = np.exp((min(costs) - np.array(costs)) / 2)
    mean_squares = np.average(np.square(grid), axis=0, weights=weights)
    if not told:  # as wide as the prior of the scale leaves it
        mean_squares[1] = (_USUAL * math.exp(_LOG_SD**2)) ** 2
    return common, ErrorScales(*np.sqrt(mean_squares).tolist())


def _prior_cost(scale: float) -> float:
    return (math.log(scale / _USUAL) / _LOG_SD) ** 2
