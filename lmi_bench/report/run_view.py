"""One run as a report shows it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import yaml

from lmi_bench.analysis.fit.from_run import level_uncertainties
from lmi_bench.analysis.fit.uncertainty import Estimate, Uncertainty, metric_of
from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.results.knee import find_knees
from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.analysis.results.sweep_curve import LevelPoint, SweepCurve, sweep_curve, work_per_s
from lmi_bench.core.findings import Knee, recommended_knee
from lmi_bench.core.level import LATENCY_KEY, QUANTILES, Level, Metric
from lmi_bench.core.load import load_name
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.run_store import Run
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.report.explore import levels_data
from lmi_bench.report.formats import interval, minute, number, plain
from lmi_bench.report.slo_text import search_headline, slo_headline
from lmi_bench.report.tables import extras, levels
from lmi_bench.report.values import THROUGHPUT, Band, Curve, Facts, Headline, RunView

_PLACED = {"target", "commands", "scenario", "host", "versions"}
_FIRST = {"created_at": "Created", "schema_version": "Schema version", "scenario_hash": "Scenario hash"}
_Predicted = Metric | Literal["throughput"]
_Sure = Mapping[int, Uncertainty]  # of predicted levels, by their ids
CHART_METRICS: tuple[Metric, ...] = ("latency_per_token", "ttft", "itl", "e2e")


def build_run_view(run: Run, *, label: str, anchor: str) -> RunView:
    """Everything the report says about one run."""
    pooled = pooled_run(run)
    curve = sweep_curve(pooled.levels, pooled.records)
    axis = curve.axis
    pairs = sorted(
        zip(pooled.levels, pooled.records, strict=True), key=lambda pair: (pair[0].load.on(axis) or 0, pair[0].attempt)
    )
    lines, records = [line for line, _ in pairs], [kept for _, kept in pairs]
    knees = find_knees(pooled.levels, records=pooled.records) if run.knees is None else run.knees
    chosen = recommended_knee(knees)
    marked = chosen.load if chosen is not None and chosen.axis == axis else None
    scenario = run.manifest.scenario
    slos = levels.readable_slos(scenario.slo)
    sure = level_uncertainties(run, pooled.levels)
    verdict = search_headline(run.slo_answer) or slo_headline(lines, records, slos)
    between = _intervals(sure)
    headlines = (verdict, _knee_headline(curve, knees), *_extremes(curve, between))
    more = (table(axis, lines) for table in extras.TABLES)
    stated = scenario.to_json()
    as_yaml = yaml.safe_dump(stated, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return RunView(
        anchor=anchor,
        requests=sum(map(len, run.records)),
        subtitle=_subtitle(run.manifest),
        headlines=tuple(each for each in headlines if each is not None),
        levels=levels.levels_table(axis, lines, marked, between),
        details=levels.statistics_tables(axis, lines),
        knees=levels.knees_table(axis, knees),
        slos=levels.slo_table(axis, lines, records, scenario.slo, run.manifest.goodput or ()),
        generator=levels.generator_table(axis, lines),
        more=tuple(table for table in more if table is not None),
        warnings=tuple(check_levels(lines)),
        environment=_environment(run.manifest),
        scenario_yaml=as_yaml if stated else "",
        curve=_curve(run, label, curve, knees, sure),
        explored=levels_data(run, label),
    )


def run_headline(run: RunView) -> Headline:
    """The headline of one run among several: its best throughput and its knee."""
    by_label = {headline.label: headline for headline in run.headlines}
    best = by_label.get("Best throughput")
    if best is None:
        return Headline(run.curve.label, "none", "", "no level was valid and complete", "bad")
    knee = by_label.get("Knee")
    detail = best.detail if knee is None else f"{best.detail}; knee at {knee.value} {knee.unit}"
    return Headline(run.curve.label, best.value, best.unit, detail)


def _subtitle(manifest: Manifest) -> str:
    scenario, workload = manifest.scenario, manifest.scenario.workload
    parts = [scenario.model]
    if scenario.target:
        parts.append(f"on {scenario.target}")
    if workload.agents is not None or workload.agent_trace is not None:
        parts.append(f"agent sessions {workload.agent_trace or workload.agents}".rstrip())
    elif workload.dataset:
        parts.append(f"data set {workload.dataset}")
    elif workload.mix:
        kinds = (f"{m.get('input_tokens')}/{m.get('output_tokens')}" for m in workload.mix)
        parts.append(f"mix of {', '.join(kinds)} tokens in/out")
    elif workload.input_tokens or workload.output_tokens:
        out = "none" if scenario.protocol == "embeddings" else plain(workload.output_tokens)
        parts.append(f"{plain(workload.input_tokens)} tokens in, {out} out")
    parts.append(minute(manifest.created_at))
    return " · ".join(part for part in parts if part)


def _knee_headline(curve: SweepCurve, knees: Sequence[Knee]) -> Headline | None:
    knee = recommended_knee(knees)
    if knee is None or knee.load is None or knee.axis != curve.axis:
        return None
    load = knee.load
    here = next((point for point in curve.points if point.load == load), None)
    unit = "concurrent requests" if curve.axis == "concurrency" else "req/s"
    detail = f"by the {_rule_name(knee)} rule"
    if here is not None and here.throughput_tokens_per_s is not None:
        detail = f"{number(here.throughput_tokens_per_s)} tok/s at {_pace(here)}, {detail}"
    low, high = knee.low, knee.high
    if low is not None and high is not None and low != high:
        detail += f", interval {low:g} to {high:g}"
    reached = curve.beyond(load) is not None
    if not reached:
        detail += "; the highest level of the sweep, so the knee may lie above it"
    binds = _what_binds(knee, knees, curve.axis, load)
    if binds:
        detail += f". {binds}"
    return Headline("Knee", f"{load:g}" if reached else f"≥ {load:g}", unit, detail)


def _what_binds(chosen: Knee, knees: Sequence[Knee], axis: str, load: float) -> str:
    """The cause of the chosen knee, or of the nearest one below it by another rule."""
    here = [knee for knee in knees if knee.axis == axis and knee.cause != "unknown"]
    known = [knee for knee in here if knee.load is not None and knee.load <= load]
    if chosen in known:
        return f"What binds beyond it: {levels.cause_title(chosen)}"
    if not known:
        return ""
    nearest = max(known, key=lambda knee: knee.load or 0.0)
    since = f"from {nearest.load:g} on ({_rule_name(nearest)} rule)"
    return f"What binds {since}: {levels.cause_title(nearest)}"


def _rule_name(knee: Knee) -> str:
    """The rule's title inside a sentence; Kneedle is a name and stays capitalised."""
    title = levels.rule_title(knee)
    return title if knee.rule == "kneedle" else title.lower()


