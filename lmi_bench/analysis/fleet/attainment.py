"""Joint SLO attainment and worst five minutes of a planned load, simulated for fifteen minutes.

Joint attainment is the share of requests that meet all SLOs at once; the worst window is the SLO's
statistic over the five minutes in which it is highest. A short simulation may keep the SLOs by
luck: where fifteen minutes miss them, the capacity of the copies is lowered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fit.forecast import hit_share
from lmi_bench.analysis.fleet.answer import Attainment, Candidate
from lmi_bench.analysis.fleet.candidates import CopyCapacity, Fleet, operating_of
from lmi_bench.analysis.fleet.operating_point import Latencies, Operating
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import CopyPlan, EngineKey
from lmi_bench.analysis.level.queueing import QueueRun
from lmi_bench.analysis.results.columns import Columns, columns_of
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.slo_results import goodput
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.load import Load
from lmi_bench.core.records import STATUS_OK, RequestRecord
from lmi_bench.core.slo import Slo
from lmi_bench.core.units import s_to_ms
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.router import make_router

WINDOW_S = 300.0
_WINDOW_STEP_S = 60.0
_LOOK_S = 3 * WINDOW_S
_QUICK_TOKENS = 300_000  # whose steps the engine's own scheduler plans in a second or two
_MOST_TOKENS = 6_000_000  # whose times are held in 0.5 GiB
_MOST_REQUESTS = 6000
_MOST_CACHED = 2000  # with a prefix cache, whose blocks take time to simulate
_MOST_REPLICAS = 4


def attainment(
    records: Sequence[RequestRecord] | Columns, slos: Sequence[Slo], *, open_loop: bool, routing: str = ""
) -> Attainment:
    """Joint attainment and worst windows of the settled records of a level."""
    if not records:
        return Attainment(reason="no request was simulated", routing=routing)
    columns = columns_of(records)
    first_s, last_s = float(columns.due_s.min()), float(columns.due_s.max())
    known = () if isinstance(records, Columns) else records
    caches = any(record.exchange.cached_tokens is not None for record in known)
    count = math.floor((last_s + 1.0 - WINDOW_S - first_s) / _WINDOW_STEP_S) + 1
    starts_s = [first_s + _WINDOW_STEP_S * number for number in range(count)]
    since_s = [columns.due_s - start_s for start_s in starts_s]
    windows = [columns.ok & (each_s >= 0) & (each_s < WINDOW_S) for each_s in since_s]

    def worst_ms(among: Sequence[NDArray[np.bool_]], slo: Slo) -> float | None:
        """The SLO's highest statistic of a window in ms; None where all have too few requests."""
        quantile = QUANTILES.get(slo.statistic)
        needed = 1 if quantile is None else samples_needed(quantile)
        own_s, rows = columns.values_s(slo.metric, open_loop=open_loop)
        found = [Latencies({slo.metric: own_s[one[rows]]}) for one in among if one.sum() >= needed]
        values_s = [each.statistic_s(slo.metric, slo.statistic) for each in found]
        return s_to_ms(max(values_s)) if values_s else None

    return Attainment(
        joint_attainment=goodput(records, slos, open_loop=open_loop).share if slos else None,
        attainment={str(slo): goodput(records, [slo], open_loop=open_loop).share for slo in slos},
        fifteen_minutes_ms={str(slo): worst_ms([columns.ok], slo) for slo in slos},
        worst_5_minutes_ms={str(slo): worst_ms(windows, slo) for slo in slos},
        requests=len(records),
        minutes=(last_s - first_s) / 60,
        routing=routing,
        prefix_hit_share=hit_share(known) if caches else None,
    )


