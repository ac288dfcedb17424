"""Fits and their intervals, designs, and the judgement of published tables."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.fit import fit as fit_module
from lmi_bench.analysis.fit.experiment_design import choose_cells
from lmi_bench.analysis.fit.fit import derivatives, fit_cells, prior_fit
from lmi_bench.analysis.fit.forecast import forecast
from lmi_bench.analysis.fit.measured_tables import TableRow, read_table
from lmi_bench.analysis.fit.uncertainty import estimates
from lmi_bench.analysis.fit.validation import Judged, accuracies, fitted_rows, loads_under, validate
from lmi_bench.analysis.level.cells import capacity_tokens_per_s, growth_with_step_times, predict_cell, regime_of
from lmi_bench.analysis.model.builtin_profiles import (
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    TGI_2023,
    VLLM,
    VLLM_0_12,
    VLLM_0_19,
    VLLM_V0_PRIOR,
    prior_of_engine,
)
from lmi_bench.analysis.model.measured_level import MeasuredLevel, marks_of
from lmi_bench.analysis.model.setup import PrefillPool, Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load

PUBLISHED = Path(__file__).parents[3] / "lmi_bench/catalog/data/published"
METRICS = ("throughput_tokens_per_s", "tpot_mean_s")
WITH_TTFT = (*METRICS, "ttft_mean_s")


def validated(rows, **options):
    return validate(rows, fitted_rows(rows, **options))


def cell(users=0, *, rate=None, instance="ml.g5.12xlarge", tp=4, model="llama-2-7b", **more):
    return MeasuredLevel(
        Setup(find_model(model), find_instance(instance), tp, "float16"),
        input_tokens=256,
        output_tokens=256,
        load=Load(users or None, rate),
        num_requests=3 * users or 200,
        **more,
    )


def measured(profile, plain, factor=1.0):
    seen = predict_cell(profile, plain)
    return replace(
        plain, throughput_tokens_per_s=seen.throughput_tokens_per_s / factor, tpot_mean_s=seen.tpot_mean_s * factor
    )


@pytest.fixture(scope="module")
def jumpstart():
    """The cells of Llama 2 7B."""
    rows = read_table(PUBLISHED / "jumpstart_concurrency.csv")[:95]
    return [validated(rows, calibrate_cells=8, seed=seed)[0] for seed in (0, 1)]


def test_eight_chosen_cells_foretell_the_other_eighty_seven(jumpstart):
    """Two splits, prior not fitted to the table: within 7 / 16 % in tok/s, 9 / 20 % in ms/token."""
    for judged in jumpstart:
        assert sum(row.calibrated for row in judged) == 8
        entries = {e.figure: e for e in accuracies(judged) if e.slice_name == "all"}
        throughput = entries["throughput_tokens_per_s"]
        latency = entries["latency_ms_per_token"]
        assert (throughput.rows, throughput.silent) == (87, 0)
        assert throughput.median <= 0.07
        assert throughput.p90 <= 0.16
        assert latency.median <= 0.09
        assert latency.p90 <= 0.20


def test_eight_in_ten_intervals_hold_the_measured_figure(jumpstart):
    for figure, widest in (("throughput_tokens_per_s", 0.15), ("latency_ms_per_token", 0.20)):
        entries = [
            entry
            for judged in jumpstart
            for entry in accuracies(judged)
            if entry.figure == figure and entry.slice_name == "all"
        ]
        assert 0.65 <= np.mean([entry.coverage for entry in entries]) <= 0.97
        assert max(entry.half_width for entry in entries) <= widest


def test_the_chosen_cells_span_loads_and_degrees(jumpstart):
    chosen = [row.row.cell for row in jumpstart[0] if row.calibrated]
    assert min(each.concurrency / each.replicas for each in chosen) <= 4
    assert max(each.concurrency for each in chosen) >= 64
    assert {each.setup.tensor_parallel for each in chosen} >= {1, 8}


def test_json_rows_keep_the_table_s_order_and_keys(jumpstart):
    judged = jumpstart[0]
    assert [row.row.number for row in judged] == list(range(95))
    content = judged[0].to_json()
    assert {"predicted_ttft_ms", "low_tpot_ms", "high_latency_ms_per_token"} <= set(content)
    assert content["low_tpot_ms"] < content["predicted_tpot_ms"] < content["high_tpot_ms"]


def test_a_measured_neighbour_corrects_what_the_model_misses():
    """An engine that is 10 % slower than any parameter explains, at one load: so are its sides."""
    known = [measured(TGI_2023, cell(users)) for users in (1, 128)]
    known.append(measured(TGI_2023, cell(16), factor=1.1))
    fit = fit_cells(EAGER_GPU_PRIOR, known)
    near = estimates(fit, cell(20), METRICS)["tpot_mean_s"].value
    plain = predict_cell(fit.profile, cell(20)).tpot_mean_s
    truth = predict_cell(TGI_2023, cell(20)).tpot_mean_s * 1.1
    assert abs(near - truth) < abs(plain - truth)


def test_what_was_not_seen_is_less_sure():
    fit = fit_cells(EAGER_GPU_PRIOR, [measured(TGI_2023, cell(users)) for users in (1, 16, 64)])

    def width(plain):
        estimate = estimates(fit, plain, METRICS)["throughput_tokens_per_s"]
        return estimate.high / estimate.low

    same, other_degree = width(cell(32)), width(cell(32, tp=2))
    other_machine = width(cell(32, instance="ml.p4d.24xlarge", tp=2))
    assert same < other_degree < other_machine


def test_the_first_cell_to_measure_is_none_of_those_already_known():
    fit = fit_cells(EAGER_GPU_PRIOR, [measured(TGI_2023, cell(users)) for users in (1, 2, 4)])
    wanted = [cell(users) for users in (2, 128)]
    assert choose_cells(fit, wanted, wanted, 1, METRICS) == [1]


def test_an_engine_that_was_fitted_to_a_model_is_not_its_own_prior():
    own = prior_of_engine("", models={"llama-2-7b"}, accelerators={"A10G"}, open_loop=False)
    other = prior_of_engine("", models={"llama-2-13b"}, accelerators={"A10G"}, open_loop=False)
    assert own is EAGER_GPU_PRIOR
    assert other.parameters == TGI_2023.parameters
    assert other.log_sd["host_per_layer_s"] == pytest.approx(max(0.05, 2 * TGI_2023.log_sd["host_per_layer_s"]))
    graph = prior_of_engine("lmdeploy", models={"x"}, accelerators={"H100-SXM"}, open_loop=True)
    assert graph is GRAPH_GPU_PRIOR
    pausing = prior_of_engine("sglang", models={"x"}, accelerators={"H100-SXM"}, open_loop=True)
    assert not pausing.chunked_prefill  # its prompts have steps of their own


def prior_for(engine, **more):
    known = {"models": {"x"}, "accelerators": {"H100-SXM"}, "open_loop": False, **more}
    return prior_of_engine(engine, **known)


def test_the_version_decides_between_generations_and_for_the_nearest_profile():
    """Before its V1 engine (0.8) vLLM let prompts pause decoding; TGI has CUDA graphs from 2.0."""
    for engine in ("vllm 0.4.3", "vllm v0.6.3.post1", "vllm 0.7.1"):
        old = prior_for(engine)
        assert not old.chunked_prefill
        assert old.parameters.gap_per_layer_s > 2 * VLLM_0_19.parameters.gap_per_layer_s
    for engine in ("vllm", "vllm 0.10.1", "vllm 0.21.0"):
        assert prior_for(engine).version == VLLM.version
    seen = {"marks": set(VLLM.fitted_cells) - set(VLLM_0_19.fitted_cells)}
    assert prior_for("vllm 0.13", **seen).version == VLLM_0_19.version
    assert prior_for("tgi 1.4.0", accelerators={"A10G"}).parameters == TGI_2023.parameters
    later = prior_for("tgi 2.0.4").parameters
    assert later.host_per_layer_s < 0.1 * TGI_2023.parameters.host_per_layer_s


def test_a_profile_is_left_out_of_the_judgement_of_its_own_levels_alone():
    """Other levels of the same model and machine were never seen by it."""
    rows = read_table(PUBLISHED / "jumpstart_concurrency.csv")
    own = next(row.cell for row in rows if row.cell is not None)
    known = {"models": {"llama-2-7b"}, "accelerators": {"A10G"}}
    assert prior_for("", **known, marks=marks_of([own])) is EAGER_GPU_PRIOR
    only_latency = replace(own, throughput_tokens_per_s=None)  # as another table states it
    assert prior_for("", **known, marks=marks_of([only_latency])) is EAGER_GPU_PRIOR
    other = replace(own, throughput_tokens_per_s=29.1, latency_p90_s_per_token=0.0347)
    assert prior_for("", **known, marks=marks_of([other])).parameters == TGI_2023.parameters


def test_before_anything_is_measured_an_interval_knows_that_set_ups_differ():
    """At least 10 % of a logarithm more: 1.2816 * 0.1 on each side."""
    fit = prior_fit(TGI_2023, [cell(8)])
    blind = estimates(fit, cell(8), METRICS)["throughput_tokens_per_s"]
    assert blind.high / blind.value > math.exp(1.2816 * 0.1)
    seen = fit_cells(TGI_2023, [replace(cell(8), throughput_tokens_per_s=blind.value)])
    told = estimates(seen, cell(8), METRICS)["throughput_tokens_per_s"]
    assert told.high / told.low < blind.high / blind.low


def test_a_first_token_s_interval_reaches_users_that_stay_in_step():
    """Ten prompts of 1,024 tokens, one after another or together: no load says which."""
    level = replace(cell(10, instance="ml.p4d.24xlarge", tp=1), input_tokens=1024)
    apart = replace(level, length_spread=0.1)
    together = predict_cell(VLLM_V0_PRIOR, level, smooth=True).ttft_mean_s
    said = estimates(prior_fit(VLLM_V0_PRIOR, [apart]), apart, WITH_TTFT)["ttft_mean_s"]
    assert said.value < 0.6 * together < together < said.high


@pytest.mark.parametrize("profile", [VLLM_0_12, VLLM_0_19])
def test_the_shipped_profiles_of_vllm_state_what_they_saw(profile):
    assert profile.chunked_prefill
    assert profile.accelerators == ("H100-SXM",)
    assert profile.parameters.host_per_layer_s < 0.1 * TGI_2023.parameters.host_per_layer_s


def test_four_ranks_beat_eight_on_a100_and_more_a10g_are_slower():
    """What was published for Llama 2 7B; the host's stretch and the PCIe bridge are why."""

    def tokens_per_s(users, instance, tp):
        plain = cell(users, instance=instance, tp=tp)
        return predict_cell(TGI_2023, plain).throughput_tokens_per_s

    assert tokens_per_s(256, "ml.p4d.24xlarge", 4) > tokens_per_s(256, "ml.p4d.24xlarge", 8)
    assert tokens_per_s(64, "ml.g5.12xlarge", 4) > tokens_per_s(64, "ml.g5.48xlarge", 8)


