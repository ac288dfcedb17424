"""Writes a model folder: tensors in safetensors files of up to 4 GiB; other files are copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

_SHARD_BYTES: Final = 4 << 30
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth")


def copy_beside(folder: Path, out: Path) -> None:
    """Copy a model folder's files except its weights and their index."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in _WEIGHTS and ".index." not in path.name:
            shutil.copy(path, out)


class ShardWriter:
    """Collects tensors and writes a file whenever 4 GiB are reached."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._total_bytes = 0
        self._file_of: dict[str, str] = {}
        self._files: list[str] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors; they are written when a file is full."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._waiting and self._waiting_bytes + size > _SHARD_BYTES:
            self._write()
        self._waiting |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._waiting_bytes += size
        self._total_bytes += size

    def finish(self) -> int:
        """Write the remaining tensors, and an index if there are several files; returns the total
        bytes."""
        self._write()
        if len(self._files) == 1:
            (self._out / self._files[0]).rename(self._out / "model.safetensors")
            return self._total_bytes
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._file_of}
        path = self._out / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self._total_bytes

    def _write(self) -> None:
        name = f"model-{len(self._files) + 1:05d}.safetensors"
        save_file(self._waiting, self._out / name, metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(self._waiting, name)
        self._files.append(name)
        self._waiting, self._waiting_bytes = {}, 0
