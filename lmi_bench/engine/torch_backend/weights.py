"""Reads a model folder: its configuration, and its tensors one at a time from safetensors files.

Layers ask for tensors under Llama's names. A checkpoint may have others: a wrapper of a text model
has its own prefix, projections of one input may be one matrix, a layer's experts one tensor.
Weights of 4 or 8 bits with scales (FP8, MXFP4, compressed-tensors) become the floats that they
stand for, unless a loader takes their parts; activations are not rounded in either case.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import TensorIndex, check_loadable, read_config, read_object
from lmi_bench.models.hf_config import spec_from_hf_config
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_SUMMED: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Formats that can contain NaN or infinity and are stored unscaled."""

_KNOWN: Final = re.compile(r"rotary_emb\.inv_freq$|weight_shape$").search
"""Tensors that a layer computes itself."""

FLOAT_METHODS: Final = ("fp8", "compressed-tensors", "mxfp4")
"""`quant_method` of weights that are read as floats."""
_PREFIXES: Final = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
_FUSED: Final = re.compile(r".*\.(qkv|gate_up)_proj\.(weight|bias|qweight|qzeros|scales)")
_AWQ_OUTPUTS: Final = {"qweight": 8, "qzeros": 8, "scales": 1}  # in each of a row's numbers
_UNSUPPORTED: Final = {
    **dict.fromkeys(("weight_zero_point", "weight_g_idx"), "a zero or an order"),
    "weight_global_scale": "two scales (NVFP4)",
}
_EXPERTS: Final = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|)")
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4 bits; the fourth is the sign

Blocks = frozenset[tuple[int, int]]
"""Rows and columns of weights that share a scale; -1: all."""

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


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor that is made of stored ones: `read` gives it, or its part at an index; `parts` the
    values and scales of one of 4 or 8 bits."""

    shape: tuple[int, ...]
    read: Callable[..., Tensor]
    parts: Callable[[], tuple[Tensor, Tensor]] | None = None


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
        self._widened = False
        self._forms: dict[str, Form] = {}
        if spec is not None:
            config = read_config(folder) if (folder / "config.json").is_file() else {}
            self._forms = _forms_of(self, spec, _stated_blocks(config))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._files.close()
        self._open.clear()
        if error is None and self._progress is not None:  # the rest of the files is not needed
            self._progress(self._total_bytes, self._total_bytes)

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

    def parts(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Values of 4 or 8 bits, and their scales, shape (rows, groups); None if the tensor `name`
        is not stored so. Values of 4 bits are int32, from -8 to 7."""
        form = self._forms.get(name)
        return None if form is None or form.parts is None else form.parts()

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
            self._widened |= form.parts is not None
            return form.read(*index)
        return self.read(name, *index)

    def read(self, name: str, *index: int | slice) -> Tensor:
        """The stored tensor `name`, or its part at the index; nothing else is read."""
        file = self._file(name)
        self._asked.add(name)
        try:
            tensor: Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        except SafetensorError as exc:
            raise InputError(f"{self._folder / self._file_of[name]}: tensor {name!r} cannot be read: {exc}") from exc
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
        return InputError(f"{self._folder}: tensor {name!r} has shape {stored} but config.json asks for {asked}")

    def unread(self) -> str:
        """Words about weights of few bits that are now floats, and about the tensors that no layer
        has read, behind semicolons; empty without any."""
        widened = "; weights of 4 or 8 bits became floats" if self._widened else ""
        names = sorted(n for n in self._file_of if n not in self._asked and not _KNOWN(n))
        if not names:
            return widened
        count = f"{len(names)} tensors" if len(names) > 1 else "1 tensor"
        some = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        return f"{widened}; {count} that no layer reads ({some})"


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
    files = dict(TensorIndex.from_json(read_object(index), str(index)).weight_map)
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


def _stated_blocks(config: Mapping[str, Any]) -> Blocks:
    """The sizes that config.json states; none where it states none. Raises InputError for weights
    that only fit rotated inputs."""
    text = config.get("text_config") or {}
    try:
        stated = config.get("quantization_config") or text.get("quantization_config") or {}
        rotated = (stated.get("transform_config") or {}).get("config_groups")
        groups = [each.get("weights") or {} for each in stated.get("config_groups", {}).values()]
        blocks = [each.get("block_structure") or (1, each.get("group_size")) for each in groups]
        usual = (128, 128) if stated.get("quant_method") == "fp8" else None
        blocks.append(stated.get("weight_block_size", usual))
        sizes = frozenset((int(rows), int(columns or -1)) for rows, columns in filter(None, blocks))
    except (AttributeError, TypeError, ValueError) as exc:
        raise InputError(f"config.json: quantization_config cannot be read: {exc}") from exc
    if rotated:
        raise InputError("config.json: quantization_config: a transform_config is not supported")
    return sizes


def _forms_of(stored: Checkpoint, spec: DecoderSpec, blocks: Blocks) -> dict[str, Form]:
    """Every tensor of the model that is not in the files under its name and in its form."""
    forms: dict[str, Form] = {}
    names = frozenset(stored.names)

    def whole(name: str) -> Form:
        return forms.get(name) or Form(stored.stored_shape(name), partial(stored.read, name))

    for name in names:
        if what := _UNSUPPORTED.get(name.rpartition(".")[2]):
            raise InputError(f"tensor {name!r}: weights with {what} are not supported")
    for name in names:
        old = next((old for old in _PREFIXES if name.startswith(old)), "")
        own = _PREFIXES.get(old, "") + name.removeprefix(old)
        base, _, last = own.rpartition(".")
        if last in ("weight_scale_inv", "weight_scale"):
            source = name.removesuffix(last)
            packed = f"{source}weight_packed" in names
            forms[f"{base}.weight"] = _scaled(stored, source, last, packed, blocks)
        elif own != name and own not in forms:
            forms[own] = whole(name)
    for name in (*names, *forms):
        if _FUSED.fullmatch(name):
            forms.update(_parts(name, whole(name), spec))
        elif match := _EXPERTS.fullmatch(name):
            forms.update(_experts(stored, spec, *match.groups()))
    return forms


