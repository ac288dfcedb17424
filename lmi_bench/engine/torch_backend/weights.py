"""Reads a model folder: its configuration, and its tensors one at a time from safetensors files."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.stored_forms import Form, forms_of
from lmi_bench.models.folder import check_loadable, read_config
from lmi_bench.models.hf_config import spec_from_hf_config
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_SUMMED: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Formats that can contain NaN or infinity and are stored unscaled."""

_KNOWN: Final = re.compile(r"rotary_emb\.inv_freq$|weight_shape$").search
"""Tensors that a layer computes itself."""

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes of all files."""

Tell = Callable[[str, float, float], None]
"""Called with the name of the current work, the amount done, and the total."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder's configuration, without its weights."""

    folder: Path
    config: Mapping[str, Any]
    spec: DecoderSpec
    shape: ModelShape


def read_model(folder: Path) -> ModelSource:
    """Read a Hugging Face folder's config.json; raises InputError if it cannot be loaded."""
    config = read_config(folder)
    check_loadable(folder, config)
    name = folder.resolve().name
    spec = spec_from_hf_config(name, config)
    return ModelSource(folder, config, spec, spec.shape(name))


class Checkpoint:
    """Opens the safetensors files of a model folder; a context manager that closes them.

    Tensors are read on request, so at most one layer's are in memory beside the model. Only
    safetensors are read: a pickled checkpoint may run code. Raises InputError if files or tensors
    are missing.
    """

    def __init__(
        self,
        folder: Path,
        progress: Progress | None = None,
        *,
        beside: Path | None = None,
        spec: DecoderSpec | None = None,
    ) -> None:
        """beside  a file whose tensors replace or extend the folder's

        spec  of the model, whose tensors may be stored in another form; None: as stored
        """
        self._folder = folder
        self._file_of = _tensor_files(folder)
        if beside is not None:
            with _open(beside) as handle:
                self._file_of |= dict.fromkeys(handle.keys(), str(beside.resolve()))
        self._open: dict[str, Any] = {}
        self._files = ExitStack()
        self._progress = progress
        files = set(self._file_of.values())
        self._total_bytes = sum((folder / file).stat().st_size for file in files)
        self._read_bytes = 0
        self._asked: set[str] = set()
        self._forms: dict[str, Form] = {}
        if spec is not None:
            self._forms = forms_of(self, spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or name in self._forms

    @property
    def reformed(self) -> bool:
        """True if layers read tensors in another form than the files have."""
        return bool(self._forms)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name` in its stored format; its shape must be `shape`."""
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise self._misfit(name, tuple(tensor.shape), shape)
        self._check_values(name, tensor)
        return tensor

    def whole(self, name: str) -> Tensor:
        """The tensor `name` in its stored format, of any shape."""
        return self.tensor(name, *self.stored_shape(name))

    def part(self, name: str, side: int, start: int, stop: int) -> Tensor:
        """Rows (side 0) or columns (side 1) start .. stop of a tensor; nothing else is read."""
        rows = (slice(None),) * side + (slice(start, stop),)
        tensor = self._read(name, *rows)
        self._check_values(name, tensor)
        return tensor

    def _check_values(self, name: str, tensor: Tensor) -> None:
        """Raise InputError for unexpected integer weights, and for NaN or infinity.

        A NaN weight would silently make every answer nonsense: the likeliest of logits that are all
        NaN is an ordinary token.
        """
        if name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
            raise InputError(
                f"{self._folder}: tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')}"
                " instead of floats: the checkpoint has a quantization that its config.json does "
                "not state"
            )
        where = _first_not_finite(tensor)
        if where is not None:
            raise InputError(
                f"{self._folder}: tensor {name!r} is {tensor[where].item()} at {list(where)}: "
                "the file is damaged or the model was saved after its training diverged; download "
                "it again or use an earlier checkpoint"
            )

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of the tensor `name`, without reading the tensor."""
        if (form := self._forms.get(name)) is not None:
            return form.shape
        return tuple(self._file(name).get_slice(name).get_shape())

    def _read(self, name: str, *index: int | slice) -> Tensor:
        if (form := self._forms.get(name)) is not None:
            return form.read(*index)
        return self.read(name, *index)

    def read(self, name: str, *index: int | slice) -> Tensor:
        """The stored tensor `name`, or its part at the index; nothing else is read."""
        file = self._file(name)
        self._asked.add(name)
        try:
            tensor: Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        except SafetensorError as exc:
            raise InputError(
                f"{self._folder / self._file_of[name]}: tensor {name!r} cannot be read: {exc}"
            ) from exc
        self._read_bytes = min(self._read_bytes + tensor.nbytes, self._total_bytes)
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes)
        return tensor

    def _file(self, name: str) -> Any:
        """The open file that contains the tensor `name`."""
        file = self._file_of.get(name)
        if file is None:
            raise InputError(
                f"{self._folder} has no tensor {name!r}: the checkpoint is incomplete or its "
                "config.json belongs to another model"
            )
        if file not in self._open:
            self._open[file] = self._files.enter_context(_open(self._folder / file))
        return self._open[file]

    def _misfit(self, name: str, stored: tuple[int, ...], asked: tuple[int, ...]) -> InputError:
        return InputError(
            f"{self._folder}: tensor {name!r} has shape {stored} but config.json asks for {asked}"
        )

    def unread(self) -> str:
        """Words about the tensors that no layer has read, behind a semicolon; empty if all were."""
        names = sorted(n for n in self._file_of if n not in self._asked and not _KNOWN(n))
        if not names:
            return ""
        count = f"{len(names)} tensors" if len(names) > 1 else "1 tensor"
        some = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        return f"; {count} that no layer reads ({some})"

    def finish(self) -> None:
        """Report complete progress: the rest of the files is not needed."""
        if self._progress is not None:
            self._progress(self._total_bytes, self._total_bytes)


def _first_not_finite(tensor: Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN or infinity; None without one. Checks the sum first, which needs no
    memory: it is finite unless there is such a value or the sum overflows float32."""
    if tensor.dtype not in _SUMMED or bool(tensor.sum(dtype=torch.float32).isfinite()):
        return None
    places = (~tensor.isfinite()).nonzero()
    return tuple(places[0].tolist()) if len(places) else None


def indexed_files(folder: Path, name: str) -> dict[str, str]:
    """The file of each tensor, from the folder's index with that name; empty without one. Raises
    InputError if it is not an index, or a file that it lists is missing or outside the folder."""
    index = folder / name
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(f"{index} is not an index with a weight_map: {exc}") from exc
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise InputError(f"{index} names {file!r}, which is not in this folder")
        if not (folder / file).is_file():
            raise InputError(f"{folder} lacks {file}, which {name} lists: download it again")
    return files


def _tensor_files(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index or the single file."""
    if files := indexed_files(folder, _INDEX):
        return files
    single = folder / _SINGLE
    if single.is_file():
        with _open(single) as handle:
            return dict.fromkeys(handle.keys(), _SINGLE)
    hint = ""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        hint = "; pickled weights are not read, since they may run code: `lmi-bench convert` them"
    raise InputError(f"{folder} has neither {_SINGLE} nor {_INDEX}{hint}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as exc:
        raise InputError(f"{path} cannot be read as safetensors: {exc}") from exc
