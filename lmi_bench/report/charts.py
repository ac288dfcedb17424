"""The interactive charts, as plotly figures in plain values.

A figure is {"data": [...], "layout": {...}} as plotly.js takes it. Colours that follow the page's
theme are written `var(--ink)` and resolved in the page, so that light and dark share one figure.
Names of runs go through `chart_text`: plotly reads a few HTML tags in its texts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.report.formats import load_name, number
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


def chart_text(text: str) -> str:
    """Text that plotly shows as it is."""
    return html.escape(text, quote=False)


def _colour(curves: Sequence[Curve], curve: Curve) -> str:
    index = next(i for i, each in enumerate(curves) if each is curve)
    return PALETTE[index % len(PALETTE)]


def _name(curve: Curve) -> str:
    label = curve.label
    if len(label) > _LEGEND_LENGTH:
        label = label[: _LEGEND_LENGTH - 1] + "…"
    return chart_text(f"{label} (predicted)" if curve.simulated else label)


def _latency_throughput(curves: Sequence[Curve], limit_ms: float) -> Chart:
    """What more load buys and what it costs: latency over throughput, level by level."""
    data: list[dict[str, Any]] = []
    for curve in curves:
        colour = _colour(curves, curve)
        latency = curve.latencies["latency_ms_per_token", "upper"]
        names = [load_name(curve.axis, load) for load in curve.loads]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text",
                "name": _name(curve),
                "x": _finite(curve.throughput_tokens_per_s),
                "y": _finite(latency),
                "text": [f"{load:g}" for load in curve.loads],
                "textposition": "top left",
                "textfont": {"size": 11, "color": "var(--muted)"},
                "customdata": _notes(curve, names),
                "line": {
                    "color": colour,
                    "width": 2.5,
                    "dash": "dash" if curve.simulated else "solid",
                },
                "marker": _markers(curve, colour),
                "hovertemplate": "%{customdata}<br>%{x:,.4g} tok/s<br>%{y:,.4g} ms/token"
                "<extra>%{fullData.name}</extra>",
            }
        )
        data += _knee_points(curve, colour, latency, only_recommended=len(curves) > 1)
    layout = _layout("Throughput, output tok/s", "Latency p90, ms/token")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["xaxis"] |= {"rangemode": "tozero"}
    _draw_limit(layout, limit_ms, [curve.latencies["latency_ms_per_token", "upper"]
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


def _throughput(curves: Sequence[Curve], colours: dict[str, str], suffix: str) -> Chart:
    data: list[dict[str, Any]] = []
    for curve in curves:
        colour = colours[curve.label]
        names = [load_name(curve.axis, load) for load in curve.loads]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": _name(curve),
                "x": list(curve.loads),
                "y": _finite(curve.throughput_tokens_per_s),
                "customdata": _notes(curve, names),
                "line": {
                    "color": colour,
                    "width": 2.5,
                    "dash": "dash" if curve.simulated else "solid",
                },
                "marker": _markers(curve, colour),
                "hovertemplate": "%{customdata}<br>%{y:,.4g} tok/s<extra>%{fullData.name}</extra>",
            }
        )
    layout = _layout(_load_title(curves), "Throughput, output tok/s")
    _log_loads(layout, curves)
    layout["yaxis"] |= {"rangemode": "tozero"}
    if len(curves) == 1:
        _draw_knees(layout, curves[0])
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
            names = [load_name(curve.axis, load) for load in curve.loads]
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
                    "y": _finite(values),
                    "customdata": _notes(curve, names),
                    "connectgaps": False,
                    "legendgroup": str(number_of_curve if several else statistic),
                    "showlegend": not several or statistic == "mean",
                    "line": {"color": colour, "width": 2, "dash": dash},
                    "marker": {"color": colour, "size": 7, "symbol": symbol},
                    "hovertemplate": f"%{{customdata}}<br>%{{y:,.4g}} {unit}"
                    "<extra>%{fullData.name}</extra>",
                }
            )
    layout = _layout(_load_title(curves), f"{title}, {unit}")
    _log_loads(layout, curves)
    layout["yaxis"] |= {"rangemode": "tozero"}
    if limit is not None:
        _draw_limit(layout, limit, shown)
    return Chart(
        f"chart-{metric.replace('_', '-')}{suffix}",
        f"{title} against load",
        f"{title} of each level in {unit}"
        + ("; solid is the mean, dashed the p90. " if several else ", by statistic. ")
        + "A percentile is left out where the level has too few samples to support it.",
        {"data": data, "layout": layout},
    )


def _markers(curve: Curve, colour: str) -> dict[str, Any]:
    """Round where the level counts, a cross where it is invalid or was cut short."""
    return {
        "color": colour,
        "size": [8 if valid else 11 for valid in curve.valid],
        "symbol": [
            ("circle-open" if curve.simulated else "circle") if valid else "x-thin-open"
            for valid in curve.valid
        ],
        "line": {"width": 2, "color": colour},
    }


def _notes(curve: Curve, names: Sequence[str]) -> list[str]:
    return [
        name if valid else f"{name} (invalid or cut short)"
        for name, valid in zip(names, curve.valid, strict=True)
    ]


def _knee_points(
    curve: Curve, colour: str, latency: Sequence[float | None], *, only_recommended: bool
) -> list[dict[str, Any]]:
    """Diamonds at the levels that are knees; rules with the same knee share one."""
    by_load: dict[float, list[str]] = {}
    recommended = {knee.load for knee in curve.knees if knee.recommended}
    for knee in curve.knees:
        if knee.load in curve.loads and (knee.load in recommended or not only_recommended):
            by_load.setdefault(knee.load, []).append(knee.title)
    traces = []
    for load, titles in by_load.items():
        index = curve.loads.index(load)
        is_chosen = load in recommended
        title = " + ".join(titles)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": chart_text(
                    f"{'Recommended knee' if is_chosen else 'Knee'}: {load:g} ({title})"
                    if not only_recommended
                    else f"Knee of {curve.label}: {load:g}"
                ),
                "showlegend": not only_recommended,
                "x": [curve.throughput_tokens_per_s[index]],
                "y": [_finite(latency)[index]],
                "marker": {
                    "symbol": "diamond" if is_chosen else "diamond-open",
                    "size": 17 if is_chosen else 15,
                    "color": "var(--accent)" if not only_recommended else colour,
                    "line": {"width": 2, "color": "var(--ink)" if is_chosen else "var(--accent)"},
                },
                "hovertemplate": f"{load_name(curve.axis, load)}<br>{title}<extra></extra>",
            }
        )
    return traces


def _draw_knees(layout: dict[str, Any], curve: Curve) -> None:
    by_load: dict[float, list[str]] = {}
    for knee in curve.knees:
        by_load.setdefault(knee.load, []).append(knee.title)
    chosen = {knee.load for knee in curve.knees if knee.recommended}
    for level, (load, titles) in enumerate(sorted(by_load.items())):
        layout["shapes"].append(
            {
                "type": "line",
                "x0": load,
                "x1": load,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "layer": "below",
                "line": {
                    "color": "var(--accent)" if load in chosen else "var(--muted)",
                    "width": 2 if load in chosen else 1,
                    "dash": "dash",
                },
            }
        )
        layout["annotations"].append(
            {
                "x": math.log10(load),
                "y": 0.02 + 0.08 * (level % 3),
                "yref": "paper",
                "xanchor": "right",
                "yanchor": "bottom",
                "showarrow": False,
                "text": chart_text(f"{' + '.join(titles)} {load:.4g} "),
                "font": {
                    "size": 11,
                    "color": "var(--accent)" if load in chosen else "var(--muted)",
                },
            }
        )


def _draw_limit(
    layout: dict[str, Any], limit: float, series: Sequence[Sequence[float | None]]
) -> None:
    """The latency limit, where it is near enough not to flatten the curve under it."""
    top = max((value for values in series for value in _finite(values) if value), default=0.0)
    if top is None or top < limit / 3:
        return
    layout["shapes"].append(
        {
            "type": "line",
            "x0": 0,
            "x1": 1,
            "xref": "paper",
            "y0": limit,
            "y1": limit,
            "layer": "below",
            "line": {"color": "var(--bad)", "width": 1.5, "dash": "dot"},
        }
    )
    layout["annotations"].append(
        {
            "x": 0.01,
            "xref": "paper",
            "y": limit,
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
            "text": f"limit {number(limit)} ms/token",
            "font": {"size": 11, "color": "var(--bad)"},
        }
    )


def _load_title(curves: Sequence[Curve]) -> str:
    by_concurrency = curves[0].axis == "concurrency"
    return "Concurrent requests" if by_concurrency else "Request rate, req/s"


def _log_loads(layout: dict[str, Any], curves: Sequence[Curve]) -> None:
    loads = sorted({load for curve in curves for load in curve.loads})
    pad = 0.08
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": loads,
        "ticktext": [f"{load:g}" for load in loads],
        "range": [math.log10(loads[0]) - pad, math.log10(loads[-1]) + pad],
    }


def _layout(x_title: str, y_title: str) -> dict[str, Any]:
    axis = {
        "gridcolor": "var(--grid)",
        "zerolinecolor": "var(--grid)",
        "linecolor": "var(--line)",
        "tickfont": {"color": "var(--muted)", "size": 12},
        "automargin": True,
        "fixedrange": False,
    }

    def with_title(text: str) -> dict[str, Any]:
        return axis | {"title": {"text": text, "font": {"size": 13, "color": "var(--ink)"}}}

    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12,
                 "color": "var(--ink)"},
        "margin": {"l": 60, "r": 16, "t": 8, "b": 48},
        "xaxis": with_title(x_title),
        "yaxis": with_title(y_title),
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom",
                   "font": {"size": 12}, "bgcolor": "rgba(0,0,0,0)"},
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)",
                       "font": {"color": "var(--ink)"}, "namelength": -1},
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--muted)",
                    "activecolor": "var(--accent)"},
        "shapes": [],
        "annotations": [],
    }  # fmt: skip


def _finite(values: Sequence[float | None]) -> list[float | None]:
    """JSON has no infinity: such a point is not drawn."""
    return [value if value is not None and math.isfinite(value) else None for value in values]
