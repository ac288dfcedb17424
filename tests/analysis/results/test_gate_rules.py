"""A run counts under public rules where it keeps each of them, and is told which it breaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.analysis.results.gate import gate_rules
from lmi_bench.core.errors import InputError
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.run_store import Run
from tests.levels import level_of

WORKLOAD = {"agent_trace": "weka", "begins_within": True, "idle_cap_s": 10.0, "ignore_eos": True}


SESSIONS = {"kind": "weka", "number": 393}


def run_of(*, workload=None, target="url", stream=True, sessions=SESSIONS, **level):
    content = {
        "scenario": {"stream": stream, "workload": {**WORKLOAD, **(workload or {})}},
        "target": {"kind": target},
        **({} if sessions is None else {"sessions": sessions}),
    }
    line = level_of(**{"valid": True, "wall_s": 900.0, "requests": 200, "errors": 2, **level})
    return Run(Path("run"), Manifest.from_json(content), [line], [()], None)


def broken(run):
    return [case.name for case in gate_rules(run, "agentx") if case.outcome == "missed"]


def test_a_run_that_keeps_every_rule_counts():
    cases = gate_rules(run_of(), "agentx")
    assert len(cases) == 10
    assert {case.outcome for case in cases} == {"passed"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"workload": {"agent_trace": None}}, "sessions"),
        ({"sessions": None}, "sessions"),  # a run that does not say
        ({"sessions": {"kind": "bailian", "number": 1000}}, "sessions"),
        ({"sessions": {"kind": "weka", "number": 3}}, "sessions"),
        ({"rate_per_s": 1.0}, "load"),
        ({"workload": {"begins_within": False}}, "begin"),
        ({"workload": {"idle_cap_s": 60.0}}, "idle gaps"),
        ({"stream": False}, "answers"),
        ({"workload": {"ignore_eos": False}}, "answers"),
        ({"workload": {"reuse_prompts": True}}, "prompts"),
        ({"target": "simulated"}, "target"),
        ({"wall_s": 899.0}, "duration"),
        ({"errors": 3}, "failed"),
        ({"valid": False}, "valid"),
    ],
)
def test_each_rule_that_is_broken_is_named(change, rule):
    assert broken(run_of(**change)) == [rule]


def test_levels_of_two_loads_are_not_one_concurrency():
    run = run_of()
    two = [*run.levels, level_of(valid=True, wall_s=900.0, requests=1, concurrency=2)]
    assert broken(replace(run, levels=two)) == ["load"]


def test_unknown_rules_are_refused():
    with pytest.raises(InputError, match="'mlperf' is not known; write agentx"):
        gate_rules(run_of(), "mlperf")
