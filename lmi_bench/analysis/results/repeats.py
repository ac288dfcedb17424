"""Levels that ran several times: when to stop, and what all attempts say together.

One run is a coin toss: requests of a run share its weather. Attempts are independent, so the
interval of a metric is Student's t over the attempts' own values. The pooled level holds all
requests, laid end to end, and its throughput is all tokens over the sum of the wall times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmi_bench.analysis.results.checks import level_name
from lmi_bench.analysis.results.latency import (
    QUANTILES,
    samples_needed,
    summarise_level,
    wall_time_s,
)
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import LEVEL_KEY, METRICS, STATISTICS
from lmi_bench.core.workload import LevelSpec

NextLevel = Callable[[Sequence[Mapping[str, Any]]], LevelSpec | None]
CONFIDENCE = 0.95
MIN_ATTEMPTS = 3
"""Attempts before an interval may end the repeats: with two it is too often narrow by luck."""
MAX_ATTEMPTS = 20
SHOWN = (
    "throughput", "ttft_p50", "ttft_p90", "itl_p50", "tpot_p50", "e2e_p50", "e2e_p90",
)  # fmt: skip

_UNTIL = re.compile(
    rf"(throughput|(?:{'|'.join(METRICS)})_(?:{'|'.join(STATISTICS)}))"
    r"\s*(?:\+-|±|\+/-)\s*([0-9]*\.?[0-9]+)\s*%"
)


@dataclass(frozen=True, slots=True)
class Until:
    """Repeat until the 95 % interval of a metric is within `share` of its mean to either side."""

    metric: str
    share: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over the attempts of one level; `low` and `high` are None for a single one.

    cv  standard deviation over mean, None for a single attempt
    """

    attempts: int
    mean: float
    low: float | None
    high: float | None
    cv: float | None

    @property
    def half_width(self) -> float:
        """Half of the interval over the mean; infinite for a single attempt."""
        if self.high is None or self.mean == 0:
            return math.inf
        return (self.high - self.mean) / abs(self.mean)


def parse_until(text: str) -> Until:
    """Read a stop rule; raises InputError with the grammar if it is none.

    >>> parse_until("ttft_p90 +-5%")
    Until(metric='ttft_p90', share=0.05)
    """
    match = _UNTIL.fullmatch(text.strip())
    if match is None or not 0 < float(match[2]) < 100:
        raise InputError(
            f"--until {text!r} is not understood; write METRIC +-X%, such as 'ttft_p90 +-5%' or "
            "'throughput +-2%'"
        )
    return Until(match[1], float(match[2]) / 100)


def repeat_rule(
    levels: Sequence[LevelSpec], *, repeats: int, until: Until | None = None
) -> NextLevel:
    """All levels once, then all again: what drifts in time does not fall on one level alone.

    repeats  attempts of a level; with `until` the least number of them (at least 3), and a level
             ends when its interval is narrow enough, or after 20
    Raises InputError where a level's requests cannot support the quantile of `until`.
    """
    if repeats < 1:
        raise InputError(f"--repeat must be at least 1, got {repeats}")
    if until is not None:
        _check_supported(levels, until)

    def is_done(lines: Sequence[Mapping[str, Any]]) -> bool:
        if until is None:
            return len(lines) >= repeats
        if len(lines) >= MAX_ATTEMPTS:
            return True
        found = spread_of(lines, until.metric)
        enough = found is not None and found.attempts >= max(repeats, MIN_ATTEMPTS)
        return enough and found is not None and found.half_width <= until.share

    def next_level(finished: Sequence[Mapping[str, Any]]) -> LevelSpec | None:
        by_level: dict[int, list[Mapping[str, Any]]] = {level.index: [] for level in levels}
        for line in finished:
            by_level.setdefault(line["level"], []).append(line)
        open_levels = [level for level in levels if not is_done(by_level[level.index])]
        if not open_levels:
            return None
        chosen = min(open_levels, key=lambda level: len(by_level[level.index]))
        return replace(chosen, repeat=len(by_level[chosen.index]))

    return next_level


def unmet_until(finished: Sequence[Mapping[str, Any]], until: Until) -> list[str]:
    """Levels whose interval is still wider than asked for, each as a sentence."""
    by_level: dict[int, list[Mapping[str, Any]]] = {}
    for line in finished:
        by_level.setdefault(line["level"], []).append(line)
    texts = []
    for lines in by_level.values():
        found = spread_of(lines, until.metric)
        width = math.inf if found is None else found.half_width
        if width <= until.share:
            continue
        shown = f"+-{width:.1%}" if math.isfinite(width) else "not known"
        texts.append(
            f"{level_name(lines[0])}: after {len(lines)} attempts the 95 % interval of "
            f"{until.metric} is {shown}, and +-{until.share:.1%} was asked for: more requests a "
            "level make it narrower"
        )
    return texts


