"""How the load's flags work together, as users of other tools type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import filled
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
