"""What a profile knows less of on other devices, mixtures and unknown links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fit.fit import fit_of_profile
from lmi_bench.analysis.fit.uncertainty import estimates
from lmi_bench.analysis.model.builtin_profiles import GRAPH_GPU_PRIOR, VLLM_0_12
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import carried
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load

DENSE, MIXTURE = find_model("llama-3.1-8b"), find_model("qwen3-30b-a3b")


def setup_of(device, shape=DENSE, degree=1):
    return Setup(shape, bare_machine(find_accelerator(device), degree), degree, "float16")


@pytest.mark.parametrize(
    ("setup", "widens"),
    [
        (setup_of("H100"), False),
        (setup_of("H200"), False),
        (setup_of("B200"), True),
        (setup_of("MI300X"), True),
        (setup_of("H100", MIXTURE), True),
    ],
)
def test_the_times_of_a_layer_are_doubted_on_other_kernels(setup, widens):
    """VLLM_0_12 was fitted to dense models on H100: H200 has its processor."""
    found = carried(VLLM_0_12, [setup]).log_sd
    for name in ("gap_per_layer_s", "host_per_layer_s"):
        assert (found[name] > VLLM_0_12.log_sd[name]) == widens
    assert found["bandwidth_share"] == VLLM_0_12.log_sd["bandwidth_share"]


def test_a_prior_that_was_fitted_to_nothing_stays_as_wide_as_it_is():
    assert carried(GRAPH_GPU_PRIOR, [setup_of("B200", MIXTURE)]) is GRAPH_GPU_PRIOR


def interval(profile, setup, metric="tpot_mean_s", prompt=200):
    cell = MeasuredLevel(setup, prompt, 200, load=Load(1), num_requests=10)
    found = estimates(fit_of_profile(profile, [cell]), cell, [metric])[metric]
    return found.high / found.low


def test_the_interval_shows_a_doubt_of_the_gap_and_of_an_unknown_link():
    """One user on 8 PCIe devices: the same machine, with the link stated and unknown."""
    known = setup_of("H100")
    widest = replace(VLLM_0_12, accelerators=("A100-40",))
    assert interval(widest, known) > 1.05 * interval(VLLM_0_12, known)
    machine = find_instance("ml.g6e.48xlarge")
    assert machine.link.is_shared is None
    unknown = Setup(find_model("llama-3.1-70b"), machine, 8, "float16")
    stated = replace(unknown, instance=replace(machine, link=replace(machine.link, is_shared=False)))
    ttft = ("ttft_mean_s", 2000)
    assert interval(VLLM_0_12, unknown, *ttft) > 1.5 * interval(VLLM_0_12, stated, *ttft)
