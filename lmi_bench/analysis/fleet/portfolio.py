"""Several models on shared machines: copies are packed onto free devices.

On one kind of machine every model takes the degree that needs the fewest devices for its load.
Copies are packed first-fit, the widest first: optimal where degrees divide each other. The models
are divided into groups, each on its cheapest machine, at the least total cost:

    cost(models) = min over groups with the first model of cost(group) + cost(the others)

A copy that no machine holds spans two or four, which are shared as one machine of all their
devices. A device serves one model; a host with several models is assumed to be as fast as with one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

from lmi_bench.analysis.fleet.money import Availability, Purchase
from lmi_bench.analysis.fleet.recommender import prepare
from lmi_bench.analysis.fleet.request import MORE_HOSTS, RecommendRequest
from lmi_bench.catalog.instances import Instance, joined
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import JsonValue, key_of

MOST_MODELS = 10


@dataclass(frozen=True, slots=True)
class Need(JsonValue):
    """Copies of one model at one degree for its load."""

    tensor_parallel: int
    copies: int


@dataclass(frozen=True, slots=True)
class Member:
    """One model of the portfolio; needs: by instance type, at the degree with fewest devices."""

    name: str
    needs: Mapping[str, Need]


@dataclass(frozen=True, slots=True)
class SharedFleet(JsonValue):
    """Models that share machines of one kind.

    machines  including spare ones; usd_per_hour: of all of them
    models    what each model needs, by its name
    placed    copies on each machine, as (name, degree)
    """

    instance: str
    machines: int
    usd_per_hour: float
    estimated: bool
    models: Mapping[str, Need]
    placed: tuple[tuple[tuple[str, int], ...], ...] = field(metadata=key_of("placement"))

    def to_json(self) -> dict[str, Any]:
        named = [{"name": name, **need.to_json()} for name, need in self.models.items()]
        placed = [[{"name": name, "tensor_parallel": degree} for name, degree in each] for each in self.placed]
        return super(SharedFleet, self).to_json() | {"models": named, "placement": placed}


@dataclass(frozen=True, slots=True)
class Portfolio:
    """The cheapest division into groups, and one endpoint for each model for comparison."""

    groups: tuple[SharedFleet, ...]
    separate: tuple[SharedFleet, ...]

    @property
    def usd_per_hour(self) -> float:
        """Price of all groups."""
        return sum(group.usd_per_hour for group in self.groups)

    @property
    def separate_usd_per_hour(self) -> float:
        """Price of one endpoint for each model."""
        return sum(group.usd_per_hour for group in self.separate)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "usd_per_hour": self.usd_per_hour,
            "groups": [group.to_json() for group in self.groups],
            "separate_usd_per_hour": self.separate_usd_per_hour,
            "separate": [group.to_json() for group in self.separate],
        }


def member_of(name: str, request: RecommendRequest) -> Member:
    """Copies for the request's rate, by machine and degree; raises InputError without a rate."""
    if request.rate_per_s is None:
        raise InputError(f"{name}: a portfolio needs the rate of each model (req/s)")
    asked = request, *request.over_hosts()
    layouts = next((found for each in asked if (found := prepare(each)[0])), ())
    sizes: dict[str, tuple[int, int]] = {}  # devices of all copies, and of one
    for layout, copy in layouts:
        per_copy = copy.belief(keeps_slos=bool(request.slos)).sure_per_s
        if per_copy > 0:
            copies = max(1, math.ceil(request.rate_per_s / per_copy - 1e-9))
            machine, degree = layout.instance.instance_type, layout.tensor_parallel
            size = (degree * copies, degree)
            sizes[machine] = min(size, sizes.get(machine, size))
    return Member(name, {machine: Need(degree, devices // degree) for machine, (devices, degree) in sizes.items()})


def share_machines(
    members: Sequence[Member], instances: Sequence[Instance], *, purchase: Purchase, availability: Availability
) -> Portfolio:
    """The cheapest division of the models into groups that share machines.

    Raises InputError for too many models, or a model that no machine with a price can serve.
    """
    instances = [joined(each, hosts) for hosts in (1, *MORE_HOSTS) for each in instances]
    if not 1 <= len(members) <= MOST_MODELS:
        raise InputError(f"a portfolio holds 1 to {MOST_MODELS} models, got {len(members)}")
    if len({member.name for member in members}) < len(members):
        raise InputError("two models of the portfolio have the same name")

    @cache
    def cheapest(*models: int) -> SharedFleet | None:
        fleets = _fleets([members[i] for i in models], instances, purchase, availability)
        return min(fleets, key=lambda fleet: (fleet.usd_per_hour, fleet.machines), default=None)

    @cache
    def divided(*models: int) -> tuple[float, tuple[SharedFleet, ...]]:
        """The least cost of these models, and their groups."""
        if not models:
            return 0.0, ()
        options = []
        for size in range(len(models)):
            for others in combinations(models[1:], size):
                group = cheapest(models[0], *others)
                if group is not None:
                    usd, groups = divided(*(i for i in models[1:] if i not in others))
                    options.append((usd + group.usd_per_hour, (group, *groups)))
        return min(options, key=lambda each: each[0])

    separate = []
    for index, member in enumerate(members):
        fleet = cheapest(index)
        if fleet is None:
            raise InputError(f"{member.name}: no priced machine carries its load within its limits")
        separate.append(fleet)
    return Portfolio(divided(*range(len(members)))[1], tuple(separate))


def _fleets(
    members: Sequence[Member], instances: Sequence[Instance], purchase: Purchase, availability: Availability
) -> Iterator[SharedFleet]:
    """All models together on each kind of machine."""
    for instance in instances:
        name = instance.instance_type
        if any(name not in member.needs for member in members):
            continue
        models = {one.name: one.needs[name] for one in members}
        copies = [(model, need.tensor_parallel) for model, need in models.items() for _ in range(need.copies)]
        placed = pack(copies, instance.num_accelerators)
        machines = availability.machines(len(placed))
        price = purchase.usd_per_hour(instance, machines)
        if price is not None:
            yield SharedFleet(name, machines, price, instance.is_estimated, models, placed)


def pack(copies: Sequence[tuple[str, int]], devices: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The copies (name, degree) on machines with that many devices, first-fit.

    >>> pack([("a", 4), ("b", 2), ("c", 4), ("b", 2), ("d", 1)], 8)
    ((('a', 4), ('c', 4)), (('b', 2), ('b', 2), ('d', 1)))
    """
    machines: list[list[tuple[str, int]]] = []
    for copy in sorted(copies, key=lambda each: -each[1]):
        room = (m for m in machines if sum(degree for _, degree in m) + copy[1] <= devices)
        machine = next(room, None)
        if machine is None:
            machines.append(machine := [])
        machine.append(copy)
    return tuple(tuple(machine) for machine in machines)
