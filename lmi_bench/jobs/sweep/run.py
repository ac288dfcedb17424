"""One sweep from its flags to its answer: scenario, target, levels, knees, table."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_bench.analysis.results.checks import check_levels, has_failed, level_name
from lmi_bench.analysis.results.knee import Knee, find_knees
from lmi_bench.analysis.results.repeats import parse_until, pooled_run, unmet_until
from lmi_bench.analysis.search.slo_boundary import SloAnswer, slo_answer
from lmi_bench.cli.console import STDERR, fail, note, print_table, progress, say, terminal, warn
from lmi_bench.cli.slo_print import AS_STATED, SloOptions, print_slos
from lmi_bench.core.errors import InputError
from lmi_bench.core.records import LevelRun
from lmi_bench.core.run_store import (
    MANIFEST,
    Run,
    RunStore,
    build_manifest,
    is_stillborn,
    load_run,
)
from lmi_bench.core.scenario import (
    SIMULATED_PREFIX,
    Scenario,
    is_endpoint,
    load_scenario,
    parse_scenario,
)
from lmi_bench.core.slo import parse_goodput, parse_slo
from lmi_bench.jobs.gate import read_failures, read_share
from lmi_bench.jobs.sweep.client import AUTO_CLIENT, Client, open_pool, open_server_watch
from lmi_bench.jobs.sweep.cloudwatch import DEFAULT_WAIT_S, read_cloudwatch
from lmi_bench.jobs.sweep.levels import LevelRule, level_rule, with_levels_found
from lmi_bench.jobs.sweep.resume import finished_run
from lmi_bench.jobs.sweep.spend import NO_BUDGET, Budget, Spend, cheapest, cost_at
from lmi_bench.jobs.sweep.time_box import AUTO_S, TimeBox, clock_text, read_max_time
from lmi_bench.loadgen.run.sweep import Progress, SweepResult, run_sweep
from lmi_bench.loadgen.run.target import Target
from lmi_bench.loadgen.watch.server_watch import ServerWatch
from lmi_bench.report.slo_text import describe_answer, spread_rows
from lmi_bench.report.text import (
    LEVEL_GIVE_WAY,
    engine_rows,
    generator_line,
    knee_rows,
    level_block,
    level_rows,
    replica_lines,
    session_rows,
    token_counts_line,
)
from lmi_bench.targets.access import NO_ACCESS, Access
from lmi_bench.targets.applies import kind_of, refuse_idle, stated_names
from lmi_bench.targets.bench import Bench
from lmi_bench.targets.open import open_bench

if TYPE_CHECKING:
    from lmi_bench.engine.step_trace import StepTrace


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What a sweep is told beside its scenario.

    slo    limits of a good request, and how failed requests count in the SLOs' latencies
    trace  file for a Chrome trace of the engine in this process
    cloudwatch_wait_s  how long a SageMaker endpoint's last minutes are waited for
    max_time    as `--max-time` takes it; None: what the kind of levels has by itself
    max_error_share  of a level's requests, beyond which it ends; None: no end
    """

    access: Access = NO_ACCESS
    budget: Budget = NO_BUDGET
    slo: SloOptions = AS_STATED
    client: Client = AUTO_CLIENT
    trace: Path | None = None
    cloudwatch_wait_s: float = DEFAULT_WAIT_S
    max_time: str | None = None
    max_error_share: float | None = 0.5


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """How a sweep ended, for the exit code.

    slo_missed  no level meets what was asked
    failed      no request was answered, or every level had mostly failures and no SLO was missed:
                there is no measurement
    """

    interrupted: bool = False
    slo_missed: bool = False
    failed: bool = False


def run(
    scenario_or_url: str | None,
    overrides: Mapping[str, Any],
    options: SweepOptions,
    *,
    out: Path | None,
    resume: bool,
) -> SweepOutcome:
    """Run a sweep and print its answer; raises InputError before anything is written."""
    scenario = read_scenario(scenario_or_url, overrides)
    refuse_idle(kind_of(scenario.target), stated_names(overrides), scenario.engine)
    return run_scenario(scenario, options, out=out, resume=resume)


def read_slo_options(goodput: str, failures: str) -> SloOptions:
    """Limits of a single request as `parse_goodput` reads them; failures: exclude or infinite."""
    return SloOptions(tuple(parse_goodput(goodput)) if goodput else (), read_failures(failures))


def read_max_errors(text: str) -> float | None:
    """A share of failed requests from `10%` or `0.1`, or None from `none`."""
    return None if text == "none" else read_share("--max-errors", text)


