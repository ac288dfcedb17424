"""Autoscalers against Erlang's formula, fluid limits and hand arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from lmi_bench.analysis.fleet.autoscaling import Fleet, Hpa, TargetTracking, day_arrivals_s, parse_policy, play
from lmi_bench.analysis.fleet.day import DAY_S, shaped
from lmi_bench.core.errors import InputError
from lmi_bench.engine.router import make_router

HOUR = 3600.0


def poisson(rate_per_s, number, seed=1):
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, size=number))


def erlang_c(servers, offered):
    """Chance that a request of an M/M/c queue waits; offered: rate times service time."""
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return last / (sum(terms) + last)


def played(rate_per_s, slots, machines, router):
    """Machines of 4 req/s: `slots` servers of 4 / slots each."""
    fleet = Fleet(capacity_per_s=4.0, slots=slots, start_s=0.0)
    return play(poisson(rate_per_s, 40_000), fleet, make_router(router, 3), machines=machines)


def expected_wait(rate_per_s, slots):
    """Share that waits, and mean wait in seconds, of one machine."""
    service_s = slots / 4.0
    chance = erlang_c(slots, rate_per_s * service_s)
    return chance, chance * service_s / (slots - rate_per_s * service_s)


@pytest.mark.parametrize("slots", [1, 8])
def test_one_machine_at_constant_load_is_the_queue_of_erlang(slots):
    waits_s = played(3.2, slots, 1, "least-outstanding").waits_s
    chance, mean_s = expected_wait(3.2, slots)
    assert (waits_s > 0).mean() == pytest.approx(chance, rel=0.05)
    assert waits_s.mean() == pytest.approx(mean_s, rel=0.12)


def test_a_random_router_makes_independent_queues_and_a_better_one_comes_near_a_common_queue():
    """Four machines: each has a quarter of the arrivals; nothing beats one queue of 32 servers."""
    at_random = played(4 * 3.2, 8, 4, "random").waits_s
    balanced = played(4 * 3.2, 8, 4, "least-outstanding").waits_s
    chance, mean_s = expected_wait(3.2, 8)
    common_s = erlang_c(32, 4 * 3.2 * 2) * 2 / (32 - 4 * 3.2 * 2)
    assert (at_random > 0).mean() == pytest.approx(chance, rel=0.06)
    assert at_random.mean() == pytest.approx(mean_s, rel=0.15)
    assert 0.9 * common_s < balanced.mean() < 0.6 * mean_s


FLUID = Fleet(capacity_per_s=100.0, slots=100, start_s=300.0)
"""So large that the queue is nearly a fluid."""


def test_what_waits_while_machines_start_is_the_area_between_load_and_capacity():
    """200 req/s on a machine of 100. Three one-minute means, known a minute late, show it at 240 s;
    at 540 s the next machine serves. By then 540 * 100 requests wait, 540 s at 100 req/s."""
    result = play(
        np.arange(0, 700, 1 / 200),
        FLUID,
        make_router("least-outstanding"),
        machines=1,
        policy=TargetTracking(target=100.0, max_machines=2),
    )
    assert result.events == ((240.0, 1, 2),)
    assert result.waits_s.max() == pytest.approx(540, rel=0.03)
    assert result.waits_s[560 * 200] < 540  # the new machine has an empty queue
    assert result.machine_hours == pytest.approx((700 + 460) / HOUR, rel=1e-3)


def test_a_ramp_leaves_the_backlog_of_its_fluid_limit():
    """80 req/s and 0.1 more each second; the mean of a poll's 30 s passes 1.1 * 90 at 210 s, since
    that from 180 to 210 s is 99.5. The machine serves at 510 s, 310 s after the load passed 100:
    0.1 * 310**2 / 2 requests wait, 48 s at 100 req/s."""
    end_s = 600.0
    count = np.arange(80 * end_s + 0.05 * end_s**2)
    arrivals_s = (-80 + np.sqrt(80**2 + 0.2 * count)) / 0.1
    result = play(
        arrivals_s, FLUID, make_router("least-outstanding"), machines=1, policy=Hpa(target=90.0, max_machines=2)
    )
    assert result.events == ((210.0, 1, 2),)
    waits_s = result.waits_s[(arrivals_s > 500) & (arrivals_s < 510)]
    assert waits_s.max() == pytest.approx(0.05 * 310**2 / 100, rel=0.1)


def test_kubernetes_doubles_at_most_and_keeps_what_a_recent_poll_wanted():
    """Load for 16 machines from the start to 600 s, then for 2: 1, 5 (four pods more), 10 (100 %),
    16; and down only 300 s after the last poll that saw the load."""
    arrivals_s = np.concatenate([np.arange(0, 600, 1 / 160), np.arange(600, 1500, 1 / 19)])
    fleet = Fleet(capacity_per_s=10.0, slots=10, start_s=0.0)
    policy = Hpa(target=10.0)
    result = play(arrivals_s, fleet, make_router("round-robin"), machines=1, policy=policy)
    ups = [event for event in result.events if event[2] > event[1]]
    assert ups == [(30.0, 1, 5), (60.0, 5, 10), (90.0, 10, 16)]
    first_down = next(event for event in result.events if event[2] < event[1])
    assert first_down == (900.0, 16, 2)
    assert result.peak_machines == 16


@pytest.mark.parametrize(
    ("more", "at_s"), [({"in_periods": 90}, 5460.0), ({"in_periods": 1, "delay_s": 7200.0}, 7260.0)]
)
def test_periods_long_past_are_looked_at(more, at_s):
    """Two machines that one minute and each after it want fewer: 90 minutes, or two hours late."""
    policy = TargetTracking(target=8.0, **more)
    fleet = Fleet(capacity_per_s=10.0, slots=10, start_s=60.0)
    router = make_router("least-outstanding")
    result = play(np.arange(0.0, 9000.0), fleet, router, machines=2, policy=policy)
    assert result.events == ((at_s, 2, 1),)


def test_target_tracking_waits_for_its_cooldowns():
    """Growing load: at most one change in 300 s, although each minute wants one more."""
    arrivals_s = np.sqrt(np.arange(0, 50_000) * 40.0)  # t / 20 req/s at time t
    fleet = Fleet(capacity_per_s=10.0, slots=10, start_s=60.0)
    policy = TargetTracking(target=8.0)
    result = play(arrivals_s, fleet, make_router("least-outstanding"), machines=1, policy=policy)
    times = [at_s for at_s, _, _ in result.events]
    assert len(times) >= 3
    assert min(later - sooner for sooner, later in pairwise(times)) >= 300


def test_a_start_does_not_wait_for_the_cooldown_of_a_stop():
    """Two machines of which one is stopped at 960 s, the fifteenth low minute and one for its
    delay; the load comes back at 900 s, and three high minutes show it at 1,140 s."""
    arrivals_s = np.concatenate([np.arange(0, 900, 1.0), np.arange(900, 1400, 1 / 20)])
    fleet = Fleet(capacity_per_s=40.0, slots=10, start_s=60.0)
    policy = TargetTracking(target=8.0)
    result = play(arrivals_s, fleet, make_router("least-outstanding"), machines=2, policy=policy)
    assert result.events == ((960.0, 2, 1), (1140.0, 1, 3))


def test_machines_are_paid_after_the_last_request_and_stopped_if_the_policy_says_so():
    fleet = Fleet(capacity_per_s=10.0, slots=10, start_s=0.0)
    router, arrivals_s = make_router("least-outstanding"), np.arange(0, 600, 1 / 19)
    flat = play(arrivals_s, fleet, router, machines=2, until_s=HOUR)
    assert flat.machine_hours == pytest.approx(2)
    scaled = play(arrivals_s, fleet, router, machines=2, policy=Hpa(target=10.0), until_s=HOUR)
    assert scaled.machine_hours == pytest.approx((HOUR + 900) / HOUR, abs=0.02)  # 300 s after 600


def test_a_day_has_the_arrivals_of_its_curve():
    curve = shaped("office", peak_per_s=2.0)
    arrivals_s = day_arrivals_s(curve)
    assert arrivals_s[-1] <= DAY_S
    assert len(arrivals_s) == pytest.approx(2.0 * HOUR * (11 * 0.2 + 8 + 0.6 * 5), rel=0.02)
    busy = ((arrivals_s > 10 * HOUR) & (arrivals_s < 16 * HOUR)).sum()
    assert busy == pytest.approx(2.0 * 6 * HOUR, rel=0.02)


def test_a_policy_is_read_with_its_settings():
    policy = parse_policy("target-tracking:target=2.5,scale_in_cooldown_s=600,max_machines=4")
    assert policy == TargetTracking(2.5, scale_in_cooldown_s=600.0, max_machines=4)
    assert parse_policy("hpa") == Hpa()


def test_a_load_without_measure_starts_all_machines_that_may_run():
    assert Hpa(max_machines=7).within(math.inf) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step", "write target-tracking or hpa"),
        ("hpa:speed=3", "'speed=3' is not one of target, metric"),
        ("hpa:metric=gpu", "use rate or outstanding"),
        ("hpa:target=-1", "target=-1 must be 0 or more"),
        ("hpa:period_s=0", "period_s=0 must be 1 or more"),
        ("target-tracking:out_periods=0", "out_periods=0 must be 1 or more"),
        ("hpa:up_percent=1e308", "up_percent=1e[+]308 must be 0 or more, at most 1e9"),
        ("hpa:min_machines=3,max_machines=2", "1 <= min_machines"),
    ],
)
def test_an_unusable_policy_says_why(text, message):
    with pytest.raises(InputError, match=message):
        parse_policy(text)
