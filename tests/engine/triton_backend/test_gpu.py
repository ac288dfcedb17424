"""What only a real device shows: compiled kernels, captured graphs, bfloat16 arithmetic."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.executor import ParallelExecutor, TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.kernels import choose_kernels
from lmi_bench.engine.torch_backend.quantization.rounding import round_weight
from lmi_bench.engine.torch_backend.runner import TorchForward
from lmi_bench.engine.torch_backend.static.build import StepSettings
from lmi_bench.engine.torch_backend.static.forward import compare_steps
from lmi_bench.engine.triton_backend.step import TritonStep, unsupported
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config
from tests.engine.torch_backend import parity
from tests.engine.torch_backend.scores import scores
from tests.engine.torch_backend.test_stored_forms import FORMATS, rewritten, rounded_folder
from tests.engine.torch_backend.tiny_models import FAMILIES, TinyModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs a CUDA device and TRITON_INTERPRET=0",
    ),
]
BLOCK = 16
WITHOUT = ("Falcon", "GptOss", "DeepseekV3")
GRAPHS = StepSettings(captured=True, most_sequences=8, max_tokens=256)
STEPS = {"eager": StepSettings(), "graphs": GRAPHS, "triton": replace(GRAPHS, kernels=TritonStep)}


def on_gpu(folder, options, steps, **beside):
    return TorchExecutor.load(folder, replace(options, device="cuda", steps=steps), **beside)


def loader(model, name):
    spec = spec_from_hf_config("tiny", read_config(model.folder))
    if name == "triton" and (reason := unsupported(spec, BLOCK)):
        pytest.skip(reason)
    return partial(on_gpu, steps=STEPS[name])


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_gives_the_tokens_of_transformers(tmp_path, family, name):
    model = TinyModel(tmp_path, family)
    parity.assert_any_mix_gives_the_same_tokens(
        hash_free_seed(family),
        model,
        parity.random_requests(5, 10),
        block_sizes=(BLOCK,),
        fewest_cache_tokens=90,
        load=loader(model, name),
    )


def hash_free_seed(text):
    return sum(text.encode())


def test_300_steps_of_mixed_arrivals(tmp_path):
    """Prompts arrive while others decode, in chunks, with a cache that is too small for all."""
    model = TinyModel(tmp_path, "Qwen3")
    requests = parity.random_requests(11, 60, longest_output=60, delay_s=0.005)
    outputs, stats = asyncio.run(
        parity.generate(
            model.folder,
            requests,
            load=loader(model, "triton"),
            block_size=BLOCK,
            num_blocks=24,
            max_rolling_batch_size=8,
            chunked_prefill=True,
            max_rolling_batch_prefill_tokens=24,
            prefix_caching=True,
        )
    )
    parity.assert_equal_but_for_near_ties(model, requests, outputs)
    assert stats.steps >= 300


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("window", [12, None])
@pytest.mark.parametrize("length", [33, 65, 96, 97])
def test_shared_keys_under_a_mask_are_read_right_whatever_their_number(tmp_path, name, window, length):
    """A prompt longer than its windows, and a later chunk, are masked; torch's attention had an
    error at 32 n + 1 keys."""
    model = TinyModel(tmp_path, "Mistral", sliding_window=window)
    requests = [([3 + (i * 37) % 200 for i in range(length)], 4, 0.0)]
    chunks = {} if window else {"chunked_prefill": True, "max_rolling_batch_prefill_tokens": 30}
    outputs, _ = asyncio.run(parity.generate(tmp_path, requests, load=loader(model, name), block_size=BLOCK, **chunks))
    parity.assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_further_from_float32_than_transformers_is(tmp_path, family):
    """The medians: where two experts score alike, a row may go to another one."""
    model = TinyModel(tmp_path, family)
    tokens = [3 + (i * 37) % 200 for i in range(64)]
    exact = model.logits(tokens[:-1]).log_softmax(-1)
    kind = type(model.model)
    narrow = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).cuda().eval()
    with torch.inference_mode():
        theirs = narrow(torch.tensor([tokens[:-1]]).cuda()).logits[0].float().cpu().log_softmax(-1)
    executor = TorchExecutor.load(
        tmp_path, LoadSettings(dtype="bfloat16", num_blocks=16, block_size=BLOCK, device="cuda")
    )
    ours = torch.tensor(executor._ranks.runner.score(tokens, 1))
    asyncio.run(executor.close())
    chosen = torch.tensor(tokens[1:])[:, None]
    wanted = exact.gather(1, chosen)[:, 0]
    error = (ours - wanted).abs().median()
    assert error <= 1.5 * (theirs.gather(1, chosen)[:, 0] - wanted).abs().median() + 1e-3


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT])
def test_graphs_give_what_eager_steps_give_in_bfloat16(tmp_path, family):
    model = TinyModel(tmp_path, family)
    for name in ("graphs", "triton"):
        if name == "triton" and unsupported(spec_from_hf_config("tiny", read_config(model.folder)), BLOCK):
            continue
        executor = on_gpu(tmp_path, LoadSettings(dtype="bfloat16", num_blocks=64, block_size=BLOCK), STEPS[name])
        assert_graphs_agree(executor, name)
        asyncio.run(executor.close())


ON_TRITON = [Scheme.INT8, Scheme.AWQ_INT4, Scheme.SMOOTHQUANT, Scheme.FP8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ON_TRITON)
def test_a_quantized_product_is_the_one_of_the_weight_that_is_stood_for(scheme, dtype):
    """At sizes on either side of where kernels change, of a layer as large as Llama 3's."""
    settings, chance = QuantizeSettings(scheme), torch.Generator("cuda").manual_seed(1)
    floats = torch.randn(1024, 14336, generator=chance, device="cuda") * 0.02
    weight = round_weight(floats, settings, 128)
    kernels = choose_kernels(settings, Precision(dtype, dtype), torch.device("cuda"))
    assert kernels.words.startswith("Triton's"), kernels
    layer, tolerance = kernels.make(weight, None), 0.05 if scheme is Scheme.FP8 else 0.02
    for count in (1, 3, 16, 17, 64, 65, 300):
        x = torch.randn(count, 14336, generator=chance, device="cuda").to(dtype)
        exact = x.float() @ weight.floats().t()
        error = (layer(x).float() - exact).norm() / exact.norm()
        assert error < tolerance, (count, error)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_keeps_its_bytes_and_gives_what_its_floats_give(tmp_path, kind):
    model = TinyModel(tmp_path / "m", "Llama", intermediate_size=128)
    folder, floats = rounded_folder(model, tmp_path / "q", kind)
    wanted = scores(rewritten(model.folder, tmp_path / "f", floats))
    torch.testing.assert_close(scores(folder, device="cuda"), wanted, rtol=2e-3, atol=2e-3)
    settings = LoadSettings(dtype="bfloat16", num_blocks=64, block_size=BLOCK)
    plain = on_gpu(tmp_path / "m", settings, STEPS["eager"])
    for name in ("graphs", "triton"):
        executor = on_gpu(folder, settings, STEPS[name])
        assert executor.weight_bytes < plain.weight_bytes
        assert "floats" not in executor.weights_description
        assert_graphs_agree(executor, name)
        asyncio.run(executor.close())
    asyncio.run(plain.close())


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
@pytest.mark.parametrize("name", ["graphs", "triton"])
def test_graphs_of_quantized_weights_give_what_eager_steps_give(tmp_path, name, scheme):
    TinyModel(tmp_path, "Qwen3")
    settings = LoadSettings(
        dtype="bfloat16", num_blocks=64, block_size=BLOCK, kv_dtype="float8", quantize=QuantizeSettings(scheme)
    )
    executor = on_gpu(tmp_path, settings, STEPS[name])
    assert_graphs_agree(executor, name)
    asyncio.run(executor.close())


def assert_graphs_agree(executor, name):
    """Each captured shape's logits with an eager step's over the same context."""
    forward = executor._ranks.runner._forward
    eager = TorchForward(forward._otherwise.model, forward._otherwise.cache, num_blocks=63)
    for difference in compare_steps(forward, eager):  # a row may go to another expert
        assert difference.largest < 0.3 * difference.spread + 0.1, (name, difference)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_two_gpus_give_the_tokens_of_transformers(tmp_path, family):
    def load(folder, options):
        return ParallelExecutor.load(folder, replace(options, device="cuda"), tensor_parallel=2)

    model = TinyModel(tmp_path, family)
    requests = parity.random_requests(7, 8)
    outputs, _ = asyncio.run(parity.generate(model.folder, requests, load=load, block_size=BLOCK))
    parity.assert_equal_but_for_near_ties(model, requests, outputs)
