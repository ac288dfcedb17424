"""A table of InferenceX is imported as a run for each set-up, with what it states and no more.

The rows are made up; their columns are those of the public table.
"""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

import lmi_bench
from lmi_bench.analysis.fit.from_run import PlacedRun, cells_from_run, prior_for_run
from lmi_bench.analysis.fit.measured_tables import read_table
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run
from lmi_bench.interchange.imports.inferencex_table import read_runs
from lmi_bench.jobs.results import import_results, report
from lmi_bench.jobs.settings import results

CELLS = """
hardware=b200 framework=sglang image= model=deepseek-r1 precision=fp8 spec_method=none disaggregated=False
decode_tp=8 decode_ep=1 decode_dp_attention=False prefill_tp=8 prefill_ep=1 prefill_dp_attention=False
prefill_workers=0 decode_workers=0 prefill_gpus=8 decode_gpus=8 input_tokens=1000 output_tokens=500
concurrency=16 date=2026-01-13 output_tokens_per_s_per_gpu=100 tokens_per_s_per_gpu=300
ttft_mean_ms= ttft_p50_ms=300 ttft_p99_ms=900 tpot_mean_ms= tpot_p50_ms=14 tpot_p99_ms=20 itl_p50_ms=13
e2e_mean_s= e2e_p50_s=6.5 e2e_p99_s=8
"""
FIELDS = dict(cell.split("=") for cell in CELLS.split())
POOLS = {"disaggregated": "True", "prefill_workers": "1", "decode_workers": "2", "decode_gpus": "16"}


def table(tmp_path, *changes, name="table.csv"):
    path = tmp_path / name
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(FIELDS))
        writer.writeheader()
        writer.writerows({**FIELDS, **change} for change in changes)
    return path


def written(path, **changes):
    out = path.with_name("run")
    return out, import_results(results.ImportSettings(files=(path,), out=out, **changes))


def test_a_line_is_a_level_with_the_table_s_own_statistics(tmp_path):
    """160 requests carry a p90, no p99, which 299 do; 8 GPUs of 100 and of 300 tok/s."""
    (imported,) = read_runs(table(tmp_path, {})).values()
    level = imported.levels[0].level
    assert (level.load.concurrency, level.sent, level.errors) == (16, 160, None)
    assert (level.throughput_tokens_per_s, level.total_throughput_tokens_per_s) == (800, 2400)
    assert (level.of("ttft").p50, level.of("tpot").p50, level.of("e2e").p50) == (300, 14, 6500)
    assert level.of("ttft").why_missing("p90") == "not in the imported file"
    assert level.of("ttft").why_missing("p99") == "needs 299 samples, has 160"
    assert (level.wall_s, level.mean_concurrency, level.of("latency_per_token").mean) == (None, None, None)
    assert imported.workload == {"input_lengths": "uniform(800,1000)", "output_lengths": "uniform(400,500)"}


def test_enough_users_carry_a_p99(tmp_path):
    (imported,) = read_runs(table(tmp_path, {"concurrency": "32"})).values()
    assert imported.levels[0].level.of("e2e").p99 == 8000


@pytest.mark.parametrize("change", [{}, {"ttft_mean_ms": "310", "tpot_mean_ms": "15"}])
def test_a_run_gives_a_fit_the_reader_s_level(tmp_path, change):
    """Medians where the table has no means; the reader's medians and scheduler habits apart."""
    path = table(tmp_path, {"framework": "trt", "hardware": "h200", **change})
    out, _ = written(path)
    (row,) = read_table(path)
    setup = row.cell.setup
    run = load_run(out)
    (cell,) = cells_from_run(PlacedRun(run, setup.instance), setup.shape)
    assert prior_for_run(run, [cell]).name == "TensorRT-LLM"
    assert run.manifest.target.layout is None
    times = {"ttft_mean_s": 0.31, "tpot_mean_s": 0.015, "medians": False} if change else {}
    assert cell == replace(row.cell, lengths_stated=False, measured_day=None, length_spread=cell.length_spread, **times)
    assert cell.length_spread == pytest.approx(row.cell.length_spread)


