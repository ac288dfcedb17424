"""Calibration and the quantization plan: a model reads a text, its activations give the factors.

The factors are a small file in the cache folder, named by a hash of their inputs: every rank reads
its part, and a second start does not calibrate again.

Factors move between a norm or matrix and the matrices that read its output: dividing a producer's
outputs and multiplying the matching columns of all its readers leaves the model's function
unchanged. Outputs that pass a nonlinearity (Falcon's GELU) or that readers use in other shapes
(values shared by query heads) are excluded."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save
from torch import Tensor

from lmi_bench.core.durable import write_inside
from lmi_bench.core.errors import InputError
from lmi_bench.core.native_build import default_cache_dir
from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.texts import CALIBRATION, read_text
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.layers import Linear
from lmi_bench.engine.torch_backend.loading import Joined, WeightLoader
from lmi_bench.engine.torch_backend.models.families import build_with
from lmi_bench.engine.torch_backend.precision import choose_precision
from lmi_bench.engine.torch_backend.quantization import loader
from lmi_bench.engine.torch_backend.quantization.rounding import round_grouped
from lmi_bench.engine.torch_backend.runner import ModelRunner, TorchForward
from lmi_bench.engine.torch_backend.weights import Checkpoint, ModelSource, Tell
from lmi_bench.models.spec import DecoderSpec

SAMPLED_ROWS: Final = 256  # input rows kept per matrix; maxima and means are over all rows
_BLOCK_SIZE: Final = 64


class Inputs:
    """Inputs of one matrix. Vectors have one entry per input feature.

    rows      a sample, shape (rows, features), float32: `share` (0 to 1) of all
    sum_abs   sum of absolute values over `count` rows; largest: their maximum
    """

    def __init__(self, features: int, share: float, device: torch.device) -> None:
        self.rows = torch.empty(0, features, device=device)
        self.sum_abs = torch.zeros(features, device=device)
        self.largest = self.sum_abs.clone()
        self.count = 0
        self._share = share

    def note(self, x: Tensor) -> None:
        """Add rows to the statistics, and keep a share of them."""
        if not len(x):
            return
        wide = x.float()
        magnitudes = wide.abs()
        self.sum_abs += magnitudes.sum(dim=0)
        self.largest = torch.maximum(self.largest, magnitudes.amax(dim=0))
        self.count += len(x)
        wanted = min(SAMPLED_ROWS - len(self.rows), max(1, round(self._share * len(x))))
        if wanted > 0:
            chosen = torch.linspace(0, len(x) - 1, min(wanted, len(x))).long()
            self.rows = torch.cat((self.rows, wide[chosen]))


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedLinear(Linear):
    """A layer that records its inputs."""

    linear: Linear
    inputs: Inputs

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs.note(x)
        return self.linear(x)


@dataclass(eq=False)
class _RecordingLoader(WeightLoader):
    """As WeightLoader; its matrices record their inputs, by the first name of each."""

    share: float = field(kw_only=True)
    inputs: dict[str, Inputs] = field(default_factory=dict, init=False)

    def matrix(self, parts: list[tuple[str, int]], columns: int, bias: Tensor | None, joined: Joined) -> Linear:
        inputs = self.inputs[parts[0][0]] = Inputs(columns, self.share, self.device)
        return _RecordedLinear(super().matrix(parts, columns, bias, joined), inputs)


_AWQ_STEPS: Final = 20
_SMALLEST: Final = 1e-4
_SMALLEST_ACTIVATION: Final = 1e-5


def find_factors(settings: QuantizeSettings, group_size: int, weights: list[Tensor], inputs: Inputs) -> Tensor | None:
    """Factors for the columns of `weights`, which read the same inputs; the inputs are divided by
    them. Shape (features,); None: leave both unchanged."""
    if settings.scheme is Scheme.SMOOTHQUANT:
        return smoothing_factors(settings.alpha, weights, inputs.largest)
    mean_abs, bits = inputs.sum_abs / inputs.count, settings.scheme.bits
    return search_awq_factors(
        weights, mean_abs, inputs.rows, lambda each: round_grouped(each, bits, group_size).floats()
    )


def smoothing_factors(alpha: float, weights: list[Tensor], largest: Tensor) -> Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (Xiao et al. 2022, arXiv:2211.10438, eq. 4).

    largest  max|X_j|, shape (features,); the maximum of W_j is over all the weights' rows
    """
    of_weights = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    of_weights = of_weights.clamp_min(_SMALLEST_ACTIVATION)
    factors = largest.clamp_min(_SMALLEST_ACTIVATION).pow(alpha) / of_weights.pow(1 - alpha)
    return factors.clamp_min(_SMALLEST_ACTIVATION)


