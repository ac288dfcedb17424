"""Weights and caches in few bits: what they save, and the arithmetic of widening them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.level.fast import CopyLimits, trace_closed_loop
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_12, VLLM_V0_PRIOR
from lmi_bench.analysis.model.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.memory import kv_bytes_per_value
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.engine.scheduling.step_shape import StepShape

MODEL, A10G, A100 = (find_model("llama-2-7b"), find_instance("ml.g5.2xlarge"), find_instance("ml.p4d.24xlarge"))
H100 = find_instance("ml.p5.48xlarge")
B200 = bare_machine(find_accelerator("B200"), 1)
OLD_TGI = replace(TGI_2023, dtypes=())
"""Its constants for formats that it never loaded."""


def parts(dtype, step, *, instance=A100, profile=OLD_TGI, **more):
    return step_time_model_for(Setup(MODEL, instance, 1, dtype, **more), profile).explain(step)


def prompt(tokens):
    return StepShape(prefill_sequences=1, prefill_tokens=tokens, prefill_context_pairs=tokens * tokens // 2)


def decode(rows, context=1000):
    return StepShape(decode_sequences=rows, decode_tokens=rows, decode_context_tokens=rows * context)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "expected"),
    [
        ("float16", None, 2),
        ("float8", None, 2),
        ("int4", None, 2),
        ("float32", None, 4),
        ("float16", "fp8", 1),
        ("bfloat16", "float32", 4),
    ],
)
def test_a_cache_has_16_bits_unless_something_says_otherwise(dtype, kv_dtype, expected):
    assert kv_bytes_per_value(dtype, kv_dtype) == expected


def test_an_unknown_cache_format_names_the_known_ones():
    with pytest.raises(InputError, match="float32, float16, bfloat16, float8, int8"):
        kv_bytes_per_value("float16", "int3")


def test_an_fp8_cache_holds_twice_the_sequences_and_is_read_in_half_the_time():
    wide = Setup(MODEL, A10G, 1, "float16")
    narrow = replace(wide, kv_dtype="float8")
    assert scheduler_config_for(narrow, OLD_TGI, 512).num_blocks == pytest.approx(
        2 * scheduler_config_for(wide, OLD_TGI, 512).num_blocks, abs=1
    )
    wide, narrow = parts("float16", decode(8)), parts("float16", decode(8), kv_dtype="float8")
    assert narrow.kv_s == pytest.approx(wide.kv_s / 2)
    assert narrow.compute_s > wide.compute_s


def test_four_bit_weights_save_a_lone_sequence_time_but_cost_a_long_prompt_more():
    """Reading a quarter of the bytes helps a decode step; a prompt of 2,048 tokens widens every
    weight for each of its 16 blocks of 128 rows: 3 operations at a sixteenth of the matrix rate
    are 48 / 128 of a row's 2, so 19 % more arithmetic."""
    ideal = with_narrow_share(1.0)
    for profile, share in ((ideal, 0.6), (OLD_TGI, 0.7)):
        lone = [parts(dtype, decode(1), instance=A10G, profile=profile).total_s for dtype in ("int4", "float16")]
        assert lone[0] < share * lone[1]
    plain = parts("float16", prompt(2048), profile=ideal)
    widened = parts("int4", prompt(2048), profile=ideal)
    linear_s = 2 * (MODEL.params_total - 2 * 32000 * 4096) * 2048
    linear_s /= 312e12 * OLD_TGI.parameters.compute_share
    assert widened.compute_s - plain.compute_s == pytest.approx(0.1875 * linear_s, rel=0.03)


def test_reading_and_arithmetic_of_four_bit_weights_have_shares_of_their_own():
    """Half the arithmetic rate leaves the reads as they are, and half the read rate the sums."""
    base = parts("int4", prompt(2048), profile=with_narrow_share(1.0))
    for name, reads, sums in (("narrow_share", 1, 2), ("narrow_read_share", 2, 1)):
        parameters = replace(with_narrow_share(1.0).parameters, **{name: 0.5})
        found = parts("int4", prompt(2048), profile=replace(OLD_TGI, parameters=parameters))
        assert found.weights_s == pytest.approx(reads * base.weights_s, rel=0.08)
        if sums == 1:  # widening is timed by the reads that it accompanies
            assert found.compute_s == pytest.approx(base.compute_s)
        else:
            assert 1.5 * base.compute_s < found.compute_s < 2 * base.compute_s


