"""Levels that ran several times: when to stop, and the figures of all attempts together.

Requests of one attempt depend on each other, attempts do not: the interval of a metric is
Student's t over the attempts' own values. The pooled level holds all requests, one attempt after
the other, and its throughput is all tokens over the sum of the wall times.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from lmi_bench.analysis.results.checks import REPEAT_TOLERANCE
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.latency import samples_needed, summarise_level
from lmi_bench.analysis.results.sweep_curve import work_per_s
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import QUANTILES, WHOLE, Level, NextLevel, Spread
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import METRICS, STATISTICS
from lmi_bench.core.steadiness import SteadyWindow
from lmi_bench.core.workload import LevelSpec

CONFIDENCE = 0.95
MIN_ATTEMPTS = 3
"""Attempts before an interval may end the repeats: two values are too often close by chance."""
MAX_ATTEMPTS = 20
SHOWN = ("throughput", "ttft_p50", "ttft_p90", "itl_p50", "tpot_p50", "e2e_p50", "e2e_p90")

_UNTIL = re.compile(
    rf"(throughput|(?:{'|'.join(METRICS)})_(?:{'|'.join(STATISTICS)}))"
    r"\s*(?:\+-|±|\+/-)\s*([0-9]*\.?[0-9]+)\s*%"
)


@dataclass(frozen=True, slots=True)
class Until:
    """Repeat until the 95 % interval of a metric is within `share` of its mean to either side."""

    metric: str
    share: float


def parse_until(text: str) -> Until:
    """Read a stop rule; raises InputError with the grammar if it is none.

    >>> parse_until("ttft_p90 +-5%")
    Until(metric='ttft_p90', share=0.05)
    """
    match = _UNTIL.fullmatch(text.strip())
    if match is None or not 0 < float(match[2]) < 100:
        raise InputError(
            f"--until {text!r} is not understood; write METRIC +-X%, such as 'ttft_p90 +-5%' or 'throughput +-2%'"
        )
    return Until(match[1], float(match[2]) / 100)


def repeat_rule(levels: Sequence[LevelSpec], *, repeats: int, until: Until | None = None) -> NextLevel:
    """Run all levels once, then all again, so that a drift in time affects all of them.

    repeats  attempts of a level; with `until` the least number of them (at least 3), and a level
             ends when its interval is narrow enough, or after 20
    Raises InputError where a level has too few requests for the quantile of `until`.
    """
    if until is not None:
        _check_supported(levels, until)

    def is_done(lines: Sequence[Level]) -> bool:
        if until is None:
            return len(lines) >= repeats
        if len(lines) >= MAX_ATTEMPTS:
            return True
        found = spread_of(lines, until.metric)
        least = max(repeats, MIN_ATTEMPTS)
        return found is not None and found.attempts >= least and found.half_width <= until.share

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        by_level = _by_index(finished)
        open_levels = [level for level in levels if not is_done(by_level[level.index])]
        if not open_levels:
            return None
        chosen = min(open_levels, key=lambda level: len(by_level[level.index]))
        return replace(chosen, repeat=len(by_level[chosen.index]))

    return next_level


def until_steady(
    rule: NextLevel,
    most: int,
    *,
    fits: Callable[[LevelSpec, Sequence[Level]], bool] = lambda _spec, _finished: True,
    note: Callable[[str], None] = lambda _: None,
) -> NextLevel:
    """The rule, with a level that was not steady run again until two steady attempts agree.

    The rule does not see an attempt that was not steady once another one was.

    most  further attempts of a level; fits: whether there is time for one; note: is told of it
    """

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        spec = once_more(finished) or rule(steady_lines(finished))
        if spec is None:
            return None
        return replace(spec, repeat=sum(line.index == spec.index for line in finished))

    def once_more(finished: Sequence[Level]) -> LevelSpec | None:
        latest = list(takewhile(lambda line: line.index == finished[-1].index, reversed(finished)))
        attempts = [line for line in finished if line.index == finished[-1].index]
        if not 0 < len(latest) <= most or not _is_open(latest, attempts):
            return None
        spec = rule(steady_lines(finished[: -len(latest)]))
        if spec is None or spec.index != latest[0].index or not fits(spec, finished):
            return None
        why = _doubt(latest[0]) or "steady, but has no second that agrees"
        note(f"{latest[0].name}: attempt {latest[0].attempt} is {why}: it runs again")
        return spec

    return next_level


def _is_open(latest: Sequence[Level], attempts: Sequence[Level]) -> bool:
    """Whether one of the latest attempts was not steady, and no two that were agree."""
    if not latest[0].valid or latest[0].stopped_by not in WHOLE:
        return False
    rates = sorted(work_per_s(line) or 0.0 for line in attempts if not _doubt(line))
    agree = any(high <= low * (1 + REPEAT_TOLERANCE) for low, high in pairwise(rates))
    return any(line.speed_step is not None for line in latest) and not agree


def steady_lines(finished: Sequence[Level]) -> list[Level]:
    """The lines without attempts that were not steady where another at the load was."""
    left_out = set_aside(finished)
    return [line for i, line in enumerate(finished) if left_out.get(i) != _NOT_STEADY]


_NOT_STEADY, _INVALID = "not steady", "invalid"
_BY_WORTH = ("", _NOT_STEADY, _INVALID)


def _doubt(line: Level) -> str:
    if not line.valid:
        return _INVALID
    return "" if line.speed_step is None else _NOT_STEADY


def set_aside(lines: Sequence[Level]) -> dict[int, str]:
    """Why attempts do not count, by their places: others at the same load are better.

    A valid one is better than one that is not, and a steady one than one that is valid only.
    """
    found = {}
    for places in by_load(lines).values():
        worth = {place: _BY_WORTH.index(_doubt(lines[place])) for place in places}
        best = min(worth.values())
        found.update({i: _BY_WORTH[each] for i, each in worth.items() if each > best})
    return found


def by_load(lines: Sequence[Level]) -> Mapping[tuple[str, float], list[int]]:
    """The places of the lines at each load."""
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for place, line in enumerate(lines):
        groups[line.load.axis, line.load.value].append(place)
    return groups


def _by_index(finished: Sequence[Level]) -> Mapping[int, list[Level]]:
    found: dict[int, list[Level]] = defaultdict(list)
    for line in finished:
        found[line.index].append(line)
    return found


def unmet_until(finished: Sequence[Level], until: Until) -> list[str]:
    """A sentence for each level whose interval is still wider than required."""
    texts = []
    for lines in _by_index(finished).values():
        found = spread_of(lines, until.metric)
        width = math.inf if found is None else found.half_width
        if width <= until.share:
            continue
        shown = f"+-{width:.1%}" if math.isfinite(width) else "not known"
        texts.append(
            f"{lines[0].name}: after {len(lines)} attempts the 95 % interval of "
            f"{until.metric} is {shown}, and +-{until.share:.1%} was asked for: "
            "more requests a level make it narrower"
        )
    return texts


def spread_of(lines: Sequence[Level], metric: str) -> Spread | None:
    """A metric over attempts; None if no valid attempt has it."""
    values = [value for line in lines if line.valid and (value := _value(line, metric)) is not None]
    return spread(values) if values else None


LOOKS = (3, 4, 6, 9, 13, MAX_ATTEMPTS)
"""Rounds of two targets in turn after which to look whether they differ."""


@dataclass(frozen=True, slots=True)
class PairedChange:
    """log(B / A) of a metric at a level, over rounds of both; its interval holds at every look, for
    all levels together, in 95 of 100 comparisons. A change within `until` does not matter.
    """

    level: str
    until: Until
    log: Spread

    @property
    def verdict(self) -> str:
        """More, less or no difference that matters; empty if nothing is sure."""
        low, high = self.log.low, self.log.high
        if low is None or high is None:
            return ""
        if low > 0 or high < 0:
            return "more" if low > 0 else "less"
        within = max(high, -low) <= math.log1p(self.until.share)
        return f"no difference of {self.until.share:.1%}" if within else ""

    def __str__(self) -> str:
        found, words = self.log, {"more": "B has more", "less": "B has less", "": "not sure"}
        low, mean, high = (math.expm1(x or 0.0) for x in (found.low, found.mean, found.high))
        between = "" if found.low is None else f" ({low:+.1%} to {high:+.1%})"
        return (
            f"{self.level}: {words.get(self.verdict, self.verdict)}: {self.until.metric} "
            f"{mean:+.1%} from A to B{between}, {found.attempts} round(s)"
        )


def paired_changes(a: Sequence[Level], b: Sequence[Level], until: Until) -> list[PairedChange]:
    """Each level's change from A to B by the rounds that both sent; a pair with an invalid attempt
    is left out. Each look has its part of the 5 %, and each level of it (Bonferroni)."""
    left, right = _by_index(a), _by_index(b)
    changes = []
    for index, lines in left.items():
        pairs = [
            (first, second)
            for one, other in zip(lines, right[index], strict=False)
            if one.valid
            and other.valid
            and (first := _value(one, until.metric))
            and (second := _value(other, until.metric))
        ]
        if pairs:
            chance = (1 - CONFIDENCE) / len(LOOKS) / len(left)
            found = spread([math.log(y / x) for x, y in pairs], 1 - chance)
            changes.append(PairedChange(lines[0].name, until, found))
    return changes


def spread(values: Sequence[float], confidence: float = CONFIDENCE) -> Spread:
    """Mean and t interval of one or more independent values, 95 % unless stated."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Spread(1, mean, None, None, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    from scipy.special import stdtrit  # 0.2 s to load

    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * deviation / math.sqrt(n)
    cv = deviation / abs(mean) if mean else None
    return Spread(n, mean, mean - half, mean + half, cv)


