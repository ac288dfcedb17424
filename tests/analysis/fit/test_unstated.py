"""Whether users stayed in step, and what format the cache had, told by a few measured levels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fit.uncertainty import estimates
from lmi_bench.analysis.fit.unstated import as_fitted, fit_unstated
from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.model.builtin_profiles import GRAPH_GPU_PRIOR, VLLM_V0_PRIOR
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load


def level(users, spread, *, input_tokens=1024):
    return MeasuredLevel(
        Setup(find_model("llama-3-8b"), find_instance("ml.p4d.24xlarge"), 1, "float16"),
        input_tokens=input_tokens,
        output_tokens=128,
        load=Load(users),
        num_requests=10 * users,
        length_spread=spread,
    )


def measured(profile, cell, truth):
    """The cell with the figures of a server whose answers spread by `truth`."""
    found = predict_cell(profile, replace(cell, length_spread=truth))
    return replace(
        cell,
        throughput_tokens_per_s=found.throughput_tokens_per_s,
        ttft_mean_s=found.ttft_mean_s,
        tpot_mean_s=found.tpot_mean_s,
    )


@pytest.mark.parametrize("truth", [0.0, 0.1])
@pytest.mark.parametrize("base", [VLLM_V0_PRIOR, GRAPH_GPU_PRIOR], ids=["pausing", "chunked"])
def test_four_levels_tell_whether_the_answers_had_one_length(base, truth):
    server = replace(base, parameters=replace(base.parameters, bandwidth_share=0.8))
    known = [measured(server, level(users, 0.1), truth) for users in (1, 4, 10, 32)]
    fit = fit_unstated(base, known)
    other = as_fitted(fit, level(20, 0.1))
    assert other.length_spread == truth
    wanted = predict_cell(server, level(20, truth)).ttft_mean_s
    assert estimates(fit, other, ["ttft_mean_s"])["ttft_mean_s"].value == pytest.approx(wanted, rel=0.25)


def test_a_full_cache_tells_that_it_holds_eight_bits():
    """Llama 3.1 70B in FP8 on two H100, 5,500 tokens a user: of 16 bits 1.8 GB, of 8 half that."""

    def cell(users, kv_dtype=None):
        shape, machine = find_model("llama-3.1-70b"), find_instance("ml.p5.48xlarge")
        return replace(
            level(users, 0.1, input_tokens=5000),
            setup=Setup(shape, machine, 2, "float8", kv_dtype=kv_dtype),
            output_tokens=500,
            num_requests=3 * users,
        )

    for truth in ("float8", None):
        known = [
            replace(measured(GRAPH_GPU_PRIOR, cell(users, truth), 0.1), setup=cell(users).setup)
            for users in (1, 25, 150)
        ]
        fit = fit_unstated(GRAPH_GPU_PRIOR, known)
        assert as_fitted(fit, cell(100)).setup.kv_dtype == truth


def test_levels_without_a_time_to_first_token_tell_nothing():
    base = GRAPH_GPU_PRIOR
    known = [replace(measured(base, level(8, 0.1), 0.0), ttft_mean_s=None)]
    assert fit_unstated(base, known).cells == tuple(known)


def test_an_open_loop_keeps_what_it_was():
    base = GRAPH_GPU_PRIOR
    fit = fit_unstated(base, [measured(base, level(8, 0.1), 0.0)])
    rate = replace(level(8, 0.1), load=Load(rate_per_s=1.0))
    assert as_fitted(fit, rate) is rate
