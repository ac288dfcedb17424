"""Profiles: saved and read back, drawn from their uncertainty, honest about what they are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmi_bench.analysis.model.builtin_profiles import (
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    TGI_2023,
    VLLM_0_12,
    VLLM_V0_PRIOR,
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