@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp4"])
def test_four_bit_floats_are_multiplied_as_they_are_on_blackwell_and_widened_before(dtype):
    """B200: 9,000 of 2,250 TFLOP/s, so a quarter of a dense prompt's products; the head and
    attention keep 16 bits. On H100 the same prompt takes longer than in 16 bits."""
    for device, low, high in ((B200, 0.25, 0.4), (H100, 1.0, 1.5)):
        narrow, wide = (
            parts(name, prompt(1024), instance=device, profile=VLLM_0_12).compute_s for name in (dtype, "bfloat16")
        )
        assert low * wide < narrow < high * wide


def test_a_step_of_a_mixture_reads_its_16_bit_layers_in_16_bits():
    """gpt-oss-120b, one row: 4 of 128 experts of 114.66e9 weights in 4.25 bits are 1.90 GB. The
    rest, 2.16e9 weights less an input embedding of 0.58e9, is 3.16 GB in 16 bits."""
    setup = Setup(find_model("gpt-oss-120b"), H100, 1, "mxfp4")
    parameters = replace(VLLM_0_12.parameters, bandwidth_share=1.0, narrow_read_share=1.0)
    model = step_time_model_for(setup, replace(VLLM_0_12, parameters=parameters))
    assert model.explain(decode(1)).weights_s == pytest.approx(5.06e9 / 3350e9, rel=0.02)


def test_a_step_of_a_mixture_reads_its_8_bit_layers_in_8_bits_and_multiplies_them_so():
    """DeepSeek-V4-Pro, one row: 6 of 384 experts of 1,547e9 weights in 4.25 bits are 12.8 GB. The
    rest, 25.2e9 weights less an input embedding of 0.93e9, is 23.3 GB and a head of 1.85 GB."""
    shape, parameters = find_model("deepseek-v4-pro"), replace(VLLM_0_12.parameters, bandwidth_share=1.0)
    found, wide = (
        step_time_model_for(
            Setup(shape, bare_machine(find_accelerator("B200"), 8), 8, dtype), replace(VLLM_0_12, parameters=parameters)
        )
        for dtype in ("mxfp4-float8", "mxfp4")
    )
    assert found.explain(decode(1)).weights_s == pytest.approx(37.95e9 / 8 / 7.7e12, rel=0.02)
    assert found.explain(prompt(4096)).compute_s < wide.explain(prompt(4096)).compute_s


def test_experts_are_widened_for_their_own_rows():
    """Without units for FP4, 4,096 rows over 128 experts, 4 a row, are one block of 128 rows an
    expert: each weight is widened once, by 2 operations at a sixteenth of the matrix rate."""
    setup = Setup(find_model("gpt-oss-120b"), H100, 1, "mxfp4")
    model = step_time_model_for(setup, VLLM_0_12)
    short, long = (
        model.explain(StepShape(prefill_sequences=1, prefill_tokens=tokens)).compute_s for tokens in (2048, 4096)
    )
    widening_s = 114.66e9 * 2 * 16 / (989e12 * VLLM_0_12.parameters.compute_share)
    assert 2 * short - long == pytest.approx(widening_s, rel=0.02)


def with_narrow_share(share):
    shares = {"narrow_share": share, "narrow_read_share": share}
    return replace(OLD_TGI, parameters=replace(OLD_TGI.parameters, **shares))


def test_kernels_that_widen_reach_a_share_of_the_rate_and_its_root_with_8_bits():
    """0.64 of the rate at 4 bits a weight, its square root at 8 and, where the device multiplies 8
    bits, nothing lost. The output head, 0.131e9 of 6.607e9 weights, keeps 16 bits and its rate:
    4-bit weights are 0.928 of the bytes that a step reads, 8-bit ones 0.961."""
    step = decode(1)
    for dtype, share, packed in (("int4", 0.64, 0.928), ("int8", 0.8, 0.961)):
        full = parts(dtype, step, profile=with_narrow_share(1.0)).weights_s
        slowed = parts(dtype, step, profile=with_narrow_share(0.64)).weights_s
        assert slowed / full == pytest.approx(packed / share + 1 - packed, rel=0.002)
    native = [parts("float8", step, instance=H100, profile=with_narrow_share(share)).total_s for share in (0.64, 1.0)]
    assert native[0] == native[1]


def test_fp8_weights_need_no_widening_where_the_device_multiplies_them():
    on_h100 = parts("float8", prompt(1024), instance=H100, profile=VLLM_0_12)
    wide = parts("float16", prompt(1024), instance=H100, profile=VLLM_0_12)
    assert on_h100.compute_s < 0.6 * wide.compute_s
    assert parts("float8", prompt(1024)).compute_s > parts("float16", prompt(1024)).compute_s