def _scaled(stored: Checkpoint, source: str, last: str, is_packed: bool, blocks: Blocks) -> Form:
    """Values of 8 bits, or eight of 4 bits in each 32-bit number of a row, the first lowest; times
    the scale of their tensor, row, block or group."""
    name = f"{source}weight_packed" if is_packed else f"{source}weight"
    shape = stored.stored_shape(name)
    if len(shape) != 2:
        raise InputError(f"tensor {name!r} has the shape {shape}, which is no matrix")
    if is_packed:
        shape = (shape[0], 8 * shape[1])
        if stored.read(f"{source}weight_shape").tolist() != list(shape):
            raise InputError(f"tensor {name!r}: packed weights have 4 bits here, not others")

    rows, columns = shape

    def parts() -> tuple[Tensor, Tensor]:
        values = stored.read(name)
        if is_packed:
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            values = ((values[..., None] >> shifts) & 15).flatten(1) - 8
        scale = stored.read(f"{source}{last}")
        if not scale.is_floating_point():
            raise InputError(f"tensor {name!r}: scales of {scale.dtype} are not supported")
        scale = scale.float() if scale.ndim == 2 else scale.float().view(-1, 1)
        sizes = [frozenset(side) for side in zip(*blocks, strict=True)] or [frozenset()] * 2
        tall, wide = map(partial(_block, name), shape, scale.shape, sizes)
        even = math.gcd(wide, columns)  # a last block may have less, which kernels do not know
        scale = scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide // even, 1)
        return values, scale[:, : columns // even]

    def read(*index: int | slice) -> Tensor:
        values, scale = parts()
        wide = scale.repeat_interleave(columns // scale.shape[1], 1)
        return (values.float() * wide).to(torch.bfloat16)[index]

    return Form(shape, read, parts)


def _block(name: str, size: int, count: int, stated: frozenset[int]) -> int:
    """Values that share a scale, of which a last block may have less."""
    sizes = {each for each in stated if each > 0 and -(-size // each) == count}
    if count in (1, size) or (not stated and count and size % count == 0):
        sizes = {size // count}
    if len(sizes) != 1:
        raise InputError(
            f"tensor {name!r} has {count} scales for {size} values, but config.json states blocks "
            f"of {', '.join(map(str, sorted(stated))) or 'no size'}"
        )
    return sizes.pop()


def _parts(name: str, whole: Form, spec: DecoderSpec) -> Iterator[tuple[str, Form]]:
    """The projections of one fused matrix or bias; AWQ's has its outputs in columns."""
    base, _, last = name.rpartition(".")
    prefix, _, kind = base.rpartition(".")
    side, each = int(last in _AWQ_OUTPUTS), _AWQ_OUTPUTS.get(last, 1)
    outputs = whole.shape[side] * each
    rows = dict.fromkeys(("gate_proj", "up_proj"), outputs // 2)
    if kind == "qkv_proj":
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        rows = {f"{part}_proj": count * spec.head_dim for part, count in heads.items()}
    first = 0
    for part, count in rows.items():
        shape, stop = list(whole.shape), first + count
        shape[side] = count // each
        read = partial(_slice, whole, side, first // each, stop // each)
        yield f"{prefix}.{part}.{last}", Form(tuple(shape), read)
        first = stop
    if first != outputs or any(count % each for count in rows.values()):
        raise InputError(f"{name!r} has {outputs} rows, but config.json asks for {first}")


def _slice(whole: Form, side: int, first: int, stop: int, *index: int | slice) -> Tensor:
    """An index's part of rows (side 0) or columns (side 1) first .. stop, which alone are read."""
    return whole.read(*(slice(None),) * side, slice(first, stop))[index]


def _experts(stored: Checkpoint, spec: DecoderSpec, prefix: str, kind: str, suffix: str) -> Iterator[tuple[str, Form]]:
    """The matrices of every expert of a layer: gpt-oss has them in one tensor, with inputs first,
    and each gate beside its `up`."""
    name = f"{prefix}{kind}{suffix}"
    steps = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    every = steps if kind == "gate_up_proj" else {kind: slice(None)}
    outputs, inputs = spec.ffn_size, spec.hidden_size
    if kind == "down_proj":
        outputs, inputs = inputs, outputs
    shape, last = ((outputs,), "bias") if suffix == "_bias" else ((outputs, inputs), "weight")
    for number in range(spec.experts):
        for part, rows in every.items():
            read = partial(_of_expert, stored, name, number, rows)
            yield f"{prefix}{number}.{part}.{last}", Form(shape, read)


def _of_expert(stored: Checkpoint, name: str, number: int, rows: slice, *index: int | slice) -> Tensor:
    tensor = stored.read(name, number)
    if name.endswith("_blocks"):
        scales = stored.read(f"{name.removesuffix('_blocks')}_scales", number)
        whole = _of_mxfp4(tensor[rows], scales[rows])
    else:
        whole = (tensor if tensor.ndim == 1 else tensor.T)[rows].contiguous()
    return whole[index]


def _of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks of 32 values of 4 bits, the first of a byte lower, with a power of 2 for each (OCP
    Microscaling 1.0).

    blocks  shape (outputs, groups, 16), bytes; scales: (outputs, groups), exponents less 127
    """
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
    values = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2).long()]
    powers = torch.exp2(scales.float() - 127)
    return (values * powers[..., None]).flatten(1).to(torch.bfloat16)
