"""One sweep: a scenario's target is opened, its levels are run, and the results are saved."""

import math
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from lmi_bench.analysis.results.knee import find_knees
from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.analysis.results.sweep_curve import work_per_s
from lmi_bench.analysis.search.slo_search import slo_answer
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import Level
from lmi_bench.core.listener import SILENT, Listener, Silent
from lmi_bench.core.manifest import Manifest, RunScenario, TargetFacts, read_manifest
from lmi_bench.core.records import LevelRun
from lmi_bench.core.run_store import MANIFEST, RunStore, is_unstarted, load_run
from lmi_bench.core.scenario import SIMULATED_PREFIX, Scenario, is_endpoint, load_scenario, parse_scenario
from lmi_bench.core.slo import parse_goodput, parse_slo
from lmi_bench.jobs.settings.sweep import SweepSettings, read_workers
from lmi_bench.jobs.sweep import limits, watch
from lmi_bench.jobs.sweep.levels import LevelRule, level_rule, miss_watch, with_levels_found
from lmi_bench.jobs.sweep.result import AS_STATED, SloOptions, SweepResult, finished_run
from lmi_bench.jobs.sweep.startup import measured_startup
from lmi_bench.loadgen.prompts.agents import AgentSessions
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.hosts import JOIN, parse_address, parse_hosts
from lmi_bench.loadgen.run.level_runner import Progress
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.loadgen.run.worker_pool import WorkerPool
from lmi_bench.loadgen.watch.server_watch import ServerWatch
from lmi_bench.targets.applies import kind_of, refuse_idle, refuse_load, refuse_tokens, stated_names
from lmi_bench.targets.bench import NO_ACCESS, Access, Bench, read_headers
from lmi_bench.targets.open import open_bench

