"""How the load's flags work together, as users of other tools type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import filled, settings_of
from lmi_bench.core.scenario import Scenario
from lmi_bench.jobs.settings.sweep import SweepSettings


def stated(**options):
    return filled(SweepSettings, options).overrides()


def test_a_rate_with_a_concurrency_is_a_rate_with_a_cap():
    assert stated(rate="10", concurrency="4") == {"load.rate_per_s": [10], "load.max_in_flight": 4}


def test_an_infinite_rate_is_no_rate():
    """vLLM's own default beside --max-concurrency: all users at once."""
    assert stated(rate="inf", concurrency="8") == {"load.concurrency": [8]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": "10", "concurrency": "1,2"}, "one number"),
        ({"rate": "10", "concurrency": "auto"}, "one number"),
        ({"rate": "inf"}, "no rate"),
        ({"rate": "1,inf", "concurrency": "2"}, "no rate"),
    ],
)
def test_what_cannot_be_meant_is_said(options, said):
    with pytest.raises(InputError, match=said):
        stated(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"input_tokens": 8, "trace": Path("az.csv")},
        {"output_tokens": 8, "mix": "20/10"},
        {"input_tokens": 8, "input_lengths": "uniform(4,9)"},
    ],
)
def test_lengths_that_are_said_twice_are_refused_not_dropped(options):
    with pytest.raises(InputError, match="both state lengths"):
        stated(**options)


def test_fixed_answers_go_with_drawn_prompts():
    found = stated(output_tokens=8, input_lengths="uniform(4,9)")
    assert found == {"workload.output_tokens": 8, "workload.input_lengths": "uniform(4,9)"}


def test_what_is_typed_becomes_what_a_scenario_holds():
    """Names with units, comma lists, files, and words for what is off."""
    found = stated(
        think_time="3",
        idle_cap=4.0,
        ramp=5.0,
        timeout="none",
        first_token_timeout=2.0,
        speed="1,2.5",
        concurrency="auto",
        dataset=Path("a.jsonl"),
        agents="default",
        connections="4",
        sagemaker_endpoint_url="http://x",
        enforce_eager="off",
        stream=False,
        slo=("ttft_p90<=1s",),
        seed=0,
    )
    assert found == {
        "workload.think_s": "3",
        "workload.idle_cap_s": 4.0,
        "load.ramp_s": 5.0,
        "timeout_s": "none",
        "client.first_token_timeout_s": 2.0,
        "load.speed": [1, 2.5],
        "load.concurrency": "auto",
        "workload.dataset": "a.jsonl",
        "workload.agents": "",
        "client.connections": 4,
        "sagemaker.endpoint_url": "http://x",
        "engine.enforce_eager": True,
        "stream": False,
        "slo": ("ttft_p90<=1s",),
        "seed": 0,
    }


def test_every_option_of_a_scenario_reaches_a_field():
    content = Scenario().model_dump()
    places = [each.place for each in settings_of(SweepSettings) if each.place]
    for place in places:
        section, _, name = place.rpartition(".")
        assert name in (content[section] if section else content), place
    assert len(places) == len(set(places)) > 80
