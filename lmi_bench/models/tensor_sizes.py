"""Sizes of a model by the names and shapes of its tensors, where config.json does not tell them."""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import read_object

_LAYER = re.compile(r"\.(\d+)\.")
_HEAD_DIM, _KV_HEADS, _VOCAB = 128, 8, 128_000  # usual ones, where no tensor tells
_PARTS = {
    "embedding": re.compile(r"(embed_tokens|wte|(tok|word)_embeddings|embedding)\.weight$"),
    "key": re.compile(r"(k_proj|wk|key)\.weight$"),
    "query": re.compile(r"(q_proj|wq|query)\.weight$"),
    "up": re.compile(r"(up_proj|w3|fc1|c_fc|dense_h_to_4h)\.weight$"),
}
_LONGEST_HEADER = 1 << 28


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """num_bytes: of all tensors; layers; shapes: of the first tensor of each part."""

    num_bytes: int = 0
    layers: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """By the headers of the folder's safetensors files, else by their index; 0 without."""
        files = sorted(folder.glob("*.safetensors"))
        headers: dict[str, Any] = {}
        for path in files:
            headers |= _header(path)
        num_bytes = sum(end - start for start, end in (e["data_offsets"] for e in headers.values()))
        names, index = list(headers), folder / "model.safetensors.index.json"
        if not files and index.is_file():
            content = read_object(index)
            names = list(content.get("weight_map") or ())
            num_bytes = int((content.get("metadata") or {}).get("total_size") or 0)
        numbers = [int(found[1]) for name in names if (found := _LAYER.search(name))]
        shapes = {
            part: tuple(entry["shape"])
            for part, pattern in _PARTS.items()
            for name, entry in reversed(headers.items())
            if pattern.search(name)
        }
        return cls(num_bytes, max(numbers, default=-1) + 1, shapes)

    def as_config(self) -> dict[str, int]:
        """The sizes as keys of a config.json that lacks them."""
        by_bytes = math.sqrt(self.num_bytes / 2 / 12 / self.layers)  # 12 matrices of h * h a layer
        vocab, hidden = self.shapes.get("embedding", (_VOCAB, round(by_bytes / 1024) * 1024))
        (query, *_), (key, *_) = (
            self.shapes.get("query", (hidden,)), self.shapes.get("key", (_KV_HEADS * _HEAD_DIM,))
        )  # fmt: skip
        head = math.gcd(_HEAD_DIM, math.gcd(query, key))
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": hidden,
            "vocab_size": vocab,
            "num_attention_heads": query // head,
            "num_key_value_heads": key // head,
            "head_dim": head,
            "intermediate_size": self.shapes.get("up", (4 * hidden,))[0],
        }


NO_TENSORS = TensorSizes()


def _header(path: Path) -> dict[str, Any]:
    """Names, shapes and offsets of a safetensors file's tensors."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        return {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, AttributeError) as exc:
        raise InputError(f"{path} is no safetensors file: {exc}") from exc
