"""Profiles: saved and read back, drawn from their uncertainty, honest about what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lmi_bench.analysis.fit.fit import prior_fit
from lmi_bench.analysis.fit.uncertainty import estimates
from lmi_bench.analysis.fit.unstated import as_assumed
from lmi_bench.analysis.level.cells import predict_cell, profile_of, slots_for
from lmi_bench.analysis.level.layouts import Layout, Workload, plan_copy
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import (
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    SGLANG_B200,
    SGLANG_MI300X,
    SGLANG_MI355X,
    SGLANG_PRIOR,
    TGI_3_PRIOR,
    TGI_2023,
    TRT_LLM_B200,
    TRT_LLM_H200,
    TRT_LLM_PRIOR,
    VLLM,
    VLLM_0_6_PRIOR,
    VLLM_0_12,
    VLLM_0_19,
    VLLM_V0_PRIOR,
    prior_of_engine,
)
from lmi_bench.analysis.model.capacity import planned_model_for, scheduler_config_for
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, as_set, profile_from_json, profile_to_json
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest


@pytest.mark.parametrize("profile", [TGI_2023, EAGER_GPU_PRIOR])
def test_a_saved_profile_reads_back_unchanged(profile):
    assert profile_from_json(profile_to_json(profile)) == profile


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "name": "x"}'])
def test_what_is_not_a_profile_is_refused(text):
    with pytest.raises(InputError, match="not an engine profile"):
        profile_from_json(text)


def test_a_profile_of_another_schema_says_how_to_get_one():
    document = json.loads(profile_to_json(TGI_2023)) | {"schema": 99}
    with pytest.raises(InputError, match="calibrate"):
        profile_from_json(json.dumps(document))


def test_a_parameter_that_cannot_be_is_refused():
    with pytest.raises(InputError, match="bandwidth_share"):
        replace(TGI_2023.parameters, bandwidth_share=0.0)


def test_an_engine_or_device_that_the_fit_has_not_seen_is_warned_about():
    assert TGI_2023.warnings_for(accelerator="A10G") == []
    (unseen,) = TGI_2023.warnings_for(accelerator="H100-SXM")
    assert "was not fitted on H100-SXM" in unseen
    (other,) = TGI_2023.warnings_for(accelerator="A10G", engine_version="3.3")
    assert "not for version 3.3" in other


def test_a_longer_version_of_the_same_release_is_no_other():
    assert VLLM_0_12.warnings_for(accelerator="H100-SXM", engine_version="v0.12.0") == []
    (other,) = VLLM_0_12.warnings_for(accelerator="H100-SXM", engine_version="0.1")
    assert "not for version 0.1" in other


@pytest.mark.parametrize(("version", "known"), [("0.11.2", 0), ("0.12.0", 1), ("v0.19", 1), ("1.0", 0)])
def test_a_fit_of_several_versions_is_for_those_between_them(version, known):
    assert VLLM.version == "0.12 to 0.19"
    warnings = VLLM.warnings_for(accelerator="H100-SXM", engine_version=version)
    assert len(warnings) == 1 - known


@pytest.mark.parametrize(
    ("engine", "device", "model", "name"),
    [
        ("sglang 0.5", "B200", "deepseek-v3", SGLANG_B200),
        ("sglang 0.5", "MI325X", "deepseek-v3", SGLANG_MI300X),
        ("sglang 0.5", "MI355X", "deepseek-v3", SGLANG_MI355X),
        ("sglang 0.5", "H100-SXM", "qwen3-32b", SGLANG_PRIOR),
        ("trt", "H200", "deepseek-v3", TRT_LLM_H200),
        ("trt", "GB200", "deepseek-v3", TRT_LLM_B200),
        ("tensorrt-llm 1.0", "H100-SXM", "qwen3-32b", TRT_LLM_PRIOR),
        ("vllm 0.15", "B200", "gpt-oss-120b", VLLM),
        ("tgi 3.2", "H100-SXM", "qwen3-32b", TGI_3_PRIOR),
    ],
)
def test_the_nearest_profile_of_an_engine_is_the_start_of_its_fit(engine, device, model, name):
    """Of the vendor, the generation first; one that saw mixtures alone is for mixtures."""
    known = {"models": {model}, "accelerators": {device}, "marks": {"other cells"}}
    found = prior_of_engine(engine, **known, open_loop=False)
    assert found.fitted_on == name.fitted_on


def test_a_profile_of_mixtures_in_eight_bits_is_no_start_for_four_bits():
    """The time of a layer is that of its experts' kernels, which differ by format."""
    known = {"models": {"deepseek-v3"}, "accelerators": {"GB200"}, "marks": {"other cells"}}
    start = partial(prior_of_engine, open_loop=False, few_bits=True, **known)
    assert start("trt").fitted_on == TRT_LLM_PRIOR.fitted_on
    amd = start("sglang", accelerators={"MI355X"})
    assert amd.fitted_on == SGLANG_MI355X.fitted_on  # it was fitted to MXFP4 too
    assert start("vllm 0.15").fitted_on == VLLM.fitted_on  # dense models were in its fit


