"""Records the inputs of a model's matrices, and finds factors that make channels easier to round.

The factors come from AWQ's search or SmoothQuant's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.layers import Linear
from lmi_bench.engine.torch_backend.loading import Joined, WeightLoader
from lmi_bench.engine.torch_backend.models.families import build_with
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.rounding import round_grouped
from lmi_bench.engine.torch_backend.runner import ModelRunner, TorchForward
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress
from lmi_bench.models.spec import DecoderSpec

SAMPLED_ROWS: Final = 256
"""Input rows kept per matrix; maxima and means are over all rows."""
_BLOCK_SIZE: Final = 64


@dataclass(slots=True)
class Inputs:
    """Inputs of one matrix. Vectors have one entry per input feature.

    rows      a sample, shape (rows, features), float32
    sum_abs   sum of absolute values over `count` rows; largest: their maximum
    """

    rows: Tensor
    sum_abs: Tensor
    largest: Tensor
    count: int = 0

    @property
    def mean_abs(self) -> Tensor:
        return self.sum_abs / max(1, self.count)

    def note(self, x: Tensor, share: float) -> None:
        """Add rows to the statistics, and keep `share` (0 to 1) of them."""
        wide = x.float()
        magnitudes = wide.abs()
        self.sum_abs += magnitudes.sum(dim=0)
        self.largest = torch.maximum(self.largest, magnitudes.amax(dim=0))
        self.count += len(x)
        wanted = min(SAMPLED_ROWS - len(self.rows), max(1, round(share * len(x))))
        if wanted > 0:
            chosen = torch.linspace(0, len(x) - 1, min(wanted, len(x))).long()
            self.rows = torch.cat((self.rows, wide[chosen]))


class Recording:
    """Inputs by the first name of each matrix."""

    def __init__(self, share: float) -> None:
        """share  fraction of rows to keep"""
        self._share = share
        self.inputs: dict[str, Inputs] = {}

    def note(self, name: str, x: Tensor) -> None:
        """Record rows x as inputs of the matrix `name`."""
        if not len(x):
            return
        if name not in self.inputs:
            zeros = torch.zeros(x.shape[1], device=x.device)
            rows = torch.empty(0, x.shape[1], device=x.device)
            self.inputs[name] = Inputs(rows, zeros, zeros.clone())
        self.inputs[name].note(x, self._share)


class _RecordedLinear:
    def __init__(self, name: str, linear: Linear, recording: Recording) -> None:
        self._name = name
        self._linear = linear
        self._recording = recording

    def __call__(self, x: Tensor) -> Tensor:
        self._recording.note(self._name, x)
        return self._linear(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        self._recording.note(self._name, x)
        return self._linear.add(x, residual)

    def silu(self, x: Tensor) -> Tensor:
        self._recording.note(self._name, x)
        return self._linear.silu(x)

    def multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        self._recording.note(self._name, x)
        return self._linear.multiply(x, factor)


class _RecordingLoader(WeightLoader):
    """As WeightLoader; its matrices record their inputs."""

    recording: Recording

    def matrix(
        self, parts: list[tuple[str, int]], columns: int, bias: Tensor | None, joined: Joined
    ) -> Linear:
        linear = super().matrix(parts, columns, bias, joined)
        return _RecordedLinear(parts[0][0], linear, self.recording)


def record_inputs(
    folder: Path,
    spec: DecoderSpec,
    precision: Precision,
    device: torch.device,
    sequences: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> Recording:
    """Run the unquantized model, which must fit into memory, over the sequences.

    progress  called with the number of sequences read and their total
    """
    total = sum(len(sequence) for sequence in sequences)
    recording = Recording(min(1.0, SAMPLED_ROWS / max(1, total)))
    with Checkpoint(folder) as checkpoint:
        load = _RecordingLoader(spec, checkpoint, precision, device)
        load.recording = recording
        model = build_with(load, folder)
    blocks = max(-(-len(sequence) // _BLOCK_SIZE) for sequence in sequences)
    layout = KvLayoutShape.of(model.shape, _BLOCK_SIZE, precision.compute)
    forward = TorchForward(model, KvCache(layout, blocks, device), precision)
    runner = ModelRunner(forward, sampling_seed=0)
    for number, sequence in enumerate(sequences, start=1):
        runner.score(sequence, 1)
        if progress is not None:
            progress(number, len(sequences))
    return recording


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
    least = _output_error(weights, weights_after(weights, None, rounded), rows)
    for step in range(1, _AWQ_STEPS):
        factors = mean_abs.clamp_min(_SMALLEST_ACTIVATION).pow(step / _AWQ_STEPS)
        factors = factors.clamp_min(_SMALLEST)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = _output_error(weights, weights_after(weights, factors, rounded), rows)
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


def _output_error(weights: list[Tensor], rounded: list[Tensor], rows: Tensor) -> float:
    return sum(
        float((rows @ (after - before).t()).square().sum())
        for before, after in zip(weights, rounded, strict=True)
    )
