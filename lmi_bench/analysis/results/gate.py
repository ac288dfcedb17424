"""A gate on a run: its levels meet every SLO, none got slower, it keeps a benchmark's rules.

An invalid level, or too few requests for the quantile, is "not measured": neither passed nor
missed; so is a baseline's level that the run lacks. A regression is a metric worse by more than
the allowed share and chance.

AgentX (SemiAnalysis InferenceX, as AIPerf's scenario `inferencex-agentx-mvp` locks it): the
sessions of Weka's corpus, 393 or more, in a closed loop at one concurrency, each begun within, with
a primed cache; waits from the end of an answer, gaps between starts cut to 10 s; whole answers,
streamed; other text in each play; at least 15 minutes, and at most 1 % failed requests.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from lmi_bench.analysis.results.compare import Difference, compare_runs
from lmi_bench.analysis.results.slo_results import FailureRule, level_slo
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import Level
from lmi_bench.core.load import load_name
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import Slo
from lmi_bench.core.units import format_figure

Outcome = Literal["missed", "not measured", "passed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""The worst first."""
_OUTCOME_OF: Final[Mapping[str, Outcome]] = {"fail": "missed", "unsupported": "not measured", "pass": "passed"}
_NOT_DELIVERED: Final = "the load was not delivered"


@dataclass(frozen=True, slots=True)
class GateCase:
    """One check of one level.

    measured, limit  formatted, with their unit
    detail           why it did not pass; empty if it did
    asked            the user asked for this figure: without it the gate has no verdict
    """

    level: str
    name: str
    measured: str
    limit: str
    outcome: Outcome
    detail: str = ""
    asked: bool = True


def gate_slos(
    run: Run, slos: Sequence[Slo], *, loads: Sequence[float] = (), failures: FailureRule = "exclude"
) -> list[GateCase]:
    """Every SLO at every level, or at the loads given.

    Raises InputError where the run has no level, or none at one of the loads.
    """
    cases: list[GateCase] = []
    for line, records in _levels(run, loads):
        cases += [_slo_case(line, records, slo, failures) for slo in slos]
        if not line.valid:
            reason = line.invalid_reason or _NOT_DELIVERED
            cases.append(GateCase(line.name, "valid", "no", "yes", "not measured", reason))
    return cases


def gate_baseline(run: Run, baseline: Run, *, max_regression: float, loads: Sequence[float] = ()) -> list[GateCase]:
    """Every metric of every level of an earlier run, or of the loads given.

    max_regression  share by which a metric may be worse, 0.05 for 5 %
    Raises InputError where the workloads differ, no level is common or a run lacks a load given.
    """
    cases = [
        _regression_case(difference, max_regression)
        for difference in compare_runs(baseline, run)
        if not loads or difference.load in loads
    ]
    known = {case.level for case in cases if case.outcome != "not measured"}
    cases = [replace(case, asked=case.level not in known) for case in cases]
    return [*cases, *_lost_levels(run, baseline, loads)]


def _lost_levels(run: Run, baseline: Run, loads: Sequence[float]) -> Iterator[GateCase]:
    """A case for each valid level of the baseline, or load given, that cannot be compared.

    A level that a rule picked may be missing: each run picks its own.
    """
    ran = sorted((line for line, _ in _levels(run, loads)), key=lambda line: line.valid)
    now = {(x.load.axis, x.load.value): x for x in ran}  # a valid attempt, if there is any
    before = {(x.load.axis, x.load.value): x for x, _ in _levels(baseline, loads) if x.valid}
    is_listed = bool(loads) or not baseline.manifest.scenario.load.is_picked
    for key in {**before, **now} if loads else before:
        line = now.get(key)
        detail = "the run has no such level" if line is None else line.invalid_reason
        if key not in before:
            detail = "the baseline has no valid level here"
        elif line is not None and line.valid:
            continue
        case = GateCase(load_name(*key), "vs baseline", "unknown", "in both", "not measured")
        yield replace(case, detail=detail or _NOT_DELIVERED, asked=is_listed or line is not None)


def _levels(run: Run, loads: Sequence[float]) -> Sequence[tuple[Level, Sequence[RequestRecord]]]:
    levels = list(zip(run.levels, run.records, strict=True))
    if not levels:
        raise InputError(f"{run.path} has no finished level: nothing can be gated")
    if not loads:
        return levels
    kept = [pair for pair in levels if pair[0].load.value in loads]
    missing = sorted(set(loads) - {line.load.value for line, _ in kept})
    if missing:
        have = ", ".join(f"{line.load.value:g}" for line, _ in levels)
        raise InputError(f"{run.path} has no level at {', '.join(f'{load:g}' for load in missing)}; it has {have}")
    return kept


