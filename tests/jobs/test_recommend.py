"""What the recommend command makes of its options."""

from __future__ import annotations

from dataclasses import replace

import pytest

import lmi_bench
from lmi_bench.core.errors import InputError
from lmi_bench.jobs.files import read_recommendation
from lmi_bench.jobs.recommend import plan_portfolio, recommend
from lmi_bench.jobs.settings.recommend import AxisSettings, RecommendSettings
from tests.jobs.hearing import Hearing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0, "users": 3, "think_time": 1.0}, "not both"),
        ({"rate": 0.0}, "--rate must be above 0"),
        ({"users": 0, "think_time": 1.0}, "--users must be at least 1"),
        ({"users": 3}, "belong together"),
        ({"think_time": 3.0}, "belong together"),
        ({"users": 3, "think_time": -1.0}, "--think-time must be 0 s or more"),
    ],
)
def test_a_load_that_is_not_whole_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        lmi_bench.recommend(model="llama-2-7b", instance=["ml.g5.2xlarge"], input_tokens=64, output_tokens=8, **options)


def test_what_the_other_profile_answers_stands_beside_the_default_one():
    asked = RecommendSettings(
        model="llama-2-7b", instance=("ml.g5.2xlarge",), input_tokens=64, output_tokens=8, rate=1.0
    )
    found = recommend(asked)
    named = recommend(replace(asked, profile="vllm-0.19"))
    name, other = found.other
    assert name == "vllm-0.19"
    assert named.other is None
    first, second = other, named.answer.recommended
    assert (first.instance, first.instances) == (second.instance, second.instances)
    capacity = [each.figures["capacity_rate_per_s"].value for each in (first, second)]
    assert capacity[0] == pytest.approx(capacity[1])
    assert capacity[0] != pytest.approx(found.answer.recommended.figures["capacity_rate_per_s"].value, rel=0.01)
    assert found.to_json()["other_profile"]["recommended"]["instance"] == "ml.g5.2xlarge"


def test_a_machine_whose_host_most_images_do_not_run_on_is_doubted():
    options = {"model": "llama-3.2-1b", "input_tokens": 64, "output_tokens": 8, "rate": 0.1, "platform": "ec2"}
    doubted, usual = (lmi_bench.recommend(instance=[name], **options) for name in ("g5g.xlarge", "ml.g4dn.xlarge"))
    assert "arm64" in doubted.answer.recommended.warnings[0]
    assert not any("arm64" in each for each in usual.answer.recommended.warnings)


def test_a_copy_spans_machines_where_none_holds_it_alone():
    """Kimi K2 has 1,912 GiB of 16-bit weights, eight H200 1,101 GiB of memory."""
    asked = RecommendSettings(
        model="kimi-k2",
        instance=("ml.p5en.48xlarge",),
        input_tokens=100,
        output_tokens=50,
        rate=1.0,
        axes=AxisSettings(dtype="float16"),
    )
    told = Hearing()
    found = recommend(asked, told)
    best = found.answer.recommended
    assert (best.instance, best.setting.hosts) == ("2 x ml.p5en.48xlarge", 2)
    assert "no machine alone" in found.answer.warnings[0]
    assert any("--hosts 2" in note for note in told.notes)
    assert found.other[1].instance == best.instance
    alone = recommend(replace(asked, axes=AxisSettings(dtype="float16", hosts="1")))
    assert alone.answer.recommended is None


def test_a_stated_network_counts_for_copies_that_span_machines():
    """A p5.48xlarge has 400 Gbit/s for each device."""
    asked = RecommendSettings(
        model="llama-3.1-70b",
        instance=("ml.p5.48xlarge",),
        tensor_parallel=(16,),
        input_tokens=1000,
        output_tokens=50,
        axes=AxisSettings(hosts="2"),
        profile="vllm",
    )
    answers = [recommend(replace(asked, network_gbps=gbps)).answer for gbps in (None, 400.0, 20.0)]
    own, same, slow = (each.recommended.figures["capacity_rate_per_s"].value for each in answers)
    assert own == same > 1.5 * slow
    with pytest.raises(InputError, match="--network-gbps is between machines: add --hosts or --disaggregate"):
        replace(asked, axes=AxisSettings(), network_gbps=20.0)


def test_a_portfolio_leaves_out_machines_that_no_image_runs_on(tmp_path):
    """GB200's hosts are arm64: no SageMaker image of vLLM runs there."""
    file = tmp_path / "models.yaml"
    file.write_text("models: [{model: qwen3-1.7b, rate_per_s: 1, input_tokens: 64, output_tokens: 8}]")
    grace, hearing = "ml.p6e-gb200.36xlarge", Hearing()
    asked = RecommendSettings(portfolio=file, instance=(grace, "ml.g6e.xlarge"))
    found = plan_portfolio(asked, hearing)
    assert grace not in repr(found)
    assert any(f"{grace} is left out" in text for text in hearing.notes)
    with pytest.raises(InputError, match="arm64"):
        plan_portfolio(replace(asked, instance=(grace,)))


def test_a_recommendation_that_is_refused_is_named_by_its_file(tmp_path):
    file = tmp_path / "rec.json"
    file.write_text('{"recommended": null, "model": "m", "input_tokens": 1, "output_tokens": 1}')
    with pytest.raises(InputError, match=f"{file}: a recommendation without 'schema_version'"):
        read_recommendation(file)
