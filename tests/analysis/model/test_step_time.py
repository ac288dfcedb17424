"""The step-time model against hand arithmetic, part by part."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from lmi_bench.analysis.model.builtin_profiles import (
    BUNDLED_CPU_PRIOR,
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    TGI_2023,
    VLLM_V0_PRIOR,
)
from lmi_bench.analysis.model.capacity import step_time_model_for
from lmi_bench.analysis.model.local_machine import MeasuredMachine
from lmi_bench.analysis.model.profiles import StepParameters
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.model.step_costs import all_reduce_factor, step_costs
from lmi_bench.analysis.model.step_time import StepColumns, StepTimeModel
from lmi_bench.catalog.accelerators import NO_LINK, Accelerator, Link, find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.models.shape import ModelShape

# 1 GB/s and 1 GFLOP/s at full share, so that the parts can be read off the counts.
DEVICE = Accelerator(
    name="toy",
    vendor="nvidia",
    memory_bytes=10**9,
    bandwidth_bytes_per_s=1e9,
    float16_flop_per_s=1e9,
    bfloat16_flop_per_s=None,
    float8_flop_per_s=None,
    device_link=Link("nvlink", 1e9),
    pcie_link=Link("pcie", 1e9),
    source="made up",
)
# 10,000 parameters: 1,000 in each embedding table, 8,000 in the layers.
SHAPE = ModelShape(
    name="toy",
    num_layers=2,
    hidden_size=10,
    num_heads=2,
    num_kv_heads=2,
    head_dim=5,
    ffn_size=10,
    vocab_size=100,
    max_positions=1000,
    params_total=10_000,
    params_active=10_000,
)
FREE = StepParameters(
    bandwidth_share=1.0,
    compute_share=1.0,
    host_per_layer_s=0.0,
    host_per_sequence_s=0.0,
    host_per_prompt_token_s=0.0,
    host_stretch_per_rank=0.0,
    nvlink_latency_s=0.0,
    nvlink_share=1.0,
    pcie_latency_s=0.0,
    pcie_share=1.0,
)


def setup(shape, device, tp, link):
    machine = replace(find_instance("ml.g5.48xlarge"), accelerator=device, link=link, num_accelerators=tp)
    return Setup(shape, machine, tp, "float16")


def model(tp=1, link=NO_LINK, shape=SHAPE, device=DEVICE, **changes):
    profile = replace(TGI_2023, parameters=replace(FREE, **changes))
    return StepTimeModel(setup(shape, device, tp, link), profile)


ONE_DECODE = StepShape(decode_sequences=1, decode_tokens=1, decode_context_tokens=50)


def test_a_decode_step_reads_weights_and_cache():
    """9,000 weights of 2 bytes (the input embedding is looked up), 50 tokens of 80 bytes."""
    parts = model().explain(ONE_DECODE)
    assert parts.weights_s == pytest.approx(18_000 / 1e9)
    assert parts.kv_s == pytest.approx(50 * (2 * 2 * 2 * 5 * 2) / 1e9)


def test_a_large_batch_reads_every_expert_and_one_token_only_its_own():
    """All parameters but the input embedding of 32,000 rows, at 2 bytes and 1 GB/s."""
    shape, embedding = find_model("mixtral-8x7b"), 32_000 * 4096
    for rows, params in ((1, shape.params_active), (512, shape.params_total)):
        step = replace(ONE_DECODE, decode_sequences=rows, decode_tokens=rows)
        weights_s = model(shape=shape).explain(step).weights_s
        assert weights_s == pytest.approx((params - embedding) * 2 / 1e9, rel=1e-6)


def test_arithmetic_counts_layers_head_and_attention():
    """2 * 8,000 for the layers, 2 * 1,000 for the head, 4 * 10 * 50 a layer for attention."""
    parts = model().explain(ONE_DECODE)
    assert parts.compute_s == pytest.approx((16_000 + 2_000 + 2 * 4 * 10 * 50) / 1e9)


def test_reads_and_arithmetic_overlap():
    parts = model().explain(ONE_DECODE)
    assert parts.total_s == pytest.approx(max(parts.weights_s + parts.kv_s, parts.compute_s))


def test_a_large_batch_turns_compute_bound():
    small = StepShape(decode_sequences=1, decode_tokens=1, decode_context_tokens=1)
    large = StepShape(decode_sequences=100, decode_tokens=100, decode_context_tokens=100)
    fast_maths = replace(DEVICE, float16_flop_per_s=1e10)
    assert model(device=fast_maths).explain(small).binding == "bandwidth"
    assert model(device=fast_maths).explain(large).binding == "compute"


def test_the_host_hides_a_faster_gpu_and_its_queue_adds_to_it():
    """2 layers of 1 s, stretched by 10 % for each of 3 further ranks, and 0.5 s a sequence."""
    slow_host = model(
        tp=2, link=Link("nvlink", 1e9), host_per_layer_s=1.0, host_per_sequence_s=0.5, host_stretch_per_rank=0.1
    )
    parts = slow_host.explain(replace(ONE_DECODE, decode_sequences=3, decode_tokens=3))
    assert parts.host_s == pytest.approx(2.2)
    assert parts.total_s == pytest.approx(2.2 + 3 * 0.5 * 1.1)
    assert parts.binding == "host"


@pytest.mark.parametrize(("ranks", "stretch"), [(8, 7**1.5), (16, 7**1.5), (32, 7**1.5)])
def test_ranks_of_other_hosts_do_not_compete_for_a_processor(ranks, stretch):
    """The launch of 61 layers, stretched by 10 % for each of seven further ranks of a host."""
    machine = bare_machine(find_accelerator("GB200"), ranks)
    setup = Setup(find_model("deepseek-v3"), machine, ranks, "float8")
    slow = replace(GRAPH_GPU_PRIOR.parameters, host_per_layer_s=0.1, host_stretch_per_rank=0.1)
    costs = step_costs(setup, replace(GRAPH_GPU_PRIOR, parameters=slow))
    assert costs.host_s == pytest.approx(61 * 0.1 * (1 + 0.1 * stretch))


def test_a_prompt_is_not_held_up_by_the_launch_but_pays_for_its_tokens():
    """100 tokens: (16,000 * 100 + 2,000) FLOP, and 4 * 10 * 5,050 a layer for its pairs."""
    prompt = StepShape(prefill_sequences=1, prefill_tokens=100, prefill_context_pairs=5050)
    parts = model(host_per_layer_s=1.0, host_per_prompt_token_s=1e-3).explain(prompt)
    flop = 16_000 * 100 + 2_000 + 2 * 4 * 10 * 5050
    assert parts.total_s == pytest.approx(flop / 1e9 + 0.1)


def test_kernels_that_do_not_know_groups_read_the_cache_for_each_query_head():
    """50 tokens of 40 bytes, one KV head for two query heads: 2,000 bytes, or 4,000."""
    grouped = replace(SHAPE, num_kv_heads=1)
    profile = replace(TGI_2023, parameters=FREE)
    for sizes, read_bytes in (((), 2_000), ((5, 7), 2_000), ((128,), 4_000)):
        own = replace(profile, shared_head_dims=sizes)
        fast = replace(DEVICE, float16_flop_per_s=1e12)  # so that reading is what binds
        priced = StepTimeModel(setup(grouped, fast, 1, NO_LINK), own)
        parts = priced.explain(ONE_DECODE)
        assert parts.kv_s == pytest.approx(read_bytes / 1e9)
        assert priced.step_time_s(ONE_DECODE) == pytest.approx(parts.total_s)
        assert priced.pricer()(1, 50, 0, 0, 0.0, 0) == pytest.approx(parts.total_s)
        mixed = replace(ONE_DECODE, prefill_sequences=1, prefill_tokens=2, prefill_context_pairs=9)
        assert priced.pricer()(1, 50, 1, 2, 9, 0) == pytest.approx(priced.step_time_s(mixed))


def test_each_prompt_of_a_step_is_admitted():
    two = StepShape(prefill_sequences=2, prefill_tokens=100, prefill_context_pairs=2550)
    plain, slow = model(), model(host_per_prompt_s=0.25)
    assert slow.step_time_s(two) - plain.step_time_s(two) == pytest.approx(0.5)
    assert slow.pricer()(0, 0, 2, 100, 2550, 0) == pytest.approx(slow.step_time_s(two))
    assert slow.step_time_s(ONE_DECODE) == plain.step_time_s(ONE_DECODE)


def test_two_ranks_halve_the_reads_and_pay_for_all_reduces():
    """4 all-reduces of 10 values of 2 bytes: a ring moves 2 * (2 - 1) / 2 of them."""
    parts = model(tp=2, link=Link("nvlink", 1e9), nvlink_latency_s=1e-3).explain(ONE_DECODE)
    assert parts.weights_s == pytest.approx(9_000 / 1e9)
    assert parts.kv_s == pytest.approx(50 * 40 / 1e9)
    assert parts.all_reduce_s == pytest.approx(4 * (1e-3 + 20 / 1e9))
    assert parts.binding == "link"


def test_parallel_branches_are_added_up_once_a_layer():
    """Falcon: 2 all-reduces of 20 bytes instead of 4, and half of the waiting for other ranks."""
    parallel = replace(SHAPE, parallel_branches=True)
    link = Link("nvlink", 1e9)
    costs = {"nvlink_latency_s": 1e-3, "host_per_layer_s": 1.0, "host_stretch_per_rank": 0.1}
    parts = model(tp=2, link=link, shape=parallel, **costs).explain(ONE_DECODE)
    assert parts.all_reduce_s == pytest.approx(2 * (1e-3 + 20 / 1e9))
    assert parts.host_s == pytest.approx(2 * 1.05)


def test_the_catalog_s_falcons_have_parallel_branches_and_llamas_none():
    """parallel_attn, on in every published Falcon configuration."""
    falcons = ("falcon-7b", "falcon-40b", "falcon-180b")
    assert all(find_model(name).parallel_branches for name in falcons)
    assert not find_model("llama-2-7b").parallel_branches


def test_over_pcie_every_rank_crosses_the_one_bridge():
    """2 (n - 1) / n on NVLink, 2 (n - 1) through a bridge that n devices share."""
    assert all_reduce_factor(8, Link("nvlink", 1.0)) == pytest.approx(14 / 8)
    assert all_reduce_factor(8, Link("pcie", 1.0, is_shared=True)) == pytest.approx(14)
    assert all_reduce_factor(8, Link("pcie", 1.0, is_shared=False)) == pytest.approx(14 / 8)


def test_pcie_is_shared_where_that_was_measured_and_unknown_elsewhere():
    """A10G are in AWS's virtual machines alone; L40S of other machines stand beside switches."""
    assert not bare_machine(find_accelerator("L40S"), 4).link.is_shared
    assert bare_machine(find_accelerator("A10G"), 4).link.is_shared
    names = ("ml.g5.48xlarge", "ml.g6e.12xlarge", "ml.g7e.48xlarge")
    assert [find_instance(name).link.is_shared for name in names] == [True, None, False]


