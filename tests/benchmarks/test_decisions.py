"""The rule of decisions on published tables, and the conformal factor, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.planner_accuracy import row_keys, worse
from benchmarks.published_decisions import Option, decide, decisive
from benchmarks.support.accuracy_tables import Figure
from benchmarks.support.error_constants import conformal
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import PrefillPool, Setup, Speculation
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load

CHEAP = Option(cost=1.0, latency=40.0, upper=45.0, true_cost=1.2, true_latency=55.0)
MIDDLE = Option(cost=2.0, latency=30.0, upper=34.0, true_cost=2.0, true_latency=33.0)
FAST = Option(cost=5.0, latency=10.0, upper=11.0, true_cost=5.0, true_latency=11.0)
ALL = (CHEAP, MIDDLE, FAST)


def test_the_cheapest_whose_upper_end_keeps_the_limit_is_chosen():
    assert decide(ALL, 46.0).broken  # 45 looks safe and is 55
    assert decide(ALL, 44.0).regret == pytest.approx(1.0)
    assert decide(ALL, 33.5).regret == pytest.approx(2.5)  # FAST, where MIDDLE keeps 33.5 too


def test_without_a_sure_one_the_safest_likely_one_is_chosen_or_none():
    assert decide((CHEAP, MIDDLE), 33.0).regret == pytest.approx(1.0)
    assert not decide((MIDDLE, Option(9, 40, 44, 9, 20)), 25.0).made
    assert decide(ALL, 5.0) is None  # nothing keeps it


def test_measured_next_is_what_saves_most_times_its_chance():
    options = dict(enumerate(ALL))
    assert decisive(options, frozenset(), 33.5) == 1  # 87 % of 3/5 of the cost; 3 % of 4/5
    known = options | {1: Option(2.0, 33.0, 33.0, 2.0, 33.0)}
    assert decisive(known, frozenset({1}), 33.5) == 0  # a chance of 3 % to halve the cost
    assert decisive(options, frozenset(), 46.0) is None  # nothing is cheaper
    assert decisive(options, frozenset(), 5.0) is None  # nothing has a chance


def figure(table, reach):
    """A figure whose measured value lies at this share of the interval's half-width."""
    return Figure(table, "cells", "tpot_ms", 1.0, math.exp(-1), math.e, math.exp(reach), 4, 0, False)


def test_the_conformal_factor_covers_four_of_five_of_one_more_table():
    """Four tables, so 80 % * 5 / 4 of their figures: all of them. Of nine, 89 %, each alike, and
    of all figures; a table of four figures counts among these alone."""
    four = [figure(str(n), 0.1 * n) for n in range(1, 5)] * 5
    assert conformal(four, None)["widen"] == pytest.approx(0.4, rel=0.03)
    nine = [figure(str(n), 0.1 * n) for n in range(1, 10)] * 5
    assert conformal(nine, None)["widen"] == pytest.approx(0.8, rel=0.03)
    many = [*nine, *[figure("9", 0.9)] * 50]
    assert conformal(many, None)["widen"] == pytest.approx(0.9, rel=0.03)
    assert conformal(many, "9")["widen"] == pytest.approx(0.8, rel=0.03)
    few = [*nine, *[figure("few", 2.0)] * 4]
    assert conformal(few, None)["widen"] == pytest.approx(0.9, rel=0.03)


def test_a_group_is_worse_by_two_points_and_a_tenth():
    page = {"a": {"median": 0.05, "p90": 0.4, "covered": 0.8}}
    assert worse({"a": {"median": 0.069, "p90": 0.43, "covered": 0.79}}, page) == []
    found = worse({"a": {"median": 0.071, "p90": 0.45, "covered": 0.7}}, page)
    assert [text.split(": ")[1].split()[0] for text in found] == ["median", "p90", "covered"]
    assert worse({}, page) == []


def test_a_group_is_worse_by_wider_intervals_too_but_for_decisions_that_have_none():
    page = {"a": {"median": 0.05, "p90": 0.4, "covered": 0.8, "half_width": 0.1}}
    assert worse({"a": page["a"] | {"half_width": 0.119}}, page) == []
    assert worse({"a": page["a"] | {"half_width": 0.121}}, page) == ["a: half_width 12.1%, was 10.0%"]
    wide = {"a": page["a"] | {"half_width": 0.5}}
    assert worse({"a": page["a"] | {"half_width": 0.54}}, wide) == []
    assert worse({"a": page["a"] | {"half_width": 0.56}}, wide) == ["a: half_width 56.0%, was 50.0%"]
    assert worse(page, {"a": {name: page["a"][name] for name in ("median", "p90", "covered")}}) == []


def test_a_group_of_the_page_is_missed_if_its_table_is_at_hand():
    name = "By table: own cells: vllm, H100 | TPOT"
    page = {name: {"median": 0.05, "p90": 0.4, "covered": 0.8, "half_width": 0.1}}
    assert worse({}, page, ["vllm, H200", "llm, H100"]) == []
    assert worse({}, page, ["vllm, H100"]) == [f"{name}: absent, though its table is at hand"]


def test_rows_that_are_fetched_are_named_by_lengths_layout_and_load():
    one = Setup(find_model("llama-3.1-8b"), find_instance("ml.p5.48xlarge"), 1, "float16")
    drafting = replace(one, tensor_parallel=4, speculation=Speculation(3, 0.65))
    level = MeasuredLevel(one, 256, 64, Load(8), num_requests=80)
    levels = [
        replace(level, load=Load(16)),
        level,
        replace(level, setup=drafting, load=Load(rate_per_s=2.5)),
        replace(level, replicas=3, load=Load(9), prefill=PrefillPool(drafting, 2)),
    ]
    assert row_keys(levels).split("; ") == [
        "256/64 TP 1 concurrency 8, 16",
        "256/64 TP 1 x 3, prompts TP 4 ngram 3 x 2 concurrency 9",
        "256/64 TP 4 ngram 3 req/s 2.5",
    ]
