"""Memory fit against the posts' worked examples, and the reason of every misfit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.model.builtin_profiles import GRAPH_GPU_PRIOR
from lmi_bench.analysis.model.capacity import memory_plan_for, reserve_bytes_of, scheduler_config_for
from lmi_bench.analysis.model.checkpoint_dtype import planned_dtype
from lmi_bench.analysis.model.memory import checkpoint_format, expert_params, min_devices, weight_bytes, weight_format
from lmi_bench.analysis.model.profiles import V1
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import all_model_entries, find_model
from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import tensor_parallel_problem


def plan_of(shape, memory_bytes, input_tokens, output_tokens, *, degree=1, reserve_bytes=0.0):
    """The plan of an engine that takes a device's whole memory but for the reserve."""
    device = replace(find_accelerator("A10G"), memory_bytes=memory_bytes)
    profile = replace(GRAPH_GPU_PRIOR, memory_share=1.0, reserve_bytes=reserve_bytes, reserves_activations=True)
    setup = Setup(shape, bare_machine(device, degree), degree, "float16")
    return memory_plan_for(setup, profile, input_tokens=input_tokens, output_tokens=output_tokens)


def test_ten_gigabytes_left_hold_four_llama_2_7b_sequences_of_4096_tokens():
    """The post: 24 GB less 14 GB of weights leave 10 GB; 10 / 2.15 GB a sequence is 4."""
    shape = find_model("llama-2-7b")
    plan = plan_of(shape, weight_bytes(shape, "float16") + 10e9, 3840, 256)
    assert plan.sequences_guaranteed == 4
    assert plan.kv_budget_bytes == pytest.approx(10e9)


def test_expected_sequences_are_half_through_their_output():
    """256 / 256 in 10 GB: 10e9 / (512 * 2**19) = 37.3; 10e9 / (384 * 2**19) = 49.7."""
    shape = find_model("llama-2-7b")
    plan = plan_of(shape, weight_bytes(shape, "float16") + 10e9, 256, 256)
    assert (plan.sequences_guaranteed, plan.sequences_expected) == (37, 49)


@pytest.mark.parametrize(("degree", "share"), [(4, 0.86), (8, 0.43)])
def test_falcon_40b_fills_a_24_gb_device_as_the_post_says(degree, share):
    """The post: 20 and 10 GB of 24 (84 and about 40 %) from a rounded 40e9 parameters."""
    plan = plan_of(find_model("falcon-40b"), 24e9, 256, 32, degree=degree)
    assert plan.weight_bytes / 24e9 == pytest.approx(share, abs=0.005)


def test_awq_of_llama_3_70b_is_35_gb_by_the_headline_and_39_8_in_full():
    """68.45e9 weights * 4.16 bits + 2.10e9 * 16 bits; the post quotes 35 against 140 GB."""
    shape = find_model("llama-3-70b")
    headline_bytes = shape.params_total * weight_format("int4").nominal_bits / 8
    assert headline_bytes == pytest.approx(35.3e9, rel=2e-3)
    assert weight_bytes(shape, "int4") == pytest.approx(39.8e9, rel=2e-3)
    assert weight_bytes(shape, "float16") == pytest.approx(141.1e9, rel=1e-3)


def test_falcon_40b_in_fp32_takes_the_160_gb_of_the_post():
    """The post rounds 41.3e9 parameters to 40e9: 160 GB."""
    assert weight_bytes(find_model("falcon-40b"), "fp32") == pytest.approx(160e9, rel=0.04)


def test_nvfp4_stores_an_fp8_scale_for_sixteen_weights():
    """Llama 3.1 70B: 70.55e9 weights, 2 * 128,256 * 8,192 of them embedding and head in 16 bits:
    68.45e9 * 4.5 / 8 + 2.10e9 * 2 = 42.7e9 bytes."""
    assert weight_bytes(find_model("llama-3.1-70b"), "nvfp4") == pytest.approx(42.7e9, rel=2e-3)


def test_mxfp4_covers_the_experts_only():
    """gpt-oss-20b: 24 * 32 * 3 * 2880 * 2880 expert weights at 4.25 bits, the rest at 16."""
    shape = find_model("gpt-oss-20b")
    experts = 24 * 32 * 3 * 2880 * 2880
    assert expert_params(shape) == pytest.approx(experts, rel=0.01)
    expected = experts * 4.25 / 8 + (shape.params_total - experts) * 2
    assert weight_bytes(shape, "mxfp4") == pytest.approx(expected, rel=0.01)


def test_experts_of_4_bits_beside_a_rest_of_8():
    """DeepSeek-V4-Pro: 61 * 384 * 3 * 7168 * 3072 expert weights at 4.25 bits, 2 * 129,280 * 7168
    of embedding and head at 16, the rest at 8."""
    shape, experts, tables = find_model("deepseek-v4-pro"), 61 * 384 * 3 * 7168 * 3072, 2 * 129_280 * 7168
    expected = experts * 4.25 / 8 + tables * 2 + (shape.params_total - experts - tables)
    assert weight_bytes(shape, planned_dtype("deepseek-v4-pro")) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("model", ["kimi-k2-thinking", "kimi-k2.5"])
