"""The back end `native`: a whole step in one call of the compiled library.

Checks whether a model is supported, and loads its weights in the layout of step.cpp.
"""

import asyncio
import platform
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.core.errors import EngineError
from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.engine.native_backend import binding
from lmi_bench.engine.native_backend.binding import StepLibrary, library
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.torch_backend.attention import SequenceRows
from lmi_bench.engine.torch_backend.executor import ModelNumbers, TorchExecutor, start_worker
from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape
from lmi_bench.engine.torch_backend.layers import DenseMlp, PlainLinear, plain
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.memory import free_memory_bytes, zeroed_bytes
from lmi_bench.engine.torch_backend.models.decoder import Layer
from lmi_bench.engine.torch_backend.models.families import build_layer
from lmi_bench.engine.torch_backend.precision import Precision, dtype_name, torch_dtype
from lmi_bench.engine.torch_backend.rank import RankWorker
from lmi_bench.engine.torch_backend.rotary import dynamic_growth, rotary_frequencies
from lmi_bench.engine.torch_backend.runner import ModelRunner
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress, Tell, read_model
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec, NormKind

PANEL: Final = 64  # outputs that step.cpp computes together
KINDS: Final = {torch.float32: binding.F32, torch.bfloat16: binding.BF16}
FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3")


def unsupported(spec: DecoderSpec, block_size: int) -> str | None:
    """Why the step cannot run this model with this block size; None if it can."""
    if spec.family not in FAMILIES or spec.norm is not NormKind.RMS or spec.experts:
        return f"it has no step for {spec.family} models (only for {', '.join(FAMILIES)})"
    if spec.window_rope and spec.window_rope["rope_type"] != "default":
        return f"it has no {spec.window_rope['rope_type']} positions in layers with a window"
    for name in ("hidden_size", "head_dim"):
        if getattr(spec, name) % 16:
            return f"{name} {getattr(spec, name)} is not a multiple of 16"
    if spec.ffn_size % 2:
        return f"an MLP of {spec.ffn_size} features is odd"
    if block_size % 16:
        return f"KV blocks of {block_size} tokens are not a multiple of 16"
    return None


class NativeWeights:
    """One model's weights and cache, and the C structures that point to them.

    model       argument for `StepLibrary.open`; the caller sets `threads`
    nbytes      bytes of matrices, embeddings and head
    num_blocks  of the cache
    unread      as of a Decoder
    """

    def __init__(self, folder: Path, spec: DecoderSpec, dtype: torch.dtype, progress: Progress | None = None) -> None:
        """dtype  storage format of the weights: float32 or bfloat16"""
        self._spec = spec
        self._dtype = dtype
        self._held: list[Tensor] = []
        self.nbytes = self.num_blocks = 0
        self.layers = (binding.Layer * spec.num_layers)()
        precision = Precision(dtype, dtype)
        with Checkpoint(folder, progress, spec=spec) as checkpoint:
            load = WeightLoader(spec, checkpoint, precision, torch.device("cpu"), make=PlainLinear)
            for index in range(spec.num_layers):
                self._fill_layer(self.layers[index], build_layer(load, index))
                self.layers[index].window = spec.windows[index] or 0
            self.model = self._model(load)
            self.unread = checkpoint.unread()
        self.nbytes = sum(tensor.nbytes for tensor in self._held)

    def take_cache(self, layout: KvLayoutShape, num_blocks: int) -> int:
        """Zeroed pages for every layer; returns their bytes."""
        self.model.block_size, self.num_blocks = layout.block_size, num_blocks
        self.model.cache_kind = KINDS[layout.dtype]
        size = num_blocks * layout.bytes_per_block // (2 * layout.num_layers)
        for layer in self.layers:
            layer.keys = self._hold(zeroed_bytes(size))
            layer.values = self._hold(zeroed_bytes(size))
        return 2 * layout.num_layers * size

    def _model(self, load: WeightLoader) -> binding.Model:
        spec = self._spec
        frequencies, amplitude = rotary_frequencies(spec.rope, spec.head_dim)
        near = None
        if spec.window_rope:
            near = self._hold(rotary_frequencies(spec.window_rope, spec.head_dim)[0])
        growth = dynamic_growth(spec.rope, spec.head_dim)
        embedding = load.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        head = load.head_rows(embedding)
        return binding.Model(
            layers=spec.num_layers,
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            ffn=spec.ffn_size,
            vocab=spec.vocab_size,
            embedding_kind=KINDS[self._dtype],
            norm_eps=spec.norm_eps,
            gelu=spec.gelu,
            scale=spec.score_scale,
            embedding_scale=float(torch.tensor(spec.embedding_scale, dtype=self._dtype)),
            score_cap=spec.score_cap,
            logit_cap=spec.logit_cap,
            layer=self.layers,
            final_norm=self._vector(load.norm("model.norm").tensors[0]),
            embedding=self._hold(embedding.contiguous()),
            head=self._linear(PlainLinear(head)),
            frequencies=self._hold(frequencies.contiguous()),
            window_frequencies=near,
            amplitude=amplitude,
            growth_factor=growth[0] if growth else 0.0,
            growth_power=growth[1] if growth else 0.0,
            trained_length=float(spec.rope["original_max_position_embeddings"]),
        )

    def _fill_layer(self, layer: binding.Layer, part: Layer) -> None:
        attention, mlp = part.block, part.mlp
        assert isinstance(mlp, DenseMlp)  # see `unsupported`
        layer.qkv = self._linear(plain(attention.qkv))
        layer.out = self._linear(plain(attention.out))
        gate, up = plain(mlp.gate), plain(mlp.up)
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = _side_by_side(gate.bias, up.bias)
        layer.gate_up = self._linear(PlainLinear(_side_by_side(gate.weight, up.weight), bias))
        layer.down = self._linear(plain(mlp.down))
        layer.attention_norm = self._vector(part.attention_norm.tensors[0])
        layer.mlp_norm = self._vector(part.mlp_norm.tensors[0])
        if part.out_norms:
            layer.attention_out_norm = self._vector(part.out_norms[0].tensors[0])
            layer.mlp_out_norm = self._vector(part.out_norms[1].tensors[0])
        if attention.qk_norm is not None:
            heads = attention.qk_norm.tensors[0]
            layer.query_norm, layer.key_norm = self._vector(heads[0]), self._vector(heads[-1])

    def _linear(self, linear: PlainLinear) -> binding.Linear:
        rows, columns = linear.weight.shape
        bias = None
        if linear.bias is not None:
            bias = self._hold(functional.pad(linear.bias.float(), (0, -rows % PANEL)))
        return binding.Linear(
            data=self._hold(packed(linear.weight)),
            bias=bias,
            inputs=columns,
            outputs=rows,
            kind=KINDS[linear.weight.dtype],
        )

    def _vector(self, weight: Tensor) -> int:
        """A norm's weights in float32."""
        return self._hold(weight.float().contiguous())

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()


