"""Two runs of one workload: what differs by more than chance, level by level.

Requests with the same number are the same request in both runs, so they are resampled in pairs:
differences between requests cancel. Each metric has its own 95 % interval of B / A. A difference
is claimed where that interval leaves out 1 and where, over all metrics and levels compared, the
chance of a single false claim is below one in twenty (Holm 1979). Requests of one batch depend on
each other, which a bootstrap over requests cannot see: with a single run a side the true spread
between runs is wider (`--repeat` measures it), so less than 1 % is claimed only where both sides
have three attempts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.columns import Columns, columns_of
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.quantiles import FloatArray, central_interval
from lmi_bench.analysis.results.repeats import by_load, set_aside
from lmi_bench.analysis.results.slo_results import statistic_ms
from lmi_bench.analysis.results.sweep_curve import sweep_curve
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.load import load_name
from lmi_bench.core.manifest import RunScenario
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run

Verdict = Literal["faster", "slower", "no difference", "unknown"]
Key = tuple[int | None, int, int]  # seed, attempt, request: with equal ones it is the same request

CONFIDENCE = 0.95
RESAMPLES = 1000
_GAP_RESAMPLES = 200  # gaps between tokens are many
_BLOCK = 2**20  # values of draws that are counted at once
_PAIRED_SHARE = 0.9
_EQUAL = 1e-9  # of a logarithm: rounding
LEAST_CLAIM, ATTEMPTS_FOR_LESS = 0.01, 3
POWER = 0.8
"""Share of comparisons that find a change of the size called detectable."""
LATENCIES = ("ttft", "itl", "tpot", "e2e")
COMPARED = ("p50", "p90")
THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one level in two runs.

    a, b       tok/s for the throughput, else ms
    change     b / a - 1; low, high: its 95 % interval
    verdict    of B against A; `unknown`, with `reason`, where the data do not suffice
    noise      standard deviation of log(B / A) between equal runs, by the spread of the draws, or of
               the attempts if that is larger; `freedom`: its degrees of freedom then
    p_value    chance of as large a change either way between equal runs
    detectable smallest change, as a share, that 80 of 100 such comparisons would claim if nothing
               else differed
    """

    level: str
    load: float
    metric: str
    unit: str
    a: float | None = None
    b: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Verdict = "unknown"
    reason: str = ""
    noise: float | None = None
    p_value: float | None = None
    detectable: float | None = None
    freedom: int | None = None

    @property
    def worse_by(self) -> float | None:
        """Share by which B is worse than A, negative if better."""
        if self.change is None:
            return None
        return -self.change if self.metric == THROUGHPUT else self.change


@dataclass(frozen=True, slots=True)
class _Side:
    """A load of one run: the completed requests of all attempts; each attempt and its wall time."""

    open_loop: bool
    records: Mapping[Key, RequestRecord]
    attempts: Sequence[Columns]
    walls_s: Sequence[float]

    def logs(self, metric: str) -> FloatArray:
        """Logarithm of a metric in each attempt; not finite where one lacks it."""
        name, _, statistic = metric.partition("_")
        values = []
        for columns, wall_s in zip(self.attempts, self.walls_s, strict=True):
            tokens_per_s = columns.tokens[columns.ok] / wall_s
            own = columns.values_ms(name, open_loop=self.open_loop)[0] if statistic else tokens_per_s
            values.append((statistic_ms(own, statistic) if statistic else own.sum()) if own.size else 0.0)
        logs: FloatArray = np.log(np.array(values))
        return logs

    def counted(self) -> "_Side":
        """The side with the requests that latencies count."""
        kept = {key: record for key, record in self.records.items() if not record.at_start}
        return replace(self, records=kept)

    @property
    def columns(self) -> Columns:
        """The requests as columns, in order."""
        return columns_of(list(self.records.values()))


def compare_runs(a: Run, b: Run, *, seed: int = 0) -> list[Difference]:
    """Every metric of every load that both runs have, by increasing load.

    Requests are compared in pairs, where the runs sent the same ones: with one seed.

    Raises InputError where the workloads differ, or the runs have no load in common.
    """
    differences = workload_differences(a.manifest.scenario, b.manifest.scenario)
    if differences:
        raise InputError(
            f"{a.path} and {b.path} ran different workloads, so their speeds cannot be compared: "
            + "; ".join(differences)
        )
    left, right = _sides(a), _sides(b)
    common = sorted(set(left) & set(right))
    if not common:
        raise InputError(
            f"{a.path} and {b.path} have no valid level in common: {_loads(left)} against "
            f"{_loads(right)}; run both with the same loads, and invalid levels again"
        )
    found = [each for key in common for each in _compare_level(key, left[key], right[key], seed=seed)]
    sides = {load_name(*key): (left[key], right[key]) for key in common}
    return _sure_together(_with_attempts(found, sides))


