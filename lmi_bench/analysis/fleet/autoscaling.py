"""Autoscalers in virtual time: single requests on machines that a policy starts and stops.

A machine answers up to `slots` requests at once, each in an exponential time of mean
slots / capacity, so that it carries its capacity; others wait in its queue in order of arrival. The
policy sees the load as its metric does: minutes late, averaged over a period. A launched machine
serves after the start-up; one that is stopped gets no more requests and is paid until its last
answer. With a constant number of machines this is M/M/c behind a router.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush, heapreplace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fleet.day import DAY_S, LoadCurve
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import SECONDS_PER_HOUR
from lmi_bench.engine.router import Router

Metric = Literal["rate", "outstanding"]
"""Load of a machine: requests each second, or requests not yet answered."""
_GRID_S, BIN_S = 10.0, 300.0
_CONVERSATIONS = 1000
_PROMPT_TOKENS = 64  # of a conversation, enough for a prefix-affine router to know it by
_AT_LEAST_1 = ("period_s", "out_periods", "in_periods")


@dataclass(frozen=True, slots=True)
class _Policy:
    """What all policies have.

    target   load of a machine to keep, in the metric's unit; 0: that of the plan
    min_machines, max_machines   limits
    """

    target: float = 0.0
    metric: Metric = "rate"
    min_machines: int = 1
    max_machines: int = 1000

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise InputError(f"metric={self.metric}: use {' or '.join(get_args(Metric))}")
        if not 1 <= self.min_machines <= self.max_machines:
            raise InputError("a policy needs 1 <= min_machines <= max_machines")
        for item in fields(self):
            value, least = getattr(self, item.name), int(item.name in _AT_LEAST_1)
            if isinstance(value, int | float) and not least <= value <= 1e9:
                raise InputError(f"{item.name}={value:g} must be {least} or more, at most 1e9")

    def within(self, machines: float) -> int:
        """The next whole number of machines within the limits."""
        return max(self.min_machines, math.ceil(min(machines, self.max_machines) - 1e-9))


@dataclass(frozen=True, slots=True)
class TargetTracking(_Policy):
    """SageMaker's target tracking by CloudWatch alarms on one-minute means.

    All of the last `out_periods` means above the target start machines, all of the last
    `in_periods` below `in_share` of it stop some, `delay_s` after their end and after the cooldown
    of the last change, or for a start of the last start: as many as bring the newest mean, or the
    low ones' highest, to target. (AWS lets a start through that wants more than the last.)
    """

    name: ClassVar = "target-tracking"
    period_s: float = 60.0
    delay_s: float = 60.0
    out_periods: int = 3
    in_periods: int = 15
    in_share: float = 0.9
    scale_out_cooldown_s: float = 300.0
    scale_in_cooldown_s: float = 300.0

    def wanted(self, totals: Sequence[float], machines: int, since_s: float, since_start_s: float) -> int:
        """Machines wanted, by the fleet's load in past periods and the time since a change."""
        high = [total / machines for total in totals[-self.out_periods :]]
        low = [total / machines for total in totals[-self.in_periods :]]
        wanted = self.within(totals[-1] / self.target)
        if len(high) == self.out_periods and min(high) > self.target:
            return max(machines, wanted) if since_start_s >= self.scale_out_cooldown_s else machines
        if len(low) == self.in_periods and max(low) < self.in_share * self.target:
            wanted = self.within(max(totals[-self.in_periods :]) / self.target)
            return min(machines, wanted) if since_s >= self.scale_in_cooldown_s else machines
        return machines


@dataclass(frozen=True, slots=True)
class Hpa(_Policy):
    """Kubernetes' horizontal autoscaler, alone or fed by KEDA each `period_s` (its polling).

    wanted = ceil(machines * mean / target), unless that ratio is within the tolerance of 1; started
    are at most `up_percent` of the machines or `up_pods`, the larger, in `up_period_s`; stopped is
    what no poll of the last `stabilization_s` wanted.
    """

    name: ClassVar = "hpa"
    period_s: float = 30.0
    delay_s: float = 0.0
    tolerance: float = 0.1
    stabilization_s: float = 300.0
    up_percent: float = 100.0
    up_pods: int = 4
    up_period_s: float = 15.0

    def wanted(self, totals: Sequence[float], machines: int, before: int) -> int:
        """Machines wanted by the newest load; before: machines at the start of `up_period_s`."""
        ratio = totals[-1] / (machines * self.target)
        if abs(ratio - 1) <= self.tolerance:
            return machines
        most = before + max(self.up_pods, math.ceil(before * self.up_percent / 100))
        return min(self.within(machines * ratio), max(machines, most))


