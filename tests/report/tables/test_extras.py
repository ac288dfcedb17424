"""What a report says beside latencies: searches, repeats, conversations, engine, server, energy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.core.findings import SloAnswer
from lmi_bench.core.level import Spread
from lmi_bench.report.formats import MISSING
from lmi_bench.report.html import render_html
from lmi_bench.report.slo_text import search_headline
from lmi_bench.report.tables.extras import (
    engine_table,
    power_table,
    search_table,
    server_table,
    sessions_table,
    spread_table,
    steadiness_line,
    steady_table,
    turns_table,
)
from lmi_bench.report.tables.levels import generator_table, levels_table, statistics_tables
from lmi_bench.report.text import render_markdown
from lmi_bench.report.view import build_view
from tests.levels import level_of
from tests.report.conftest import manifest

ANSWER = SloAnswer(
    slo=["ttft_p90<=2000ms"],
    load="concurrency",
    value=28,
    low=27.5,
    high=29.4,
    first_breach=29,
    binding="ttft_p90<=2000ms",
    boundary="cliff",
    endpoint_seconds=134.2,
)


def texts(table):
    """Rows as {column: text}, a column named with its group."""
    names = [f"{c.group}: {c.title}" if c.group else c.title for c in table.columns]
    return [dict(zip(names, (cell.text for cell in row.cells), strict=True)) for row in table.rows]


def line(**fields):
    return level_of(**{"concurrency": 8, **fields})


def test_a_search_says_load_interval_breach_binding_shape_and_seconds():
    shown = search_headline(ANSWER)
    assert (shown.value, shown.unit) == ("28", "concurrent requests")
    for part in ("27.5 to 29.4", "cliff", "concurrency 29", "ttft_p90<=2000ms", "134 endpoint"):
        assert part in shown.detail


def test_a_search_without_an_answer_and_one_without_a_breach_say_so():
    none = search_headline(replace(ANSWER, value=None, first_breach=1))
    assert (none.value, none.tone) == ("none", "bad")
    whole = search_headline(replace(ANSWER, first_breach=None))
    assert whole.value == "≥ 28"
    assert "nothing broke" in whole.detail
    assert search_headline(None) is None


def test_the_steps_of_a_search_stand_in_the_order_in_which_they_were_taken():
    verdict = {"binding": "x", "planned": 40}
    tried = [
        line(level=1, concurrency=8, requests=40, search={**verdict, "passed": True, "ratio": 0.5}),
        line(level=0, concurrency=64, requests=9, search={**verdict, "passed": False, "ratio": None}),
    ]
    first, second = texts(search_table("concurrency", tried))
    assert first["Concurrent requests"] == "64"
    assert first["Sent of planned requests"] == "9 of 40"
    assert (first["Measured / limit"], first["SLOs"]) == ("infinite", "missed")
    assert (second["Measured / limit"], second["SLOs"]) == ("0.5", "met")


def test_repeats_show_each_metrics_interval():
    spread = {"ttft_p90": Spread(3, mean=100.0, low=95.0, high=105.0, cv=0.04)}
    (row,) = texts(spread_table("concurrency", [replace(line(), attempts=3, spread=spread)]))
    assert row["Metric"] == "TTFT p90, ms"
    assert (row["Attempts"], row["Mean"]) == ("3", "100")
    assert (row["95 % interval"], row["Variation"]) == ("95 to 105", "4 %")


def test_the_steady_window_stands_beside_the_whole_level():
    steady = {"start_s": 2.0, "end_s": 8.0, "throughput_tokens_per_s": 110.0, "low": 105.0, "high": 115.0, "share": 0.6}
    (row,) = texts(steady_table("concurrency", [line(steady=steady, throughput_tokens_per_s=100.0)]))
    assert row["Whole level, tok/s"] == "100"
    assert row["Steady window: tok/s"] == "110"
    assert row["Difference"] == "+10.0 %"


def test_slots_cache_and_hits_of_the_engine_are_shares():
    engine = {
        "steps": 1200,
        "peak_running": 8,
        "slot_waste_frac": 0.25,
        "cache_waste_frac": 0.125,
        "preemptions": 3,
        "prefix_hit_frac": 0.7,
    }
    (row,) = texts(engine_table("concurrency", [line(engine=engine)]))
    assert row["Steps"] == "1,200"
    assert row["Idle slots of decode steps"] == "25 %"
    assert row["Reserved cache without a token"] == "12.5 %"
    assert row["Prompt tokens found in the cache"] == "70 %"
    assert "Draft tokens accepted" not in row


def test_the_servers_view_has_what_was_read_and_no_empty_column():
    server = {
        "sources": ["http://a/metrics"],
        "running": {"mean": 7.5, "max": 8},
        "kv_usage_frac": {"mean": 0.4, "max": 0.5},
        "ttft_mean_ms": 80.0,
        "client_ttft_mean_ms": 92.0,
        "client_minus_server_ttft_ms": 12.0,
        "skew": 1.3,
    }
    table = server_table("concurrency", [line(server=server)])
    (row,) = texts(table)
    assert row["Running: mean"] == "7.5"
    assert row["KV cache in use: max"] == "50 %"
    assert row["Mean TTFT, ms: between"] == "12"
    assert row["Busiest replica over mean"] == "1.3"
    assert not any(name.startswith("Waiting") for name in row)
    assert "http://a/metrics" in table.note


@pytest.mark.parametrize(("valid", "shown"), [(True, "valid"), (False, "too short")])
def test_energy_carries_whether_it_may_be_believed(valid, shown):
    power = {
        "gpus": 1,
        "energy_j": 3000.0,
        "mean_power_w": 300.0,
        "joules_per_output_token": 1.5,
        "source": "energy counter",
        "valid": valid,
    }
    (row,) = texts(power_table("concurrency", [line(server={"power": power})]))
    assert row["J per output token"] == "1.5"
    assert row["Reading"].startswith(shown)


def test_a_sweep_of_levels_too_short_to_be_judged_says_so_once():
    short = {"speed_unknown": "needs 40 s, took 12 s", "itl_ms": {"n": 9}, "steady": {"start_s": 1.0}}
    lines = [line(**short), line(**short | {"concurrency": 16, "speed_unknown": "needs 41 s, took 20 s"})]
    said = "whether the levels were steady is not known: concurrency 16 needs 41 s, took 20 s"
    assert steadiness_line(lines).startswith(said)
    assert said in steady_table("concurrency", lines).note
    judged, tokenless = line(itl_ms={"n": 9}), line(speed_unknown="needs 10 s, took 9 s")
    assert [steadiness_line([*lines, other]) for other in (judged, tokenless)] == [None, None]
    assert steadiness_line([]) is None


def test_first_and_later_turns_stand_apart():
    sessions = {
        "started": 4,
        "failed": 0,
        "turns_mean": 3.0,
        "ttft_first_turn_ms": {"mean": 200.0, "n": 4},
        "ttft_later_turns_ms": {"mean": 60.0, "n": 8},
    }
    (row,) = texts(sessions_table("concurrency", [line(sessions=sessions)]))
    assert row["TTFT first turn, ms: mean"] == "200"
    assert row["TTFT later turns, ms: mean"] == "60"


def test_ttft_stands_by_bands_of_turns():
    bands = [
        {"first_turn": first, "last_turn": last, "ttft_ms": {"mean": 10.0 * first, "n": 9}}
        for first, last in ((1, 1), (2, 2), (3, 4))
    ]
    older = line(sessions={"started": 4})
    rows = texts(turns_table("concurrency", [line(sessions={"ttft_by_turns": bands}), older]))
    assert [row["Turns"] for row in rows] == ["1", "2", "3 to 4"]
    assert [row["TTFT, ms: mean"] for row in rows] == ["10", "20", "30"]
    assert turns_table("concurrency", [older]) is None


@pytest.mark.parametrize(
    "table", [search_table, spread_table, steady_table, engine_table, server_table, power_table, sessions_table]
)
def test_a_run_without_it_has_no_such_table(table):
    assert table("concurrency", [line()]) is None


def test_attempts_of_a_level_are_one_row_and_one_interval(sweep):
    """Two attempts at 16 users: the level pools 2 x 48 requests."""
    place = next(i for i, level in enumerate(sweep.levels) if level.load.concurrency == 16)
    again = replace(
        sweep,
        levels=[*sweep.levels, replace(sweep.levels[place], attempt=2)],
        records=[*sweep.records, sweep.records[place]],
    )
    view = build_view([again]).runs[0]
    rows = [row for row in view.levels.rows if row.cells[0].text == "16"]
    assert len(rows) == 1
    assert rows[0].cells[9].text == "96"
    assert any(table.caption == "Repeats" for table in view.more)


def test_the_page_and_the_markdown_hold_the_search_and_the_limits_of_a_good_request(sweep):
    asked = replace(manifest(slo=["ttft_p90<=2s"]), goodput=["tpot_mean<=15ms"])
    run = replace(sweep, manifest=asked, slo_answer=ANSWER)
    view = build_view([run])
    page = render_html(view)
    assert "Highest load within the SLOs" in page
    assert "requests that meet tpot&lt;=15ms each" in page
    assert "Highest load within the SLOs" in render_markdown(view)


def test_levels_of_a_priced_target_show_what_a_million_tokens_cost(sweep):
    """1.515 USD an hour at 475 tok/s: 1.515 / 3600 / 475 * 1e6 = 0.886 USD."""
    priced = replace(sweep.levels[0], usd_per_1m_output_tokens=0.886)
    table = levels_table("concurrency", [priced, sweep.levels[1]], None)
    groups = [column.group for column in table.columns]
    place = groups.index("USD per 1M tokens")
    assert [row.cells[place].text for row in table.rows] == ["0.886", MISSING]
    assert {len(row.cells) for row in table.rows} == {len(table.columns)}
    assert "USD per 1M tokens" not in [
        column.group for column in levels_table("concurrency", sweep.levels, None).columns
    ]


def test_the_verdict_of_the_self_check_is_short_and_its_reason_is_on_hover():
    reason = "client: requests left 11.3 ms late (p99); run the generator on an idle core"
    table = generator_table("concurrency", [line(valid=False, invalid_reason=reason)])
    cell = table.rows[0].cells[-1]
    assert (cell.text, cell.hint) == ("invalid: client", reason)


def test_every_statistic_has_a_table_where_there_is_something_to_count(level_statistics):
    """Over plain HTTP there is no handshake; answers after reasoning have a time of their own."""
    none = {"mean": None, "n": 0}
    there = {"ttft_answer_ms": level_statistics, "connect_ms": level_statistics, "tls_ms": none}
    titles = [table.caption for table in statistics_tables("concurrency", [line(**there)])]
    assert "TTFT of the answer, ms" in titles
    assert "Connect, ms" in titles
    assert "TLS handshake, ms" not in titles
