"""The knee of a sweep by four stated rules, each with an interval, and the one to run at.

latency_limit  highest level whose ms/token p90 is at most 100, with a TTFT p90 of at most 10 s:
               beyond it a person's attention is lost (Nielsen 1993)
half_latency   highest level whose ms/token is at most twice that of the lowest level
kneedle        where throughput over log2(load), smoothed by a saturating curve, bends most
theory         min(B_max, B*): sequences the KV cache holds, batch at which compute binds

An interval is the middle 90 % of bootstrap samples of the requests where there are records, and
reaches to the neighbouring levels, between which the knee may lie. It has no upper end where the
highest level still passes. No knee is recommended on fewer than three levels, or where the same
level differed by more than the bends to be seen. `knee_cause` finds what binds beyond a knee.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from lmi_bench.analysis.results.knee_cause import CHANGES, KneeFacts, find_cause, found_by, say
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.quantiles import FloatArray, central_interval, upper_quantile
from lmi_bench.analysis.results.sweep_curve import LevelPoint, SweepCurve, sweep_curve
from lmi_bench.core.findings import Knee
from lmi_bench.core.level import Level
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.units import ms_to_s

KNEE_RULES = ("latency_limit", "half_latency", "kneedle", "theory")
LATENCY_LIMIT_MS = 100.0
_RESAMPLES = 400
_REPEAT_SPREAD = 1.02  # published levels repeat within 2 % of throughput
_MIN_LEVELS = 3
_SHARPNESS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_CORNERS = 97
TTFT_LIMIT_MS = 10_000.0
MAX_TAKEN = 0.2
"""Share of the machine's CPU time taken by others, mean over the levels, that hides a knee."""
MAX_NOISE = 0.2
"""Difference in throughput between attempts at a level, over their mean, that hides a knee."""

NONE_RECOMMENDED = "None is recommended: "

# (latency ms/token, throughput tok/s) of the usable levels -> index of the knee, or None
_Rule = Callable[[FloatArray, FloatArray], int | None]

_Found = tuple[_Rule, int | None, str]
"""A rule, and what it finds on the measured curve: the index of the knee or None, and why."""


def find_knees(
    levels: Sequence[Level], *, records: Sequence[Sequence[RequestRecord]] | None = None, facts: KneeFacts | None = None
) -> list[Knee]:
    """The knee of a sweep by each rule, in the order of KNEE_RULES; one is recommended if any is.

    records  one sequence of records a level, in the same order, for the bootstrap
    """
    facts = facts or KneeFacts()
    curve = sweep_curve(levels, records)
    findings = (_latency_limit(curve), _half_latency(curve), _kneedle(curve))
    knees = [_knee(name, found, curve, facts) for name, found in zip(KNEE_RULES, findings, strict=False)]
    return _recommend([*knees, _theory(curve, facts)], curve)


def _latency_limit(curve: SweepCurve) -> _Found:
    points = curve.usable
    prompt = np.array([not _starts_late(point) for point in points])

    def rule(latency: FloatArray, _: FloatArray) -> int | None:
        passing = np.flatnonzero((latency <= LATENCY_LIMIT_MS) & prompt)
        return int(passing[-1]) if passing.size else None

    if not points:
        return rule, None, say("nothing usable")
    index = _measured(rule, points)
    if points[0].line.is_tokenless:
        return rule, None, say("no tokens")
    found = "over the limit" if index is None else "within the limit"
    shown = {"limit_ms": LATENCY_LIMIT_MS, "ttft_s": ms_to_s(TTFT_LIMIT_MS)}
    return rule, index, say(found, latency=_latency_text(points[index or 0]), **shown)


def _half_latency(curve: SweepCurve) -> _Found:
    def rule(latency: FloatArray, _: FloatArray) -> int | None:
        passing = np.flatnonzero(latency <= 2 * latency[0])
        return int(passing[-1]) if np.isfinite(latency[0]) and passing.size else None

    points = curve.usable
    if len(points) < 2:
        return rule, None, say("two levels")
    index, lowest = _measured(rule, points), points[0]
    if index is None:
        return rule, None, say("no tokens" if lowest.line.is_tokenless else "no lowest latency")
    twice = f"2 x {lowest.latency_ms_per_token:.3g} at {curve.name(lowest.load)}"
    return rule, index, f"{_latency_text(points[index])} <= {twice}"


