"""Which file builds which family of models: the one table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from lmi_bench.engine.torch_backend.collectives import Collectives
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.models.falcon import build_falcon
from lmi_bench.engine.torch_backend.models.llama import build_llama, build_mixtral
from lmi_bench.engine.torch_backend.parallel import RankCheckpoint, rank_spec
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.loader import QuantizingLoader
from lmi_bench.engine.torch_backend.quantization.plan import QuantizePlan
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec

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
    plan: QuantizePlan | None = None,
) -> Decoder:
    """Load the model's weights; raises InputError for what cannot be loaded.

    progress     called with the bytes read and the bytes there are, after each tensor
    collectives  of the ranks that share the model, each with its part; None: all of it is here
    plan         how its matrices are quantized; None: they are not
    """
    beside = None if plan is None else plan.factors
    if collectives is None:
        opened = Checkpoint(folder, progress, beside=beside)
    else:
        opened = RankCheckpoint(folder, spec, collectives, progress, beside=beside)
        spec = rank_spec(spec, collectives.degree)
    with opened as checkpoint:
        if plan is None:
            load = WeightLoader(spec, checkpoint, precision, device, collectives)
        else:
            load = QuantizingLoader(spec, checkpoint, precision, device, collectives, plan)
        model = build_with(load, folder)
        checkpoint.finish()
    return model


def build_with(load: WeightLoader, folder: Path) -> Decoder:
    """The model of a loader, named after its folder."""
    return _BUILDERS[load.spec.family](load, load.spec.shape(folder.resolve().name))
