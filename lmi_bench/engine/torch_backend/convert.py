"""Converts PyTorch's .bin weights to safetensors, hashes weights, and writes model folders.

A .bin file is a pickle. Only this explicit conversion reads it, with torch's restricted unpickler,
which builds tensors and calls nothing else; the engine itself reads only safetensors.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress, indexed_files
from lmi_bench.models.folder import make_new_folder, read_config

_INDEX: Final = "pytorch_model.bin.index.json"
_SINGLE: Final = "pytorch_model.bin"


def convert(folder: Path, out: Path, *, progress: Progress | None = None) -> str:
    """Write a folder's .bin weights as safetensors; returns the hash of the weights.

    Tensors that share memory are each written in full: safetensors cannot share.

    Raises InputError if there is no .bin file, a file has other content than tensors, or `out`
    exists.
    """
    if out.exists():
        raise InputError(f"{out} exists: name a new folder")
    read_config(folder)
    files = _pickles(folder)
    make_new_folder(out)
    writer, digests = ShardWriter(out), {}
    for name, tensor in _read(files, progress):
        digests[name] = _digest(name, tensor)
        writer.add({name: tensor.clone()})  # a view would outlive its mapped file
    writer.finish()
    copy_beside(folder, out)
    return _hash_of(digests)


def weights_hash(folder: Path) -> str:
    """SHA-256 of names, formats, shapes and bytes of a folder's tensors, in either format."""
    if any(folder.glob("*.safetensors")):
        with Checkpoint(folder) as checkpoint:
            return _hash_of({key: _digest(key, checkpoint.whole(key)) for key in checkpoint.names})
    return _hash_of({name: _digest(name, tensor) for name, tensor in _read(_pickles(folder), None)})


def _pickles(folder: Path) -> list[Path]:
    if files := indexed_files(folder, _INDEX):
        return [folder / name for name in sorted(set(files.values()))]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise InputError(f"{folder} has neither {_SINGLE} nor {_INDEX}: nothing to convert")


def _read(files: list[Path], progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    total_bytes, read_bytes = sum(path.stat().st_size for path in files), 0
    for path in files:
        try:
            mapped = zipfile.is_zipfile(path)  # files from torch before 1.6 are not zip
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as exc:  # damaged pickles raise whatever their bytes lead to
            first = (str(exc).splitlines() or [repr(exc)])[0]
            raise InputError(f"{path} is not a file of tensors only: {first}") from exc
        if not isinstance(content, dict):
            raise InputError(f"{path} contains a {type(content).__name__}, not tensors by name")
        for name, tensor in content.items():
            if not isinstance(tensor, Tensor):
                raise InputError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
            yield str(name), tensor
            read_bytes += tensor.nbytes
            if progress is not None:
                progress(min(read_bytes, total_bytes), total_bytes)


def _digest(name: str, tensor: Tensor) -> bytes:
    """Hash of one tensor: its name, format, shape, and bytes as stored in the file."""
    whole = tensor.contiguous()
    head = f"{name} {whole.dtype} {tuple(whole.shape)}\n"
    data = whole.reshape(-1).view(torch.uint8) if whole.numel() else torch.empty(0)
    return hashlib.sha256(head.encode() + data.numpy().tobytes()).digest()


def _hash_of(digests: dict[str, bytes]) -> str:
    """Hash of a whole model, independent of the order and files of its tensors."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


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
