"""Runs, recommendations and traffic as reports, comparisons, verdicts, scenarios and files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lmi_bench.analysis.results.compare import (
    Difference,
    ScalingEfficiency,
    are_paired,
    compare_runs,
    scaling_efficiency,
)
from lmi_bench.analysis.results.gate import GateCase, gate_baseline, gate_rules, gate_slos, gate_whole
from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import EXIT_BAD_INPUT, EXIT_SLO_MISSED, InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run, repair_run
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.slo import parse_slo
from lmi_bench.interchange import traffic_statistics
from lmi_bench.interchange.export import EXPORT_FORMATS, export_run
from lmi_bench.interchange.imports.inferencex_table import read_runs
from lmi_bench.interchange.imports.read import write_imported
from lmi_bench.interchange.prometheus import read_metrics
from lmi_bench.interchange.traffic import Traffic, parse_assumed, parse_fields, read_traffic
from lmi_bench.interchange.traffic_statistics import Summary as Summary
from lmi_bench.jobs.files import read_recommendation
from lmi_bench.jobs.settings import results
from lmi_bench.jobs.sweep.limits import read_failures, read_share
from lmi_bench.report.gate_files import gate_junit, gate_markdown
from lmi_bench.report.html import render_html
from lmi_bench.report.text import render_markdown
from lmi_bench.report.view import build_view


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The files that were written; markdown and figures if wanted; what was repaired."""

    html: Path
    markdown: Path | None
    figures: tuple[Path, ...]
    repaired: tuple[str, ...] = ()


def report(settings: results.ReportSettings) -> WrittenReport:
    """Write the page; raises InputError for a run or a recommendation that cannot be read."""
    repaired = [line for path in settings.runs if settings.repair for line in repair_run(path)]
    recommendations = [read_recommendation(path) for path in settings.recommendation]
    view = build_view(settings.runs, recommendations, labels=settings.label, title=settings.title)
    write_text(settings.out, render_html(view))
    if settings.markdown is not None:
        write_text(settings.markdown, render_markdown(view))
    figures: tuple[Path, ...] = ()
    if settings.figures is not None:
        from lmi_bench.report.figures import write_figures

        figures = tuple(write_figures(view, settings.figures, file_format=settings.figure_format))
    return WrittenReport(settings.out, settings.markdown, figures, tuple(repaired))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between run `a` and run `b` by more than chance.

    scaling  for runs with different numbers of copies: their joint throughput
    """

    a: Path
    b: Path
    differences: list[Difference]
    scaling: ScalingEfficiency | None

    def to_json(self) -> dict[str, Any]:
        """As `compare --json` writes it."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "confidence": 0.95,
            "differences": [asdict(each) for each in self.differences],
            "scaling": None if self.scaling is None else self.scaling.to_json(),
        }


def compare(settings: results.CompareSettings, listener: Listener = SILENT) -> Comparison:
    """Compare two runs; raises InputError if their workloads differ."""
    first, second = load_run(settings.a), load_run(settings.b)
    if not are_paired(first, second):
        seeds = " and ".join(str(run.manifest.scenario.seed) for run in (first, second))
        listener.note(f"seeds {seeds}: the requests differ, so they are compared without pairs")
    return Comparison(settings.a, settings.b, compare_runs(first, second), scaling_efficiency(first, second))