def _kneedle(curve: SweepCurve) -> _Found:
    points = curve.usable
    loads = np.array([point.load for point in points])

    def rule(_: FloatArray, throughput: FloatArray) -> int | None:
        return bend_index(loads, throughput)

    if len(points) < 3:
        return rule, None, say("three levels")
    index, rates = _measured(rule, points), _throughputs(points)
    if index is not None:
        return rule, index, say("bends", rate=rates[index], share=rates[index] / rates.max())
    if _grows(curve):
        return rule, None, say("still grows", at=curve.name(points[-1].load))
    return rule, None, say("never grows", rate=rates[0], at=curve.name(points[0].load))


def _theory(curve: SweepCurve, facts: KneeFacts) -> Knee:
    """min(B_max, B*) is a number of sequences; over rates, Little's law finds the level."""
    blank = Knee("theory", curve.axis)
    known = (facts.b_max, facts.b_max_expected, facts.b_star)
    sure, expected, binds = (math.inf if each is None else float(each) for each in known)
    value, upper = min(sure, binds), min(expected, binds)
    if value == math.inf:
        return replace(blank, why=say("no shape"))
    high = value if upper == math.inf else max(value, upper)
    memory = "unknown" if facts.b_max is None else f"{facts.b_max:g}"
    critical = "compute binds" if binds < math.inf else "compute never binds"
    found = "compute unknown" if facts.b_star is None else critical
    why = say(found, memory=memory, b_star=binds)
    highest = max((p.concurrency or 0.0 for p in curve.points), default=0.0)
    if value > highest:
        return replace(blank, why=f"{why}: beyond the {highest:.3g} in flight of this sweep")
    cause = "kv_memory" if value == sure else "compute"
    knee = replace(blank, cause=cause, change=CHANGES[cause], why=why)
    if curve.axis == "concurrency":
        return knee.at(value, value, high)
    held = [p for p in curve.usable if p.concurrency is not None and p.concurrency <= value]
    if not held:
        return replace(blank, why=f"{why}; no level had so few requests in flight")
    why += f"; {held[-1].concurrency:.3g} requests in flight here"
    neighbours = _neighbours(curve.usable, curve.usable.index(held[-1]))
    return replace(knee, why=why).at(held[-1].load, *neighbours)


def kneedle_index(x: FloatArray, y: FloatArray) -> int | None:
    """Index of the knee of a rising, concave curve; None if it has none.

    difference = (y - y_0) / (y_max - y_0) - (x - x_0) / (x_n - x_0), the knee is its maximum

    x  shape (n,), strictly increasing; y: shape (n,)
    Source: Satopaa et al. 2011, "Finding a 'Kneedle' in a Haystack". Its smoothing is
    `saturating_fit`.

    A curve that never rises above its chord (throughput still grows as fast as the load), or
    whose maximum is at an end, has no knee.
    """
    rise = float(y.max() - y[0])
    if rise <= 0:
        return None
    difference = (y - y[0]) / rise - (x - x[0]) / (x[-1] - x[0])
    index = int(np.argmax(difference))
    if index in (0, len(x) - 1) or difference[index] <= 1e-9:
        return None
    return index


def bend_index(loads: FloatArray, throughput: FloatArray) -> int | None:
    """Index of Kneedle's knee of throughput over log2(load), or None; both of shape (n,).

    Of the smoothed curve, since noise of 5 % moves the knee of the bare levels; a bend that the
    smooth curve cannot follow is that of the bare levels.
    """
    log_load = np.log2(loads)
    smooth = kneedle_index(log_load, saturating_fit(loads, throughput))
    return kneedle_index(log_load, throughput) if smooth is None else smooth


