"""Tables of InferenceX: what a line means, by the benchmark's own source, and what it cannot be."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.fit.fit import fit_of_profile
from lmi_bench.analysis.fit.measured_tables import read_table
from lmi_bench.analysis.fit.validation import judge
from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.model.builtin_profiles import GRAPH_GPU_PRIOR

FIELDS = {
    "hardware": "b200",
    "framework": "sglang",
    "image": "",
    "model": "deepseek-r1",
    "precision": "fp8",
    "spec_method": "none",
    "disaggregated": "False",
    "multinode": "False",
    "prefill_tp": "8",
    "prefill_ep": "1",
    "prefill_dp_attention": "False",
    "prefill_workers": "0",
    "decode_tp": "8",
    "decode_ep": "1",
    "decode_dp_attention": "False",
    "decode_workers": "0",
    "prefill_gpus": "8",
    "decode_gpus": "8",
    "input_tokens": "1000",
    "output_tokens": "500",
    "concurrency": "16",
    "date": "2026-01-13",
    "output_tokens_per_s_per_gpu": "100",
    "tokens_per_s_per_gpu": "300",
    "ttft_mean_ms": "",
    "ttft_p50_ms": "300",
    "tpot_mean_ms": "",
    "tpot_p50_ms": "14",
}


def table(tmp_path, *changes):
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(FIELDS))
        writer.writeheader()
        for change in changes:
            writer.writerow({**FIELDS, **change})
    return read_table(path)


def test_a_line_is_a_closed_loop_of_ten_requests_a_user_with_lengths_from_80_to_100_percent(tmp_path):
    (row,) = table(tmp_path, {})
    cell = row.cell
    assert (cell.concurrency, cell.num_requests) == (16, 160)
    assert (cell.input_tokens, cell.output_tokens) == (900, 450)
    spread = cell.length_spread * cell.output_tokens
    assert (cell.output_tokens - spread, cell.output_tokens + spread) == pytest.approx((400, 500))
    assert cell.throughput_tokens_per_s == 800
    assert (cell.ttft_mean_s, cell.tpot_mean_s, cell.medians) == (0.3, 0.014, True)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ({}, 30),
        ({"concurrency": "8"}, 10),
        ({"hardware": "mi300x"}, 4),
        ({"hardware": "h200"}, 0),
        ({"framework": "trt"}, 0),
    ],
)
def test_a_busy_sglang_looks_for_requests_every_few_steps_and_half_of_that_is_in_ttft(tmp_path, change, steps):
    """With 16 users 15 of 16 requests come to a busy engine, and wait half of 30 steps there."""
    (row,) = table(tmp_path, change)
    assert row.cell.poll_steps == steps
    polled, at_once = (predict_cell(GRAPH_GPU_PRIOR, replace(row.cell, poll_steps=each)) for each in (steps, 0))
    users = row.cell.concurrency
    waited_s = (users - 1) / users * steps / 2 * at_once.tpot_mean_s
    assert polled.ttft_mean_s - at_once.ttft_mean_s == pytest.approx(waited_s, rel=0.03, abs=1e-9)
    assert (polled.throughput_tokens_per_s < at_once.throughput_tokens_per_s) == (steps > 0)
    assert polled.tpot_mean_s == pytest.approx(at_once.tpot_mean_s)


@pytest.mark.parametrize(
    ("without", "cells", "says"),
    [
        ("decode_ep", 99, "no 'decode_ep'"),
        ("concurrency", 99, "no concurrency"),
        ("", 5, "no decode_tp"),
        ("", 18, "no input_tokens"),
        ("", 19, "no output_tokens"),
    ],
)
def test_a_line_that_lacks_cells_is_kept_with_its_reason(tmp_path, without, cells, says):
    path, fields = tmp_path / "table.csv", {**FIELDS}
    fields.pop(without, None)
    line = ",".join([*fields.values()][:cells])
    path.write_text(f"{','.join(fields)}\n{line}\n", encoding="utf-8")
    (row,) = read_table(path)
    assert (row.cell, row.problem) == (None, says)


def test_lengths_of_zero_are_no_lengths(tmp_path):
    nothing = {"input_tokens": "0", "output_tokens": "0", "output_tokens_per_s_per_gpu": ""}
    (row,) = table(tmp_path, nothing)
    assert row.problem == "input_tokens is '0': not a whole number of at least 1"


GROUPS = {"framework": "trt", "decode_tp": "8", "decode_ep": "8", "decode_dp_attention": "True", "concurrency": "64"}


@pytest.mark.parametrize(
    ("change", "gathers"),
    [
        (GROUPS, (60, 8)),
        ({**GROUPS, "framework": "sglang"}, (0, 1)),
        ({**GROUPS, "decode_dp_attention": "False"}, (0, 1)),
        ({"framework": "trt", "input_tokens": "1024", "output_tokens": "1024", "concurrency": "64"}, (40, 8)),
        ({"framework": "trt", "input_tokens": "1024", "output_tokens": "1024", "concurrency": "32"}, (0, 1)),
    ],
)
def test_tensorrt_lets_prompts_of_attention_groups_wait_for_each_other(tmp_path, change, gathers):
    """At most 60 steps for 8 groups; else 40, until 8 of 922 tokens fill 80 % of 8,192."""
    (row,) = table(tmp_path, change)
    assert (row.cell.gather_steps, row.cell.gather_prompts) == gathers


@pytest.mark.parametrize(("steps", "prompts"), [(60, 8), (600, 8), (20, 8)])
def test_the_wait_for_other_prompts_is_that_of_drawn_arrivals(tmp_path, steps, prompts):
    """Prompts come at random; those since the first go together when enough have come, or late.

    The formula takes the earlier of the two means: least exact where they are equal, at 60 steps.
    """
    (row,) = table(tmp_path, GROUPS)
    cell = replace(row.cell, length_spread=0.0, medians=False)
    alone, waiting = (
        predict_cell(GRAPH_GPU_PRIOR, replace(cell, gather_steps=each, gather_prompts=prompts), smooth=True)
        for each in (0, steps)
    )
    e2e_s = alone.latency_mean_s_per_token * cell.output_tokens
    chance, limit_s = np.random.default_rng(1), steps * alone.tpot_mean_s
    gaps_s = chance.exponential(e2e_s / cell.concurrency, size=(4000, prompts))
    since_s = np.cumsum(gaps_s, axis=1) - gaps_s[:, :1]
    end_s = np.minimum(since_s[:, -1:], limit_s)
    drawn_s = np.where(since_s <= end_s, end_s - since_s, 0.0).sum() / (since_s <= end_s).sum()
    waited_s = waiting.ttft_mean_s - alone.ttft_mean_s
    assert waited_s == pytest.approx(drawn_s, rel=0.25)


def test_means_are_taken_where_a_line_states_no_median(tmp_path):
    means = {"ttft_mean_ms": "400", "tpot_mean_ms": "15", "ttft_p50_ms": "", "tpot_p50_ms": ""}
    (row,) = table(tmp_path, means)
    assert (row.cell.ttft_mean_s, row.cell.tpot_mean_s, row.cell.medians) == (0.4, 0.015, False)


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("h100", "H100-SXM"),
        ("h200", "H200"),
        ("b200", "B200"),
        ("gb200-nvl72", "GB200"),
        ("mi300x", "MI300X"),
        ("mi325x", "MI325X"),
        ("mi355x", "MI355X"),
        ("gb300", "GB300"),
    ],
)
def test_hardware_has_its_name_in_the_catalog(tmp_path, hardware, name):
    (row,) = table(tmp_path, {"hardware": hardware})
    assert row.cell.setup.instance.accelerator.name == name
    assert row.cell.setup.instance.num_accelerators == 8


def test_fp4_is_nvfp4_on_nvidia_and_mxfp4_on_amd(tmp_path):
    rows = table(tmp_path, {"precision": "fp4"}, {"precision": "fp4", "hardware": "mi355x"}, {})
    assert [row.cell.setup.dtype for row in rows] == ["nvfp4", "mxfp4", "float8"]


def test_frameworks_name_the_engine_that_runs_below_them(tmp_path):
    names = ["dynamo-trt", "trt", "mori-sglang", "dynamo-vllm", "atom", "other"]
    rows = table(tmp_path, *({"framework": name} for name in names))
    assert [row.engine for row in rows] == ["trt", "trt", "sglang", "vllm", "atom", "other"]


def test_a_line_without_output_tokens_has_its_share_of_all_tokens(tmp_path):
    (row,) = table(tmp_path, {"output_tokens_per_s_per_gpu": ""})
    assert row.cell.throughput_tokens_per_s == pytest.approx(8 * 300 / 3)


def test_pools_have_workers_of_their_own_and_give_tokens_for_each_decoding_gpu(tmp_path):
    pools = {
        "disaggregated": "True",
        "prefill_workers": "1",
        "decode_workers": "2",
        "prefill_gpus": "4",
        "decode_gpus": "32",
        "prefill_tp": "4",
        "decode_tp": "16",
        "decode_ep": "16",
        "decode_dp_attention": "True",
        "spec_method": "mtp",
    }
    (row,) = table(tmp_path, pools)
    cell = row.cell
    assert (cell.prefill.workers, cell.prefill.setup.devices) == (1, 4)
    assert (cell.replicas, cell.setup.devices, cell.setup.parallelism.hosts) == (2, 16, 2)
    assert cell.setup.parallelism.attention_groups == 16
    assert cell.throughput_tokens_per_s == 3200
    assert cell.setup.speculation.own
    assert cell.prefill.setup.speculation is None


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"concurrency": "538"}, 256),
        ({"concurrency": "512"}, None),
        ({"concurrency": "24"}, None),
        ({"concurrency": "538", "framework": "dynamo-sglang"}, None),
        ({"concurrency": "538", "disaggregated": "False"}, None),
    ],
)
def test_pools_of_tensorrt_decode_at_most_the_power_of_two_that_the_users_just_exceed(tmp_path, change, limit):
    pools = {
        "framework": "dynamo-trt",
        "disaggregated": "True",
        "prefill_workers": "1",
        "decode_workers": "2",
        "prefill_gpus": "8",
        "decode_gpus": "16",
    }
    (row,) = table(tmp_path, {**pools, **change})
    assert row.cell.max_sequences == limit


def test_what_cannot_be_planned_says_why(tmp_path):
    rows = table(
        tmp_path, {"disaggregated": "True"}, {"hardware": "abacus"}, {"model": "no-such-model"}, {"decode_tp": "eight"}
    )
    assert all(row.cell is None and row.problem for row in rows)


def test_medians_leave_out_the_wait_of_the_first_prompts(tmp_path):
    """All users begin at once: one in ten requests waits for the others' prompts."""
    medians, means = table(
        tmp_path, {}, {"tpot_p50_ms": "", "ttft_p50_ms": "", "ttft_mean_ms": "9", "tpot_mean_ms": "9"}
    )
    shown, mean = (predict_cell(GRAPH_GPU_PRIOR, replace(each.cell, poll_steps=0)) for each in (medians, means))
    alone_s = GRAPH_GPU_PRIOR.parameters.request_overhead_s
    assert shown.ttft_mean_s - alone_s < 0.85 * (mean.ttft_mean_s - alone_s)
    assert shown.tpot_mean_s == pytest.approx(mean.tpot_mean_s, rel=0.05)


