"""`--resume` on a complete run: its stored result is returned and nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_bench.core.findings import Knee, SloAnswer
from lmi_bench.core.run_store import CLOUDWATCH, MANIFEST, Run, load_run
from lmi_bench.core.scenario import AUTO, SAGEMAKER_PREFIX, Scenario, is_endpoint
from lmi_bench.jobs.sweep.levels import level_rule, with_levels_found


@dataclass(frozen=True, slots=True)
class Finished:
    """What a complete run holds.

    scenario  with what was found when it began
    answer    of levels that were picked for an SLO
    """

    run: Run
    scenario: Scenario
    knees: list[Knee]
    answer: SloAnswer | None


def finished_run(folder: Path, scenario: Scenario) -> Finished | None:
    """The run in a folder if this scenario began it and no level of it is left to be sent."""
    if not (folder / MANIFEST).exists():
        return None
    run = load_run(folder)
    begun = _as_begun(scenario, run.manifest.get("scenario") or {})
    if begun.hash() != run.manifest.get("scenario_hash") or run.knees is None:
        return None
    at_aws = scenario.target.startswith(SAGEMAKER_PREFIX) and not scenario.sagemaker.endpoint_url
    if at_aws and not (folder / CLOUDWATCH).exists():
        return None  # CloudWatch's minutes come late: they may be there by now
    rule = level_rule(begun)
    if rule.search is not None and run.slo_answer is None:
        return None
    last = run.levels[-1].stopped_by if run.levels else None
    stopped = rule.stop_rules.ends_sweep and last not in (None, "duration", "decided")
    if not stopped and rule.levels(run.levels) is not None:
        return None
    return Finished(run, begun, run.knees, None if rule.search is None else run.slo_answer)


def _as_begun(scenario: Scenario, kept: dict[str, Any]) -> Scenario:
    """The scenario with what the run found out when it began, where it leaves that open."""
    scenario = with_levels_found(scenario)
    found = {
        name: kept.get(name)
        for name in ("protocol", "model")
        if getattr(scenario, name) == AUTO and kept.get(name) is not None
    }
    if is_endpoint(scenario.target) and not (kept.get("workload") or {}).get("ignore_eos", True):
        found["workload.ignore_eos"] = False  # the server does not take it
    return scenario.with_overrides(found)
