"""A layer's experts side by side: three launches run all of them over the rows they have."""

from typing import Final

import torch
import triton
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import ExpertMlp, PlainLinear, plain
from lmi_bench.engine.triton_backend import expert_kernels

_LISTED_AT_ONCE: Final = 1024
_FEW: Final = 16  # rows of an expert: the least side of a tensor core's operand
_TILES: Final = {
    True: {"BLOCK_ROWS": _FEW, "BLOCK_OUT": 32, "BLOCK_IN": 128, "num_stages": 4},
    False: {"BLOCK_ROWS": 64, "BLOCK_OUT": 128, "BLOCK_IN": 64, "num_stages": 3},
}
"""Sizes for few rows an expert, when reading the weights takes all the time, and for many."""


class StackedExperts:
    """The experts' matrices in two tensors; the layer's own become views of them, so that nothing
    is stored twice."""

    def __init__(self, mlp: ExpertMlp) -> None:
        first = mlp.experts[0]
        up, down = plain(first.up).weight, plain(first.down).weight
        count, inner = len(mlp.experts), up.shape[0]
        self._inner = up.new_empty(count, 2 * inner, up.shape[1])
        self._down = down.new_empty(count, *down.shape)
        for number, expert in enumerate(mlp.experts):
            both = self._inner[number]
            views = {"gate": both[:inner], "up": both[inner:], "down": self._down[number]}
            for name, view in views.items():
                view.copy_(plain(getattr(expert, name)).weight)
                setattr(expert, name, PlainLinear(view))

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of each row's experts, as `ExpertMlp.of_chosen_experts`."""
        rows, per_row = chosen.shape
        count, pairs = len(self._down), rows * per_row
        listed = torch.empty(count, pairs, dtype=torch.int32, device=x.device)
        counts = torch.empty(count, dtype=torch.int32, device=x.device)
        expert_kernels.list_pairs_kernel[(count,)](chosen, listed, counts, pairs, BLOCK=_LISTED_AT_ONCE)
        factors = weights.float().contiguous()
        # the larger tiles of float32 do not fit into a GPU's shared memory
        few = pairs <= _FEW * count or x.dtype == torch.float32

        def product(x: Tensor, weight: Tensor, out: Tensor, *, gated: bool) -> Tensor:
            outputs, inputs = out.shape[1], x.shape[1]
            tile = _TILES[few]
            grid = (count, triton.cdiv(outputs, tile["BLOCK_OUT"]))
            expert_kernels.expert_product_kernel[grid](
                x,
                weight,
                factors,
                listed,
                counts,
                out,
                pairs,
                outputs,
                inputs,
                PAIRS_A_ROW=per_row if gated else 1,
                GATED=gated,
                **tile,
            )
            return out

        inner = x.new_empty(pairs, self._inner.shape[1] // 2)
        product(x, self._inner, inner, gated=True)
        out = torch.empty(pairs, x.shape[1], device=x.device)
        product(inner, self._down, out, gated=False)
        return out.view(rows, per_row, x.shape[1]).sum(dim=1).to(x.dtype)
