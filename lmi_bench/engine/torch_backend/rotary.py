"""Rotary positions (Su et al. 2021, arXiv:2104.09864), halves rotated as Hugging Face stores them.

Feature i of the first half and feature i of the second turn together by position * frequency_i,
frequency_i = theta ** (-2 i / head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.errors import InputError

SCALINGS: Final = ("default", "linear", "llama3")


class RotaryTable:
    """Cosines and sines of every position a model may see; shape (positions, head_dim) each."""

    def __init__(
        self, frequencies: Tensor, num_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of these tokens, shape (tokens, 1, head_dim)."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn heads x, shape (tokens, heads, head_dim), by their tokens' angles."""
    cos, sin = turn
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def rotary_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Radians a position for each pair of features, from config.json; shape (head_dim / 2,).

    Raises InputError for a kind of scaling that is not known.
    """
    settings: dict[str, Any] = dict(
        config.get("rope_parameters") or config.get("rope_scaling") or {}
    )
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    kind = settings.get("rope_type") or settings.get("type") or "default"
    match kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / _number(settings, "factor")
        case "llama3":
            return _llama3(frequencies, settings)
    raise InputError(
        f"RoPE scaling {kind!r} is not supported; the torch back end has: {', '.join(SCALINGS)}"
    )


def _llama3(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: slow turns divided by `factor`, fast ones kept, a ramp between.

    Source: `apply_scaling` of meta-llama/llama-models; the ramp runs over wavelengths from
    original length / high_freq_factor to original length / low_freq_factor.
    """
    factor = _number(settings, "factor")
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    turns = _number(settings, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept_frac = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept_frac * frequencies + (1 - kept_frac) * frequencies / factor


def _number(settings: Mapping[str, Any], key: str) -> float:
    value = settings.get(key)
    if not isinstance(value, int | float):
        raise InputError(f"config.json: RoPE scaling {settings.get('rope_type')!r} needs {key}")
    return float(value)