_MAX_REGRESSION = "5%"


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Every check of a run."""

    cases: tuple[GateCase, ...]

    def to_json(self) -> dict[str, Any]:
        """The checks as plain values."""
        return {"checks": [asdict(case) for case in self.cases], "exit_code": self.exit_code}

    @property
    def exit_code(self) -> int:
        """99 if a check was missed, 2 if one that was asked for was not measured, else 0."""
        if any(case.outcome == "missed" for case in self.cases):
            return EXIT_SLO_MISSED
        unknown = any(case.asked and case.outcome == "not measured" for case in self.cases)
        nothing = all(case.outcome == "not measured" for case in self.cases)
        return EXIT_BAD_INPUT if unknown or nothing else 0


def gate(settings: results.GateSettings) -> GateVerdict:
    """Check the run and write the files that the settings name."""
    run = load_run(settings.run)
    texts = settings.slo or tuple(run.manifest.scenario.slo)
    if not texts and settings.baseline is None and settings.rules is None:
        raise InputError("nothing to check: give --slo ttft_p90<=1s, --rules, or --baseline with an earlier run")
    if settings.baseline is None and settings.max_regression is not None:
        raise InputError("--max-regression needs an earlier run: add --baseline RUN")
    cases: list[GateCase] = [] if settings.at else [*gate_whole(run, "the run")]
    failures = read_failures(settings.failures)
    if settings.at and not texts and settings.baseline is None:
        raise InputError("--at names levels for --slo or --baseline: --rules takes the whole run")
    if failures != "exclude" and not texts:
        raise InputError("--failures says how failed requests count in SLOs: add --slo ttft_p90<=1s")
    if texts:
        limits = [parse_slo(text) for text in texts]
        cases += gate_slos(pooled_run(run), limits, loads=settings.at, failures=failures)
    if settings.baseline is not None:
        allowed = read_share("--max-regression", settings.max_regression or _MAX_REGRESSION)
        earlier = load_run(settings.baseline)
        cases += gate_baseline(run, earlier, max_regression=allowed, loads=settings.at)
        cases += [] if settings.at else gate_whole(earlier, "the baseline")
    if settings.rules is not None:
        cases += gate_rules(run, settings.rules)
    if settings.junit is not None:
        write_text(settings.junit, gate_junit(cases))
    if settings.markdown is not None:
        title = f"lmi-bench gate {settings.run.name}"
        write_text(settings.markdown, gate_markdown(cases, title=title))
    return GateVerdict(tuple(cases))


def export(settings: results.ExportSettings) -> list[Path]:
    """Write the run and return the files; raises InputError for an unknown format."""
    wanted, run = settings.export_format, settings.run
    if wanted not in EXPORT_FORMATS:
        raise InputError(f"--format {wanted!r} is not known; write {', '.join(EXPORT_FORMATS)}")
    folder = settings.out or run.resolve().with_name(f"{run.resolve().name}-export")
    return export_run(load_run(run), wanted, folder)


def import_results(
    settings: results.ImportSettings, listener: Listener = SILENT, *, command: Sequence[str] = ()
) -> tuple[int, str, list[Path]]:
    """Write the run folder, or one below it for each set-up of a table of several.

    Returns the number of levels, the tool that measured them and the run folders. Raises
    InputError for a file that cannot be read, or that is not one run with the others.
    """
    is_stated = settings.concurrency is not None or settings.rate is not None
    load = Load(settings.concurrency, settings.rate) if is_stated else None
    found = [read_runs(path, load) for path in settings.files]
    parts = [part for runs in found for part in runs.values()]
    for text in sorted({text for part in parts for text in part.notes}):
        listener.note(text)
    runs = {settings.out: parts}
    if len(found) == 1 and len(parts) > 1:
        runs = {settings.out / name: [part] for name, part in found[0].items()}
    levels = [write_imported(each, folder, command=command) for folder, each in runs.items()]
    return sum(levels), parts[0].tool, list(runs)


_LEAST_SHARED = 16  # tokens of a cache block; shorter prefixes are chance or a template


def workload_from(settings: results.WorkloadFromSettings, listener: Listener = SILENT) -> tuple[Summary, Path | None]:
    """Read the source and write the scenario; raises InputError for one that cannot be read.

    Returns the summary, and the file of the daily curve if the source has one.
    """
    source, out = settings.source, settings.out
    if source.startswith(results.PROMETHEUS):
        found = read_metrics(source.removeprefix(results.PROMETHEUS), hours=settings.hours)
    else:
        traffic = read_traffic(
            Path(source),
            fields=None if settings.fields is None else parse_fields(settings.fields),
            assume=None if settings.assume is None else parse_assumed(settings.assume),
            listener=listener,
        )
        found = of_traffic(traffic)
    if settings.speed != 1 and found.peak_per_s is None:
        raise InputError(f"--speed multiplies the rate, which {source} does not hold: leave it out")
    content = scenario_content(found, name=out.stem, model=settings.model, growth=settings.speed)
    parse_scenario(content, source=str(out))
    header = f"# Written by `lmi-bench workload from {source}`.\n"
    header += "".join(f"# Not known: {text}\n" for text in found.unknown)
    write_text(out, header + yaml.safe_dump(content, sort_keys=False))
    curve = day_curve(found)
    day = out.with_name(f"{out.stem}-day.csv") if curve else None
    if day is not None:
        write_text(day, curve)
    return found, day


def of_traffic(traffic: Traffic) -> Summary:
    """The summary of recorded requests."""
    requests, prefix = traffic.requests, traffic.prefix
    summary = Summary(
        kinds=traffic_statistics.joint_kinds(requests),
        shared_tokens=None if prefix is None else prefix.common,
        repeated=None if prefix is None else prefix.repeated,
        correlation=traffic_statistics.length_correlation(requests),
        assumed=traffic.assumed > 0,
        unknown=traffic.unknown,
        notes=traffic.notes,
    )
    if not traffic.has_times:
        return summary
    times = [each.at_s for each in requests]
    span_s = times[-1] - times[0]
    bursts = traffic_statistics.burstiness(times)
    unknown = list(summary.unknown)
    if span_s < traffic_statistics.PEAK_WINDOW_S:
        unknown.append(f"the peak of five minutes: the record has {span_s:,.0f} s, its mean rate")
    if bursts.shape is None:
        unknown.append(f"burstiness: {bursts.how}; taken as Poisson")
    hourly: tuple[float | None, ...] = ()
    if traffic.start_epoch_s is not None:
        hourly = traffic_statistics.hourly_rates_per_s(times, traffic.start_epoch_s)
        missing = sum(rate is None for rate in hourly)
        if missing:
            unknown.append(f"the daily curve: {missing} of 24 hours are not in the record")
    return replace(
        summary,
        peak_per_s=traffic_statistics.peak_rate_per_s(times),
        mean_per_s=(len(times) - 1) / span_s,
        bursts=bursts,
        hourly_per_s=hourly,
        unknown=tuple(unknown),
    )


def scenario_content(found: Summary, *, name: str, model: str | None, growth: float = 1.0) -> dict[str, Any]:
    """The scenario as YAML holds it.

    growth  the peak rate is multiplied by it
    """
    workload: dict[str, Any] = {"mix": [kind.to_json() | {"share": round(kind.share, 6)} for kind in found.kinds]}
    if found.shared_tokens is not None and found.shared_tokens >= _LEAST_SHARED:
        shortest = min(kind.input_tokens for kind in found.kinds)
        workload["shared_prefix"] = min(found.shared_tokens, shortest - 1)
    content: dict[str, Any] = {"name": name}
    if model is not None:
        content["model"] = model
    missing = {"rate": found.peak_per_s is None, "lengths": found.assumed}
    if any(missing.values()):
        content["unrecorded"] = [name for name, is_missing in missing.items() if is_missing]
    content["workload"] = workload
    if found.peak_per_s is not None:
        load: dict[str, Any] = {"rate_per_s": [float(f"{found.peak_per_s * growth:.4g}")]}
        shape = None if found.bursts is None else found.bursts.shape
        if shape is not None and shape != 1:
            load |= {"arrivals": "gamma", "burstiness": float(f"{shape:.3g}")}
        content["load"] = load
    return content


def day_curve(found: Summary) -> str:
    """The known hours as a file for `plan-day --load`; empty if there are too few."""
    known = [(h + 0.5, rate) for h, rate in enumerate(found.hourly_per_s) if rate is not None]
    if len(known) < 2 or not any(rate for _, rate in known):
        return ""
    rows = "".join(f"{hour},{rate:.6g}\n" for hour, rate in known)
    return f"hour,rate_per_s\n{rows}"