def run_scenario(
    scenario: Scenario, options: SweepOptions, *, out: Path | None, resume: bool
) -> SweepOutcome:
    """Run one scenario and print its answer; raises InputError before anything is written."""
    level_rule(scenario)  # its mistakes show before a model is loaded or an endpoint is asked
    if options.max_time is not None:
        read_max_time(options.max_time)
    if resume and out is not None and (found := finished_run(out, scenario)) is not None:
        note(f"{out} is finished, {len(found.run.levels)} level(s): nothing is left to be sent")
        return _conclude(out, found.scenario, options, found.knees, found.answer)
    tracer = None if options.trace is None else _step_trace(options.trace)
    with terminal() as listener:
        bench = open_bench(with_levels_found(scenario), options.access, listener, trace=tracer)
    folder = out or _default_folder(bench.scenario)
    try:
        with tracer or nullcontext():
            knees, answer = _measure(bench, options, folder, resume=resume)
        return _conclude(folder, scenario, options, knees, answer)
    except KeyboardInterrupt:
        levels = load_run(folder).levels if (folder / MANIFEST).exists() else []
        _print_levels(levels)
        kept = f"{len(levels)} finished level(s) kept in {folder}"
        note(f"interrupted: {kept}; continue with --resume --out {folder}")
        return SweepOutcome(interrupted=True)


def _measure(
    bench: Bench, options: SweepOptions, folder: Path, *, resume: bool
) -> tuple[list[Knee], SloAnswer | None]:
    """Run the levels and save what they say; the folder then holds all of it."""
    budget, scenario = options.budget, bench.scenario
    bench.prompts("")  # a data set that cannot be read is known before the folder is made
    time_box = TimeBox(_max_time_s(scenario, options.max_time), note=note)
    rule = level_rule(scenario, time_box)
    stop_rules = replace(rule.stop_rules, max_error_share=options.max_error_share)
    rule = replace(rule, stop_rules=stop_rules)
    spend = Spend(
        budget.price(bench.usd_per_hour),
        max_usd=budget.max_usd,
        count_instances=bench.count_instances,
        note=note,
    )
    server = open_server_watch(bench, options.client)
    limits = [str(limit) for limit in options.slo.limits]
    with _open_store(folder, scenario, bench, limits, resume=resume) as store:
        note(f"target: {bench.title}")
        for line in bench.notes:
            note(line)
        if time_box.max_s is not None:
            note(
                f"levels are picked for {clock_text(time_box.max_s)} at most (--max-time)"
                if rule.total is None
                else f"levels that would end after {clock_text(time_box.max_s)} are left out"
            )
        _run_levels(bench, store, rule, spend, options.client, server, time_box)
        if not store.levels:
            return [], None
        answer = _search_answer(folder, rule, store, seed=scenario.seed)
        knees = _find_knees(folder, bench)
        store.write_knees([knee.to_dict() for knee in knees])
        seen = read_cloudwatch(bench, store.levels, wait_s=options.cloudwatch_wait_s)
        if seen:
            store.write_cloudwatch(seen)
        return knees, answer


def _conclude(
    folder: Path,
    scenario: Scenario,
    options: SweepOptions,
    knees: list[Knee],
    answer: SloAnswer | None,
) -> SweepOutcome:
    """Print what was measured."""
    run = load_run(folder)
    if run.levels and all(line["requests"] == line["errors"] for line in run.levels):
        fail(f"no request was answered{_first_error(folder)}; the records are in {folder}")
        return SweepOutcome(failed=True)
    failed = bool(run.levels) and answer is None and all(map(has_failed, run.levels))
    pooled = pooled_run(run)
    _print_measured(pooled.levels, [] if failed else knees)
    print_table("Spread over attempts, 95 %", spread_rows(pooled.levels), left=("level", "metric"))
    if scenario.load.until is not None:
        for text in unmet_until(run.levels, parse_until(scenario.load.until)):
            warn(text)
    slos = [parse_slo(text) for text in scenario.slo]
    missed = print_slos(pooled, slos, options.slo, verdict=answer is None)
    if answer is not None:
        say(describe_answer(answer))
        if (cost := cost_at(run.levels, answer)) is not None:
            say(cost)
        if answer.value is not None and answer.first_breach is None and not scenario.load.search:
            note("no SLO broke up to where the levels end; --search concurrency goes on beyond")
        missed = answer.value is None
        if doubtful := _invalid_beside(answer, run.levels):
            warn(f"the answer rests on levels that are invalid: {', '.join(doubtful)}")
    if pooled.levels and not failed:
        say(level_block(_best_level(pooled.levels, knees)))
    say(f"run folder: {folder}   next: lmi-bench report {folder}")
    if failed and not missed:
        fail(f"no level is usable: {_failures(run.levels)}{_first_error(folder)}")
    return SweepOutcome(slo_missed=missed, failed=failed and not missed)


