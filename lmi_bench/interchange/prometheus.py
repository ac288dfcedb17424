"""Reads traffic from a serving engine's metrics: a Prometheus server, or the engine's own page.

Prompts and answers have separate histograms, so which lengths occur together is not known. A
Prometheus server also has the rate over time; a `/metrics` page has only sums since the engine
started.
"""

import http.client
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.interchange.traffic_statistics import PEAK_WINDOW_S, Summary, independent_kinds
from lmi_bench.loadgen.watch.server_metrics import read_samples

Fetch = Callable[[str], str]

_TIMEOUT_S = 20.0
_MOST_GROUPS = 6
_LE = re.compile(r'\ble="([^"]+)"')
_ENGINES = {
    engine: metrics for engine, *metrics in (row.values() for row in read_rows("engine_metrics.csv", "interchange"))
}
"""Histograms of prompt and answer lengths, and counter of finished requests."""


def read_metrics(url: str, *, hours: float = 24.0, fetch: Fetch | None = None) -> Summary:
    """Read the traffic from a Prometheus server or a page of metrics.

    hours  length of the period that ends now

    Raises InputError if nothing answers or no known engine is found.
    """
    base = url.rstrip("/")
    try:
        return _read(fetch or _fetch, base, hours)
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise InputError(f"{base} does not answer like a Prometheus server: {exc}") from exc


def _read(get: Fetch, base: str, hours: float) -> Summary:
    is_page, window = base.endswith("/metrics"), f"{max(1, round(hours * 60))}m"
    page = _counts_of_page(get(base)) if is_page else {}
    for engine, (*lengths, counter) in _ENGINES.items():
        prompts, answers = (
            page.get(name) if is_page else _counts_of_server(get, base, name, window) for name in lengths
        )
        if not prompts or not answers:
            continue
        kinds = independent_kinds(_groups(prompts), _groups(answers))
        found = Summary(kinds, unknown=_UNKNOWN, notes=(f"lengths from the metrics of {engine}",))
        if is_page:
            return found
        end = time.time()
        query = f"sum(rate({counter}[5m]))"
        span = {"start": end - hours * 3600, "end": end, "step": int(PEAK_WINDOW_S)}
        rows = _asked(get, base, "query_range", {"query": query, **span})
        points = [(float(at), float(rate)) for at, rate in (rows[0]["values"] if rows else ())]
        rates = tuple(point for point in points if math.isfinite(point[1]))
        by_hour: list[list[float]] = [[] for _ in range(24 if rates else 0)]
        for at, rate in rates:
            by_hour[int(at // 3600) % 24].append(rate)
        return replace(
            found,
            peak_per_s=max((rate for _, rate in rates), default=None) or None,
            mean_per_s=sum(rate for _, rate in rates) / len(rates) if rates else None,
            hourly_per_s=tuple(sum(each) / len(each) if each else None for each in by_hour),
            unknown=_UNKNOWN[: 3 if rates else 4],
        )
    if is_page:
        example = _ENGINES["vLLM"][0]
        raise InputError(f"{base} has no lengths of {', '.join(_ENGINES)}: it must have {example} and the like")
    raise InputError(
        f"{base} has no metrics of {', '.join(_ENGINES)} over the last "
        f"{hours:g} hours: name a Prometheus server that scrapes the engine, or its /metrics page"
    )


_UNKNOWN = (
    "which prompts have which answers: metrics count them separately, so all pairs are assumed",
    "burstiness within five minutes: assumed to be Poisson",
    "shared prefixes: metrics hold no text",
    "rate and daily curve: a page of metrics holds sums since the engine's start (ask Prometheus)",
)


def _counts_of_page(text: str) -> Mapping[str, Mapping[float, float]]:
    """A page's histograms by name: counts by upper bound."""
    samples: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    names = {f"{name}_bucket": name for *lengths, _ in _ENGINES.values() for name in lengths}
    for sample in read_samples(text, names):
        if bound := _LE.search(sample.labels):
            samples[names[sample.name]][float(bound[1])] += sample.value
    return samples


def _groups(buckets: Mapping[float, float]) -> list[tuple[float, float]]:
    """At most six (tokens, share) of a cumulative histogram, each the mean of its buckets.

    A bucket counts at its middle; the last, unbounded one at 1.5 times its lower bound. Neighbours
    are joined, the smallest shares first, until at most six are left, which keeps the mean.
    Raises InputError if nothing was counted.
    """
    edges = sorted(buckets)
    whole = max(buckets.values(), default=0.0)
    if not whole > 0:
        raise InputError("the metrics have counted no request yet")
    parts, low, seen = [], 0.0, 0.0
    for edge in edges:
        count = buckets[edge] - seen  # below 0: of a model whose buckets are others
        middle = 1.5 * low if math.isinf(edge) else (low + edge) / 2
        if count > 0:
            parts.append((max(1.0, middle), count / whole))
        seen, low = max(seen, buckets[edge]), edge
    while len(parts) > _MOST_GROUPS:
        at = min(range(len(parts) - 1), key=lambda i: parts[i][1] + parts[i + 1][1])
        (a, share_a), (b, share_b) = parts[at], parts[at + 1]
        share = share_a + share_b
        parts[at : at + 2] = [((a * share_a + b * share_b) / share, share)]
    return parts


def _counts_of_server(get: Fetch, base: str, name: str, window: str) -> Mapping[float, float]:
    """A histogram's counts by upper bound; empty where the server has none."""
    query = f"sum by (le) (increase({name}_bucket[{window}]))"
    rows = _asked(get, base, "query", {"query": query})
    counts = ((row["metric"].get("le"), float(row["value"][1])) for row in rows)
    return {float(le): count for le, count in counts if le is not None and math.isfinite(count)}


def _asked(get: Fetch, base: str, kind: str, fields: Mapping[str, Any]) -> list[Any]:
    url = f"{base}/api/v1/{kind}?{urllib.parse.urlencode(fields)}"
    return list(json.loads(get(url))["data"]["result"])


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise InputError(f"prometheus:{url}: write prometheus:http://HOST:9090")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310, checked above
            return str(reply.read().decode("utf-8"))
    except (OSError, http.client.HTTPException) as exc:
        raise InputError(f"{url} does not answer: {exc}") from exc