def _extremes(curve: SweepCurve, between: levels.Interval) -> list[Headline]:
    best = curve.best
    if best is None:
        return [Headline("Result", "none", "", "no level was valid and complete", "bad")]
    detail = f"{_stated(between(best.line, 'throughput', ''))}at {load_name(curve.axis, best.load)}, {_pace(best)}" + (
        f" ({best.latency_is})" if best.latency_is else ""
    )
    if (usd := best.line.usd_per_1m_output_tokens) is not None:
        detail += f"; {usd:,.2f} USD for 1M output tokens"
    headlines = [Headline("Best throughput", number(best.throughput_tokens_per_s), "tok/s", detail)]
    first = min(curve.usable, key=lambda point: _first_ms(point.line) or math.inf)
    statistic = "p50" if first.line.of("ttft").p50 else "mean"
    ttft = _first_ms(first.line)
    if ttft is not None:
        stated = _stated(between(first.line, "ttft", statistic))
        detail = f"{stated}at {load_name(curve.axis, first.load)}, {_pace(first)}"
        headlines.append(Headline("Fastest first token", number(ttft), "ms TTFT", detail))
    return headlines


def _first_ms(line: Level) -> float | None:
    return line.of("ttft").p50 or line.of("ttft").mean


def _pace(point: LevelPoint) -> str:
    if point.line.is_tokenless:
        return "counting input: the answers have no tokens"
    return f"{number(point.latency_ms_per_token)} ms/token"


