"""Copies that are split beyond tensor parallelism, as each server's arguments."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.setup import Speculation
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.plan import Stated, plan_from_recommendation
from lmi_bench.deploy.server_settings import sglang_arguments, unsupported_settings, vllm_arguments

EP_DP = EngineSetting(expert_parallel=True, dp_attention=True)


@pytest.fixture(scope="module")
def answer():
    """DeepSeek-V3 on eight H200, split by experts and attention."""
    request = RecommendRequest(
        Workload(find_model("deepseek-v3"), "float8", 1000, 500),
        VLLM_0_12,
        instances=(find_instance("ml.p5en.48xlarge"),),
        settings=(EP_DP,),
        degrees=(8,),
    )
    return recommend(request)


def plan_of(answer, setting):
    best = replace(answer.recommended, setting=setting)
    return plan_from_recommendation(replace(answer, recommended=best), "deepseek-v3", VLLM_0_12)


def test_vllm_runs_a_rank_of_its_own_for_each_group(answer):
    """Its limits are those of one rank: an eighth of the copy's sequences."""
    made = plan_of(answer, EP_DP)
    words = vllm_arguments(made)
    assert words["enable-expert-parallel"] == "true"
    assert (words["tensor-parallel-size"], words["data-parallel-size"]) == ("1", "8")
    assert int(words["max-num-seqs"]) == -(-made.limits.max_num_seqs // 8)
    assert words["max-num-batched-tokens"] == "8192"


def test_sglang_splits_attention_within_its_tensor_parallel_group(answer):
    words = sglang_arguments(plan_of(answer, EP_DP))
    assert (words["tp-size"], words["ep-size"], words["dp-size"]) == ("8", "8", "8")
    assert words["enable-dp-attention"] == "true"


def test_other_servers_say_that_they_cannot(answer):
    made = plan_of(answer, EP_DP)
    assert unsupported_settings(made, "lmi") == ["DP attention"]
    assert unsupported_settings(made, "tgi") == ["EP, DP attention"]
    assert unsupported_settings(made, "vllm") == []


def test_the_model_s_own_layer_drafts_in_each_server_s_words(answer):
    made = plan_of(answer, EngineSetting(speculation=Speculation(3, 0.7, own=True)))
    config = json.loads(vllm_arguments(made)["speculative-config"])
    assert config == {"method": "mtp", "num_speculative_tokens": 3}
    words = sglang_arguments(made)
    assert words["speculative-algorithm"] == "NEXTN"
    assert "speculative-draft-model-path" not in words
    assert (words["speculative-num-steps"], words["speculative-num-draft-tokens"]) == ("3", "4")
    assert unsupported_settings(made, "tgi") == ["draft mtp"]


def test_a_model_without_such_a_layer_is_refused(answer):
    with pytest.raises(InputError, match=r"kimi-k2 has no .*MTP"):
        plan_from_recommendation(answer, "kimi-k2", VLLM_0_12, stated=Stated(draft="mtp"))