def test_ranks_without_a_link_are_refused():
    with pytest.raises(InputError, match="need a link"):
        model(tp=2)


def test_an_unknown_bandwidth_is_refused_not_guessed():
    instance = find_instance("ml.g7.2xlarge")
    with pytest.raises(InputError, match=r"no source states the memory bandwidth of RTX-PRO-4500"):
        step_time_model_for(Setup(find_model("llama-2-7b"), instance, 1, "float16"), TGI_2023)


def test_a_device_that_the_engine_does_not_run_on_is_refused():
    with pytest.raises(InputError, match="does not run on Inferentia2"):
        step_time_model_for(Setup(find_model("llama-2-7b"), find_instance("ml.inf2.xlarge"), 1, "float16"), TGI_2023)


def test_fewer_bits_a_weight_read_faster():
    instance, shape = find_instance("ml.g5.2xlarge"), find_model("llama-3-8b")
    half = step_time_model_for(Setup(shape, instance, 1, "float16"), TGI_2023).explain(ONE_DECODE)
    quarter = step_time_model_for(Setup(shape, instance, 1, "int4"), TGI_2023).explain(ONE_DECODE)
    unhindered = replace(TGI_2023, parameters=replace(TGI_2023.parameters, narrow_read_share=1.0))
    ideal = step_time_model_for(Setup(shape, instance, 1, "int4"), unhindered).explain(ONE_DECODE)
    assert ideal.weights_s < 0.4 * half.weights_s
    # a third of the bytes, at 0.45 ** 0.7 of the rate
    assert quarter.weights_s == pytest.approx(0.36 / 0.57 * half.weights_s, rel=0.05)
    assert quarter.kv_s == half.kv_s


