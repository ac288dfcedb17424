"""Which candidates may be bought within the stated budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Rejection


def _costs(candidate: Candidate) -> dict[str, float | None]:
    return {
        "usd_per_hour": candidate.price_usd_per_hour,
        "usd_per_month": candidate.usd_per_month,
        "usd_per_1m_output": candidate.usd_per_1m_output_tokens,
    }


def split_by_budget(
    request: RecommendRequest, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[Rejection]]:
    """Candidates within the budget, and the others with what they cost."""
    kept, rejected = [], []
    for candidate in candidates:
        problem = request.requirements.over_budget(**_costs(candidate))
        if problem is None:
            kept.append(candidate)
        else:
            rejected.append(
                Rejection(candidate.instance, candidate.tensor_parallel, candidate.copies, problem)
            )
    return kept, rejected


def nearest_to_budget(request: RecommendRequest, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that is over its budget by the least factor, with the reason."""
    best = min(candidates, key=lambda each: request.requirements.excess(**_costs(each)))
    problem = request.requirements.over_budget(**_costs(best))
    return replace(best, reason=f"nearest to the budget: {problem}")