def saturating_fit(loads: FloatArray, throughput: FloatArray) -> FloatArray:
    """Throughput at the loads by the saturating curve nearest to the measured one.

    fit(N) = s N / (1 + (N / K)^p)^(1/p), least squares of the logarithm

    loads       shape (n,), positive, increasing
    throughput  tok/s, shape (n,); past the best level it counts as that level's, since a server
                that loses throughput is past its knee

    p = 1 is a step time linear in the batch, a large p the corner of an ideal queue. Three
    parameters from all levels: noise of 5 % a level moves the bend by a level in 4 % of sweeps,
    where the bare levels move it in 43 % (a curve of 8 doublings).
    """
    best = int(np.argmax(throughput))
    if np.any(throughput <= 0) or best == 0:
        return throughput
    until_best = np.where(np.arange(len(loads)) < best, throughput, throughput[best])
    residual = np.log(until_best) - np.log(_saturating_curves(tuple(loads)))
    scale = residual.mean(axis=1, keepdims=True)
    nearest = int(np.argmin(((residual - scale) ** 2).sum(axis=1)))
    curve = _saturating_curves(tuple(loads))[nearest]
    fitted: FloatArray = curve * np.exp(scale[nearest])
    return fitted


@cache
def _saturating_curves(loads: tuple[float, ...]) -> FloatArray:
    """Candidate curves of `saturating_fit` for s = 1, shape (curves, loads)."""
    sharpness = np.array(_SHARPNESS)[:, None, None]
    ratio = np.array(loads) / np.geomspace(loads[0] / 4, loads[-1] * 4, _CORNERS)[:, None]
    curves = ratio / (1 + ratio**sharpness) ** (1 / sharpness)
    flat: FloatArray = curves.reshape(-1, len(loads))
    return flat


def _throughputs(points: Sequence[LevelPoint]) -> FloatArray:
    return np.array([p.throughput_tokens_per_s or 0.0 for p in points])


def _measured(rule: _Rule, points: Sequence[LevelPoint]) -> int | None:
    latencies = [p.latency_ms_per_token for p in points]
    known = np.array([np.inf if latency is None else latency for latency in latencies])
    return rule(known, _throughputs(points))


def _knee(name: str, found: _Found, curve: SweepCurve, facts: KneeFacts) -> Knee:
    """The knee of a rule with its interval and its cause, or why the rule finds none."""
    rule, index, why = found
    if index is None:
        return Knee(name, curve.axis, why=why)
    load = curve.usable[index].load
    drawn_low, drawn_high, how = _interval(rule, curve.usable, index)
    beyond = curve.beyond(load)
    before, after = _neighbours(curve.usable, index)
    low = min(drawn_low, before) if name == "kneedle" else drawn_low
    high = None if beyond is None else max(drawn_high, after, beyond.load)
    cause, change = find_cause(curve, load, facts)
    if beyond is None:
        why += f"; the highest level of the sweep, so the knee is at or above {curve.name(load)}"
    elif name != "kneedle":
        why += f"; next level: {curve.name(beyond.load)}, {_latency_text(beyond)}"
    knee = Knee(name, curve.axis, cause=cause, change=change, why=f"{why} ({how})")
    return knee.at(load, low, high)


def _interval(rule: _Rule, points: Sequence[LevelPoint], index: int) -> tuple[float, float, str]:
    """Interval of the knee's load, and how it was found."""
    if any(point.requests is None for point in points):
        return *_neighbours(points, index), "interval: neighbouring levels"
    rng = np.random.default_rng(0)
    drawn = [_resample(point, rng) for point in points]
    latencies, throughputs = (np.array(each).T for each in zip(*drawn, strict=True))
    found = [rule(*row) for row in zip(latencies, throughputs, strict=True)]
    here = points[index].load
    loads = [points[i].load for i in found if i is not None]
    low, high = central_interval(np.array(loads or [here]))
    return min(low, here), max(high, here), "interval: bootstrap over requests, 90 %"


