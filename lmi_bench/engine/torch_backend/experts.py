"""Mixture of experts: each row goes through the few MLPs that the router scores highest.

The experts run one after the other over the rows that chose them. On a CPU such a loop of packed
products takes half the time of one grouped product. On a GPU the host would have to wait for the
number of rows per expert, which a CUDA graph cannot do: there, small steps send every row through
every expert. A decode step is bound by reading the experts and has arithmetic to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import GatedMlp, Linear

EVERY_EXPERT_ROWS: Final = 64
"""Maximum rows of a GPU step that go through every expert, chosen or not."""


class ExpertMlp:
    """sum over the chosen experts of weight_e * expert_e(x) (Jiang et al. 2024, arXiv:2401.04088).

    The weights are the softmax over all experts' scores in float32; `renormalise` scales the
    weights of a row's chosen experts to sum to 1. Experts are added in index order, so a row's
    result does not depend on the other rows of its step.
    """

    def __init__(
        self,
        router: Linear,
        experts: Sequence[GatedMlp],
        experts_per_token: int,
        *,
        renormalise: bool,
        join: Callable[[Tensor], Tensor],
    ) -> None:
        """join  combines the partial results of all ranks"""
        self._router = router
        self._experts = experts
        self._experts_per_token = experts_per_token
        self._renormalise = renormalise
        self._join = join

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        scores = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self._experts_per_token, dim=-1)
        if self._renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if x.is_cuda and (len(x) <= EVERY_EXPERT_ROWS or torch.cuda.is_current_stream_capturing()):
            out = self.of_every_expert(x, weights, chosen)
        else:
            out = self.of_chosen_experts(x, weights, chosen)
        return self._join(out).add_(residual)

    def of_every_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Send every row through every expert, with weight 0 for those it did not choose.

        weights, chosen  shape (rows, experts per token)
        """
        factors = x.new_zeros(len(x), len(self._experts))
        factors = factors.scatter_(1, chosen, weights.to(x.dtype))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self._experts):
            out += expert(x) * factors[:, number, None]
        return out

    def of_chosen_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run each expert on the rows that chose it; arguments as in `of_every_expert`."""
        by_expert = chosen.flatten().argsort(stable=True)
        rows = by_expert // self._experts_per_token
        factors = weights.to(x.dtype).flatten()[by_expert, None]
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        out = torch.zeros_like(x)
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                out.index_add_(0, rows[part], expert(x[rows[part]]) * factors[part])
                first += count
        return out