def _stated(between: str) -> str:
    return f"interval {between}; " if between else ""


def _curve(run: Run, label: str, curve: SweepCurve, knees: Sequence[Knee], sure: _Sure) -> Curve:
    """The series of a run, with the interval of each predicted value."""
    points, names = curve.points, ("mean", *QUANTILES, "upper")
    charted: dict[tuple[str, str], _Predicted] = {THROUGHPUT: "throughput"}
    charted |= {(LATENCY_KEY[metric], name): metric for metric in CHART_METRICS for name in names}

    def band(line: Level, key: tuple[str, str]) -> Band | None:
        found = _estimate(sure, line, charted[key], key[1])
        return None if found is None else (found.low, found.high)

    is_predicted = any(sure.get(id(point.line)) for point in points)
    return Curve(
        label=label,
        axis=curve.axis,
        simulated=run.manifest.target.is_simulated,
        loads=tuple(point.load for point in points),
        valid=tuple(point.usable for point in points),
        values={key: tuple(_value(each.line, charted[key], key[1]) for each in points) for key in charted},
        knees=tuple(knee for knee in knees if knee.axis == curve.axis),
        slos=tuple(levels.readable_slos(run.manifest.scenario.slo)),
        ttft_parts={
            title: values
            for key, title in levels.TTFT_PARTS.items()
            if any(values := tuple(getattr(p.line.ttft_split, key, None) for p in points))
        },
        bands={key: tuple(band(each.line, key) for each in points) for key in charted} if is_predicted else {},
    )


def _intervals(sure: _Sure) -> levels.Interval:
    def between(line: Level, metric: _Predicted, name: str) -> str:
        found = _estimate(sure, line, metric, name)
        return "" if found is None else interval(found.low, found.high)

    return between


def _value(line: Level, metric: _Predicted, name: str) -> float | None:
    """A level's throughput, or a statistic of a latency (`upper`: as in `Curve.values`)."""
    if metric == "throughput":
        return work_per_s(line)
    found = line.of(metric)
    if name == "upper":
        return found.max if found.p90 is None else found.p90
    return found.value(name)


def _estimate(sure: _Sure, line: Level, metric: _Predicted, name: str) -> Estimate | None:
    """A predicted value with its interval; None if it was measured, or there is none."""
    known, value = sure.get(id(line)), _value(line, metric, name)
    return known.around(metric_of(metric, name), value) if known and value else None


def _environment(manifest: Manifest) -> tuple[Facts, ...]:
    """The time, target, machine and versions of a run."""
    content, host = manifest.to_json(), dict(manifest.host)
    run = [
        *((title, plain(content.get(key))) for key, title in _FIRST.items()),
        *(("Command", " ".join(map(str, command))) for command in manifest.commands),
        *_pairs({k: v for k, v in content.items() if k not in (*_PLACED, *_FIRST)}, _words),
    ]
    if isinstance(size := host.get("memory_bytes"), int | float):
        host["memory_bytes"] = f"{number(bytes_to_gib(size))} GiB"
    return (
        Facts("Run", tuple(run)),
        Facts("Target", tuple(_pairs(manifest.target.to_json(), _words))),
        Facts("Host", tuple(_pairs(host, lambda key: _words(key.removesuffix("_bytes"))))),
        Facts("Versions", tuple(_pairs(manifest.versions, str))),
    )


def _pairs(values: Mapping[str, Any], name: Callable[[str], str]) -> list[tuple[str, str]]:
    return [(name(key), plain(value)) for key, value in values.items()]


def _words(key: str) -> str:
    text = key.replace("_", " ")
    return text[:1].upper() + text[1:]
