"""Formats numbers for display. Units are converted only here, in the console and in `units`."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lmi_bench.core.level import Statistics
from lmi_bench.report.table import Cell

MISSING = "–"
NOT_SUPPORTED = "n/a"
_ROUNDING = 1e-9  # a smaller share is a rounding error, shown as 0


def number(value: float | None, digits: int = 3) -> str:
    """At least `digits` significant digits, thousands grouped, no exponent.

    >>> [number(v) for v in (0.01234, 1.5, 33.44, 1234.56, 0)]
    ['0.0123', '1.5', '33.4', '1,235', '0']
    """
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "∞" if value > 0 else MISSING
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def interval(low: float, high: float) -> str:
    """`8.2 to 14.2`; empty for a number that is exact."""
    ends = number(low), number(high)
    return "" if ends[0] == ends[1] else " to ".join(ends)


def count(value: float | None) -> str:
    """A count: 12,345."""
    return MISSING if value is None else f"{value:,.0f}"


def usd(value: float | None) -> str:
    """A price in USD, or that none is known.

    >>> [usd(1.212), usd(0.0912), usd(None)]
    ['$1.21', '$0.0912', 'no price']
    """
    if value is None:
        return "no price"
    places = 2 if abs(value) >= 0.1 or value == 0 else 4
    return f"${value:,.{places}f}"


def share(value: float | None) -> str:
    """A share (0 to 1) in percent; a rounding error is shown as 0.

    >>> [share(v) for v in (0.5, 0.0123, 2.15e-12)]
    ['50 %', '1.23 %', '0 %']
    """
    if value is None:
        return MISSING
    return f"{number(0.0 if abs(value) < _ROUNDING else value * 100)} %"


def metric_title(metric: str) -> str:
    """`ttft_p90` as a heading: `TTFT p90`."""
    name, _, statistic = metric.rpartition("_")
    return f"{name.upper()} {statistic}" if name else metric.capitalize()


def minute(created_at: str) -> str:
    """A time stamp to the minute in UTC; other text stays as it is.

    >>> minute("2026-01-02T03:04:05+00:00")
    '2026-01-02 03:04 UTC'
    """
    try:
        moment = datetime.fromisoformat(created_at)
    except ValueError:
        return created_at
    if moment.tzinfo is None:
        return created_at
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def statistic_cell(statistics: Statistics, name: str, digits: int = 3) -> Cell:
    """One statistic of a level's metric; if it is missing, the hint is the reason."""
    value = statistics.value(name)
    if value is not None:
        return Cell(number(value, digits), f"{value:.6g} ms, n = {statistics.n}")
    reason = statistics.why_missing(name)
    if reason:
        return Cell(NOT_SUPPORTED, reason, "na")
    return Cell(MISSING, "not measured", "na")


def key_title(key: str) -> str:
    """A key of a file as a heading, followed by its unit.

    >>> [key_title(k) for k in ("throughput_tokens_per_s", "ttft_p90_ms", "price_usd_per_hour")]
    ['Throughput, tok/s', 'TTFT p90, ms', 'Price, USD/h']
    """
    units = {
        "_tokens_per_s": "tok/s",
        "_ms_per_token": "ms/token",
        "_usd_per_hour": "USD/h",
        "_usd_per_month": "USD/month",
        "_per_s": "req/s",
        "_ms": "ms",
        "_s": "s",
        "_bytes": "bytes",
        "_gib": "GiB",
        "_frac": "share",
    }
    suffix = next((each for each in units if key.endswith(each)), "")
    key, unit = key.removesuffix(suffix), units.get(suffix, "")
    acronyms = {"ttft", "itl", "tpot", "e2e", "kv", "slo", "usd", "gpu", "cpu"}
    statistics = {"p50", "p90", "p95", "p99"}
    words = [word.upper() if word in acronyms else word for word in key.replace("-", "_").split("_")]
    title = " ".join(word for word in words if word)
    if title and words[0] not in statistics:
        title = title[0].upper() + title[1:]
    return f"{title}, {unit}" if unit else title


def plain(value: Any) -> str:
    """A value of a JSON file as one line of text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(each) for each in value)
    return str(value)
