"""A server's `/metrics` page, under the names of vLLM, TGI and our own engine.

A page becomes a `ServerSample`: gauges of the moment and counters that only grow. Names change from
version to version, so each quantity has a list of them; the first that a page has is used. Only
known metrics are read, because a page has thousands of lines and is read during a measurement.
Source: the Prometheus exposition format 0.0.4.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

_LABELS = r'(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?'
_VALUE = r"[ \t]*([^\s{]\S*)(?:[ \t]+-?\d+)?[ \t]*$"


class Sample(NamedTuple):
    """One line: `labels` as written, braces included, or "" without labels."""

    name: str
    labels: str
    value: float


def read_samples(text: str, names: Collection[str]) -> Iterator[Sample]:
    """The samples of these names on a page, in its order; an invalid number is left out."""
    either = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    pattern = rf"^({either})(?![\w:]){_LABELS}{_VALUE}"  # compiled once: re keeps it
    for name, labels, value in re.findall(pattern, text, re.MULTILINE):
        try:
            number = float(value)
        except ValueError:
            continue
        yield Sample(name, labels, number)


def total(samples: Sequence[Sample], names: Sequence[str], *, mean: bool = False) -> float | None:
    """Sum or mean over all label sets of the first name that is present; None: none is present.

    >>> total([Sample("a", '{engine="0"}', 1.0), Sample("a", '{engine="1"}', 2.0)], ["b", "a"])
    3.0
    """
    for name in names:
        values = [sample.value for sample in samples if sample.name == name]
        if values:
            whole = math.fsum(values) / (len(values) if mean else 1)
            return whole if math.isfinite(whole) else None
    return None


# vLLM: vllm/v1/metrics/loggers.py (0.10, and the older names of 0.6); our engine has vLLM's names.
# TGI: router/src/infer and backends/v3/src (2.x and 3.x).
_NAMES: Mapping[str, Any] = json.loads(
    (files("lmi_bench.loadgen.watch") / "metric_names.json").read_text(encoding="utf-8")
)
_GAUGES, _COUNTERS, _SPANS = _NAMES["gauges"], _NAMES["counters"], _NAMES["spans"]
_READ = [name for names in (*_GAUGES.values(), *_COUNTERS.values()) for name in names]


@dataclass(frozen=True, slots=True)
class ServerSample:
    """One page: gauges of the moment and counters since the server's start, by our names."""

    gauges: Mapping[str, float]
    counters: Mapping[str, float]


def read_page(text: str) -> ServerSample:
    """The known metrics of a page; both mappings are empty if it has none."""
    samples = list(read_samples(text, _READ))

    def present(known: Mapping[str, list[str]]) -> dict[str, float]:
        each = ((name, known[name], name == "kv_usage_frac") for name in known)
        found = ((name, total(samples, names, mean=share)) for name, names, share in each)
        return {name: value for name, value in found if value is not None}

    return ServerSample(present(_GAUGES), present(_COUNTERS))


def read_spans(text: str) -> ServerSample:
    """Seconds and number of each stage in vLLM's spans, as OTLP/JSON: what a page would count.

    The line that a collector is just writing counts as far as it goes. Source: vllm/tracing.py.
    """
    either = "|".join(map(re.escape, _SPANS))
    stated = rf'"key":\s*"({either})",\s*"value":\s*{{\s*"(?:double|int)Value":\s*"?([\d.eE+-]+)"?\s*}}'
    counters = dict.fromkeys((f"{stage}{of}" for stage in _SPANS.values() for of in ("_sum_s", "_count")), 0.0)
    for name, value in re.findall(stated, text):
        if math.isfinite(took_s := float(value)):
            counters[f"{_SPANS[name]}_sum_s"] += took_s
            counters[f"{_SPANS[name]}_count"] += 1
    return ServerSample({}, counters)


def growth(before: ServerSample, after: ServerSample) -> dict[str, float]:
    """Growth of each counter; one that fell is left out, because its server was restarted. Servers
    show some counters only after the first count: a missing one was 0."""
    grown = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    return {name: value for name, value in grown.items() if value >= 0}
