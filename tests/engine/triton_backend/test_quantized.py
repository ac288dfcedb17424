"""Products with quantized weights in Triton's kernels against the weight that they stand for."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch.nn import functional

from lmi_bench.engine.torch_backend.quantization import gpu_linear, linear, rounding
from lmi_bench.engine.torch_backend.quantization.gpu_linear import GpuLinear, RoundedGpuLinear

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = {"aligned": (96, 256), "with a tail of outputs": (41, 192)}
ROWS = (1, 3, 17, 64, 70)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE)


def blocks_of_fp8(weight: torch.Tensor, block: int) -> rounding.RowWeight:
    """A scale for each block of `block` inputs and as many outputs, as DeepSeek-V3 has them."""
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -outputs % block)).view(
        -1, block, inputs // block, block
    )
    scale = padded.abs().amax(dim=(1, 3)) / rounding.FP8_MAX
    scale = scale.repeat_interleave(block, 0)[:outputs]
    values = weight.view(outputs, -1, block) / scale[..., None]
    return rounding.RowWeight(values.view(weight.shape).to(rounding.FP8), scale)


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
    scale = (
        weight.scale.half().float() if isinstance(weight, rounding.GroupedWeight) else weight.scale
    )
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
@pytest.mark.parametrize("fixed", [None, 3.0])
def test_int8_rows_give_what_whole_numbers_give(count, fixed):
    """Sums of products of whole numbers are exact: the kernel, torch's product and the emulation
    may differ by the order of two multiplications alone."""
    weight = rounding.round_int8(random(48, 256))
    largest = None if fixed is None else torch.tensor(fixed, device=DEVICE)
    x = random(count, 256, seed=9)
    expected = linear.Emulated(weight, None, largest)(x)
    got = RoundedGpuLinear(weight, None, largest)(x)
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
