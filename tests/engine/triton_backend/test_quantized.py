"""Products with quantized weights in Triton's kernels against the weight that they stand for."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from functools import partial

import pytest
import torch
from torch.nn import functional

from lmi_bench.engine.scheduling.batch import LAST_SAMPLED
from lmi_bench.engine.torch_backend import layers
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.quantization import gpu_linear, linear, loader, rounding
from lmi_bench.engine.torch_backend.quantization.gpu_linear import GpuLinear, RoundedGpuLinear
from lmi_bench.engine.torch_backend.quantization.kernels import Kernels
from lmi_bench.engine.torch_backend.static.artefact import StaticShape
from lmi_bench.engine.torch_backend.static.build import StepSettings
from lmi_bench.engine.triton_backend.step import TritonStep
from tests.engine.torch_backend.scores import scores
from tests.engine.torch_backend.test_runner import PROMPT, Steps, entry
from tests.engine.torch_backend.test_stored_forms import FORMATS, rewritten, rounded_folder
from tests.engine.torch_backend.tiny_models import TinyModel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = {"aligned": (96, 256), "with a tail of outputs": (41, 192)}
ROWS = (1, 3, 17, 64, 70)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE)


def blocks_of_fp8(weight: torch.Tensor, block: int) -> rounding.QuantizedWeight:
    """A scale for each block of `block` inputs and as many outputs, as DeepSeek-V3 has them."""
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -outputs % block)).view(-1, block, inputs // block, block)
    scale = padded.abs().amax(dim=(1, 3)) / rounding.FP8_MAX
    scale = scale.repeat_interleave(block, 0)[:outputs]
    values = weight.view(outputs, -1, block) / scale[..., None]
    return rounding.QuantizedWeight(values.view(weight.shape).to(rounding.FP8), scale)


FORMS = {
    "groups of 32": lambda weight: rounding.round_grouped(weight, 4, 32),
    "one group": lambda weight: rounding.round_grouped(weight, 4, weight.shape[1]),
    "int8": rounding.round_int8,
    "float8": rounding.round_fp8,
    "blocks of float8": lambda weight: blocks_of_fp8(weight, 64),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_the_one_of_the_weight_that_is_stood_for(form, size):
    """At one row and several, over splits of the inputs, and unpacked for many rows."""
    outputs, inputs = SIZES[size]
    weight = FORMS[form](random(outputs, inputs))
    assert gpu_linear.fits(weight)
    scale = weight.scale.half().float() if weight.bits == 4 else weight.scale
    stood_for = dataclasses.replace(weight, scale=scale).floats()
    bias = random(outputs, seed=3)
    layer = GpuLinear(weight, bias)
    torch.testing.assert_close(layer.rows(0, outputs, torch.float32), stood_for)
    for count in ROWS:
        x = random(count, inputs, seed=count)
        expected = x @ stood_for.T + bias
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-3)
    narrow = GpuLinear(weight, bias.half())(x.half()[:5])
    assert narrow.dtype is torch.float16
    torch.testing.assert_close(narrow.float(), expected[:5], rtol=0.01, atol=0.05)
    assert layer(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_every_split_of_the_inputs_is_summed_once(monkeypatch, splits):
    monkeypatch.setattr(gpu_linear, "_MOST_SPLITS", splits)
    weight = rounding.round_grouped(random(16, 640), 4, 32)  # 10 tiles, not a multiple of 8
    x = random(4, 640, seed=1)
    expected = x @ weight.floats().T
    torch.testing.assert_close(GpuLinear(weight, None)(x), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("count", [1, 64, 70])
def test_int8_rows_give_what_whole_numbers_give(count):
    """Sums of products of whole numbers are exact: the kernel, torch's product and the emulation
    may differ by the order of two multiplications alone."""
    weight = rounding.round_int8(random(48, 256))
    x = random(count, 256, seed=9)
    expected = linear.Emulated(weight, None)(x)
    got = RoundedGpuLinear(weight, None)(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_float8_rows_give_what_the_emulation_gives():
    weight = rounding.round_fp8(random(48, 256))
    x = random(17, 256, seed=9) * torch.logspace(-3, 3, 17, device=DEVICE)[:, None]
    expected = linear.Emulated(weight, None)(x)
    torch.testing.assert_close(RoundedGpuLinear(weight, None)(x), expected, rtol=1e-4, atol=1e-4)


def test_a_weight_takes_the_bytes_of_its_bits():
    weight = random(64, 256)
    four = GpuLinear(rounding.round_grouped(weight, 4, 128), None)
    assert four.nbytes == 64 * 256 // 2 + 64 * 2 * 3  # a float16 scale and a byte of zero a group
    assert GpuLinear(rounding.round_int8(weight), None).nbytes == 64 * 256 + 64 * 4


def test_sizes_without_a_tile_are_named():
    assert not gpu_linear.fits(rounding.round_grouped(random(8, 96), 4, 16))
    assert not gpu_linear.fits(rounding.round_grouped(random(8, 64), 3, 32))
    assert not gpu_linear.fits(rounding.round_int8(random(8, 40)))
    whole = rounding.round_int8(random(8, 192))  # blocks of 128 and 64 inputs
    assert not gpu_linear.fits(dataclasses.replace(whole, scale=random(8, 2)))


@pytest.fixture
def kept(monkeypatch):
    """Stored bytes are kept as on a GPU."""
    kernels = Kernels(GpuLinear, "Triton's", fits=gpu_linear.fits)
    plan = partial(loader.kept_plan, device=torch.device("cuda"))
    monkeypatch.setattr(loader, "on_gpu", lambda *_, **__: kernels)
    monkeypatch.setattr(loader, "kept_plan", lambda config, _, degree: plan(config, degree=degree))
    monkeypatch.setattr(layers, "packing_works", lambda *_: False)


@pytest.mark.skipif(not INTERPRETED, reason="test_gpu.py has the same on a device")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_keeps_its_bytes_and_gives_what_its_floats_give(kept, tmp_path, kind):
    """Through both back ends; a matrix whose groups have no tile stays floats, and that is told."""
    sizes = {"intermediate_size": 128, "num_hidden_layers": 1}
    model = TinyModel(tmp_path / "m", "Llama", **sizes)
    folder, floats = rounded_folder(model, tmp_path / "q", kind)
    wanted = scores(rewritten(model.folder, tmp_path / "f", floats))
    torch.testing.assert_close(scores(folder), wanted, rtol=1e-3, atol=1e-3)
    told, tokens = [], []
    for place, kernels in ((folder, TritonStep), (tmp_path / "f", None)):
        shapes = StepSettings(kernels=kernels, shapes=(StaticShape(1, 32),))
        steps = Steps(place, block_size=16, steps=shapes)
        got = steps.tokens(entry(0, PROMPT, 0, (0, 1)))
        got += steps.tokens(entry(0, (LAST_SAMPLED,), len(PROMPT)))
        told.append((steps.executor.weight_bytes, steps.executor.weights_description))
        tokens.append(got)
        asyncio.run(steps.executor.close())
    assert tokens[0] == tokens[1]
    assert told[0][0] < told[1][0]
    assert "floats" not in told[0][1]


def test_blocks_without_a_tile_become_floats_and_that_is_told(kept, tmp_path):
    model = TinyModel(tmp_path / "m", "Llama", intermediate_size=96, num_hidden_layers=1)
    folder, _ = rounded_folder(model, tmp_path / "q", "int4")
    executor = TorchExecutor.load(folder, LoadSettings(num_blocks=2, threads=1))
    assert executor.weights_description.endswith("weights of 4 or 8 bits became floats")
    assert 0 < executor.quantized.held_bytes < executor.quantized.float_bytes
    asyncio.run(executor.close())
