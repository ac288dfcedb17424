"""The commands on results: report, compare, gate, export, import and workload from."""

import sys

import typer

from lmi_bench.cli.command import JsonFile, spread_options
from lmi_bench.cli.console import print_table, run_job, say, show_result, write_json
from lmi_bench.jobs.settings import results

workload = typer.Typer(name="workload", help="Workloads from recorded production traffic.", no_args_is_help=True)


@spread_options
def report(settings: results.ReportSettings) -> None:
    """Write one HTML page with curves, knees, levels and recommendations; it needs no network."""
    from lmi_bench.jobs.results import report as write

    written = write(settings)
    say(*(f"repaired: {line}" for line in written.repaired))
    say(f"report: {written.html} ({len(settings.runs)} sweep(s), {len(settings.recommendation)} recommendation(s))")
    if written.markdown is not None:
        say(f"markdown: {written.markdown}")
    say(*(f"figure: {path}" for path in written.figures))


@spread_options
def compare(settings: results.CompareSettings, json_file: JsonFile = None) -> None:
    """Compare two runs of one workload level by level: faster, slower or no difference.

    Intervals are 95 % by paired bootstrap over requests. Runs of different workloads are refused.
    """
    from lmi_bench.cli.sweep_print import print_comparison
    from lmi_bench.jobs.results import compare as run

    comparison = run_job(run, settings)
    print_comparison(comparison)
    write_json(json_file, comparison.to_json(), "differences")


@spread_options
def gate(settings: results.GateSettings) -> None:
    """Exit 0 if every level meets every SLO and none got slower than the baseline.

    Exit 99 if a check was missed, 2 if an SLO was not measured: too few requests, or a level that
    is missing, failed, or whose load was not delivered.
    """
    from lmi_bench.jobs.results import gate as run
    from lmi_bench.report.gate_files import gate_rows, gate_summary

    verdict = run(settings)
    left = ("", "level", "check", "why")
    print_table(f"Gate: {settings.run}", gate_rows(verdict.cases), left=left)
    say(f"gate: {gate_summary(verdict.cases)}")
    show_result(verdict.to_json())
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


@spread_options
def export(settings: results.ExportSettings) -> None:
    """Write the levels and requests of a run in another format."""
    from lmi_bench.jobs.results import export as write

    say(*map(str, write(settings)))


@spread_options
def import_results(settings: results.ImportSettings) -> None:
    """Convert other tools' results into a run folder: metrics are matched by formula, not by name.

    A metric that the file does not have by our formula stays empty, with the reason. A table of
    InferenceX (CSV) with several set-ups makes a run folder for each, below --out.
    """
    from lmi_bench.jobs.results import import_results as run

    levels, tool, folders = run_job(run, settings, command=["lmi-bench", *sys.argv[1:]])
    several = f" in {len(folders)} runs" if len(folders) > 1 else ""
    say(f"{settings.out}: {levels} level(s) of {tool}{several}   next: lmi-bench report {folders[0]}")


@workload.command("from")
@spread_options
def from_source(settings: results.WorkloadFromSettings) -> None:
    """Write joint lengths, peak five-minute rate, burstiness and shared prefix as a scenario.

    If the source has a daily curve, it is written beside it for `plan-day --load`. What the
    source does not contain is listed.
    """
    from lmi_bench.cli.sweep_print import print_workload
    from lmi_bench.jobs.results import workload_from

    summary, day = run_job(workload_from, settings)
    print_workload(summary)
    say(f"scenario: {settings.out}")
    if day is not None:
        say(f"daily curve: {day} (lmi-bench plan-day REC.json --load {day})")
    rate = "" if summary.peak_per_s is not None else " --rate REQ_PER_S"
    say(f"next: lmi-bench recommend --workload {settings.out} --model NAME{rate} --slo ...")
