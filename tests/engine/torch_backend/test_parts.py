"""Parts of a layer against transformers' own: random tiny models would hardly show their faults."""

from __future__ import annotations

import pytest
import torch

from lmi_bench.engine.torch_backend.layers import RmsNorm
from lmi_bench.engine.torch_backend.rotary import Rotary, rotate, turned_order

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 256,
    "factor": 4.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.4, 1.9, 2.5, 4.0],
    "long_factor": [2.0] * 6,
}
HEAD_DIM = 16


def test_scores_of_a_head_that_rotates_in_part_are_those_of_transformers():
    """With longrope's amplitude, which features that stay as they are do not have."""
    from transformers import Phi3Config
    from transformers.models.phi3 import modeling_phi3 as theirs

    config = Phi3Config(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=1024,
        original_max_position_embeddings=256,
        rope_parameters={key: value for key, value in LONGROPE.items() if key != "factor"},
    )
    torch.manual_seed(3)
    positions = torch.tensor([0, 1, 7, 100])
    q, k = torch.randn(2, 4, 1, HEAD_DIM)
    cos, sin = theirs.Phi3RotaryEmbedding(config)(q, positions[None])
    turned = theirs.apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in (q, k)), cos, sin)
    expected = turned[0][0, 0] @ turned[1][0, 0].T

    rotary = Rotary(LONGROPE, HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))
    turn, order = rotary.at(positions, positions + 1), turned_order(LONGROPE, HEAD_DIM)
    ours_q, ours_k = (rotate(x[..., order], turn)[:, 0] for x in (q, k))
    torch.testing.assert_close(ours_q @ ours_k.T, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_in_bfloat16_rounds_where_transformers_does(plus_one):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(5)
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16()
    norm = (GemmaRMSNorm if plus_one else LlamaRMSNorm)(128, eps=1e-6).bfloat16()
    norm.weight.data = weight
    factor = weight.float() + 1 if plus_one else weight
    # the mean of squares is summed in another order: one bit of the few that are on an edge
    same = RmsNorm((factor,), 1e-6)(x) == norm(x)
    assert same.float().mean() > 0.995
