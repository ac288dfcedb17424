"""Joint attainment and worst windows against records whose answer can be counted."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.fleet import attainment as long_simulations
from lmi_bench.analysis.fleet.attainment import attainment, simulate_long
from lmi_bench.analysis.fleet.operating_point import Operating
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Layout, Workload, plan_copy
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_12
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import parse_slo

TTFT, E2E = parse_slo("ttft_p90<=1s"), parse_slo("e2e_p90<=5s")


def record(index, due_s, ttft_s=0.5, e2e_s=4.0):
    return RequestRecord(index, due_s, Exchange(due_s, (due_s + ttft_s, due_s + e2e_s)))


def test_a_request_that_misses_either_limit_is_not_attained():
    """10 requests: two too late with the first token, two with the last, one of them both."""
    slow_first, slow_last = {1, 2}, {2, 3}
    records = [record(i, float(i), 1.5 if i in slow_first else 0.5, 6.0 if i in slow_last else 4.0) for i in range(10)]
    found = attainment(records, [TTFT, E2E], open_loop=True)
    assert found.joint_attainment == pytest.approx(0.7)


def test_the_worst_five_minutes_stand_out_of_the_hour():
    """One request a second for 20 minutes; those of the 9th to 11th minute take 3 s to start.

    They are 120 of 1,200, so the hour's p90 is about 0.5 s, but 120 of 300 in the worst window.
    """
    records = [record(i, float(i), 3.0 if 540 <= i < 660 else 0.5) for i in range(1200)]
    found = attainment(records, [TTFT], open_loop=True)
    assert found.worst_5_minutes_ms[str(TTFT)] == pytest.approx(3000.0)
    assert found.joint_attainment == pytest.approx(0.9)
    assert found.minutes == pytest.approx(20.0, abs=0.1)


def test_too_few_requests_support_no_window():
    """p90 needs 29 samples; one request in 15 s makes 20 a window."""
    records = [record(i, 15.0 * i) for i in range(80)]
    assert attainment(records, [TTFT], open_loop=True).worst_5_minutes_ms == {str(TTFT): None}


WORKLOAD = Workload(find_model("llama-2-7b"), "float16", 256, 256)


def request(*slos, **more):
    return RecommendRequest(WORKLOAD, TGI_2023, slos=slos, **more)


@pytest.fixture(scope="module")
def copy():
    layout = Layout(find_instance("ml.g5.2xlarge"), 1)
    return plan_copy(layout, WORKLOAD, TGI_2023, open_loop=True)


def test_the_least_busy_copy_answers_sooner_than_a_random_one(copy):
    rate = 0.8 * copy.steady.saturated_rate_per_s
    operating = Operating(rate, copy.steady.batch_at(rate))
    slo = parse_slo("ttft_p90<=10s")
    worst = {
        routing: simulate_long(request(slo, routing=routing), copy, operating, 2)
        for routing in ("random", "least-outstanding")
    }
    assert all(each.joint_attainment is not None for each in worst.values())
    assert worst["least-outstanding"].worst_5_minutes_ms[str(slo)] < worst["random"].worst_5_minutes_ms[str(slo)]


@pytest.mark.parametrize("open_loop", [True, False], ids=["rate", "users"])
@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3.1-8b"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_followed_copy_attains_what_the_engines_scheduler_does(model, share, open_loop, monkeypatch):
    """Whole prompts and chunks, with sequences that a full cache sends back."""
    profile = TGI_2023 if model == "llama-2-7b" else VLLM_0_12
    workload = Workload(find_model(model), "float16", 500, 400)
    layout = Layout(find_instance("ml.g5.2xlarge"), 1)
    plan = plan_copy(layout, workload, profile, open_loop=open_loop)
    rate = share * plan.steady.saturated_rate_per_s
    operating = Operating(rate, plan.steady.batch_at(rate))
    slos = tuple(map(parse_slo, ("ttft_p90<=500ms", "itl_p90<=45ms", "tpot_mean<=60ms")))
    asked = RecommendRequest(workload, profile, slos=slos)
    found = []
    for quick in (0, 10**9):
        monkeypatch.setattr(long_simulations, "_QUICK_TOKENS", quick)
        found.append(simulate_long(asked, plan, operating, 1))
    followed, simulated = found
    assert followed.requests == simulated.requests
    assert followed.minutes == pytest.approx(simulated.minutes, rel=1e-9)
    assert followed.joint_attainment == pytest.approx(simulated.joint_attainment, abs=0.01)
    for name in ("fifteen_minutes_ms", "worst_5_minutes_ms", "attainment"):
        one, other = getattr(followed, name), getattr(simulated, name)
        ttft, itl, tpot = map(str, slos)
        assert one[ttft] == pytest.approx(other[ttft], rel=1e-9)
        assert one[tpot] == pytest.approx(other[tpot], rel=1e-9)
        assert one[itl] == pytest.approx(other[itl], rel=0.01, abs=0.01)


@pytest.mark.parametrize("open_loop", [True, False], ids=["rate", "users"])
def test_answers_of_one_token_are_followed_although_no_step_decodes(open_loop, monkeypatch):
    workload = Workload(find_model("llama-3.1-8b"), "float16", 200, 1)
    layout = Layout(find_instance("ml.g6.2xlarge"), 1)
    plan = plan_copy(layout, workload, VLLM_0_12, open_loop=open_loop)
    asked = RecommendRequest(workload, VLLM_0_12, slos=(TTFT,))
    found = []
    for quick in (0, 10**9):
        monkeypatch.setattr(long_simulations, "_QUICK_TOKENS", quick)
        found.append(simulate_long(asked, plan, Operating(4.0, 1.0), 1))
    followed, simulated = found
    for name in ("fifteen_minutes_ms", "worst_5_minutes_ms"):
        assert getattr(followed, name) == pytest.approx(getattr(simulated, name), rel=1e-9)


def test_a_load_that_would_take_too_long_to_simulate_says_so(copy):
    found = simulate_long(request(TTFT), copy, Operating(50.0, 10.0), 1)
    assert found.joint_attainment is None
    assert "45,010 requests" in found.reason


def test_many_users_are_judged_by_a_follower():
    """64 users of one copy for fifteen minutes: more requests than the scheduler would take."""
    workload = Workload(find_model("llama-3.1-8b"), "bfloat16", 256, 64)
    layout = Layout(find_instance("ml.p5.4xlarge"), 1)
    users = plan_copy(layout, workload, VLLM_0_12, open_loop=False)
    asked = RecommendRequest(workload, VLLM_0_12, slos=(TTFT,))
    rate_per_s = users.steady.rate_per_s(64)
    assert rate_per_s * 900 > 6000
    found = simulate_long(asked, users, Operating(rate_per_s, 64), 1)
    assert found.requests == pytest.approx(900 * rate_per_s, rel=0.01)
    assert found.minutes == pytest.approx(15, rel=0.1)
    assert found.joint_attainment is not None
