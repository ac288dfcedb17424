"""An imported level: another tool's results as a line of levels.jsonl.

Formulas are mapped, not names: a metric with another formula stays empty, with the reason.
As in our own levels, a quantile stays empty where there are too few requests for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.analysis.results.latency import samples_needed, summarise_level
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.json_value import LARGEST
from lmi_bench.core.level import LATENCY_KEY, QUANTILES, STATISTICS, Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord, check_line, request_line
from lmi_bench.core.workload import LevelSpec
from lmi_bench.interchange.export import METRICS
from lmi_bench.interchange.traffic_rows import as_number

LATENCY_KEYS = tuple(LATENCY_KEY[metric] for metric in METRICS)
_NUMBERS = (
    *("requests", "errors", "output_tokens", "input_tokens", "wall_s", "throughput_tokens_per_s"),
    *("total_throughput_tokens_per_s", "request_throughput_per_s"),
)
NOT_IN_FILE = "not in the imported file"
Statistics = dict[str, Any]


def stated_load(concurrency: int | None = None, rate_per_s: float | None = None) -> Load:
    """The load that a file states; InputError where it states none, with the option that does."""
    if (concurrency is None) == (rate_per_s is None):
        raise InputError("the file does not say under which load it was measured: give --concurrency N or --rate R")
    return Load(concurrency, rate_per_s)


@dataclass(frozen=True, slots=True)
class ImportedLevel:
    """A level with index 0, and its requests if the file has them."""

    level: Level
    records: tuple[RequestRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """The content of one file."""

    tool: str
    levels: tuple[ImportedLevel, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def statistics(values: Mapping[str, float | None], *, n: int | None, reason: str = NOT_IN_FILE) -> Statistics:
    """The statistics object of a level's line, from a file's statistics in milliseconds.

    n       number of samples; None where it is unknown: then every quantile is kept
    """
    found: Statistics = {name: finite(values.get(name)) for name in STATISTICS}
    unsupported = {name: reason for name in STATISTICS if found[name] is None}
    for name, quantile in QUANTILES.items():
        needed = samples_needed(quantile)
        if found[name] is not None and n is not None and n < needed:
            found[name] = None
            unsupported[name] = f"needs {needed} samples, has {n}"
    return {**found, "n": n, "unsupported": unsupported}


def missing(reason: str = NOT_IN_FILE) -> Statistics:
    """The statistics of a metric that the file lacks, with the reason."""
    return statistics({}, n=None, reason=reason)


def summary_level(
    load: Load,
    *,
    tool: str,
    numbers: Mapping[str, float | None],
    latencies: Mapping[str, Statistics],
    errors_by_kind: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Level:
    """A level from another tool's summary; `extra` keeps values that our levels have no field for.

    numbers  fields of the level by their names, as far as the file has them

    Other tools count from the send, so TTFT and E2E latency each fill both of ours.
    """
    for key in ("ttft", "e2e"):
        if f"{key}_ms" in latencies:
            latencies = {f"{key}_from_sent_ms": latencies[f"{key}_ms"], **latencies}
    e2e_mean = (latencies.get("e2e_ms") or {}).get("mean")
    mean_concurrency, per_s = None, numbers.get("request_throughput_per_s")
    if e2e_mean is not None and per_s is not None:
        mean_concurrency = per_s * e2e_mean / 1000  # Little's law
    errors = numbers.get("errors")
    return Level.from_json(
        {
            "level": 0,
            "attempt": 1,
            "concurrency": load.concurrency,
            "rate_per_s": load.rate_per_s,
            **{name: numbers.get(name) for name in _NUMBERS},
            "errors_by_kind": errors_by_kind or ({"unknown": errors} if errors else {}),
            "steady": {"throughput_tokens_per_s": None, "reason": NOT_IN_FILE},
            "valid": True,
            "invalid_reason": None,
            "stopped_by": None,
            **{key: latencies.get(key) or missing() for key in LATENCY_KEYS},
            "mean_concurrency": mean_concurrency,
            "little_law_ratio": None,
            "generator": {},
            "imported_from": tool,
            "imported": dict(extra or {}),
        }
    )


def record_level(
    load: Load,
    records: Sequence[RequestRecord],
    *,
    tool: str,
    missing_metrics: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ImportedLevel:
    """A level from another tool's requests, summarised like our own.

    records          times in seconds since any common start
    missing_metrics  metrics that these records cannot give, and why
    """
    if not records:
        raise InputError("the file holds no request")
    start_s = min(record.sent_s for record in records)
    ordered = sorted((r.shifted(start_s) for r in records), key=lambda r: r.request_id)
    for record in ordered:
        check_line(request_line(0, 1, record, ()), "the file")
    spec = LevelSpec(0, load, num_requests=len(ordered))
    line = summarise_level(LevelRun(spec, 1, tuple(ordered))).to_json()
    # the due time is unknown: the send time is used instead
    absent = {"dispatch_delay_ms": "the file has no due times", **(missing_metrics or {})}
    for key, reason in absent.items():
        line[key] = missing(reason)
    line |= {"generator": {}, "imported_from": tool, "imported": dict(extra or {})}
    return ImportedLevel(Level.from_json(line), tuple(ordered))


def request_record(
    number: int,
    sent_s: float,
    *,
    times_s: Sequence[float] = (),
    ttft_s: float | None = None,
    ended_s: float | None = None,
    tokens: tuple[int, int] = (0, 0),
    error: str = "",
) -> RequestRecord:
    """A request by the times of its tokens, or of its first and last token only.

    ended_s  needed without `times_s`, unless the request failed
    tokens   prompt and answer length
    error    the other tool's own reason of a failure
    """
    asked, told = tokens
    if error:
        exchange = Exchange(sent_s, ended_s=ended_s)
        return RequestRecord(number, sent_s, exchange, asked, status="server_error", error=error)
    counts: tuple[int, ...] = ()
    is_streamed = bool(times_s) or ttft_s is not None
    if not times_s:
        assert ended_s is not None
        times_s, counts = (ended_s,), (max(1, told),)
        if ttft_s is not None and told > 1:
            times_s, counts = (sent_s + ttft_s, ended_s), (1, told - 1)
    exchange = Exchange(sent_s, tuple(times_s), counts, ended_s=ended_s, streamed=is_streamed)
    return RequestRecord(number, sent_s, exchange, asked, told)


_UNIT_MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6, "ms/token": 1.0, "s/token": 1e3}


def in_ms(unit: Any) -> float:
    """Milliseconds per unit of this name; raises InputError for an unknown unit."""
    if str(unit) not in _UNIT_MS:
        raise InputError(f"the file's unit {unit!r} of a latency is not known")
    return _UNIT_MS[str(unit)]


def value_at(content: Any, path: str) -> Any:
    """The value at a path of keys, or numbers of items, joined by dots; None if it is missing.

    A key after `?` is the first of its name, however deep.
    """
    for key in path.split("."):
        if key.startswith("?"):
            content = _anywhere(content, key[1:])
        elif isinstance(content, list) and key.isdecimal():
            content = dict(enumerate(content)).get(int(key))
        else:
            content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _anywhere(content: Any, name: str) -> Any:
    """The first value under a name, however deep: versions nest their options differently.

    AIPerf 0.13 lists phases; the warm-up has its own load and is skipped.
    """
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, Mapping) or content.get("kind") == "warmup":
        return None
    if content.get(name) is not None:
        return content[name]
    inner = (_anywhere(value, name) for value in content.values())
    return next((found for found in inner if found is not None), None)


def number_of(content: Mapping[str, Any], *paths: str | float) -> float | None:
    """The first finite number at these paths; a number in the place of a path is the default."""
    values = (finite(value_at(content, p) if isinstance(p, str) else p) for p in paths)
    return next((value for value in values if value is not None), None)


def whole_of(content: Mapping[str, Any], *paths: str | float) -> int | None:
    """The same as a whole number."""
    found = number_of(content, *paths)
    return None if found is None else round(found)


def finite(value: Any) -> float | None:
    """The value, possibly text, as a number below 2**63; None if it is not one."""
    number = as_number(value)
    return None if number is None or abs(number) >= LARGEST else number
