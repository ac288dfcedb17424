"""Which file builds which family of models: the one table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from lmi_bench.decoder_spec import DecoderSpec
from lmi_bench.engine.torch_backend.collectives import Collectives
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.models.falcon import build_falcon
from lmi_bench.engine.torch_backend.models.llama import build_llama, build_mixtral
from lmi_bench.engine.torch_backend.parallel import RankCheckpoint, rank_spec
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
    collectives: Collectives | None = None,
) -> Decoder:
    """Load the model's weights; raises InputError for what cannot be loaded.

    progress     called with the bytes read and the bytes there are, after each tensor
    collectives  of the ranks that share the model, each with its part; None: all of it is here
    """
    if collectives is None:
        opened = Checkpoint(folder, progress)
    else:
        opened = RankCheckpoint(folder, spec, collectives, progress)
        spec = rank_spec(spec, collectives.degree)
    with opened as checkpoint:
        load = WeightLoader(spec, checkpoint, precision, device, collectives)
        model = _BUILDERS[spec.family](load, spec.shape(folder.resolve().name))
        checkpoint.finish()
    return model
