"""A decode step as a pure function of tensors with fixed sizes, and its compilation.

It is `Decoder.logits` for sequences of one row each, with an attention without data-dependent
branches: contexts are padded to the shape's length and masked. So it can be exported and compiled
(torch.export, AOTInductor), or captured. It has no weights: matrices are called by number and norms
are inputs, so a compiled step fits every model of the same shape.

The compiler must not decompose the forms of matrix products: packed for oneDNN, quantized, summed
over ranks, or spread over experts. To it, each is one operator from rows to rows of a known width.
An operator has no closure: the thread that runs the step sets its parts (`_IN_USE`).
"""

import hashlib
import json
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.core.host import instruction_sets
from lmi_bench.engine.torch_backend.attention import mask_bias
from lmi_bench.engine.torch_backend.kv_cache import KvCache, copyable, head_page_rows
from lmi_bench.engine.torch_backend.layers import Linear, Norm
from lmi_bench.engine.torch_backend.models.decoder import Decoder, Layer
from lmi_bench.engine.torch_backend.precision import dtype_name
from lmi_bench.engine.torch_backend.runner import TorchForward
from lmi_bench.engine.torch_backend.static.artefact import FORMAT, ArtefactKey, StaticShape
from lmi_bench.engine.torch_backend.static.forward import Replay, StepBuffers, StepResult

Part = Callable[[Tensor, Tensor], Tensor]
"""From rows and a residual with as many rows to new rows; a part may ignore the residual."""

_IN_USE: Final = threading.local()

_make_library: Any = torch.library.Library
_LIBRARY: Final = _make_library("lmi_bench", "DEF")
_LIBRARY.define("part(Tensor rows, Tensor residual, int number, int features) -> Tensor")


def _run_part(rows: Tensor, residual: Tensor, number: int, _features: int) -> Tensor:
    part: Part = _IN_USE.parts[number]
    return part(rows, residual)


def _shape_only(rows: Tensor, residual: Tensor, _number: int, features: int) -> Tensor:
    # the residual has the model's number format; rows may be token ids
    return residual.new_empty(rows.shape[0], features)


_LIBRARY.impl("part", _run_part, "CompositeExplicitAutograd")
torch.library.register_fake("lmi_bench::part", _shape_only, lib=_LIBRARY)


