"""Profiles: saved and read back, drawn from their uncertainty, honest about what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

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
    VLLM_0_12,
    VLLM_V0_PRIOR,
    prior_of_engine,
)
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, profile_from_json, profile_to_json
from lmi_bench.core.errors import InputError


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


@pytest.mark.parametrize(
    ("version", "known"), [("0.11.2", 0), ("0.12.0", 1), ("v0.19", 1), ("1.0", 0)]
)
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


def test_on_another_generation_what_depends_on_the_device_is_half_way_to_the_prior():
    """Of two estimates with equal doubt: the geometric mean. The server's own time is carried."""
    seen = set(SGLANG_MI355X.fitted_cells)
    known = {"models": {"deepseek-v3"}, "accelerators": {"MI355X"}, "marks": seen}
    found = prior_of_engine("sglang", **known, open_loop=False)
    assert found.fitted_on == SGLANG_MI300X.fitted_on
    near, general = SGLANG_MI300X.parameters, SGLANG_PRIOR.parameters
    for name in ("gap_per_layer_s", "host_per_sequence_s", "bandwidth_share"):
        product = getattr(near, name) * getattr(general, name)
        assert getattr(found.parameters, name) == pytest.approx(product**0.5)
    assert found.parameters.request_overhead_s == near.request_overhead_s


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
