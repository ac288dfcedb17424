"""Which model class runs which architecture: the one table of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from lmi_bench.engine.torch_backend.models.llama import LlamaModel
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.weights import Checkpoint
from lmi_bench.errors import InputError
from lmi_bench.model_shape import ModelShape

SUPPORTED_ARCHITECTURES: Final = {"LlamaForCausalLM": LlamaModel}


def check_architecture(folder: Path, config: Mapping[str, Any]) -> str:
    """The architecture that config.json names; InputError with the list if it is not known."""
    named = config.get("architectures") or []
    for architecture in named:
        if architecture in SUPPORTED_ARCHITECTURES:
            return str(architecture)
    raise InputError(
        f"{folder}: architecture {', '.join(map(str, named)) or 'not named in config.json'} is "
        f"not supported; the torch back end has: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def build_model(
    folder: Path,
    config: Mapping[str, Any],
    shape: ModelShape,
    precision: Precision,
    device: torch.device,
) -> LlamaModel:
    """Load the model's weights; raises InputError for what cannot be loaded."""
    model_class = SUPPORTED_ARCHITECTURES[check_architecture(folder, config)]
    with Checkpoint(folder) as checkpoint:
        return model_class(shape, config, checkpoint, precision, device)
