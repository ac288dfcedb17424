"""Reads another tool's summary of a level by its table of paths in data/import_paths.json.

A path is keys joined by dots, as `level.value_at` takes it. Of several paths the first with a
finite number counts; a number in the place of a path is the default.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from operator import add, mul, sub, truediv
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports import level as levels

Object = Mapping[str, Any]
Path = str | Sequence[str | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The paths of a level's fields in a tool's summary.

    numbers     paths of: users, rate; requests, completed, errors; input_tokens, output_tokens or
                their means per request; wall_s; throughput_tokens_per_s,
                total_throughput_tokens_per_s, request_throughput_per_s
    divisors    what the file's value of a number is divided by
    users_first True: the users are the load even if the file also has a rate
    metrics     the tool's name of each latency that it computes by our formula
    absent      the reason why each other latency is missing
    statistics  path of each statistic, {} for the metric's name
    unit        paths of the unit, {} for the metric's name; the last may be the unit itself
    extra, facts  paths of values to keep unchanged, and of facts about the target
    requests    known_by of a file in which the tool lists its requests; beside: pattern in its
                name, and what is in its place in the name of the summary; input_tokens and
                output_tokens: paths of a request's lengths
    known_by    paths, possibly null, of which a file of this tool has all of one list
    prepare     rearranges the file's object, one for each level; it may add `_tool`, `_notes`,
                `_absent` and `_failed` (errors by kind), which this file has
    """

    tool: str
    known_by: Sequence[Sequence[str]]
    numbers: Mapping[str, Path]
    metrics: Mapping[str, str]
    statistics: Mapping[str, Path]
    absent: Mapping[str, str] = field(default_factory=dict)
    users_first: bool = False
    divisors: Mapping[str, float] = field(default_factory=dict)
    unit: Path = "ms"
    extra: Mapping[str, Path] = field(default_factory=dict)
    facts: Mapping[str, Path] = field(default_factory=dict)
    notes: Sequence[str] = ()
    requests: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prepare: Callable[[Object], Sequence[Object]]

    def load_of(self, content: Object) -> Load:
        """The load of the first level; raises InputError if the file does not state it."""
        return self._load(self.prepare(content)[0])

    def _load(self, content: Object) -> Load:
        rate = levels.number_of(content, *_paths(self.numbers.get("rate", ())))
        users = levels.whole_of(content, *_paths(self.numbers.get("users", ())))
        if rate is not None and rate > 0 and not (self.users_first and users is not None):
            return levels.stated_load(rate_per_s=rate)
        return levels.stated_load(concurrency=users)

    def read(self, content: Object, load: Load | None) -> levels.Imported:
        """The file's levels; `load` overrides the file's own. Raises InputError."""
        prepared = self.prepare(content)
        first = prepared[0]
        if load is not None and "parameters" in first and len(prepared) > 1:
            raise InputError("a sweep states the load of each level: leave --concurrency and --rate out")
        lengths = {f"{side}_tokens": levels.whole_of(first, f"{side[0]}sl") for side in ("input", "output")}
        return levels.Imported(
            first.get("_tool") or self.tool,
            tuple(levels.ImportedLevel(self._level(each, load or self._load(each))) for each in prepared),
            {name: _first(first, path) for name, path in self.facts.items()},
            {} if None in lengths.values() else lengths,
            (*self.notes, *first.get("_notes", ())),
        )

    def _level(self, content: Object, load: Load) -> Level:
        found = {name: levels.number_of(content, *_paths(path)) for name, path in self.numbers.items()}
        for name, divisor in self.divisors.items():
            found[name] = _of(truediv, found[name], divisor)
        requests, errors, completed, sent = (
            _of(round, found.get(name)) for name in ("requests", "errors", "completed", "sent")
        )
        if errors is None:
            errors = _of(sub, sent, completed)
        if requests is None:
            requests = _of(add, completed, errors or 0)
        if completed is None:
            completed = _of(sub, requests, errors or 0)
        for side in ("input", "output"):
            total = _of(mul, found.get(f"mean_{side}_tokens"), completed)
            found[f"{side}_tokens"] = found.get(f"{side}_tokens") if total is None else total
        found |= {"requests": requests, "errors": errors}
        rate_per_s = found.get("request_throughput_per_s")
        if found.get("wall_s") is None and rate_per_s:
            found["wall_s"] = _of(truediv, completed, rate_per_s)
        asked, told = (found[f"{side}_tokens"] for side in ("input", "output"))
        for name, amount in (  # rates that the file does not state
            ("throughput_tokens_per_s", told),
            ("total_throughput_tokens_per_s", _of(add, asked, told)),
            ("request_throughput_per_s", completed),
        ):
            if found.get(name) is None:
                found[name] = _of(truediv, amount, found.get("wall_s") or None)
        extra = {name: _first(content, path) for name, path in self.extra.items()}
        absent = {**self.absent, **content.get("_absent", {})}
        latencies = {
            key: self._statistics(content, key, completed)
            for key in levels.LATENCY_KEYS
            if key in self.metrics and key not in absent
        }
        return levels.summary_level(
            load,
            tool=content.get("_tool") or self.tool,
            numbers=found,
            errors_by_kind=content.get("_failed"),
            latencies={key: levels.missing(reason) for key, reason in absent.items()} | latencies,
            extra={name: value for name, value in extra.items() if value is not None},
        )

    def _statistics(self, content: Object, key: str, completed: int | None) -> dict[str, Any]:
        metric = self.metrics[key]
        values = {
            name: value
            for name, path in self.statistics.items()
            if (value := levels.number_of(content, *_paths(path, metric))) is not None
        }
        if not values:
            return levels.missing()
        units = _paths(self.unit, metric)
        factor_ms = levels.in_ms(_first(content, units) or units[-1])
        values = {name: value * factor_ms for name, value in values.items()}
        # gaps are pooled over requests, so the number of samples is unknown
        return levels.statistics(values, n=None if key == "itl_ms" else completed)


def _of(function: Callable[..., Any], *values: float | None) -> Any:
    """What a function makes of the values; None if one of them is not known."""
    return None if None in values else function(*values)


@cache
def tables() -> dict[str, dict[str, Any]]:
    """The fields of each tool's `Summary`. The first table that knows a file reads it."""
    source = files("lmi_bench.interchange") / "data" / "import_paths.json"
    return dict(json.loads(source.read_text(encoding="utf-8")))


def _paths(path: Path, metric: str = "") -> tuple[str | float, ...]:
    """The paths with the metric's name in the place of {}."""
    paths = (path,) if isinstance(path, str) else path
    return tuple(each.format(metric) if isinstance(each, str) else each for each in paths)


def _first(content: Object, path: Path) -> Any:
    values = (levels.value_at(content, each) for each in _paths(path) if isinstance(each, str))
    return next((value for value in values if value is not None), None)


def has(content: Object, paths: Iterable[str]) -> bool:
    """Whether an object has a key, possibly null, at each of these paths."""

    def has_path(path: str) -> bool:
        parent, _, key = path.rpartition(".")
        place = levels.value_at(content, parent) if parent else content
        return isinstance(place, Mapping) and key in place

    return all(map(has_path, paths))