def search_awq_factors(
    weights: list[Tensor], mean_abs: Tensor, rows: Tensor, rounded: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The factors s = mean|X|^a with a in {0, 1/20, ..., 19/20} that minimise the squared output
    error, sum of |Q(W s) (X / s) - W X|^2 (Lin et al. 2023, arXiv:2306.00978, eq. 4 and 5). None if
    no a is better than 0, which is plain rounding.

    mean_abs  shape (features,); rows: sampled inputs, shape (rows, features)
    rounded   rounds and dequantizes a weight
    """
    best, least = None, math.inf
    for step in range(_AWQ_STEPS):
        factors = mean_abs.clamp_min(_SMALLEST_ACTIVATION).pow(step / _AWQ_STEPS)
        factors = factors.clamp_min(_SMALLEST)
        factors = factors / (factors.max() * factors.min()).sqrt()
        changes = (rounded(weight * factors) / factors - weight for weight in weights)
        error = sum(float((rows @ change.t()).square().sum()) for change in changes)
        if error < least:
            best, least = factors if step else None, error
    return best


def scale_groups(spec: DecoderSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """All groups of a model, layer by layer: the norm or matrix whose outputs are divided, and the
    matrices whose columns are multiplied, including routers of experts; the recorded inputs of the
    first one represent all."""
    for index in range(spec.num_layers):
        layer = spec.layer(index)
        (attention,), (mlp,) = spec.names(layer, "attention"), spec.names(layer, "mlp")
        parts = [f"{mlp}.experts.{number}" for number in range(spec.experts)] or [mlp]
        inner = [spec.names(part, "inner") for part in parts]
        queries, routers = spec.names(attention, "qkv"), spec.names(mlp, "router")
        reading = (*(routers if spec.experts else ()), *chain(*inner))
        norms = spec.names(layer, "norms")
        readers = (queries, reading) if len(norms) == 2 else (queries + reading,)
        yield from zip(norms, readers, strict=True)
        if len(queries) == 3 and spec.num_heads == spec.num_kv_heads:
            yield queries[-1], spec.names(attention, "out")
        if spec.gated_mlp:
            for part, names in zip(parts, inner, strict=True):
                yield names[-1], spec.names(part, "down")


SEQUENCE_TOKENS: Final = 128
MOST_SEQUENCES: Final = 32
_VERSION: Final = 1  # of the factors: increment when their computation changes


def calibration_sequences(folder: Path, text_file: Path | None, spec: DecoderSpec) -> list[list[int]]:
    """A text as token ids, split into sequences of at most 128 tokens. Raises InputError if the
    file cannot be read or is too short."""
    text = read_text(text_file, CALIBRATION)
    token_ids = Tokenizer.from_folder(folder).encode(text)
    length = min(SEQUENCE_TOKENS, spec.max_positions)
    token_ids = token_ids[: length * MOST_SEQUENCES]
    if len(token_ids) < 2:
        raise InputError(f"{text_file}: the calibration text has fewer than two tokens")
    starts = range(0, len(token_ids) - 1, length)
    return [token_ids[start : start + length] for start in starts]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The search for a model's factors.

    dtype  storage format of the weights
    tell   called with the progress
    """

    source: ModelSource
    settings: QuantizeSettings
    dtype: str
    device: torch.device
    tell: Tell | None = None

    def factors(self, group_size: int) -> Path:
        """The file with the factors, from the cache folder or newly computed."""
        path = default_cache_dir("quantization") / f"{self._key(group_size)}.safetensors"
        if not path.is_file():
            write_inside(path, save(self._find_all(group_size, self.record())))
        return path

    def record(self) -> dict[str, Inputs]:
        """Inputs of every matrix that has any, by its first name, while the unquantized model,
        which must fit into memory, reads the calibration text."""
        folder, spec, device = self.source.folder, self.source.spec, self.device
        sequences = calibration_sequences(folder, self.settings.calibration, spec)
        precision = choose_precision(self.dtype, device, parameters=spec.params_total)
        total = sum(len(sequence) for sequence in sequences)
        share = min(1.0, SAMPLED_ROWS / max(1, total))
        with Checkpoint(folder, spec=spec) as checkpoint:
            load = _RecordingLoader(spec, checkpoint, precision, device, share=share)
            model = build_with(load, folder)
        blocks = max(-(-len(sequence) // _BLOCK_SIZE) for sequence in sequences)
        layout = KvLayoutShape.of(model.shape, _BLOCK_SIZE, precision.compute)
        forward = TorchForward(model, KvCache(layout, blocks, device))
        runner = ModelRunner(forward, sampling_seed=0)
        for number, sequence in enumerate(sequences, start=1):
            runner.score(sequence, 1)
            if self.tell is not None:
                self.tell("calibration, sequences", number, len(sequences))
        return {name: inputs for name, inputs in load.inputs.items() if inputs.count}

    def _find_all(self, group_size: int, recorded: dict[str, Inputs]) -> dict[str, Tensor]:
        """Factors of every group, by the names that the loader uses."""
        factors: dict[str, Tensor] = {}
        settings, groups = self.settings, list(scale_groups(self.source.spec))
        with Checkpoint(self.source.folder, spec=self.source.spec) as checkpoint:
            for number, (producer, readers) in enumerate(groups, start=1):
                inputs = recorded.get(readers[0])
                if inputs is None:  # an expert that no token of the text chose
                    continue
                weights = [
                    checkpoint.whole(f"{name}.weight").to(inputs.rows.device).float()
                    for name in readers
                    if loader.is_quantized_name(name, self.source.spec)
                ]
                found = find_factors(settings, group_size, weights, inputs)
                if found is not None:
                    factors[f"{producer}.{loader.OUTPUT_DIVISORS}"] = found.cpu()
                    for name in readers:
                        factors[f"{name}.{loader.COLUMN_FACTORS}"] = found.cpu().clone()
                if self.tell is not None:
                    self.tell("scales of layers", number, len(groups))
        if settings.scheme is Scheme.SMOOTHQUANT and not settings.per_token:
            for name, inputs in recorded.items():  # after division by the factors
                factor = factors.get(f"{name}.{loader.COLUMN_FACTORS}", torch.ones(1))
                factors[f"{name}.{loader.LARGEST_INPUT}"] = (inputs.largest.cpu() / factor).max()
        if not factors:  # a file needs a tensor
            factors["none"] = torch.zeros(1)
        return factors

    def _key(self, group_size: int) -> str:
        """File name from everything that the factors depend on; weight files count by size and
        modification time."""
        settings, folder = self.settings, self.source.folder
        stated: list[object] = [
            _VERSION,
            settings.scheme.value,
            group_size,
            self.dtype,
            hashlib.sha256(read_text(settings.calibration, CALIBRATION).encode()).hexdigest(),
            (folder / "config.json").read_text(encoding="utf-8"),
        ]
        if settings.scheme is Scheme.SMOOTHQUANT:
            stated += [settings.alpha, settings.per_token]
        names = sorted(folder.resolve().glob("*.safetensors"))
        stated += [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in names]
        digest = hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:24]
        return f"{settings.scheme.value}-{digest}"


def prepare(calibration: Calibration, *, degree: int = 1) -> loader.QuantizePlan | None:
    """The plan for a model's weights; None without quantization. Calibrates if needed.

    degree  ranks that the model is split over
    Raises InputError if the folder's weights already have another quantization.
    """
    source, settings = calibration.source, calibration.settings
    folder, spec = source.folder, source.spec
    stored = loader.stored_plan(folder, source.config, spec, degree)
    if stored is None and settings.scheme is Scheme.NONE:
        stored = loader.kept_plan(source.config, calibration.device, degree)
    if stored is not None:
        if settings.scheme not in (Scheme.NONE, stored.settings.scheme):
            raise InputError(
                f"{folder.name} has weights quantized as {stored.settings.scheme}: they cannot "
                f"be quantized as {settings.scheme}; leave --quantize out"
            )
        return stored
    if settings.scheme is Scheme.NONE:
        return None
    group_size = loader.check_group_size(folder.name, spec, degree) if settings.scheme.grouped else 0
    if settings.scheme.calibrated and (spec.norm_plus_one or spec.sinks or spec.dense_layers or spec.shared_ffn_size):
        raise InputError(f"{folder.name}: {settings.scheme} has no factors for {spec.family}'s norms")
    factors = calibration.factors(group_size) if settings.scheme.calibrated else None
    return loader.QuantizePlan(settings, group_size, factors)
