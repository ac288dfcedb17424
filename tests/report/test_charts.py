"""Charts as the page draws them: plotly takes them, and they hold the run's own numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lmi_bench.core.findings import Knee
from lmi_bench.core.load import Load
from lmi_bench.report.charts import build_charts
from lmi_bench.report.figures import _draw_series
from lmi_bench.report.view import build_view
from tests.levels import changed
from tests.report.figures import figures_of


def with_colours(figure):
    """The figure as the page draws it, with some colour for each of the theme's."""
    return json.loads(re.sub(r"var\(--[a-z]+\)", "#123456", json.dumps(figure, allow_nan=False)))


def test_plotly_accepts_every_figure(sweep, faster_sweep, plan):
    """plotly.py checks each property's name and value, which plotly.js would pass over."""
    from plotly.graph_objects import Figure

    chosen = {"explore_metric": "itl_ms", "recommendation_1_pace": "usd"}
    for runs, choices in (([sweep], {}), ([sweep, faster_sweep], chosen)):
        figures = figures_of(build_view(runs, [plan]), **choices)
        assert len(figures) == 5 + 5 + 5
        for figure in figures.values():
            Figure(with_colours(figure))


def test_themed_colours_are_those_that_the_style_defines(sweep, plan):
    from importlib.resources import files

    style = (files("lmi_bench.report") / "page" / "style.css").read_text(encoding="utf-8")
    text = json.dumps(figures_of(build_view([sweep], [plan])))
    names = set(re.findall(r"var\((--[a-z]+)\)", text))
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for name in names:
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_the_curve_is_latency_over_throughput_in_order_of_load(sweep):
    trace = figures_of(build_view([sweep]))["chart-latency-throughput"]["data"][0]
    assert trace["text"] == ["1", "2", "4", "8", "16", "32", "64"]
    assert trace["x"] == [line.throughput_tokens_per_s for line in sweep.levels]
    assert trace["y"][-1] == sweep.levels[-1].of("latency_per_token").p90


def test_a_view_without_a_value_says_so(sweep, plan):
    levels = [replace(line, valid=False, invalid_reason="late") for line in sweep.levels]
    unpriced = [{**each, "price_usd_per_hour": None} for each in plan["candidates"]]
    advice = plan | {"recommended": unpriced[0], "candidates": unpriced}
    figures = figures_of(build_view([replace(sweep, levels=levels)], [advice]))
    empty = {name for name, figure in figures.items() if "nothing to draw" in json.dumps(figure)}
    assert empty == {"recommendation-1-cost", "recommendation-1-stairs", "view-interactivity"}


def test_knees_are_marked_at_their_level(sweep):
    data = figures_of(build_view([sweep]))["chart-latency-throughput"]["data"]
    knees = [trace for trace in data[1:] if "Recommended" in trace["name"]]
    assert [trace["x"][0] for trace in knees] == [sweep.levels[4].throughput_tokens_per_s]


def test_the_limit_is_drawn_only_where_it_would_not_flatten_the_curve(runs_of):
    def lines(**server):
        figures = figures_of(build_view([runs_of("", loads=(1, 2), **server)]))
        return [shape["y0"] for shape in figures["chart-latency-throughput"]["layout"]["shapes"]]

    assert lines(step_s=0.05) == [100.0]
    assert lines(step_s=0.005) == []


def test_slos_are_lines_in_the_charts_of_their_metric_and_far_ones_are_named(runs_of):
    """A limit above three times the highest value would flatten the curve."""
    run = runs_of("", loads=(1, 64), more={"slo": ["ttft_p90<=1s", "itl_p99<=5s"]})
    figures = figures_of(build_view([run]))
    ttft, itl = (figures[name]["layout"] for name in ("chart-ttft-ms", "chart-itl-ms"))
    (line,) = ttft["shapes"]
    assert line["y0"] == line["y1"] == 1000.0
    assert ttft["annotations"][0]["text"] == "SLO p90 ≤ 1,000 ms"
    assert itl["shapes"] == []
    assert itl["annotations"][0]["text"] == "SLO p99 ≤ 5,000 ms, above the chart"


def test_the_parts_of_ttft_are_stacked_where_the_server_states_its_own(sweep):
    split = {
        "network_ms": 3.0,
        "queue_ms": 1.0,
        "prefill_ms": 8.0,
        "client_ms": 0.0,
        "other_ms": None,
        "bound_ms": 0.1,
        "requests": 9,
        "source": "metrics",
    }
    levels = [changed(level, ttft_split=split) for level in sweep.levels]
    assert "chart-ttft-parts" not in figures_of(build_view([sweep]))
    figures = figures_of(build_view([replace(sweep, levels=levels)]))
    traces = figures["chart-ttft-parts"]["data"]
    assert [(trace["name"], trace["y"][0]) for trace in traces] == [
        ("network and HTTP", 3.0),
        ("server queue", 1.0),
        ("prefill", 8.0),
    ]
    assert {trace["stackgroup"] for trace in traces} == {"parts"}


