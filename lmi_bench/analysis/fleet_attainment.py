"""Looks long at the best fleets: joint attainment and worst five minutes at the planned load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmi_bench.analysis.attainment import look_long
from lmi_bench.analysis.candidates import operating_of
from lmi_bench.analysis.ranking import Fleet
from lmi_bench.analysis.recommend_request import RecommendRequest
from lmi_bench.analysis.recommendation import Candidate


def look_at(
    request: RecommendRequest, candidates: Sequence[Candidate], fleets: Sequence[Fleet]
) -> list[Candidate]:
    """The candidates with their attainment; layouts of equal speed and load are simulated once."""
    if not request.slos:
        return list(candidates)
    by_layout = {
        (layout.instance.instance_type, layout.tensor_parallel): (layout, engine, machines)
        for layout, engine, machines in fleets
    }
    seen: dict[tuple[int, float], dict[str, object]] = {}
    looked = []
    for candidate in candidates:
        layout, engine, machines = by_layout[candidate.instance, candidate.tensor_parallel]
        serving = request.availability.surviving(machines)
        operating = operating_of(request, layout, engine, serving)
        key = (id(engine), round(operating.rate_per_s, 9))
        if key not in seen:
            seen[key] = look_long(
                engine.plan,
                operating,
                request.slos,
                copies=serving * layout.copies,
                routing=request.routing,
                seed=request.seed,
            ).to_json()
        looked.append(replace(candidate, attainment=seen[key]))
    return looked
