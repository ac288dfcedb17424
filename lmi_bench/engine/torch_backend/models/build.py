"""The builders of the model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.models.falcon import build_falcon
from lmi_bench.engine.torch_backend.models.llama import build_llama, build_mixtral
from lmi_bench.models.shape import ModelShape

_BUILDERS: Final[Mapping[str, Callable[[WeightLoader, ModelShape], Decoder]]] = {
    "llama": build_llama,
    "mistral": build_llama,
    "mixtral": build_mixtral,
    "falcon": build_falcon,
    "qwen2": build_llama,
    "qwen3": build_llama,
    "qwen3_moe": build_llama,
}


def build_with(load: WeightLoader, folder: Path) -> Decoder:
    """Build a loader's model, named after its folder."""
    return _BUILDERS[load.spec.family](load, load.spec.shape(folder.resolve().name))
