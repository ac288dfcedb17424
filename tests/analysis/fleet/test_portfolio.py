"""Models that share machines, against packings and divisions done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fleet.money import NO_SPARES, ON_DEMAND, parse_availability
from lmi_bench.analysis.fleet.portfolio import Member, Need, member_of, pack, share_machines
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_19
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load

ONE = replace(find_instance("ml.g5.2xlarge"), price_usd_per_hour=3.0)
FOUR = replace(find_instance("ml.g5.12xlarge"), price_usd_per_hour=10.0)
ONE_NAME, FOUR_NAME = ONE.instance_type, FOUR.instance_type


def share(*members, availability=NO_SPARES):
    return share_machines(members, (ONE, FOUR), purchase=ON_DEMAND, availability=availability)


def test_wide_copies_are_packed_before_narrow_ones():
    """4 + 4 fill the first machine of eight, 2 + 2 + 1 the second."""
    placed = pack([("a", 4), ("b", 2), ("c", 4), ("b", 2), ("d", 1)], 8)
    assert [sum(degree for _, degree in machine) for machine in placed] == [8, 5]


def test_two_models_that_leave_half_a_machine_free_share_one():
    """Each needs two of four devices: one machine at 10 USD instead of two."""
    a = Member("a", {FOUR_NAME: Need(2, 1)})
    b = Member("b", {FOUR_NAME: Need(1, 2)})
    answer = share(a, b)
    assert [tuple(group.models) for group in answer.groups] == [("a", "b")]
    assert answer.groups[0].machines == 1
    assert (answer.usd_per_hour, answer.separate_usd_per_hour) == (10.0, 20.0)


def test_models_that_fill_their_machines_are_not_moved_together():
    """a fits one device at 3 USD; b fills four at 10: 13 together, 20 on two wide machines."""
    a = Member("a", {ONE_NAME: Need(1, 1), FOUR_NAME: Need(1, 1)})
    b = Member("b", {FOUR_NAME: Need(4, 1)})
    answer = share(a, b)
    assert {tuple(group.models) for group in answer.groups} == {("a",), ("b",)}
    assert answer.usd_per_hour == answer.separate_usd_per_hour == 13.0


def test_only_the_pair_that_saves_is_joined():
    """a and b take two of four devices each (10 instead of 20), c is cheaper alone at 3."""
    a, b = (Member(name, {FOUR_NAME: Need(2, 1)}) for name in "ab")
    c = Member("c", {ONE_NAME: Need(1, 1), FOUR_NAME: Need(1, 1)})
    answer = share(a, b, c)
    assert {tuple(group.models) for group in answer.groups} == {("a", "b"), ("c",)}
    assert (answer.usd_per_hour, answer.separate_usd_per_hour) == (13.0, 23.0)


def test_the_degree_with_the_fewest_devices_is_taken():
    """A copy of TP 1 holds one device, of TP 4 four."""
    workload = Workload(find_model("llama-2-7b"), "float16", 128, 12)
    request = RecommendRequest(workload, TGI_2023, load=Load(rate_per_s=1e-6), instances=(FOUR,), degrees=(1, 4))
    member = member_of("a", request)
    assert member.needs == {FOUR_NAME: Need(1, 1)}
    assert share(member).groups[0].models == {"a": Need(1, 1)}


def test_a_spare_machine_is_shared_too():
    """n+1: 1 + 1 machines shared, (1 + 1) + (1 + 1) with an endpoint each."""
    a, b = (Member(name, {FOUR_NAME: Need(2, 1)}) for name in "ab")
    answer = share(a, b, availability=parse_availability("n+1"))
    assert (answer.usd_per_hour, answer.separate_usd_per_hour) == (20.0, 40.0)


def test_a_model_that_no_machine_carries_is_named():
    with pytest.raises(InputError, match="b: no priced machine"):
        share(Member("a", {ONE_NAME: Need(1, 1)}), Member("b", {}))


def test_a_members_copies_carry_its_rate():
    """Twice the load of one copy's limit needs two copies, three of it three."""
    workload = Workload(find_model("llama-2-7b"), "float16", 128, 12)
    base = RecommendRequest(workload, TGI_2023, load=Load(rate_per_s=1e-6), instances=(ONE,), degrees=(1,))

    def copies(rate):
        member = member_of("a", replace(base, load=Load(rate_per_s=rate)))
        return member.needs[ONE_NAME].copies

    least, limit = 1e-6, 1000.0
    for _ in range(40):
        middle = (least + limit) / 2
        least, limit = (middle, limit) if copies(middle) == 1 else (least, middle)
    assert [copies(factor * least) for factor in (0.99, 1.99, 2.99)] == [1, 2, 3]


def test_a_copy_that_no_machine_holds_spans_some_that_are_counted_together():
    """DeepSeek-R1 in 16 bits has 1,250 GiB of weights, eight H100 have 596 GiB of memory."""
    machine = find_instance("ml.p5.48xlarge")
    workload = Workload(find_model("deepseek-r1"), "float16", 1000, 500)
    request = RecommendRequest(workload, VLLM_0_19, load=Load(rate_per_s=0.1), instances=(machine,))
    large = member_of("large", request)
    four = f"4 x {machine.instance_type}"
    assert large.needs == {four: Need(32, 1)}
    answer = share_machines([large], (machine,), purchase=ON_DEMAND, availability=NO_SPARES)
    assert [(group.instance, group.machines) for group in answer.groups] == [(four, 1)]
    assert answer.usd_per_hour == pytest.approx(4 * machine.price_usd_per_hour)
    assert not [*replace(request, profile=TGI_2023).over_hosts()]  # this engine cannot
