"""bfloat16 and float16: what they cost in accuracy, and how their arithmetic is chosen."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from lmi_bench.engine.scheduling.batch import BatchEntry, StepBatch, StepKind
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.engine.torch_backend.attention import SequenceRows
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.layers import PackedLinear, PlainLinear, packing_works
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.precision import Precision, choose_precision
from lmi_bench.engine.torch_backend.quantization.loader import build_model
from lmi_bench.engine.torch_backend.runner import TorchForward
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PROMPT = [5, 17, 99, 3, 42, 7, 150, 8, 61, 20, 21, 22]


@torch.inference_mode()
def all_logits(folder, precision):
    """Of a prompt's tokens in two chunks and of a decode row behind them, (tokens, vocab)."""
    config = read_config(folder)
    spec = spec_from_hf_config("tiny", config)
    shape = spec.shape("tiny")
    model = build_model(folder, spec, precision, CPU)
    layout = KvLayoutShape.of(shape, 4, precision.stored)
    forward = TorchForward(model, KvCache(layout, 8, CPU))
    logits = []
    for first, stop in ((0, 6), (6, 11), (11, 12)):
        rows = SequenceRows(PROMPT[first:stop], first, (7, 2, 5), sampled=stop - first)
        logits.append(forward.logits([rows]).float())
    return torch.cat(logits)


MODELS = [
    ("Llama", {"num_key_value_heads": 4}),
    ("Llama", {"num_key_value_heads": 2}),
    ("Mistral", {"sliding_window": 5}),
    ("Mixtral", {}),
    ("Qwen2", {}),
    ("Qwen3", {}),
    ("Falcon", {"multi_query": True}),
    ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("Glm4Moe", {}),
    ("DeepseekV3", {}),
]


@pytest.mark.parametrize(("family", "changes"), MODELS)
@pytest.mark.parametrize("compute", [F32, BF16], ids=["widened", "native"])
def test_bfloat16_logits_are_as_good_as_those_of_transformers(make_model, family, changes, compute):
    """Stated tolerance: against float32, root mean square error at most 5 % of the logits'
    spread, and at most 1.5 times that of transformers in bfloat16."""
    model = make_model(family, **changes)
    exact = model.logits(PROMPT)
    rounded = copy.deepcopy(model.model).to(BF16)(torch.tensor([PROMPT])).logits[0].float()

    def error(logits):
        return (logits - exact).square().mean().sqrt() / exact.std()

    got = error(all_logits(model.folder, Precision(BF16, compute)))
    assert 0 < got < 0.05
    assert got < 1.5 * error(rounded)


@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3"])
@torch.inference_mode()
def test_bfloat16_rows_choose_the_experts_that_transformers_chooses(make_model, family):
    """Scores rounded to bfloat16 are often equal, so that rows go elsewhere."""
    model = make_model(family, n_routed_experts=64, num_experts_per_tok=8)
    spec = spec_from_hf_config("tiny", read_config(model.folder))
    ours = build_model(model.folder, spec, Precision(BF16, BF16), CPU).layers[1].mlp.router
    rows = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    weights, chosen = ours(rows)
    theirs = copy.deepcopy(model.model.model.layers[1].mlp.gate)
    theirs.weight.data = theirs.weight.data.to(BF16)  # the correction stays float32
    _, wanted, numbers = theirs(rows)
    got, expected = (
        torch.zeros(512, 64).scatter_(1, index, each.float()) for index, each in ((chosen, weights), (numbers, wanted))
    )
    torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("family", "changes"), MODELS)
@pytest.mark.parametrize("compute", [F32, F16], ids=["widened", "as on a GPU"])
def test_float16_logits_are_nearer_than_those_of_bfloat16(make_model, family, changes, compute):
    """Three more bits behind the point. Stated tolerance: against float32, root mean square error
    at most 1 % of the logits' spread. The masks of half precision stay finite."""
    model = make_model(family, **changes)
    exact = model.logits(PROMPT)
    got = all_logits(model.folder, Precision(F16, compute))
    assert 0 < (got - exact).square().mean().sqrt() / exact.std() < 0.01


def test_float32_logits_are_those_of_transformers(llama):
    got = all_logits(llama.folder, Precision(F32, F32))
    torch.testing.assert_close(got, llama.logits(PROMPT), rtol=1e-4, atol=1e-4)


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
        (packed.activated(x), plain.activated(x)),
        (packed.activated(x, gelu=True), plain.activated(x, gelu=True)),
        (packed.multiply(x, other), plain.multiply(x, other)),
    ):
        torch.testing.assert_close(got, expected, **tolerance)


def test_float32_is_never_changed():
    precision = choose_precision("float32", CPU, parameters=10)
    assert precision == Precision(F32, F32)
    assert str(precision) == "float32"


def test_weights_that_would_not_fit_twice_are_not_widened():
    precision = choose_precision("bfloat16", CPU, parameters=1 << 50)
    assert precision == Precision(BF16, BF16)


def test_float16_is_arithmetic_for_gpus():
    precision = choose_precision("float16", CPU, parameters=1000)
    assert precision == Precision(F16, F32)
    gpu = choose_precision("float16", torch.device("cuda"), parameters=1000)
    assert gpu == Precision(F16, F16)


def test_widened_precision_says_so():
    assert str(Precision(BF16, F32)) == "bfloat16, computed in float32"


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_narrower_cache_takes_half_and_costs_little(make_llama, kv_heads, narrow):
    """Stated tolerance: log-probabilities within 0.1 of float32's where only the cache is
    rounded."""
    model = make_llama(num_key_value_heads=kv_heads)
    found = {}
    for name in ("float32", narrow):
        executor = TorchExecutor.load(
            model.folder, LoadSettings(dtype="float32", kv_dtype=name, num_blocks=4, block_size=4, threads=1)
        )
        assert executor.kv_dtype == name
        found[name] = (executor.kv_cache_bytes, asyncio.run(decoded_logprob(executor)))
    (whole_bytes, exact), (narrow_bytes, rounded) = found["float32"], found[narrow]
    assert whole_bytes == 2 * narrow_bytes
    assert 0 < abs(exact - rounded) < 0.1


async def decoded_logprob(executor):
    """Of the token that a decode row behind PROMPT[:-1] is sure of, whatever it is."""
    sampling = SamplingParams(logprobs=True)
    last = len(PROMPT) - 1
    prompt = BatchEntry(1, StepKind.PREFILL, PROMPT[:-1], 0, (3, 0, 2), False, sampling)
    await executor.execute(StepBatch(0, (prompt,), StepShape()))
    decode = BatchEntry(1, StepKind.DECODE, PROMPT[-1:], last, (), True, sampling)
    (output,) = await executor.execute(StepBatch(1, (decode,), StepShape()))
    await executor.close()
    return output.logprobs[0]
