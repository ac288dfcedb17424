"""Looks long at the best fleets: joint attainment and worst five minutes at the planned load.

A short simulation that finds the SLOs kept may have been lucky. Where fifteen minutes of a fleet's
load do not keep them, its copies carry less than was thought.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.attainment import Attainment, keeps, look_long
from lmi_bench.analysis.fleet.candidates import operating_of
from lmi_bench.analysis.fleet.ranking import Fleet
from lmi_bench.analysis.fleet.request import RecommendRequest


class LongLook:
    """Simulates planned loads for fifteen minutes, layouts of equal speed and load once."""

    def __init__(self, request: RecommendRequest) -> None:
        self._request = request
        self._seen: dict[tuple[int, float], Attainment] = {}

    def at(self, candidate: Candidate, fleets: Sequence[Fleet]) -> Attainment:
        """What becomes of the candidate's load. fleets: those that the candidates are of."""
        layout, engine, machines = fleet_of(candidate, fleets)
        serving = self._request.availability.surviving(machines)
        operating = operating_of(self._request, layout, engine, serving)
        key = (id(engine), round(operating.rate_per_s, 9))
        if key not in self._seen:
            self._seen[key] = look_long(
                engine.plan,
                operating,
                self._request.slos,
                copies=serving * layout.copies,
                routing=self._request.routing,
                seed=self._request.seed,
            )
        return self._seen[key]

    def holds(self, candidate: Candidate, fleets: Sequence[Fleet]) -> bool:
        """Whether the SLOs are kept; if not, the rate is noted with the engine as too much for it.

        What was measured counts more than a simulation.
        """
        layout, engine, machines = fleet_of(candidate, fleets)
        serving = self._request.availability.surviving(machines)
        rate_per_s = operating_of(self._request, layout, engine, serving).rate_per_s
        if not self._request.open_loop or rate_per_s <= engine.kept_per_s * (1 + 1e-9):
            return True
        if keeps(self.at(candidate, fleets), self._request.slos):
            return True
        engine.too_much_per_s = min(engine.too_much_per_s, rate_per_s)
        return False


def fleet_of(candidate: Candidate, fleets: Sequence[Fleet]) -> Fleet:
    """The fleet that a candidate was built from."""
    return next(
        fleet
        for fleet in fleets
        if (fleet[0].instance.instance_type, fleet[0].tensor_parallel, fleet[0].setting)
        == (candidate.instance, candidate.tensor_parallel, candidate.setting)
    )
