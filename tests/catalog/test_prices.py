"""The user's own prices and the platforms'."""

from __future__ import annotations

import re

import pytest

from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.prices import load_price_list, on_platform, reprice
from lmi_bench.catalog.tables import read_rows
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
        [find_instance("ml.g5.2xlarge"), find_instance("ml.g5.12xlarge")], price_list=load_price_list(price_file(LIST))
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
            assert re.match(r"us-east-1, 2026-0(1-19|7-20), EC2", there.price_provenance)
            if instance.price_usd_per_hour is not None:
                assert there.price_usd_per_hour < instance.price_usd_per_hour


def test_a_hosting_price_is_estimated_from_ec2s_by_the_familys_ratio_and_marked():
    """p3.2xlarge 3.825 / 3.06 = 1.25 is the highest ratio of the p families, 1.15 the median."""
    p5en = on_platform(find_instance("ml.p5en.48xlarge"), "sagemaker")
    assert p5en.price_usd_per_hour == pytest.approx(63.296 * 1.15)
    assert p5en.price_range_usd_per_hour == pytest.approx((63.296 * 1.15, 63.296 * 1.25), rel=1e-3)
    assert p5en.is_estimated
    assert p5en.price_date == "2026-07-20"
    g6e = on_platform(find_instance("ml.g6e.16xlarge"), "sagemaker")
    assert g6e.price_usd_per_hour == pytest.approx(7.577 * 1.25, rel=1e-3)
    assert g6e.price_range_usd_per_hour == pytest.approx((7.577 * 1.25, 7.577 * 1.40), rel=2e-3)
    assert find_instance("ml.p5en.48xlarge").price_usd_per_hour is None


def test_only_hosting_prices_are_unmarked_on_sagemaker():
    for instance in reprice(platform="sagemaker"):
        priced = instance.price_usd_per_hour is not None
        assert instance.is_estimated == (priced and instance.price_component != "Hosting")
    assert on_platform(find_instance("ml.g7e.2xlarge"), "sagemaker").price_usd_per_hour == 4.2039
    assert not on_platform(find_instance("ml.g5.2xlarge"), "sagemaker").is_estimated
    assert not any(each.is_estimated for each in reprice(platform="ec2"))


def test_the_stated_ratios_are_the_quotients_of_the_prices_beside_them():
    for row in read_rows("instances.csv"):
        if row["sagemaker_to_ec2_ratio"]:
            hosting, ec2 = row["sagemaker_usd_per_hour"], row["ec2_usd_per_hour_us_east_1"]
            assert float(row["sagemaker_to_ec2_ratio"]) == pytest.approx(float(hosting) / float(ec2), rel=2e-3)


def test_machines_without_endpoints_are_offered_on_ec2_only():
    ec2, sagemaker = ({each.instance_type for each in reprice(platform=name)} for name in ("ec2", "sagemaker"))
    others = {each for each in ec2 - sagemaker if not each.startswith(("g5g.", "g6f.", "gr6f."))}
    assert others == {"gr6.4xlarge", "gr6.8xlarge", "p3dn.24xlarge", "g4dn.metal"}


HEADER = "machine,accelerator,accelerators,usd_per_hour,interconnect,link_gb_per_s,"
MACHINES = f"""{HEADER}network_gbit_per_s,date
h200-8,H200,8,24.0,,,3200,2026-11-01
l40s-4,L40S,4,5.5,shared-pcie,,,
odd-2,A100-80,2,3,pcie,25,,
"""


def test_a_price_file_describes_machines_of_any_cloud(tmp_path):
    path = tmp_path / "cloud.csv"
    path.write_text(MACHINES, encoding="utf-8")
    machines = reprice(platform="file", price_list=load_price_list(path))
    assert [each.instance_type for each in machines] == ["h200-8", "l40s-4", "odd-2"]
    h200, l40s, odd = machines
    assert (h200.num_accelerators, h200.price_usd_per_hour) == (8, 24.0)
    assert (h200.price_date, h200.network_bits_per_s) == ("2026-11-01", 3.2e12)
    assert h200.link.kind == "nvlink"
    assert (l40s.link.kind, l40s.link.is_shared) == ("pcie", True)
    assert (odd.link.kind, odd.link.is_shared, odd.link.bytes_per_s) == ("pcie", False, 25e9)
    assert not any(each.is_estimated for each in machines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,H2000,8,24,,,,", "nearest: .*H200"),
        ("x,H200,0,24,,,,", "accelerators must be 1 to"),
        ("x,H200,8,24,tape,,,", "interconnect 'tape': use device, pcie"),
        ("x,H200,8,,,,,", "usd_per_hour missing"),
        ("x,H200,8,24,,-1,,", "link_gb_per_s must be a number above 0"),
        ("ml.g5.12xlarge,H200,4,24,,,,", "ml.g5.12xlarge is 4 x A10G in the catalog, not 4 x H200: name it other"),
        ("G5.12xlarge,A10G,2,24,,,,", "G5.12xlarge is 4 x A10G in the catalog, not 2 x A10G"),
    ],
)
def test_a_faulty_machine_is_refused_with_what_is_wrong(tmp_path, line, message):
    path = tmp_path / "cloud.csv"
    path.write_text(MACHINES + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_price_list(path)


def test_a_machine_of_the_catalog_may_be_described_again_as_it_is(tmp_path):
    path = tmp_path / "cloud.csv"
    path.write_text(f"{HEADER}network_gbit_per_s,date\nml.g5.12xlarge,A10G,4,3.5,shared-pcie,,,\n", encoding="utf-8")
    assert load_price_list(path)["ml.g5.12xlarge"].price_usd_per_hour == 3.5


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
