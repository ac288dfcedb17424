"""Rounding, packing and the products with rounded weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.errors import InputError
from lmi_bench.engine.quantization import LMI_NAMES, QuantizeSettings, Scheme, parse_scheme
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.calibration import search_awq_factors, smoothing_factors
from lmi_bench.engine.torch_backend.quantization.kernels import choose_kernels
from lmi_bench.engine.torch_backend.quantization.linear import Emulated, Grouped4BitByKernel, ScaledRows, W8A8ByOneDnn
from lmi_bench.engine.torch_backend.quantization.rounding import (
    from_awq,
    pack_3bit,
    pack_3bit_for_file,
    pack_bits,
    round_fp8,
    round_grouped,
    round_int8,
    round_weight,
    to_awq,
    unpack_3bit,
    unpack_3bit_from_file,
    unpack_bits,
)

CPU = torch.device("cpu")
ROUNDED = [scheme for scheme in Scheme if scheme is not Scheme.NONE]


def random_weight(seed=0, rows=128, columns=256):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@given(st.integers(0, 1000), st.floats(1e-3, 10))
@settings(max_examples=20)
def test_int8_is_off_by_half_a_step_at_most(seed, size):
    weight = random_weight(seed, 8, 32) * size
    rounded = round_int8(weight)
    assert ((rounded.floats() - weight).abs() <= rounded.scale[:, None] * 0.5001).all()


@given(st.integers(0, 1000), st.sampled_from([3, 4]), st.floats(-3, 3))
@settings(max_examples=40)
def test_groups_are_off_by_half_a_step_of_their_own_and_keep_zero(seed, bits, shift):
    """Also where all of a group has one sign. The ends may be off by half a step more, where the
    zero itself was rounded."""
    weight = random_weight(seed, 4, 64) + shift
    weight[:, ::16] = 0.0
    rounded = round_grouped(weight, bits, 16)
    step = rounded.scale.repeat_interleave(16, dim=1)
    assert ((rounded.floats() - weight).abs() <= step * 1.0001).all()
    inner = (weight > weight.amin(1, keepdim=True)) & (weight < weight.amax(1, keepdim=True))
    share = ((rounded.floats() - weight).abs() <= step * 0.5001)[inner].float().mean()
    assert share > 0.9
    assert (rounded.floats()[:, ::16] == 0).all()


def test_float8_has_three_bits_behind_the_point():
    """Neighbours of E4M3 are 1/8 apart between 1 and 2: at most 1/16 of relative error."""
    weight = random_weight(3).sign() * (1 + torch.rand(128, 256))
    error = (round_fp8(weight).floats() - weight).abs() / weight.abs()
    assert error.max() <= 1 / 16 * 1.001


@given(st.integers(0, 100), st.sampled_from([1, 2, 4]))
@settings(max_examples=12)
def test_packed_bits_come_back(seed, bits):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (5, 48), generator=generator).to(torch.uint8)
    packed = pack_bits(values, bits)
    assert packed.nbytes == values.numel() * bits // 8
    assert torch.equal(unpack_bits(packed, bits), values)


def test_three_bits_take_three_eighths_of_a_byte_and_come_back():
    values = torch.arange(5 * 48, dtype=torch.uint8).view(5, 48) * 5 % 8
    low, high = pack_3bit(values)
    assert low.nbytes + high.nbytes == values.numel() * 3 // 8
    assert torch.equal(unpack_3bit(low, high), values)
    stored = pack_3bit_for_file(values)
    assert stored.nbytes == values.numel() * 3 // 8
    assert torch.equal(unpack_3bit_from_file(stored), values)
    half = unpack_3bit_from_file(stored[:, : stored.shape[1] // 2])
    assert torch.equal(half, values[:, :24]), "half of the bytes is half of the row"


def unpack_by_hand(qweight, qzeros, scales, group_size):
    """AWQ's public layout, one number at a time, from its description."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    weight = torch.zeros(outputs, inputs)
    for i in range(inputs):
        for word in range(outputs // 8):
            for place in range(8):
                output = word * 8 + order[place]
                value = (int(qweight[i, word]) >> (4 * place)) & 15
                zero = (int(qzeros[i // group_size, word]) >> (4 * place)) & 15
                weight[output, i] = (value - zero) * float(scales[i // group_size, output])
    return weight


def test_awqs_public_format_is_read_and_written_as_described():
    weight = round_grouped(random_weight(1, 16, 64), 4, 32)
    stored = to_awq(weight)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()} == {
        "qweight": (torch.int32, (64, 2)),
        "qzeros": (torch.int32, (2, 2)),
        "scales": (torch.float16, (2, 16)),
    }
    assert (stored["qweight"] < 0).any(), "the eighth value must reach the sign bit"
    by_hand = unpack_by_hand(stored["qweight"], stored["qzeros"], stored["scales"], 32)
    torch.testing.assert_close(from_awq(**stored).floats(), by_hand)
    torch.testing.assert_close(by_hand, weight.floats(), rtol=1e-3, atol=0)  # float16 scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ROUNDED)
def test_a_product_is_the_one_of_the_weight_that_is_stood_for(scheme, dtype):
    """At one row and many, on either side of where kernels change; activations may be rounded."""
    weight = round_weight(random_weight(2), QuantizeSettings(scheme), 128)
    bias = torch.linspace(-1, 1, 128).to(dtype)
    linear = choose_kernels(QuantizeSettings(scheme), Precision(dtype, dtype), CPU).make(weight, bias)
    tolerance = {Scheme.SMOOTHQUANT: 0.02, Scheme.FP8: 0.05}.get(scheme, 0.006)
    for count in (0, 1, 3, 17, 130):
        x = torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).to(dtype)
        exact = x.float() @ weight.floats().t() + bias.float()
        got = linear(x)
        assert got.dtype == dtype
        assert got.shape == (count, 128)
        assert (got.float() - exact).norm() <= tolerance * exact.norm()
        torch.testing.assert_close(linear.add(x, got), got + got)
        torch.testing.assert_close(linear.activated(x), torch.nn.functional.silu(got))
        torch.testing.assert_close(linear.multiply(x, got), got * got)


FLOAT32 = Precision(torch.float32, torch.float32)
needs_onednn = pytest.mark.skipif(
    choose_kernels(QuantizeSettings(Scheme.SMOOTHQUANT), FLOAT32, CPU).make is not W8A8ByOneDnn,
    reason="oneDNN's int8 product saturates on this processor (no VNNI), so it is not chosen",
)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.SMOOTHQUANT])
def test_the_chosen_int8_kernel_does_not_saturate(scheme):
    """Neighbouring products of 127 x 127 exceed 16 bits, in which AVX2 would add them."""
    weight = round_int8(torch.ones(128, 256))
    linear = choose_kernels(QuantizeSettings(scheme), FLOAT32, CPU).make(weight, None)
    x = torch.linspace(0.9, 1.0, 3)[:, None].expand(3, 256)
    torch.testing.assert_close(linear(x), x.sum(1, keepdim=True).expand(3, 128), rtol=5e-3, atol=0)


@needs_onednn
@pytest.mark.parametrize("fixed", [None, torch.tensor(3.0)])
def test_int8_kernels_give_what_whole_numbers_give(fixed):
    """Sums of products of whole numbers below 2^24 are exact: the forms may not differ."""
    weight = round_int8(random_weight(4))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(9))
    emulated = Emulated(weight, None, fixed)(x)
    torch.testing.assert_close(W8A8ByOneDnn(weight, None, fixed)(x), emulated, rtol=1e-5, atol=1e-5)


def test_unrounded_activations_lose_nothing_where_no_kernel_rounds_them():
    weight = round_int8(random_weight(5))
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3))
    exact = x.double() @ weight.floats().double().t()
    plain = ScaledRows(weight, None)(x)
    torch.testing.assert_close(plain.double(), exact, rtol=1e-4, atol=1e-5)


