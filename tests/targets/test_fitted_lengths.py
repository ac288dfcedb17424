"""The default workload on a server with a short context."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.targets.http import fitted_lengths


def scenario_of(**workload):
    return parse_scenario({"target": "http://host:1", "workload": workload})


@pytest.mark.parametrize(("exact", "tokens"), [(True, 128), (False, 102)])
def test_the_default_workload_is_fitted_to_the_context(exact, tokens):
    found = fitted_lengths(scenario_of(), 256, exact=exact)
    assert found == {"workload.input_tokens": tokens, "workload.output_tokens": tokens}
    assert scenario_of().with_overrides(found).workload.input_tokens == tokens


def test_a_workload_that_fits_stays():
    assert fitted_lengths(scenario_of(), 512, exact=True) == {}
    assert fitted_lengths(scenario_of(input_tokens=9000), None, exact=True) == {}


@pytest.mark.parametrize("stated", [{"input_tokens": 300}, {"turns": 3}])
def test_a_stated_workload_is_refused(stated):
    with pytest.raises(InputError, match="takes 256 tokens a request"):
        fitted_lengths(scenario_of(**stated), 256, exact=True)
