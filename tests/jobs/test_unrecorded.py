"""What a log does not hold is said in the first lines of every later answer."""

from __future__ import annotations

import json

import pytest

from lmi_bench.cli.recommend_print import answer_lines
from lmi_bench.core.scenario import load_scenario
from lmi_bench.jobs.fleet import plan_day
from lmi_bench.jobs.recommend import recommend
from lmi_bench.jobs.results import workload_from
from lmi_bench.jobs.settings.plan import DaySettings
from lmi_bench.jobs.settings.recommend import RecommendSettings
from lmi_bench.jobs.settings.results import WorkloadFromSettings
from lmi_bench.report.recommendation_view import build_recommendation_view

RATE, LENGTHS = "the rate is not known", "the lengths are assumed"


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """Of an access log without dates."""
    folder = tmp_path_factory.mktemp("untimed")
    log = folder / "access.log"
    log.write_text('"POST /generate HTTP/1.1" 200\n' * 3)
    out = folder / "untimed.yaml"
    workload_from(WorkloadFromSettings(source=str(log), out=out, assume="128/16"))
    return out


def advice(scenario, **stated):
    return recommend(RecommendSettings(workload=scenario, model="llama-2-7b", instance=("ml.g5.2xlarge",), **stated))


def test_the_scenario_states_what_is_missing_and_hashes_as_before(scenario):
    found = load_scenario(scenario)
    assert found.unrecorded == ("rate", "lengths")
    plain = found.with_overrides({"unrecorded": ()})
    assert found.hash() == plain.hash()
    assert "unrecorded" not in plain.canonical()


def test_every_answer_begins_with_what_is_not_known(scenario, tmp_path):
    found = advice(scenario)
    first, second, *rest = answer_lines(found.answer)
    assert first.startswith(RATE)
    assert first.endswith(found.answer.question.load)
    assert second.startswith(LENGTHS)
    assert "at this load" not in "\n".join(rest)
    assert any("output tok/s at " in text and text.endswith(" req/s") for text in rest)
    rec = tmp_path / "rec.json"
    rec.write_text(json.dumps(found.to_json()))
    assert build_recommendation_view(found.to_json(), anchor="a").subtitle.startswith(RATE)
    day = plan_day(DaySettings(recommendation=rec, peak=2.0, start_up="60"))
    assert [text[:10] for text in day.to_json()["caveats"]] == [RATE[:10], LENGTHS[:10]]


def test_a_stated_rate_is_the_load(scenario):
    first, *rest = answer_lines(advice(scenario, rate=0.5).answer)
    assert first.startswith(LENGTHS)
    assert not any(RATE in text for text in rest)
    assert any("at this load" in text for text in rest)
