"""Recorded traffic as a scenario file."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lmi_bench.analysis.level.layouts import RequestKind
from lmi_bench.core.durable import write_text
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.interchange.prometheus import MeteredTraffic, read_metrics
from lmi_bench.interchange.traffic import Traffic, read_traffic
from lmi_bench.interchange.traffic_statistics import (
    PEAK_WINDOW_S,
    Burstiness,
    burstiness,
    hourly_rates_per_s,
    joint_kinds,
    length_correlation,
    peak_rate_per_s,
)
from lmi_bench.jobs.settings.workload import WorkloadFromSettings

PROMETHEUS = "prometheus:"
_LEAST_SHARED = 16  # tokens: a cache's block; what is shorter is shared by chance or template


@dataclass(frozen=True, slots=True)
class Summary:
    """What a source says of the workload.

    peak_per_s       of any five minutes; mean_per_s: of the whole record; None: not known
    hourly_per_s     mean rates of the hours of a day (UTC); empty where they are not known
    shared_tokens    with which at least half of the prompts begin; repeated: share of prompt text
                     that another prompt began with; None: not known
    """

    kinds: tuple[RequestKind, ...]
    peak_per_s: float | None = None
    mean_per_s: float | None = None
    bursts: Burstiness | None = None
    hourly_per_s: tuple[float | None, ...] = ()
    shared_tokens: int | None = None
    repeated: float | None = None
    correlation: float | None = None
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenWorkload:
    """What the source says, the scenario file, and the daily curve where the source has one."""

    summary: Summary
    scenario: Path
    day: Path | None


def workload_from(settings: WorkloadFromSettings) -> WrittenWorkload:
    """Read the source and write the scenario; raises InputError for one that cannot be read."""
    source, out = settings.source, settings.out
    if source.startswith(PROMETHEUS):
        found = of_metrics(read_metrics(source.removeprefix(PROMETHEUS), hours=settings.hours))
    else:
        found = of_traffic(read_traffic(Path(source)))
    content = scenario_content(found, name=out.stem, model=settings.model, growth=settings.speed)
    parse_scenario(content, source=str(out))
    header = f"# Written by `lmi-bench workload from {source}`.\n"
    header += "".join(f"# Not known: {text}\n" for text in found.unknown)
    write_text(out, header + yaml.safe_dump(content, sort_keys=False))
    curve = day_curve(found)
    day = out.with_name(f"{out.stem}-day.csv") if curve else None
    if day is not None:
        write_text(day, curve)
    return WrittenWorkload(found, out, day)


def of_traffic(traffic: Traffic) -> Summary:
    """Of single requests."""
    requests, prefix = traffic.requests, traffic.prefix
    summary = Summary(
        kinds=joint_kinds(requests),
        shared_tokens=None if prefix is None else prefix.common,
        repeated=None if prefix is None else prefix.repeated,
        correlation=length_correlation(requests),
        unknown=traffic.unknown,
        notes=traffic.notes,
    )
    if not traffic.has_times:
        return summary
    times = [each.at_s for each in requests]
    span_s = times[-1] - times[0]
    bursts = burstiness(times)
    unknown = list(summary.unknown)
    if span_s < PEAK_WINDOW_S:
        unknown.append(f"the peak of five minutes: the record is of {span_s:,.0f} s, its mean rate")
    if bursts.shape is None:
        unknown.append(f"burstiness: {bursts.how}; taken as Poisson")
    hourly: tuple[float | None, ...] = ()
    if traffic.start_epoch_s is not None:
        hourly = hourly_rates_per_s(times, traffic.start_epoch_s)
        missing = sum(rate is None for rate in hourly)
        if missing:
            unknown.append(f"the daily curve: {missing} of 24 hours are not in the record")
    return replace(
        summary,
        peak_per_s=peak_rate_per_s(times),
        mean_per_s=(len(times) - 1) / span_s,
        bursts=bursts,
        hourly_per_s=hourly,
        unknown=tuple(unknown),
    )


def of_metrics(metered: MeteredTraffic) -> Summary:
    """Of an engine's counters."""
    rates = metered.rates_per_s
    hourly: tuple[float | None, ...] = ()
    if rates:
        by_hour: list[list[float]] = [[] for _ in range(24)]
        for at, rate in rates:
            by_hour[int(at // 3600) % 24].append(rate)
        hourly = tuple(sum(each) / len(each) if each else None for each in by_hour)
    return Summary(
        kinds=metered.kinds,
        peak_per_s=max((rate for _, rate in rates), default=None) or None,
        mean_per_s=sum(rate for _, rate in rates) / len(rates) if rates else None,
        hourly_per_s=hourly,
        unknown=metered.unknown,
        notes=(f"lengths from the metrics of {metered.engine}",),
    )


def scenario_content(
    found: Summary, *, name: str, model: str | None, growth: float = 1.0
) -> dict[str, Any]:
    """The scenario as YAML holds it.

    growth  the peak rate is multiplied by it
    """
    workload: dict[str, Any] = {
        "mix": [
            {
                "input_tokens": kind.input_tokens,
                "output_tokens": kind.output_tokens,
                "share": round(kind.share, 6),
            }
            for kind in found.kinds
        ]
    }
    if found.shared_tokens is not None and found.shared_tokens >= _LEAST_SHARED:
        shortest = min(kind.input_tokens for kind in found.kinds)
        workload["shared_prefix"] = min(found.shared_tokens, shortest - 1)
    content: dict[str, Any] = {"name": name}
    if model is not None:
        content["model"] = model
    content["workload"] = workload
    if found.peak_per_s is not None:
        load: dict[str, Any] = {"rate_per_s": [float(f"{found.peak_per_s * growth:.4g}")]}
        shape = None if found.bursts is None else found.bursts.shape
        if shape is not None and shape != 1:
            load |= {"arrivals": "gamma", "burstiness": float(f"{shape:.3g}")}
        content["load"] = load
    return content


def day_curve(found: Summary) -> str:
    """The hours that are known as a file of `plan-day --load`; empty without any."""
    known = [(h + 0.5, rate) for h, rate in enumerate(found.hourly_per_s) if rate is not None]
    if len(known) < 2 or not any(rate for _, rate in known):
        return ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("hour", "rate_per_s"))
    writer.writerows((hour, f"{rate:.6g}") for hour, rate in known)
    return text.getvalue()
