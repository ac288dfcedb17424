"""Which file builds which family of models: the one table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from lmi_bench.decoder_spec import DecoderSpec
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.models.falcon import build_falcon
from lmi_bench.engine.torch_backend.models.llama import build_llama, build_mixtral
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress
from lmi_bench.model_shape import ModelShape

_BUILDERS: Final[Mapping[str, Callable[[WeightLoader, ModelShape], Decoder]]] = {
    "llama": build_llama,
    "mistral": build_llama,
    "mixtral": build_mixtral,
    "falcon": build_falcon,
    "qwen2": build_llama,
    "qwen3": build_llama,
    "qwen3_moe": build_llama,
}


def build_model(
    folder: Path,
    spec: DecoderSpec,
    precision: Precision,
    device: torch.device,
    progress: Progress | None = None,
) -> Decoder:
    """Load the model's weights; raises InputError for what cannot be loaded.

    progress  called with the bytes read and the bytes there are, after each tensor
    """
    with Checkpoint(folder, progress) as checkpoint:
        load = WeightLoader(spec, checkpoint, precision, device)
        model = _BUILDERS[spec.family](load, spec.shape(folder.resolve().name))
        checkpoint.finish()
    return model
