"""One recommendation: calibrate, rank the fleets, and see what would change the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.fleet.money import parse_availability
from lmi_bench.analysis.fleet.ranking import frontier
from lmi_bench.analysis.fleet.recommender import recommend as rank
from lmi_bench.analysis.fleet.request import Objective, RecommendRequest, Routing
from lmi_bench.analysis.fleet.vary import Variation, parse_range, sensitivity, vary_rate
from lmi_bench.analysis.model.profiles import profile_to_json
from lmi_bench.catalog.instances import all_instances
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.basis import Basis, basis_of
from lmi_bench.jobs.planned import engine_axes, purchase_of, repriced, requirements_of
from lmi_bench.jobs.settings.recommend import RecommendSettings


@dataclass(frozen=True, slots=True)
class Advice:
    """What is recommended, for which request, on what basis.

    frontier     candidates that none beats in both cost and latency
    sensitivity  what would change the answer, where it was asked for
    variation    the cheapest layout of each load, where it was asked for
    """

    answer: Recommendation
    request: RecommendRequest
    basis: Basis
    frontier: tuple[Candidate, ...]
    sensitivity: tuple[dict[str, Any], ...] = ()
    variation: Variation | None = None

    def to_json(self) -> dict[str, Any]:
        """As `recommend --json` writes it."""
        content: dict[str, Any] = {
            "model": self.basis.workload.shape.name,
            "model_as_named": self.basis.model,
            **self.answer.to_json(),
        }
        if self.basis.accuracy is not None:
            content["accuracy"] = self.basis.accuracy
        content["profile_document"] = json.loads(profile_to_json(self.basis.profile))
        content["frontier"] = [
            {
                "instance": each.instance,
                "instances": each.instances,
                "tensor_parallel": each.tensor_parallel,
                "setting": each.setting.describe() or None,
            }
            for each in self.frontier
        ]
        if self.sensitivity:
            content["sensitivity"] = list(self.sensitivity)
        if self.variation is not None:
            content["vary"] = self.variation.to_json()
        return content


def recommend(settings: RecommendSettings, listener: Listener = SILENT) -> Advice:
    """Rank the fleets. Raises InputError for an unusable question."""
    basis = basis_of(settings, listener)
    request = _request(settings, basis)
    span = None if settings.vary is None else parse_range(settings.vary)
    answer = rank(
        request, progress=lambda text, share: listener.progress(text, round(100 * share), 100)
    )
    best = tuple(frontier(request, answer.candidates))
    changes: tuple[dict[str, Any], ...] = ()
    if settings.explain:
        listener.progress("what would change the answer", 100, 100)
        changes = tuple(sensitivity(request, answer))
    variation = None
    if span is not None:
        listener.progress("the winner of every load", 100, 100)
        variation = vary_rate(request, *span)
    return Advice(answer, request, basis, best, changes, variation)


def _request(settings: RecommendSettings, basis: Basis) -> RecommendRequest:
    """The question as the planner takes it; without a load that of the scenario."""
    money = settings.money
    is_load_stated = settings.rate is not None or settings.users is not None
    machines = all_instances() if basis.instances is None else basis.instances
    axes = engine_axes(settings.axes)
    return RecommendRequest(
        workload=basis.workload,
        profile=basis.profile,
        engine_version=settings.engine_version,
        rate_per_s=settings.rate if is_load_stated else basis.rate_per_s,
        users=settings.users,
        think_time_s=settings.think_time,
        slos=tuple(parse_slo(text) for text in settings.slo or basis.slos),
        objective=cast("Objective", settings.objective),
        instances=repriced(machines, money.price_list),
        degrees=settings.tensor_parallel or None,
        blended_ratio=settings.blended_ratio,
        discount=settings.discount,
        seed=settings.seed,
        purchase=purchase_of(money),
        availability=parse_availability(money.availability),
        requirements=requirements_of(money, settings.limits),
        routing=cast("Routing", settings.router.replace("_", "-")),
        look_long=True,
        measured=basis.measured,
        calibrated=basis.accuracy is not None,
        settings=axes.settings(dtype=basis.workload.dtype, profile=basis.profile),
    )