@pytest.mark.parametrize(
    ("engine", "device", "fitted", "near", "general", "weight"),
    [
        ("trt", "B200", TRT_LLM_B200, TRT_LLM_H200, TRT_LLM_PRIOR, 0.5),
        ("sglang", "MI355X", SGLANG_MI355X, SGLANG_MI300X, SGLANG_PRIOR, 0.0),
    ],
)
def test_on_another_generation_what_depends_on_the_device_is_half_way_to_the_prior(
    engine, device, fitted, near, general, weight
):
    """Of two estimates with equal doubt: the geometric mean. AMD's generations differ threefold,
    so one says nothing of another. The server's own time is carried."""
    known = {"models": {"deepseek-v3"}, "accelerators": {device}}
    found = prior_of_engine(engine, **known, marks=set(fitted.fitted_cells), open_loop=False)
    assert found.fitted_on == near.fitted_on
    for name in ("gap_per_layer_s", "host_per_sequence_s", "bandwidth_share"):
        own, other = (getattr(each.parameters, name) for each in (near, general))
        expected = own**weight * other ** (1 - weight)
        assert getattr(found.parameters, name) == pytest.approx(expected)
    assert found.parameters.request_overhead_s == near.parameters.request_overhead_s


def test_experts_reach_a_smaller_share_of_amds_peaks_before_any_fit():
    known = {"models": {"deepseek-v3"}, "open_loop": False}
    for device, share in (("MI355X", 0.1), ("H200", GRAPH_GPU_PRIOR.parameters.moe_share)):
        found = prior_of_engine("atom", accelerators={device}, **known)
        assert found.parameters.moe_share == share
        assert found.parameters.compute_share == GRAPH_GPU_PRIOR.parameters.compute_share


def test_a_profile_warns_before_it_judges_another_engine():
    assert "not for sglang" in (VLLM_0_12.warning_for_engine("sglang 0.5.10") or "")
    assert "version 0.19" in (VLLM_0_12.warning_for_engine("vllm 0.19.0") or "")
    assert VLLM_0_12.warning_for_engine("vllm 0.12.0") is None
    assert VLLM_0_12.warning_for_engine("") is None


def test_a_prior_takes_from_its_base_what_it_does_not_state():
    """vLLM before 0.8 differs in six parameters and in three uncertainties."""
    base, own = GRAPH_GPU_PRIOR.parameters, VLLM_V0_PRIOR.parameters
    differing = [name for name in PARAMETER_NAMES if getattr(base, name) != getattr(own, name)]
    assert len(differing) == 6
    own_sd = {"host_per_prompt_s": 0.7, "narrow_share": 0.35, "narrow_read_share": 0.35}
    assert VLLM_V0_PRIOR.log_sd == GRAPH_GPU_PRIOR.log_sd | own_sd
    assert (VLLM_V0_PRIOR.max_batch_size, GRAPH_GPU_PRIOR.max_batch_size) == (256, 1024)


SHORT, LONG = find_model("llama-3-8b"), find_model("llama-3.1-8b")  # 8,192 and 131,072 positions
A100 = find_instance("ml.p4de.24xlarge")


def settings(engine, shape=SHORT, device="A100-80"):
    profile = prior_of_engine(engine, models={"x"}, accelerators={"x"}, open_loop=False)
    known = as_set(profile, shape, find_accelerator(device))
    assert known.defaults == ""
    return known.chunked_prefill, known.max_prefill_tokens, known.max_batch_size