@dataclass(frozen=True, slots=True)
class _Call(Linear):
    """Stands for the part with this number, which gives `features` of each row."""

    number: int
    features: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.add(x, x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        operator: Callable[..., Tensor] = torch.ops.lmi_bench.part
        return operator(x, residual, self.number, self.features)


def _rebuilt(model: Decoder, norm: Callable[[Norm], Norm], part: Callable[[Part, int], Linear]) -> Decoder:
    """The model with others in place of its norms, and of its parts with their features, made in
    the same order each time."""

    def product(linear: Callable[[Tensor], Tensor], features: int) -> Linear:
        return part(lambda rows, _: linear(rows), features)

    def embed(token_ids: Tensor, residual: Tensor) -> Tensor:
        return model.embedding(token_ids).to(residual.dtype)

    spec, layers = model.spec, []
    hidden = spec.hidden_size
    for layer in model.layers:
        block = layer.block
        features = (block.num_heads + 2 * block.num_kv_heads) * spec.head_dim
        out = part(block.out.add, hidden)
        if layer.out_norms:  # behind it stands a norm, so it adds no residual
            out = product(block.out, hidden)
        attention = replace(
            block,
            qkv=product(block.qkv, features),
            out=out,
            qk_norm=None if block.qk_norm is None else norm(block.qk_norm),
        )
        norms = norm(layer.attention_norm), norm(layer.mlp_norm)
        out_norms = tuple(norm(each) for each in layer.out_norms)
        mlp = part(layer.mlp.add, hidden)
        layers.append(Layer(norms[0], attention, norms[1], mlp, layer.parallel, out_norms))
    rows, last = part(embed, hidden), norm(model.norm)
    like = last.tensors[0].new_empty(0, dtype=model.precision.compute)
    return replace(
        model,
        embedding=lambda token_ids: rows.add(token_ids, like),
        layers=layers,
        norm=last,
        head=product(model.head, spec.vocab_size),
    )


class DecodeStep(torch.nn.Module):
    """The step of one model over one cache."""

    def __init__(self, model: Decoder, cache: KvCache) -> None:
        super().__init__()
        self._model = model
        self._cache = cache
        self._layout = cache.shape
        self._parts: list[Part] = []
        self._norms: list[Tensor] = []
        _rebuilt(model, self._note_norm, self._note_part)

    def _note_norm(self, norm: Norm) -> Norm:
        self._norms.extend(norm.tensors)
        return norm

    def _note_part(self, part: Part, features: int) -> Linear:
        self._parts.append(part)
        return _Call(len(self._parts) - 1, features)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        norm_tensors: Sequence[Tensor],
    ) -> Tensor:
        """Store every row's keys and values; returns logits, shape (sequences, vocab).

        token_ids, positions  shape (sequences,)
        block_tables          shape (sequences, pages)
        keys, values          per layer, from KvCache
        norm_tensors          the parameters of the model's norms
        """
        layout, windows = self._layout, self._model.spec.windows
        scale, cap = self._model.spec.score_scale, self._model.spec.score_cap
        rows, size, head_dim = positions.shape[0], layout.block_size, layout.head_dim
        batch = rows * layout.num_kv_heads
        # block, head and offset of each row's heads; broadcast to (sequences, kv_heads)
        place = (
            block_tables.gather(1, (positions // size)[:, None]),
            torch.arange(layout.num_kv_heads, device=positions.device)[None],
            (positions % size)[:, None],
        )
        page_rows = head_page_rows(block_tables, layout.num_kv_heads)
        columns = torch.arange(block_tables.shape[1] * size, device=positions.device)
        biases: dict[int | None, Tensor] = {}  # shape (sequences * kv_heads, 1, tokens)
        for window in set(windows):
            bias = mask_bias(columns, positions[:, None], window, self._model.precision.compute)
            biases[window] = bias.repeat_interleave(layout.num_kv_heads, dim=0)[:, None]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = []
            for pages, new in ((keys[index], k), (values[index], v)):
                # write to the input itself: through a view, the compiler copies the whole cache
                pages = copyable(pages)
                pages.index_put_(place, layout.stored(new))
                gathered = pages.view(-1, size, head_dim).index_select(0, page_rows)
                seen.append(gathered.view(layout.dtype).view(batch, -1, head_dim).to(q.dtype))
            queries, bias = q.reshape(batch, -1, head_dim), biases[windows[index]]
            turned = seen[0].transpose(1, 2)
            if cap:
                scores = torch.tanh(torch.bmm(queries, turned) * (scale / cap)) * cap + bias
            else:
                scores = torch.baddbmm(bias, queries, turned, alpha=scale)
            return torch.bmm(torch.softmax(scores, dim=-1), seen[1]).reshape(rows, -1)

        tensors, numbers = iter(norm_tensors), count()
        model = _rebuilt(
            self._model,
            lambda norm: replace(norm, tensors=tuple([next(tensors) for _ in norm.tensors])),
            lambda _, features: _Call(next(numbers), features),
        )
        return model.logits(token_ids, positions, positions + 1, attend)

    def over(self, buffers: StepBuffers, package: Path | None = None) -> Replay:
        """The step over a shape's buffers, from its package if there is one."""
        run: Callable[[], Tensor] = partial(self, *self._inputs(buffers))
        if package is not None:
            run = self._loaded(package, buffers)

        def replay() -> StepResult:
            _IN_USE.parts = self._parts
            try:
                logits = run()
            finally:
                del _IN_USE.parts
            return StepResult(logits, logits.argmax(dim=-1))

        return replay

    def compile_into(self, shape: StaticShape, path: Path) -> None:
        """Write the package of one shape, for any number of cache blocks. Raises InputError without
        a C++ compiler."""
        layers, cache = len(self._cache.keys), self._cache
        place = cache.keys[0].device
        buffers = StepBuffers(shape, block_size=cache.shape.block_size, spare_block=0, device=place)
        pages = [{0: torch.export.Dim("blocks", min=2)}] * layers
        dimensions = (None, None, None, pages, pages, [None] * len(self._norms))
        # importing the compiler's own modules raises deprecation warnings about torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=DeprecationWarning)
            warnings.simplefilter("ignore", category=FutureWarning)
            _compile(self, self._inputs(buffers), dimensions, path)

    def _inputs(self, buffers: StepBuffers) -> tuple[Any, ...]:
        """The arguments of `forward` for a step over these buffers."""
        rows = buffers.token_ids, buffers.positions, buffers.block_tables
        return *rows, self._cache.keys, self._cache.values, self._norms

    def _loaded(self, path: Path, buffers: StepBuffers) -> Callable[[], Tensor]:
        """A package's step over a shape's buffers; it returns logits."""
        device = buffers.token_ids.device
        loader = torch._C._aoti.AOTIModelPackageLoader(
            str(path), "model", True, 1, device.index if device.type == "cuda" else -1
        )
        *rows, keys, values, norms = self._inputs(buffers)
        inputs = [*rows, *keys, *values, *norms]
        run: Callable[[list[Any]], list[Tensor]] = loader.run
        return lambda: run(inputs)[0]


SETTINGS: Final[dict[str, Any]] = {"cpp.dynamic_threads": True}
"""Compiler settings: use the number of threads of the process that runs the step."""

STEP_VERSION: Final = 3  # version of the compiled step; a new one invalidates all older packages


def key_of(eager: TorchForward, *, tensor_parallel: int, quantize: str) -> ArtefactKey:
    """The key of a model's compiled steps on this machine."""
    cache, precision = eager.cache, eager.model.precision
    layers = json.dumps(asdict(eager.model.spec), sort_keys=True, default=str)
    return {
        "format": FORMAT,
        "model": hashlib.sha256(layers.encode()).hexdigest()[:16],
        "tensor_parallel": tensor_parallel,
        "weights": dtype_name(precision.stored),
        "compute": dtype_name(precision.compute),
        "kv_dtype": dtype_name(cache.shape.dtype),
        "quantize": quantize,
        "block_size": cache.shape.block_size,
        "device": device_name(cache.keys[0].device),
        "torch": torch.__version__,
        "settings": json.dumps({**SETTINGS, "step": STEP_VERSION}, sort_keys=True),
    }


def device_name(device: torch.device) -> str:
    """The hardware that compiled code needs: a GPU's type, or a processor's instruction set."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    level = torch.backends.cpu.get_cpu_capability()
    names = instruction_sets().encode()  # the compiler may use all of them
    features = hashlib.sha256(names).hexdigest()[:8] if names else platform.processor()
    return f"{platform.machine()}, {level}, features {features or 'unknown'}"


def _compile(step: DecodeStep, inputs: tuple[Any, ...], dimensions: tuple[Any, ...], path: Path) -> None:
    from torch._inductor.exc import InductorError  # takes seconds: import only to compile

    with torch.no_grad():
        program = torch.export.export(step, inputs, dynamic_shapes=dimensions)
    aot: Any = torch._inductor.aoti_compile_and_package
    try:
        aot(program, package_path=str(path), inductor_configs=dict(SETTINGS))
    except InductorError as exc:
        raise InputError(f"the step cannot be compiled here: {str(exc).splitlines()[0]}") from exc
