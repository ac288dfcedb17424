"""Pass or fail for a run: by SLOs, and by an earlier run."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.analysis.results.gate import GateCase, gate_baseline, gate_slos
from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.analysis.results.slo_results import FAILURE_RULES, FailureRule
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.settings.gate import GateSettings
from lmi_bench.report.gate_files import gate_junit, gate_markdown

_MAX_REGRESSION = "5%"


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Every check of a run."""

    cases: tuple[GateCase, ...]

    @property
    def missed(self) -> int:
        """Number of checks that the run missed."""
        return sum(not case.passed for case in self.cases)


def gate(settings: GateSettings) -> GateVerdict:
    """Check the run and write the files that were asked for."""
    run = load_run(settings.run)
    texts = settings.slo or tuple((run.manifest.get("scenario") or {}).get("slo") or ())
    if not texts and settings.baseline is None:
        raise InputError(
            "nothing to gate by: give --slo ttft_p90<=1s, or --baseline with an earlier run"
        )
    if settings.baseline is None and settings.max_regression is not None:
        raise InputError("--max-regression is against an earlier run: add --baseline RUN")
    cases: list[GateCase] = []
    if texts:
        limits = [parse_slo(text) for text in texts]
        failures = read_failures(settings.failures)
        cases += gate_slos(pooled_run(run), limits, loads=settings.at, failures=failures)
    if settings.baseline is not None:
        allowed = read_share("--max-regression", settings.max_regression or _MAX_REGRESSION)
        earlier = load_run(settings.baseline)
        cases += gate_baseline(run, earlier, max_regression=allowed, loads=settings.at)
    if settings.junit is not None:
        write_text(settings.junit, gate_junit(cases))
    if settings.markdown is not None:
        title = f"lmi-bench gate {settings.run.name}"
        write_text(settings.markdown, gate_markdown(cases, title=title))
    return GateVerdict(tuple(cases))


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
