"""Constants fitted to 7B-class models and carried over: what physics demands of the result."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.fit.fit import prior_fit
from lmi_bench.analysis.fit.uncertainty import estimates
from lmi_bench.analysis.level.cells import predict_cell, slots_for
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_12
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import CapacityError
from lmi_bench.core.load import Load

PROFILES = (TGI_2023, VLLM_0_12)


def cell(model, *, instance="ml.p4d.24xlarge", tp=8, lengths=(256, 256), users=8, dtype="float16"):
    return MeasuredLevel(
        Setup(find_model(model), find_instance(instance), tp, dtype),
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        load=Load(users),
        num_requests=3 * users,
    )


def tpot_s(profile, *args, **more):
    return predict_cell(profile, cell(*args, **more), smooth=True).tpot_mean_s


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.label)
@pytest.mark.parametrize("users", [1, 16, 64])
@pytest.mark.parametrize("lengths", [(256, 256), (3500, 512)])
def test_a_larger_model_of_a_family_takes_longer_for_a_token(profile, users, lengths):
    times = [tpot_s(profile, f"llama-2-{size}", users=users, lengths=lengths) for size in ("7b", "13b", "70b")]
    assert times == sorted(times)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.label)
@pytest.mark.parametrize("model", ["llama-2-13b", "llama-2-70b", "mixtral-8x7b"])
def test_a_longer_context_takes_longer_for_a_token_and_for_the_first(profile, model):
    cells = [cell(model, lengths=(prompt, 256), users=16) for prompt in (256, 1024, 3500)]
    said = [predict_cell(profile, each, smooth=True) for each in cells]
    assert [each.tpot_mean_s for each in said] == sorted(each.tpot_mean_s for each in said)
    assert [each.ttft_mean_s for each in said] == sorted(each.ttft_mean_s for each in said)


def test_a_lone_request_is_as_fast_as_the_weights_are_read():
    """13B over 7B without a host that shows: 13.02e9 over 6.74e9 parameters less the embedding,
    whose table no step reads: 12.85 / 6.61 = 1.94; layers' gaps are 40 to 32 and pull down."""
    ratio = tpot_s(VLLM_0_12, "llama-2-13b", tp=1, users=1) / tpot_s(VLLM_0_12, "llama-2-7b", tp=1, users=1)
    assert 40 / 32 < ratio < 1.94
    assert ratio == pytest.approx(1.94, rel=0.1)


def test_more_bandwidth_and_more_ranks_speed_up_what_reads_weights():
    """Llama 2 70B over 4 and 8 ranks of A100 and of H100, where a host hides nothing."""
    four, eight = (tpot_s(VLLM_0_12, "llama-2-70b", tp=tp, users=1) for tp in (4, 8))
    faster = tpot_s(VLLM_0_12, "llama-2-70b", instance="ml.p5.48xlarge", users=1)
    assert faster < eight < four
    assert four / eight < 2


def test_grouped_queries_hold_more_sequences_by_the_ratio_of_their_heads():
    """Mistral 7B has 8 KV heads to Llama 2 7B's 32; its weights are 0.5e9 parameters more."""
    many, few = (
        slots_for(TGI_2023, cell(model, tp=1, instance="ml.g5.2xlarge")) for model in ("mistral-7b-v0.1", "llama-2-7b")
    )
    assert 3 < many / few < 4


def test_a_mixture_reads_few_experts_alone_and_all_of_them_in_company():
    """Two of eight experts a token: a lone request of Mixtral 8x7B reads 12.9e9 parameters of
    46.7e9, sixteen read nearly all."""
    alone, together = (tpot_s(VLLM_0_12, "mixtral-8x7b", users=users) for users in (1, 16))
    dense_alone, dense_together = (tpot_s(VLLM_0_12, "falcon-40b", users=users) for users in (1, 16))
    assert together / alone > 2
    assert dense_together / dense_alone < 1.3


@pytest.mark.parametrize(
    ("model", "instance", "tp"),
    [
        ("llama-2-13b", "ml.g5.2xlarge", 1),
        ("llama-2-70b", "ml.g5.12xlarge", 4),
        ("llama-2-70b", "ml.p4d.24xlarge", 2),
        ("mixtral-8x7b", "ml.p5.48xlarge", 1),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_its_weights(model, instance, tp):
    with pytest.raises(CapacityError, match="GiB of weights"):
        predict_cell(TGI_2023, cell(model, instance=instance, tp=tp))


def test_users_queue_where_the_cache_is_short():
    """Llama 2 13B on one A100 of 40 GB: some 4 prompts of 3,500 tokens; 32 users wait for turns."""
    short = predict_cell(TGI_2023, cell("llama-2-13b", tp=1, lengths=(3500, 512), users=32))
    assert short.peak_sequences < 8
    assert short.ttft_mean_s > 10 * short.tpot_mean_s * 3


def test_an_interval_is_wider_for_what_is_further_from_the_fit():
    """7B on A100 was fitted; another model, and another device too, were not."""

    def half_width(**which):
        one = cell(**which)
        said = estimates(prior_fit(TGI_2023, [one]), one, ["tpot_mean_s"])["tpot_mean_s"]
        return said.high / said.value

    seen = half_width(model="llama-2-7b", tp=1)
    other = half_width(model="llama-2-13b", tp=1)
    elsewhere = half_width(model="llama-2-13b", tp=1, instance="ml.p5.48xlarge")
    assert seen < other < elsewhere
