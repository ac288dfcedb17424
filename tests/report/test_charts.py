"""Charts: plotly takes them, and they hold the run's own numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lmi_bench.core.load import Load
from lmi_bench.report.charts import build_charts
from lmi_bench.report.plotly_figure import plotly_figure
from lmi_bench.report.view import build_view
from tests.levels import changed


def with_colours(figure):
    """The figure as the page draws it, with some colour for each of the theme's."""
    return json.loads(re.sub(r"var\(--[a-z]+\)", "#123456", json.dumps(figure, allow_nan=False)))


def test_plotly_accepts_every_figure(sweep, faster_sweep):
    """plotly.py checks each property's name and value, which plotly.js would pass over."""
    from plotly.graph_objects import Figure

    for runs in ([sweep], [sweep, faster_sweep]):
        for chart in build_charts(build_view(runs)):
            Figure(with_colours(plotly_figure(chart)))


def test_themed_colours_are_those_that_the_style_defines(sweep):
    from importlib.resources import files

    style = (files("lmi_bench.report") / "page" / "style.css").read_text(encoding="utf-8")
    text = json.dumps([plotly_figure(chart) for chart in build_charts(build_view([sweep]))])
    names = set(re.findall(r"var\((--[a-z]+)\)", text))
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for name in names:
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_the_curve_is_latency_over_throughput_in_order_of_load(sweep):
    (first, *_) = build_charts(build_view([sweep]))
    trace = plotly_figure(first)["data"][0]
    assert trace["text"] == ["1", "2", "4", "8", "16", "32", "64"]
    assert trace["x"] == [line.throughput_tokens_per_s for line in sweep.levels]
    assert trace["y"][-1] == sweep.levels[-1].of("latency_per_token").p90


def test_knees_are_marked_at_their_level(sweep):
    (first, *_) = build_charts(build_view([sweep]))
    knees = [trace for trace in plotly_figure(first)["data"][1:] if "Recommended" in trace["name"]]
    assert [trace["x"][0] for trace in knees] == [sweep.levels[4].throughput_tokens_per_s]


def test_the_limit_is_drawn_only_where_it_would_not_flatten_the_curve(runs_of):
    def lines(**server):
        (first, *_) = build_charts(build_view([runs_of("", loads=(1, 2), **server)]))
        return [shape["y0"] for shape in plotly_figure(first)["layout"]["shapes"]]

    assert lines(step_s=0.05) == [100.0]
    assert lines(step_s=0.005) == []


def test_slos_are_lines_in_the_charts_of_their_metric_and_far_ones_are_named(runs_of):
    """A limit above three times the highest value would flatten the curve."""
    run = runs_of("", loads=(1, 64), more={"slo": ["ttft_p90<=1s", "itl_p99<=5s"]})
    layouts = {c.name: plotly_figure(c)["layout"] for c in build_charts(build_view([run]))}
    (line,) = layouts["ttft"]["shapes"]
    assert line["y0"] == line["y1"] == 1000.0
    assert layouts["ttft"]["annotations"][0]["text"] == "SLO p90 ≤ 1,000 ms"
    assert layouts["itl"]["shapes"] == []
    assert layouts["itl"]["annotations"][0]["text"] == "SLO p99 ≤ 5,000 ms, above the chart"


def test_the_parts_of_ttft_are_stacked_where_the_server_states_its_own(sweep):
    split = {"network_ms": 3.0, "queue_ms": 1.0, "prefill_ms": 8.0, "client_ms": 0.0,
             "other_ms": None, "bound_ms": 0.1, "requests": 9, "source": "metrics"}  # fmt: skip
    levels = [changed(level, ttft_split=split) for level in sweep.levels]
    *others, chart = build_charts(build_view([replace(sweep, levels=levels)]))
    assert not any(other.stacked for other in others)
    assert len(build_charts(build_view([sweep]))) == len(others)
    traces = plotly_figure(chart)["data"]
    assert [(trace["name"], trace["y"][0]) for trace in traces] == [
        ("network and HTTP", 3.0), ("server queue", 1.0), ("prefill", 8.0)
    ]  # fmt: skip
    assert {trace["stackgroup"] for trace in traces} == {"parts"}


def test_an_unsupported_percentile_is_a_gap_not_a_zero(sweep):
    charts = {chart.anchor: chart for chart in build_charts(build_view([sweep]))}
    p90 = next(t for t in plotly_figure(charts["chart-ttft-ms"])["data"] if t["name"] == "p90")
    assert p90["y"][0] is None
    assert p90["y"][-1] == pytest.approx(sweep.levels[-1].of("ttft").p90)


def test_runs_keep_their_colour_in_every_chart_and_predictions_are_dashed(sweep, runs_of):
    predicted = runs_of("", path="runs/sim", more={"target": "sim:ml.g5.2xlarge"})
    charts = build_charts(build_view([sweep, predicted]))
    for chart in charts[:2]:
        measured, simulated = [t for t in plotly_figure(chart)["data"] if "lines" in t["mode"]]
        assert measured["line"]["dash"] == "solid"
        assert simulated["line"]["dash"] == "dash"
    colours = {plotly_figure(chart)["data"][0]["line"]["color"] for chart in charts}
    assert len(colours) == 1


def test_concurrencies_and_rates_get_charts_of_their_own(sweep, runs_of):
    rates = runs_of("rates", loads=(1, 2))
    rates.levels[:] = [
        replace(line, load=Load(rate_per_s=line.load.value)) for line in rates.levels
    ]
    anchors = [chart.anchor for chart in build_charts(build_view([sweep, rates]))]
    assert len(anchors) == len(set(anchors)) == 9


def test_two_runs_of_one_target_are_told_apart_in_the_legend(runs_of):
    """Their names differ in the folder at the end, which a legend of 36 characters cut off."""
    labels = [f"llama-2-7b on sim:ml.g5.2xlarge, a long name [{end}]" for end in ("sim1", "simr")]
    view = build_view([runs_of("a"), runs_of("b", path="runs/b")], labels=labels)
    (first, *_) = build_charts(view)
    legends = {str(trace.get("name")) for trace in plotly_figure(first)["data"]}
    for end in ("sim1", "simr"):
        assert any(f"[{end}]" in each for each in legends)


def test_more_runs_than_colours_have_one_legend_on_the_widest_chart(sweep):
    wide, narrow, *_ = build_charts(build_view([sweep]))
    many = [replace(chart, curves=chart.curves * 9) for chart in (wide, narrow)]
    assert [plotly_figure(chart)["layout"].get("showlegend") for chart in many] == [None, False]
    assert "showlegend" not in plotly_figure(narrow)["layout"]
