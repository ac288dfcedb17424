"""The level that is named is the one worth most, and what it shows changes the answer."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import FunctionType

import numpy as np
import pytest

from lmi_bench.analysis.fleet.measured_load import MeasuredLoad
from lmi_bench.analysis.fleet.ranking import decisive_measurements
from lmi_bench.analysis.fleet.recommender import prepare, recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Layout, Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import parse_slo

MACHINE = find_instance("ml.g5.2xlarge")
LAYOUT = Layout(MACHINE, 1)
REQUEST = RecommendRequest(
    Workload(find_model("llama-2-7b"), "float16", 128, 12),
    replace(TGI_2023, max_waiting_tokens=0),
    load=Load(rate_per_s=20.0),
    slos=(parse_slo("latency_per_token_p90<=80ms"),),
    instances=(MACHINE,),
    degrees=(1,),
)


def level(rate_per_s, ms_per_token):
    """400 requests of twelve tokens, all equally fast."""
    times = [ms_per_token / 1e3 * (index + 1) for index in range(12)]
    records = tuple(
        RequestRecord(i, float(i), Exchange(float(i), tuple(i + each for each in times))) for i in range(400)
    )
    return MeasuredLoad(LAYOUT.copy_key, rate_per_s, records)


@pytest.fixture(scope="module")
def prepared():
    return prepare(REQUEST)


def ask(prepared, *measured):
    return recommend(replace(REQUEST, measured=measured), prepared=prepared)


def test_a_measured_level_that_keeps_the_slos_saves_a_machine(prepared):
    before = ask(prepared).recommended.instances
    answer = ask(prepared, level(REQUEST.rate_per_s / (before - 1), 20.0))
    assert answer.recommended.instances <= before - 1
    assert answer.recommended.slos[0].confidence == "measured"


def test_a_measured_level_that_misses_the_slos_costs_a_machine(prepared):
    before = ask(prepared).recommended.instances
    after = ask(prepared, level(REQUEST.rate_per_s / before, 200.0)).recommended.instances
    assert after > before


def test_a_level_of_another_device_changes_nothing(prepared):
    before = ask(prepared).recommended.instances
    other = replace(level(1.0, 200.0), copy_key=("L40S", *LAYOUT.engine_key[1:]))
    assert ask(prepared, other).recommended.instances == before


def test_the_level_that_may_save_most_is_named_first(prepared):
    """Worth is chance * saving, reckoned here from each fleet of one layout."""
    answer = ask(prepared)
    fleet = answer.recommended.instances
    (_, copy), *_ = prepared[0]
    belief = copy.belief(keeps_slos=True)
    worth = {n: belief.chance(REQUEST.rate_per_s / n) * (fleet - n) for n in range(1, fleet)}
    best = max(worth, key=worth.get)
    first = answer.measure_next[0]
    assert first.machines == best
    assert first.rate_per_s == pytest.approx(REQUEST.rate_per_s / best)
    assert first.saves_usd_per_hour == pytest.approx((fleet - best) * MACHINE.price_usd_per_hour)


def test_a_fleet_that_was_measured_at_its_load_needs_no_confirming(prepared):
    answer, measured, fleet = ask(prepared), [], None
    while answer.recommended.instances != fleet:  # a level that is kept may allow a smaller fleet
        fleet = answer.recommended.instances
        measured.append(level(REQUEST.rate_per_s / fleet, 20.0))
        answer = ask(prepared, *measured)
    assert all(probe.saves_usd_per_hour > 0 for probe in answer.measure_next)


def test_without_slos_or_by_latency_no_level_decides(prepared):
    layouts = prepared[0]
    assert decisive_measurements(replace(REQUEST, slos=()), layouts, None) == []
    assert decisive_measurements(replace(REQUEST, objective="latency"), layouts, None) == []


def test_a_level_on_the_line_is_not_measured_again(prepared):
    """Every tenth of 4,000 requests too slow: the capacity is that rate, within some per cent."""
    before = ask(prepared).recommended.instances
    rate = REQUEST.rate_per_s / (before - 1)
    fast, slow = (level(rate, ms).records[:1] for ms in (20.0, 200.0))
    records = tuple(replace(slow[0] if i % 10 == 0 else fast[0], request_id=i) for i in range(4000))
    answer = ask(prepared, MeasuredLoad(LAYOUT.copy_key, rate, records))
    assert answer.recommended.instances >= before
    assert all(probe.rate_per_s != pytest.approx(rate) for probe in answer.measure_next)


def parts(value):
    """A value part by part, objects without an equality of their own included; caches left out."""
    if is_dataclass(value):
        return [parts(getattr(value, each.name)) for each in fields(value) if each.compare]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [parts(each) for each in value]
    if hasattr(value, "__dict__") and not isinstance(value, Enum | type | FunctionType):
        return parts(sorted(vars(value).items()))
    return value


def test_an_answer_changes_nothing_that_it_is_given():
    """Not the copies of the layouts, in a look of fifteen minutes or in a nearest layout either."""
    request = replace(
        REQUEST,
        workload=replace(REQUEST.workload, input_tokens=256, output_tokens=256),
        load=Load(rate_per_s=2.0),
        slos=(parse_slo("ttft_p90<=60ms"),),
    )
    tight = replace(REQUEST, slos=(parse_slo("ttft_p90<=60ms"),), simulate_long=True)
    for asked in (REQUEST, replace(REQUEST, simulate_long=True), tight, request):
        given = prepare(asked)
        before = parts(deepcopy(given))
        first = recommend(asked, prepared=given).to_json()
        assert parts(given) == before
        recommend(replace(asked, measured=(level(1.0, 200.0),)), prepared=given)
        assert parts(given) == before
        assert recommend(asked, prepared=given).to_json() == first


def test_no_level_is_proposed_where_no_load_keeps_the_slos():
    """A lone request to the nearest layout takes 82 ms of 60: measuring it decides nothing."""
    machines = tuple(find_instance(name) for name in ("ml.g5.2xlarge", "ml.g5.12xlarge"))
    answer = recommend(
        RecommendRequest(
            Workload(find_model("llama-2-7b"), "float16", 256, 256),
            TGI_2023,
            load=Load(rate_per_s=2.0),
            slos=(parse_slo("ttft_p90<=60ms"),),
            instances=machines,
        )
    )
    assert answer.missed == "the SLOs"
    assert answer.measure_next == ()