def test_an_open_loop_near_its_capacity_gets_the_capacity_and_no_latency():
    fit = prior_fit(TGI_2023, [cell(1)])
    lasting = replace(cell(rate=1.0), num_requests=10**6)
    full = capacity_tokens_per_s(TGI_2023, lasting) / 256
    calm, busy = (forecast(fit, cell(rate=share * full)) for share in (0.5, 0.97))
    assert calm.uncertainty.withheld is None
    assert calm.figures["tpot_ms"] is not None
    assert "97%" in busy.uncertainty.withheld
    assert busy.figures["tpot_ms"] is None
    assert busy.figures["ttft_ms"] is None
    assert busy.uncertainty.capacity_tokens_per_s.low < busy.uncertainty.capacity_tokens_per_s.high


def test_a_latency_near_capacity_is_given_where_it_was_calibrated_on():
    full = capacity_tokens_per_s(TGI_2023, cell(rate=1.0)) / 256
    known = [measured(TGI_2023, cell(rate=share * full)) for share in (0.3, 1.2)]
    fit = fit_cells(EAGER_GPU_PRIOR, known)
    assert forecast(fit, cell(rate=full)).figures["tpot_ms"] is not None


@pytest.mark.parametrize(("users", "limit", "expected"), [(400, 1024, "kv_memory"), (400, 32, "batch_limit")])
def test_what_keeps_users_waiting_is_named(users, limit, expected):
    profile = replace(TGI_2023, max_batch_size=limit)
    plain = cell(users)
    assert regime_of(profile, plain, predict_cell(profile, plain)) == expected


