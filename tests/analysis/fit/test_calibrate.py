"""Calibration: finds the parameters of a known engine, and says what it could not find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.fit.calibrate import profile_of_fit
from lmi_bench.analysis.fit.fit import fit_cells
from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, TGI_2023
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import jumpstart_concurrency
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load


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
        EAGER_GPU_PRIOR.parameters,
        bandwidth_share=0.62,
        host_per_layer_s=0.6e-3,
        host_per_sequence_s=0.35e-3,
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
    return calibrate_profile(
        EAGER_GPU_PRIOR, CELLS, version="test", fitted_on="six cells", fitted_date="2026-11-21"
    )


@pytest.mark.parametrize(
    ("name", "rel"),
    [("bandwidth_share", 0.06), ("host_per_layer_s", 0.06), ("host_per_sequence_s", 0.15)],
)
def test_a_known_engine_is_found_from_six_cells(fitted, name, rel):
    """Short prompts hardly tell a sequence's bookkeeping from the preparation of its prompt."""
    assert getattr(fitted.parameters, name) == pytest.approx(
        getattr(TRUTH.parameters, name), rel=rel
    )


def test_unseen_cells_of_a_known_engine_are_predicted(fitted):
    for plain in (cell(4), cell(16), cell(32), cell(16, instance="ml.p4d.24xlarge")):
        truth = predict_cell(TRUTH, plain).throughput_tokens_per_s
        assert predict_cell(fitted, plain).throughput_tokens_per_s == pytest.approx(truth, rel=0.03)


def test_what_one_rank_cannot_tell_keeps_its_prior_and_is_named(fitted):
    """No cell has a second rank, so nothing is known of links and stretch."""
    unknown = (
        "host_stretch_per_rank",
        "nvlink_latency_s",
        "nvlink_share",
        "pcie_latency_s",
        "pcie_share",
    )
    for name in unknown:
        prior = getattr(EAGER_GPU_PRIOR.parameters, name)
        assert getattr(fitted.parameters, name) == pytest.approx(prior, rel=1e-3)
        assert fitted.log_sd[name] == pytest.approx(EAGER_GPU_PRIOR.log_sd[name], rel=1e-3)
        assert name in fitted.notes[0]
    assert "host_per_layer_s" not in fitted.notes[0]


def test_one_odd_cell_does_not_carry_the_fit_away(fitted):
    odd = replace(CELLS[1], throughput_tokens_per_s=CELLS[1].throughput_tokens_per_s * 2)
    disturbed = calibrate_profile(
        EAGER_GPU_PRIOR,
        [CELLS[0], odd, *CELLS[2:]],
        fitted_on="five cells and an odd one",
        fitted_date="2026-11-21",
    )
    assert disturbed.parameters.host_per_layer_s == pytest.approx(
        fitted.parameters.host_per_layer_s, rel=0.1
    )


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
    for row in jumpstart_concurrency():
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
        for metric, errors in (
            ("throughput_tokens_per_s", throughput),
            ("latency_p90_s_per_token", latency),
        ):
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
        for row in jumpstart_concurrency()
        if row.replicas == copies
    ]
    assert np.median(np.abs(errors)) <= 0.06
