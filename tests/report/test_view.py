"""What the report says, before it is rendered."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lmi_bench.analysis.results.compare import compare_runs
from lmi_bench.cli.sweep_print import _row
from lmi_bench.core.errors import InputError
from lmi_bench.core.findings import Knee
from lmi_bench.core.level import Statistics
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.jobs import matrix
from lmi_bench.report.formats import key_title, number, statistic_cell, usd
from lmi_bench.report.view import build_view


def texts(table):
    return [[cell.text for cell in row.cells] for row in table.rows]


def test_an_unsupported_percentile_is_not_available_with_its_reason(level_statistics):
    cell = statistic_cell(Statistics.from_json(level_statistics), "p99")
    assert (cell.text, cell.tone) == ("n/a", "na")
    assert cell.hint == "needs 299 samples, has 48"
    assert statistic_cell(Statistics.from_json(level_statistics), "p90").text == "45.5"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012345, "0.0123"),
        (99.95, "100"),
        (1234567.0, "1,234,567"),
        (None, "–"),
        (0, "0"),
        (float("inf"), "∞"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_keep_three_digits_and_group_thousands(value, text):
    assert number(value) == text


def test_a_missing_price_is_never_a_number():
    assert usd(None) == "no price"
    assert usd(0.0312) == "$0.0312"


def test_keys_of_newer_files_still_make_headings():
    assert key_title("energy_j_per_token") == "Energy j per token"
    assert key_title("capacity_rate_per_s") == "Capacity rate, req/s"


def test_the_headlines_are_knee_throughput_and_first_token(sweep):
    """24 slots: 16 users run at once within the limit, 32 wait for a slot."""
    view = build_view([sweep])
    values = {each.label: (each.value, each.unit) for each in view.headlines}
    assert values["Knee"] == ("16", "concurrent requests")
    assert list(values)[1:] == ["Knee", "Best throughput", "Fastest first token"]
    assert "346 tok/s" in view.headlines[1].detail


def test_the_first_headline_is_the_highest_level_that_meets_every_slo(runs_of):
    """Levels of 10 users and more support a p90 of 29 requests; 64 wait for 24 slots."""
    slo = {"slo": ["e2e_p90<=3s"]}
    first = build_view([runs_of("", loads=(10, 16, 64), more=slo)]).headlines[0]
    assert (first.value, first.unit, first.tone) == ("16", "concurrent requests", "good")
    assert "concurrency 64 misses e2e_p90<=3000ms" in first.detail
    first = build_view([runs_of("", loads=(10, 16), more=slo)]).headlines[0]
    assert first.value == "≥ 16"
    first = build_view([runs_of("", loads=(64,), more=slo)]).headlines[0]
    assert (first.value, first.tone) == ("none", "bad")


def test_the_answer_is_fleet_price_attainment_and_verdict_before_the_runs(sweep, recommendation):
    outlook = {
        "slo": "ttft_p90<=2s",
        "predicted_ms": 420.0,
        "limit_ms": 400.0,
        "slack_ms": -20.0,
        "confidence": "missed",
    }
    recommendation["recommended"] |= {"slos": [outlook]}
    recommendation["recommended"]["attainment"] = {"joint_attainment": 0.912, "requests": 3600}
    tiles = build_view([sweep], [recommendation]).headlines
    shown = [(each.label, f"{each.value} {each.unit}".rstrip(), each.tone) for each in tiles[:5]]
    assert shown == [
        ("Recommended for llama-2-7b", "2 × ml.g5.12xlarge", "good"),
        ("Cost", "USD 14.18 per hour", ""),
        ("Capacity", "12 [10-14] req/s", ""),
        ("ttft_p90<=2s", "420 [300-610] ms", "bad"),
        ("Attainment", "91.2% of requests", ""),
    ]
    assert tiles[4].detail == "every SLO met; 3,600 simulated, random routing"
    assert tiles[4].line.startswith("attainment: 91.2% of requests, every SLO met; 3,600 ")


def test_a_fleet_without_a_price_is_not_priced_by_the_hour(sweep, recommendation):
    recommendation["recommended"]["price_usd_per_hour"] = None
    tile = build_view([sweep], [recommendation]).headlines[1]
    assert tile.line == "cost: price unknown"


def test_a_knee_at_the_top_of_the_sweep_is_a_lower_bound(runs_of):
    """All levels are within the limit, so the knee was not seen."""
    (knee, *_) = build_view([runs_of("low", loads=(1, 2, 4))]).headlines
    assert (knee.label, knee.value) == ("Knee", "≥ 4")
    assert "may lie above" in knee.detail


def test_the_knee_on_the_first_screen_says_what_binds(runs_of):
    """The cause is that of the recommended rule, else of the last rule before it."""

    def found(*knees):
        rows = [
            Knee(rule, concurrency=load, low=low, high=load, cause=cause, recommended=index == 0)
            for index, (rule, load, low, cause) in enumerate(knees)
        ]
        run = replace(runs_of("saved", loads=(1, 2, 4)), knees=rows)
        return build_view([run]).headlines[0].detail

    own = found(("latency_limit", 2, 1, "host"), ("theory", 1, 1, "kv_memory"))
    assert own.endswith("What binds beyond it: host time per step")
    assert "interval 1 to 2" in own
    other = found(("latency_limit", 4, 4, "unknown"), ("theory", 2, 2, "kv_memory"))
    assert other.endswith("What binds from 2 on (theory rule): KV-cache memory")
    later = found(("latency_limit", 2, 2, "unknown"), ("theory", 4, 4, "kv_memory"))
    assert "binds" not in later


def test_a_priced_sweep_says_what_its_best_level_costs(runs_of):
    run = runs_of("priced", loads=(1, 2))
    run.levels[-1] = replace(run.levels[-1], usd_per_1m_output_tokens=12.3456)
    best = next(each for each in build_view([run]).headlines if each.label == "Best throughput")
    assert best.detail.endswith("12.35 USD for 1M output tokens")


def test_the_recommendation_on_the_first_screen_says_how_sure_it_is(recommendation):
    recommendation["recommended"] |= {
        "capacity_rate_per_s": {"predicted": 10.04, "low": 8.29, "high": 10.9},
        "slos": [
            {
                "slo": "ttft_p90<=2000ms",
                "predicted_ms": 420.0,
                "limit_ms": 2000.0,
                "slack_ms": 1580.0,
                "confidence": "sure",
            }
        ],
    }
    (advice,) = build_view([], [recommendation]).recommendations
    assert advice.headline.detail == "TP 4, 1 copy a machine"
    tiles = [(tile.label, tile.value, tile.detail) for tile in advice.answer[1:]]
    assert tiles == [
        ("Capacity", "10 [8.29-10.9]", "within the SLOs; 8 asked for; 2,430 [2,187-2,673] output tok/s at this load"),
        ("ttft_p90<=2000ms", "420 [300-610]", "sure"),
        ("Attainment", "not simulated", ""),
    ]


def test_the_throughput_in_the_table_is_tokens_over_wall(sweep):
    """One user, 3 requests of 48 tokens: each 20 ms of prefill and 48 steps of 30.6 ms."""
    row = texts(build_view([sweep]).runs[0].levels)[0]
    wall_s = 3 * (0.020 + 48 * 0.0306)
    assert row[0] == "1"
    assert float(row[1]) == pytest.approx(3 * 48 / wall_s, rel=0.005)


def test_the_recommended_knee_is_the_row_to_read(sweep):
    strong = [row.cells[0].text for row in build_view([sweep]).runs[0].levels.rows if row.strong]
    assert strong == ["16"]


def test_saved_knees_are_shown_as_they_were_found(runs_of):
    run = runs_of("saved", loads=(1, 2, 4))
    saved = Knee(
        "half_latency", concurrency=2, low=1, high=4, cause="host", recommended=True, why="by hand", change="graphs"
    )
    view = build_view([type(run)(run.path, run.manifest, run.levels, run.records, [saved])])
    assert texts(view.runs[0].knees) == [["Half-latency *", "2", "1 to 4", "host time per step", "graphs", "by hand"]]


def test_invalid_levels_are_flagged_and_warned_about(runs_of):
    run = runs_of("bad", loads=(1, 2))
    run.levels[1] = replace(run.levels[1], valid=False, invalid_reason="client: late")
    view = build_view([run]).runs[0]
    assert view.levels.rows[1].tone == "bad"
    assert view.levels.rows[1].cells[-1].hint == "client: late"
    assert any("concurrency 2 is invalid: client: late" in w for w in view.warnings)
    assert view.curve.valid == (True, False)


def test_an_invalid_level_neither_meets_an_slo_nor_misses_it(sweep):
    lines = [replace(line, valid=False, invalid_reason="client: late") for line in sweep.levels]
    judged, doubted = (
        build_view([replace(sweep, levels=levels)]).runs[0].slos.rows[4].cells[3] for levels in (sweep.levels, lines)
    )
    assert judged.text == f"{doubted.text} ok"
    assert (doubted.hint, doubted.tone) == ("client: late", "warn")


def test_slos_of_the_scenario_are_judged_level_by_level(sweep):
    """48 requests at 16 users support a p90 and no p99; a level of 3 supports neither."""
    table = build_view([sweep]).runs[0].slos
    cells = {row.cells[0].text: row.cells for row in table.rows}
    assert cells["1"][3].text == "n/a"
    assert cells["16"][3].text.endswith(" ok")
    assert cells["64"][3].text.endswith(" MISS")
    assert cells["16"][5].hint == "p99 needs 299 samples, has 48"
    assert cells["16"][2].text == "100 %"


def test_a_prediction_is_compared_with_the_measurement_and_not_the_other_way_round(sweep, runs_of):
    """The simulated run comes first and is still not the base."""
    predicted = runs_of("", path="runs/sim", step_s=0.033, more={"target": "sim:ml.g5.2xlarge"})
    view = build_view([predicted, sweep])
    assert view.runs[0].curve.simulated
    assert not view.runs[1].curve.simulated
    titles = [column.title for column in view.comparison.columns]
    assert titles[1:3] == ["TGI on g5.2xlarge", "llama-2-7b on sim:ml.g5.2xlarge (predicted)"]
    assert "(-9%)" in texts(view.comparison)[0][2]


def test_runs_over_unlike_loads_are_not_compared(sweep, runs_of):
    rates = runs_of("rates", loads=(1, 2))
    rates.levels[:] = [replace(line, load=Load(rate_per_s=line.load.value)) for line in rates.levels]
    assert build_view([sweep, rates]).comparison is None


def test_runs_of_one_name_are_told_apart_by_their_folder(runs_of):
    runs = [runs_of("same", loads=(1,), path=f"runs/{name}") for name in ("a", "b", "b")]
    labels = [run.curve.label for run in build_view(runs).runs]
    assert labels == ["same [a]", "same [b]", "same [b] #2"]


def test_candidates_and_rejections_are_grouped_and_unknown_keys_kept(recommendation):
    recommendation["fitted_on"] = "runs/a"
    recommendation["recommended"]["limited_by"] = "kv_memory"
    (advice,) = build_view([], [recommendation]).recommendations
    assert advice.headline.tone == "good"
    assert advice.headline.value == "2 × ml.g5.12xlarge"
    assert [len(group.rows) for group in advice.rejected] == [2, 1]
    assert advice.rejected[0].caption == ("weights need 12.6 to 25.1 GiB, the instance has 14.6 to 22.0 GiB less 20 %")
    assert advice.rejected[1].caption == "no accelerator in the catalog"
    assert ("Fitted on", "runs/a") in advice.provenance[0].items
    unpriced = texts(advice.candidates)[2]
    assert unpriced[0] == "1 x ml.trn1.32xlarge"
    assert not any("$" in cell for cell in unpriced)


def test_numbers_that_all_reasons_share_stay_in_them(recommendation):
    recommendation["rejected"] = [
        {
            "instance": name,
            "tensor_parallel": None,
            "replicas": None,
            "reason": f"TGI 1.x (2023) does not run on {device}",
        }
        for name, device in (("ml.trn1.2xlarge", "Trainium1"), ("ml.trn2.48xlarge", "Trainium2"))
    ]
    (advice,) = build_view([], [recommendation]).recommendations
    assert advice.rejected[0].caption == "TGI 1.x (2023) does not run on Trainium1 or Trainium2"


def test_slos_out_of_reach_name_the_nearest(recommendation):
    recommendation |= {"nearest": recommendation["recommended"], "recommended": None}
    (advice,) = build_view([], [recommendation]).recommendations
    assert advice.headline.label == "Nearest, no candidate meets the SLOs"
    assert advice.headline.tone == "bad"


@pytest.mark.parametrize(("missed", "said"), [("the budget", "meets the budget"), ("the load", "carries the load")])
def test_a_budget_or_load_out_of_reach_is_not_called_an_slo(recommendation, missed, said):
    nearest = recommendation["recommended"]
    recommendation |= {"nearest": nearest, "recommended": None, "missed": missed}
    (advice,) = build_view([], [recommendation]).recommendations
    assert advice.headline.label == f"Nearest, no candidate {said}"


def test_a_recommendation_with_nothing_in_it_says_so(recommendation):
    recommendation |= {"recommended": None, "candidates": []}
    (advice,) = build_view([], [recommendation]).recommendations
    assert advice.headline.value == "none"
    assert advice.candidates is None


def test_a_withheld_figure_shows_the_reason(recommendation):
    recommendation["candidates"][0] |= {"ttft_p90_ms": {"predicted": None, "reason": "above 80 % of capacity"}}
    (advice,) = build_view([], [recommendation]).recommendations
    cells = [cell for cell in advice.candidates.rows[0].cells if cell.text == "withheld"]
    assert [cell.hint for cell in cells] == ["above 80 % of capacity"]


def test_accuracy_is_predicted_over_measured(recommendation):
    """31.2 / 30 - 1 = 4 %."""
    pair = {"measured": 30.0, "predicted": 31.2}
    recommendation["accuracy"] = {"levels": [{"concurrency": 1, "throughput_tokens_per_s": pair}]}
    (advice,) = build_view([], [recommendation]).recommendations
    assert texts(advice.more[-1]) == [["1", "31.2 / 30", "+4%"]]


def test_the_question_is_the_subtitle_and_each_slo_has_its_confidence(recommendation):
    outlook = {
        "slo": "ttft_p90<=1s",
        "predicted_ms": 420.0,
        "limit_ms": 1000.0,
        "slack_ms": 580.0,
        "confidence": "likely",
    }
    recommendation["recommended"] |= {"slos": [outlook], "reason": "least cost"}
    (advice,) = build_view([], [recommendation]).recommendations
    assert advice.title == "Recommendation for llama-2-7b"
    assert advice.subtitle == ("256 tokens in, 256 out · 8 req/s, Poisson · ttft_p90<=1s · ranked by cost")
    assert advice.why == "least cost"
    (tile,) = [tile for tile in advice.answer if tile.label == "ttft_p90<=1s"]
    assert (tile.value, tile.unit, tile.detail, tile.tone) == ("420 [300-610]", "ms", "likely", "warn")


def test_another_file_than_a_recommendation_is_refused(recommendation):
    del recommendation["recommended"]["instances"]
    with pytest.raises(InputError, match="recommended: it has no `instances`"):
        build_view([], [recommendation])


def test_nothing_to_report_on_is_an_error():
    with pytest.raises(InputError, match="name a run folder"):
        build_view([])


def test_more_labels_than_runs_is_an_error(sweep):
    with pytest.raises(InputError, match="2 labels for 1 runs"):
        build_view([sweep], labels=["a", "b"])


def test_the_report_says_when_and_by_which_version_it_was_written(sweep):
    view = build_view([sweep], generated_at=datetime(2026, 5, 6, 7, 8, tzinfo=UTC))
    assert view.generated_at == "2026-05-06 07:08 UTC"
    assert view.version


def test_each_run_has_the_verdicts_of_compare_against_the_first(runs_of):
    slow, fast = runs_of("a", loads=(1, 64)), runs_of("b", loads=(1, 64), slots=64, step_s=0.02)
    differences = {(d.level, d.metric): d for d in compare_runs(slow, fast)}
    (table,) = build_view([slow, fast]).verdicts
    titles = [column.title for column in table.columns]
    assert [row.cells[0].text for row in table.rows] == [line.name for line in slow.levels]
    for level, title, metric in (
        ("concurrency 64", "Throughput", "throughput"),
        ("concurrency 1", "TTFT p50", "ttft_p50"),
        ("concurrency 64", "E2E p90", "e2e_p90"),
    ):
        each = differences[level, metric]
        row = next(row for row in table.rows if row.cells[0].text == level)
        shown = row.cells[titles.index(title)]
        if each.change is None:
            assert (shown.text, shown.hint) == ("unknown", each.reason)
        else:
            assert shown.text == f"{each.verdict}, {each.change:+.1%}"
            assert shown.interval == f"{each.low:+.1%} to {each.high:+.1%}"
    assert differences["concurrency 64", "throughput"].verdict == "faster"


def test_runs_that_cannot_be_judged_say_why(runs_of, monkeypatch):
    first, other = runs_of("first", loads=(1, 4)), runs_of("other", loads=(1, 4))
    workload = replace(other.manifest.scenario.workload, input_tokens=512)
    scenario = replace(other.manifest.scenario, workload=workload)
    other = replace(other, manifest=replace(other.manifest, scenario=scenario))
    view = build_view([first, other])
    assert view.verdicts == ()
    assert "workload.input_tokens is 256 and 512" in view.unjudged[0]
    monkeypatch.setattr("lmi_bench.report.view._MOST_TO_JUDGE", 10)
    (reason,) = build_view([first, other]).unjudged
    assert "lmi-bench compare runs/a RUN" in reason


def test_an_invalid_level_is_no_improvement_and_its_price_is_not_the_best(sweep, runs_of):
    other = runs_of()
    lines = [*other.levels]
    lines[3] = replace(
        lines[3],
        valid=False,
        invalid_reason="late",
        usd_per_1m_output_tokens=1.0,
        throughput_tokens_per_s=2 * lines[3].throughput_tokens_per_s,
    )
    lines[2] = replace(lines[2], usd_per_1m_output_tokens=3.0)
    other = replace(other, path=Path("runs/b"), levels=lines)
    table = build_view([sweep, other]).comparison
    (cells,) = (row.cells for row in table.rows if row.cells[0].text == "8")
    assert [cell.tone for cell in cells[1:]] == ["", "warn", "", "warn"]
    assert all("%" not in cell.text for cell in cells)
    cell = matrix.Cell("b", "256/48", parse_scenario({}), state="finished", run=other)
    assert _row(cell)["USD/1M out"] == "3"


def test_the_fastest_first_token_is_not_that_of_a_cold_first_level(runs_of):
    run = runs_of()
    slow = replace(run.levels[0].of("ttft"), p50=900.0, mean=900.0)
    first = replace(run.levels[0], latency={**run.levels[0].latency, "ttft": slow})
    view = build_view([replace(run, levels=[first, *run.levels[1:]])])
    (told,) = (each for each in view.runs[0].headlines if each.label == "Fastest first token")
    assert "at concurrency 2" in told.detail