def spread_of(lines: Sequence[Mapping[str, Any]], metric: str) -> Spread | None:
    """A metric over attempts; None if no valid attempt has it."""
    values = [
        value
        for line in lines
        if line.get("valid", True) and (value := _value(line, metric)) is not None
    ]
    return spread(values) if values else None


def spread(values: Sequence[float]) -> Spread:
    """Mean and 95 % t interval of independent values, at least one."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Spread(1, mean, None, None, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    from scipy.special import stdtrit  # 0.2 s to load

    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(n)
    cv = deviation / abs(mean) if mean else None
    return Spread(n, mean, mean - half, mean + half, cv)


def pooled_run(run: Run) -> Run:
    """The run with the attempts at each load made one level; unchanged where each ran once.

    A pooled line has `attempts` and `spread`: each metric's mean, interval and cv. Attempts that
    were invalid are left out unless all were, and counted in `attempts_left_out`.
    """
    levels, records = pooled_attempts(run.levels, run.records)
    return replace(run, levels=levels, records=records)


def pooled_attempts(
    lines: Sequence[dict[str, Any]], attempts: Sequence[tuple[RequestRecord, ...]]
) -> tuple[list[dict[str, Any]], list[tuple[RequestRecord, ...]]]:
    """The lines and the records of `pooled_run`. A search's levels stay as they are: it comes back
    to a load with more requests, to confirm what it saw with few."""
    groups: dict[tuple[Any, Any], list[int]] = {}
    for index, line in enumerate(lines):
        groups.setdefault((line.get("concurrency"), line.get("rate_per_s")), []).append(index)
    once = all(len(indices) == 1 for indices in groups.values())
    if once or len(attempts) < len(lines) or any("search" in line for line in lines):
        return list(lines), list(attempts)
    levels, records = [], []
    for indices in groups.values():
        kept = [i for i in indices if lines[i].get("valid", True)] or indices
        line, pooled = _pool([lines[i] for i in kept], [attempts[i] for i in kept])
        if len(kept) < len(indices):
            line = {**line, "attempts_left_out": len(indices) - len(kept)}
        levels.append(line)
        records.append(pooled)
    return levels, records


def _pool(
    lines: Sequence[dict[str, Any]], attempts: Sequence[tuple[RequestRecord, ...]]
) -> tuple[dict[str, Any], tuple[RequestRecord, ...]]:
    last = lines[-1]
    if len(lines) == 1:
        return last, attempts[0]
    pooled: list[RequestRecord] = []
    end_s = 0.0
    for records in attempts:
        if not records:
            continue
        start_s = min(record.sent_s for record in records)
        first_id = len(pooled)
        pooled += [
            replace(record.shifted(start_s - end_s), request_id=first_id + place)
            for place, record in enumerate(records)
        ]
        end_s += wall_time_s(records)
    if not pooled:  # an imported level has its statistics only
        return last, ()
    spec = LevelSpec(
        last["level"],
        Load(concurrency=last.get("concurrency"), rate_per_s=last.get("rate_per_s")),
        num_requests=len(pooled),
    )
    line = summarise_level(LevelRun(spec, last["attempt"], tuple(pooled)))
    line = {**last, **line}  # what others added to a line, such as its price, is the last one's
    spreads = {metric: spread_of(lines, metric) for metric in SHOWN}
    stopped = next((each["stopped_by"] for each in lines if each.get("stopped_by")), None)
    line |= {
        "valid": last.get("valid", True),
        "invalid_reason": last.get("invalid_reason"),
        "generator": last.get("generator", {}),
        "stopped_by": stopped,
        "steady": {"throughput_tokens_per_s": None, "reason": "pooled over attempts"},
        "attempts": len(lines),
        "spread": {
            metric: {"mean": s.mean, "low": s.low, "high": s.high, "cv": s.cv}
            for metric, s in spreads.items()
            if s is not None
        },
    }
    return line, tuple(pooled)


def _value(line: Mapping[str, Any], metric: str) -> float | None:
    if metric == "throughput":
        value = line.get("throughput_tokens_per_s")
    else:
        name, statistic = metric.rsplit("_", 1)
        value = (line.get(LEVEL_KEY[name]) or {}).get(statistic)
    return None if value is None else float(value)


def _check_supported(levels: Sequence[LevelSpec], until: Until) -> None:
    statistic = until.metric.rsplit("_", 1)[-1]
    if statistic not in QUANTILES or until.metric.startswith("itl"):
        return
    needed = samples_needed(QUANTILES[statistic])
    for level in levels:
        if level.num_requests is not None and level.num_requests < needed:
            raise InputError(
                f"--until {until.metric}: {level.load.name} sends {level.num_requests} requests, "
                f"but a {statistic} needs {needed}: give --requests-per-level {needed} or more"
            )
