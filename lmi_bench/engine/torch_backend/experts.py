"""Mixture of experts: each row goes through the few MLPs that its router scores highest.

The experts run one after the other over the rows that chose them. On a CPU such a loop of packed
products takes half the time of one grouped product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import GatedMlp, Linear


class ExpertMlp:
    """sum over the chosen experts of weight_e * expert_e(x) (Jiang et al. 2024, arXiv:2401.04088).

    The weights are the softmax over all experts' scores in float32; `renormalise` scales those of
    a row's chosen ones to sum to 1. Experts are added in their order, so a row's result does not
    depend on which others share its step.
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
        """join  makes the whole of what this rank's parts of the experts gave"""
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
        by_expert = chosen.flatten().argsort(stable=True)
        rows = by_expert // self._experts_per_token
        factors = weights.to(x.dtype).flatten()[by_expert, None]
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        out = torch.zeros_like(residual)
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                out.index_add_(0, rows[part], expert(x[rows[part]]) * factors[part])
                first += count
        return self._join(out).add_(residual)
