"""The interactive charts, as plotly figures in plain values.

A figure is {"data": [...], "layout": {...}} as plotly.js takes it. Colours that follow the page's
theme are written `var(--ink)` and resolved in the page, so that light and dark share one figure.
Names of runs go through `chart_text`: plotly reads a few HTML tags in its texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lmi_bench.report.chart_parts import (
    base_layout,
    chart_text,
    draw_knees,
    draw_limit,
    finite,
    hover_names,
    knee_points,
    log_loads,
    markers,
)
from lmi_bench.report.values import Curve, ReportView

# Told apart by people with any colour vision, on white and on near-black (after Okabe and Ito).
PALETTE = ("#2f7de1", "#e0742a", "#1f9e77", "#c056a0", "#8f7a2b", "#7568d8", "#4aa3c7", "#d04a4a")

_STYLES = {
    "mean": ("solid", "circle"),
    "p50": ("dashdot", "triangle-up"),
    "p90": ("dash", "diamond"),
    "p99": ("dot", "square"),
}


_LEGEND_LENGTH = 36


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: what it shows in words, and its figure."""

    anchor: str
    title: str
    description: str
    figure: dict[str, Any]
    wide: bool = False


def build_charts(view: ReportView) -> tuple[Chart, ...]:
    """The charts of a report; none where there is no run."""
    curves = [run.curve for run in view.runs if run.curve.loads]
    if not curves:
        return ()
    charts = [_latency_throughput(curves, view.latency_limit_ms)]
    for axis in dict.fromkeys(curve.axis for curve in curves):
        same = [curve for curve in curves if curve.axis == axis]
        colours = {curve.label: _colour(curves, curve) for curve in same}
        suffix = "" if axis == "concurrency" else "-by-rate"
        charts += [
            _throughput(same, colours, suffix),
            _percentiles(same, colours, suffix, "latency_ms_per_token",
                         "Latency", "ms/token", limit=view.latency_limit_ms),
            _percentiles(same, colours, suffix, "ttft_ms", "Time to first token", "ms"),
            _percentiles(same, colours, suffix, "itl_ms", "Inter-token latency", "ms"),
        ]  # fmt: skip
    return tuple(charts)


def _colour(curves: Sequence[Curve], curve: Curve) -> str:
    index = next(i for i, each in enumerate(curves) if each is curve)
    return PALETTE[index % len(PALETTE)]


def _name(curve: Curve) -> str:
    label = curve.label
    if len(label) > _LEGEND_LENGTH:
        kept = _LEGEND_LENGTH // 2  # of either end: runs of one target differ in their last words
        label = f"{label[: kept - 1]}…{label[-kept:]}"
    return chart_text(f"{label} (predicted)" if curve.simulated else label)


def _latency_throughput(curves: Sequence[Curve], limit_ms: float) -> Chart:
    """What more load buys and what it costs: latency over throughput, level by level."""
    data: list[dict[str, Any]] = []
    for curve in curves:
        colour = _colour(curves, curve)
        latency = curve.latencies["latency_ms_per_token", "upper"]
        labels = {
            "text": [f"{load:g}" for load in curve.loads],
            "textposition": "top left",
            "textfont": {"size": 11, "color": "var(--muted)"},
        }
        x = curve.throughput_tokens_per_s
        data.append(
            _trace(curve, colour, x, latency, "%{x:,.4g} tok/s<br>%{y:,.4g} ms/token", labels)
        )
        data += knee_points(curve, colour, latency, only_recommended=len(curves) > 1)
    layout = base_layout("Throughput, output tok/s", "Latency p90, ms/token")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["xaxis"] |= {"rangemode": "tozero"}
    draw_limit(layout, limit_ms, [curve.latencies["latency_ms_per_token", "upper"]
                                   for curve in curves])  # fmt: skip
    return Chart(
        "chart-latency-throughput",
        "Latency against throughput",
        "Each point is one level, labelled with its load. Right is more throughput, down is faster "
        "answers; diamonds are the knees. Latency is the p90 of end-to-end time per output token, "
        "or the slowest request where a level has too few for a p90.",
        {"data": data, "layout": layout},
        wide=True,
    )


def _trace(
    curve: Curve,
    colour: str,
    x: Sequence[float | None],
    y: Sequence[float | None],
    hover: str,
    labels: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers+text" if labels else "lines+markers",
        "name": _name(curve),
        "x": finite(x),
        "y": finite(y),
        **labels,
        "customdata": hover_names(curve),
        "line": {"color": colour, "width": 2.5, "dash": "dash" if curve.simulated else "solid"},
        "marker": markers(curve, colour),
        "hovertemplate": f"%{{customdata}}<br>{hover}<extra>%{{fullData.name}}</extra>",
    }


def _throughput(curves: Sequence[Curve], colours: dict[str, str], suffix: str) -> Chart:
    data = [
        _trace(curve, colours[curve.label], curve.loads, curve.throughput_tokens_per_s,
               "%{y:,.4g} tok/s")
        for curve in curves
    ]  # fmt: skip
    layout = base_layout(_load_title(curves), "Throughput, output tok/s")
    log_loads(layout, curves)
    layout["yaxis"] |= {"rangemode": "tozero"}
    if len(curves) == 1:
        draw_knees(layout, curves[0])
    return Chart(
        f"chart-throughput{suffix}",
        "Throughput against load",
        "Output tokens a second of each level, over a logarithmic load. "
        + ("Dashed upright lines mark the knees." if len(curves) == 1 else ""),
        {"data": data, "layout": layout},
    )


def _percentiles(
    curves: Sequence[Curve],
    colours: dict[str, str],
    suffix: str,
    metric: str,
    title: str,
    unit: str,
    limit: float | None = None,
) -> Chart:
    data: list[dict[str, Any]] = []
    shown: list[Sequence[float | None]] = []
    several = len(curves) > 1
    for number_of_curve, curve in enumerate(curves):
        for statistic in ("mean", "p90") if several else ("mean", "p50", "p90", "p99"):
            dash, symbol = _STYLES[statistic]
            values = curve.latencies[metric, statistic]
            if all(value is None for value in values):
                continue
            shown.append(values)
            label = f"{_name(curve)}, {statistic}" if several else statistic
            colour = colours[curve.label]
            if not several:
                colour = PALETTE[len(data) % len(PALETTE)]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": label,
                    "x": list(curve.loads),
                    "y": finite(values),
                    "customdata": hover_names(curve),
                    "connectgaps": False,
                    "legendgroup": str(number_of_curve if several else statistic),
                    "showlegend": not several or statistic == "mean",
                    "line": {"color": colour, "width": 2, "dash": dash},
                    "marker": {"color": colour, "size": 7, "symbol": symbol},
                    "hovertemplate": f"%{{customdata}}<br>%{{y:,.4g}} {unit}"
                    "<extra>%{fullData.name}</extra>",
                }
            )
    layout = base_layout(_load_title(curves), f"{title}, {unit}")
    log_loads(layout, curves)
    layout["yaxis"] |= {"rangemode": "tozero"}
    if limit is not None:
        draw_limit(layout, limit, shown)
    return Chart(
        f"chart-{metric.replace('_', '-')}{suffix}",
        f"{title} against load",
        f"{title} of each level in {unit}"
        + ("; solid is the mean, dashed the p90. " if several else ", by statistic. ")
        + "A percentile is left out where the level has too few samples to support it.",
        {"data": data, "layout": layout},
    )


def _load_title(curves: Sequence[Curve]) -> str:
    by_concurrency = curves[0].axis == "concurrency"
    return "Concurrent requests" if by_concurrency else "Request rate, req/s"
