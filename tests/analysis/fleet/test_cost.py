"""Cost against hand arithmetic and the published formula."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.fleet.money import blended_as_published, usd_per_1m_tokens


def test_a_million_tokens_cost_the_hours_that_they_take():
    """500 tok/s make 1.8 million tokens an hour; at 1.80 USD/h a million is 1 USD."""
    assert usd_per_1m_tokens(1.80, 500.0) == pytest.approx(1.0)


def test_without_a_price_there_is_no_cost():
    assert usd_per_1m_tokens(None, 500.0) is None


BLENDED = {
    "price_usd_per_hour": 36.0,
    "concurrency": 10,
    "itl_p50_s": 0.02,
    "input_tokens": 768,
    "output_tokens": 256,
    "slots": 16,
}


def test_the_blended_price_is_the_posts_formula():
    """10 / 0.02 s = 500 tok/s = 1.8 million an hour: 36 / 1.8 / 4 = 5 USD; 20 % off: 4 USD."""
    assert blended_as_published(**BLENDED) == (pytest.approx(5.0), None)
    assert blended_as_published(**BLENDED, discount=0.2)[0] == pytest.approx(4.0)


def test_another_ratio_divides_by_it_plus_one():
    changed = BLENDED | {"input_tokens": 256}
    assert blended_as_published(**changed, ratio=1.0)[0] == pytest.approx(36 / 1.8 / 2)


def test_the_convention_is_applied_to_the_posts_own_workload_with_a_note():
    """The post divides by 4 for questions of 622 tokens and answers of 250."""
    value, note = blended_as_published(**BLENDED | {"input_tokens": 622, "output_tokens": 250})
    assert value == pytest.approx(36 / 1.8 / 4)
    assert "3 input tokens for each output token; this workload has 622 to 250" in note


@pytest.mark.parametrize(
    ("change", "reason"), [({"concurrency": 17}, "16 can"), ({"price_usd_per_hour": None}, "no price")]
)
def test_where_the_blended_price_is_wrong_it_is_withheld_with_the_reason(change, reason):
    value, why = blended_as_published(**BLENDED | change)
    assert value is None
    assert reason in why
