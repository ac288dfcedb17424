"""Reads another tool's summary of a level by a table of where each of our fields stands in it.

A path is keys joined by dots; of several paths the first that holds a finite number counts, and a
number in their place is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import (
    LATENCY_KEYS,
    Imported,
    ImportedLevel,
    finite,
    in_ms,
    missing,
    stated_load,
    statistics,
    summary_level,
)

Object = Mapping[str, Any]
Path = str | tuple[str | float, ...]
Knows = Callable[[Object], bool]
Reader = Callable[[Object, Load | None], Imported]
PLAIN = {name: f"{{}}.{name}" for name in ("mean", "std", "min", "max", "p50", "p90", "p95", "p99")}
"""Statistics that stand under a metric by our own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Where a tool's summary holds what a level of ours has.

    numbers     paths of: users, rate; requests, completed, errors; input_tokens, output_tokens or
                their means a request; wall_s; throughput, total_throughput, request_throughput
    users_first the users are the load even where the file has a rate too
    metrics     the tool's name of each of our latencies that it has by our formula
    absent      why it has not the others
    statistics  path of each statistic, {} for the metric's name
    unit        path of the unit, {} for the metric's name; without one `factor_ms` counts
    unit_if_none  the unit of a metric that names none
    factor_ms   milliseconds of the file's unit; by metric where they differ
    extra, facts  paths of what is kept aside, and of what describes the target
    prepare     makes one flat object of the file's
    """

    tool: str
    numbers: Mapping[str, Path]
    metrics: Mapping[str, str]
    statistics: Mapping[str, Path] = field(default_factory=lambda: PLAIN)
    absent: Mapping[str, str] = field(default_factory=dict)
    users_first: bool = False
    unit: str = ""
    unit_if_none: str = ""
    factor_ms: float | Mapping[str, float] = 1.0
    extra: Mapping[str, Path] = field(default_factory=dict)
    facts: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    prepare: Callable[[Object], Object] = dict

    def load_of(self, content: Object) -> Load:
        """How the level was measured; raises InputError where the file does not say."""
        return self._load(self.prepare(content))

    def read(self, content: Object, load: Load | None) -> Imported:
        """The file's level; `load` counts before the file's own. Raises InputError."""
        content = self.prepare(content)
        level = self._level(content, load or self._load(content))
        lengths = {
            f"{side}_tokens": _whole(content, f"{side[0]}sl") for side in ("input", "output")
        }
        return Imported(
            self.tool,
            (ImportedLevel(level),),
            {name: _first(content, path) for name, path in self.facts.items()},
            {} if None in lengths.values() else lengths,
            self.notes,
        )

    def without(self, absent: Mapping[str, str]) -> Summary:
        """The same for a file that has not these latencies, for these reasons."""
        return replace(self, absent={**self.absent, **absent})

    def _load(self, content: Object) -> Load:
        rate = _number(content, self.numbers.get("rate", ()))
        users = _whole(content, self.numbers.get("users", ()))
        if rate is not None and rate > 0 and not (self.users_first and users is not None):
            return stated_load(rate_per_s=rate)
        return stated_load(concurrency=users)

    def _level(self, content: Object, load: Load) -> Any:
        found = {name: _number(content, path) for name, path in self.numbers.items()}
        requests, errors, completed = (
            None if found.get(name) is None else round(found[name] or 0)
            for name in ("requests", "errors", "completed")
        )
        if requests is None and completed is not None:
            requests = completed + (errors or 0)
        if completed is None and requests is not None:
            completed = requests - (errors or 0)
        for side in ("input", "output"):
            mean = found.get(f"mean_{side}_tokens")
            if mean is not None and completed is not None:
                found[f"{side}_tokens"] = mean * completed
        found |= {"requests": requests, "errors": errors}
        rate_per_s = found.get("request_throughput")
        if found.get("wall_s") is None and rate_per_s and completed is not None:
            found["wall_s"] = completed / rate_per_s
        extra = {name: _first(content, path) for name, path in self.extra.items()}
        return summary_level(
            load,
            tool=self.tool,
            numbers=found,
            latencies={
                **{key: missing(reason) for key, reason in self.absent.items()},
                **{
                    key: self._statistics(content, key, completed)
                    for key in LATENCY_KEYS
                    if key in self.metrics and key not in self.absent
                },
            },
            extra={name: value for name, value in extra.items() if value is not None},
        )

    def _statistics(self, content: Object, key: str, completed: int | None) -> dict[str, Any]:
        metric = self.metrics[key]
        values = {
            name: value
            for name, path in self.statistics.items()
            if (value := _number(content, path, metric)) is not None
        }
        if not values:
            return missing()
        factor_ms = self._factor_ms(content, key)
        in_ms = {name: value * factor_ms for name, value in values.items()}
        # gaps are pooled, so that the number of requests is not that of the samples
        return statistics(in_ms, n=None if key == "itl_ms" else completed)

    def _factor_ms(self, content: Object, key: str) -> float:
        if not self.unit:
            factor = self.factor_ms
            return factor.get(key, 1.0) if isinstance(factor, Mapping) else factor
        return in_ms(_at(content, self.unit.format(self.metrics[key])) or self.unit_if_none)


def _paths(path: Path) -> tuple[str | float, ...]:
    return (path,) if isinstance(path, str) else path


def _at(content: Any, path: str) -> Any:
    """What stands at a path; None where a part of it is missing."""
    for key in path.split("."):
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _first(content: Object, path: Path) -> Any:
    values = (_at(content, each) for each in _paths(path) if isinstance(each, str))
    return next((value for value in values if value is not None), None)


def _number(content: Object, path: Path, metric: str = "") -> float | None:
    for each in _paths(path):
        value = finite(_at(content, each.format(metric)) if isinstance(each, str) else each)
        if value is not None:
            return value
    return None


def _whole(content: Object, path: Path) -> int | None:
    found = _number(content, path)
    return None if found is None else round(found)


def has(*paths: str) -> Knows:
    """Whether an object has a key, possibly null, at each of these paths."""

    def has_path(content: Object, path: str) -> bool:
        parent, _, key = path.rpartition(".")
        place = _at(content, parent) if parent else content
        return isinstance(place, Mapping) and key in place

    return lambda content: all(has_path(content, path) for path in paths)