def _failures(levels: Sequence[Mapping[str, Any]]) -> str:
    errors, requests = (sum(line[key] for line in levels) for key in ("errors", "requests"))
    return f"{errors:,} of {requests:,} requests failed"


def _invalid_beside(answer: SloAnswer, levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the levels on both sides of a search's answer that the generator could not hold."""
    beside = (answer.value, answer.first_breach)
    lines = [line for line in levels if line.get(answer.load) in beside]
    return list(dict.fromkeys(level_name(line) for line in lines if not line.get("valid", True)))


def measure_into(scenario: Scenario, folder: Path) -> Run:
    """The levels of a scenario, kept as a run in `folder`; nothing but progress is printed.

    Raises InputError before anything is written.
    """
    level_rule(scenario)
    with terminal() as listener:
        bench = open_bench(with_levels_found(scenario), NO_ACCESS, listener)
    rule = level_rule(bench.scenario)
    spend = Spend(
        bench.usd_per_hour, max_usd=None, count_instances=bench.count_instances, note=note
    )
    with _open_store(folder, bench.scenario, bench, [], resume=False) as store:
        _run_levels(bench, store, rule, spend, AUTO_CLIENT, None, TimeBox(None))
        store.write_knees([knee.to_dict() for knee in _find_knees(folder, bench)])
    return load_run(folder)


def read_scenario(scenario_or_url: str | None, overrides: Mapping[str, Any]) -> Scenario:
    """The scenario of a file, a target or neither, with the flags laid over it."""
    overrides = dict(overrides)
    if scenario_or_url is None:
        scenario = parse_scenario({})
    elif is_endpoint(scenario_or_url) or scenario_or_url.startswith(SIMULATED_PREFIX):
        if overrides.get("target") is not None:
            raise InputError(
                f"two targets: {scenario_or_url} and --target {overrides['target']}; give one"
            )
        scenario, overrides["target"] = parse_scenario({}), scenario_or_url
    elif _is_host_and_port(scenario_or_url):
        raise InputError(
            f"there is no file {scenario_or_url}; for a server write http://{scenario_or_url}"
        )
    else:
        scenario = load_scenario(Path(scenario_or_url))
    return scenario.with_overrides(overrides)


def _is_host_and_port(text: str) -> bool:
    """Whether an address may be meant whose http:// was left out."""
    return re.fullmatch(r"[\w.-]+:\d+(/.*)?", text) is not None and not Path(text).exists()


def read_timeout(text: str) -> float | str:
    """Seconds, or the word none, as a scenario takes them."""
    try:
        return text if text == "none" else float(text)
    except ValueError:
        raise InputError(f"--timeout: {text!r} is neither a number of seconds nor none") from None


def _default_folder(scenario: Scenario) -> Path:
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    model = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(scenario.model).name)
    return Path("runs") / f"{stamp}-{model}"


def _open_store(
    folder: Path, scenario: Scenario, bench: Bench, limits: list[str], *, resume: bool
) -> RunStore:
    command = ["lmi-bench", *sys.argv[1:]]
    canonical = scenario.canonical()
    if resume and (folder / MANIFEST).exists():
        store = RunStore.resume(
            folder, scenario.hash(), scenario=canonical, command=command, secrets=bench.secrets
        )
        note(f"resuming {folder}: {len(store.levels)} level(s) are finished")
        return store
    if resume and folder.exists() and not is_stillborn(folder):
        raise InputError(
            f"{folder} is there and holds no run ({MANIFEST} is missing), so --resume has nothing "
            "to go on with: name another folder with --out"
        )
    manifest = build_manifest(
        canonical,
        scenario.hash(),
        target=bench.facts,
        command=command,
        salt=bench.new_salt(),
        goodput=limits,
    )
    return RunStore.create(folder, manifest, secrets=bench.secrets)


