"""Which levels a scenario runs: its list, or a rule that picks each from those before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lmi_bench.analysis.results.early_stop import QuantileWatch, StopWhen, parse_stop_when
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.repeats import parse_until, repeat_rule, until_steady
from lmi_bench.analysis.results.slo_results import CertainMiss, judge_level
from lmi_bench.analysis.search.next_level import auto_levels
from lmi_bench.analysis.search.slo_search import START_USERS, SloSearch
from lmi_bench.core.level import KNOWN, Level, NextLevel
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.scenario import AUTO, ENGINE_TARGET, SIMULATED_PREFIX, Scenario
from lmi_bench.core.slo import Slo, parse_slo
from lmi_bench.core.workload import LevelSizes, LevelSpec
from lmi_bench.jobs.sweep.limits import TimeBox, up_to
from lmi_bench.loadgen.run.level_runner import StopRules
from lmi_bench.loadgen.run.sweep import level_sizes, levels_of

START_RATE_PER_S, MOST_RATE_PER_S, LEAST_RATE_PER_S = 1.0, 10_000.0, 0.001
MOST_REPEATS = 2
"""Further attempts at most of a level that was not steady: as many as it takes for two to agree."""


@dataclass(frozen=True, slots=True)
class LevelRule:
    """The levels for `run_sweep`, and how each is summarised.

    total   number of levels; None if a rule picks them
    search  the search for where the SLOs break; None without SLOs or with listed levels
    """

    levels: NextLevel
    total: int | None
    stop_rules: StopRules
    summarise: Callable[[LevelRun], Level]
    search: SloSearch | None = None


def with_levels_found(scenario: Scenario) -> Scenario:
    """Choose load levels adaptively if the scenario lists none: the target's limit is unknown.

    The bundled engine and repeats have a default list, a trace its recorded times at each speed.
    """
    load = scenario.load
    stated = (load.concurrency, load.rate_per_s, load.search, load.until, scenario.workload.trace)
    if scenario.target == ENGINE_TARGET or load.repeat > 1 or any(x is not None for x in stated):
        return scenario
    return scenario.with_overrides({"load.concurrency": AUTO})


def level_rule(scenario: Scenario, time_box: TimeBox | None = None) -> LevelRule:
    """The rule of a scenario's load section; the levels end with the time box, if there is one.

    If a level picked for the curve (`auto`) broke an SLO, a search for where it breaks follows.
    """
    box = TimeBox(None) if time_box is None else time_box
    load = scenario.load
    stop = None if load.stop_when is None else parse_stop_when(load.stop_when)
    summarise_one = partial(_summarise, scenario, stop)
    if not load.is_adaptive:
        levels, rules = levels_of(scenario), StopRules()
        if stop is not None:
            for level in levels:
                stop.check(level)
            rules = StopRules(watch=lambda spec: QuantileWatch(stop, spec).add, watch_says=KNOWN)
        until = None if load.until is None else parse_until(load.until)
        rule, total = repeat_rule(levels, repeats=load.repeat, until=until), None
        if load.repeat == 1 and until is None:
            rule, total = _until_steady(rule, scenario, box), len(levels)
        return LevelRule(up_to(rule, box.fits), total, rules, summarise_one)
    slos = tuple(parse_slo(text) for text in scenario.slo)
    sizes = level_sizes(scenario)
    curve = None
    if load.search is None:
        curve = auto_levels(sizes, slos=slos, fits=box.fits, shortened=box.shortened)
        curve = _until_steady(curve, scenario, box)
    if curve is not None and not slos:
        return LevelRule(curve, None, StopRules(ends_sweep=False), summarise_one)
    search = _search(scenario, slos, sizes)
    seek = up_to(search.next_level, box.fits)
    of_curve: set[int] = set()

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        spec = None if curve is None else curve(finished)
        if spec is not None:
            of_curve.add(spec.index)
            return spec
        if curve is not None and search.first_breach(finished) is None:
            return None  # saturated before an SLO broke: more users would only wait
        return seek(finished)

    def watch(spec: LevelSpec) -> Callable[[RequestRecord], bool] | None:
        # a knee needs whole levels
        return None if spec.index in of_curve else miss_watch(scenario, spec)

    def summarise(run: LevelRun) -> Level:
        return replace(summarise_one(run), search=judge_level(run, slos))

    rules = StopRules(ends_sweep=False, watch=watch)
    return LevelRule(next_level, None, rules, summarise, search)


def _until_steady(rule: NextLevel, scenario: Scenario, box: TimeBox) -> NextLevel:
    """The rule with levels that were not steady run again; a simulated machine does not warm up."""
    most = scenario.load.repeat_unsteady
    if most is None:
        most = 0 if scenario.target.startswith(SIMULATED_PREFIX) else MOST_REPEATS
    return until_steady(rule, most, fits=box.fits, note=box.note)


def miss_watch(scenario: Scenario, spec: LevelSpec) -> Callable[[RequestRecord], bool] | None:
    """A watcher that ends a level with a number of requests at a certain miss of an SLO."""
    slos = tuple(parse_slo(text) for text in scenario.slo)
    return CertainMiss(slos, spec).add if slos and spec.num_requests is not None else None


def _summarise(scenario: Scenario, stop: StopWhen | None, run: LevelRun) -> Level:
    """Summarise a level; mark it if its prompts share prefixes on purpose, for a cache."""
    expected = True if scenario.workload.begins_alike else None
    line = replace(summarise_level(run), cached_prompt_expected=expected)
    if stop is None:
        return line
    watch = QuantileWatch(stop, run.spec)
    for record in run.records:
        watch.add(record)
    return replace(line, known=watch.known)


def _search(scenario: Scenario, slos: tuple[Slo, ...], sizes: LevelSizes) -> SloSearch:
    load = scenario.load
    if load.search == "rate":
        first = load.rate_per_s[0] if load.rate_per_s else START_RATE_PER_S
        limits = {"least": LEAST_RATE_PER_S, "most": MOST_RATE_PER_S}
        return SloSearch("rate_per_s", slos, sizes, start=first, **limits)
    users = float(load.concurrency[0]) if isinstance(load.concurrency, tuple) else START_USERS
    return SloSearch("concurrency", slos, sizes, start=users)
