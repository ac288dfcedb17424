"""The charts of a report as series over points, which the page and the static figures draw.

The page draws them by `page/charts.js`, from the plain values of `chart_data`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lmi_bench.analysis.results.knee import LATENCY_LIMIT_MS
from lmi_bench.catalog.tables import Row, read_rows
from lmi_bench.core.level import LATENCY_KEY
from lmi_bench.report.formats import number
from lmi_bench.report.tables.levels import load_title, rule_title
from lmi_bench.report.values import LATENCY, THROUGHPUT, Band, Curve, ReportView

# Distinct for people with any colour vision, on white and on near-black (after Okabe and Ito).
PALETTE = ("#2f7de1", "#e0742a", "#1f9e77", "#c056a0", "#8f7a2b", "#7568d8", "#4aa3c7", "#d04a4a")

_STATISTICS = ("mean", "p50", "p90", "p99")
_THROUGHPUT = "Throughput, tok/s"
_TEXTS: Final = {row["name"]: row for row in read_rows("charts.csv", "report")}
"""Texts of each chart by its name; of a latency over load its key in levels.jsonl and its unit."""

Values = tuple[float | None, ...]
Limits = tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One line over the levels of a run; None where there is no finite value.

    statistic  mean, p50, p90 or p99 of a latency; the part of a stack; "" otherwise
    band       80 % interval of each y of a prediction; empty for what was measured
    """

    curve: Curve
    colour: str
    x: Values
    y: Values
    statistic: str = ""
    band: tuple[Band | None, ...] = ()

    @property
    def label(self) -> str:
        """The run's label, and whether it was predicted instead of measured."""
        return f"{self.curve.label} (predicted)" if self.curve.simulated else self.curve.label


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: what it shows in words, and its series.

    anchor, name  of the chart on the page, and of the static figure's file
    curves        the runs over the same kind of load, also those without a value here
    over_load     True: x is a logarithmic load; False: x is the throughput
    stacked       its series are parts of a whole, named by their statistic
    limits        lines to draw: ms and text; a limit far above the series is only named
    """

    anchor: str
    name: str
    title: str
    description: str
    x_title: str
    y_title: str
    curves: tuple[Curve, ...]
    series: tuple[Series, ...]
    over_load: bool = True
    has_knees: bool = False
    limits: Limits = ()
    stacked: bool = False

    @property
    def loads(self) -> list[float]:
        """Every load of the runs, rising."""
        return sorted({load for curve in self.curves for load in curve.loads})

    @property
    def top_ms(self) -> float:
        """The highest value of all series."""
        return _top(self.series)


def build_charts(view: ReportView) -> tuple[Chart, ...]:
    """The charts of a report; none where there is no run."""
    curves = [run.curve for run in view.runs if run.curve.loads]
    if not curves:
        return ()
    runs = [(curve, PALETTE[i % len(PALETTE)]) for i, curve in enumerate(curves)]
    charts = [_latency_throughput(runs)]
    for axis in dict.fromkeys(curve.axis for curve in curves):
        same = [(curve, colour) for curve, colour in runs if curve.axis == axis]
        suffix = "" if axis == "concurrency" else "-by-rate"
        charts.append(_throughput(same, suffix))
        charts += [_percentiles(same, suffix, row) for row in _TEXTS.values() if row["metric"]]
    charts += [_ttft_parts(curve, at) for at, curve in enumerate(curves) if curve.ttft_parts]
    return tuple(each for each in charts if any(set(series.y) != {None} for series in each.series))


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart as plain values; the page has its title and description as text."""
    keys = ("anchor", "x_title", "y_title", "over_load", "has_knees", "limits", "top_ms", "stacked")
    of_run = ("label", "axis", "simulated", "loads", "valid")
    of_series = ("colour", "x", "y", "statistic", "band")
    return {
        **{key: getattr(chart, key) for key in keys},
        "runs": [
            {key: getattr(curve, key) for key in of_run}
            | {
                "knees": [
                    (knee.load, rule_title(knee), knee.recommended) for knee in curve.knees if knee.load is not None
                ]
            }
            for curve in chart.curves
        ],
        "series": [
            {"run": chart.curves.index(each.curve)} | {key: getattr(each, key) for key in of_series}
            for each in chart.series
        ],
    }