def _resample(point: LevelPoint, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """p90 of ms/token and throughput of resampled requests, each of shape (resamples,).

    throughput = concurrency (as measured) * sum of tokens / sum of E2E, by Little's law.
    """
    assert point.requests is not None  # the caller checked
    latency, tokens = point.requests
    drawn = rng.integers(0, len(latency), size=(_RESAMPLES, len(latency)))
    upper = np.array([upper_quantile(row, 0.9) for row in latency[drawn]])
    e2e = np.where(tokens > 0, latency, 0.0) * tokens
    pace = float(tokens.sum() / e2e.sum())
    drawn_e2e = e2e[drawn].sum(axis=1)
    paces = np.where(drawn_e2e > 0, tokens[drawn].sum(axis=1) / np.maximum(drawn_e2e, 1e-12), 0.0)
    return upper, (point.throughput_tokens_per_s or 0.0) * paces / pace


def _neighbours(points: Sequence[LevelPoint], index: int) -> tuple[float, float]:
    return points[max(0, index - 1)].load, points[min(len(points) - 1, index + 1)].load


def _latency_text(point: LevelPoint) -> str:
    if point.latency_ms_per_token is None:
        return "nothing completed"
    if not np.isfinite(point.latency_ms_per_token):
        return "a tenth or more of the requests failed"
    text = f"{point.latency_is} {point.latency_ms_per_token:.3g} ms/token"
    return f"{text}, TTFT {ttft_ms(point.line):,.0f} ms" if _starts_late(point) else text


def ttft_ms(line: Level) -> float:
    """The level's TTFT p90, or its mean where there are too few requests; 0 if unknown."""
    found = line.of("ttft")
    return found.p90 or found.mean or 0.0


def _starts_late(point: LevelPoint) -> bool:
    return ttft_ms(point.line) > TTFT_LIMIT_MS


def taken_of(levels: Sequence[Level]) -> float:
    """Share of the machine's CPU time that others took, mean over the levels; 0 if unknown."""
    seen = [line.server.cpu_taken_frac for line in levels if line.server is not None]
    return float(np.mean([each or 0.0 for each in seen])) if seen else 0.0


def noise_of(levels: Sequence[Level]) -> tuple[float, str]:
    """Largest difference between attempts at a level, over their mean throughput; its name."""
    spreads = [(line.spread.get("throughput"), line.name) for line in levels]
    return max(((math.sqrt(2) * (s.cv or 0.0), name) for s, name in spreads if s), default=(0, ""))


def _why_no_knee(curve: SweepCurve) -> str | None:
    """Why these levels cannot show a knee; None if they can."""
    if len(curve.usable) < _MIN_LEVELS:
        return say("few levels", count=len(curve.usable), least=_MIN_LEVELS)
    taken = taken_of([point.line for point in curve.usable])
    if taken > MAX_TAKEN:
        return say("CPU taken", taken=taken)
    noise, name = noise_of([point.line for point in curve.usable])
    return say("noisy", name=name, noise=noise) if noise > MAX_NOISE else None


def _grows(curve: SweepCurve) -> bool:
    """Whether any level has more throughput than the lowest, beyond the spread of repeats."""
    rates = _throughputs(curve.usable)
    return bool(rates.max() > _REPEAT_SPREAD * rates[0])


def _without(knees: list[Knee], why: str) -> list[Knee]:
    """The knees with the reason why none of them is recommended."""
    return [replace(knees[0], why=f"{knees[0].why}. {NONE_RECOMMENDED}{why}"), *knees[1:]]


def _recommend(knees: list[Knee], curve: SweepCurve) -> list[Knee]:
    """Mark the knee to run at: the lower of latency limit and Kneedle, else what there is.

    Above the latency limit answers are too slow; above Kneedle's bend more load adds latency
    and hardly any throughput. The lower of the two respects both.
    """
    if (why_none := _why_no_knee(curve)) is not None:
        return _without(knees, why_none) if curve.usable else knees
    late = {point.load for point in curve.usable if _starts_late(point)}
    loads = {knee.rule: knee.load for knee in knees if knee.load not in late}
    limit, bend = loads.get("latency_limit"), loads.get("kneedle")
    if limit is not None and bend is not None:
        later = "limit before the bend" if limit < bend else "bend before the limit"
        case = "limit at the bend" if limit == bend else later
    elif limit is not None:
        case = "limit alone, growing" if _grows(curve) else "limit alone"
    else:
        case = "neither" if bend is None else "bend alone"
    chosen, reason = found_by(case)
    load = loads.get(chosen)
    here = next((point.line for point in curve.usable if point.load == load), None)
    if here is not None and here.stopped_by == "duration" and here.counted < samples_needed(0.9):
        return _without(knees, say("few requests", line=here))
    return [
        replace(knee, recommended=True, why=f"{knee.why}. Recommended: {reason}")
        if knee.rule == chosen and load is not None
        else knee
        for knee in knees
    ]