def test_answers_of_one_token_have_no_tpot_whatever_a_table_states(tmp_path):
    """The model prices the step that a later token would take, for medians as for means."""
    row = table(tmp_path, {})[0]
    cell = replace(row.cell, output_tokens=1, length_spread=0.0, poll_steps=0, tpot_mean_s=None)
    medians, means = (predict_cell(GRAPH_GPU_PRIOR, replace(cell, medians=each)) for each in (True, False))
    assert medians.tpot_mean_s == means.tpot_mean_s > 0
    judged = judge(fit_of_profile(GRAPH_GPU_PRIOR, [cell]), replace(row, cell=cell))
    assert judged.figures["tpot_ms"] is None
    assert judged.figures["ttft_ms"].value > 0


ROOTS = Path(__file__).parents[3:6]  # of a checkout, or of a work tree beside it
SHARED = next(
    (path for root in ROOTS if (path := root / "shared/data/inferencex_deepseek_r1.csv").exists()),
    Path("inferencex_deepseek_r1.csv"),
)


@pytest.mark.skipif(not SHARED.exists(), reason="the measured rows are not in ../shared/data")
def test_in_flight_requests_of_the_measured_rows_are_their_users():
    """Little's law: with 90 % of the stated tokens, users = throughput * latency / output."""
    found = []
    with SHARED.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, read_table(SHARED), strict=True):
        cell = row.cell
        if cell is not None and line["e2e_mean_s"]:
            in_flight = cell.throughput_tokens_per_s * float(line["e2e_mean_s"])
            found.append(in_flight / cell.output_tokens / cell.concurrency)
    assert len(found) > 20
    assert sorted(found)[len(found) // 2] == pytest.approx(1, abs=0.05)
