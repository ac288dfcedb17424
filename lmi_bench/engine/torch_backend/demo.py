"""Demo models: Llamas with fixed random weights, generated on first use without a download.

They are for measuring: speed, memory and token counts match any model of that shape; their text
has no meaning. Weights are stored as bfloat16, 2 bytes per parameter.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.core.native_build import default_cache_dir
from lmi_bench.engine.torch_backend.demo_vocabulary import VOCAB_SIZE, demo_tokenizer_json

_VERSION: Final = "v1"  # part of the cache folder's name: increment when a file's content changes
_SEED: Final = 20_261_121
_DATA: Final[Mapping[str, Any]] = json.loads(
    resources.files("lmi_bench.engine.torch_backend").joinpath("data/demo.json").read_text("utf-8")
)
DEMO_MODELS: Final[Mapping[str, Mapping[str, int]]] = _DATA["sizes"]
"""Names, and sizes as in config.json; embeddings are tied, so 15.2 and 109.5 million parameters."""


def ensure_demo_model(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of a demo model, written first if it does not exist.

    cache_dir  None: $XDG_CACHE_HOME/lmi-bench/models, or ~/.cache/lmi-bench/models

    Safe for concurrent processes: a folder appears complete or not at all. Raises InputError for
    an unknown name.
    """
    if name not in DEMO_MODELS:
        raise InputError(f"demo model {name!r} is unknown; known: {', '.join(DEMO_MODELS)}")
    parent = default_cache_dir("models") if cache_dir is None else cache_dir
    folder = parent / f"{name}-{_VERSION}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as place:
        unfinished = Path(place) / folder.name
        unfinished.mkdir()
        _write(unfinished, DEMO_MODELS[name])
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    return folder


def _write(folder: Path, sizes: Mapping[str, int]) -> None:
    save_file(_weights(sizes), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(demo_tokenizer_json(), encoding="utf-8")
    for name, content in _DATA["files"].items():
        stated = {**content, **sizes} if name == "config" else content
        text = json.dumps(stated, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def _weights(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Normal weights with variance 1 / inputs, which keep the scale of activations. Embeddings are
    smaller: with tied ones the model would otherwise repeat the last token."""
    generator = torch.Generator().manual_seed(_SEED)

    def normal(rows: int, columns: int, std: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)

    hidden, ffn = sizes["hidden_size"], sizes["intermediate_size"]
    inputs_of = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    inputs_of |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    inputs_of |= {"mlp.down_proj": (hidden, ffn)}
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": normal(VOCAB_SIZE, hidden, 0.02)}
    for index in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        for name, (rows, columns) in inputs_of.items():
            weights[f"{prefix}.{name}.weight"] = normal(rows, columns, 1 / math.sqrt(columns))
        weights[f"{prefix}.input_layernorm.weight"] = ones.clone()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones.clone()
    weights["model.norm.weight"] = ones.clone()
    return weights