def test_the_experts_alone_of_kimi_k2_are_int4(model):
    """60 * 384 * 3 * 7168 * 2048 weights of 4 bits, one 16-bit scale for 32 of them: with the rest
    in 16 bits the 594 GB of the published checkpoint."""
    experts = 60 * 384 * 3 * 7168 * 2048
    dtype, shape = planned_dtype(model), find_model(model)
    rest = shape.params_total - experts
    expected = experts * (4 + 16 / 32) / 8 + rest * 2
    assert weight_bytes(shape, dtype) == pytest.approx(expected, rel=1e-3)
    assert weight_bytes(shape, dtype) - 2 * shape.encoder_params == pytest.approx(594e9, rel=1e-3)


def test_every_checkpoint_dtype_of_the_catalog_has_a_format():
    for entry in all_model_entries():
        assert checkpoint_format(entry.checkpoint_dtype).bits <= 32


def test_an_unknown_dtype_lists_the_known_ones():
    with pytest.raises(InputError, match=r"int3.*float16"):
        weight_format("int3")


def test_falcon_7b_cannot_be_split():
    """71 query heads are a prime number."""
    shape = find_model("falcon-7b")
    assert tensor_parallel_problem(shape, 1) is None
    for degree in (2, 4, 8):
        assert "71 query heads" in tensor_parallel_problem(shape, degree)


def test_falcon_180b_is_refused_on_p4d_and_fits_on_p4de():
    """179.5e9 * 2 / 8 = 44.9 GB a device: above 40 GiB, below 80."""
    shape = find_model("falcon-180b")
    small, large = (
        plan_of(shape, find_accelerator(name).memory_bytes, 256, 256, degree=8) for name in ("A100-40", "A100-80")
    )
    assert small.problem is not None
    assert "(weights)" in small.problem
    assert "41.8 GiB" in small.problem
    assert large.problem is None


@pytest.mark.parametrize(
    ("memory_gib", "reserve_gib", "cause"), [(10, 0, "weights"), (13, 2, "reserve"), (13, 0, "KV")]
)
def test_a_misfit_names_the_term_that_overflows(memory_gib, reserve_gib, cause):
    """Llama 2 7B has 12.55 GiB of weights and 2 GiB of cache at 4096 tokens."""
    shape, reserve_bytes = find_model("llama-2-7b"), reserve_gib * 2**30
    plan = plan_of(shape, memory_gib * 2**30, 3840, 256, reserve_bytes=reserve_bytes)
    assert plan.problem is not None
    assert f"({cause})" in plan.problem


@pytest.mark.parametrize(("name", "batch", "expected"), [("A10G", 4, 8), ("A100-80", 4, 2), ("A100-80", 40, 4)])
def test_the_fewest_devices_hold_weights_and_cache(name, batch, expected):
    """Llama 2 70B: 137.95 GB of weights, a sequence of 4096 * 320 KiB = 1.34 GB.

    A10G: 4 * 24.0 GB = 96 GB is too little, 8 * 24.0 = 192 GB is enough.
    A100-80: two have 171.8 GB, enough for 4 sequences and too little for 40.
    """
    devices = min_devices(
        find_model("llama-2-70b"),
        memory_bytes=find_accelerator(name).memory_bytes,
        batch=batch,
        tokens_per_sequence=4096,
    )
    assert devices == expected


def test_no_number_of_devices_holds_a_model_whose_heads_allow_one():
    """Falcon 7B has 71 heads and 14.4 GB of weights."""
    shape = find_model("falcon-7b")
    assert min_devices(shape, memory_bytes=8e9, batch=1, tokens_per_sequence=512) is None


SMALL = Setup(find_model("llama-2-7b"), find_instance("ml.g5.2xlarge"), 1, "float16")
V1_SERVER = replace(GRAPH_GPU_PRIOR, defaults=V1)


def test_the_reserve_is_a_constant_and_the_activations_of_a_step():
    """vLLM on 24 GB: steps of 2,048 tokens, 256 sequences. By hand 2,048 * 2 bytes * (2 * 4,096 +
    3 * 11,008) = 169 MB, and logits of 256 * 32,000 * 8 bytes = 66 MB."""
    more = reserve_bytes_of(SMALL, V1_SERVER) - V1_SERVER.reserve_bytes
    assert more == pytest.approx(0.169e9 + 0.066e9, rel=0.01)
    plan = memory_plan_for(SMALL, V1_SERVER, input_tokens=256, output_tokens=256)
    assert 5 < plan.kv_budget_bytes / 2**30 < 6


@pytest.mark.parametrize("tokens", [5_000, 200_000])
def test_the_server_s_own_line_replaces_the_plan_of_its_memory(tokens):
    """`GPU KV cache size: N tokens` of one copy: N // 512 requests of 512, whatever memory says."""
    stated = replace(V1_SERVER, cache_tokens=tokens)
    plan = memory_plan_for(SMALL, stated, input_tokens=256, output_tokens=256)
    assert plan.sequences_guaranteed == tokens // 512
    assert scheduler_config_for(SMALL, stated, 512).cache_tokens == pytest.approx(tokens, abs=16)