BFLOAT16 = Precision(torch.bfloat16, torch.float32)


@pytest.mark.skipif(
    "kernel up to" not in choose_kernels(QuantizeSettings(Scheme.AWQ_INT4), BFLOAT16, CPU).words,
    reason="torch packs 4 bits otherwise here",
)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_4_bit_kernel_and_its_unpacked_bytes_agree(group_size):
    weight = round_grouped(random_weight(6, 192, 256), 4, group_size)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3))
    by_kernel = Grouped4BitByKernel(weight, None, kernel_rows=16)(x)
    by_floats = Grouped4BitByKernel(weight, None, kernel_rows=0)(x)
    exact = x @ weight.floats().t()
    for got in (by_kernel, by_floats):
        assert (got - exact).norm() < 0.005 * exact.norm()


def test_weights_take_the_bytes_of_their_bits():
    """128 x 256 weights; groups of 128 have a float16 scale and a zero of a byte, or two bfloat16
    in the kernel's form; rows have a float32 scale."""
    weights = 128 * 256
    precision = Precision(torch.float32, torch.float32)

    def held(scheme):
        chosen = QuantizeSettings(scheme)
        rounded = round_weight(random_weight(), chosen, 128)
        return choose_kernels(chosen, precision, CPU).make(rounded, None).nbytes

    groups = weights // 128
    assert held(Scheme.AWQ_INT3) == weights * 3 // 8 + groups * 3
    assert held(Scheme.AWQ_INT4) == weights // 2 + groups * 3
    assert held(Scheme.FP8) == weights + 128 * 4
    for scheme in (Scheme.INT8, Scheme.SMOOTHQUANT):
        assert weights + 128 * 4 <= held(scheme) <= weights + 128 * (4 + 8)


