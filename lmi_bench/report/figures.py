"""Static figures for READMEs, papers and slides: PNG, SVG or PDF.

Drawn on figures of their own, never through pyplot, so that nothing is shared between calls and no
display is needed.
"""

import io
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_bench.core.durable import write_inside
from lmi_bench.core.errors import InputError
from lmi_bench.report.charts import Chart, Series, build_charts
from lmi_bench.report.values import ReportView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
_INK, _MUTED, _LIMIT = "#16191f", "#5b6472", "#b3261e"
# without a date, the same report gives the same bytes
_NO_DATE: dict[str, dict[str, str | None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def write_figures(view: ReportView, folder: Path, *, file_format: str = "png") -> list[Path]:
    """Write the curves of a report into a folder and return their paths.

    Raises InputError for another format, or where the report has no run to draw.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if file_format not in FORMATS:
        raise InputError(f"cannot write figures as {file_format!r}: choose {', '.join(FORMATS)}")
    charts = build_charts(view)
    if not charts:
        raise InputError("there is no run with a finished level to draw")
    style = str(files("lmi_bench.report") / "page" / "figure.mplstyle")
    paths = []
    for chart in charts:
        path = folder / f"{chart.name}.{file_format}"
        with rc_context({"svg.hashsalt": chart.name}, style):  # the same report gives the same ids
            figure = Figure()
            FigureCanvasAgg(figure)
            _draw(figure.add_subplot(), chart)
            image = io.BytesIO()
            figure.savefig(image, format=file_format, metadata=_NO_DATE.get(file_format))
        write_inside(path, image.getvalue())
        paths.append(path)
    return paths


def _draw(axes: "Axes", chart: Chart) -> None:
    if chart.stacked:
        heights = [[value or 0.0 for value in series.y] for series in chart.series]
        axes.stackplot(
            chart.loads,
            heights,
            labels=[series.statistic for series in chart.series],
            colors=[series.colour for series in chart.series],
            alpha=0.8,
        )
    for series in () if chart.stacked else chart.series:
        if series.statistic in ("", "mean", "p90"):  # more lines cannot be told apart in print
            _draw_series(axes, chart, series)
    if chart.over_load:
        axes.set_xscale("log", base=2)
        axes.set_xticks(chart.loads, [f"{load:g}" for load in chart.loads])
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    for limit, text in chart.limits:
        if limit <= 3 * chart.top_ms:
            axes.axhline(limit, color=_LIMIT, linewidth=1, linestyle=":")
            axes.annotate(
                text,
                (0.01, limit),
                xytext=(0, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                fontsize=8,
                color=_LIMIT,
            )
    axes.set_xlabel(chart.x_title)
    axes.set_ylabel(chart.y_title)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _draw_series(axes: "Axes", chart: Chart, series: Series) -> None:
    points = [
        (load, x, y)
        for load, x, y, valid in zip(series.curve.loads, series.x, series.y, series.curve.valid, strict=True)
        if x is not None and y is not None and valid
    ]
    # without mathtext, and not a label that matplotlib would leave out of the legend
    label = series.label.replace("$", r"\$").lstrip("_") or "run"
    ends = [(x, *band) for x, band in zip(series.x, series.band, strict=False) if band]
    if ends:
        x_ends, low, high = zip(*ends, strict=True)
        axes.fill_between(x_ends, low, high, color=series.colour, alpha=0.13, linewidth=0)
    dashed = series.statistic == "p90" or (series.curve.simulated and not series.statistic)
    if points:
        axes.plot(
            [x for _, x, _ in points],
            [y for _, _, y in points],
            "--" if dashed else "-",
            color=series.colour,
            marker="o",
            markersize=5,
            linewidth=2,
            label=f"{label}, {series.statistic}" if series.statistic else label,
        )
    if chart.over_load:
        return
    for load, x, y in points:
        axes.annotate(
            f"{load:g}", (x, y), textcoords="offset points", xytext=(-4, 6), ha="right", fontsize=8, color=_MUTED
        )
        if any(knee.recommended and knee.load == load for knee in series.curve.knees):
            axes.plot(
                [x],
                [y],
                marker="D",
                markersize=10,
                color=series.colour,
                markeredgecolor=_INK,
                linestyle="none",
                label=f"recommended knee: {load:g}",
            )
