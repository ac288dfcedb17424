"""A mixture of experts has one result, whichever rows are sent through which expert."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from lmi_bench.engine.torch_backend.layers import DenseMlp, ExpertMlp, PlainLinear, Router

HIDDEN, INNER, EXPERTS = 16, 24, 4


def make_experts(chosen_each: int) -> ExpertMlp:
    generator = torch.Generator().manual_seed(0)

    def linear(outputs: int, inputs: int) -> PlainLinear:
        return PlainLinear(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64))

    spec = SimpleNamespace(experts_per_token=chosen_each, renormalise=True, routed_scale=1.0)
    return ExpertMlp(
        Router(linear(EXPERTS, HIDDEN), spec),
        [DenseMlp(linear(INNER, HIDDEN), linear(INNER, HIDDEN), linear(HIDDEN, INNER)) for _ in range(EXPERTS)],
        join=lambda x: x,
    )


def test_rows_through_every_expert_get_what_the_chosen_ones_give():
    """What a CUDA graph records against the loop over chosen rows."""
    experts = make_experts(2)
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [3, 2], [1, 0], [2, 3], [0, 3], [3, 1], [0, 1]])
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(
        experts.of_every_expert(x, weights, chosen), experts.of_chosen_experts(x, weights, chosen)
    )
