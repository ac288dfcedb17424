"""One sweep from its flags to its answer: scenario, target, levels, knees, table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lmi_bench.analysis.checks import check_levels
from lmi_bench.analysis.goodput import check_slo
from lmi_bench.analysis.knee import Knee, find_knees
from lmi_bench.analysis.latency import summarise_level
from lmi_bench.cli.access import NO_ACCESS, Access
from lmi_bench.cli.bench import Bench, open_bench
from lmi_bench.cli.console import STDERR, note, print_table, progress, say, warn
from lmi_bench.errors import InputError
from lmi_bench.loadgen.levels import levels_of
from lmi_bench.loadgen.sweep import Progress, SweepResult, run_sweep
from lmi_bench.records import LevelRun
from lmi_bench.report.text import knee_rows, level_rows
from lmi_bench.run_store import MANIFEST, RunStore, build_manifest, load_run
from lmi_bench.scenario import Scenario, is_endpoint, load_scenario, parse_scenario
from lmi_bench.slo import parse_slo


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """How a sweep ended, for the exit code."""

    interrupted: bool = False
    slo_missed: bool = False
    nothing_answered: bool = False


def run(
    scenario_or_url: str | None,
    overrides: Mapping[str, Any],
    *,
    timeout: str | None,
    out: Path | None,
    resume: bool,
    access: Access = NO_ACCESS,
) -> SweepOutcome:
    """Run a sweep and print its answer; raises InputError before anything is written."""
    scenario = read_scenario(scenario_or_url, overrides, timeout=timeout)
    interrupted = False
    bench = open_bench(scenario, access)
    scenario = bench.scenario
    folder = out or _default_folder(scenario)
    with _open_store(folder, scenario, bench, resume=resume) as store:
        note(f"target: {bench.title}")
        for line in bench.notes:
            note(line)
        try:
            _run_levels(scenario, bench, store)
        except KeyboardInterrupt:
            interrupted = True
        levels = list(store.levels)
        knees: list[Knee] = []
        if levels and not interrupted:
            knees = _find_knees(folder, bench)
            store.write_knees([knee.to_dict() for knee in knees])
    if interrupted:
        _print_levels(levels)
        kept = f"{len(levels)} finished level(s) kept in {folder}"
        note(f"interrupted: {kept}; continue with --resume --out {folder}")
        return SweepOutcome(interrupted=True)
    if all(line["requests"] == line["errors"] for line in levels):
        _print_levels(levels)
        warn(f"no request was answered{_first_error(folder)}; the records are in {folder}")
        return SweepOutcome(nothing_answered=True)
    return SweepOutcome(slo_missed=_print_answer(scenario, levels, knees, folder))


def read_scenario(
    scenario_or_url: str | None, overrides: Mapping[str, Any], *, timeout: str | None = None
) -> Scenario:
    """The scenario of a file, a URL or neither, with the flags laid over it."""
    overrides = dict(overrides)
    if scenario_or_url is None:
        scenario = parse_scenario({})
    elif is_endpoint(scenario_or_url):
        if overrides.get("target") is not None:
            raise InputError(
                f"two targets: {scenario_or_url} and --target {overrides['target']}; give one"
            )
        scenario, overrides["target"] = parse_scenario({}), scenario_or_url
    else:
        scenario = load_scenario(Path(scenario_or_url))
    if timeout is not None:
        overrides["timeout_s"] = _timeout_s(timeout)
    scenario = scenario.with_overrides(overrides)
    if timeout == "none":
        scenario = parse_scenario({**scenario.model_dump(), "timeout_s": None})
    return scenario


def _timeout_s(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--timeout: {text!r} is neither a number of seconds nor none") from None


def _default_folder(scenario: Scenario) -> Path:
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    model = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(scenario.model).name)
    return Path("runs") / f"{stamp}-{model}"


def _open_store(folder: Path, scenario: Scenario, bench: Bench, *, resume: bool) -> RunStore:
    command = ["lmi-bench", *sys.argv[1:]]
    canonical = scenario.canonical()
    if resume and (folder / MANIFEST).exists():
        store = RunStore.resume(
            folder, scenario.hash(), scenario=canonical, command=command, secrets=bench.secrets
        )
        note(f"resuming {folder}: {len(store.levels)} level(s) are finished")
        return store
    manifest = build_manifest(
        canonical, scenario.hash(), target=bench.facts, command=command, salt=bench.new_salt()
    )
    return RunStore.create(folder, manifest, secrets=bench.secrets)


def _run_levels(scenario: Scenario, bench: Bench, store: RunStore) -> SweepResult:
    levels = levels_of(scenario)
    with progress() as report:

        def on_progress(state: Progress) -> None:
            title = f"level {state.level + 1}/{len(levels)} {state.label} {state.state}"
            if state.errors:
                title += f", {state.errors} errors"
            report(title, state.done, state.total)

        def on_level(run: LevelRun, line: dict[str, Any]) -> None:
            if not STDERR.is_terminal:
                note(f"{run.spec.label}: {line['throughput_tokens_per_s'] or 0:.1f} tok/s")

        result: SweepResult = bench.run(
            lambda target: run_sweep(
                levels,
                target,
                store,
                prompts=bench.prompts(str(store.manifest.get("salt", ""))),
                summarise=summarise_level,
                on_progress=on_progress,
                on_level=on_level,
                timeout_s=scenario.timeout_s,
                spacing_s=bench.spacing_s,
                seed=scenario.seed,
            )
        )
    return result


def _find_knees(folder: Path, bench: Bench) -> list[Knee]:
    run = load_run(folder)
    if not run.levels:
        return []
    return find_knees(run.levels, records=run.records, facts=bench.knee_facts(run.levels))


def _first_error(folder: Path) -> str:
    """The first failed request's message, as the middle of a sentence."""
    for records in load_run(folder).records:
        for record in records:
            if not record.ok:
                return f": {record.status}: {record.error}"
    return ""


def _print_levels(levels: list[dict[str, Any]]) -> None:
    print_table("Levels", level_rows(levels))


def _print_answer(
    scenario: Scenario, levels: list[dict[str, Any]], knees: list[Knee], folder: Path
) -> bool:
    """Print what was found; returns whether every level missed a stated SLO."""
    _print_levels(levels)
    print_table(
        "Knee by rule (* recommended)",
        knee_rows([knee.to_dict() for knee in knees]),
        left=("rule", "cause", "change", "why"),
    )
    for line in levels:
        if not line["valid"]:
            warn(f"level {line['level']} is invalid: {line['invalid_reason']}")
    for text in check_levels(levels):
        warn(text)
    slos = [parse_slo(text) for text in scenario.slo]
    missed = bool(slos) and not any(
        all(check_slo(line, slo).verdict == "pass" for slo in slos) for line in levels
    )
    if missed:
        say(f"SLO missed at every level: {', '.join(map(str, slos))}")
    say(f"run folder: {folder}   next: lmi-bench report {folder}")
    return missed
