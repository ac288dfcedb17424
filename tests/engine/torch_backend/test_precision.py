"""bfloat16: what it costs in accuracy, and how its arithmetic is chosen."""

from __future__ import annotations

import copy

import pytest
import torch

from lmi_bench.engine.torch_backend.attention import PagedAttention
from lmi_bench.engine.torch_backend.inputs import SequenceRows, pack
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.layers import PackedLinear, PlainLinear, packing_works
from lmi_bench.engine.torch_backend.model_folder import read_config
from lmi_bench.engine.torch_backend.models.build import build_model
from lmi_bench.engine.torch_backend.precision import Precision, choose_precision
from lmi_bench.model_shape import shape_from_hf_config

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
PROMPT = [5, 17, 99, 3, 42, 7, 150, 8, 61, 20, 21, 22]


@torch.inference_mode()
def last_logits(folder, precision):
    """Of the last token, computed as a decode row behind a prompt in two chunks."""
    config = read_config(folder)
    shape = shape_from_hf_config("tiny", config)
    model = build_model(folder, config, shape, precision, CPU)
    layout = KvLayoutShape(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, 4, precision.stored
    )
    attention = PagedAttention(KvCache(layout, 8, CPU), shape.num_heads, precision.compute)
    for first, stop in ((0, 6), (6, 11), (11, 12)):
        rows = SequenceRows(PROMPT[first:stop], first, (7, 2, 5), sampled=1)
        step = pack([rows], layout, attention.mask_formats, CPU)
        logits = model.logits(step, attention)
    return logits[0].float()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("compute", [F32, BF16], ids=["widened", "native"])
def test_bfloat16_logits_are_as_good_as_those_of_transformers(make_llama, kv_heads, compute):
    """Stated tolerance: against float32, root mean square error at most 5 % of the logits'
    spread, and at most 1.5 times that of transformers in bfloat16."""
    model = make_llama(num_key_value_heads=kv_heads)
    exact = model.logits(PROMPT)[-1]
    rounded = copy.deepcopy(model.model).to(BF16)(torch.tensor([PROMPT])).logits[0, -1].float()

    def error(logits):
        return (logits - exact).square().mean().sqrt() / exact.std()

    got = error(last_logits(model.folder, Precision(BF16, compute)))
    assert 0 < got < 0.05
    assert got < 1.5 * error(rounded)


def test_float32_logits_are_those_of_transformers(llama):
    got = last_logits(llama.folder, Precision(F32, F32))
    torch.testing.assert_close(got, llama.logits(PROMPT)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_packed_and_plain_linear_layers_agree(dtype):
    if not packing_works(CPU, dtype):
        pytest.skip(f"oneDNN packs no {dtype} here")
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    x, other = torch.randn(5, 64).to(dtype), torch.randn(5, 96).to(dtype)
    packed, plain = PackedLinear(weight, bias), PlainLinear(weight, bias)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == F32 else {"rtol": 2e-2, "atol": 1e-1}
    for got, expected in (
        (packed(x), plain(x)),
        (packed.add(x, other), plain.add(x, other)),
        (packed.silu(x), plain.silu(x)),
        (packed.multiply(x, other), plain.multiply(x, other)),
    ):
        torch.testing.assert_close(got, expected, **tolerance)


def test_float32_is_never_changed():
    precision = choose_precision("float32", CPU, parameters=10, free_bytes=1 << 40)
    assert precision == Precision(F32, F32)
    assert str(precision) == "float32"


def test_weights_that_would_not_fit_twice_are_not_widened():
    precision = choose_precision("bfloat16", CPU, parameters=1000, free_bytes=7999)
    assert precision == Precision(BF16, BF16)


def test_widened_precision_says_so():
    assert str(Precision(BF16, F32)) == "bfloat16, computed in float32"
