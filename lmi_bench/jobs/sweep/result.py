"""What a sweep measured and how it ended; a complete run is read back by --resume."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmi_bench.analysis.results.gate import Outcome
from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.analysis.results.slo_results import MISSED_BY, FailureRule, goodput
from lmi_bench.core.findings import Knee, SloAnswer
from lmi_bench.core.level import Level
from lmi_bench.core.manifest import RunScenario
from lmi_bench.core.run_store import CLOUDWATCH, MANIFEST, Run, load_run
from lmi_bench.core.scenario import AUTO, SAGEMAKER_PREFIX, SIMULATED_PREFIX, Scenario, is_endpoint
from lmi_bench.core.slo import GOOD_SHARE, Slo, parse_slo
from lmi_bench.jobs.sweep.levels import level_rule, with_levels_found
from lmi_bench.loadgen.run.sweep import has_ended
from lmi_bench.report.slo_text import slo_verdicts


@dataclass(frozen=True, slots=True)
class SloOptions:
    """How requests are judged: limits of a good request (none: the SLOs), and failures."""

    limits: tuple[Slo, ...] = ()
    failures: FailureRule = "exclude"


AS_STATED = SloOptions()


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A sweep's run folder as it was read back once, with what follows from it.

    run          as its folder has it; None if the sweep ended before it had one
    pooled       the run with the attempts of each level together
    knees        by rule; empty if no level is usable
    answer       of a search, or of levels picked for an SLO; None if neither is wanted
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

    def to_json(self) -> dict[str, Any]:
        """Folder, levels, knees and the answer of a search as plain values, as in its files."""
        return {
            "run": str(self.folder),
            "interrupted": self.interrupted,
            "levels": [level.to_json() for level in self.levels],
            "knees": [knee.to_json() for knee in self.knees],
            "slo": None if self.answer is None else self.answer.to_json(),
        }

    @property
    def slos(self) -> list[Slo]:
        """The scenario's SLOs for every level."""
        return [parse_slo(text) for text in self.scenario.slo]

    @property
    def nothing_answered(self) -> bool:
        """Whether levels ran and no request was answered."""
        return bool(self.levels) and all(line.requests == line.errors for line in self.levels)

    @property
    def all_failed(self) -> bool:
        """Whether every level had mostly failures, and no search explains them."""
        return bool(self.levels) and self.answer is None and all(line.has_failed for line in self.levels)

    @property
    def slo_outcome(self) -> Outcome | None:
        """Whether a level meets the SLOs; None without SLOs or answers."""
        if self.interrupted or self.nothing_answered or self.pooled is None:
            return None
        if self.answer is not None and self.answer.value is not None:
            return "passed"
        return slo_outcome(self.pooled, self.slos, self.slo_options)

    @property
    def slo_missed(self) -> bool:
        """Whether no level meets the SLOs."""
        return self.slo_outcome == "missed"

    @property
    def failed(self) -> bool:
        """Whether nothing was measured: no answer at all, or failures that no SLO explains."""
        if self.interrupted:
            return False
        return self.nothing_answered or (self.all_failed and not self.slo_missed)


def slo_outcome(run: Run, slos: Sequence[Slo], options: SloOptions) -> Outcome | None:
    """Whether a level meets the SLOs; without SLOs, the limits in 90 % of its requests.

    Latency rises with load, so they are missed if the lowest load misses them. If that has too few
    requests to tell, or is invalid, nothing is known. None without SLOs and limits.
    """
    if not slos:
        if not options.limits:
            return None
        best = best_good_share(run, options.limits)
        if best is None:
            return "not measured"
        return "missed" if best < GOOD_SHARE else "passed"
    levels = list(zip(run.levels, run.records, strict=True))
    met = [slo_verdicts(line, records, slos, options.failures) for line, records in levels]
    if any(line.valid and all(verdicts) for line, verdicts in zip(run.levels, met, strict=True)):
        return "passed"
    lowest = min((line.load.value for line in run.levels), default=0.0)
    misses = (
        (line.valid and False in verdicts)
        or (line.stopped_by in MISSED_BY and (False in verdicts or not (all(verdicts) or line.has_failed)))
        or (line.valid and line.search is not None and line.search.sure)
        for line, verdicts in zip(run.levels, met, strict=True)
        if line.load.value == lowest
    )
    return "missed" if any(misses) else "not measured"


def best_good_share(run: Run, limits: Sequence[Slo]) -> float | None:
    """The largest share of good requests of any valid level, 0 to 1; None if none is known."""
    lines = (each for each in zip(run.levels, run.records, strict=True) if each[0].valid)
    found = (goodput(records, limits, open_loop=line.load.is_open).share for line, records in lines)
    return max((share for share in found if share is not None), default=None)


def finished_run(folder: Path, scenario: Scenario, slo_options: SloOptions = AS_STATED) -> SweepResult | None:
    """The complete run in a folder; None if another scenario began it or a level is missing.

    The result's scenario has the values that the run found out when it began.
    """
    if not (folder / MANIFEST).exists():
        return None
    run = load_run(folder, to_resume=True)
    begun = _as_begun(scenario, run.manifest.scenario)
    if begun.hash() != run.manifest.scenario_hash or run.knees is None:
        return None
    at_aws = scenario.target.startswith(SAGEMAKER_PREFIX) and not scenario.sagemaker.endpoint_url
    if at_aws and not (folder / CLOUDWATCH).exists():
        return None  # CloudWatch's minutes come late: they may be there by now
    rule = level_rule(begun)
    if rule.search is not None and run.slo_answer is None:
        return None
    if not has_ended(run.levels, rule.stop_rules) and rule.levels(run.levels) is not None:
        return None
    answer = None if rule.search is None else run.slo_answer
    return SweepResult(folder, begun, run, pooled_run(run), run.knees, answer, slo_options)


def _as_begun(scenario: Scenario, kept: RunScenario) -> Scenario:
    """The scenario completed by what the run found out when it began."""
    scenario = with_levels_found(scenario)
    found: dict[str, Any] = {
        name: known
        for name in ("protocol", "model")
        if getattr(scenario, name) == AUTO and (known := getattr(kept, name))
    }
    if is_endpoint(scenario.target) and not kept.workload.ignore_eos:
        found["workload.ignore_eos"] = False  # the server does not take it
    simulated = scenario.target.startswith(SIMULATED_PREFIX)
    if simulated and not isinstance(scenario.engine.tensor_parallel, int):
        found["engine.tensor_parallel"] = kept.engine.tensor_parallel
    return scenario.with_overrides(found)