def packed(weight: Tensor) -> Tensor:
    """Pack a weight into panels of 64 outputs, the last one padded with zeros.

    weight   shape (outputs, inputs), float32 or bfloat16; bfloat16 needs an even number of inputs
    returns  the panels' memory: [outputs/64][inputs][64] values or [outputs/64][inputs/2][64] pairs
    """
    rows = weight.shape[0]
    panels = -(-rows // PANEL)
    unit = weight.contiguous()
    if weight.dtype == torch.bfloat16:
        unit = unit.view(torch.int32)  # pairs of neighbouring inputs move as one
    steps = unit.shape[1]
    out = zeroed_bytes(panels * steps * PANEL * unit.itemsize).view(unit.dtype).view(panels, steps, PANEL)
    whole = rows // PANEL
    out[:whole] = unit[: whole * PANEL].view(whole, PANEL, steps).transpose(1, 2)
    if whole < panels:
        out[whole, :, : rows % PANEL] = unit[whole * PANEL :].t()
    return out


def _side_by_side(gate: Tensor, up: Tensor) -> Tensor:
    """Arrange rows in panels: 32 of the gate, then the same 32 of the other projection."""
    half = PANEL // 2
    missing = -gate.shape[0] % half
    padding = (0, 0) * (gate.ndim - 1) + (0, missing)
    shape = (-1, half, *gate.shape[1:])
    parts = [functional.pad(part, padding).reshape(shape) for part in (gate, up)]
    return torch.stack(parts, dim=1).flatten(0, 2)


class NativeForward:
    """A model and its cache in the library's own layout; `close` ends its threads."""

    def __init__(
        self, library: binding.StepLibrary, weights: NativeWeights, shape: ModelShape, variant: str = ""
    ) -> None:
        """weights  with their cache and threads

        variant  kernels, one of `library.variants()`; empty: the best
        """
        self.shape = shape
        self.block_size: int = weights.model.block_size
        self.num_blocks = weights.num_blocks
        self._library = library
        self._weights = weights
        self._handle = library.open(weights.model, variant)
        if not self._handle:
            raise EngineError(
                f"the native step (kernels {variant or 'the best'}) did not get memory or its "
                f"{weights.model.threads:,} threads from the system: lower --threads, raise the "
                "limit of processes (ulimit -u, a container's pids), or use --backend torch"
            )

    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Logits of the sampled rows, shape (sampled rows, vocab), float32."""
        logits = torch.empty(sum(rows.sampled for rows in sequences), self.shape.vocab_size)
        self._step(sequences, logits=logits.data_ptr())
        return logits

    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        token_ids = array("i", bytes(4 * sum(rows.sampled for rows in sequences)))
        self._step(sequences, likeliest=token_ids.buffer_info()[0])
        return token_ids.tolist()

    def close(self) -> None:
        """End the threads; no step may follow."""
        handle, self._handle = self._handle, 0
        if handle:
            self._library.close(handle)

    def _step(
        self, sequences: Sequence[SequenceRows], *, logits: int | None = None, likeliest: int | None = None
    ) -> None:
        token_ids: list[int] = []
        tables: list[int] = []
        sampled: list[int] = []
        spans = array("q")
        for rows in sequences:
            first_row = len(token_ids)
            token_ids.extend(rows.token_ids)
            end = len(token_ids)
            spans.extend((first_row, end - first_row, rows.first_position, len(tables)))
            tables.extend(rows.block_table)
            sampled.extend(range(end - rows.sampled, end))
        ids, blocks, wanted = array("i", token_ids), array("i", tables), array("i", sampled)
        step = binding.Step(
            rows=len(ids),
            sequences=len(sequences),
            sampled=len(wanted),
            token_ids=ids.buffer_info()[0],
            sequence=spans.buffer_info()[0],
            tables=blocks.buffer_info()[0],
            sampled_rows=wanted.buffer_info()[0],
            logits=logits,
            likeliest=likeliest,
        )
        if not self._library.step(self._handle, step):
            raise EngineError(f"a step of {len(ids):,} rows does not fit in memory")


PORTABLE: Final = "portable"  # kernels with generic vectors, for processors other than x86


def step_library(folder: Path, *, block_size: int, tell: Callable[[str], None] | None = None) -> StepLibrary:
    """The compiled step for the model in `folder`, built first if needed.

    tell  called with one line when a build starts
    Raises NativeUnavailableError if model, block size, compiler or processor are unsuitable.
    """
    spec = _read_spec(folder)
    reason = unsupported(spec, block_size)
    if reason is not None:
        raise NativeUnavailableError(reason)
    compiled = StepLibrary(library(tell=tell))
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if compiled.variants()[0] == PORTABLE and x86:
        raise NativeUnavailableError("the processor has neither AVX-512 nor AVX2 with FMA")
    return compiled


def _read_spec(folder: Path) -> DecoderSpec:
    source = read_model(folder)
    if source.config.get("quantization_config") is not None:
        raise NativeUnavailableError("its stored weights are quantized")
    return source.spec


class NativeExecutor(TorchExecutor):
    """Runs steps of one model in the compiled library; see `load`. Its numbers are TorchExecutor's;
    `weights_description` also has kernels and threads."""

    _forward: NativeForward

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LoadSettings,
        *,
        beside: TorchExecutor | None = None,  # noqa: ARG003  the library has its own threads
        progress: Progress | None = None,
        tell: Tell | None = None,  # noqa: ARG003  nothing is calibrated
        compiled: StepLibrary | None = None,
        variant: str = "",
    ) -> Self:
        """As TorchExecutor.load, and also:

        compiled  from `step_library`; None: find or build it
        variant   instruction set of the kernels; empty: the processor's best

        "bfloat16" weights are stored as such and widened or multiplied while reading.
        `settings.steps` has no effect. Raises NativeUnavailableError like `step_library`, and if
        weights are to be quantized.
        """
        if settings.quantize != NOT_QUANTIZED:
            raise NativeUnavailableError("weights are to be quantized")
        kernels = compiled or step_library(folder, block_size=settings.block_size)
        shown, count = variant or kernels.variants()[0], settings.threads

        def load() -> tuple[ModelNumbers, NativeForward]:
            """Load weights and allocate the cache, in the thread that will compute."""
            spec = _read_spec(folder)
            shape = spec.shape(folder.resolve().name)
            stored = torch_dtype(settings.dtype)
            weights = NativeWeights(folder, spec, stored, progress)
            layout = KvLayoutShape.of(shape, settings.block_size, settings.cache_dtype(stored))
            free = free_memory_bytes(torch.device("cpu"))
            blocks = settings.blocks_in(free, layout.bytes_per_block)
            cache_bytes = weights.take_cache(layout, blocks)
            weights.model.threads = count
            numbers = ModelNumbers(
                model_shape=shape,
                block_size=settings.block_size,
                num_blocks=blocks,
                free_memory_bytes=free,
                kv_cache_bytes=cache_bytes,
                kv_dtype=dtype_name(layout.dtype),
                weights_description=f"{settings.dtype}, kernels {shown}, {count} "
                f"thread{'s' if count > 1 else ''}{weights.unread}",
                weight_bytes=weights.nbytes,
            )
            return numbers, NativeForward(kernels, weights, shape, variant)

        worker, (numbers, forward) = start_worker("native", count, load)
        rank = RankWorker(runner=ModelRunner(forward, sampling_seed=settings.sampling_seed))
        made = cls(numbers, rank, worker)
        made._forward = forward
        return made

    async def close(self) -> None:
        """Wait for the running step, then end the worker and the library's threads."""
        await super().close()
        await asyncio.to_thread(self._forward.close)
