"""The layers that decoders share: linear, norms, MLPs, mixtures of experts.

All take matrices of shape (tokens, features), with the tokens of a step's sequences concatenated.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.models.spec import DecoderSpec


class Linear(ABC):
    """A linear layer, alone or with a common next operation, which a subclass may fuse."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, in memory of its own."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """linear(x) + residual."""
        return self(x) + residual

    def activated(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """silu(linear(x)), or gelu approximated by tanh."""
        y = self(x)
        return functional.gelu(y, approximate="tanh") if gelu else functional.silu(y, inplace=True)

    def multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        """linear(x) * factor."""
        return self(x).mul_(factor)


class PlainLinear(Linear):
    """The portable form: runs on any device, with the weight as stored."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def plain(linear: Linear | None) -> PlainLinear:
    """A layer that is known to have its weight as stored."""
    assert isinstance(linear, PlainLinear)
    return linear


class PackedLinear(Linear):
    """oneDNN's blocked weight, packed once; functional.linear would pack it at every call.

    Speed on two cores against functional.linear: 2 x at 1 to 8 rows in bfloat16, 1.7 x at 8 rows
    in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        ops: Any = torch.ops.mkldnn
        self._weight = ops._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._unary: Callable[..., Tensor] = ops._linear_pointwise.default
        self._binary: Callable[..., Tensor] = ops._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, self._weight, self._bias, "none", [], "")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._binary(x, residual, self._weight, self._bias, "add")

    def activated(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        name, kind = ("gelu", "tanh") if gelu else ("swish", "")
        return self._unary(x, self._weight, self._bias, name, [], kind)

    def multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        return self._binary(x, factor, self._weight, self._bias, "mul")


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest available form: packed on a CPU with oneDNN, else plain."""
    if packing_works(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def packing_works(device: torch.device, dtype: torch.dtype) -> bool:
    """True if oneDNN's packed product is available; its operators are not a public interface."""
    has_onednn: Any = torch.backends.mkldnn.is_available
    if device.type != "cpu" or not has_onednn():
        return False
    ops: Any = torch.ops.mkldnn
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with the mean in float32.

    tensors  the weight, shape (features,), or a row for each of several heads: (heads, head_dim);
             in float32 it is applied before the result is rounded
    """

    tensors: tuple[Tensor, ...]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        weight = self.tensors[0]
        normed: Tensor = (wide * scale).to(weight.dtype) * weight
        return normed.to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, arXiv:1607.06450).

    tensors  weight and bias
    """

    tensors: tuple[Tensor, ...]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.tensors
        return functional.layer_norm(x, weight.shape, weight, bias, self.eps)


Norm = RmsNorm | LayerNorm


class Mlp(Protocol):
    """The feed-forward part of a layer."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """mlp(x) + residual."""


@dataclass(slots=True, eq=False)
class DenseMlp:
    """down(silu(gate(x)) * up(x)), the feed-forward layer of Shazeer 2020, arXiv:2002.05202; or
    with `gelu` in place of silu, or `clamped` by gpt-oss's alpha and limit: (up + 1) * gate *
    sigmoid(alpha * gate). Without a gate it is down(gelu(up(x))), with the exact gelu."""

    gate: Linear | None
    up: Linear
    down: Linear
    gelu: bool = False
    clamped: tuple[float, float] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The layer without a residual, as an expert needs it."""
        return self.down(self._inner(x))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down.add(self._inner(x), residual)

    def _inner(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return functional.gelu(self.up(x))
        if self.clamped is None:
            return self.up.multiply(x, self.gate.activated(x, gelu=self.gelu))
        alpha, limit = self.clamped
        gate, up = self.gate(x).clamp(max=limit), self.up(x).clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Chooses each row's experts and their weights.

    Scores are the softmax over all experts in float32, or with a `correction` of the choice
    sigmoids of products in float32, of which the best experts of the best of the spec's groups
    count: those with the largest sums of their two best (DeepSeek-V3, arXiv:2412.19437).
    """

    scores: Linear
    spec: DecoderSpec
    correction: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts, shape (rows, experts per token) each."""
        spec, corrected = self.spec, self.correction is not None
        scores = self.scores(x.float() if corrected else x).float()
        if self.correction is None:
            weights, chosen = torch.softmax(scores, dim=-1).topk(spec.experts_per_token, dim=-1)
        else:
            weights = torch.sigmoid(scores)
            scores = self._of_best_groups(weights + self.correction)
            chosen = scores.topk(spec.experts_per_token).indices
            weights = weights.gather(1, chosen)
        if spec.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * spec.routed_scale, chosen

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        rows, experts = scores.shape  # perhaps no row
        grouped = scores.view(rows, self.spec.expert_groups, experts // self.spec.expert_groups)
        sums = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = sums.topk(self.spec.groups_chosen, dim=-1).indices
        hidden = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(hidden[..., None], -torch.inf).view(scores.shape)


EVERY_EXPERT_ROWS: Final = 64
"""Maximum rows of a GPU step that go through every expert, chosen or not."""


@dataclass(slots=True, eq=False)
class ExpertMlp:
    """sum over the chosen experts of weight_e * expert_e(x) (Jiang et al. 2024, arXiv:2401.04088).

    Experts are added in index order, so a row's result does not depend on the other rows of its
    step.

    join    combines the partial results of all ranks
    shared  an expert for every row, times the sigmoid of `shared_gate` if there is one
    grouped another back end's form of `of_chosen_experts`, with the same arguments
    """

    router: Router
    experts: Sequence[DenseMlp]
    join: Callable[[Tensor], Tensor]
    shared: DenseMlp | None = None
    shared_gate: Linear | None = None
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        if self.grouped is not None:
            out = self.grouped(x, weights, chosen)
        elif x.is_cuda and (len(x) <= EVERY_EXPERT_ROWS or torch.cuda.is_current_stream_capturing()):
            out = self.of_every_expert(x, weights, chosen)
        else:
            out = self.of_chosen_experts(x, weights, chosen)
        if self.shared is not None:
            shared = self.shared(x)
            out += shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid()
        return self.join(out).add_(residual)

    def of_every_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Send every row through every expert, with weight 0 for experts that it did not choose.

        weights, chosen  shape (rows, experts per token)
        """
        factors = x.new_zeros(len(x), len(self.experts))
        factors = factors.scatter_(1, chosen, weights.to(x.dtype))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out += expert(x) * factors[:, number, None]
        return out

    def of_chosen_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run each expert on the rows that chose it; arguments as in `of_every_expert`."""
        by_expert = chosen.flatten().argsort(stable=True)
        rows = by_expert // chosen.shape[1]
        factors = weights.to(x.dtype).flatten()[by_expert, None]
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                out.index_add_(0, rows[part], expert(x[rows[part]]) * factors[part])
                first += count
        return out