def test_vllm_splits_prompts_of_long_contexts_from_0_5_4_on():
    """Pull requests 6666 (on by itself beyond 32,768 positions) and 10544 (512, then 2,048)."""
    assert settings("vllm 0.4.3", LONG)[:2] == (False, 131_072)
    assert settings("vllm 0.5.3.post1", LONG)[:2] == (False, 131_072)
    assert settings("vllm 0.5.4", LONG)[:2] == (True, 512)
    assert settings("vllm 0.6.3.post1", LONG)[:2] == (True, 512)
    assert settings("vllm 0.6.5", LONG)[:2] == (True, 2048)
    assert settings("vllm 0.7.1", LONG)[:2] == (True, 2048)
    assert settings("vllm 0.6.3", SHORT)[:2] == (False, 8192)
    windowed = replace(LONG, sliding_window=4096)
    assert not settings("vllm 0.6.3", windowed)[0]


def test_a_context_that_the_cache_cannot_hold_was_cut():
    """Llama 3.1 70B in 16 bits leaves two H100 no room for 131,072 tokens, four have it."""
    cell, machine = level(find_model("llama-3.1-70b"), 4), find_instance("ml.p5.48xlarge")
    setups = (replace(cell.setup, instance=machine, tensor_parallel=degree) for degree in (2, 4))
    cut, whole = (profile_of(VLLM_0_6_PRIOR, replace(cell, setup=setup)) for setup in setups)
    assert not cut.chunked_prefill
    assert 2048 <= cut.max_prefill_tokens < 32_768
    assert (whole.chunked_prefill, whole.max_prefill_tokens) == (True, 512)


def test_vllm_s_v1_engine_goes_by_the_device():
    """`EngineArgs`: 8,192 tokens and 1,024 sequences from 70 GiB on, but not on the A100."""
    assert settings("vllm 0.10.1", device="H100-SXM") == (True, 8192, 1024)
    assert settings("vllm 0.10.1", device="H200") == (True, 8192, 1024)
    assert settings("vllm 0.10.1", device="A100-80") == (True, 2048, 256)
    assert settings("vllm", device="A10G") == (True, 2048, 256)


def test_less_than_the_default_that_a_fit_has_found_stays():
    h100 = find_accelerator("H100-SXM")
    less = replace(VLLM_0_19, max_prefill_tokens=2048)
    assert as_set(less, LONG, h100).max_prefill_tokens == 2048
    assert as_set(VLLM_0_12, LONG, h100).max_prefill_tokens == 8192


def test_sglang_s_prompt_steps_go_by_the_memory():
    """`server_args.py`: 2,048 tokens below 35 GB, 4,096 below 60 GB, then 8,192."""
    devices = {"A10G": 2048, "A100-40": 4096, "H100-SXM": 8192}
    for device, tokens in devices.items():
        known = as_set(SGLANG_PRIOR, LONG, find_accelerator(device))
        assert (known.chunked_prefill, known.max_prefill_tokens) == (False, tokens)


def test_an_engine_whose_defaults_nobody_wrote_down_stays_as_it_is():
    assert as_set(GRAPH_GPU_PRIOR, LONG, find_accelerator("A10G")) is GRAPH_GPU_PRIOR


def test_a_plan_s_own_settings_count_more_than_defaults():
    workload = Workload(LONG, "float16", 1024, 128)
    layout = Layout(A100, 1)
    plain = plan_copy(layout, workload, VLLM_0_12, open_loop=True).config
    assert plain.max_rolling_batch_size == 256
    assert plain.max_rolling_batch_prefill_tokens == 2048
    wide = replace(layout, setting=EngineSetting(max_batch_size=512, max_prefill_tokens=4096))
    own = plan_copy(wide, workload, VLLM_0_12, open_loop=True).config
    assert own.max_rolling_batch_size == 512
    assert own.max_rolling_batch_prefill_tokens == 4096


def level(shape, users, *, requests=10, input_tokens=1024):
    return MeasuredLevel(
        Setup(shape, A100, 1, "float16"),
        input_tokens=input_tokens,
        output_tokens=128,
        load=Load(users),
        num_requests=requests * users,
    )