@np.errstate(divide="ignore", invalid="ignore")  # an attempt that lacks the metric
def _with_attempts(differences: Sequence[Difference], sides: Mapping[str, tuple[_Side, _Side]]) -> list[Difference]:
    """The differences with the noise of attempts, where it is larger: what lasts as long as one is
    in all of its requests, so that no draw of them shows it."""
    from scipy.special import stdtr, stdtrit  # 0.2 s to load

    many = {
        level: pair for level, pair in sides.items() if min(len(side.attempts) for side in pair) >= ATTEMPTS_FOR_LESS
    }
    squares, freedom = defaultdict[str, float](float), defaultdict[str, int](int)
    for d in differences:
        for logs in (side.logs(d.metric) for side in many.get(d.level, ())):
            if np.isfinite(logs).all():
                squares[d.metric] += float(logs.var() * logs.size)
                freedom[d.metric] += logs.size - 1
    found = list(differences)
    for i, d in enumerate(differences):
        if d.change is None or d.noise is None or not (of := freedom[d.metric]) or d.level not in many:
            continue
        noise = math.sqrt(squares[d.metric] / of * sum(1 / len(side.attempts) for side in many[d.level]))
        if noise > d.noise:
            log, half = math.log1p(d.change), noise * float(stdtrit(of, (1 + CONFIDENCE) / 2))
            chance = max(d.p_value or 0.0, 2 * float(stdtr(of, -abs(log) / noise)))
            low, high = math.expm1(log - half), math.expm1(log + half)
            found[i] = replace(d, noise=noise, freedom=of, p_value=chance, low=low, high=high)
    return found


def _sure_together(differences: Sequence[Difference]) -> list[Difference]:
    """The differences without the claims that do not hold together (Holm's step-down procedure)."""
    ranked = sorted((d.p_value, i) for i, d in enumerate(differences) if d.p_value is not None)
    sure: set[int] = set()
    for place, (p_value, index) in enumerate(ranked):
        if p_value > (1 - CONFIDENCE) / (len(ranked) - place):
            break
        sure.add(index)
    from scipy.special import stdtrit  # 0.2 s to load

    alpha = (1 - CONFIDENCE) / max(1, len(ranked))
    found = []
    for i, d in enumerate(differences):
        verdict: Verdict = d.verdict if i in sure or d.verdict == "unknown" else "no difference"
        least = d.detectable
        if d.noise is not None:
            needed = sum(stdtrit(d.freedom or math.inf, chance) for chance in (1 - alpha / 2, POWER))
            least = max(least or 0.0, math.expm1(float(needed) * d.noise))
        found.append(replace(d, verdict=verdict, detectable=least))
    return found


def workload_differences(a: RunScenario, b: RunScenario) -> list[str]:
    """What differs between the workloads of two runs; empty for the same workload.

    Compared are the workload section and how the requests arrive, not target, model and seed. An
    older run lacks later fields: unset, such a field counts as one that is not there.
    """
    first, second = _compared(a), _compared(b)
    return [
        f"{name} is {first.get(name)!r} and {second.get(name)!r}"
        for name in {**first, **second}
        if _set(first.get(name)) != _set(second.get(name))
    ]


def _compared(scenario: RunScenario) -> dict[str, Any]:
    load, workload = scenario.load, scenario.workload.to_json()
    names = ["arrivals", "ramp_s", "max_sessions", "max_in_flight"]
    found = {f"workload.{name}": value for name, value in workload.items()}
    found["load.burstiness"] = load.burstiness if load.arrivals == "gamma" else 1.0
    return found | {f"load.{name}": getattr(load, name) for name in names}


def _set(value: object) -> object:
    return value if value or value == "" else None  # "" is agents' default shape


def are_paired(a: Run, b: Run) -> bool:
    """Whether two runs sent the same requests, which one seed makes."""
    return a.manifest.scenario.seed == b.manifest.scenario.seed


def _loads(sides: Mapping[tuple[str, float], _Side]) -> str:
    return ", ".join(f"{load:g}" for _, load in sorted(sides)) or "none"


def _sides(run: Run) -> dict[tuple[str, float], _Side]:
    left_out, sides, seed = set_aside(run.levels), {}, run.manifest.scenario.seed
    for key, places in by_load(run.levels).items():
        kept = [i for i in places if run.levels[i].valid and i not in left_out]
        if not kept:
            continue
        sent = [run.records[i] for i in kept]
        answered = {(seed, attempt, r.request_id): r for attempt, each in enumerate(sent) for r in each if r.ok}
        attempts = list(map(columns_of, sent))
        sides[key] = _Side(key[0] == "rate_per_s", answered, attempts, [each.wall_s for each in attempts])
    return sides