Policy = TargetTracking | Hpa
_KINDS: dict[str, type[Policy]] = {each.name: each for each in (TargetTracking, Hpa)}


def parse_policy(text: str) -> Policy:
    """`hpa` or `target-tracking:target=2.5,scale_in_cooldown_s=600`; raises InputError.

    >>> parse_policy("hpa:up_pods=2").up_pods
    2
    """
    name, _, rest = text.partition(":")
    kind = _KINDS.get(name.strip())
    if kind is None:
        raise InputError(f"--policy {text}: write {' or '.join(_KINDS)}, :NAME=VALUE,... behind it")
    known: dict[str, Any] = {item.name: item.default for item in fields(kind)}
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            given[key.strip()] = type(known[key.strip()])(value.strip())
        except (KeyError, ValueError):
            raise InputError(f"--policy {text}: {part!r} is not one of {', '.join(known)}") from None
    return kind(**given)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal machines: what each carries, its slots, and the seconds from launch to serving.

    wait_limit_s  a request that waits longer in a queue misses the SLO
    """

    capacity_per_s: float
    slots: int
    start_s: float
    wait_limit_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Played:
    """A played day.

    attainment     share of the requests that waited at most the limit, 0 to 1
    waits_s        of each request in a queue, shape (requests,), in order of arrival
    machine_hours  paid, from launch to the last answer
    events         (time, machines before, machines wanted) of each change
    """

    attainment: float
    waits_s: NDArray[np.float64]
    machine_hours: float
    peak_machines: int
    events: tuple[tuple[float, int, int], ...]


def play(
    arrivals_s: NDArray[np.float64],
    fleet: Fleet,
    router: Router,
    *,
    machines: int,
    policy: Policy | None = None,
    seed: int = 0,
    until_s: float = 0.0,
) -> Played:
    """Serve requests, in order of arrival, from so many machines on; policy None: they stay. They
    are paid until `until_s`, or the last arrival if that is later."""
    draw = np.random.default_rng(seed)
    number = len(arrivals_s)
    services_s = draw.exponential(fleet.slots / fleet.capacity_per_s, size=number).tolist()
    talks = (draw.integers(_CONVERSATIONS, size=number) * _PROMPT_TOKENS).tolist()
    run = _Run(fleet, machines, policy)
    waits_s = np.zeros(number)
    for place, (at_s, service_s) in enumerate(zip(arrivals_s.tolist(), services_s, strict=True)):
        while at_s >= run.next_s:
            run.advance(run.next_s)
        prompt = range(talks[place], talks[place] + _PROMPT_TOKENS)
        waits_s[place] = run.serve(at_s, service_s, router, prompt)
    while run.next_s < until_s:
        run.advance(run.next_s)
    return Played(
        attainment=float((waits_s <= fleet.wait_limit_s).mean()) if number else 1.0,
        waits_s=waits_s,
        machine_hours=run.paid_s(max([until_s, *arrivals_s[-1:].tolist()])) / SECONDS_PER_HOUR,
        peak_machines=run.peak,
        events=tuple(run.events),
    )


@dataclass(slots=True, eq=False)
class _Machine:
    """free_s: when each slot is free, a heap; paid from `paid_s` to `stopped_s`."""

    paid_s: float
    serves_s: float
    free_s: list[float]
    outstanding: int = 0
    stopped_s: float | None = None


class _Run:
    """The machines, the metric, and the next time at which something but an arrival happens."""

    def __init__(self, fleet: Fleet, machines: int, policy: Policy | None) -> None:
        self._fleet, self._policy = fleet, policy
        self._serving = [self._machine(0.0, 0.0) for _ in range(machines)]
        self._coming: deque[_Machine] = deque()
        self._all = list(self._serving)
        self._finishes: list[tuple[float, int, _Machine]] = []
        self._served = self._served_before = 0
        self._wanted: deque[tuple[float, int]] = deque()
        self._decides_s = math.inf if policy is None else policy.period_s
        late = 0 if policy is None else math.ceil(policy.delay_s / policy.period_s)  # not known yet
        kept = late + max(getattr(policy, f"{way}_periods", 1) for way in ("in", "out")) + 1
        self._totals: deque[tuple[float, float]] = deque(maxlen=kept)  # ends of periods, loads
        self.next_s = self._decides_s
        self.events: list[tuple[float, int, int]] = []
        self.peak = machines

    def _machine(self, paid_s: float, serves_s: float) -> _Machine:
        return _Machine(paid_s, serves_s, [serves_s] * self._fleet.slots)

    def serve(self, at_s: float, service_s: float, router: Router, prompt: range) -> float:
        """Queue a request where the router says; its wait in seconds."""
        self._finish(at_s)
        outstanding = [machine.outstanding for machine in self._serving]
        machine = self._serving[router.pick(outstanding, prompt)]
        begins_s = max(at_s, machine.free_s[0])
        heapreplace(machine.free_s, begins_s + service_s)
        machine.outstanding += 1
        self._served += 1
        heappush(self._finishes, (begins_s + service_s, self._served, machine))
        return begins_s - at_s

    def _finish(self, now_s: float) -> None:
        while self._finishes and self._finishes[0][0] <= now_s:
            heappop(self._finishes)[2].outstanding -= 1

    def advance(self, now_s: float) -> None:
        """Let launched machines serve, and the policy decide at the end of its period."""
        while self._coming and self._coming[0].serves_s <= now_s:
            self._serving.append(self._coming.popleft())
        if self._policy is not None and now_s >= self._decides_s:
            self._finish(now_s)
            policy, total = self._policy, float(len(self._finishes))
            if policy.metric == "rate":
                total = (self._served - self._served_before) / policy.period_s
            self._served_before = self._served
            self._totals.append((now_s, total))
            self._decides_s += policy.period_s
            known = [load for end_s, load in self._totals if end_s + policy.delay_s <= now_s]
            if known:
                self._scale(policy, now_s, known)
        self.next_s = min(self._decides_s, self._coming[0].serves_s if self._coming else math.inf)

    def _scale(self, policy: Policy, now_s: float, totals: list[float]) -> None:
        machines = len(self._serving) + len(self._coming)
        last_s = self.events[-1][0] if self.events else -math.inf
        if isinstance(policy, TargetTracking):
            started_s = next((at_s for at_s, was, after in reversed(self.events) if after > was), -math.inf)
            wanted = policy.wanted(totals, machines, now_s - last_s, now_s - started_s)
        else:
            while self._wanted and now_s - self._wanted[0][0] >= policy.stabilization_s:
                self._wanted.popleft()
            recent = [each for each in self.events if now_s - each[0] < policy.up_period_s]
            before = machines - sum(after - was for _, was, after in recent)
            asked = policy.wanted(totals, machines, before)
            self._wanted.append((now_s, asked))
            wanted = asked if asked >= machines else min(machines, max(n for _, n in self._wanted))
        if wanted != machines:
            self.events.append((now_s, machines, wanted))
        for _ in range(wanted - machines):
            self._coming.append(self._machine(now_s, now_s + self._fleet.start_s))
            self._all.append(self._coming[-1])
        for _ in range(machines - wanted):
            if self._coming:
                self._coming.pop().stopped_s = now_s
                continue
            idle = min(self._serving, key=lambda each: each.outstanding)
            self._serving.remove(idle)
            idle.stopped_s = max(now_s, *idle.free_s)
        self.peak = max(self.peak, wanted)

    def paid_s(self, end_s: float) -> float:
        """Seconds paid for all machines until `end_s`."""
        ends_s = (end_s if each.stopped_s is None else each.stopped_s for each in self._all)
        return sum(max(0.0, end - each.paid_s) for end, each in zip(ends_s, self._all, strict=True))


def day_arrivals_s(curve: LoadCurve, seed: int = 0) -> NDArray[np.float64]:
    """Random arrivals of a day, Poisson with the curve's rate at every time; rising seconds."""
    draw = np.random.default_rng(seed)
    grid_s = np.arange(0.0, DAY_S + _GRID_S, _GRID_S)
    rates = curve.rates_at(grid_s)
    mass = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * _GRID_S)])
    number = draw.poisson(mass[-1])
    return np.asarray(np.interp(np.sort(draw.uniform(0, mass[-1], number)), mass, grid_s))


def binned(times_s: NDArray[np.float64]) -> LoadCurve:
    """The curve of recorded times within a day, by five minutes."""
    edges_s = np.arange(0.0, min(DAY_S, float(times_s[-1])) + BIN_S, BIN_S)
    counts, _ = np.histogram(times_s, edges_s)
    return LoadCurve(tuple((edges_s[:-1] + BIN_S / 2).tolist()), tuple((counts / BIN_S).tolist()))