@pytest.mark.skipif(not os.environ.get("LMI_BENCH_TABLES"), reason="LMI_BENCH_TABLES names no folder of tables")
def test_six_cells_foretell_the_closed_loop_on_h100():
    rows = read_table(Path(os.environ["LMI_BENCH_TABLES"]) / "h100_vllm_closed_loop.csv")
    judged, _ = validated(rows, calibrate_cells=6)
    entries = {e.figure: e for e in accuracies(judged) if e.slice_name == "all"}
    assert entries["throughput_tokens_per_s"].median <= 0.06
    assert entries["tpot_ms"].median <= 0.06
    assert entries["ttft_ms"].median <= 0.20


def test_the_highest_rate_under_a_limit_is_the_highest_that_keeps_it(tmp_path):
    head = (
        "model,accelerator,tp,dtype,input_tokens,output_tokens,concurrency_or_rate,"
        "throughput_tokens_per_s,ttft_ms,itl_ms,engine\n"
    )
    line = "Llama 3.1 8B,H100,1,float16,512,256,rate={}/s,{},{},{},vllm\n"
    path = tmp_path / "open.csv"
    path.write_text(head + line.format(1, 255, 40, 7) + line.format(4, 1000, 60, 9) + line.format(9, 2e3, 70, 40))
    judged, _ = validated(read_table(path))
    (found,) = loads_under(judged, "tpot_ms", 20.0)
    assert found.measured == 4
    assert found.predicted in (4, 9)
    assert found.is_rate