Runs = Sequence[tuple[Curve, str]]


def _chart(name: str, runs: Runs, series: Sequence[Series], suffix: str = "", said: str = "", **more: Any) -> Chart:
    """The chart of this name, over the runs' load.

    suffix  tells charts of this name apart
    said    of its series, in its description
    more    other fields of `Chart`
    """
    row, curves = _TEXTS[name], tuple(curve for curve, _ in runs)
    description, x_title = row["description"].format(said), load_title(curves[0].axis)
    names, lines = (f"{row['anchor']}{suffix}", f"{name}{suffix}"), tuple(series)
    return Chart(*names, row["title"], description, x_title, row["y_title"], curves, lines, **more)


def _latency_throughput(runs: Runs) -> Chart:
    """What more load buys and what it costs: latency over throughput, level by level."""
    series = [replace(_series(run, LATENCY), x=_finite(run[0].values[THROUGHPUT]), statistic="") for run in runs]
    chart = _chart("latency-throughput", runs, series, has_knees=True)
    return replace(chart, x_title=_THROUGHPUT, over_load=False, limits=_limit(series))


def _throughput(runs: Runs, suffix: str) -> Chart:
    series, has_knees = [_series(run, THROUGHPUT) for run in runs], len(runs) == 1
    said = "Dashed upright lines mark the knees." if has_knees else ""
    return _chart("throughput", runs, series, suffix, said, has_knees=has_knees)


def _percentiles(runs: Runs, suffix: str, row: Row) -> Chart:
    """A latency over load, by statistic."""
    metric, unit, several = row["metric"], row["unit"], len(runs) > 1
    drawn = (
        _series(run, (metric, statistic)) for run in runs for statistic in (("mean", "p90") if several else _STATISTICS)
    )
    series = [each for each in drawn if set(each.y) != {None}]
    said = "; solid is the mean, dashed the p90." if several else ", by statistic."
    limits = _slo_limits(runs, metric, unit) or (_limit(series) if unit == "ms/token" else ())
    return _chart(row["name"], runs, series, suffix, said, limits=limits)


def _ttft_parts(curve: Curve, at: int) -> Chart:
    """Where the mean TTFT goes, stacked over load."""
    series = [
        Series(curve, PALETTE[place % len(PALETTE)], curve.loads, _finite(values), title)
        for place, (title, values) in enumerate(curve.ttft_parts.items())
    ]
    suffix = f"-{at + 1}" if at else ""
    return _chart("ttft-parts", [(curve, "")], series, suffix, curve.label, stacked=True)


def _series(run: tuple[Curve, str], key: tuple[str, str]) -> Series:
    """A value over the load of each level."""
    curve, colour = run
    values = _finite(curve.values[key])
    return Series(curve, colour, curve.loads, values, key[1], curve.bands.get(key, ()))


def _limit(series: Sequence[Series]) -> Limits:
    """The latency limit of the knee, where it is near enough not to flatten the curve."""
    near = _top(series) >= LATENCY_LIMIT_MS / 3
    return ((LATENCY_LIMIT_MS, f"limit {number(LATENCY_LIMIT_MS)} ms/token"),) if near else ()


def _slo_limits(runs: Runs, metric: str, unit: str) -> Limits:
    """The limits that the runs' SLOs set to this metric, each once."""
    all_slos = {slo for curve, _ in runs for slo in curve.slos}
    slos = [slo for slo in all_slos if LATENCY_KEY[slo.metric] == metric]  # type: ignore[index]
    ordered = sorted(slos, key=lambda slo: (slo.limit_ms, slo.statistic))
    return tuple((slo.limit_ms, f"SLO {slo.statistic} ≤ {number(slo.limit_ms)} {unit}") for slo in ordered)


def _top(series: Sequence[Series]) -> float:
    return max((value for each in series for value in each.y if value), default=0.0)


def _finite(values: Sequence[float | None]) -> Values:
    """JSON has no infinity: such a point is not drawn."""
    return tuple(value if value is not None and math.isfinite(value) else None for value in values)
