"""Which candidates no other one beats on both money and speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.ranking import cost_of
from lmi_bench.analysis.fleet.request import RecommendRequest


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the points that no other point beats; smaller is better in every coordinate.

    >>> pareto([(1.0, 9.0), (2.0, 3.0), (3.0, 3.0), (4.0, 1.0)])
    [0, 1, 3]
    """
    return [
        index
        for index, point in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and other != point
            for other in points
        )
    ]


def frontier(request: RecommendRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates on the frontier of cost and ms/token (p90), the cheapest first, each layout once.

    Without a price or a latency a candidate is on no frontier. Of equal points the first stays.
    """
    points: dict[tuple[float, ...], Candidate] = {}
    for candidate in candidates:
        cost, latency = (
            cost_of(request, candidate),
            candidate.figures.get("latency_per_token_p90_ms"),
        )
        if cost is not None and latency is not None and math.isfinite(cost):
            points.setdefault((cost, latency.value), candidate)
    known = sorted(points)
    return [points[known[index]] for index in pareto(known)]