def _run_levels(
    bench: Bench,
    store: RunStore,
    rule: LevelRule,
    spend: Spend,
    client: Client,
    server: ServerWatch | None,
    time_box: TimeBox,
) -> SweepResult:
    scenario = bench.scenario
    prompts = bench.prompts(str(store.manifest.get("salt", "")))
    pool = open_pool(bench, prompts, client)
    of_all = "" if rule.total is None else f"/{rule.total}"

    with progress() as report:

        def on_progress(state: Progress) -> None:
            title = f"level {state.level + 1}{of_all} {state.label} {state.state}"
            if state.errors:
                title += f", {state.errors} errors"
            title += _left(time_box)
            report(title, state.done, state.total)

        def on_level(run: LevelRun, line: dict[str, Any]) -> None:
            if not STDERR.is_terminal:
                speed = f"{line['throughput_tokens_per_s'] or 0:.1f} tok/s"
                note(
                    f"{run.spec.load.name}: {speed} in {line['wall_s'] or 0:.0f} s{_left(time_box)}"
                )

        async def send_levels(target: Target) -> SweepResult:
            return await run_sweep(
                spend.levels(rule.levels),
                target,
                store,
                prompts=prompts,
                summarise=spend.summarise(rule.summarise),
                on_progress=on_progress,
                on_level=on_level,
                stop_rules=rule.stop_rules,
                timeout_s=scenario.timeout_s,
                spacing_s=bench.spacing_s,
                seed=scenario.seed,
                workers=pool,
                server=server,
            )

        try:
            result: SweepResult = bench.run(send_levels)
        finally:
            if pool is not None:
                pool.close()
    return result


def _step_trace(path: Path) -> StepTrace:
    from lmi_bench.engine.step_trace import StepTrace  # with it the engine, which a URL needs not

    return StepTrace(path)


def _left(time_box: TimeBox) -> str:
    left_s = time_box.left_s()
    return "" if left_s is None else f", {clock_text(left_s)} left"


def _max_time_s(scenario: Scenario, stated: str | None) -> float | None:
    """A sweep's time: as stated, else that of levels picked by a rule on a real clock."""
    if stated is not None:
        return read_max_time(stated)
    searched = scenario.load.search is not None  # its end is an answer, not a curve
    virtual = scenario.target.startswith(SIMULATED_PREFIX)
    return None if searched or virtual or not scenario.load.is_adaptive else AUTO_S


def _search_answer(
    folder: Path, rule: LevelRule, store: RunStore, *, seed: int
) -> SloAnswer | None:
    """The answer of a search, saved as slo.json; None where none was asked for."""
    if rule.search is None:
        return None
    run = load_run(folder)
    answer = slo_answer(rule.search, run.levels, seed=seed)
    store.write_slo_answer(answer.to_dict())
    return answer


def _find_knees(folder: Path, bench: Bench) -> list[Knee]:
    run = pooled_run(load_run(folder))
    if not run.levels:
        return []
    return find_knees(run.levels, records=run.records, facts=bench.knee_facts(run.levels))


def _first_error(folder: Path) -> str:
    """The first failed request's message, as the rest of a sentence."""
    for records in load_run(folder).records:
        for record in records:
            if not record.ok:
                return f": {record.status}: {record.error}"
    return ""


def _best_level(levels: list[dict[str, Any]], knees: list[Knee]) -> dict[str, Any]:
    """The level to paste: that of the recommended knee, else the one with the most tokens/s."""
    knee = next((knee for knee in knees if knee.recommended), None)
    for line in levels:
        if knee is not None and line.get(knee.axis) == knee.load:
            return line
    return max(levels, key=lambda line: line.get("throughput_tokens_per_s") or 0.0)


def _print_levels(levels: list[dict[str, Any]]) -> None:
    print_table("Levels", level_rows(levels), give_way=LEVEL_GIVE_WAY)


def _load(line: Mapping[str, Any]) -> float:
    """What a level asked for; levels that were picked as the sweep went were run in any order."""
    return float(line.get("concurrency") or line.get("rate_per_s") or 0.0)


def _print_measured(levels: list[dict[str, Any]], knees: list[Knee]) -> None:
    """Levels by rising load, knees, and what is to be doubted."""
    levels = sorted(levels, key=_load)
    _print_levels(levels)
    print_table(
        "Knee by rule (* recommended)",
        knee_rows([knee.to_dict() for knee in knees]),
        left=("rule", "cause", "change", "why"),
    )
    print_table(
        "Conversations",
        session_rows(levels),
        whole=("level",),
        give_way=("first turn p90", "turns mean"),
    )
    print_table("Engine", engine_rows(levels), whole=("level",))
    for text in replica_lines(levels):
        note(text)
    for text in check_levels(levels):
        warn(text)
    if (own_error := generator_line(levels)) is not None:
        say(own_error)
    if (counts := token_counts_line(levels)) is not None:
        say(counts)
    if (cost := cheapest(levels)) is not None:
        say(cost)