def pooled_run(run: Run) -> Run:
    """The run with the attempts at each load made one level; unchanged where each ran once.

    A pooled line has `attempts` and `spread`: each metric's mean, interval and cv. Attempts that
    are invalid, or not steady, are left out unless all are (`attempts_left_out`). A search's levels
    stay apart: it repeats a load with more requests, to confirm a verdict by few. So do imported
    ones without records.
    """
    lines, attempts = run.levels, run.records
    left_out, searched = set_aside(lines), any(line.search is not None for line in lines)
    if searched:
        left_out = {place: why for place, why in left_out.items() if why == _NOT_STEADY}
    groups = by_load(lines)
    once = all(len(places) == 1 for places in groups.values())
    if once or (searched and not left_out):
        return run
    levels, records = [], []
    for places in groups.values():
        kept = [place for place in places if place not in left_out]
        apart = searched or not all(attempts[place] for place in kept)
        for pool in [[place] for place in kept] if apart else [kept]:
            line, pooled = _pool([lines[i] for i in pool], [attempts[i] for i in pool])
            why = [f"{lines[i].attempt} ({left_out[i]})" for i in places if i in left_out]
            levels.append(replace(line, attempts_left_out=why) if why else line)
            records.append(pooled)
    return replace(run, levels=levels, records=records)


