"""Makes the quantization plan for loading, from settings and a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lmi_bench.core.errors import InputError
from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.quantization.calibration import Told, calibrated_factors
from lmi_bench.engine.torch_backend.quantization.plan import (
    QuantizePlan,
    check_group_size,
    stored_plan,
)
from lmi_bench.models.spec import DecoderSpec


def prepare(
    folder: Path,
    config: Mapping[str, Any],
    spec: DecoderSpec,
    settings: QuantizeSettings,
    *,
    degree: int,
    dtype: str,
    device: torch.device,
    told: Told | None = None,
) -> QuantizePlan | None:
    """The plan for a model's weights; None without quantization. Calibrates if needed.

    degree  ranks that the model is split over

    Raises InputError if the folder's weights already have another quantization.
    """
    stored = stored_plan(folder, config, spec, degree)
    if stored is not None:
        if settings.scheme not in (Scheme.NONE, stored.settings.scheme):
            raise InputError(
                f"{folder.name} has weights quantized as {stored.settings.scheme}: they cannot "
                f"be quantized as {settings.scheme}; leave --quantize out"
            )
        return stored
    if settings.scheme is Scheme.NONE:
        return None
    group_size = check_group_size(folder.name, spec, degree) if settings.scheme.grouped else 0
    factors = None
    if settings.scheme.calibrated:
        factors = calibrated_factors(
            folder, spec, settings, group_size, dtype=dtype, device=device, told=told
        )
    return QuantizePlan(settings, group_size, factors)
