"""A run folder's levels become cells, and the profile fitted to them explains the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.fit.fit import fit_cells
from lmi_bench.analysis.fit.from_run import (
    PlacedRun,
    calibrate_on_runs,
    calibrated_levels,
    cells_from_run,
    profile_of_fit,
    run_dtype,
    run_model,
)
from lmi_bench.analysis.fleet.measured_load import loads_from_run
from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.level.layouts import Layout, Workload
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, TGI_2023
from lmi_bench.analysis.model.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import jumpstart_cells
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import GENERATOR_LIMITED, UnplannedLengths
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.steadiness import SpeedStep
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from tests.levels import level_of

SHAPE, INSTANCE = find_model("llama-2-7b"), find_instance("ml.g5.2xlarge")


def sweep_of(profile, levels=(1, 4, 16, 40), **changes):
    """What a sweep of an engine of that profile leaves behind."""
    config = scheduler_config_for(Setup(SHAPE, INSTANCE, 1, "float16"), profile, 512)
    model = step_time_model_for(Setup(SHAPE, INSTANCE, 1, "float16"), profile)
    lines = [
        summarise_level(
            simulate_level(
                LevelSpec(index, Load(concurrency=users), num_requests=3 * users),
                lambda i: PlannedRequest(i, 0.0, 256, 256),
                config,
                model,
            )
        )
        for index, users in enumerate(levels)
    ]
    workload = {"input_tokens": 256, "output_tokens": 256, "mix": [], "dataset": None}
    content = {
        "created_at": "2026-11-21T11:00:00+00:00",
        "scenario": {"workload": workload | changes, "engine": {"dtype": "float16", "tensor_parallel": 1}},
        "target": {
            "kind": "simulated",
            "scheduler": {
                "num_blocks": config.num_blocks,
                "block_size": config.block_size,
                "kv_layout": config.kv_layout.value,
                "max_rolling_batch_size": config.max_rolling_batch_size,
                "max_rolling_batch_prefill_tokens": config.max_rolling_batch_prefill_tokens,
                "chunked_prefill": config.chunked_prefill,
            },
        },
    }
    return Run(Path("runs/first"), Manifest.from_json(content), lines, [() for _ in lines], None)


def stating(run, **changes):
    """The run with other values in the sections of its manifest."""
    content = run.manifest.to_json()
    return replace(run, manifest=Manifest.from_json(content | changes))


def placed(run):
    return PlacedRun(run, INSTANCE)


def test_every_clean_level_becomes_a_cell_with_what_was_measured():
    run = sweep_of(TGI_2023)
    cells = cells_from_run(placed(run), SHAPE)
    assert [cell.concurrency for cell in cells] == [1, 4, 16, 40]
    assert [cell.num_requests for cell in cells] == [3, 12, 48, 120]
    assert cells[0].throughput_tokens_per_s == run.levels[0].throughput_tokens_per_s
    assert cells[0].ttft_mean_s == pytest.approx(run.levels[0].of("ttft").mean / 1e3)
    assert cells[0].max_sequences == 28
    assert run_dtype(run) == "float16"


def test_an_open_loop_becomes_a_cell_with_the_times_its_requests_were_due():
    run = sweep_of(TGI_2023, levels=(4,))
    due = [0.0, 0.4, 1.1]
    records = tuple(RequestRecord(i, at, Exchange(at, (at + 1,))) for i, at in enumerate(due))
    line = replace(run.levels[0], load=Load(rate_per_s=2.5), requests=3)
    (cell,) = cells_from_run(placed(replace(run, levels=[line], records=[records], manifest=run.manifest)), SHAPE)
    assert (cell.rate_per_s, cell.concurrency) == (2.5, 0)
    assert cell.arrivals_s == tuple(due)


def test_the_engines_cache_format_is_the_cells():
    run = sweep_of(TGI_2023, levels=(4,))
    (cell,) = cells_from_run(placed(stating(run, target={"kv_dtype": "float32"})), SHAPE)
    assert cell.setup.kv_dtype == "float32"


def poisson_run(**changes):
    """One open level of 60 requests on two copies, by hand."""
    closed = sweep_of(TGI_2023, levels=(1,), **changes)
    records = tuple(
        RequestRecord(i, i * 1.0, Exchange(i * 1.0, (i + 2.5, i + 2.6)), input_tokens=256) for i in range(60)
    )
    line = level_of(rate_per_s=4.0)
    manifest = replace(closed.manifest, target=replace(closed.manifest.target, replicas=2))
    return Run(Path("runs/open"), manifest, [line], [records], None)


WORKLOAD = Workload(SHAPE, "float16", 256, 256)


def test_a_level_of_poisson_arrivals_is_a_load_of_one_copy_without_its_ramp():
    """4 req/s over two copies; the first answer ends at 2.6 s, so the first three are the ramp."""
    (load,) = loads_from_run(PlacedRun(poisson_run(), INSTANCE), WORKLOAD)
    assert load.rate_per_s == 2.0
    assert load.copy_key == Layout(INSTANCE, 1).copy_key
    assert [record.request_id for record in load.records] == list(range(3, 60))
    assert not load.cut_short


def test_an_attempt_that_was_not_steady_is_no_load_beside_one_that_was():
    run, step = poisson_run(), SpeedStep(at_s=1.0, change=0.3)
    run.levels.insert(0, replace(run.levels[0], speed_step=step))
    run.records.insert(0, run.records[0][:9])
    (load,) = loads_from_run(PlacedRun(run, INSTANCE), WORKLOAD)
    assert len(load.records) == 57


def test_levels_that_say_nothing_of_the_planned_load_are_no_loads():
    other_lengths = Workload(SHAPE, "float16", 512, 256)
    assert loads_from_run(PlacedRun(poisson_run(), INSTANCE), other_lengths) == []
    scenario = {"workload": {"input_tokens": 256, "output_tokens": 256}}
    constant = stating(poisson_run(), scenario=scenario | {"load": {"arrivals": "constant"}})
    assert loads_from_run(PlacedRun(constant, INSTANCE), WORKLOAD) == []
    late = poisson_run()
    late.levels[0] = replace(late.levels[0], valid=False)  # the generator fell behind
    assert loads_from_run(PlacedRun(late, INSTANCE), WORKLOAD) == []
    assert loads_from_run(PlacedRun(sweep_of(TGI_2023), INSTANCE), WORKLOAD) == []


def test_levels_that_missed_failed_or_stopped_are_left_out():
    run = sweep_of(TGI_2023)
    run.levels[1] = replace(run.levels[1], valid=False)
    run.levels[2] = replace(run.levels[2], errors=1)
    run.levels[3] = replace(run.levels[3], stopped_by="timeout")
    assert [cell.concurrency for cell in cells_from_run(placed(run), SHAPE)] == [1]
    assert calibrated_levels([run]) == (
        "calibrating on 1 measured level(s); left out: concurrency 4: invalid; concurrency 16: "
        "1 failed request; concurrency 40: ended early by: timeout"
    )
    run.levels[0] = replace(run.levels[0], valid=False)
    with pytest.raises(InputError, match="no level can be calibrated on"):
        cells_from_run(placed(run), SHAPE)


def test_an_attempt_that_was_not_steady_is_no_cell_beside_one_that_was():
    run = sweep_of(TGI_2023, levels=(4, 4))
    step = SpeedStep(at_s=1.0, change=0.3)
    levels = [replace(run.levels[0], speed_step=step), replace(run.levels[1], attempt=2)]
    again = replace(run, levels=levels)
    steady, alone = (replace(run, levels=[line], records=[()]) for line in reversed(levels))
    assert cells_from_run(placed(again), SHAPE) == cells_from_run(placed(steady), SHAPE)
    assert len(cells_from_run(placed(again), SHAPE)) == 1
    assert calibrated_levels([again]) == "calibrating on 1 measured level(s)"
    assert len(cells_from_run(placed(alone), SHAPE)) == 1


def test_a_level_whose_first_tokens_alone_are_unsure_keeps_its_other_figures():
    run = sweep_of(TGI_2023, levels=(1,))
    sure = cells_from_run(placed(run), SHAPE)[0]
    run.levels[0] = replace(run.levels[0], valid=False, invalid_reason=f"{GENERATOR_LIMITED}: TTFT mean 5% too long")
    assert cells_from_run(placed(run), SHAPE) == [replace(sure, ttft_mean_s=None)]
    assert calibrated_levels([run]) == "calibrating on 1 measured level(s)"


@pytest.mark.parametrize(
    "changes", [{"dataset": "prompts.jsonl"}, {"mix": [{"input_tokens": 20, "output_tokens": 500}]}]
)
def test_unequal_requests_are_refused(changes):
    with pytest.raises(InputError, match="differ in length"):
        cells_from_run(placed(sweep_of(TGI_2023, **changes)), SHAPE)


def test_a_profile_fitted_to_a_sweep_explains_it():
    truth = replace(
        EAGER_GPU_PRIOR, parameters=replace(EAGER_GPU_PRIOR.parameters, bandwidth_share=0.6, host_per_sequence_s=0.4e-3)
    )
    profile, accuracy = calibrate_on_runs(EAGER_GPU_PRIOR, [PlacedRun(sweep_of(truth), INSTANCE)], SHAPE)
    for name in ("bandwidth_share", "host_per_sequence_s"):
        found, true = getattr(profile.parameters, name), getattr(truth.parameters, name)
        assert abs(np.log(found / true)) <= 2 * profile.log_sd[name]
    assert "4 levels of llama-2-7b on ml.g5.2xlarge (first)" in profile.provenance
    assert [level.concurrency for level in accuracy] == [1, 4, 16, 40]
    for level in accuracy:
        pair = level.figures["throughput_tokens_per_s"]
        assert pair.predicted == pytest.approx(pair.measured, rel=0.03)


@pytest.mark.parametrize(
    "drawn",
    [
        {"input_lengths": "uniform(100,900)"},
        {"output_lengths": "uniform(1,500)"},
        {"trace": "azure.csv"},
        {"turns": "4"},
        {"conversations": "sharegpt.jsonl"},
    ],
)
def test_requests_of_drawn_lengths_are_no_cells_of_the_default_ones(drawn):
    """Such a scenario still states 256 in and 256 out, which none of its requests has."""
    run = sweep_of(TGI_2023, levels=(1,), **drawn)
    with pytest.raises(InputError, match=f"differ in length \\({next(iter(drawn))}\\)"):
        cells_from_run(placed(run), SHAPE)


def test_answers_shorter_than_asked_count_as_long_as_they_were():
    """A server that forces no length: 128 of the 256 tokens asked for, on average."""
    run = sweep_of(TGI_2023, levels=(4,))
    shorter = UnplannedLengths(12, asked_tokens_mean=256.0, output_tokens_mean=128.2)
    run.levels[0] = replace(run.levels[0], unplanned_lengths=shorter)
    (cell,) = cells_from_run(placed(run), SHAPE)
    assert (cell.input_tokens, cell.output_tokens) == (256, 128)


@pytest.mark.parametrize(("asked", "degree"), [("max", 1), (4, 4), (None, 1)])
def test_the_degree_of_an_endpoint_is_the_number_that_was_asked_for(asked, degree):
    """`--tp max` is all devices of the engine, which an endpoint's run does not state."""
    run = stating(
        sweep_of(TGI_2023, levels=(1,)), scenario={"engine": {"tensor_parallel": asked}}, target={"kind": "http"}
    )
    assert PlacedRun(run, INSTANCE).degree == degree


