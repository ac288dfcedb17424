"""The user's own prices and the platforms'."""

from __future__ import annotations

import pytest

from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.prices import load_price_list, on_platform, reprice
from lmi_bench.core.errors import InputError

LIST = """
prices:
  - instance: g5.2xlarge
    usd_per_hour: 1.7
    region: eu-west-1
    date: 2026-11-01
    component: Hosting
    savings_plan_usd_per_hour: 1.2
"""


@pytest.fixture
def price_file(tmp_path):
    def write(text):
        path = tmp_path / "prices.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_users_price_overrides_with_its_region_date_and_component(price_file):
    (machine, other) = reprice(
        [find_instance("ml.g5.2xlarge"), find_instance("ml.g5.12xlarge")],
        price_list=load_price_list(price_file(LIST)),
    )
    assert machine.price_usd_per_hour == 1.7
    assert machine.price_provenance == "eu-west-1, 2026-11-01, Hosting: price list prices.yaml"
    assert machine.rates_usd_per_hour == (("savings-plan", 1.2),)
    assert other.price_usd_per_hour == 7.09


def test_ec2_prices_are_cheaper_and_never_filled_in():
    for instance in all_instances():
        there = on_platform(instance, "ec2")
        assert there.price_usd_per_hour == instance.ec2_price_usd_per_hour
        if there.price_usd_per_hour is not None:
            assert there.price_provenance.startswith("us-east-1, 2026-07-20, EC2")
            if instance.price_usd_per_hour is not None:
                assert there.price_usd_per_hour < instance.price_usd_per_hour


def test_every_catalog_price_says_of_which_component_region_and_date_it_is():
    for instance in all_instances():
        known = instance.price_usd_per_hour is not None
        for text in (instance.price_component, instance.price_region, instance.price_date):
            assert bool(text) == known
    assert find_instance("ml.g6.xlarge").price_component == "BatchTransform"
    assert find_instance("ml.g7e.2xlarge").price_component == "Training"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prices: []", "has no entries"),
        ("- 3", "has no entries"),
        ("prices: [3]", "expected a mapping"),
        ("prices:\n- instance: ml.g5.2xlarge\n  usd_per_hour: 1", "region, date missing"),
        (LIST.replace("component:", "compnent:"), "compnent unknown"),
        (LIST.replace("1.7", "-1.7"), "above 0"),
        (LIST.replace("1.7", "cheap"), "above 0"),
        (LIST.replace("1.7", ".nan"), "above 0"),
        (LIST.replace("g5.2xlarge", "g5.3xlarge"), "ml.g5.2xlarge"),
        (LIST + LIST.split("prices:")[1], "is listed twice"),
        ("prices: [", "is not YAML"),
        ("prices: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_faulty_list_is_refused_with_what_is_wrong(price_file, text, message):
    with pytest.raises(InputError, match=message):
        load_price_list(price_file(text))


def test_a_list_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"missing\.yaml"):
        load_price_list(tmp_path / "missing.yaml")
