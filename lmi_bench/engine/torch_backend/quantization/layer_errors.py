"""Quantization error of each matrix, measured in its outputs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizeSettings
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.calibration import Told, record
from lmi_bench.engine.torch_backend.quantization.kernels import Kernels, choose_kernels
from lmi_bench.engine.torch_backend.quantization.loader import (
    COLUMN_FACTORS,
    LARGEST_INPUT,
    apply_factors,
    is_quantized_name,
    relative_error,
    round_weight,
)
from lmi_bench.engine.torch_backend.quantization.plan import QuantizePlan
from lmi_bench.engine.torch_backend.quantization.prepare import prepare
from lmi_bench.engine.torch_backend.weights import Checkpoint
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config


def layer_errors(
    folder: Path, settings: QuantizeSettings, *, dtype: str, told: Told | None = None
) -> dict[str, float]:
    """|rounded outputs - outputs| / |outputs| of every quantized matrix, by name, for inputs from
    the calibration text, with this machine's kernels."""
    config = read_config(folder)
    spec = spec_from_hf_config(folder.resolve().name, config)
    device = torch.device("cpu")
    plan = prepare(folder, config, spec, settings, degree=1, dtype=dtype, device=device, told=told)
    if plan is None or plan.stored:
        return {}
    recording = record(folder, spec, settings, dtype=dtype, device=device, told=told)
    precision = Precision(torch.float32, torch.float32)
    kernels = choose_kernels(settings, precision, device)
    errors = {}
    with Checkpoint(folder, beside=plan.factors) as checkpoint:
        for recorded, inputs in recording.inputs.items():
            for name in _same_inputs(recorded):
                if is_quantized_name(name, spec):
                    errors[name] = _error(checkpoint, name, inputs.rows.cpu(), plan, kernels)
    return errors


def _same_inputs(name: str) -> tuple[str, ...]:
    """A recorded matrix and those joined with it."""
    if not name.endswith("q_proj"):
        return (name,)
    return tuple(name.removesuffix("q_proj") + each for each in ("q_proj", "k_proj", "v_proj"))


def _error(
    checkpoint: Checkpoint, name: str, rows: Tensor, plan: QuantizePlan, kernels: Kernels
) -> float:
    full, factors, fixed = f"{name}.weight", f"{name}.{COLUMN_FACTORS}", f"{name}.{LARGEST_INPUT}"
    weight = checkpoint.tensor(full, *checkpoint.stored_shape(full)).float()
    scaled = apply_factors(checkpoint, full, weight, columns_alone=True)
    seen = rows / checkpoint.tensor(factors, rows.shape[1]) if factors in checkpoint else rows
    largest = checkpoint.tensor(fixed) if fixed in checkpoint else None
    rounded = round_weight(scaled, plan.settings, plan.group_size)
    return relative_error(kernels.make(rounded, None, largest)(seen), rows @ weight.t())
