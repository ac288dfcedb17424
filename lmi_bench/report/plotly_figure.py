"""A chart as a plotly figure in plain values, which plotly.js draws in the page.

A figure is {"data": [...], "layout": {...}}. Colours that follow the page's theme are written
`var(--ink)` and resolved in the page, so that light and dark share one figure. Names of runs are
escaped: plotly reads a few HTML tags in its texts.
"""

import html
import json
import math
from collections.abc import Iterator
from importlib.resources import files
from itertools import zip_longest
from typing import Any

from lmi_bench.core.load import load_name
from lmi_bench.core.units import format_figure
from lmi_bench.report.charts import PALETTE, Chart, Series
from lmi_bench.report.tables.levels import rule_title
from lmi_bench.report.values import Curve

_STYLES = {
    "mean": ("solid", "circle"),
    "p50": ("dashdot", "triangle-up"),
    "p90": ("dash", "diamond"),
    "p99": ("dot", "square"),
}
_LEGEND_LENGTH = 36


def plotly_figure(chart: Chart) -> dict[str, Any]:
    """The figure of a chart."""
    several = len(chart.curves) > 1
    layout = base_layout(chart.x_title, chart.y_title)
    if chart.over_load:
        if len(chart.curves) > len(PALETTE):  # a legend would leave no room; hovering names the run
            layout["showlegend"] = False
        pad = 0.08
        del layout["xaxis"]["rangemode"]
        layout["xaxis"] |= {
            "type": "log",
            "tickvals": chart.loads,
            "ticktext": [f"{load:g}" for load in chart.loads],
            "range": [math.log10(chart.loads[0]) - pad, math.log10(chart.loads[-1]) + pad],
        }
    data: list[dict[str, Any]] = []
    hover = f"%{{y:,.4g}} {chart.y_title.rpartition(' ')[2]}<extra>%{{fullData.name}}</extra>"
    if not chart.over_load:
        hover = f"%{{x:,.4g}} tok/s<br>{hover}"
    for position, series in enumerate(chart.series):
        style = _style(chart, series, position)
        group = style.setdefault("legendgroup", f"run {position}")
        data += _band(series, group)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": list(series.x),
                "y": list(series.y),
                "customdata": list(_level_names(series)),
                "hovertemplate": f"%{{customdata}}<br>{hover}",
                **style,
            }
        )
        if chart.has_knees and not chart.over_load:
            data += _diamonds(series, several)
    if chart.has_knees and chart.over_load:
        _draw_knees(layout, chart.curves[0])
    ends = {"x0": 0, "x1": 1, "xref": "paper", "layer": "below"}
    for at, (limit, text) in enumerate(chart.limits):
        note = {"x": 0.01, "xref": "paper", "y": limit, "xanchor": "left", "text": text}
        line: dict[str, Any] | None = {**ends, "y0": limit, "y1": limit}
        if limit > 3 * chart.top_ms:  # it would flatten the curves
            height = {"yref": "paper", "y": 0.92 - 0.08 * at}
            line, note = None, note | height | {"text": f"{text}, above the chart"}
        _mark(layout, line, note, "var(--bad)", {"width": 1.5, "dash": "dot"})
    return {"data": data, "layout": layout}


def _style(chart: Chart, series: Series, position: int) -> dict[str, Any]:
    """How a series is drawn, and its name in the legend."""
    if chart.stacked:
        return {"name": series.statistic, "stackgroup": "parts", "line": {"color": series.colour}}
    if series.statistic:
        several = len(chart.curves) > 1
        run = chart.curves.index(series.curve) if several else None
        return _statistic_style(series, position, run)
    style = _run_style(series)
    if not chart.over_load:
        style |= {
            "mode": "lines+markers+text",
            "text": [f"{load:g}" for load in series.curve.loads],
            "textposition": "top left",
            "textfont": {"size": 11, "color": "var(--muted)"},
        }
    return style


def _level_names(series: Series) -> Iterator[str]:
    """The load of each level, its state, and the interval of its prediction."""
    curve = series.curve
    for load, valid, band in zip_longest(curve.loads, curve.valid, series.band):
        state = "" if valid else " (invalid or cut short)"
        between = "" if band is None else ", 80 % {:,.4g} to {:,.4g}".format(*band)
        yield f"{load_name(curve.axis, load)}{state}{between}"


def _band(series: Series, group: str) -> Iterator[dict[str, Any]]:
    """The 80 % interval of a prediction as an area; it is hidden together with its line."""
    points = [
        (x, band) for x, band in zip(series.x, series.band, strict=False) if band and x is not None
    ]
    if len(points) > 1:
        there, back = points, points[::-1]
        red, green, blue = (int(series.colour[at : at + 2], 16) for at in (1, 3, 5))
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": [x for x, _ in (*there, *back)],
            "y": [*(band[1] for _, band in there), *(band[0] for _, band in back)],
            "fill": "toself",
            "fillcolor": f"rgba({red},{green},{blue},0.13)",
            "line": {"width": 0},
            "legendgroup": group,
            "showlegend": False,
            "hoverinfo": "skip",
        }