_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")  # an address without its http://


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What a sweep needs beside its scenario.

    slo                limits of a good request, and how failed requests count in SLOs
    trace              file for a Chrome trace of the engine in this process
    cloudwatch_wait_s  maximum wait for a SageMaker endpoint's last minutes
    max_time           as `--max-time` takes it; None: the default of the kind of levels
    max_error_share    failed share of a level's requests that ends it; None: no limit
    live               port of the page that follows the sweep, 0: a free one; None: no such page
    startup            command that starts the server at the URL, to time it; None: it runs
    rounds             end after as many attempts at each level of those that repeat
    stop_at_miss       end a level as soon as it is certain to miss an SLO of the scenario
    """

    access: Access = NO_ACCESS
    budget: limits.Budget = field(default_factory=limits.Budget)
    slo: SloOptions = AS_STATED
    client: watch.Client = field(default_factory=watch.Client)
    trace: Path | None = None
    cloudwatch_wait_s: float = watch.DEFAULT_WAIT_S
    max_time: str | None = None
    max_error_share: float | None = 0.5
    live: int | None = None
    startup: str | None = None
    rounds: int | None = None
    stop_at_miss: bool = False


DEFAULT_OPTIONS = SweepOptions()


def only(listener: Listener, *kinds: str) -> Listener:
    """A listener that passes on messages of these kinds, such as `warn`, and ignores the others."""
    heard = Silent()
    vars(heard).update({kind: getattr(listener, kind) for kind in kinds})
    return heard


def sweep(settings: SweepSettings, listener: Listener = SILENT) -> SweepResult:
    """Run the sweep of these options; raises InputError before anything is written."""
    run = settings.run
    if run.resume and run.out is None:
        raise InputError("--resume continues a run: name its folder with --out")
    scenario = read_scenario(settings.target.scenario, settings.overrides())
    stated = refuse_without_effect(settings, scenario)
    options = read_options(settings)
    if scenario.protocol == "embeddings":
        refuse_tokens(stated, (*map(parse_slo, scenario.slo), *options.slo.limits))
    return sweep_scenario(scenario, options, listener, out=run.out, resume=run.resume)


def refuse_without_effect(settings: SweepSettings, *scenarios: Scenario) -> list[str]:
    """The names of the stated options; raises InputError for one that none of these heeds."""
    stated = [*stated_names(settings.overrides()), *settings.beside_scenario()]
    for name in stated:
        refusals = []
        for scenario in scenarios:
            try:
                refuse_idle(kind_of(scenario.target), [name], scenario.engine)
                refuse_load([name], scenario)
            except InputError as exc:
                refusals.append(exc)
        if scenarios and len(refusals) == len(scenarios):
            raise refusals[0]
    return stated


def read_options(settings: SweepSettings) -> SweepOptions:
    """The options that a scenario cannot hold; raises InputError for what cannot be read."""
    stated, client, max_errors = settings.limits, settings.client, settings.limits.max_errors
    goodput = " ".join(stated.goodput)
    wait_s = client.cloudwatch_wait
    if client.ray is not None and client.hosts is not None:
        raise InputError("--ray and --hosts both say where workers run: leave one out")
    hosts = (JOIN,) if client.ray else parse_hosts(client.hosts) if client.hosts else ()
    listen = parse_address(client.listen, "--listen")
    if client.listen != type(client)().listen and JOIN not in hosts:
        raise InputError("--listen is for hosts that join: add --hosts join or --ray")
    return SweepOptions(
        access=Access(settings.target.api_key, read_headers(settings.target.header)),
        budget=limits.Budget(stated.price_per_hour, stated.instance, stated.max_spend),
        slo=SloOptions(tuple(parse_goodput(goodput)) if goodput else (), limits.read_failures(stated.failures)),
        client=watch.Client(read_workers(client.workers), client.metrics_url, hosts, listen, client.ray),
        trace=settings.run.step_trace,
        cloudwatch_wait_s=watch.DEFAULT_WAIT_S if wait_s is None else wait_s,
        max_time=stated.max_time,
        max_error_share=None if max_errors == "none" else limits.read_share("--max-errors", max_errors),
        live=settings.run.live,
        startup=settings.run.measure_startup,
    )


def sweep_scenario(
    scenario: Scenario,
    options: SweepOptions = DEFAULT_OPTIONS,
    listener: Listener = SILENT,
    *,
    out: Path | None,
    resume: bool = False,
) -> SweepResult:
    """Run one scenario into a run folder; raises InputError before anything is written.

    out  None: a folder below runs/, named by the time
    """
    level_rule(scenario)  # raises before a model is loaded or an endpoint is asked
    if options.max_time is not None:
        limits.read_max_time(options.max_time)
    with ExitStack() as stack:
        on_folder: Callable[[Path], None] = SILENT.note  # called when the run folder exists
        if options.live is not None:
            from lmi_bench.jobs.sweep.live import LiveReport  # loads an HTTP server

            is_served = not scenario.target.startswith(SIMULATED_PREFIX)
            page = stack.enter_context(LiveReport(options.live, listener, is_served=is_served))
            listener, on_folder = page, page.begun
        found = finished_run(out, scenario, options.slo) if resume and out is not None else None
        if found is not None:
            on_folder(found.folder)
            listener.note(f"{out} is finished, {len(found.levels)} level(s): nothing is left to send")
            return found
        tracer = None
        if options.trace is not None:
            from lmi_bench.engine.chrome_trace import ChromeTrace  # loads the engine: not for a URL

            tracer = stack.enter_context(ChromeTrace(options.trace))
        startup: Mapping[str, Any] = {}
        if options.startup is not None:
            server = measured_startup(options.startup, scenario, options.access, listener)
            startup = stack.enter_context(server)
        bench = open_bench(with_levels_found(scenario), options.access, listener, trace=tracer)
        bench = replace(bench, facts={**bench.facts, **startup})
        stamp, model = datetime.now().astimezone(), Path(bench.scenario.model).name
        named = re.sub(r"[^\w.-]", "-", model)
        folder = out or Path("runs") / f"{stamp:%Y%m%d-%H%M%S}-{named}"
        try:
            found_in = _measure(bench, options, folder, listener, on_folder, resume=resume)
            return replace(found_in, scenario=scenario)
        except KeyboardInterrupt:
            run = load_run(folder) if (folder / MANIFEST).exists() else None
            return SweepResult(folder, scenario, run, interrupted=True)


def _measure(
    bench: Bench,
    options: SweepOptions,
    folder: Path,
    listener: Listener,
    on_folder: Callable[[Path], None],
    *,
    resume: bool,
) -> SweepResult:
    """Run the levels and save their results in the folder."""
    budget, scenario = options.budget, bench.scenario
    kept = read_manifest(folder / MANIFEST) if resume and (folder / MANIFEST).exists() else None
    is_first = options.rounds in (None, 1)  # of several that one command asks for
    # of a level in flight when the run stopped, the server may know the prompts
    salt = bench.new_salt() if kept is None or is_first else kept.salt or ""
    prompts = bench.prompts(salt)  # reads the data set before the folder is made
    time_box = limits.TimeBox(_max_time_s(scenario, options.max_time), note=listener.note)
    rule = level_rule(scenario, time_box)
    stop_rules = replace(rule.stop_rules, max_error_share=options.max_error_share)
    if options.stop_at_miss:
        stop_rules = replace(stop_rules, watch=partial(miss_watch, scenario))
    most = math.inf if options.rounds is None else options.rounds
    in_rounds = limits.up_to(rule.levels, lambda spec, _: spec.repeat < most)
    rule = replace(rule, stop_rules=stop_rules, levels=in_rounds)
    spend = limits.Spend(
        budget.price(bench.usd_per_hour),
        max_usd=budget.max_usd,
        count_instances=bench.count_instances or (lambda: None),
        note=listener.note,
    )
    server = watch.open_server_watch(bench, options.client)
    with (
        watch.open_pool(bench, options.access, salt, prompts, options.client, listener) as pool,
        _open_store(folder, bench, options, salt, prompts, listener, resume=resume) as store,
    ):
        on_folder(folder)
        _run_levels(bench, prompts, store, rule, spend, pool, server, time_box, listener)
        # once, and from the files: a resumed run has levels that this process never saw, and a
        # later report computes from the same rounded times
        run = load_run(folder)
        pooled = pooled_run(run)
        result = SweepResult(folder, scenario, run, pooled, slo_options=options.slo)
        if not store.levels:
            return result
        answer = None
        if rule.search is not None:
            answer = slo_answer(rule.search, run.levels, seed=scenario.seed)
            store.write_slo_answer(answer)
        facts = bench.knee_facts(pooled.levels)
        knees = find_knees(pooled.levels, records=pooled.records, facts=facts)
        store.write_knees(knees)
        seen = watch.read_cloudwatch(bench, store.levels, listener, wait_s=options.cloudwatch_wait_s)
        if seen:
            store.write_cloudwatch(seen)
            run = load_run(folder)
            pooled = pooled_run(run)
        run = replace(run, knees=knees, slo_answer=answer)
        return replace(result, run=run, pooled=pooled, knees=knees, answer=answer)


def read_scenario(scenario_or_url: str | None, overrides: Mapping[str, Any]) -> Scenario:
    """The scenario of a file, a target or neither, with the options applied to it."""
    overrides = dict(overrides)
    if scenario_or_url is None:
        scenario = parse_scenario({})
    elif is_endpoint(scenario_or_url) or scenario_or_url.startswith(SIMULATED_PREFIX):
        if overrides.get("target") is not None:
            raise InputError(f"two targets: {scenario_or_url} and --target {overrides['target']}; give one")
        scenario, overrides["target"] = parse_scenario({}), scenario_or_url
    elif _HOST_AND_PORT.fullmatch(scenario_or_url) and not Path(scenario_or_url).exists():
        raise InputError(f"there is no file {scenario_or_url}; for a server write http://{scenario_or_url}")
    else:
        scenario = load_scenario(Path(scenario_or_url))
    return scenario.with_overrides(overrides)


def _open_store(
    folder: Path, bench: Bench, options: SweepOptions, salt: str, prompts: Prompts, listener: Listener, *, resume: bool
) -> RunStore:
    is_first = options.rounds in (None, 1)  # of several that one command asks for
    manifest = Manifest(
        scenario=RunScenario.from_json(bench.scenario.canonical()),
        scenario_hash=bench.scenario.hash(),
        target=TargetFacts.from_json(bench.facts),
        commands=[["lmi-bench", *sys.argv[1:]]] if is_first else [],
        salt=salt,
        sessions=prompts.recorded if isinstance(prompts, AgentSessions) else None,
        goodput=[str(limit) for limit in options.slo.limits],
    )
    if resume and (folder / MANIFEST).exists():
        store = RunStore.resume(folder, manifest, secrets=bench.secrets)
        listener.note(f"resuming {folder}: {len(store.levels)} level(s) are finished")
        return store
    if resume and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()  # a kill came before the lock
    if resume and folder.exists() and not is_unstarted(folder):
        raise InputError(
            f"{folder} exists but is no run ({MANIFEST} is missing), so --resume "
            "cannot continue it: name another folder with --out"
        )
    return RunStore.create(folder, manifest, secrets=bench.secrets)


def _run_levels(
    bench: Bench,
    prompts: Prompts,
    store: RunStore,
    rule: LevelRule,
    spend: limits.Spend,
    pool: WorkerPool | None,
    server: ServerWatch | None,
    time_box: limits.TimeBox,
    listener: Listener,
) -> None:
    """Send the levels; the listener is told how far each is, and when it is over."""
    scenario, of_all = bench.scenario, "" if rule.total is None else f"/{rule.total}"
    for line in (f"target: {bench.title}", *bench.notes):
        listener.note(line)
    if time_box.max_s is not None:
        limit = limits.clock_text(time_box.max_s)
        picked = f"levels are picked for {limit} at most (--max-time)"
        listed = f"levels that would end after {limit} are left out"
        listener.note(picked if rule.total is None else listed)

    def left() -> str:
        left_s = time_box.left_s()
        return "" if left_s is None else f", {limits.clock_text(left_s)} left"

    def on_progress(state: Progress) -> None:
        errors = f", {state.errors} errors" if state.errors else ""
        title = f"level {state.level + 1}{of_all} {state.label} {state.state}{errors}{left()}"
        listener.progress(title, state.done, state.total)

    def on_level(run: LevelRun, line: Level) -> None:
        speed = f"{work_per_s(line) or 0:.1f} tok/s"
        listener.step(f"{run.spec.load.name}: {speed} in {line.wall_s or 0:.0f} s{left()}")

    bench.run(
        lambda target: run_sweep(
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
            before_level=bench.before_level,
        )
    )


def _max_time_s(scenario: Scenario, stated: str | None) -> float | None:
    """A sweep's maximum time: as stated, else 5 minutes if levels are picked on a real clock."""
    if stated is not None:
        return limits.read_max_time(stated)
    searched = scenario.load.search is not None  # its end is an answer, not a curve
    virtual = scenario.target.startswith(SIMULATED_PREFIX)
    return None if searched or virtual or not scenario.load.is_adaptive else limits.AUTO_S