def _pool(lines: Sequence[Level], attempts: Sequence[Sequence[RequestRecord]]) -> tuple[Level, Sequence[RequestRecord]]:
    last = lines[-1]
    if len(lines) == 1:
        return last, attempts[0]
    pooled: list[RequestRecord] = []
    end_s = 0.0
    for records in attempts:
        start_s = min(record.sent_s for record in records)
        first_id = len(pooled)
        pooled += [
            replace(record.shifted(start_s - end_s), request_id=first_id + place)
            for place, record in enumerate(records)
        ]
        end_s += columns_of(records).wall_s
    spec = LevelSpec(last.index, Load(last.load.concurrency, last.load.rate_per_s), num_requests=len(pooled))
    found = summarise_level(LevelRun(spec, last.attempt, tuple(pooled)))
    measured = {name: getattr(found, name) for name in _POOLED if getattr(found, name) is not None}
    spreads = {metric: spread_of(lines, metric) for metric in SHOWN}
    level = replace(  # the rest, such as its price, is the last attempt's
        last,
        **measured,
        latency={**last.latency, **found.latency},
        stopped_by=next((each.stopped_by for each in lines if each.stopped_by), None),
        steady=SteadyWindow(reason="pooled over attempts"),
        attempts=len(lines),
        spread={metric: each for metric, each in spreads.items() if each is not None},
    )
    return level, tuple(pooled)


_POOLED = [row["figure"] for row in read_rows("pooled_figures.csv", "analysis")]
"""Figures of a level that are computed from the requests of all attempts."""


def _value(line: Level, metric: str) -> float | None:
    if metric == "throughput":
        return line.throughput_tokens_per_s
    name, statistic = metric.rsplit("_", 1)
    return line.of(name).value(statistic)


def _check_supported(levels: Sequence[LevelSpec], until: Until) -> None:
    statistic = until.metric.rsplit("_", 1)[-1]
    if statistic not in QUANTILES or until.metric.startswith("itl"):
        return
    needed = samples_needed(QUANTILES[statistic])
    for level in levels:
        number = level.counted_requests
        if number is not None and number < needed:
            raise InputError(
                f"--until {until.metric}: {level.load.name} counts {number} requests, "
                f"but a {statistic} needs {needed}: give --requests-per-level {needed} or more"
            )
