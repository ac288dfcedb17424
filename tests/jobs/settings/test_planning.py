"""Planning settings: refused where they cannot be meant, and the same words everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import filled, stated
from lmi_bench.jobs.recommend import recommend
from lmi_bench.jobs.settings.bundled import GenerateSettings
from lmi_bench.jobs.settings.deploy import DeploySettings
from lmi_bench.jobs.settings.plan import CalibrateSettings, PredictSettings, ValidateSettings
from lmi_bench.jobs.settings.planning import PriceSettings
from lmi_bench.jobs.settings.recommend import AxisSettings, RecommendSettings

LLAMA = {"model": "llama-2-7b", "instance": "ml.g5.2xlarge"}
EQUAL = {**LLAMA, "input_tokens": 128, "output_tokens": 16}
REC = Path("rec.json")
ONE = RecommendSettings(
    model="llama-2-7b", input_tokens=128, output_tokens=16, instance=("ml.g5.2xlarge",), tensor_parallel=(1,)
)


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (PriceSettings, {"platform": "azure"}, "--platform azure"),
        (PredictSettings, EQUAL, "either --concurrency or --rate"),
        (PredictSettings, {**EQUAL, "rate": "1", "tensor_parallel": 0}, "--tp must be at least 1"),
        (PredictSettings, {**EQUAL, "rate": "1", "prefix_hit": 1.5}, "--prefix-hit must be 0 to 1"),
        (PredictSettings, {**LLAMA, "rate": "1", "mix": "2/3", "prefix_hit": 0.5}, "needs equal"),
        (RecommendSettings, {"objective": "speed"}, "--objective speed"),
        (RecommendSettings, {"tensor_parallel": (0, 1)}, "--tp must be at least 1, got 0"),
        (RecommendSettings, {"max_usd_per_hour": 0.0}, "--max-usd-per-hour must be above 0, got 0"),
        (RecommendSettings, {"min_throughput": 0.0}, "--min-throughput must be above 0, got 0"),
        (RecommendSettings, {"commit_discount": 1.0}, "at least 0 and below 1, got 1"),
        (RecommendSettings, {"committed": -1}, "--committed must be 0 or more machines, got -1"),
        (RecommendSettings, {"portfolio": REC, "committed": 3}, "--portfolio takes no --committed"),
        (CalibrateSettings, {"next_levels": -1}, "--next must be 0 or more"),
        (ValidateSettings, {"seed": 3}, "name a table"),
        (ValidateSettings, {"sources": (REC,), "calibrate_cells": -1}, "--calibrate-cells must be"),
        (DeploySettings, {}, "give a file of `recommend --json`"),
        (DeploySettings, {"recommendation": REC, "model": "x"}, "not both"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_settings_are_made(kind, values, says):
    with pytest.raises(InputError, match=says):
        kind(**values)


def test_only_what_differs_from_its_default_counts_as_stated():
    settings = RecommendSettings(price_list=PriceSettings(platform="ec2"), axes=AxisSettings(graphs="on"))
    assert [each.name for each in stated(settings)] == ["graphs", "platform"]
    assert list(stated(RecommendSettings())) == []


@pytest.mark.parametrize("word", ["least-outstanding", "least_outstanding"])
def test_a_router_is_named_with_the_words_of_a_sweep(word):
    assert recommend(replace(ONE, router=word)).request.routing == "least-outstanding"


def test_machines_may_stand_between_commas_or_be_repeated():
    settings = RecommendSettings(instance=("ml.g5.2xlarge, local", "ml.p4d.24xlarge"))
    assert settings.instances == ("ml.g5.2xlarge", "local", "ml.p4d.24xlarge")


def test_a_recommendation_prints_nothing(capsys):
    advice = recommend(replace(ONE, rate=1.0))
    assert advice.to_json()["recommended"]["instance"] == "ml.g5.2xlarge"
    assert capsys.readouterr() == ("", "")


def test_an_option_goes_to_the_class_that_declares_it():
    """`logprobs` is a number for the scores; the sampling has a field of this name, no option."""
    given = {"logprobs": 3, "temperature": 0.5}
    found = filled(GenerateSettings, given)
    assert not given
    assert (found.logprobs, found.sampling.logprobs) == (3, False)
    assert found.sampling.temperature == 0.5
