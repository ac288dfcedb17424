"""What a sweep measured, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmi_bench.analysis.results.checks import has_failed
from lmi_bench.analysis.results.slo_results import FailureRule, goodput
from lmi_bench.core.findings import Knee, SloAnswer
from lmi_bench.core.level import Level
from lmi_bench.core.run_store import Run
from lmi_bench.core.scenario import Scenario
from lmi_bench.core.slo import GOOD_SHARE, Slo, parse_slo
from lmi_bench.report.slo_text import meets_all


@dataclass(frozen=True, slots=True)
class SloOptions:
    """How requests are judged: limits of a good request (none: the SLOs), and failures."""

    limits: tuple[Slo, ...] = ()
    failures: FailureRule = "exclude"


AS_STATED = SloOptions()


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A sweep's run folder as it was read back once, with what follows from it.

    run          as its folder has it; None where the sweep ended before it had one
    pooled       the same with the attempts of each level together
    knees        by rule; empty where no level is usable
    answer       of a search, or of levels picked for an SLO; None where neither was asked for
    interrupted  ended by Ctrl-C or SIGTERM: levels may be missing, and nothing was concluded
    """

    folder: Path
    scenario: Scenario
    run: Run | None
    pooled: Run | None = None
    knees: list[Knee] = field(default_factory=list)
    answer: SloAnswer | None = None
    slo_options: SloOptions = AS_STATED
    interrupted: bool = False

    @property
    def levels(self) -> list[Level]:
        """The finished levels."""
        return [] if self.run is None else self.run.levels

    @property
    def slos(self) -> list[Slo]:
        """What the scenario asks of every level."""
        return [parse_slo(text) for text in self.scenario.slo]

    @property
    def nothing_answered(self) -> bool:
        """Whether levels ran and not one request was answered."""
        return bool(self.levels) and all(line.requests == line.errors for line in self.levels)

    @property
    def all_failed(self) -> bool:
        """Whether every level had mostly failures, and no search explains them."""
        return bool(self.levels) and self.answer is None and all(map(has_failed, self.levels))

    @property
    def slo_missed(self) -> bool:
        """Whether no level meets what was asked."""
        if self.interrupted or self.nothing_answered or self.pooled is None:
            return False
        if self.answer is not None:
            return self.answer.value is None
        return misses_slos(self.pooled, self.slos, self.slo_options)

    @property
    def failed(self) -> bool:
        """Whether there is no measurement: no answer at all, or failures that no SLO explains."""
        if self.interrupted:
            return False
        return self.nothing_answered or (self.all_failed and not self.slo_missed)


def misses_slos(run: Run, slos: Sequence[Slo], options: SloOptions) -> bool:
    """Whether every level misses what was asked; without an SLO 90 % of a level's requests must
    be within the limits of a request."""
    if slos:
        return not any(
            meets_all(line, records, slos, failures=options.failures)
            for line, records in zip(run.levels, run.records, strict=True)
        )
    return bool(options.limits) and best_good_share(run, options.limits) < GOOD_SHARE


def best_good_share(run: Run, limits: Sequence[Slo]) -> float:
    """The largest share of good requests of any level, 0 to 1."""
    return max(
        (
            goodput(records, limits, open_loop=line.load.is_open).share or 0.0
            for line, records in zip(run.levels, run.records, strict=True)
        ),
        default=0.0,
    )
