"""A decode step as a pure function of tensors with fixed sizes, and its compilation.

It computes the same as `Decoder.logits` for sequences of one row each, but without data-dependent
branches: contexts are padded to the shape's length and masked. So it can be exported and compiled
(torch.export, AOTInductor), or captured. It has no weights: matrices are called by number and norms
are inputs, so a compiled step fits every model of the same shape.

The compiler must not decompose the forms of matrix products: packed for oneDNN, quantized, summed
over ranks, or spread over experts. To it, each is one operator from rows to rows of a known width.
An operator has no closure: the thread that runs the step sets its parts (`parts_in_use`).
"""

import hashlib
import json
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.core.host import instruction_sets
from lmi_bench.engine.torch_backend.attention import masked_score
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape, head_page_rows
from lmi_bench.engine.torch_backend.layers import Norm
from lmi_bench.engine.torch_backend.models.decoder import AttentionBlock, Decoder
from lmi_bench.engine.torch_backend.precision import dtype_name
from lmi_bench.engine.torch_backend.rotary import rotate
from lmi_bench.engine.torch_backend.runner import TorchForward
from lmi_bench.engine.torch_backend.static.artefact import ArtefactKey, StaticShape
from lmi_bench.engine.torch_backend.static.forward import StepBuffers

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


@contextmanager
def parts_in_use(parts: Sequence[Part]) -> Iterator[None]:
    """Set this thread's parts within the context."""
    before = getattr(_IN_USE, "parts", None)
    _IN_USE.parts = parts
    try:
        yield
    finally:
        _IN_USE.parts = before


def call_part(number: int, rows: Tensor, residual: Tensor, features: int) -> Tensor:
    """Run a part on `rows` of its own width; result shape (rows, features)."""
    operator: Callable[..., Tensor] = torch.ops.lmi_bench.part
    return operator(rows, residual, number, features)


_EMBEDDING, _HEAD, _FIRST_LAYER, _PARTS_PER_LAYER = 0, 1, 2, 3


class DecodeStep(torch.nn.Module):
    """The step of one model; run it with `parts_of` in use and `norm_tensors`."""

    def __init__(self, model: Decoder, layout: KvLayoutShape) -> None:
        super().__init__()
        self._model = model
        self._layout = layout
        windows = model.spec.layer_windows
        self._windows = tuple(dict.fromkeys(windows))
        self._bias_of_layer = [self._windows.index(window) for window in windows]

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
        norm_tensors          from `norm_tensors`
        """
        model, layout = self._model, self._layout
        norms = _Norms(norm_tensors)
        like = norm_tensors[0]  # every part computes in the number format of the norms
        hidden = model.spec.hidden_size
        size = layout.block_size
        place = (
            block_tables.gather(1, (positions // size)[:, None]),
            torch.arange(layout.num_kv_heads, device=positions.device)[None],
            (positions % size)[:, None],
        )
        page_rows = head_page_rows(block_tables, layout.num_kv_heads)
        biases = self._biases(positions, block_tables.shape[1] * size, like.dtype)
        turn = model.rotary.at(positions, positions + 1)
        x = call_part(_EMBEDDING, token_ids, like, hidden)
        for index, layer in enumerate(model.layers):
            number = _FIRST_LAYER + _PARTS_PER_LAYER * index
            block = layer.attention
            features = (block.num_heads + 2 * block.num_kv_heads) * layout.head_dim
            qkv = call_part(number, norms.next(layer.attention_norm)(x), x, features)
            attended = self._attend(
                _rotated(qkv, block, turn, norms),
                qkv,
                block,
                (keys[index], values[index]),
                place,
                page_rows,
                biases[self._bias_of_layer[index]],
            )
            with_attention = call_part(number + 1, attended, x, hidden)
            read = norms.next(layer.mlp_norm)(x if layer.parallel else with_attention)
            x = call_part(number + 2, read, with_attention, hidden)
        return call_part(_HEAD, norms.next(model.norm)(x), x, model.spec.vocab_size)

    def _biases(self, positions: Tensor, tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Masks for each distinct window, added to the scores; shape (sequences * kv_heads, 1,
        tokens)."""
        columns = torch.arange(tokens, device=positions.device)
        biases = []
        for window in self._windows:
            unseen = columns > positions[:, None]
            if window is not None:
                unseen = unseen | (columns <= positions[:, None] - window)
            bias = torch.zeros(unseen.shape, dtype=dtype, device=positions.device)
            bias = bias.masked_fill(unseen, masked_score(dtype))
            biases.append(bias.repeat_interleave(self._layout.num_kv_heads, dim=0)[:, None])
        return biases

    def _attend(
        self,
        turned: Tensor,
        qkv: Tensor,
        block: AttentionBlock,
        cache: tuple[Tensor, Tensor],
        place: tuple[Tensor, Tensor, Tensor],
        page_rows: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """Store rotated keys and values, then attend; result shape (sequences, query size).

        place  block, head and offset of each row's heads; broadcast to (sequences, kv_heads)
        """
        layout, count = self._layout, qkv.shape[0]
        head_dim, kv_heads = layout.head_dim, layout.num_kv_heads
        heads = block.num_heads
        stored = (turned[:, heads:], qkv.view(count, -1, head_dim)[:, heads + kv_heads :])
        seen = []
        for pages, rows in zip(cache, stored, strict=True):
            # write to the input itself: through a view, the compiler copies the whole cache
            pages.index_put_(place, rows.to(layout.dtype))
            gathered = pages.view(-1, layout.block_size, head_dim).index_select(0, page_rows)
            seen.append(gathered.view(count * kv_heads, -1, head_dim).to(qkv.dtype))
        queries = turned[:, :heads].reshape(count * kv_heads, -1, head_dim)
        scores = torch.baddbmm(bias, queries, seen[0].transpose(1, 2), alpha=head_dim**-0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), seen[1]).reshape(count, -1)