def test_set_ups_with_other_prompt_workers_have_highest_loads_of_their_own():
    """Of one and two prompt workers, at 8 and 16 users; and with none, all the same otherwise."""
    setup = Setup(find_model("llama-3.1-8b"), find_instance("ml.p5.48xlarge"), 1, "float16")
    judged = [
        Judged(TableRow(1, "vllm", replace(level, load=Load(users))))
        for pool in (None, PrefillPool(setup, 1), PrefillPool(setup, 2))
        for level in [MeasuredLevel(setup, 512, 256, Load(1), 10, tpot_mean_s=0.01, prefill=pool)]
        for users in (8, 16)
    ]
    found = loads_under(judged, "tpot_ms", 20.0)
    assert [each.measured for each in found] == [16, 16, 16]


def test_a_level_that_was_measured_did_fit_whatever_the_memory_plan_says(tmp_path):
    """Llama 2 7B with 6,000 tokens is beyond its positions, and was measured all the same."""
    path = tmp_path / "long.csv"
    path.write_text(
        "model,instance,tp,input_tokens,output_tokens,concurrency,throughput_tokens_per_s\n"
        "Llama 2 7B,ml.p4d.24xlarge,8,5500,500,4,90\n"
    )
    judged, _ = validated(read_table(path))
    assert judged[0].to_json()["predicted_throughput_tokens_per_s"] > 0


def test_a_line_kept_out_of_fits_is_judged_and_never_calibrated_on():
    rows = [
        row
        for row in read_table(PUBLISHED / "jumpstart_concurrency.csv")
        if row.cell.setup.instance.instance_type == "ml.p4d.24xlarge" and row.cell.setup.tensor_parallel == 1
    ]
    kept_out = [row for row in rows if not row.fits]
    assert {row.cell.setup.shape.name for row in kept_out} == {"llama-2-13b"}
    for judged, _ in (validated(rows, calibrate_cells=100), validated(rows, calibrate_on=rows)):
        assert len(judged) == len(rows) == len(kept_out) + 9
        assert [row.row.number for row in judged if row.calibrated] == [row.number for row in rows if row.fits]


