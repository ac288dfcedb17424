"""The sizes of a model by the tensors of its folder, for a config.json that does not state them."""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lmi_bench.core.durable import parsed_json
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import JsonValue
from lmi_bench.models.folder import TensorIndex, read_object

_LAYER = re.compile(r"\.(\d{1,9})\.")
_HEAD_DIM, _KV_HEADS, _VOCAB = 128, 8, 128_000  # usual ones, where no tensor tells
_PARTS = {
    "embedding": re.compile(r"(embed_tokens|wte|(tok|word)_embeddings|embedding)\.weight$"),
    "key": re.compile(r"(k_proj|wk|key)\.weight$"),
    "query": re.compile(r"(q_proj|wq|query)\.weight$"),
    "up": re.compile(r"(up_proj|w3|fc1|c_fc|dense_h_to_4h)\.weight$"),
}
_LONGEST_HEADER = 1 << 28


@dataclass(frozen=True, slots=True)
class _Tensor(JsonValue):
    """An entry of a safetensors file's header."""

    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
        headers: dict[str, _Tensor] = {}
        for path in files:
            headers |= _header(path)
        num_bytes = sum(end - start for start, end in (e.data_offsets for e in headers.values()))
        names, path = list(headers), folder / "model.safetensors.index.json"
        if not files and path.is_file():
            index = TensorIndex.from_json(read_object(path), str(path))
            names = list(index.weight_map)
            num_bytes = int((index.metadata and index.metadata.total_size) or 0)
        numbers = [int(found[1]) for name in names if (found := _LAYER.search(name))]
        shapes = {
            part: entry.shape
            for part, pattern in _PARTS.items()
            for name, entry in reversed(headers.items())
            if pattern.search(name) and len(entry.shape) == 2 and all(entry.shape)
        }
        return cls(num_bytes, max(numbers, default=-1) + 1, shapes)

    def as_config(self) -> dict[str, int]:
        """The sizes as keys of a config.json that lacks them."""
        by_bytes = math.sqrt(self.num_bytes / 2 / 12 / self.layers)  # 12 matrices of h * h a layer
        vocab, hidden = self.shapes.get("embedding", (_VOCAB, round(by_bytes / 1024) * 1024))
        query = self.shapes.get("query", (hidden,))[0]
        key = self.shapes.get("key", (_KV_HEADS * _HEAD_DIM,))[0]
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


def _header(path: Path) -> dict[str, _Tensor]:
    """Shapes and offsets of a safetensors file's tensors; InputError names a damaged one."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parsed_json(file.read(min(length, _LONGEST_HEADER)).decode())
        header.pop("__metadata__", None)
    except (OSError, ValueError, TypeError, struct.error, AttributeError) as exc:
        raise InputError(f"{path} is no safetensors file: {exc}") from exc
    found: dict[str, _Tensor] = {}
    for name, entry in header.items():
        tensor = found[name] = _Tensor.from_json(entry, f"{path}: tensor {name!r}")
        start, end = tensor.data_offsets
        if min(start, end - start, *tensor.shape) < 0:
            raise InputError(f"{path}: tensor {name!r} has a size below 0")
    return found
