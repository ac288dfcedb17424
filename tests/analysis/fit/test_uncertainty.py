"""The same load has the same 80 % interval, and the same silence, whatever way it is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fit.fit import fit_of_profile
from lmi_bench.analysis.fit.forecast import forecast, simulated_forecast
from lmi_bench.analysis.fit.uncertainty import Factor, Uncertainty, under_load
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_19, VLLM_V0_PRIOR
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.router import RoundRobin

SETUPS = [
    (TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 1, 256, 256),
    (VLLM_0_19, "llama-2-13b", "ml.g5.12xlarge", 4, 128, 64),
    (VLLM_V0_PRIOR, "mistral-7b-v0.1", "ml.p4d.24xlarge", 2, 512, 40),
]


def setup_of(model, machine, degree, input_tokens, output_tokens):
    return MeasuredLevel(
        Setup(find_model(model), find_instance(machine), degree, "float16"),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        load=Load(1),
        num_requests=1,
    )


def relative(figure):
    return (figure.low / figure.value, figure.high / figure.value)


def capacity_per_s(profile, setup):
    load = under_load(setup, profile, Load(rate_per_s=1.0))
    return Uncertainty.of(profile, load).capacity_tokens_per_s.value / setup.output_tokens


@pytest.mark.parametrize("share", [0.3, 0.75, 0.9, 1.3, None])
@pytest.mark.parametrize(("profile", *"mndio"), SETUPS)
def test_a_mix_of_one_kind_is_as_sure_as_requests_of_its_lengths(profile, m, n, d, i, o, share):
    """`predict --mix I/O` and `predict --input-tokens I --output-tokens O`; None: four users."""
    setup = setup_of(m, n, d, i, o)
    rate = None if share is None else share * capacity_per_s(profile, setup)
    users = 4 if share is None else None
    load = under_load(setup, profile, Load(users, rate))
    like = forecast(fit_of_profile(profile, [load]), load)
    mixed = simulated_forecast(
        setup,
        profile,
        LevelSpec(0, Load(concurrency=users, rate_per_s=rate), num_requests=60),
        lambda number: PlannedRequest(number, 0.0, i, o),
        total_tokens=i + o,
        seed=0,
        router=RoundRobin(),
    )
    assert mixed.uncertainty.withheld == like.uncertainty.withheld
    assert (mixed.uncertainty.withheld is not None) == (share is not None and share > 0.8)
    assert mixed.uncertainty.load_share == like.uncertainty.load_share
    assert mixed.uncertainty.capacity_tokens_per_s == like.uncertainty.capacity_tokens_per_s
    for key, figure in like.figures.items():
        other = mixed.figures[key]
        assert (other is None) == (figure is None)
        if figure is not None:
            assert relative(other) == pytest.approx(relative(figure))
    assert (mixed.figures["ttft_p90_ms"] is None) == (mixed.uncertainty.withheld is not None)


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize(("profile", *"mndio"), SETUPS)
def test_a_recommended_fleet_is_as_sure_as_the_prediction_of_its_copies(profile, m, n, d, i, o, share):
    setup = setup_of(m, n, d, i, o)
    rate = share * capacity_per_s(profile, setup)
    machine = find_instance(n)
    copies = machine.num_accelerators // d
    answer = recommend(
        RecommendRequest(
            Workload(find_model(m), "float16", i, o),
            profile,
            load=Load(rate_per_s=rate * copies),
            instances=(machine,),
            degrees=(d,),
        )
    )
    fleet = answer.recommended
    beside = replace(setup, setup=setup.setup.beside(copies))
    load = under_load(beside, profile, Load(rate_per_s=rate / fleet.instances))
    like = forecast(fit_of_profile(profile, [load]), load)
    assert fleet.basis == "simulated"
    assert relative(fleet.figures["capacity_rate_per_s"]) == pytest.approx(
        relative(like.uncertainty.capacity_tokens_per_s), rel=1e-6
    )
    for name, key in (
        ("ttft_p90_ms", "ttft_ms"),
        ("tpot_p50_ms", "tpot_ms"),
        ("latency_per_token_p50_ms", "latency_ms_per_token"),
        ("latency_per_token_p90_ms", "latency_p90_ms_per_token"),
    ):
        assert relative(fleet.figures[name]) == pytest.approx(relative(like.figures[key]))


def test_the_interval_of_a_figure_lies_around_what_neighbours_say_of_it():
    """Measured a tenth above the prediction, within a quarter of it: 1.1 / 1.25 to 1.1 * 1.25."""
    figure = Factor(centre=1.1, down=1.25, up=1.25).around(100.0)
    assert figure.value == pytest.approx(110.0)
    assert (figure.low, figure.high) == pytest.approx((88.0, 137.5))


def test_users_known_to_be_spread_out_have_no_first_token_of_users_in_step():
    setup = setup_of("llama-2-7b", "ml.g5.2xlarge", 1, 512, 64)
    load = under_load(setup, VLLM_0_19, Load(16))
    open_, known = (Uncertainty.of(VLLM_0_19, load, spread=s).factors for s in (False, True))
    assert known["ttft_mean_s"].up < open_["ttft_mean_s"].up
    assert known["ttft_mean_s"].down == pytest.approx(open_["ttft_mean_s"].down)


@pytest.mark.parametrize("users", [1, 48])
@pytest.mark.parametrize(("copies", "machine"), [(2, "ml.g6.12xlarge"), (8, "ml.p4d.24xlarge")])
def test_copies_that_share_a_host_give_less_than_their_sum_and_may_give_far_less(copies, machine, users):
    cell = setup_of("llama-2-7b", machine, 1, 256, 256)
    known = fit_of_profile(VLLM_0_19, [cell])
    one = forecast(known, under_load(cell, VLLM_0_19, Load(users))).figures
    shared = replace(cell, setup=cell.setup.beside(copies), replicas=copies)
    level = under_load(shared, VLLM_0_19, Load(users * copies))
    together = forecast(known, level).figures
    for key, figure in one.items():
        lone, several = figure, together[key]
        if key == "throughput_tokens_per_s":
            lone = lone.times(copies)
            assert several.value < lone.value
            assert several.high <= lone.high * (1 + 1e-3)
            assert several.low / several.value < 0.995 * lone.low / lone.value
        else:
            assert several.value >= lone.value * (1 - 1e-3)
            assert several.low >= lone.low * (1 - 1e-3)
            assert several.high / several.value > 1.002 * lone.high / lone.value


def test_copies_on_hosts_of_their_own_give_their_sum():
    setup = setup_of("llama-2-7b", "ml.g5.2xlarge", 1, 256, 256).setup
    assert setup.beside(3) == setup