def test_the_cells_to_calibrate_on_are_so_many_in_all(tmp_path):
    """Two engines share eight; a line that repeats a chosen one is judged like any other."""
    lines = (PUBLISHED / "jumpstart_concurrency.csv").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "table.csv"
    heading = lines[0] + ",engine"
    body = [f"{line},{engine}" for line in lines[1:6] for engine in ("tgi 1", "tgi 1", "vllm 0.2")]
    path.write_text("\n".join([heading, *body]), encoding="utf-8")
    judged, _ = validated(read_table(path), calibrate_cells=8)
    assert sum(row.calibrated for row in judged) == 8
    assert {row.row.engine for row in judged if row.calibrated} == {"tgi 1", "vllm 0.2"}
    many, _ = validated(read_table(path), calibrate_cells=1000)
    assert all(row.calibrated for row in many)


def test_every_line_that_can_run_gets_every_figure_whatever_its_columns_lack(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(
        "remark,concurrency,model,output_tokens,instance,input_tokens,tp\n"
        "x,4,tiiuae/falcon-7b,256,ml.g5.12xlarge,256,4\n"  # 71 heads: refused as a plan
        "x,4,Llama 2 7B,1,ml.g5.2xlarge,256,1\n"
        "x,64,Mixtral 8x7B,400,p4d.24xlarge,3500,8\n"
        "x,4,Nobody 9B,256,ml.g5.2xlarge,256,1\n",
        encoding="utf-8",
    )
    judged, warnings = validated(read_table(path))
    contents = [
        {key: value for key, value in row.to_json().items() if not key.startswith("measured_")} for row in judged
    ]
    absent = [{key for key, value in content.items() if value is None} for content in contents[:3]]
    assert absent == [set(), {f"{end}_tpot_ms" for end in ("predicted", "low", "high")}, set()]
    assert contents[3]["predicted_tpot_ms"] is None
    assert len(warnings) == 1
    assert "Nobody 9B" in warnings[0]


def test_a_model_that_no_cell_was_of_is_a_slice_of_its_own(tmp_path):
    another = find_model("llama-2-13b")
    rows = read_table(PUBLISHED / "jumpstart_concurrency.csv")[:12]
    other = [
        replace(row, cell=replace(row.cell, setup=replace(row.cell.setup, shape=another)))
        for row in read_table(PUBLISHED / "jumpstart_concurrency.csv")[9:12]
    ]
    judged, _ = validated(other, calibrate_on=rows)
    assert {entry.rows for entry in accuracies(judged) if entry.slice_name == "other model"} == {3}


def test_calibration_cells_that_name_no_engine_are_of_the_table_s(tmp_path):
    rows = read_table(PUBLISHED / "jumpstart_concurrency.csv")[:12]
    named = [replace(row, engine="tgi 1.1") for row in rows]
    judged, warnings = validated(named, calibrate_on=rows[:8])
    assert sum(row.calibrated for row in judged) == 8
    assert any("name no engine" in text for text in warnings)


def test_an_open_loop_s_times_grow_faster_than_its_steps_the_nearer_its_capacity():
    """Little's law, B = rate * output * TPOT, and a step a + b * B: d ln TPOT = d ln a / (1 - u),
    u = b * rate * output, next to nothing at a light load."""
    near, far = (
        growth_with_step_times(VLLM_0_19, cell(rate=rate, instance="ml.p5.48xlarge", tp=1)) for rate in (14.0, 0.5)
    )
    assert far["tpot_mean_s"] == pytest.approx(1.0, abs=0.1)
    assert near["tpot_mean_s"] > 1.3
    assert abs(far["throughput_tokens_per_s"]) < 0.1


def test_few_cells_leave_wider_intervals_than_many():
    """Cells without any error: what is exact by luck is not told apart from what is."""
    plain = [cell(users) for users in (1, 2, 4, 8, 16, 32, 64)]
    exact = [measured(TGI_2023, each) for each in plain]
    few, many = fit_cells(EAGER_GPU_PRIOR, exact[:2]), fit_cells(EAGER_GPU_PRIOR, exact)
    assert few.scales.times > many.scales.times


def test_scattered_times_to_first_token_widen_their_own_intervals_alone():
    """Times that scatter by 60 %, decode steps without any error: two scales, not one."""
    plain = [cell(users) for users in (1, 2, 4, 8, 16, 32)]
    exact = [measured(TGI_2023, each) for each in plain]

    def with_ttft(factors):
        return [
            replace(each, ttft_mean_s=predict_cell(TGI_2023, each).ttft_mean_s * factor)
            for each, factor in zip(exact, factors, strict=True)
        ]

    calm = fit_cells(EAGER_GPU_PRIOR, with_ttft([1.0] * 6))
    wild = fit_cells(EAGER_GPU_PRIOR, with_ttft([1.6, 0.6, 1.6, 0.6, 1.6, 0.6]))
    widths = [{m: e.high / e.low for m, e in estimates(fit, cell(12), WITH_TTFT).items()} for fit in (calm, wild)]
    assert widths[1]["ttft_mean_s"] > 1.3 * widths[0]["ttft_mean_s"]
    assert widths[1]["tpot_mean_s"] < 1.15 * widths[0]["tpot_mean_s"]


def test_a_wait_for_room_in_the_cache_says_little_of_a_light_load():
    """A full cache whose waits are three times as long as planned, beside two exact light loads."""
    light = [cell(users, instance="ml.p4d.24xlarge", tp=1) for users in (1, 8)]
    full = cell(512, instance="ml.p4d.24xlarge", tp=1)
    known = [
        replace(measured(VLLM_0_12, each), ttft_mean_s=predict_cell(VLLM_0_12, each).ttft_mean_s * factor)
        for each, factor in zip([*light, full], (1.0, 1.0, 3.0), strict=True)
    ]
    without, with_full = fit_cells(GRAPH_GPU_PRIOR, known[:2]), fit_cells(GRAPH_GPU_PRIOR, known)
    wanted = cell(4, instance="ml.p4d.24xlarge", tp=1)
    plain, other = (estimates(fit, wanted, ("ttft_mean_s",))["ttft_mean_s"] for fit in (without, with_full))
    assert other.value == pytest.approx(plain.value, rel=0.1)
    assert other.high / other.low < 1.25 * plain.high / plain.low


def test_a_prompt_that_is_half_cached_leaves_room_for_more():
    plain = replace(cell(64), num_requests=10**6)
    cached = replace(plain, cached_tokens=128)
    assert capacity_tokens_per_s(TGI_2023, cached) > capacity_tokens_per_s(TGI_2023, plain)


def test_capacity_does_not_depend_on_the_load_that_is_asked_for():
    cells = [cell(rate=rate, instance="ml.p4d.24xlarge", tp=2) for rate in (0.2, 5.0)]
    fit = prior_fit(TGI_2023, cells)
    one, other = (forecast(fit, each).uncertainty.capacity_tokens_per_s for each in cells)
    assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))


@pytest.mark.parametrize("load", [Load(6), Load(rate_per_s=0.5)], ids=["users", "rate"])
@pytest.mark.parametrize("degree", [1, 4])
def test_parameters_without_effect_are_left_out_and_no_others(monkeypatch, load, degree):
    setup = Setup(find_model("llama-2-7b"), find_instance("ml.g5.12xlarge"), degree, "float16")
    one = MeasuredLevel(setup, input_tokens=200, output_tokens=50, load=load, num_requests=20)
    fit = prior_fit(VLLM_V0_PRIOR, [one])
    asked = (fit.profile, one, fit.names, ("throughput_tokens_per_s", "ttft_mean_s"))
    short = derivatives(*asked)
    asked_again = []
    monkeypatch.setattr(fit_module, "_same_times", lambda *_: asked_again.append(1))
    assert np.array_equal(short, derivatives(*asked))
    without = [name for name, column in zip(fit.names, short.T, strict=True) if not column.any()]
    assert asked_again
    assert ("pcie_latency_s" in without) == (degree == 1)
