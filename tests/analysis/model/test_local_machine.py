"""This machine as an instance: measured, plausible, priced only by its owner."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.model.builtin_profiles import BUNDLED_CPU_PRIOR, TGI_2023
from lmi_bench.analysis.model.capacity import step_time_model_for
from lmi_bench.analysis.model.local_machine import probe_machine
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.step_shape import StepShape


@pytest.fixture(scope="module")
def local():
    return probe_machine().instance()


def test_the_measured_figures_are_those_of_a_computer(local):
    device = local.accelerator
    assert 1e8 < device.bandwidth_bytes_per_s < 1e13
    assert 1e8 < device.float32_flop_per_s < 1e15
    assert local.vcpus >= 1
    assert "measured on this machine" in device.source


def test_this_machine_has_no_price_unless_its_owner_states_one(local):
    assert local.price_usd_per_hour is None
    assert local.price_provenance is None


def test_the_bundled_engine_can_be_planned_on_it_and_a_gpu_engine_cannot(local):
    shape = find_model("demo-15m")
    step = StepShape(decode_sequences=1, decode_tokens=1, decode_context_tokens=10)
    for dtype in ("bfloat16", "float32"):
        model = step_time_model_for(Setup(shape, local, 1, dtype), BUNDLED_CPU_PRIOR)
        assert 0 < model.step_time_s(step) < 10
    with pytest.raises(InputError, match="does not run on local"):
        step_time_model_for(Setup(shape, local, 1, "float16"), TGI_2023)