def norm_tensors(model: Decoder) -> list[Tensor]:
    """The parameters of a model's norms, in the order in which a step reads them."""
    norms = [
        norm
        for layer in model.layers
        for norm in (layer.attention_norm, layer.attention.qk_norm, layer.mlp_norm)
    ]
    return [tensor for norm in (*norms, model.norm) if norm is not None for tensor in norm.tensors]


def parts_of(model: Decoder) -> list[Part]:
    """The model's parts in the order of a step's numbers."""

    def embed(token_ids: Tensor, residual: Tensor) -> Tensor:
        return model.embedding(token_ids).to(residual.dtype)

    def alone(product: Callable[[Tensor], Tensor]) -> Part:
        return lambda rows, _: product(rows)

    parts: list[Part] = [embed, alone(model.head)]
    for layer in model.layers:
        parts += [alone(layer.attention.qkv), layer.attention.out.add, layer.mlp.add]
    return parts


def _rotated(
    qkv: Tensor, block: AttentionBlock, turn: tuple[Tensor, Tensor], norms: "_Norms"
) -> Tensor:
    """Queries and keys, normalised if the model does so, and rotated by their positions."""
    heads = block.num_heads + block.num_kv_heads
    turned = qkv.view(qkv.shape[0], heads + block.num_kv_heads, -1)[:, :heads]
    if block.qk_norm is not None:
        turned = norms.next(block.qk_norm)(turned)
    return rotate(turned, turn)


class _Norms:
    """Returns a step's norms in order, with their tensors from the step's inputs."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: Iterator[Tensor] = iter(tensors)

    def next(self, norm: Norm) -> Norm:
        return norm.with_tensors([next(self._tensors) for _ in norm.tensors])


SETTINGS: Final[dict[str, Any]] = {"cpp.dynamic_threads": True}
"""Compiler settings: use the number of threads of the process that runs the step."""

STEP_VERSION: Final = 2  # version of the compiled step; a new one invalidates all older packages


def key_of(eager: TorchForward, *, tensor_parallel: int, quantize: str) -> ArtefactKey:
    """The key of a model's compiled steps on this machine."""
    cache, precision = eager.cache, eager.precision
    layers = json.dumps(asdict(eager.model.spec), sort_keys=True, default=str)
    return ArtefactKey(
        model=hashlib.sha256(layers.encode()).hexdigest()[:16],
        tensor_parallel=tensor_parallel,
        weights=dtype_name(precision.stored),
        compute=dtype_name(precision.compute),
        kv_dtype=dtype_name(cache.shape.dtype),
        quantize=quantize,
        block_size=cache.shape.block_size,
        device=device_name(cache.keys[0].device),
        torch=torch.__version__,
        settings=json.dumps({**SETTINGS, "step": STEP_VERSION}, sort_keys=True),
    )


def device_name(device: torch.device) -> str:
    """The hardware that compiled code needs: a GPU's type, or a processor's instruction set."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    level = torch.backends.cpu.get_cpu_capability()
    names = instruction_sets().encode()  # the compiler may use all of them
    features = hashlib.sha256(names).hexdigest()[:8] if names else platform.processor()
    return f"{platform.machine()}, {level}, features {features or 'unknown'}"


def step_inputs(
    buffers: StepBuffers, cache: KvCache, norms: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """The arguments of `DecodeStep.forward` for a step over these buffers."""
    rows = buffers.token_ids, buffers.positions, buffers.block_tables
    return *rows, cache.keys, cache.values, list(norms)


def compile_step(
    step: DecodeStep, shape: StaticShape, cache: KvCache, norms: Sequence[Tensor], path: Path
) -> None:
    """Write the package of one shape, for any number of cache blocks. Raises InputError without a
    C++ compiler."""
    buffers = StepBuffers(
        shape, block_size=cache.shape.block_size, spare_block=0, device=cache.keys[0].device
    )
    inputs = step_inputs(buffers, cache, norms)
    blocks = torch.export.Dim("blocks", min=2)
    layers = len(cache.keys)
    shapes = (None, None, None, [{0: blocks}] * layers, [{0: blocks}] * layers, [None] * len(norms))
    # importing the compiler's own modules raises deprecation warnings about torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        warnings.simplefilter("ignore", category=FutureWarning)
        _compile(step, inputs, shapes, path)


def _compile(
    step: DecodeStep, inputs: tuple[Any, ...], shapes: tuple[Any, ...], path: Path
) -> None:
    from torch._inductor.exc import InductorError  # takes seconds: import only to compile

    with torch.no_grad():
        program = torch.export.export(step, inputs, dynamic_shapes=shapes)
    aot: Any = torch._inductor.aoti_compile_and_package
    try:
        aot(program, package_path=str(path), inductor_configs=dict(SETTINGS))
    except InductorError as exc:
        raise InputError(f"the step cannot be compiled here: {str(exc).splitlines()[0]}") from exc


def load_step(
    path: Path, buffers: StepBuffers, cache: KvCache, norms: Sequence[Tensor]
) -> Callable[[], Tensor]:
    """Load a package's step over a shape's buffers; it returns logits."""
    device = cache.keys[0].device
    loader = torch._C._aoti.AOTIModelPackageLoader(
        str(path), "model", True, 1, device.index if device.type == "cuda" else -1
    )
    *rows, keys, values, norms = step_inputs(buffers, cache, norms)
    inputs = [*rows, *keys, *values, *norms]
    run: Callable[[list[Any]], list[Tensor]] = loader.run
    return lambda: run(inputs)[0]
