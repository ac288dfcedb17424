"""Mixture of experts: each row goes through the few MLPs that its router scores highest.

The experts run one after the other over the rows that chose them. On a CPU such a loop of packed
products takes half the time of one grouped product. A GPU would have to wait for the host to learn
how many rows chose each, and a CUDA graph cannot: there few rows go through every expert, which
costs arithmetic that a decode step, bound by reading the experts, has to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import GatedMlp, Linear

EVERY_EXPERT_ROWS: Final = 64
"""Most rows of a step on a GPU that go through every expert, chosen or not."""


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
        if x.is_cuda and (len(x) <= EVERY_EXPERT_ROWS or torch.cuda.is_current_stream_capturing()):
            out = self.of_every_expert(x, weights, chosen)
        else:
            out = self.of_chosen_experts(x, weights, chosen)
        return self._join(out).add_(residual)

    def of_every_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every row through every expert, those that it did not choose weighing nothing.

        weights, chosen  shape (rows, experts a token)
        """
        factors = x.new_zeros(len(x), len(self._experts))
        factors = factors.scatter_(1, chosen, weights.to(x.dtype))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self._experts):
            out += expert(x) * factors[:, number, None]
        return out

    def of_chosen_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Each expert over the rows that chose it; arguments as `of_every_expert`."""
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
