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


@pytest.mark.parametrize(
    ("stated", "mend"),
    [
        ({"input_tokens": 300}, "lower --input-tokens or --output-tokens"),
        ({"turns": 3}, "lower --input-tokens or --output-tokens"),
        ({"trace": "t.csv"}, "leave the longer ones out of t.csv"),
        ({"agents": ""}, "lower the context of --agents"),
    ],
)
def test_a_stated_workload_is_refused(tmp_path, monkeypatch, stated, mend):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("Timestamp,Request tokens,Response tokens\n5,472,18\n45,87,23\n")
    with pytest.raises(InputError, match=f"takes 256 tokens a request.*: {mend}"):
        fitted_lengths(scenario_of(**stated), 256, exact=True)
