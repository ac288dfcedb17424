"""Factors that make channels easier to round: AWQ's search and SmoothQuant's formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.quantization.recording import Inputs
from lmi_bench.engine.torch_backend.quantization.rounding import round_grouped

_AWQ_STEPS: Final = 20
_SMALLEST: Final = 1e-4
_SMALLEST_ACTIVATION: Final = 1e-5


def find_factors(
    settings: QuantizeSettings, group_size: int, weights: list[Tensor], inputs: Inputs
) -> Tensor | None:
    """Factors for the columns of `weights`, which read the same inputs; the inputs are divided by
    them. Shape (features,); None: leave both unchanged."""
    if settings.scheme is Scheme.SMOOTHQUANT:
        return smoothing_factors(settings.alpha, weights, inputs.largest)
    bits = settings.scheme.bits

    def rounded(weight: Tensor) -> Tensor:
        return round_grouped(weight, bits, group_size).floats()

    return search_awq_factors(weights, inputs.mean_abs, inputs.rows, rounded)


def smoothing_factors(alpha: float, weights: list[Tensor], largest: Tensor) -> Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (Xiao et al. 2022, arXiv:2211.10438, eq. 4).

    largest  max|X_j|, shape (features,); the maximum of W_j is over all the weights' rows
    """
    of_weights = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    of_weights = of_weights.clamp_min(_SMALLEST_ACTIVATION)
    factors = largest.clamp_min(_SMALLEST_ACTIVATION).pow(alpha) / of_weights.pow(1 - alpha)
    return factors.clamp_min(_SMALLEST_ACTIVATION)


def search_awq_factors(
    weights: list[Tensor],
    mean_abs: Tensor,
    rows: Tensor,
    rounded: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """The factors s = mean|X|^a with a in {0, 1/20, ..., 19/20} that minimise the squared output
    error, sum of |Q(W s) (X / s) - W X|^2 (Lin et al. 2023, arXiv:2306.00978, eq. 4 and 5). None if
    no a is better than 0, which is plain rounding.

    mean_abs  shape (features,); rows: sampled inputs, shape (rows, features)
    rounded   rounds and dequantizes a weight
    """
    best: Tensor | None = None
    least = _error(weights, weights_after(weights, None, rounded), rows)
    for step in range(1, _AWQ_STEPS):
        factors = mean_abs.clamp_min(_SMALLEST_ACTIVATION).pow(step / _AWQ_STEPS)
        factors = factors.clamp_min(_SMALLEST)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = _error(weights, weights_after(weights, factors, rounded), rows)
        if error < least:
            best, least = factors, error
    return best


def weights_after(
    weights: list[Tensor], factors: Tensor | None, rounded: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Effective weights for unscaled inputs: scaled, rounded and scaled back."""
    if factors is None:
        return [rounded(weight) for weight in weights]
    return [rounded(weight * factors) / factors for weight in weights]


def _error(weights: list[Tensor], rounded: list[Tensor], rows: Tensor) -> float:
    return sum(
        float((rows @ (after - before).t()).square().sum())
        for before, after in zip(weights, rounded, strict=True)
    )
