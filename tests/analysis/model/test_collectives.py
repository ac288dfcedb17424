"""Two constants of an all-reduce: recovered where they are known, and used by the planner."""

from __future__ import annotations

import math

import pytest

from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.collectives import CollectiveFit, fit_all_reduce, with_all_reduce
from lmi_bench.analysis.model.step_time import StepTimeModel
from lmi_bench.catalog.accelerators import NO_LINK, Link, find_accelerator
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.step_shape import StepShape

SIZES = [2**n for n in range(10, 25, 2)]


def test_the_constants_of_exact_times_are_found():
    fit = fit_all_reduce(SIZES, [5e-6 + size / 3e9 for size in SIZES])
    assert fit.latency_s == pytest.approx(5e-6, rel=1e-6)
    assert fit.bytes_per_s == pytest.approx(3e9, rel=1e-6)
    assert fit.worst_error_frac < 1e-6


def test_errors_count_relative_to_the_time():
    """One size takes a tenth longer: no other may be off by more, however small its time."""
    times_s = [5e-6 + size / 3e9 for size in SIZES]
    times_s[-1] *= 1.1
    fit = fit_all_reduce(SIZES, times_s)
    assert fit.worst_error_frac < 0.1
    assert fit.time_s(SIZES[0]) == pytest.approx(times_s[0], rel=0.05)


def test_times_that_do_not_grow_have_no_rate_and_none_is_negative():
    fit = fit_all_reduce(SIZES, [1e-3 - size * 1e-12 for size in SIZES])
    assert fit.bytes_per_s == math.inf
    assert fit.latency_s == pytest.approx(1e-3, rel=0.02)


def test_one_size_is_not_enough():
    with pytest.raises(InputError, match="2 sizes"):
        fit_all_reduce([1024, 1024], [1e-5, 1.1e-5])


@pytest.mark.parametrize("link", [Link("pcie", 16e9), Link("nvlink", 300e9)])
def test_the_planner_predicts_the_measured_all_reduce(link):
    """Two a layer of Llama 2 7B, 32 layers; eight tokens of 4,096 two-byte features each."""
    measured = CollectiveFit(latency_s=20e-6, bytes_per_s=5e9, worst_error_frac=0.0)
    profile = with_all_reduce(TGI_2023, measured, link, 4)
    model = StepTimeModel(find_model("llama-2-7b"), find_accelerator("A100-40"), 4, link, profile)
    step = StepShape(decode_sequences=8, decode_tokens=8, decode_context_tokens=800)
    expected_s = 2 * 32 * (20e-6 + 8 * 4096 * 2 / 5e9)
    assert model.explain(step).all_reduce_s == pytest.approx(expected_s)


def test_a_link_without_a_rate_is_refused():
    with pytest.raises(InputError, match="rate of the none link"):
        with_all_reduce(TGI_2023, CollectiveFit(1e-5, 1e9, 0.0), NO_LINK, 2)
