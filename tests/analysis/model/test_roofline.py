"""Critical batch sizes and intensities against the figures that posts publish."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.model.memory import kv_bytes_per_token, weight_bytes
from lmi_bench.analysis.model.roofline import Roofline
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.models import find_model


@pytest.mark.parametrize(("name", "published"), [("A10G", 116.7), ("A100-40", 200.6), ("A100-80", 153.0)])
def test_ops_per_byte_and_the_posts_critical_batch_agree_with_the_data_sheets(name, published):
    device = find_accelerator(name)
    flop, bandwidth = device.float16_flop_per_s, device.bandwidth_bytes_per_s
    one_weight = Roofline(flop, bandwidth, weight_bytes=2, sequence_bytes=0, flop_per_token=2)
    assert one_weight.ops_per_byte == pytest.approx(published, abs=0.05)
    assert one_weight.critical_batch == pytest.approx(published, abs=0.05)


def roofline(model, device_name, context):
    shape, device = find_model(model), find_accelerator(device_name)
    return Roofline(
        device.float16_flop_per_s,
        device.bandwidth_bytes_per_s,
        weight_bytes=weight_bytes(shape, "float16"),
        sequence_bytes=context * kv_bytes_per_token(shape),
        flop_per_token=2 * shape.params_active,
    )


@pytest.mark.parametrize(("name", "published"), [("A10G", 116.7), ("A100-40", 200.6)])
def test_without_context_the_general_formula_gives_the_posts_figure(name, published):
    found = roofline("llama-2-7b", name, 0).critical_batch
    assert found == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize("name", ["A10G", "A100-40", "A100-80", "H100-SXM"])
def test_llama_2_7b_at_384_tokens_never_turns_compute_bound(name):
    """A sequence reads 384 * 0.5 MiB = 201 MB and brings 13.5 GFLOP: 67 FLOP a byte."""
    assert roofline("llama-2-7b", name, 384).critical_batch is None


def test_at_the_critical_batch_both_bounds_take_equally_long():
    roof = roofline("llama-3-8b", "A100-40", 300)
    batch = roof.critical_batch
    memory_s = (roof.weight_bytes + batch * roof.sequence_bytes) / roof.bandwidth_bytes_per_s
    assert memory_s == pytest.approx(roof.flop_per_token * batch / roof.peak_flop_per_s)
