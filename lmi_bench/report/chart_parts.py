"""Parts that several charts share: layout, markers, knees, the latency limit."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from lmi_bench.core.units import format_figure
from lmi_bench.report.formats import load_name, number
from lmi_bench.report.values import Curve


def chart_text(text: str) -> str:
    """Text that plotly shows as it is."""
    return html.escape(text, quote=False)


def markers(curve: Curve, colour: str) -> dict[str, Any]:
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


def hover_names(curve: Curve) -> list[str]:
    return [
        load_name(curve.axis, load) + ("" if valid else " (invalid or cut short)")
        for load, valid in zip(curve.loads, curve.valid, strict=True)
    ]


def knee_points(
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
                    (f"Recommended knee: {load:g}" if is_chosen else f"{title}: {load:g}")
                    if not only_recommended
                    else f"Knee of {curve.label}: {load:g}"
                ),
                "showlegend": not only_recommended,
                "x": [curve.throughput_tokens_per_s[index]],
                "y": [finite(latency)[index]],
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


def draw_knees(layout: dict[str, Any], curve: Curve) -> None:
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
                "layer": "between",  # a line of the grid stands at the same load
                "line": {
                    "color": "var(--accent)" if load in chosen else "var(--muted)",
                    "width": 2 if load in chosen else 1.5,
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
                "text": chart_text(f"{' + '.join(titles)} {format_figure(load)} "),
                "bgcolor": "var(--card)",  # the lines of smaller loads pass behind it
                "font": {
                    "size": 11,
                    "color": "var(--accent)" if load in chosen else "var(--muted)",
                },
            }
        )


def draw_limit(
    layout: dict[str, Any], limit: float, series: Sequence[Sequence[float | None]]
) -> None:
    """The latency limit, where it is near enough not to flatten the curve under it."""
    top = max((value for values in series for value in finite(values) if value), default=0.0)
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


def log_loads(layout: dict[str, Any], curves: Sequence[Curve]) -> None:
    loads = sorted({load for curve in curves for load in curve.loads})
    pad = 0.08
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": loads,
        "ticktext": [f"{load:g}" for load in loads],
        "range": [math.log10(loads[0]) - pad, math.log10(loads[-1]) + pad],
    }


def base_layout(x_title: str, y_title: str) -> dict[str, Any]:
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


def finite(values: Sequence[float | None]) -> list[float | None]:
    """JSON has no infinity: such a point is not drawn."""
    return [value if value is not None and math.isfinite(value) else None for value in values]
