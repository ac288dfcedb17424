"""A gate for continuous integration: every level meets every SLO, and none got slower.

A level that cannot be told (too few requests for the quantile) or that is invalid does not pass: a
gate that cannot see must not wave through. A regression is a metric that is worse by more than the
allowed share and by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmi_bench.analysis.results.compare import Difference, compare_runs
from lmi_bench.analysis.results.goodput import check_slo
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.slo_values import FailureRule, request_values_ms, statistic_ms
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import QUANTILES, Level
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import Slo


@dataclass(frozen=True, slots=True)
class GateCase:
    """One thing that was checked at one level.

    measured, limit  as people read them, with their unit
    detail           why it did not pass; empty if it did
    """

    level: str
    name: str
    measured: str
    limit: str
    passed: bool
    detail: str = ""


def gate_slos(
    run: Run,
    slos: Sequence[Slo],
    *,
    loads: Sequence[float] = (),
    failures: FailureRule = "exclude",
) -> list[GateCase]:
    """Every SLO at every level, or at the loads given.

    Raises InputError where a load was not measured, or nothing was.
    """
    cases: list[GateCase] = []
    for line, records in _levels(run, loads):
        cases += [_slo_case(line, records, slo, failures) for slo in slos]
        cases += _state_case(line)
    return cases


def gate_baseline(
    run: Run,
    baseline: Run,
    *,
    max_regression: float,
    loads: Sequence[float] = (),
    seed: int = 0,
) -> list[GateCase]:
    """Every metric of every common level against an earlier run.

    max_regression  share by which a metric may be worse, 0.05 for 5 %
    Raises InputError where the workloads differ or no level is common.
    """
    return [
        _regression_case(difference, max_regression)
        for difference in compare_runs(baseline, run, seed=seed)
        if not loads or difference.load in loads
    ]


def level_measured_ms(
    records: Sequence[RequestRecord], slo: Slo, *, open_loop: bool, failures: FailureRule
) -> tuple[float | None, str]:
    """The SLO's statistic over a level, in ms, or None and why it cannot be told."""
    values = request_values_ms(records, slo.metric, open_loop=open_loop, failures=failures)
    if not values:
        return None, "no request has this latency"
    n = sum(each.size for each in values)
    quantile = QUANTILES.get(slo.statistic)
    least = min(float(each.min()) for each in values)
    if quantile is not None and n < samples_needed(quantile) and least <= slo.limit_ms:
        return None, f"{slo.statistic} needs {samples_needed(quantile)} samples, has {n}"
    return statistic_ms(np.concatenate(values), slo.statistic), ""


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
        raise InputError(
            f"{run.path} has no level at {', '.join(f'{load:g}' for load in missing)}; "
            f"it has {have}"
        )
    return kept


def _slo_case(
    line: Level, records: Sequence[RequestRecord], slo: Slo, failures: FailureRule
) -> GateCase:
    if records:
        open_loop = line.load.is_open
        measured, reason = level_measured_ms(records, slo, open_loop=open_loop, failures=failures)
    else:  # an imported level may have its statistics only
        result = check_slo(line, slo)
        measured, reason = result.measured_ms, result.reason
    limit = _ms(slo.limit_ms)
    name = f"{slo.metric}_{slo.statistic}"
    if measured is None:
        return GateCase(line.name, name, "unknown", limit, False, f"cannot tell: {reason}")
    shown = _ms(measured)
    passed = measured <= slo.limit_ms
    detail = "" if passed else f"{shown} is over {limit}"
    return GateCase(line.name, name, shown, limit, passed, detail)


def _ms(value: float) -> str:
    return f"{_figure(value)} ms" if math.isfinite(value) else "endless"


def _figure(value: float | None) -> str:
    """Three significant digits or more, without an exponent."""
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _state_case(line: Level) -> list[GateCase]:
    if line.valid:
        return []
    reason = line.invalid_reason or "the load was not delivered"
    return [GateCase(line.name, "valid", "no", "yes", False, reason)]


def _regression_case(difference: Difference, allowed: float) -> GateCase:
    limit = f"at most {allowed * 100:g} % worse"
    if difference.change is None or difference.low is None or difference.high is None:
        # a metric that this workload does not have (TPOT of one token) cannot regress
        return GateCase(
            difference.level, f"{difference.metric} vs baseline", "unknown", limit, True,
            difference.reason,
        )  # fmt: skip
    worse_by = difference.worse_by or 0.0
    passed = not (worse_by > allowed and difference.verdict == "slower")
    shown = f"{difference.change:+.1%}"
    detail = "" if passed else (
        f"{_figure(difference.a)} became {_figure(difference.b)} {difference.unit}: {shown} "
        f"(95 % {difference.low:+.1%} to {difference.high:+.1%})"
    )  # fmt: skip
    return GateCase(
        difference.level, f"{difference.metric} vs baseline", shown, limit, passed, detail
    )
