"""Static figures for READMEs, papers and slides: PNG, SVG or PDF.

Drawn on figures of their own, never through pyplot, so that nothing is shared between calls and no
display is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_bench.core.errors import InputError
from lmi_bench.report.charts import PALETTE
from lmi_bench.report.values import Curve, ReportView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
_INK, _MUTED, _GRID, _LIMIT = "#16191f", "#5b6472", "#e1e5ec", "#b3261e"
_SIZE_INCHES = (7.2, 4.3)


def write_figures(
    view: ReportView, folder: Path, *, file_format: str = "png", dots_per_inch: int = 160
) -> list[Path]:
    """Write the curves of a report into a folder and return their paths.

    Raises InputError for another format, or where the report has no run to draw.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if file_format not in FORMATS:
        raise InputError(f"cannot write figures as {file_format!r}: choose {', '.join(FORMATS)}")
    curves = [run.curve for run in view.runs if run.curve.loads]
    if not curves:
        raise InputError("there is no run with a finished level to draw")
    drawings: dict[str, Callable[[Axes], None]] = {
        "latency-throughput": lambda axes: _latency_throughput(axes, curves, view.latency_limit_ms)
    }
    for axis in dict.fromkeys(curve.axis for curve in curves):
        same = [(i, curve) for i, curve in enumerate(curves) if curve.axis == axis]
        suffix = "" if axis == "concurrency" else "-by-rate"
        drawings |= {
            f"throughput{suffix}": _over_load(same, None, "Throughput, output tok/s"),
            f"latency{suffix}": _over_load(same, "latency_ms_per_token", "Latency, ms/token"),
            f"ttft{suffix}": _over_load(same, "ttft_ms", "Time to first token, ms"),
            f"itl{suffix}": _over_load(same, "itl_ms", "Inter-token latency, ms"),
        }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in drawings.items():
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes)
        _dress(axes)
        path = folder / f"{name}.{file_format}"
        with rc_context({"svg.hashsalt": name}):  # the same report gives the same ids
            figure.savefig(path, dpi=dots_per_inch, metadata=_metadata(file_format))
        paths.append(path)
    return paths


def _metadata(file_format: str) -> dict[str, str | None]:
    """No date in the file: the same report gives the same bytes."""
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format, {})  # type: ignore[return-value]


def _latency_throughput(axes: Axes, curves: Sequence[Curve], limit_ms: float) -> None:
    top = 0.0
    for index, curve in enumerate(curves):
        colour = PALETTE[index % len(PALETTE)]
        points = [
            (load, x, y)
            for load, x, y in zip(
                curve.loads,
                curve.throughput_tokens_per_s,
                curve.latencies["latency_ms_per_token", "upper"],
                strict=True,
            )
            if x is not None and y is not None
        ]
        top = max([top, *(y for _, _, y in points)])
        style = "--" if curve.simulated else "-"
        axes.plot([p[1] for p in points], [p[2] for p in points], style, color=colour, marker="o",
                  markersize=5, linewidth=2, label=_label(curve))  # fmt: skip
        for load, x, y in points:
            axes.annotate(f"{load:g}", (x, y), textcoords="offset points", xytext=(-4, 6),
                          ha="right", fontsize=8, color=_MUTED)  # fmt: skip
        knees = {knee.load for knee in curve.knees if knee.recommended}
        for load, x, y in points:
            if load in knees:
                axes.plot([x], [y], marker="D", markersize=10, color=colour,
                          markeredgecolor=_INK, linestyle="none",
                          label=f"recommended knee: {load:g}")  # fmt: skip
    if top >= limit_ms / 3:
        axes.axhline(limit_ms, color=_LIMIT, linewidth=1, linestyle=":")
        axes.annotate(f"limit {limit_ms:g} ms/token", (0.01, limit_ms), xytext=(0, 3),
                      xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=8, color=_LIMIT)  # fmt: skip
    axes.set_xlabel("Throughput, output tok/s")
    axes.set_ylabel("Latency p90, ms/token")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _over_load(
    curves: Sequence[tuple[int, Curve]], metric: str | None, title: str
) -> Callable[[Axes], None]:
    """Throughput (no metric) or a latency's mean and p90 over a logarithmic load."""

    def draw(axes: Axes) -> None:
        for index, curve in curves:
            colour = PALETTE[index % len(PALETTE)]
            if metric is None:
                style = "--" if curve.simulated else "-"
                _line(axes, curve, curve.throughput_tokens_per_s, style, colour, _label(curve))
                continue
            for statistic, style in (("mean", "-"), ("p90", "--")):
                label = f"{_label(curve)}, {statistic}"
                _line(axes, curve, curve.latencies[metric, statistic], style, colour, label)
        loads = sorted({load for _, curve in curves for load in curve.loads})
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        by_concurrency = curves[0][1].axis == "concurrency"
        axes.set_xlabel("Concurrent requests" if by_concurrency else "Request rate, req/s")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)

    return draw


def _line(
    axes: Axes, curve: Curve, values: Sequence[float | None], style: str, colour: str, label: str
) -> None:
    points = [(x, y) for x, y in zip(curve.loads, values, strict=True) if y is not None]
    if points:
        axes.plot([p[0] for p in points], [p[1] for p in points], style, color=colour, marker="o",
                  markersize=5, linewidth=2, label=label)  # fmt: skip


def _label(curve: Curve) -> str:
    """A label without mathtext, and not one that matplotlib would leave out of the legend."""
    text = f"{curve.label} (predicted)" if curve.simulated else curve.label
    return text.replace("$", r"\$").lstrip("_") or "run"


def _dress(axes: Axes) -> None:
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRID)
    axes.tick_params(colors=_MUTED, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