@np.errstate(divide="ignore", invalid="ignore")  # a draw of no time: `_judge` leaves it out
def _compare_level(key: tuple[str, float], a: _Side, b: _Side, *, seed: int) -> list[Difference]:
    axis, load = key
    rng = np.random.default_rng(seed)
    throughput = Difference(load_name(axis, load), load, THROUGHPUT, "tok/s")
    differences = [_compare_throughput(throughput, a, b, rng)]
    of_load = a.counted(), b.counted()
    if len(of_load[0].records) < len(a.records) and len(of_load[1].records) < len(b.records):
        a, b = of_load  # else all count: one of them may be of an older version
    for metric in LATENCIES:
        differences += _compare_latency(replace(throughput, metric=metric, unit="ms"), a, b, rng)
    few = min(len(a.walls_s), len(b.walls_s)) < ATTEMPTS_FOR_LESS
    for i, d in enumerate(differences):
        if few and d.change is not None:
            verdict: Verdict = "no difference" if abs(d.change) < LEAST_CLAIM else d.verdict
            differences[i] = replace(d, detectable=LEAST_CLAIM, verdict=verdict)
    return differences


def _compare_throughput(blank: Difference, a: _Side, b: _Side, rng: np.random.Generator) -> Difference:
    """Tokens per second; draws keep what a side kept fixed: its users, or its sends at a rate.

    A level of users ends when its last user does, so each draw assigns its requests to users anew;
    at a rate it ends with its last answer, so each draw has the sends answered in other times.
    """
    tokens = [side.columns.tokens for side in (a, b)]
    if not tokens[0].any() or not tokens[1].any() or min(math.fsum(a.walls_s), math.fsum(b.walls_s)) <= 0:
        return replace(blank, reason="a side completed no request with tokens")
    points = [float(t.sum()) / math.fsum(s.walls_s) for t, s in zip(tokens, (a, b), strict=True)]
    indices = _draws(a, b, RESAMPLES, rng)
    drawn = []
    for side, counts, chosen, point in zip((a, b), tokens, indices, points, strict=True):
        e2e = np.nan_to_num(side.columns.each_s(open_loop=False)["e2e"])
        if side.open_loop:
            slots = np.flatnonzero(np.bincount(chosen.ravel()))  # what is drawn from, in order
            attempts = np.array([attempt for _, attempt, _ in side.records])[slots]
            starts = np.flatnonzero(np.diff(attempts, prepend=math.inf))
            ends_s = side.columns.sent_s[slots] + np.vstack([e2e[slots], e2e[chosen]])
            last_s = np.maximum.reduceat(ends_s, starts, axis=1).sum(axis=1)
            drawn.append(counts[chosen].sum(axis=1) / (math.fsum(side.walls_s) + last_s[1:] - last_s[0]))
            continue
        users = max(1, round(blank.load))
        pace = float(counts.sum() / _worked_through_s(e2e[None, :], users)[0])
        took_s = _worked_through_s(e2e[chosen], users)
        drawn.append(point * counts[chosen].sum(axis=1) / took_s / pace)
    return _judge(blank, points, drawn)


def _worked_through_s(e2e_s: FloatArray, users: int) -> FloatArray:
    """Seconds that users need for each draw, if each takes the next request when it is free.

    e2e_s  shape (draws, requests)
    """
    free_s = np.zeros((len(e2e_s), min(users, e2e_s.shape[1])))
    rows = np.arange(len(e2e_s))
    for request_s in e2e_s.T:
        free_s[rows, free_s.argmin(axis=1)] += request_s
    ended_s: FloatArray = free_s.max(axis=1)
    return ended_s


def _compare_latency(blank: Difference, a: _Side, b: _Side, rng: np.random.Generator) -> list[Difference]:
    values = [side.columns.by_request_ms(blank.metric, open_loop=side.open_loop) for side in (a, b)]
    pooled = [np.concatenate(side) if side else np.empty(0) for side in values]
    gaps = blank.metric == "itl"
    indices = _draws(a, b, _GAP_RESAMPLES if gaps else RESAMPLES, rng)
    samples: list[Callable[[float], FloatArray]] = []
    differences = []
    for statistic in COMPARED:
        difference = replace(blank, metric=f"{blank.metric}_{statistic}")
        needed = samples_needed(QUANTILES[statistic])
        fewest = min(len(side) for side in pooled)
        if fewest < needed:
            reason = f"{statistic} needs {needed} samples, has {fewest}"
            differences.append(replace(difference, reason=reason))
            continue
        if not samples:
            samples = [_of_draws(own, chosen) for own, chosen in zip(values, indices, strict=True)]
        drawn = [side(QUANTILES[statistic]) for side in samples]
        differences.append(_judge(difference, [statistic_ms(x, statistic) for x in pooled], drawn))
    return differences