def _text(text: str) -> str:
    """Text that plotly shows as it is."""
    return html.escape(text, quote=False)


def _name(series: Series) -> str:
    """The run's label; a long one keeps both ends, since runs of one target differ at the end."""
    label = series.curve.label
    if len(label) > _LEGEND_LENGTH:
        kept = _LEGEND_LENGTH // 2
        label = f"{label[: kept - 1]}…{label[-kept:]}"
    return _text(f"{label} (predicted)" if series.curve.simulated else label)


def _run_style(series: Series) -> dict[str, Any]:
    """Round markers; a cross where the level is invalid or was cut short."""
    curve, colour = series.curve, series.colour
    round_marker = "circle-open" if curve.simulated else "circle"
    return {
        "name": _name(series),
        "line": {"color": colour, "width": 2.5, "dash": "dash" if curve.simulated else "solid"},
        "marker": {
            "color": colour,
            "size": [8 if valid else 11 for valid in curve.valid],
            "symbol": [round_marker if valid else "x-thin-open" for valid in curve.valid],
            "line": {"width": 2, "color": colour},
        },
    }


def _statistic_style(series: Series, position: int, run: int | None) -> dict[str, Any]:
    """A colour for each statistic of one run; of several runs, which are numbered, the run's."""
    statistic, alone = series.statistic, run is None
    dash, symbol = _STYLES[statistic]
    colour = PALETTE[position % len(PALETTE)] if alone else series.colour
    return {
        "name": statistic if alone else f"{_name(series)}, {statistic}",
        "connectgaps": False,
        "legendgroup": statistic if alone else str(run),
        "showlegend": alone or statistic == "mean",
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"color": colour, "size": 7, "symbol": symbol},
    }


def _knees_by_load(curve: Curve) -> dict[float, tuple[str, bool]]:
    """Titles of the rules whose knee is at each load, and whether it is the recommended one."""
    recommended = {knee.load for knee in curve.knees if knee.recommended}
    titles: dict[float, list[str]] = {}
    for knee in curve.knees:
        if knee.load is not None:
            titles.setdefault(knee.load, []).append(rule_title(knee))
    return {load: (" + ".join(found), load in recommended) for load, found in titles.items()}


def _diamonds(series: Series, several: bool) -> Iterator[dict[str, Any]]:
    """Diamonds at the levels that are knees; of several runs only the recommended ones."""
    curve = series.curve
    for load, (title, is_chosen) in _knees_by_load(curve).items():
        if load not in curve.loads or (several and not is_chosen):
            continue
        index = curve.loads.index(load)
        name = f"Recommended knee: {load:g}" if is_chosen else f"{title}: {load:g}"
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": _text(f"Knee of {curve.label}: {load:g}" if several else name),
            "showlegend": not several,
            "x": [series.x[index]],
            "y": [series.y[index]],
            "marker": {
                "symbol": "diamond" if is_chosen else "diamond-open",
                "size": 17 if is_chosen else 15,
                "color": series.colour if several else "var(--accent)",
                "line": {"width": 2, "color": "var(--ink)" if is_chosen else "var(--accent)"},
            },
            "hovertemplate": f"{load_name(curve.axis, load)}<br>{title}<extra></extra>",
        }


def _draw_knees(layout: dict[str, Any], curve: Curve) -> None:
    for level, (load, (title, is_chosen)) in enumerate(sorted(_knees_by_load(curve).items())):
        # "between": a grid line is at the same load
        line = {"x0": load, "x1": load, "y0": 0, "y1": 1, "yref": "paper", "layer": "between"}
        note = {
            "x": math.log10(load),
            "y": 0.02 + 0.08 * (level % 3),
            "yref": "paper",
            "xanchor": "right",
            "text": _text(f"{title} {format_figure(load)} "),
            "bgcolor": "var(--card)",  # the lines of smaller loads pass behind it
        }
        colour = "var(--accent)" if is_chosen else "var(--muted)"
        _mark(layout, line, note, colour, {"width": 2 if is_chosen else 1.5, "dash": "dash"})


def _mark(
    layout: dict[str, Any],
    line: dict[str, Any] | None,
    note: dict[str, Any],
    colour: str,
    style: dict[str, Any],
) -> None:
    """A straight line, if there is one, and its text."""
    if line is not None:
        layout["shapes"].append({"type": "line", **line, "line": {"color": colour, **style}})
    font = {"size": 11, "color": colour}
    layout["annotations"].append({"yanchor": "bottom", "showarrow": False, **note, "font": font})


def base_layout(x_title: str = "", y_title: str = "") -> dict[str, Any]:
    """A layout in the page's style, with both axes from 0."""
    text = (files("lmi_bench.report") / "page" / "layout.json").read_text(encoding="utf-8")
    layout: dict[str, Any] = json.loads(text)
    layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"] = x_title, y_title
    return layout