def test_an_unsupported_percentile_is_a_gap_not_a_zero(sweep):
    data = figures_of(build_view([sweep]))["chart-ttft-ms"]["data"]
    p90 = next(trace for trace in data if trace["name"] == "p90")
    assert p90["y"][0] is None
    assert p90["y"][-1] == pytest.approx(sweep.levels[-1].of("ttft").p90)


def test_runs_keep_their_colour_in_every_chart_and_predictions_are_dashed(sweep, runs_of):
    predicted = runs_of("", path="runs/sim", more={"target": "sim:ml.g5.2xlarge"})
    figures = figures_of(build_view([sweep, predicted]))
    charts = [figure for name, figure in figures.items() if name.startswith("chart-")]
    for chart in charts[:2]:
        measured, simulated = [t for t in chart["data"] if "lines" in t["mode"]]
        assert measured["line"]["dash"] == "solid"
        assert simulated["line"]["dash"] == "dash"
    colours = {chart["data"][0]["line"]["color"] for chart in charts}
    assert len(colours) == 1


def test_concurrencies_and_rates_get_charts_of_their_own(sweep, runs_of):
    rates = runs_of("rates", loads=(1, 2))
    rates.levels[:] = [replace(line, load=Load(rate_per_s=line.load.value)) for line in rates.levels]
    anchors = [chart.anchor for chart in build_charts(build_view([sweep, rates]))]
    assert len(anchors) == len(set(anchors)) == 9


def test_two_runs_of_one_target_are_told_apart_in_the_legend(runs_of):
    """Their names differ in the folder at the end, which a legend of 36 characters cut off."""
    labels = [f"llama-2-7b on sim:ml.g5.2xlarge, a long name [{end}]" for end in ("sim1", "simr")]
    view = build_view([runs_of("a"), runs_of("b", path="runs/b")], labels=labels)
    data = figures_of(view)["chart-latency-throughput"]["data"]
    legends = {str(trace.get("name")) for trace in data}
    for end in ("sim1", "simr"):
        assert any(f"[{end}]" in each for each in legends)


def test_more_runs_than_colours_have_one_legend_on_the_widest_chart(runs_of):
    def legends(runs):
        figures = figures_of(build_view([runs_of(str(i), loads=(1, 2)) for i in range(runs)]))
        names = ("chart-latency-throughput", "chart-throughput")
        return [figures[name]["layout"].get("showlegend") for name in names]

    assert legends(8) == [None, None]
    assert legends(9) == [None, False]


def test_no_text_of_a_run_or_candidate_is_read_as_a_tag_by_plotly(runs_of, recommendation):
    """It reads a few tags in its texts, links included."""
    tag, shown = "<a href='x'>&amp;", "&lt;a href='x'&gt;&amp;amp;"
    run = runs_of(tag, loads=(1, 2))
    run.records[1] = (replace(run.records[1][0], status=tag), *run.records[1][1:])
    knees = [Knee(rule=tag, concurrency=2, recommended=True), Knee(rule="theory", concurrency=1)]
    known = replace(run, knees=knees)
    for one in (recommendation["recommended"], *recommendation["candidates"]):
        one["instance"] = one["accelerator"] = tag
    for runs in ([known], [known, runs_of(f"other {tag}", path="runs/b", loads=(1, 2))]):
        figures = figures_of(build_view(runs, [recommendation]))
        for name in (
            "chart-latency-throughput",
            "view-timeline",
            "view-lanes",
            "recommendation-1-cost",
            "recommendation-1-memory",
        ):
            assert shown in json.dumps(figures[name])
        tags = set(re.findall("<[^>]*>", json.dumps(figures)))
        assert tags == {"<br>", "<extra>", "</extra>"}


def test_embeddings_have_no_empty_charts_and_their_unit_is_not_that_of_answers(sweep):
    """Their throughput is of the prompts; they have no gaps and no first token."""
    lines = [replace(line, output_tokens=0, latency={"e2e": line.of("e2e")}) for line in sweep.levels]
    charts = build_charts(build_view([replace(sweep, levels=lines)]))
    assert [chart.anchor for chart in charts] == ["chart-throughput"]
    assert charts[0].y_title == "Throughput, tok/s"


def test_a_static_figure_leaves_out_what_is_invalid(sweep):
    from matplotlib.figure import Figure

    lines = [*sweep.levels]
    lines[3] = replace(lines[3], valid=False, invalid_reason="late")
    (chart,) = (
        each for each in build_charts(build_view([replace(sweep, levels=lines)])) if each.anchor == "chart-throughput"
    )
    axes = Figure().subplots()
    _draw_series(axes, chart, chart.series[0])
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 4, 16, 32, 64]
