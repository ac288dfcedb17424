"""Splits of a copy as engine settings: layouts that are tried, priced, written down and refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lmi_bench.analysis.level.layouts import Workload, layouts_of, plan_copy, split_layouts
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting, settings_of
from lmi_bench.analysis.model.setup import Parallelism, Setup
from lmi_bench.catalog.instances import find_instance, joined
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError

P5 = find_instance("ml.p5.48xlarge")
P5EN = find_instance("ml.p5en.48xlarge")
DEEPSEEK = Workload(find_model("deepseek-v3"), "float8", 1000, 500)
DENSE = Workload(find_model("llama-3.1-70b"), "float16", 1000, 500)
EP = EngineSetting(expert_parallel=True)
EP_DP = EngineSetting(expert_parallel=True, dp_attention=True)


def plan(machine, degree, setting, workload=DEEPSEEK):
    (layout,) = layouts_of(machine, [degree], [setting])
    return layout, plan_copy(layout, workload, VLLM_0_12, open_loop=True)


def test_a_mixture_with_latent_attention_is_tried_with_both_splits():
    found = settings_of({}, dtype="float8", profile=VLLM_0_12, shape=DEEPSEEK.shape)
    assert found == (AS_STATED, EP, EP_DP)


def test_dense_models_and_stated_splits_add_nothing():
    found = settings_of({}, dtype="float16", profile=VLLM_0_12, shape=DENSE.shape)
    assert found == (AS_STATED,)
    only = {"expert_parallel": (True,), "dp_attention": (False,)}
    found = settings_of(only, dtype="float8", profile=VLLM_0_12, shape=DEEPSEEK.shape)
    assert found == (EP,)


def test_a_lone_device_is_not_split():
    degrees = [layout.tensor_parallel for layout in layouts_of(P5EN, settings=[EP_DP])]
    assert degrees == [2, 4, 8]


def test_attention_groups_hold_more_sequences_and_answer_faster_when_full():
    """Eight H200: one latent cache instead of eight copies of it."""
    _, plain = plan(P5EN, 8, AS_STATED)
    _, split = plan(P5EN, 8, EP_DP)
    assert split.config.num_blocks > 4 * plain.config.num_blocks
    assert split.steady.saturated_rate_per_s > 1.4 * plain.steady.saturated_rate_per_s


def test_a_copy_over_two_machines_fits_where_one_is_too_small_and_costs_two():
    (alone,) = layouts_of(P5, [8])
    possible, rejected = split_layouts(
        [P5],
        DEEPSEEK,
        VLLM_0_12,
        degrees=[8, 16],
        open_loop=True,
        settings=[EngineSetting(hosts=2), EngineSetting(hosts=2, pipeline=2)],
    )
    assert alone.instance.price_usd_per_hour is not None
    shown = {(layout.tensor_parallel, layout.setting.pipeline) for layout, _ in possible}
    assert (8, 2) in shown
    assert (16, None) in shown
    for layout, _ in possible:
        assert layout.instance.instance_type == "2 x ml.p5.48xlarge"
        assert layout.instance.price_usd_per_hour == 2 * alone.instance.price_usd_per_hour
        assert layout.copies == 1
    assert all(each.tensor_parallel != 8 or "PP" not in (each.setting or "") for each in rejected)


def test_the_network_of_a_machine_is_shared_by_its_devices():
    """ml.p5.48xlarge: 3,200 Gbit/s for 8 devices, 50 GB/s each."""
    split = EngineSetting(hosts=2).parallelism(joined(P5, 2), 16)
    assert split.network_bytes_per_s == pytest.approx(50e9)


@pytest.mark.parametrize(
    ("model", "dtype", "degree", "refused"),
    [
        (
            "minimax-m2.5",
            "float8",
            8,
            "1,536 / TP 8 = 192 would cut the blocks of 128 .*: use expert parallelism or another TP",
        ),
        ("minimax-m2.5", "float8", 4, None),
        ("minimax-m2.5", "bfloat16", 8, None),
        ("deepseek-v3", "float8", 8, None),
        ("deepseek-v4-pro", "mxfp4-float8", 16, "3,072 / TP 16 = 192 "),
        ("qwen3-235b-a22b", "float8", 8, None),  # published in 16 bits: engines make FP8 without blocks
    ],
)
def test_no_split_cuts_a_block_of_published_fp8_weights(model, dtype, degree, refused):
    """vLLM 0.25 ends with: output_size of gate's and up's weight = 192 is not divisible by weight
    quantization block_n = 128 (vllm-project/vllm#48173)."""
    setup = Setup(find_model(model), joined(P5EN, 2), degree, dtype)
    assert (setup.split_problem is None) == (refused is None)
    if refused:
        assert re.search(refused, setup.split_problem)
        spread = Parallelism(expert_parallel=True)
        assert replace(setup, parallelism=spread).split_problem is None


def test_dense_models_refuse_to_spread_experts():
    with pytest.raises(InputError, match="no experts"):
        plan(P5EN, 8, EP, DENSE)


def test_a_split_is_named_warned_of_and_kept_in_json():
    assert EP_DP.describe() == "EP, DP attention"
    assert any("measure one" in text for text in EP_DP.caveats())
    for each in (AS_STATED, EP_DP, EngineSetting(pipeline=2, hosts=2)):
        assert EngineSetting.from_json(each.to_json()) == each
    assert "expert_parallel" not in AS_STATED.to_json()
