"""One gate from its flags to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmi_bench.analysis.results.gate import GateCase, gate_baseline, gate_slos
from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.analysis.results.slo_values import FAILURE_RULES, FailureRule
from lmi_bench.cli.console import print_table, say
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run
from lmi_bench.core.slo import parse_slo
from lmi_bench.report.gate_files import gate_junit, gate_markdown, gate_rows

_MAX_REGRESSION = "5%"


def run_gate(
    folder: Path,
    *,
    slos: Sequence[str],
    loads: Sequence[float],
    failures: str,
    baseline: Path | None,
    max_regression: str | None,
    junit: Path | None,
    markdown: Path | None,
) -> bool:
    """Check, print and write; whether everything passed."""
    run = load_run(folder)
    texts = list(slos) or list((run.manifest.get("scenario") or {}).get("slo") or ())
    if not texts and baseline is None:
        raise InputError(
            "nothing to gate by: give --slo ttft_p90<=1s, or --baseline with an earlier run"
        )
    if baseline is None and max_regression is not None:
        raise InputError("--max-regression is against an earlier run: add --baseline RUN")
    cases: list[GateCase] = []
    if texts:
        limits = [parse_slo(text) for text in texts]
        cases += gate_slos(pooled_run(run), limits, loads=loads, failures=read_failures(failures))
    if baseline is not None:
        allowed = read_share("--max-regression", max_regression or _MAX_REGRESSION)
        cases += gate_baseline(run, load_run(baseline), max_regression=allowed, loads=loads)
    print_table(f"Gate: {folder}", gate_rows(cases), left=("", "level", "check", "why"))
    for path, text in (
        (junit, gate_junit(cases)),
        (markdown, gate_markdown(cases, title=f"lmi-bench gate {folder.name}")),
    ):
        if path is not None:
            write_text(path, text)
    missed = sum(not case.passed for case in cases)
    say(f"gate: {missed} of {len(cases)} checks missed" if missed else "gate: passed")
    return not missed


def read_failures(text: str) -> FailureRule:
    """The rule for failed requests; raises InputError where it is none."""
    if text not in FAILURE_RULES:
        raise InputError(f"--failures {text!r} is not understood; write exclude or infinite")
    return text


def read_share(flag: str, text: str) -> float:
    """A share from `5%` or `0.05`; raises InputError where it is none."""
    try:
        value = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InputError(f"{flag} {text!r} is not a share; write for example 5% or 0.05")
    return value