def test_the_servers_name_of_its_model_says_the_format():
    run = sweep_of(TGI_2023, levels=(1,))
    served = {"kind": "http", "model": "TheBloke/Llama-2-7B-Chat-AWQ"}
    run = stating(run, scenario={}, target=served)
    assert run_dtype(run) == "int4"
    assert run_model(run) == "TheBloke/Llama-2-7B-Chat-AWQ"
    own_name = stating(run, target={"kind": "http", "model": "prod"})  # says nothing of the format
    assert run_dtype(own_name) == "float16"


def calibrate_profile(base, cells, **about):
    return profile_of_fit(fit_cells(base, cells), **about)


def cell(concurrency, *, instance="ml.g5.2xlarge", tp=1, input_tokens=256, replicas=1, **measured):
    return MeasuredLevel(
        Setup(find_model("llama-2-7b"), find_instance(instance), tp, "float16"),
        input_tokens=input_tokens,
        output_tokens=256,
        load=Load(concurrency),
        num_requests=3 * concurrency,
        replicas=replicas,
        **measured,
    )


def measured_by(profile, plain):
    """The cell as an engine of that profile would measure it."""
    predicted = predict_cell(profile, plain)
    return replace(
        plain,
        throughput_tokens_per_s=predicted.throughput_tokens_per_s,
        latency_p90_s_per_token=predicted.latency_p90_s_per_token,
    )


