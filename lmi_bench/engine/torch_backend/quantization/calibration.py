"""Calibration: the model reads a text, and its channels' activations determine the factors.

The factors are a small file in the cache folder, named by a hash of their inputs: every rank reads
its part, and a second start does not calibrate again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.texts import CALIBRATION, read_text
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.engine.torch_backend.memory import free_memory_bytes
from lmi_bench.engine.torch_backend.precision import choose_precision
from lmi_bench.engine.torch_backend.quantization.loader import (
    COLUMN_FACTORS,
    LARGEST_INPUT,
    OUTPUT_DIVISORS,
    is_quantized_name,
)
from lmi_bench.engine.torch_backend.quantization.recording import Recording, record_inputs
from lmi_bench.engine.torch_backend.quantization.scale_groups import scale_groups
from lmi_bench.engine.torch_backend.quantization.scale_search import find_factors
from lmi_bench.engine.torch_backend.weights import Checkpoint
from lmi_bench.models.spec import DecoderSpec

SEQUENCE_TOKENS: Final = 128
MOST_SEQUENCES: Final = 32
_VERSION: Final = 1  # of the factors: increment when their computation changes

Told = Callable[[str, float, float], None]
"""Called with the name of the current work, the amount done, and the total."""


def calibration_sequences(
    folder: Path, text_file: Path | None, spec: DecoderSpec
) -> list[list[int]]:
    """A text as token ids, split into sequences of at most 128 tokens.

    Raises InputError if the file cannot be read or is too short.
    """
    text = read_text(text_file, CALIBRATION)
    token_ids = Tokenizer.from_folder(folder).encode(text)
    length = min(SEQUENCE_TOKENS, spec.max_positions)
    token_ids = token_ids[: length * MOST_SEQUENCES]
    if len(token_ids) < 2:
        raise InputError(f"{text_file}: the calibration text has fewer than two tokens")
    starts = range(0, len(token_ids) - 1, length)
    return [token_ids[start : start + length] for start in starts]


def calibrated_factors(
    folder: Path,
    spec: DecoderSpec,
    settings: QuantizeSettings,
    group_size: int,
    *,
    dtype: str,
    device: torch.device,
    told: Told | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """The file with a model's factors, from the cache or newly computed.

    cache_dir  None: $XDG_CACHE_HOME/lmi-bench/quantization, or below ~/.cache
    """
    place = cache_dir or _default_cache_dir()
    path = place / f"{_key(folder, settings, group_size, dtype)}.safetensors"
    if path.is_file():
        return path
    factors = find_all_factors(
        folder,
        spec,
        settings,
        group_size,
        record(folder, spec, settings, dtype=dtype, device=device, told=told),
        told=told,
    )
    place.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(prefix=".factors-", dir=place)
    os.close(handle)
    try:
        save_file(factors, unfinished)
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path


def record(
    folder: Path,
    spec: DecoderSpec,
    settings: QuantizeSettings,
    *,
    dtype: str,
    device: torch.device,
    told: Told | None = None,
) -> Recording:
    """Inputs of every matrix while the model reads the calibration text of `settings`."""
    sequences = calibration_sequences(folder, settings.calibration, spec)
    precision = choose_precision(
        dtype,
        device,
        parameters=spec.params_total,
        free_bytes=free_memory_bytes(device),
    )
    report = None if told is None else _reporter(told, "calibration, sequences")
    return record_inputs(folder, spec, precision, device, sequences, report)


def find_all_factors(
    folder: Path,
    spec: DecoderSpec,
    settings: QuantizeSettings,
    group_size: int,
    recording: Recording,
    *,
    told: Told | None = None,
) -> dict[str, Tensor]:
    """Factors of every group of a model, by the names that the loader uses."""
    factors: dict[str, Tensor] = {}
    groups = scale_groups(spec)
    with Checkpoint(folder) as checkpoint:
        for number, group in enumerate(groups, start=1):
            inputs = recording.inputs.get(group.seen_at)
            if inputs is None:  # an expert that no token of the text chose
                continue
            weights = [
                _weight(checkpoint, name, inputs.rows.device)
                for name in group.readers
                if is_quantized_name(name, spec)
            ]
            found = find_factors(settings, group_size, weights, inputs)
            if found is not None:
                factors[f"{group.producer}.{OUTPUT_DIVISORS}"] = found.cpu()
                for name in group.readers:
                    factors[f"{name}.{COLUMN_FACTORS}"] = found.cpu().clone()
            if told is not None:
                told("scales of layers", number, len(groups))
    if settings.scheme is Scheme.SMOOTHQUANT and not settings.per_token:
        factors |= _largest_inputs(recording, factors)
    if not factors:  # a file needs a tensor
        factors["none"] = torch.zeros(1)
    return factors


def _largest_inputs(recording: Recording, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest input of every matrix, after division by the factors."""
    largest = {}
    for name, inputs in recording.inputs.items():
        factor = factors.get(f"{name}.{COLUMN_FACTORS}")
        values = inputs.largest.cpu()
        largest[f"{name}.{LARGEST_INPUT}"] = (values if factor is None else values / factor).max()
    return largest


def _weight(checkpoint: Checkpoint, name: str, device: torch.device) -> Tensor:
    full = f"{name}.weight"
    return checkpoint.tensor(full, *checkpoint.stored_shape(full)).to(device).float()


def _reporter(told: Told, title: str) -> Callable[[int, int], None]:
    return lambda done, total: told(title, done, total)


def _key(folder: Path, settings: QuantizeSettings, group_size: int, dtype: str) -> str:
    """File name from everything that the factors depend on; weight files count by size and
    modification time."""
    stated: list[object] = [
        _VERSION,
        settings.scheme.value,
        group_size,
        dtype,
        hashlib.sha256(read_text(settings.calibration, CALIBRATION).encode()).hexdigest(),
        (folder / "config.json").read_text(encoding="utf-8"),
    ]
    if settings.scheme is Scheme.SMOOTHQUANT:
        stated += [settings.alpha, settings.per_token]
    names: Sequence[Path] = sorted(folder.resolve().glob("*.safetensors"))
    stated += [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in names]
    digest = hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:24]
    return f"{settings.scheme.value}-{digest}"


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lmi-bench" / "quantization"