@pytest.mark.parametrize(("ranks", "more_s"), [(1, 0.0), (2, 32 * 0.4e-3)])
def test_four_bit_weights_over_several_ranks_keep_an_eager_host_busy(ranks, more_s):
    """GPTQ in TGI of 2023: 0.4 ms a layer more, of 32 layers."""
    wide, four = (
        step_time_model_for(Setup(MODEL, A100, ranks, dtype), OLD_TGI).explain(decode(1))
        for dtype in ("float16", "int4")
    )
    assert four.host_s - wide.host_s == pytest.approx(more_s)


def test_many_rows_are_multiplied_densely_by_weights_widened_before():
    """By hand, of what a prompt of 1,024 tokens takes longer than in FP16: P weights of 4.16 bits
    read and 16 written at the rate of the kernels that widen, 0.85 * 0.45 of 1,555 GB/s.
    """
    bytes_each = (4 + 20 / 128) / 8
    params = MODEL.params_total - 2 * MODEL.vocab_size * MODEL.hidden_size
    rate = 1555e9 * 0.85 * 0.45
    four, wide = (parts(dtype, prompt(1024), profile=VLLM_V0_PRIOR) for dtype in ("int4", "float16"))
    assert four.total_s - wide.total_s == pytest.approx(params * (bytes_each + 2) / rate, rel=1e-3)
    on_the_way = replace(VLLM_V0_PRIOR, widen_first_rows=0)
    for rows, alike in ((255, True), (256, False)):
        one, other = (parts("int4", prompt(rows), profile=p) for p in (VLLM_V0_PRIOR, on_the_way))
        assert (one.total_s == other.total_s) == alike


@pytest.mark.parametrize(
    ("model", "dtype", "says"),
    [
        ("gemma-3-4b", "float16", "overflows in float16: its weights need compute capability 8, T4 has 7.5"),
        ("gemma-2-9b", "int4", "overflows in float16: its weights need compute capability 8, T4 has 7.5"),
        ("llama-3.2-1b", "bfloat16", "bfloat16 weights need compute capability 8, T4 has 7.5"),
    ],
)
def test_a_model_that_overflows_in_float16_is_not_planned_without_bfloat16(model, dtype, says):
    """vLLM refuses Gemma 2 and 3 there; their weights in 16 bits are planned as float16."""
    setup = Setup(find_model(model), find_instance("ml.g4dn.xlarge"), 1, dtype)
    with pytest.raises(InputError, match=says):
        step_time_model_for(setup, VLLM_0_12)
    assert step_time_model_for(replace(setup, instance=A10G), VLLM_0_12)


@pytest.mark.parametrize("dtype", ["int4", "int8", "float8", "float16"])
@pytest.mark.parametrize("kv_dtype", [None, "float8"])
@pytest.mark.parametrize("profile", [OLD_TGI, VLLM_V0_PRIOR], ids=["on the way", "before"])
def test_arrays_counts_and_shapes_are_priced_alike(dtype, kv_dtype, profile):
    model = step_time_model_for(Setup(MODEL, A100, 1, dtype, kv_dtype=kv_dtype), profile)
    columns = trace_closed_loop(CopyLimits(300, 20, 5, 2048, True), 7, 14).columns
    price = model.pricer()
    steps = zip(*columns.counts, strict=True)
    expected = [price(*step) * times for step, times in zip(steps, columns.repeat, strict=True)]
    assert np.allclose(model.step_times_s(columns), expected, rtol=1e-6)


def test_a_cached_prefix_is_not_computed_again():
    """Three quarters of each prompt in the cache: about a quarter of the time to first token."""
    common = (Setup(MODEL, A10G, 1, "float16"), 1024, 32)
    cold = predict_cell(OLD_TGI, MeasuredLevel(*common, load=Load(1), num_requests=4))
    warm = predict_cell(OLD_TGI, MeasuredLevel(*common, load=Load(1), num_requests=4, cached_tokens=768))
    extra_s = OLD_TGI.parameters.request_overhead_s
    ratio = (warm.ttft_mean_s - extra_s) / (cold.ttft_mean_s - extra_s)
    assert 0.2 < ratio < 0.35
    with pytest.raises(InputError, match="its last one is always computed"):
        MeasuredLevel(*common, load=Load(1), num_requests=4, cached_tokens=1024)
