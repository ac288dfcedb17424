"""Levels of one planned copy, simulated: its requests, its arrivals, and its guesses if any."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

from lmi_bench.analysis.level.layouts import CopyPlan, Workload
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.speculation import SpeculativeModel
from lmi_bench.core.records import LevelRun
from lmi_bench.core.workload import LevelSpec, PlannedRequest

_SALT = 7_919  # so that a level's lengths and its arrivals are different draws


def simulate_copy(plan: CopyPlan, spec: LevelSpec, *, seed: int = 0, **options: Any) -> LevelRun:
    """One level of the copy, or of several behind a router, under the workload's requests.

    spec     an open loop's arrivals are as bursty as the workload's
    options  of `simulate_level`
    """
    workload, model = plan.workload, plan.steady.model
    spoken = workload.speculation
    if spec.rate_per_s is not None and workload.burstiness < 1:
        bursts = replace(spec.load, arrivals="gamma", burstiness=workload.burstiness)
        spec = replace(spec, load=bursts)
    if spoken is not None:
        options["draft_tokens"] = spoken.draft_tokens
        options["draft_acceptance"] = spoken.acceptance
    return simulate_level(
        spec,
        requests_of(workload, seed),
        plan.config,
        model.real_steps if isinstance(model, SpeculativeModel) else model,
        seed=seed,
        **options,
    )


def requests_of(workload: Workload, seed: int) -> Callable[[int], PlannedRequest]:
    """The request of a number: equal ones, or kinds drawn by their shares."""
    if not workload.kinds:
        return lambda number: PlannedRequest(
            number, 0.0, workload.input_tokens, workload.output_tokens
        )
    ends = list(accumulate(kind.share for kind in workload.kinds))

    def drawn(number: int) -> PlannedRequest:
        at = Random(seed * _SALT + number).random() * ends[-1]
        kind = workload.kinds[min(bisect_right(ends, at), len(ends) - 1)]
        return PlannedRequest(number, 0.0, kind.input_tokens, kind.output_tokens)

    return drawn