def test_a_sliding_window_bounds_what_attention_reads():
    """Two sequences of 100 tokens behind a window of 30, in both layers."""
    sliding = replace(SHAPE, sliding_window=30, full_attention_layers=0)
    step = StepShape(decode_sequences=2, decode_tokens=2, decode_context_tokens=200)
    assert model(shape=sliding).explain(step).kv_s == pytest.approx(60 * 80 / 1e9)


def test_layers_with_a_window_read_and_multiply_their_own_heads():
    """One layer of 2 KV heads of 5 values, and one of a head of 4 behind 30 tokens."""
    shape = replace(SHAPE, sliding_window=30, full_attention_layers=1, sliding_kv_heads=1, sliding_head_dim=4)
    parts = model(shape=shape).explain(ONE_DECODE)
    assert parts.kv_s == pytest.approx((50 * 2 * 2 * 5 * 2 + 30 * 2 * 1 * 4 * 2) / 1e9)
    prompt = StepShape(prefill_sequences=1, prefill_tokens=100, prefill_context_pairs=5050)
    free = replace(SHAPE, cacheless_layers=2)
    attention_s = model(shape=shape).explain(prompt).compute_s - model(shape=free).explain(prompt).compute_s
    assert attention_s == pytest.approx(4 * 2 * (5 * 5050 + 4 * 30 * 100) / 1e9)


