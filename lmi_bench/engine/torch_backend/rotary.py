"""Rotary positions (Su et al. 2021, arXiv:2104.09864), halves rotated as Hugging Face stores them.

Feature i of the first half and feature i of the second rotate together by position * frequency_i,
frequency_i = theta ** (-2 i / head_dim). Contexts beyond the trained length use lower frequencies:
scaled equally (linear), low ones more than high ones (llama3, yarn), or by the sequence's length
(dynamic), or each by a factor of its own (longrope). With a `partial_rotary_factor` the other
features have frequency 0: they rotate by nothing, beside others that do (`turned_order`).
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.core.errors import InputError

SCALINGS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
Settings = Mapping[str, Any]
_TRAINED: Final = "original_max_position_embeddings"


class Rotary:
    """The angles of a step's rows, computed once per step and used by every layer."""

    def __init__(self, settings: Settings, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """settings  from `DecoderSpec.rope`; raises InputError for an unknown scaling."""
        frequencies, amplitude = rotary_frequencies(settings, head_dim)
        self._frequencies = frequencies.to(device)
        self._amplitude = torch.where(self._frequencies > 0, amplitude, 1.0)
        self._growth = dynamic_growth(settings, head_dim)
        self._trained = float(settings[_TRAINED])
        self._exponents = _padded(_exponents(rotated(settings, head_dim)), head_dim).to(device)
        self._dtype = dtype

    def at(self, positions: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of rows, shape (rows, 1, head_dim).

        positions  shape (rows,); contexts: current length of each row's sequence
        """
        frequencies = self._frequencies
        if self._growth is not None:
            factor, power = self._growth
            over = contexts.clamp(min=self._trained).to(torch.float32) / self._trained
            slower = (factor * over - (factor - 1.0)) ** power  # theta grows by this
            frequencies = frequencies / slower[:, None] ** self._exponents
        angles = positions.to(torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * self._amplitude, angles.sin() * self._amplitude
        return (
            torch.cat((cos, cos), dim=-1).to(self._dtype)[:, None],
            torch.cat((-sin, sin), dim=-1).to(self._dtype)[:, None],
        )


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads x, shape (tokens, heads, head_dim), by their tokens' angles."""
    cos, sin = turn
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def rotary_frequencies(settings: Settings, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position for each pair of features, shape (head_dim / 2,), and the factor of
    cosines and sines.

    Raises InputError for an unknown scaling.
    """
    size, amplitude = rotated(settings, head_dim), 1.0
    frequencies = 1.0 / float(settings["rope_theta"]) ** _exponents(size)
    match settings["rope_type"]:
        case "default" | "dynamic":  # dynamic: up to the trained length
            pass
        case "linear":
            frequencies /= _number(settings, "factor")
        case "llama3":
            frequencies = _llama3(frequencies, settings)
        case "yarn":
            frequencies, amplitude = _yarn(frequencies, settings, size), _amplitude(settings)
        case "longrope":
            frequencies /= _short_factors(settings, len(frequencies))
            amplitude = _amplitude(settings)
        case kind:
            raise InputError(f"RoPE scaling {kind!r} is not supported; the torch back end has: {', '.join(SCALINGS)}")
    return _padded(frequencies, head_dim), amplitude


def rotated(settings: Settings, head_dim: int) -> int:
    """Features of a head that rotate, a multiple of 2."""
    return int(head_dim * settings.get("partial_rotary_factor", 1.0))


def turned_order(settings: Settings, head_dim: int, *, before: int = 0) -> Tensor | None:
    """The order of a head's features in which feature i of both halves rotates together; None: as
    stored. Both queries and keys need it, and no score changes. With `rope_interleave` stored
    neighbours rotate together, else both halves of those that rotate.

    before  features in front of these that do not rotate
    """
    size, pairs = rotated(settings, head_dim), settings.get("rope_interleave", False)
    if size == head_dim and not pairs:
        return None
    turned, rest = torch.arange(size), torch.arange(size, head_dim)
    halves = (turned[::2], turned[1::2]) if pairs else turned.chunk(2)
    left, right = rest.tensor_split(2)
    order = torch.cat((halves[0], left, halves[1], right))
    return torch.cat((torch.arange(before), before + order))


def _padded(values: Tensor, head_dim: int) -> Tensor:
    """Zeros behind those of the features that rotate."""
    return functional.pad(values, (0, head_dim // 2 - len(values)))


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim


def dynamic_growth(settings: Settings, head_dim: int) -> tuple[float, float] | None:
    """Factor and power of dynamic scaling; None for other scalings.

    theta grows by (factor * length / trained length - (factor - 1)) ** (d / (d - 2)) once a
    sequence is longer than trained, so that the lowest frequency stays in the trained range
    ("NTK-aware" scaling, as in transformers). Cached keys keep their rotation, so beyond the
    trained length a prompt in chunks is rotated like one that grew token by token.
    """
    if settings["rope_type"] != "dynamic":
        return None
    size = rotated(settings, head_dim)
    return _number(settings, "factor"), size / (size - 2)


def _llama3(frequencies: Tensor, settings: Settings) -> Tensor:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, with a ramp.

    Source: `apply_scaling` of meta-llama/llama-models; the ramp runs over wavelengths from
    original length / high_freq_factor to original length / low_freq_factor.
    """
    factor = _number(settings, "factor")
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    turns = _number(settings, _TRAINED) * frequencies / (2 * math.pi)
    kept_frac = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept_frac * frequencies + (1 - kept_frac) * frequencies / factor


def _yarn(frequencies: Tensor, settings: Settings, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2): as llama3, but the ramp is linear in
    the feature's index, between `beta_fast` and `beta_slow` rotations over the trained length."""
    theta, trained = settings["rope_theta"], _number(settings, _TRAINED)
    if theta <= 1:
        raise InputError(f"config.json: yarn needs a rope_theta above 1, not {theta}")

    def index_of(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = index_of(float(settings.get("beta_fast") or 32))
    last = index_of(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed_frac = ((index - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    slowed = frequencies / _number(settings, "factor")
    return slowed * slowed_frac + frequencies * (1 - slowed_frac)


def _short_factors(settings: Settings, count: int) -> Tensor:
    """LongRoPE's divisors of frequencies up to the trained length (Ding et al. 2024,
    arXiv:2402.13753)."""
    factors = settings.get("short_factor")
    if type(factors) is not list or [type(f) in (int, float) for f in factors] != [True] * count:
        raise InputError(f"config.json: longrope needs a short_factor of {count} numbers")
    return torch.tensor(factors, dtype=torch.float32)


def _amplitude(settings: Settings) -> float:
    """Factor that sharpens attention over long contexts, as configured, or else of yarn
    0.1 ln(factor) + 1 and of longrope the root of 1 + ln(factor) / ln(trained length)."""
    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")
    factor = _number(settings, "factor")
    if factor <= 1:
        return 1.0
    if settings["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(_number(settings, _TRAINED)))
    scale, of_all = settings.get("mscale"), settings.get("mscale_all_dim")
    if not scale or not of_all:
        scale, of_all = 1.0, 0.0
    above, below = (0.1 * float(each) * math.log(factor) + 1.0 for each in (scale, of_all))
    return above / below


def _number(settings: Settings, key: str) -> float:
    value = settings.get(key)
    if not isinstance(value, int | float):
        raise InputError(f"config.json: RoPE scaling {settings.get('rope_type')!r} needs {key}")
    return float(value)
