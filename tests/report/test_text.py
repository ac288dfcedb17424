"""Text forms: the block, the rows, Markdown and the static figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.results.knee import find_knees
from lmi_bench.core.errors import InputError
from lmi_bench.core.findings import Knee
from lmi_bench.core.load import Load
from lmi_bench.report.figures import write_figures
from lmi_bench.report.tables.extras import engine_rows
from lmi_bench.report.tables.levels import knee_rows, level_rows
from lmi_bench.report.text import level_block, render_markdown, replica_lines
from lmi_bench.report.view import build_view
from tests.levels import level_of


def test_the_block_is_the_one_people_paste(level_statistics, golden):
    """Every line is as wide as the frame; the numbers are those of the line."""
    keys = {
        "concurrency": 8,
        "requests": 50,
        "errors": 2,
        "wall_s": 12.5,
        "input_tokens": 12288,
        "output_tokens": 6144,
        "request_throughput_per_s": 3.84,
        "throughput_tokens_per_s": 491.52,
        "total_throughput_tokens_per_s": 1474.56,
        "mean_concurrency": 7.75,
        "valid": True,
        "stopped_by": None,
    } | dict.fromkeys(("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "latency_ms_per_token"), level_statistics)
    line = level_of(**keys)
    block = level_block(line)
    assert {len(row) for row in block.splitlines()} == {62}
    assert block + "\n" == golden("level_block.txt")


def test_the_block_holds_what_gaps_alone_would_give_beside_the_measured_throughput():
    """Published price tables take concurrency / p50 ITL: 8 users at 39 ms are 205.1 tok/s."""
    line = level_of(concurrency=8, itl_ms={"p50": 39.0}, throughput_tokens_per_s=150.0)
    rows = {row.split(":")[0]: row.split()[-1] for row in level_block(line).splitlines()}
    assert rows["Concurrency / P50 ITL (tok/s)"] == "205.1"
    assert rows["Output token throughput (tok/s)"] == "150"
    open_loop = replace(line, load=Load(rate_per_s=3.0))
    assert "P50 ITL (tok/s)" not in level_block(open_loop)


def test_the_block_of_an_open_loop_holds_both_clocks_and_what_lies_between(level_statistics):
    """TTFT from the due time hides nothing; from the send it is what the server took."""
    line = level_of(
        rate_per_s=10.0, ttft_ms={"mean": 1930.0}, ttft_from_sent_ms={"mean": 506.0}, dispatch_delay_ms={"mean": 1424.0}
    )
    rows = {row.split(":")[0]: row.split()[-1] for row in level_block(line).splitlines()}
    assert rows["Mean TTFT (ms)"] == "1,930"
    assert rows["Mean TTFT from sent (ms)"] == "506"
    assert rows["Mean delay (ms)"] == "1,424"
    assert "from sent" not in level_block(replace(line, load=Load(concurrency=4)))


def test_the_block_of_a_server_that_thinks_aloud_tells_answer_from_thought():
    """Five thoughts and three words of answer: 62.5 % of the output is reasoning."""
    line = level_of(concurrency=2, ttft_ms={"mean": 23.1}, ttft_answer_ms={"mean": 126.4})
    block = level_block(replace(line, reasoning_token_share=0.625))
    rows = {row.split(":")[0]: row.split(":")[-1].strip() for row in block.splitlines()}
    assert rows["Mean TTFT (ms)"] == "23.1"
    assert rows["Mean TTFT of the answer (ms)"] == "126.4"
    assert rows["Reasoning tokens, of all output"] == "62.5 %"
    assert {len(row) for row in block.splitlines()} == {62}


def test_a_rate_of_conversations_is_not_called_one_of_requests():
    line = level_of(rate_per_s=5.0, sessions={"started": 3})
    assert line.name == "5 sessions/s"
    assert next(iter(level_rows([line])[0])) == "Sessions begun a second"


def test_console_rows_all_have_the_same_keys(sweep):
    rows = level_rows(sweep.levels)
    assert [row["Concurrent requests"] for row in rows] == ["1", "2", "4", "8", "16", "32", "64"]
    assert len({tuple(row) for row in rows}) == 1
    assert rows[0]["TTFT ms p90"] == "n/a"
    assert rows[0]["errors"] == "0/3"


def test_knee_rows_take_knees_found_now_and_knees_read_from_a_file(sweep):
    knees = find_knees(sweep.levels)
    rows = knee_rows("concurrency", knees)
    assert rows == knee_rows("concurrency", [Knee.from_json(knee.to_json()) for knee in knees])
    assert [row["rule"].endswith("*") for row in rows].count(True) == 1


def test_markdown_tables_have_as_many_cells_as_columns_whatever_the_names(runs_of):
    run = runs_of("a | b\n# c", loads=(1, 2))
    text = render_markdown(build_view([run]))
    assert "\n# c" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            cells = {line.replace("\\|", "").count("|") for line in block.splitlines()}
            assert len(cells) == 1


def test_no_name_is_a_tag_in_markdown(sweep, faster_sweep):
    labels = ["<img src=x>", "b"]
    assert "<img" not in render_markdown(build_view([sweep, faster_sweep], labels=labels))


def test_markdown_names_the_recommendation_and_what_was_rejected(recommendation):
    text = render_markdown(build_view([], [recommendation]))
    assert "**Recommended for llama-2-7b: 2 × ml.g5.12xlarge**" in text
    assert "- 1 rejected: no accelerator in the catalog" in text


@pytest.mark.parametrize(("file_format", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_static_figures_are_written_and_alike_each_time(tmp_path, sweep, runs_of, file_format, magic):
    other = runs_of("$x_1$ _hidden", loads=(1, 4), path="runs/sim", more={"target": "sim:x"})
    view = build_view([sweep, other])
    first = write_figures(view, tmp_path / "a", file_format=file_format)
    second = write_figures(view, tmp_path / "b", file_format=file_format)
    assert [path.stem for path in first] == ["latency-throughput", "throughput", "latency", "ttft", "itl"]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes().startswith(magic)
        assert one.read_bytes() == two.read_bytes()


def test_an_unknown_figure_format_names_the_known_ones(tmp_path, sweep):
    with pytest.raises(InputError, match="png, svg, pdf"):
        write_figures(build_view([sweep]), tmp_path, file_format="gif")


def test_figures_of_no_run_are_refused(tmp_path, recommendation):
    with pytest.raises(InputError, match="no run"):
        write_figures(build_view([], [recommendation]), tmp_path)


def test_requests_of_each_replica_are_told_with_the_skew():
    server = {"requests_by_replica": {"http://a": 30.0, "http://b": None}, "skew": 1.5}
    lines = [
        level_of(concurrency=8, server=server),
        level_of(concurrency=4, requests_by_replica={"0": 3, "1": 1}),
        level_of(concurrency=2),
    ]
    assert replica_lines(lines) == [
        "requests by replica at concurrency 8: http://a: 30, http://b: –; busiest 1.50 times the mean",
        "requests by replica at concurrency 4: 0: 3, 1: 1",
    ]


def test_what_an_engine_did_has_a_column_where_any_level_has_it():
    quiet = {"peak_running": 2, "slot_waste_frac": 0.0, "cache_waste_frac": 0.25}
    levels = [
        level_of(concurrency=2, engine=quiet | {"preemptions": 0}),
        level_of(concurrency=8, engine=quiet | {"preemptions": 3, "prefix_hit_frac": 0.5}),
        level_of(concurrency=16),
    ]
    assert engine_rows(levels) == [
        {
            "level": "concurrency 2",
            "peak sequences so far": "2",
            "idle decode slots": "0 %",
            "empty reserved token slots": "25 %",
            "preemptions": "0",
            "prompt tokens cached": "–",
        },
        {
            "level": "concurrency 8",
            "peak sequences so far": "2",
            "idle decode slots": "0 %",
            "empty reserved token slots": "25 %",
            "preemptions": "3",
            "prompt tokens cached": "50 %",
        },
    ]