def test_each_set_up_is_a_run_and_each_build_of_it(tmp_path):
    other = [
        {"hardware": "mi355x"},
        {"framework": "/../trt"},
        {"precision": "fp4"},
        {"decode_ep": "8"},
        {"image": "a/image:1"},
    ]
    path = table(
        tmp_path,
        {},
        {"concurrency": "32"},
        *other,
        {"image": "a/image:1", "concurrency": "4"},
        {"input_tokens": "8000"},
    )
    out, (levels, tool, folders) = written(path)
    assert (levels, tool) == (9, "inferencex")
    assert {each.name: len(load_run(each).levels) for each in folders} == {
        "deepseek-r1-b200-sglang-fp8-tp8-1000-500": 2,
        "deepseek-r1-mi355x-sglang-fp8-tp8-1000-500": 1,
        "deepseek-r1-b200-..-trt-fp8-tp8-1000-500": 1,
        "deepseek-r1-b200-sglang-fp4-tp8-1000-500": 1,
        "deepseek-r1-b200-sglang-fp8-tp8-ep-1000-500": 1,
        "deepseek-r1-b200-sglang-fp8-tp8-1000-500-image-1": 2,
        "deepseek-r1-b200-sglang-fp8-tp8-8000-500": 1,
    }
    assert all(each.parent == out for each in folders)
    page = tmp_path / "page.html"
    report(results.ReportSettings(runs=tuple(folders), out=page))
    assert "mi355x" in page.read_text("utf-8")


def test_recommend_uses_one_copy_of_tp_and_says_what_else_it_cannot_use(tmp_path):
    asked = {"rate": 0.5, "instance": ["ml.p6-b200.48xlarge"], "measured_on": ["ml.p6-b200.48xlarge"]}
    out, _ = written(table(tmp_path, {}, {"concurrency": "64", "output_tokens_per_s_per_gpu": "300"}))
    advice = lmi_bench.recommend(runs=[out], **asked)
    assert advice.basis.profile.name == "SGLang"
    for change, layout in (
        (POOLS, "1P8 2D8 pools"),
        ({"decode_ep": "8", "decode_dp_attention": "True"}, "EP, DP attention x8"),
        ({"spec_method": "mtp"}, "MTP 3"),
    ):
        other = tmp_path / layout.replace(" ", "")
        other.mkdir()
        out, _ = written(table(other, change))
        with pytest.raises(InputError, match=f"no fit to a run knows its {layout}: .*calibrate"):
            lmi_bench.recommend(runs=[out], **asked)


def test_pools_have_no_number_of_devices_and_no_total_throughput(tmp_path):
    (imported,) = read_runs(table(tmp_path, POOLS)).values()
    assert imported.facts["n_accelerators"] is None
    level = imported.levels[0].level
    assert (level.throughput_tokens_per_s, level.total_throughput_tokens_per_s) == (1600, None)


def test_lines_that_cannot_be_used_are_counted_with_a_reason(tmp_path):
    path = table(tmp_path, {}, {"hardware": "abacus"})
    (imported,) = read_runs(path).values()
    assert any(note.startswith("1 of 2 lines are left out; line 3: ") for note in imported.notes)
    with pytest.raises(InputError, match=r"no line can be used; line 2: "):
        read_runs(table(tmp_path, {"hardware": "abacus"}))


def test_what_a_table_makes_no_run_of_is_one_line(tmp_path):
    path = table(tmp_path, {}, {"input_tokens": "8000"})
    other = table(tmp_path, {"hardware": "h200"}, name="other.csv")
    with pytest.raises(InputError, match="leave --concurrency and --rate out"):
        written(path, concurrency=4)
    with pytest.raises(InputError, match="accelerator is B200 and H200: import each by itself"):
        import_results(results.ImportSettings(files=(path, other), out=tmp_path / "both"))
    plain = tmp_path / "plain.csv"
    plain.write_text("model,input_tokens,output_tokens\nllama-2-7b,256,256\n")
    with pytest.raises(InputError, match="no table of InferenceX"):
        read_runs(plain)
    written(path)
    with pytest.raises(InputError, match="exists: name another folder"):
        written(path)
