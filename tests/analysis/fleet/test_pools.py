"""Prefill and decode in separate pools: the cheapest sizes that keep the SLOs."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from lmi_bench.analysis.fleet import pools
from lmi_bench.analysis.fleet.money import Requirements
from lmi_bench.analysis.fleet.recommender import no_progress, screen
from lmi_bench.analysis.fleet.recommender import recommend as rank
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.cells import pools_of
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_19
from lmi_bench.analysis.model.capacity import scheduler_config_for
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.recommend import recommend
from lmi_bench.jobs.settings.recommend import RecommendSettings
from lmi_bench.report.recommendation_view import pools_facts
from tests.end_to_end.commands import lmi_bench

LONG = Workload(find_model("llama-3.1-70b"), "float8", 4000, 300)
H100 = (find_instance("ml.p5.48xlarge"),)


def asked(rate_per_s=20.0, slos=("ttft_p90<=1s", "itl_p90<=40ms"), **options):
    limits = tuple(parse_slo(slo) for slo in slos)
    known = {"workload": LONG, "instances": H100, "load": Load(rate_per_s=rate_per_s)} | options
    return RecommendRequest(profile=VLLM_0_19, slos=limits, **known)


def best_of(request):
    return pools.best_pools(request, screen(request, no_progress)[0])


@pytest.fixture(scope="module")
def best():
    return best_of(asked())


def pair_of(request, best):
    """The pair of degrees that a fleet was sized from."""
    layouts, _ = screen(request, no_progress)
    degrees = best.prefill_tensor_parallel, best.decode_tensor_parallel
    for pair in pools._pairs(request, layouts):
        own = pair.one.prefill.setup.tensor_parallel, pair.planned[0].tensor_parallel
        if own == degrees and (pair.planned[0].setting.describe() or None) == best.engine:
            return pair
    raise AssertionError(degrees)


@pytest.mark.parametrize(
    "limit", [{"max_usd_per_hour": 60.0}, {"max_usd_per_month": 60.0 * 730}, {"max_usd_per_1m_output": 60 / 21.6}]
)
def test_pools_above_the_budget_are_none(limit):
    """20 req/s of 300 tokens are 21.6 million an hour."""
    answer = best_of(asked(requirements=Requirements(**limit), degrees=(8,)))
    assert str(answer).startswith("over the budget: two pools cost at least USD ")


def test_pools_are_sized_for_the_least_throughput(best):
    twice = asked(requirements=Requirements(min_throughput_tokens_per_s=2 * 20 * 300))
    assert pair_of(twice, best).wanted_per_s == pytest.approx(2 * pair_of(asked(), best).wanted_per_s)


def test_both_pools_fill_whole_machines_and_keep_every_slo(best):
    used = best.prefill_workers * best.prefill_tensor_parallel
    used += best.decode_workers * best.decode_tensor_parallel
    assert used <= 8 * best.instances
    assert 8 * best.instances - used < min(best.prefill_tensor_parallel, best.decode_tensor_parallel)
    assert best.price_usd_per_hour == pytest.approx(best.instances * H100[0].price_usd_per_hour)
    assert {outlook.confidence for outlook in best.slos} <= {"sure", "likely"}
    for outlook in best.slos:
        assert outlook.predicted_ms <= outlook.limit_ms


def test_the_load_is_at_most_eighty_percent_of_what_both_pools_carry(best):
    request = asked()
    cell = pair_of(request, best).on_machines(best.prefill_workers, best.decode_workers).cell
    carried = pools_of(VLLM_0_19, cell).most.rate_per_s
    assert request.rate_per_s <= 0.8 * carried * (1 + 1e-9)


@pytest.mark.parametrize(
    ("slos", "limits"),
    [
        (("ttft_p90<=1s", "itl_p90<=40ms"), {"ttft_s": 1.0, "tpot_s": 0.040}),
        (("ttft_p90<=730ms", "tpot_mean<=40ms"), {"ttft_s": 0.73, "tpot_s": 0.040}),
        (("e2e_p90<=6s",), {"e2e_s": 6.0}),
        (("latency_per_token_p90<=20ms",), {"e2e_s": 6.0}),
    ],
)
def test_no_smaller_pools_keep_the_limits_in_closed_form(slos, limits):
    """Every smaller pair of numbers is tried; nothing is left to the search."""
    request = asked(rate_per_s=100.0, slos=slos)
    (pair,) = (
        each
        for each in pools._pairs(request, screen(request, no_progress)[0])
        if each.planned[0].tensor_parallel == 4
        and each.one.prefill.setup.tensor_parallel == 2
        and not each.planned[0].setting.describe()
    )
    slower, first = pair.planned[1].factors.steps, pair.planned[1].factors.ttft
    wanted = request.rate_per_s * max(slower, 1 / 0.8)
    fewest = math.inf
    for prefill, decode in itertools.product(range(1, 60), repeat=2):
        both = replace(pair.pools, prefill_workers=prefill, decode_workers=decode)
        point = both.at_rate(wanted)
        if point is None:
            continue
        found = {
            "ttft_s": point.ttft_s * first,
            "tpot_s": point.tpot_s * slower,
            "e2e_s": point.e2e_s(LONG.output_tokens) * slower,
        }
        if all(found[name] <= limit for name, limit in limits.items()):
            fewest = min(fewest, math.ceil((prefill * 2 + decode * 4) / 8))
    assert pair.smallest().machines == fewest


def test_caches_move_at_the_rate_of_the_machines(best):
    """Eight H100 of one machine share NVLink; workers on several send over the network."""
    pair = pair_of(asked(), best)
    one, two = pair.on_machines(1, 1), pair.on_machines(1, 1, more=1)
    assert (one.machines, two.machines) == (1, 2)
    links = [size.cell.prefill.link_bytes_per_s for size in (one, two)]
    assert links == [450e9, 50e9]


def test_more_load_and_stricter_limits_never_cost_less(best):
    twice = best_of(asked(rate_per_s=40.0))
    strict = best_of(asked(slos=("ttft_p90<=1s", "itl_p90<=20ms")))
    assert best.price_usd_per_hour <= min(twice.price_usd_per_hour, strict.price_usd_per_hour)


def test_limits_on_whole_answers_size_the_pools_too():
    slow, fast = (best_of(asked(slos=(f"e2e_p90<={limit}s",))) for limit in ("30", "6"))
    assert fast.slo_figures[0].value <= 6000
    assert slow.price_usd_per_hour <= fast.price_usd_per_hour


def test_every_prefill_worker_holds_the_weights():
    """With DP attention each group has all of attention: fewer devices may not hold it."""
    machine = find_instance("ml.p6-b200.48xlarge")
    workload = Workload(find_model("deepseek-v3"), "float8", 4000, 500)
    settings = (AS_STATED, EngineSetting(expert_parallel=True, dp_attention=True))
    request = asked(workload=workload, instances=(machine,), settings=settings)
    pairs = list(pools._pairs(request, screen(request, no_progress)[0]))
    assert {pair.one.prefill.setup.tensor_parallel for pair in pairs} == {4, 8}
    for pair in pairs:
        scheduler_config_for(pair.one.prefill.setup, VLLM_0_19, 4500, prompts_alone=True)


def test_where_no_size_is_enough_the_reason_is_said():
    assert "no machine" in best_of(asked(slos=("itl_p90<=1ms",)))
    lone = (find_instance("ml.g5.2xlarge"),)
    assert "no machine" in best_of(asked(instances=lone))  # the model does not fit


def test_pools_are_told_of_by_the_closed_form_where_they_cost_a_tenth_less(best):
    request, usd = asked(), best.price_usd_per_hour
    layouts = screen(request, no_progress)[0]
    told = pools.cheaper_pools(request, layouts, usd / 0.85)
    assert told.startswith(f"{best.instances} x ml.p5.48xlarge may do for USD ")
    assert f"{usd:,.2f} per hour, 15% less than recommended" in told
    assert pools.cheaper_pools(request, layouts, usd / 0.95) is None
    assert "less than" not in pools.cheaper_pools(request, layouts, math.inf)
    poor = asked(requirements=Requirements(max_usd_per_hour=0.9 * usd))
    assert pools.cheaper_pools(poor, layouts, math.inf) is None


@pytest.fixture(scope="module")
def long_prompts():
    """Prompts of 8000 tokens, between which 30 ms are left: 4 x 8 H100, in pools 3 x 8."""
    return RecommendSettings(
        model="llama-3.1-70b",
        input_tokens=8000,
        output_tokens=200,
        rate=5.0,
        slo=("ttft_p90<=3s", "itl_p90<=30ms"),
        instance=("ml.p5.48xlarge",),
        tensor_parallel=(2, 4, 8),
    )


def test_recommend_names_cheaper_pools_without_being_asked(long_prompts):
    advice = recommend(long_prompts)
    alone = rank(advice.request).recommended
    assert advice.answer.recommended.instances == alone.instances == 4
    assert advice.pools.startswith("3 x ml.p5.48xlarge may do for USD ~189.89 per hour, 25% less")
    assert pools_facts(advice.to_json()).items == (("fleet", advice.pools),)


@pytest.mark.parametrize(
    "other", [{"slo": ()}, {"objective": "latency"}, {"profile": "tgi-3"}, {"prefix_hit": 0.5}, {"rate": 0.1}]
)
def test_no_pools_are_named_where_they_are_no_answer(long_prompts, other):
    """No limit, another objective, an engine without pools, a prefix cache, too little load."""
    assert recommend(replace(long_prompts, **other)).pools is None


def test_a_rate_is_needed_and_no_prefix_cache():
    with pytest.raises(InputError, match="add --rate"):
        best_of(asked(load=Load(8, think_time_s=1.0)))
    with pytest.raises(InputError, match="without a prefix cache"):
        best_of(asked(workload=replace(LONG, cached_tokens=1000)))


def test_the_command_shows_them_beside_the_recommended_fleet(tmp_path):
    args = (
        "recommend",
        "--model",
        "llama-3.1-70b",
        "--input-tokens",
        "4000",
        "--output-tokens",
        "300",
        "--rate",
        "5",
        "--slo",
        "ttft_p90<=2s",
        "--instance",
        "ml.p5.48xlarge",
    )
    plain = lmi_bench(*args, "--json", tmp_path / "plain.json")
    both = lmi_bench(*args, "--disaggregate", "--json", tmp_path / "both.json")
    assert "Prefill and decode in separate pools:" in both.stdout
    assert "separate pools" not in plain.stdout
    own, more = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "both"))
    apart = more.pop("disaggregated")
    assert own == more
    page = tmp_path / "page.html"
    lmi_bench("report", "--recommendation", tmp_path / "both.json", "-o", page)
    workers = f"{apart['prefill_workers']} prefill (TP {apart['prefill_tensor_parallel']})"
    assert workers in page.read_text("utf-8")
