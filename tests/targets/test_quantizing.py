"""What a person is told about quantized weights at the start."""

from __future__ import annotations

import pytest

from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.quantization import NOT_QUANTIZED, QuantizedBytes, Scheme
from lmi_bench.targets.quantizing import quantize_notes, quantize_settings


@pytest.mark.parametrize(
    ("scheme", "told"), [(Scheme.SMOOTHQUANT, True), (Scheme.FP8, True), (Scheme.INT8, False), (Scheme.AWQ_INT4, False)]
)
def test_schemes_that_round_activations_say_that_tokens_may_depend_on_the_batch(scheme, told):
    lines = quantize_notes(QuantizedBytes(scheme, held_bytes=1, float_bytes=2, kernels="a kernel"))
    assert any("greedy tokens may depend on chunks" in line for line in lines) == told


def test_details_of_a_scheme_quantize_nothing_without_one():
    """Weights that count as quantized are kept from the native step."""
    settings = EngineSection(smoothquant_alpha=0.3, smoothquant_per_token=False, calibration="a.txt")
    assert quantize_settings(settings) == NOT_QUANTIZED