def simulate_long(request: RecommendRequest, plan: CopyPlan, operating: Operating, copies: int) -> Attainment:
    """Simulate the planned load of one copy, or of several behind a router, for fifteen minutes.

    copies  of the fleet; under random routing one represents all: it gets a Poisson stream too

    The engine's own scheduler runs; where that takes long, `follow` by the same rules.
    """
    steady, slos, routing, seed = plan.steady, request.slos, request.routing, request.seed
    replicas = 1 if routing == "random" or not steady.open_loop else min(copies, _MOST_REPLICAS)
    shares = 1 if routing == "prefix-affine" else max(1, copies // replicas)
    rate_per_s = operating.rate_per_s * replicas
    ramp = math.ceil(operating.batch * replicas)
    wanted = math.ceil(rate_per_s * _LOOK_S) + ramp
    if plan.config.prefix_caching:
        wanted = min(wanted, _MOST_CACHED + ramp)
    users = 0 if steady.open_loop else max(1, round(operating.batch))
    if users:
        wanted, ramp, rate_per_s = max(wanted, 3 * users), users, steady.rate_per_s(users)
    end, tokens = wanted - users, wanted * steady.output_tokens
    is_long = wanted > _MOST_REQUESTS or tokens > _QUICK_TOKENS
    if is_long and replicas == 1 and plan.can_follow and tokens <= _MOST_TOKENS:
        followed = _columns(plan.follow(rate_per_s, wanted, seed=seed, users=users), ramp, end)
        return attainment(followed, slos, open_loop=steady.open_loop, routing=routing)
    if wanted > _MOST_REQUESTS:
        return Attainment(
            routing=routing, reason=f"fifteen minutes hold {wanted:,} requests, more than {_MOST_REQUESTS:,}"
        )

    if steady.open_loop:
        spec = LevelSpec(0, Load(rate_per_s=rate_per_s), num_requests=wanted)
        router = make_router(routing, seed)
        level = plan.simulate(spec, seed=seed, copies=shares, replicas=replicas, router=router)
    else:
        spec = LevelSpec(0, Load(concurrency=users), num_requests=wanted)
        level = plan.simulate(spec, seed=seed, spacing_s=1 / rate_per_s)
    return attainment(level.records[ramp:end], slos, open_loop=steady.open_loop, routing=routing)


def _columns(run: QueueRun, ramp: int, end: int) -> Columns:
    """The requests of a followed copy from `ramp` to `end`, with the time of every token."""
    steps, (_, first_s, last_s) = run.runs[:, 0].astype(np.int64), run.runs.T
    gap_s = (last_s - first_s) / np.maximum(steps - 1, 1)
    steps_s = np.repeat(first_s, steps) + _places(steps) * np.repeat(gap_s, steps)
    starts = run.starts[(run.starts[:, 0] >= ramp) & (run.starts[:, 0] < end)]
    number, had, before, at_s = starts[np.lexsort((starts[:, 1], starts[:, 0]))].T
    sent_s, tokens = run.sent_s[ramp:end], run.output_tokens[ramp:end]
    row = (number - ramp).astype(np.int64)
    gained = np.where(np.diff(row, append=-1), tokens[row], np.append(had[1:], 0)) - had
    gained = gained.astype(np.int64)  # tokens from this start to the next one of the request
    place = _places(gained)
    step = np.maximum(np.repeat(before.astype(np.int64), gained) + place - 1, 0)
    times_s = np.append(steps_s, 0.0)[step]  # answers of one token take no decode step
    times_s[place == 0] = at_s
    yes, none = np.ones(sent_s.size, dtype=bool), np.full(sent_s.size, np.nan)
    each = ([STATUS_OK] * sent_s.size, yes, yes, sent_s, sent_s, none, none, tokens, yes)
    events = (times_s, np.ones(times_s.size, dtype=np.int32), np.repeat(row, gained))
    return Columns(*each, *events, sent_s + run.e2e_s[ramp:end])


def _places(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... within each of the groups of so many."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True)
class LongSimulation:
    """Simulates planned loads for fifteen minutes, each engine and load once."""

    request: RecommendRequest
    _seen: dict[tuple[EngineKey, float], Attainment] = field(default_factory=dict)

    def at(self, fleet: Fleet) -> Attainment:
        """The attainment of the fleet's load."""
        request, operating = self.request, operating_of(self.request, fleet)
        layout, copy, machines = fleet
        key = (layout.engine_key, round(operating.rate_per_s, 9))
        if key not in self._seen:
            copies = request.availability.surviving(machines) * layout.copies
            self._seen[key] = simulate_long(request, copy.plan, operating, copies)
        return self._seen[key]

    def overloaded(self, fleet: Fleet) -> tuple[EngineKey, CopyCapacity] | None:
        """The copy with its rate noted as too high; None if the SLOs are kept.

        A measurement counts more than a simulation.
        """
        layout, copy, _ = fleet
        rate_per_s = operating_of(self.request, fleet).rate_per_s
        if not self.request.open_loop or rate_per_s <= copy.kept_per_s * (1 + 1e-9):
            return None
        found_ms = self.at(fleet).fifteen_minutes_ms
        slos = self.request.slos
        if all((found_ms.get(str(slo)) or 0.0) <= slo.limit_ms for slo in slos):
            return None
        too_much_per_s = min(copy.too_much_per_s, rate_per_s)
        return layout.engine_key, replace(copy, too_much_per_s=too_much_per_s)


def fleet_of(candidate: Candidate, fleets: Sequence[Fleet]) -> Fleet:
    """The fleet that a candidate was built from."""
    return next(
        fleet
        for fleet in fleets
        if (fleet[0].instance.instance_type, fleet[0].tensor_parallel, fleet[0].setting)
        == (candidate.instance, candidate.tensor_parallel, candidate.setting)
    )
