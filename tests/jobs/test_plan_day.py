"""A day with autoscalers: what the settings become."""

from __future__ import annotations

import json

import pytest

from lmi_bench.analysis.fleet.money import Availability, Purchase
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT
from lmi_bench.core.load import Load
from lmi_bench.jobs.fleet import plan_day
from lmi_bench.jobs.settings.plan import DaySettings
from tests.jobs.hearing import Hearing


def day(listener=SILENT, **more):
    usual = {"capacity": 5.0, "start_up": "300", "machine_price": 3.0}
    return plan_day(DaySettings(**(usual | more)), listener)


def test_policies_are_played_beside_the_flat_fleet():
    """0.8 req/s by day and 0.2 by night; 0.5 a machine. The flat fleet has two for 24 hours."""
    policies = ("target-tracking", "hpa:max_machines=1")
    planned = day(capacity=0.5, peak=0.8, least_share=0.25, policy=policies)
    flat, tracking, one = planned.to_json()["policies"]
    assert [flat["policy"], one["policy"]] == ["flat", "hpa:max_machines=1"]
    assert flat["events"] == []
    assert flat["machine_hours"] == pytest.approx(48, abs=0.1)
    assert flat["usd_per_day"] == pytest.approx(3.0 * flat["machine_hours"])
    assert tracking["machine_hours"] < flat["machine_hours"]
    assert tracking["attainment"] > 0.8
    assert one["attainment"] < 0.7  # a machine of 0.625 req/s for 0.8
    assert one["peak_machines"] == 1


def test_a_long_day_is_played_in_part(monkeypatch):
    """86,400 requests: each fifth is played; machines and hours are those of the whole."""
    monkeypatch.setattr("lmi_bench.jobs.fleet._MOST_PLAYED", 20_000)
    flat, _ = day(capacity=0.6, shape="flat", peak=1.0, policy=("hpa",)).policies
    assert flat.played.machine_hours == pytest.approx(48, abs=0.1)
    assert len(flat.played.waits_s) == pytest.approx(86_400 / 5, rel=0.02)


@pytest.mark.parametrize("metric", ["rate", "outstanding"])
def test_a_day_that_is_played_in_part_keeps_its_machines_slots(monkeypatch, metric):
    """One machine of 62 slots at 92 % of its rate; with a tenth of them a third would wait long."""
    policy = (f"hpa:max_machines=1,metric={metric}",)
    settings = {"capacity": 5.0, "shape": "flat", "peak": 5.75, "policy": policy}
    (_, whole), told = day(**settings).policies, Hearing()
    monkeypatch.setattr("lmi_bench.jobs.fleet._MOST_PLAYED", 50_000)
    _, part = day(told, **settings).policies
    assert len(part.played.waits_s) == pytest.approx(len(whole.played.waits_s) / 10, rel=0.02)
    assert part.played.attainment == pytest.approx(whole.played.attainment, abs=0.02)
    assert part.played.waits_s.mean() == pytest.approx(whole.played.waits_s.mean(), rel=0.3)
    assert any("one in 10 is played" in note for note in told.notes)


def saved(folder, output_tokens, **more):
    """A recommendation, and the file that holds it."""
    request = RecommendRequest(
        Workload(find_model("llama-3.1-8b"), "float16", 100, output_tokens),
        VLLM_0_12,
        load=Load(rate_per_s=1.0),
        instances=(find_instance("ml.g5.2xlarge"),),
        **more,
    )
    answer, path = recommend(request), folder / "rec.json"
    path.write_text(json.dumps({"model": "llama-3.1-8b", **answer.to_json()}))
    return answer, path


@pytest.mark.parametrize(("zones", "spare", "machines"), [(1, 1, 5), (3, 0, 6)])
def test_a_day_has_the_spare_machines_and_the_discount_of_its_recommendation(tmp_path, zones, spare, machines):
    """Four machines carry the load; all are paid, at 0.7 of the price in the commitment."""
    bought = {"purchase": Purchase("savings-plan", 0.3), "availability": Availability(spare, zones)}
    _, path = saved(tmp_path, 20, **bought)
    flat = day(capacity=0.01, recommendation=path, machine_price=None, shape="flat", peak=0.039, policy=("hpa",))
    assert flat.plan.flat_machines == machines
    assert flat.plan.flat.machine_hours == pytest.approx(24 * machines)
    assert flat.policies[0].played.machine_hours == pytest.approx(24 * machines)
    assert flat.policies[0].played.peak_machines == machines
    assert flat.commitment.usd_per_day == pytest.approx(0.7 * 24 * machines * flat.price)


def test_an_answer_takes_as_long_as_the_recommendation_says(tmp_path):
    """Without --answer-time; in 120 s a machine holds 12 times the requests that it does in 10."""
    answer, path = saved(tmp_path, 4000)
    answer_s = answer.recommended.figures["e2e_p50_ms"].value / 1e3
    more = {"capacity": None, "recommendation": path, "peak": 1.0, "policy": ("hpa",)}
    own, stated, ten = (day(**more, answer_time=seconds).to_json()["policies"] for seconds in (None, answer_s, 10.0))
    assert own == stated
    assert own != ten


def test_a_trace_is_repeated_over_the_day(tmp_path):
    rows = [f"2023-11-16 18:{m:02d}:00.0,374,44" for m in range(60)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    planned = day(trace=path, policy=("hpa",))
    assert len(planned.policies[0].played.waits_s) == 24 * 60
    assert planned.load.peak_per_s == pytest.approx(1 / 60)
    with pytest.raises(InputError, match="leave --load and --shape out"):
        day(trace=path, shape="flat")


def test_a_trace_too_dense_for_a_day_is_refused(tmp_path):
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:00:00.000000,374,44", "2023-11-16 18:00:00.000001,374,44"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    with pytest.raises(InputError, match=r"9.06e\+10 requests, more than 200,000,000: state a lower --peak"):
        day(trace=path)


def test_a_trace_that_does_not_fit_a_whole_number_of_times_fills_the_day_all_the_same(tmp_path):
    """Thirteen hours: the flat fleet is paid for the other eleven, too."""
    rows = [f"2023-11-16 {h:02d}:{m:02d}:00.0,374,44" for h in range(13) for m in range(60)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    planned = day(trace=path, policy=("hpa",))
    flat = planned.policies[0].played
    assert len(flat.waits_s) == 24 * 60
    assert flat.machine_hours == pytest.approx(24 * planned.plan.flat_machines, rel=0.01)
    with pytest.raises(InputError, match="no request arrives"):
        day(peak=1e-9, policy=("hpa",))


def test_the_peak_of_a_record_shorter_than_its_window_is_its_rate(tmp_path):
    """600 requests in a minute, played as they came: 10 req/s, all day long."""
    rows = [f"2023-11-16 18:00:{at / 10:09.6f},374,44" for at in range(600)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert day(trace=path, peak=10.0).load.peak_per_s == pytest.approx(10, rel=0.01)
    assert day(trace=path, peak=2.0).load.peak_per_s == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("peak", [1.0, 50.0])
def test_the_peak_is_that_of_the_stretched_record_whatever_its_bursts(tmp_path, peak):
    """600 s at 1 req/s, 30 of them at 31: stretched, the burst fills more of the five minutes."""
    at_s = sorted([*range(600), *(100 + n / 30 for n in range(900))])
    rows = [f"2023-11-16 18:{int(at // 60):02d}:{at % 60:09.6f},374,44" for at in at_s]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert day(trace=path, peak=peak).load.peak_per_s == pytest.approx(peak, rel=0.01)