TRUTH = replace(
    EAGER_GPU_PRIOR,
    parameters=replace(
        EAGER_GPU_PRIOR.parameters, bandwidth_share=0.62, host_per_layer_s=0.6e-3, host_per_sequence_s=0.35e-3
    ),
)
# On A10G a step of one sequence is bound by reads; on A100 by the host.
CELLS = [
    measured_by(TRUTH, plain)
    for plain in (
        cell(1),
        cell(8),
        cell(24),
        cell(1, instance="ml.p4d.24xlarge"),
        cell(64, instance="ml.p4d.24xlarge"),
        cell(4, input_tokens=1500),
    )
]


@pytest.fixture(scope="module")
def fitted():
    return calibrate_profile(EAGER_GPU_PRIOR, CELLS, version="test", fitted_on="six cells", fitted_date="2026-11-21")


@pytest.mark.parametrize(
    ("name", "rel"), [("bandwidth_share", 0.06), ("host_per_layer_s", 0.06), ("host_per_sequence_s", 0.15)]
)
def test_a_known_engine_is_found_from_six_cells(fitted, name, rel):
    """Short prompts hardly tell a sequence's bookkeeping from the preparation of its prompt."""
    assert getattr(fitted.parameters, name) == pytest.approx(getattr(TRUTH.parameters, name), rel=rel)