def _of_draws(own: Sequence[FloatArray], chosen: NDArray[np.int64]) -> Callable[[float], FloatArray]:
    """The linear quantile of each draw of requests, whose values are sorted only once.

    chosen  shape (draws, requests): positions of the drawn requests
    """
    values = np.concatenate(own)
    order = np.argsort(values)
    values = values[order]
    owner = np.repeat(np.arange(len(own)), [len(each) for each in own])[order]
    times = np.stack([np.bincount(row, minlength=len(own)) for row in chosen])
    blocks = np.array_split(times, max(1, len(chosen) * len(values) // _BLOCK))

    def of_draws(times: NDArray[np.int64], quantile: float) -> FloatArray:
        ends = times[:, owner].cumsum(axis=1)
        place = quantile * (ends[:, -1:] - 1)  # among the values of the draw, from 0
        below, above = (
            values[np.minimum((ends <= edge).sum(axis=1), len(values) - 1)]
            for edge in (np.floor(place), np.ceil(place))
        )
        found = below + (above - below) * (place - np.floor(place))[:, 0]
        return np.where(ends[:, -1] > 0, found, math.nan)

    return lambda quantile: np.concatenate([of_draws(block, quantile) for block in blocks])


def _draws(a: _Side, b: _Side, resamples: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the resampled requests on both sides, in pairs where nearly all have a pair."""
    first, second = list(a.records), list(b.records)
    places = {key: place for place, key in enumerate(second)}
    pairs = [(place, places[key]) for place, key in enumerate(first) if key in places]
    if len(pairs) >= _PAIRED_SHARE * max(len(first), len(second)) and pairs:
        drawn = np.array(pairs)[rng.integers(0, len(pairs), size=(resamples, len(pairs)))]
        return drawn[:, :, 0], drawn[:, :, 1]
    return (
        rng.integers(0, max(1, len(first)), size=(resamples, len(first))),
        rng.integers(0, max(1, len(second)), size=(resamples, len(second))),
    )


def _judge(blank: Difference, points: Sequence[float], drawn: Sequence[FloatArray]) -> Difference:
    """The difference filled in from each side's value and its bootstrap draws."""
    a, b = points
    ratios = drawn[1] / drawn[0]
    kept = ratios[np.isfinite(ratios)]
    if not (kept > 0).any() or a <= 0:
        return replace(blank, reason="the metric is zero or missing")
    low, high = (edge - 1 for edge in central_interval(kept, CONFIDENCE))
    verdict: Verdict = "no difference"
    if low > 0 or high < 0:
        better = low > 0 if blank.metric == THROUGHPUT else high < 0
        verdict = "faster" if better else "slower"
    noise = float(np.std(np.log(kept[kept > 0])))
    return replace(
        blank,
        a=a,
        b=b,
        change=b / a - 1,
        low=low,
        high=high,
        verdict=verdict,
        noise=noise,
        p_value=_chance(b / a, noise),
    )


def _chance(ratio: float, noise: float) -> float:
    """Chance of as large a change either way between equal runs, for log-normal draws."""
    if ratio <= 0:
        return 0.0
    distance = abs(math.log(ratio))
    if noise == 0:
        return 1.0 if distance < _EQUAL else 0.0
    return math.erfc(distance / noise / math.sqrt(2))


@dataclass(frozen=True, slots=True)
class ScalingEfficiency:
    """Throughput of many replicas of a model against as many times that of few.

    Below 1 it shows what the replicas share: the router, a host's cores and memory bandwidth, its
    network. Each side counts with its best level, since n replicas peak at about n times the load.

    few, many  replicas of the two runs; *_tokens_per_s: output tokens a second of their best level
    edge       a best level is the highest that was run: more load may give more
    """

    few: int
    many: int
    few_tokens_per_s: float
    many_tokens_per_s: float
    edge: bool

    @property
    def efficiency_frac(self) -> float:
        """Throughput per replica of many over that of few: 1 where they share nothing scarce."""
        return (self.many_tokens_per_s / self.many) / (self.few_tokens_per_s / self.few)

    def to_json(self) -> dict[str, Any]:
        """As `compare --json` writes it."""
        return {**asdict(self), "efficiency_frac": self.efficiency_frac}


def scaling_efficiency(a: Run, b: Run) -> ScalingEfficiency | None:
    """None where both runs have as many replicas, or the number of one is not known."""
    sides = []
    for run in (a, b):
        copies, curve = run.manifest.target.copies, sweep_curve(run.levels)
        if copies is None or curve.best is None:
            return None
        best = curve.best.throughput_tokens_per_s or 0.0
        sides.append((copies, best, curve.best is curve.usable[-1]))
    (few, few_best, few_edge), (many, many_best, many_edge) = sorted(sides)
    if few == many:
        return None
    return ScalingEfficiency(few, many, few_best, many_best, few_edge or many_edge)