PROCESSORS = MeasuredMachine(2, 64 * 2**30, 12e9, 150e9, "2026-11-21")
SETUPS = [
    ("llama-2-7b", "ml.g5.2xlarge", 1, "float16", TGI_2023),
    ("llama-2-7b", "ml.g5.48xlarge", 8, "float16", TGI_2023),
    ("llama-3-70b", "ml.p4d.24xlarge", 4, "float16", TGI_2023),
    ("mixtral-8x7b", "ml.p4d.24xlarge", 8, "float16", TGI_2023),
    ("mistral-7b-v0.1", "ml.g5.2xlarge", 1, "float16", TGI_2023),  # all layers slide
    ("gemma-2-9b", "ml.p4d.24xlarge", 2, "float16", EAGER_GPU_PRIOR),  # every other one does
    ("llama-3-8b", "ml.g5.2xlarge", 1, "int4", TGI_2023),  # widened on the way
    ("llama-3-70b", "ml.p4d.24xlarge", 8, "int4", VLLM_V0_PRIOR),  # before many rows
    ("llama-3-8b", None, 1, "float32", BUNDLED_CPU_PRIOR),  # reading hides little arithmetic
]


def some_step(chance):
    """A decode step, a prompt step, or both; contexts beyond the windows' 4,096 tokens too."""
    rows = chance.choice((0, 1, chance.randrange(2, 300)))
    prompts = chance.randrange(0 if rows else 1, 4)
    new, found = chance.randrange(1, 900), chance.choice((0, 0, 500))
    return StepShape(
        decode_sequences=rows,
        decode_tokens=rows,
        decode_context_tokens=rows * chance.randrange(1, 9000),
        prefill_sequences=prompts,
        prefill_tokens=prompts * new,
        prefill_context_pairs=prompts * (new * found + new * (new + 1) // 2),
        prefill_context_tokens=prompts * found,
    )


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup[0]} {setup[3]} TP {setup[2]}")
def test_parts_numbers_counts_and_arrays_give_one_time(setup):
    """200 random steps; a plain decode step is priced by a short cut, the others by the sum."""
    name, machine, degree, dtype, profile = setup
    instance = find_instance(machine) if machine else PROCESSORS.instance()
    step_model = step_time_model_for(Setup(find_model(name), instance, degree, dtype), profile)
    chance = Random(name)
    steps = [some_step(chance) for _ in range(200)]
    names = StepColumns._fields[1:]
    values = ([float(getattr(step, name)) for step in steps] for name in names)
    columns = StepColumns(np.ones(len(steps)), *map(np.array, values))
    explained_s = [step_model.explain(step).total_s for step in steps]
    price = step_model.pricer()
    priced_s = [price(*counts) for counts in zip(*columns.counts, strict=True)]
    arrays_s = step_model.step_times_s(columns)
    for times_s in (list(map(step_model.step_time_s, steps)), priced_s, arrays_s):
        assert times_s == pytest.approx(explained_s, rel=1e-14)


def test_drafted_rows_read_the_cache_once_and_look_at_it_each():
    """Two sequences of 50 tokens with three rows each: reads of 100 tokens, 300 pairs a layer."""
    step = StepShape(decode_sequences=2, decode_tokens=6, decode_context_tokens=100)
    parts = model().explain(step)
    assert parts.kv_s == pytest.approx(100 * 80 / 1e9)
    assert parts.compute_s == pytest.approx((6 * 18_000 + 2 * 4 * 10 * 300) / 1e9)


