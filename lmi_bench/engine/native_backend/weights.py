"""Loads a checkpoint's weights in the layout of step.cpp, and checks which models it supports."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.engine.native_backend import binding
from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape
from lmi_bench.engine.torch_backend.layers import DenseMlp, PlainLinear, plain
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.memory import zeroed_bytes
from lmi_bench.engine.torch_backend.models.decoder import Layer
from lmi_bench.engine.torch_backend.models.families import build_layer
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.rotary import dynamic_growth, rotary_frequencies
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress
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

    def __init__(
        self, folder: Path, spec: DecoderSpec, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
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
            checkpoint.finish()
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
    out = (
        zeroed_bytes(panels * steps * PANEL * unit.itemsize)
        .view(unit.dtype)
        .view(panels, steps, PANEL)
    )
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