def served(profile, cell):
    """Mean first token of the engine's own scheduler in virtual time, all users at once."""
    config = scheduler_config_for(cell.setup, profile, cell.input_tokens + cell.output_tokens)
    run = simulate_level(
        LevelSpec(0, Load(concurrency=cell.concurrency), num_requests=cell.num_requests),
        lambda i: PlannedRequest(i, 0.0, cell.input_tokens, cell.output_tokens),
        config,
        planned_model_for(cell.setup, profile),
    )
    return float(np.mean([r.token_times_s[0] - r.sent_s for r in run.records]))


@pytest.mark.parametrize("shape", [SHORT, LONG], ids=["whole prompts", "chunks"])
@pytest.mark.parametrize("users", [4, 22])
def test_first_tokens_are_those_of_the_engine_s_own_scheduler(shape, users):
    """In chunks, all but: it counts prompt tokens alone, where vLLM counts decoding rows in."""
    cell = level(shape, users, input_tokens=900)
    overhead_s = VLLM_0_6_PRIOR.parameters.request_overhead_s
    said = predict_cell(VLLM_0_6_PRIOR, cell).ttft_mean_s - overhead_s
    assert said == pytest.approx(served(VLLM_0_6_PRIOR, cell), rel=0.03)


def test_users_in_step_wait_for_each_other_s_prompts():
    """By hand: 22 prompts of 1,024 tokens in steps of 8,192 are 8, 8 and 6, level after level."""
    profile = replace(VLLM_0_6_PRIOR, parameters=replace(VLLM_0_6_PRIOR.parameters, request_overhead_s=0.0))
    one_s = predict_cell(profile, level(SHORT, 1)).ttft_mean_s
    eight_s = predict_cell(profile, level(SHORT, 8)).ttft_mean_s  # all in one step
    six_s = predict_cell(profile, level(SHORT, 6)).ttft_mean_s
    by_hand = (8 * eight_s + 8 * 2 * eight_s + 6 * (2 * eight_s + six_s)) / 22
    in_step = predict_cell(profile, level(SHORT, 22)).ttft_mean_s
    assert in_step == pytest.approx(by_hand, rel=0.01)
    assert in_step > 11 * one_s


def test_chunks_spread_users_out_whose_answers_have_one_length():
    """First tokens come a few steps apart, so the next prompts do: none waits for all of them."""
    whole, split = (predict_cell(VLLM_0_6_PRIOR, level(shape, 22)).ttft_mean_s for shape in (SHORT, LONG))
    assert split < 0.35 * whole


def test_before_anything_is_measured_a_table_s_answers_have_one_length():
    told = replace(level(SHORT, 22), length_spread=0.1)
    assert as_assumed(told, "vllm 0.6.3").length_spread == 0.0
    rate = replace(told, load=Load(rate_per_s=1.0))
    assert as_assumed(rate, "vllm 0.6.3") is rate


def test_nvidia_s_engines_keep_the_cache_of_fp8_checkpoints_in_fp8():
    plain = level(LONG, 4)
    narrow = replace(plain, setup=replace(plain.setup, dtype="float8"))
    wide_cache = replace(plain, setup=replace(narrow.setup, kv_dtype="float16"))
    assert as_assumed(narrow, "nim 1.8.0").setup.kv_dtype == "float8"
    assert as_assumed(narrow, "vllm 0.11").setup.kv_dtype is None
    assert as_assumed(wide_cache, "nim 1.8.0").setup.kv_dtype == "float16"
    assert as_assumed(plain, "nim 1.8.0").setup.kv_dtype is None
    assert slots_for(GRAPH_GPU_PRIOR, as_assumed(narrow, "nim")) > 1.9 * slots_for(GRAPH_GPU_PRIOR, narrow)


def test_an_unmeasured_interval_reaches_users_out_of_step_on_their_side():
    """Answers that end by themselves spread users out: their first tokens come sooner."""
    cell = level(SHORT, 22)
    said = estimates(prior_fit(VLLM_0_6_PRIOR, [cell]), cell, ["ttft_mean_s"])["ttft_mean_s"]
    apart = predict_cell(VLLM_0_6_PRIOR, replace(cell, length_spread=0.1)).ttft_mean_s
    assert said.low < apart < said.value
    assert said.high / said.value < said.value / said.low
