"""A profile fitted on this machine: a file that predicts as the fit did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fit.fit import fit_cells, fit_of_profile
from lmi_bench.analysis.fit.from_run import profile_of_fit
from lmi_bench.analysis.fit.uncertainty import estimates
from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.model.builtin_profiles import BUNDLED_CPU_PRIOR, SERVED_CPU_PRIOR
from lmi_bench.analysis.model.local_machine import MeasuredMachine
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import profile_from_json, profile_to_json
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.model.step_time import StepTimeModel
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.engine.scheduling.step_shape import StepShape

MACHINE = MeasuredMachine(2, 8 * 2**30, 12e9, 150e9, "2026-11-21")
HERE = MACHINE.instance()
MODEL = find_model("demo-110m")


def cell(users, isl=128, osl=64, *, rate=None, **more):
    requests = 40 if rate else 3 * users
    return MeasuredLevel(
        Setup(MODEL, HERE, 1, "float32"),
        input_tokens=isl,
        output_tokens=osl,
        load=Load(users or None, rate),
        num_requests=requests,
        **more,
    )


TRUTH = replace(
    SERVED_CPU_PRIOR,
    parameters=replace(
        SERVED_CPU_PRIOR.parameters,
        bandwidth_share=0.8,
        compute_share=0.6,
        host_per_sequence_s=0.6e-3,
        unhidden_share=0.8,
    ),
)


def measured(plain):
    seen = predict_cell(TRUTH, plain)
    return replace(
        plain,
        throughput_tokens_per_s=seen.throughput_tokens_per_s,
        ttft_mean_s=seen.ttft_mean_s,
        tpot_mean_s=seen.tpot_mean_s,
    )


@pytest.fixture(scope="module")
def fitted():
    known = (cell(1), cell(4), cell(16), cell(1, 512, 48), cell(8, 512, 48), cell(32, 32, 96))
    return fit_cells(SERVED_CPU_PRIOR, [measured(each) for each in known])


@pytest.fixture(scope="module")
def profile(fitted):
    made = profile_of_fit(fitted, fitted_on="six levels", fitted_date="2026-11-21", keep_levels=True)
    return replace(made, machine=MACHINE)


@pytest.mark.parametrize("unseen", [cell(2), cell(8), cell(12, 256, 96), cell(24, 64, 128), cell(0, rate=0.9)])
def test_a_server_on_a_processor_is_predicted_from_six_levels(fitted, unseen):
    said = estimates(fitted, unseen, ["throughput_tokens_per_s", "tpot_mean_s"])
    truth = predict_cell(TRUTH, unseen)
    for metric, figure in said.items():
        assert figure.value == pytest.approx(truth.value(metric), rel=0.04)
        assert figure.low < truth.value(metric) < figure.high


def test_the_file_predicts_as_the_fit_did(fitted, profile):
    """Levels, scale and machine are in it, so that measured neighbours go on correcting."""
    again = profile_from_json(profile_to_json(profile))
    assert again.machine == MACHINE
    assert fit_of_profile(again, [cell(8)]).cells == fitted.cells
    for unseen in (cell(8), cell(3, 300, 20)):
        metrics = ["throughput_tokens_per_s", "tpot_mean_s", "ttft_mean_s"]
        before = estimates(fitted, unseen, metrics)
        after = estimates(fit_of_profile(again, [unseen]), unseen, metrics)
        for metric in metrics:
            assert after[metric].value == pytest.approx(before[metric].value, rel=1e-9)
            assert after[metric].high == pytest.approx(before[metric].high, rel=1e-3)


def test_levels_of_this_machine_need_its_figures(profile):
    with pytest.raises(InputError, match="no figures of that machine"):
        profile_from_json(profile_to_json(replace(profile, machine=None)))


def test_a_machine_without_bandwidth_is_none():
    with pytest.raises(InputError, match="bandwidth_bytes_per_s must be above 0"):
        replace(MACHINE, bandwidth_bytes_per_s=0.0)


def step_s(step, **changes):
    parameters = replace(
        BUNDLED_CPU_PRIOR.parameters,
        gap_per_layer_s=0.0,
        host_per_sequence_s=0.0,
        host_per_prompt_token_s=0.0,
        **changes,
    )
    profile = replace(BUNDLED_CPU_PRIOR, parameters=parameters)
    model = StepTimeModel(Setup(MODEL, HERE, 1, "float32"), profile)
    parts = model.explain(step)
    assert model.step_time_s(step) == pytest.approx(parts.total_s, rel=1e-12)
    return parts


ROWS = StepShape(decode_sequences=4, decode_tokens=4, decode_context_tokens=4)
LONE = StepShape(decode_sequences=1, decode_tokens=1, decode_context_tokens=1)


def test_what_reading_does_not_hide_adds_to_the_step():
    hidden = step_s(ROWS, unhidden_share=0.0, rows_read_share=1.0)
    added = step_s(ROWS, unhidden_share=0.5, rows_read_share=1.0)
    whole = step_s(ROWS, unhidden_share=1.0, rows_read_share=1.0)
    assert whole.total_s == pytest.approx(whole.weights_s + whole.kv_s + whole.compute_s)
    assert added.total_s == pytest.approx((hidden.total_s + whole.total_s) / 2)


def test_several_rows_read_weights_slower_than_one():
    for step, factor in ((LONE, 1.0), (ROWS, 1 / 0.8)):
        plain, packed = (step_s(step, unhidden_share=0.0, rows_read_share=share) for share in (1.0, 0.8))
        assert packed.weights_s == pytest.approx(plain.weights_s * factor)


def test_attention_has_a_rate_of_its_own():
    """512 causal tokens: 512 * 513 / 2 pairs, 4 FLOP each in 12 layers of 12 heads of 64."""
    prompt = StepShape(prefill_sequences=1, prefill_tokens=512, prefill_context_pairs=512 * 513 // 2)
    fast, slow = (step_s(prompt, unhidden_share=0.0, attention_share=s) for s in (1.0, 0.25))
    rate = 150e9 * BUNDLED_CPU_PRIOR.parameters.compute_share
    pairs_s = 512 * 513 / 2 * 4 * 12 * 12 * 64 / rate
    assert slow.compute_s - fast.compute_s == pytest.approx(3 * pairs_s)