def test_smoothing_splits_the_difficulty_by_alpha():
    """Xiao et al. 2022, equation 4, by hand: max|X| = 16 and max|W| = 4."""
    weight = torch.tensor([[4.0, 0.25], [-2.0, -0.25]])
    largest = torch.tensor([16.0, 1.0])
    half = smoothing_factors(0.5, [weight], largest)
    assert half.tolist() == pytest.approx([16**0.5 / 4**0.5, 1 / 0.25**0.5])
    assert smoothing_factors(1.0, [weight], largest).tolist() == pytest.approx([16.0, 1.0])
    # with alpha 0.5 activations and weights end with the same maxima
    assert (largest / half).tolist() == pytest.approx((weight.abs().amax(0) * half).tolist())


def test_searched_scales_save_the_channels_that_matter():
    """Few channels carry most of the signal: AWQ's error is well below plain rounding's."""
    generator = torch.Generator().manual_seed(8)
    weight = random_weight(7)
    rows = torch.randn(64, 256, generator=generator)
    rows[:, ::64] *= 40.0

    def rounded(matrix):
        return round_grouped(matrix, 3, 128).floats()

    def error(factors):
        after = rounded(weight * factors) / factors
        return float((rows @ (after - weight).t()).norm())

    factors = search_awq_factors([weight], rows.abs().mean(dim=0), rows, rounded)
    assert factors is not None
    assert error(factors) < 0.6 * error(torch.ones(256))
    assert factors[::64].min() > factors[1::64].max(), "salient channels are scaled up"


def test_where_no_scale_helps_none_is_used():
    """Weights that are whole steps already are rounded without error."""
    weight = torch.arange(16.0).repeat(4, 8)
    rows = torch.ones(4, 128)
    assert search_awq_factors([weight], torch.ones(128), rows, lambda w: round_grouped(w, 4, 128).floats()) is None


def test_names_of_lmi_are_understood_and_others_named():
    assert parse_scheme("awq") is Scheme.AWQ_INT4
    assert all(parse_scheme(name) is scheme for name, scheme in LMI_NAMES.items())
    with pytest.raises(InputError, match=r"gptq.*known: none, int8, awq-int4"):
        parse_scheme("gptq")
    with pytest.raises(InputError, match=r"0 to 1, got 1\.5"):
        QuantizeSettings(Scheme.SMOOTHQUANT, alpha=1.5)
