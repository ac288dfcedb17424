"""Looks long at the best fleets: joint attainment and worst five minutes at the planned load.

A short simulation that finds the SLOs kept may have been lucky. Where fifteen minutes of a fleet's
load do not keep them, its copies carry less than was thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.attainment import Attainment, keeps, look_long
from lmi_bench.analysis.fleet.candidates import CopyCapacity, operating_of
from lmi_bench.analysis.fleet.ranking import Fleet
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import EngineKey


class LongLook:
    """Simulates planned loads for fifteen minutes, layouts of equal speed and load once."""

    def __init__(self, request: RecommendRequest) -> None:
        self._request = request
        self._seen: dict[tuple[EngineKey, float], Attainment] = {}

    def at(self, candidate: Candidate, fleets: Sequence[Fleet]) -> Attainment:
        """What becomes of the candidate's load. fleets: those that the candidates are of."""
        layout, copy, machines = fleet_of(candidate, fleets)
        serving = self._request.availability.surviving(machines)
        operating = operating_of(self._request, layout, copy, serving)
        key = (layout.engine_key, round(operating.rate_per_s, 9))
        if key not in self._seen:
            self._seen[key] = look_long(
                copy.plan,
                operating,
                self._request.slos,
                copies=serving * layout.copies,
                routing=self._request.routing,
                seed=self._request.seed,
            )
        return self._seen[key]

    def overloaded(
        self, candidate: Candidate, fleets: Sequence[Fleet]
    ) -> tuple[EngineKey, CopyCapacity] | None:
        """The copy with its rate noted as too much for it; None where the SLOs are kept.

        What was measured counts more than a simulation.
        """
        layout, copy, machines = fleet_of(candidate, fleets)
        serving = self._request.availability.surviving(machines)
        rate_per_s = operating_of(self._request, layout, copy, serving).rate_per_s
        if not self._request.open_loop or rate_per_s <= copy.kept_per_s * (1 + 1e-9):
            return None
        if keeps(self.at(candidate, fleets), self._request.slos):
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