def _slo_case(line: Level, records: Sequence[RequestRecord], slo: Slo, failures: FailureRule) -> GateCase:
    result = level_slo(line, records, slo, failures)
    measured = "unknown" if result.measured_ms is None else _ms(result.measured_ms)
    limit, outcome = _ms(slo.limit_ms), _OUTCOME_OF[result.verdict]
    detail = result.reason or (f"{measured} is over {limit}" if outcome == "missed" else "")
    return GateCase(line.name, f"{slo.metric}_{slo.statistic}", measured, limit, outcome, detail)


def _ms(value: float) -> str:
    return f"{format_figure(value)} ms" if math.isfinite(value) else "infinite"


def _regression_case(difference: Difference, allowed: float) -> GateCase:
    case = GateCase(
        level=difference.level,
        name=f"{difference.metric} vs baseline",
        measured="unknown",
        limit=f"at most {allowed * 100:g} % worse",
        outcome="passed",
        asked=False,
    )
    if difference.change is None:
        return replace(case, outcome="not measured", detail=difference.reason)
    shown = f"{difference.change:+.1%}"
    if difference.verdict == "no difference" and (difference.detectable or 0.0) > allowed:
        detail = f"a change of {difference.detectable:.1%} would have been seen, not of {allowed:.1%}"
        return replace(case, measured=shown, outcome="not measured", detail=detail)
    if difference.verdict != "slower" or (difference.worse_by or 0.0) <= allowed:
        return replace(case, measured=shown)
    detail = (
        f"{format_figure(difference.a)} became {format_figure(difference.b)} {difference.unit}: "
        f"{shown} (95 % {difference.low:+.1%} to {difference.high:+.1%})"
    )
    return replace(case, measured=shown, outcome="missed", detail=detail)


def gate_whole(run: Run, what: str) -> Iterator[GateCase]:
    """A case for a run that lacks a level that its scenario lists, or whose sweep is not over."""
    measured = {(line.load.axis, line.load.value) for line in run.levels}
    lacks = [load_name(*each) for each in run.manifest.scenario.load.listed if each not in measured]
    if lacks or (run.knees is None and run.manifest.imported_from is None):
        detail = f"it lacks {', '.join(lacks)}" if lacks else "its sweep is not over, or a file is torn"
        yield GateCase(what, "whole", "no", "yes", "not measured", f"{detail}: sweep --resume goes on")


RULES: Final = ("agentx",)
_IDLE_CAP_S, _LEAST_S, _MOST_FAILED, _CORPUS = 10.0, 900.0, 0.01, 393


def gate_rules(run: Run, name: str) -> list[GateCase]:
    """One case for each rule; raises InputError for an unknown name."""
    if name not in RULES:
        raise InputError(f"--rules {name!r} is not known; write {', '.join(RULES)}")
    scenario, workload = run.manifest.scenario, run.manifest.scenario.workload
    loads = {line.load.value for line in run.levels}
    closed = bool(run.levels) and not any(line.load.is_open for line in run.levels)
    facts = [
        ("load", closed and len(loads) == 1, "one --concurrency"),
        ("begin", workload.begins_within, "--begin-within"),
        ("idle gaps", workload.idle_cap_s == _IDLE_CAP_S, f"--idle-cap {_IDLE_CAP_S:g}"),
        ("answers", workload.ignore_eos and scenario.stream, "streamed, and as long as recorded"),
        ("prompts", not workload.reuse_prompts, "--fresh-prompts"),
        ("target", not run.manifest.target.is_simulated, "a server that was measured"),
    ]
    cases = [_case("run", name, "yes" if met else "no", met, rule) for name, met, rule in facts]
    kept = None if workload.agent_trace is None else run.manifest.sessions
    met = kept is not None and kept.kind == "weka" and kept.number >= _CORPUS
    shown = "not known" if kept is None else f"{kept.number:,} of {kept.kind}"
    cases.append(_case("run", "sessions", shown, met, f"{_CORPUS} of weka: --agent-trace"))
    for line in run.levels:
        failed, wall_s = (line.errors or 0) / max(1, line.requests or 0), line.wall_s or 0.0
        limit = f"at most {_MOST_FAILED:.0%}"
        cases += [
            _case(line.name, "duration", f"{wall_s:.0f} s", wall_s >= _LEAST_S, f"{_LEAST_S:g} s"),
            _case(line.name, "failed", f"{failed:.1%}", failed <= _MOST_FAILED, limit),
            _case(line.name, "valid", "yes" if line.valid else "no", line.valid, "yes"),
        ]
    return cases


def _case(level: str, name: str, measured: str, holds: bool, rule: str) -> GateCase:
    detail = "" if holds else f"the rules ask for {rule}"
    return GateCase(level, name, measured, rule, "passed" if holds else "missed", detail)