def test_unseen_cells_of_a_known_engine_are_predicted(fitted):
    for plain in (cell(4), cell(16), cell(32), cell(16, instance="ml.p4d.24xlarge")):
        truth = predict_cell(TRUTH, plain).throughput_tokens_per_s
        assert predict_cell(fitted, plain).throughput_tokens_per_s == pytest.approx(truth, rel=0.03)


def test_what_one_rank_cannot_tell_keeps_its_prior_and_is_named(fitted):
    """No cell has a second rank, so nothing is known of links and stretch."""
    unknown = ("host_stretch_per_rank", "nvlink_latency_s", "nvlink_share", "pcie_latency_s", "pcie_share")
    for name in unknown:
        prior = getattr(EAGER_GPU_PRIOR.parameters, name)
        assert getattr(fitted.parameters, name) == pytest.approx(prior, rel=1e-3)
        assert fitted.log_sd[name] == pytest.approx(EAGER_GPU_PRIOR.log_sd[name], rel=1e-3)
        assert name in fitted.notes[0]
    assert "host_per_layer_s" not in fitted.notes[0]


def test_one_odd_cell_does_not_carry_the_fit_away(fitted):
    odd = replace(CELLS[1], throughput_tokens_per_s=CELLS[1].throughput_tokens_per_s * 2)
    disturbed = calibrate_profile(
        EAGER_GPU_PRIOR, [CELLS[0], odd, *CELLS[2:]], fitted_on="five cells and an odd one", fitted_date="2026-11-21"
    )
    assert disturbed.parameters.host_per_layer_s == pytest.approx(fitted.parameters.host_per_layer_s, rel=0.1)


def test_the_profile_names_what_it_was_fitted_on(fitted):
    assert fitted.accelerators == ("A10G", "A100-40")
    assert "six cells" in fitted.provenance


def test_calibration_without_a_measured_figure_is_refused():
    with pytest.raises(InputError, match="at least one measured cell"):
        calibrate_profile(EAGER_GPU_PRIOR, [cell(1)], fitted_on="", fitted_date="")


def test_copies_share_the_users_evenly():
    """Two copies with 8 users each work off 16 users' requests like one copy with 8."""
    two = predict_cell(TGI_2023, cell(16, replicas=2))
    one = predict_cell(TGI_2023, cell(8))
    assert two.throughput_tokens_per_s == pytest.approx(2 * one.throughput_tokens_per_s)
    assert two.latency_p90_s_per_token == pytest.approx(one.latency_p90_s_per_token)


def test_the_shipped_profile_predicts_the_published_sweeps():
    """All published levels of one copy: median error within 5 % in tok/s, 7 % in ms/token."""
    throughput, latency = [], []
    for row in jumpstart_cells("concurrency"):
        if row.replicas > 1 or row.model != "Llama 2 7B":
            continue
        level = cell(
            row.concurrency,
            instance=row.instance_type,
            tp=row.tensor_parallel,
            throughput_tokens_per_s=row.throughput_tokens_per_s,
            latency_p90_s_per_token=row.latency_s_per_token,
            latency_rounded_down_s=1e-3,
        )
        found = predict_cell(TGI_2023, level)
        for metric, errors in (("throughput_tokens_per_s", throughput), ("latency_p90_s_per_token", latency)):
            errors.append(abs(found.value(metric) / level.measured(metric) - 1))
    assert np.median(throughput) <= 0.05
    assert np.quantile(throughput, 0.9) <= 0.15
    assert np.median(latency) <= 0.07


@pytest.mark.parametrize("copies", [2, 3])
def test_the_shipped_profile_predicts_several_instances_that_it_has_not_seen(copies):
    errors = [
        predict_cell(TGI_2023, cell(row.concurrency, replicas=row.replicas)).throughput_tokens_per_s
        / row.throughput_tokens_per_s
        - 1
        for row in jumpstart_cells("concurrency")
        if row.replicas == copies
    ]
    assert np.median(np.abs(errors)) <= 0.06