@pytest.mark.parametrize(("rows", "ranks", "factor"), [(1, 1, 2.5), (2, 1, 1.25), (4, 1, 1), (1, 4, 10)])
def test_a_block_for_each_sequence_and_head_leaves_multiprocessors_idle(rows, ranks, factor):
    """Llama 2 7B has 32 KV heads, an A10G 80 multiprocessors: one sequence is 32 blocks on one
    device, 8 on each of four. Kernels that split the context read at the full rate."""
    setup = Setup(find_model("llama-2-7b"), find_instance("ml.g5.12xlarge"), ranks, "float16")
    step = StepShape(decode_sequences=rows, decode_tokens=rows, decode_context_tokens=rows * 3840)
    eager, split = (step_time_model_for(setup, replace(TGI_2023, split_attention=kind)) for kind in (False, True))
    assert eager.explain(step).kv_s == pytest.approx(factor * split.explain(step).kv_s)
    assert eager.pricer()(rows, rows * 3840, 0, 0, 0.0, 0) == pytest.approx(eager.explain(step).total_s)


def test_launches_of_a_latent_prompt_bound_short_prompts_and_are_hidden_by_long_ones():
    """61 layers of 0.9 ms are 54.9 ms; models with KV heads have no such bound."""
    machine = bare_machine(find_accelerator("H200"), 8)
    setups = [Setup(find_model(name), machine, 8, "float8") for name in ("deepseek-v3", "llama-3.1-70b")]
    latent, heads = (StepTimeModel(each, GRAPH_GPU_PRIOR) for each in setups)
    short, long = (
        StepShape(prefill_sequences=1, prefill_tokens=n, prefill_context_pairs=n * (n + 1) // 2) for n in (16, 32_768)
    )
    least_s, parts = 61 * 0.9e-3, latent.explain(short)
    assert parts.total_s == pytest.approx(least_s, rel=1e-3)
    assert parts.binding == "host"
    assert heads.step_time_s(short) < 0.5 * least_s
    hidden = latent.explain(long)
    gpu_s = hidden.compute_s + hidden.all_reduce_s + latent.costs.gap_s
    assert hidden.total_s == pytest.approx(gpu_s + hidden.serial_s, rel=1e-3)
    decoding = StepShape(decode_sequences=1, decode_tokens=1, decode_context_tokens=1000)
    assert latent.step_time_s(decoding) < 0.5 * least_s


@pytest.mark.parametrize(
    ("model", "machine", "degree", "rate_per_s", "copy_s"),
    [
        # 32 layers, 8 heads of 128 keys and values of 16 bits; A10G: 0.8 of 32 GB/s
        ("llama-3.1-8b", "ml.g5.2xlarge", 1, None, 32 * 8 * 2 * 128 * 2 / (0.8 * 32e9)),
        ("llama-3.1-8b", "ml.g5.2xlarge", 1, 4e9, 32 * 8 * 2 * 128 * 2 / 4e9),
        # 80 layers, one of 8 heads on each device, which copy at the same time; H100: PCIe 5
        ("llama-3.3-70b", "ml.p5.48xlarge", 8, None, 80 * 2 * 128 * 2 / (0.8 * 64e9)),
        # 61 layers of 576 latent values, whole on each device
        ("deepseek-v3", "ml.p5en.48xlarge", 8, None, 61 * 576 * 2 / (0.8 * 64e9)),
    ],
)
def test_copies_from_the_host_take_the_bytes_of_a_device_over_its_link(model, machine, degree, rate_per_s, copy_s):
    """Beside the step; without a tier nothing is copied. copy_s: of a token."""
    setup = Setup(find_model(model), find_instance(machine), degree, "bfloat16")
    prompt = StepShape(prefill_sequences=1, prefill_tokens=8, prefill_context_pairs=36)
    copied = replace(prompt, copied_tokens=8)
    hosted = replace(GRAPH_GPU_PRIOR, host_cache_bytes=1e9, host_bytes_per_s=rate_per_s)
    step = StepTimeModel(setup, hosted)
    more_s = step.step_time_s(copied) - step.step_time_s(prompt)
    assert more_s == pytest.approx(8 * copy_s, rel=1e-6)
    plain = StepTimeModel(setup, GRAPH_GPU_PRIOR)
    assert plain.step_time_s(copied) == plain.step_time_s(prompt) == step.step_time_s(prompt)
