"""Days of scaling against hand arithmetic and a second, minute-by-minute implementation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.analysis.fleet.day import DAY_S, LoadCurve, Scaling, load_curve_file, plan_day, play_day, shaped
from lmi_bench.analysis.fleet.start_up import DOUBT, StartUp, estimated_start_up, loads_in_parallel, parse_start_up
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError

HOUR = 3600.0
NO_PARTS = dict.fromkeys(("detection_s", "provisioning_s", "image_s", "weights_s", "compile_s", "warm_up_s"), 0.0)


def start_up(total_s, detection_s=0.0):
    parts = {"detection_s": detection_s, "provisioning_s": total_s - detection_s}
    return StartUp(**(NO_PARTS | parts))


def step_curve(low, high, start_hour=8, end_hour=20):
    """`high` between two hours, `low` else, with edges of one step."""
    edge = 10.0
    return LoadCurve(
        (0.0, start_hour * HOUR, start_hour * HOUR + edge, end_hour * HOUR, end_hour * HOUR + edge),
        (low, low, high, high, low),
    )


def test_start_up_is_the_sum_of_its_parts():
    assert StartUp(60, 180, 120, 60, 30, 10).total_s == 460
    parts = "detection=60,provisioning=180,image=120,weights=60,compile=30,warm-up=10"
    assert parse_start_up(parts) == StartUp(60, 180, 120, 60, 30, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [("detection=60,image=1", "missing: provisioning, weights"), ("soon", "seconds as a whole"), ("-5", "0 s or more")],
)
def test_no_part_of_the_start_up_is_guessed(text, message):
    with pytest.raises(InputError, match=message):
        parse_start_up(text)


@pytest.mark.parametrize(
    ("instance", "gigabytes", "layers", "degree", "published_s"),
    [  # from launch, image cached on the host: AWS 2026, and Anyscale 2023 from the download on
        ("ml.g6.2xlarge", 16.4, 36, 1, 258),
        ("ml.g5.2xlarge", 5.8, 28, 1, 164),
        ("ml.g5.xlarge", 6.5, 28, 1, 216),
        ("ml.p4de.24xlarge", 140, 80, 8, 265 + 134),
    ],
)
def test_an_estimated_start_up_is_near_published_ones(instance, gigabytes, layers, degree, published_s):
    estimate = estimated_start_up(
        find_instance(instance), weight_bytes=gigabytes * 1e9, num_layers=layers, tensor_parallel=degree
    )
    ratio = (estimate.total_s - estimate.detection_s) / published_s
    assert 1 / DOUBT < ratio < DOUBT


def test_copies_of_one_container_load_in_turn_where_the_host_cannot_hold_them():
    def started(workers, gigabytes, **more):
        return estimated_start_up(
            find_instance("ml.p5.48xlarge"),
            weight_bytes=gigabytes * 1e9,
            num_layers=36,
            tensor_parallel=1,
            workers=workers,
            **more,
        )

    one, many = started(1, 63), started(8, 63)
    assert loads_in_parallel(find_instance("ml.p5.48xlarge"), weight_bytes=63e9, workers=8)
    assert many.compile_s == one.compile_s
    assert one.weights_s < many.weights_s < 2 * one.weights_s
    assert started(8, 400).compile_s == 8 * one.compile_s
    assert started(1, 63, compiles=False).compile_s < one.compile_s / 2
    assert started(1, 63, downloads=3).weights_s > 2 * one.weights_s


def test_a_step_by_hand():
    """1 to 4 req/s from 8 to 20 o'clock, 1 req/s a machine, 600 s to start, paid from launch.

    Three machines are asked for at 8:00 and serve at 8:10, when 600 s * 3 req/s wait. Four machines
    for 4 req/s never work that off; at 20:00 they do at 3 req/s, in 600 s. So all but the night's
    requests miss, and 600 s of the night's.

    A target of 0.8 has two machines by night and five by day: 600 s * 2 req/s wait, which one spare
    machine works off in 1,200 s. The longest wait is 1,200 requests over two machines' 2 req/s.
    """
    exact = play_day(step_curve(1.0, 4.0), Scaling(1.0, 1.0), start_up(600))
    missed = 4 * 12 * HOUR + 600
    assert exact.slo_share == pytest.approx(1 - missed / (60 * HOUR), abs=0.002)
    spare = play_day(step_curve(1.0, 4.0), Scaling(1.0, 0.8), start_up(600))
    missed = 4 * (600 + 1200)
    assert spare.slo_share == pytest.approx(1 - missed / (60 * HOUR), abs=0.002)
    assert spare.worst_wait_s == pytest.approx(600, abs=15)
    # the day's three are paid for from launch, and 300 s more before scaling in
    assert spare.machine_hours == pytest.approx(24 * 2 + 12 * 3 + 3 * 300 / HOUR, abs=0.1)
    assert (spare.peak_machines, spare.launches) == (5, 3)


def test_time_before_the_launch_is_not_paid_for():
    late = play_day(step_curve(1.0, 4.0), Scaling(1.0, 0.8), start_up(600))
    seen = play_day(step_curve(1.0, 4.0), Scaling(1.0, 0.8), start_up(600, detection_s=240))
    assert late.machine_hours - seen.machine_hours == pytest.approx(3 * 240 / HOUR, abs=0.02)
    assert late.slo_share == seen.slo_share


def test_without_a_start_up_time_scaling_misses_nothing():
    day = play_day(shaped("sine", peak_per_s=20.0), Scaling(1.0, 1.0), start_up(0))
    assert day.slo_share == pytest.approx(1.0)


def reference(low, high, capacity, target, start_minutes, scale_in_minutes, days=2):
    """The same rules with a list of integers, a minute at a time, for a step from 8 to 20 h."""
    ready, orders, fewer = max(1, math.ceil(low / target)), [], 0
    backlog, good, total, paid = 0.0, 0.0, 0.0, 0
    for minute in range(days * 1440):
        load = high if 480 <= minute % 1440 < 1200 else low
        ready += sum(1 for at in orders if at == minute)
        orders = [at for at in orders if at > minute]
        want = max(1, math.ceil(load / target))
        orders += [minute + start_minutes] * max(0, want - ready - len(orders))
        if start_minutes == 0:
            ready, orders = ready + len(orders), []
        fewer = fewer + 1 if want < ready and backlog == 0 else 0
        if fewer > scale_in_minutes:
            ready, fewer = want, 0
        was = backlog
        backlog = max(0.0, backlog + 60 * (load - ready * capacity))
        if minute >= (days - 1) * 1440:
            total += 60 * load
            good += 60 * load if was == 0 and backlog == 0 else 0
            paid += ready + len(orders)
    return good / total, paid / 60


@settings(max_examples=15)
@given(
    low=st.integers(1, 4),
    rise=st.integers(0, 12),
    spare=st.sampled_from([1.0, 0.75, 0.5]),
    start_minutes=st.integers(1, 40),
)
def test_a_day_equals_the_independent_reference(low, rise, spare, start_minutes):
    high = float(low + rise)
    share, hours = reference(low, high, 1.0, spare, start_minutes, 5)
    curve = LoadCurve((0.0, 480 * 60 - 1e-6, 480 * 60.0, 1200 * 60 - 1e-6, 1200 * 60.0), (low, low, high, high, low))
    day = play_day(curve, Scaling(1.0, spare), start_up(60 * start_minutes), step_s=60.0)
    assert day.slo_share == pytest.approx(share, abs=1e-9)
    assert day.machine_hours == pytest.approx(hours, abs=1e-9)


def test_ten_times_the_load_takes_ten_times_the_machines():
    """2,334 machines carry 4,000 req/s as 234 carry 400, but for rounding up."""
    small, large = (
        plan_day(shaped("office", peak_per_s=peak_per_s), start_up(300), capacity_per_s=2.0)
        for peak_per_s in (400.0, 4000.0)
    )
    assert small.scales
    assert large.scales
    assert large.scaled.peak_machines == pytest.approx(10 * small.scaled.peak_machines, rel=0.01)
    assert large.scaled.machine_hours == pytest.approx(10 * small.scaled.machine_hours, rel=0.01)


def test_half_a_billion_machines_are_counted_not_listed():
    plan = plan_day(shaped("office", peak_per_s=1e9), start_up(300), capacity_per_s=2.0)
    assert plan.scales
    assert plan.flat_machines == 500_000_000


def test_a_peak_between_two_steps_is_refused():
    curve = LoadCurve((0.0, HOUR, HOUR + 0.4, HOUR + 0.8), (0.0, 0.0, 10.0, 0.0))
    with pytest.raises(InputError, match="peaks are shorter than a step of 10 s"):
        plan_day(curve, start_up(300), capacity_per_s=2.0)


def test_head_room_follows_growth_and_start_up():
    """From 2 to 10 req/s in two hours, a load grows by a quarter of 2 in 450 s: 10 / 1.25."""
    curve = shaped("office", peak_per_s=10.0, least_share=0.2)
    day = plan_day(curve, start_up(450), capacity_per_s=10.0)
    assert day.scaling.target_per_s == pytest.approx(8.0)


def test_the_steepest_growth_of_a_ramp_is_its_slope_over_its_start():
    """From 2 to 10 req/s in two hours: 8 / 7200 a second over 2."""
    curve = shaped("office", peak_per_s=10.0, least_share=0.2)
    assert curve.steepest_growth_per_s() == pytest.approx(8 / 7200 / 2)


def test_a_gentle_day_is_scaled_and_a_cliff_is_not():
    gentle = plan_day(shaped("sine", peak_per_s=40.0), start_up(460), capacity_per_s=2.0)
    assert gentle.scales
    assert gentle.scaled.slo_share >= 0.99
    assert gentle.scaled.machine_hours < gentle.flat.machine_hours
    cliff = plan_day(step_curve(2.0, 40.0), start_up(1800), capacity_per_s=2.0)
    assert not cliff.scales
    assert cliff.chosen is cliff.flat
    assert cliff.flat.slo_share == pytest.approx(1.0)


def test_a_flat_load_is_served_by_a_flat_fleet():
    plan = plan_day(shaped("flat", peak_per_s=7.0), start_up(460), capacity_per_s=2.0)
    assert not plan.scales
    assert plan.flat_machines == 4
    assert plan.flat.machine_hours == pytest.approx(96.0)


def test_a_slower_start_never_saves_and_never_serves_better():
    plans = [
        plan_day(shaped("office", peak_per_s=30.0), start_up(total), capacity_per_s=2.0) for total in (0, 600, 1800)
    ]
    hours = [plan.scaled.machine_hours for plan in plans]
    assert hours == sorted(hours)


def test_a_curve_is_read_from_a_file(tmp_path):
    path = tmp_path / "day.csv"
    path.write_text("hour,rate_per_s\n0,1\n12,5\n", encoding="utf-8")
    curve = load_curve_file(path)
    assert curve.peak_per_s == 5.0
    assert curve.scaled_to(10.0).rates_per_s == (2.0, 10.0)
    assert curve.rates_at(18 * HOUR) == pytest.approx(3.0)  # half-way back to 1 at midnight
    assert DAY_S == 24 * HOUR


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hour,rate\n0,1\n", "columns hour and rate_per_s"),
        ("hour,rate_per_s\n0,many\n", "columns hour and rate_per_s"),
        ("hour,rate_per_s\n", "at least one point"),
        ("hour,rate_per_s\n3,1\n2,1\n", "must rise"),
        ("hour,rate_per_s\n25,1\n", "hours 0 to 24"),
        ("hour,rate_per_s\n1,0\n", "one above 0"),
        ("hour,rate_per_s\n1,nan\n", "0 or more"),
    ],
)
def test_a_faulty_curve_is_refused(tmp_path, text, message):
    path = tmp_path / "day.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_curve_file(path)
