"""Critical batch sizes and intensities against the figures that posts publish."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.model.memory import kv_bytes_per_token, weight_bytes
from lmi_bench.analysis.model.roofline import (
    critical_batch_size,
    critical_batch_size_without_cache,
    ops_per_byte,
)
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.models import find_model


@pytest.mark.parametrize(
    ("name", "published"), [("A10G", 116.7), ("A100-40", 200.6), ("A100-80", 153.0)]
)
def test_ops_per_byte_and_the_posts_critical_batch_agree_with_the_data_sheets(name, published):
    device = find_accelerator(name)
    flop, bandwidth = device.fp16_flop_per_s, device.bandwidth_bytes_per_s
    assert ops_per_byte(flop, bandwidth) == pytest.approx(published, abs=0.05)
    batch = critical_batch_size_without_cache(
        bytes_per_weight=2, flop_per_s=flop, bandwidth_bytes_per_s=bandwidth
    )
    assert batch == pytest.approx(published, abs=0.05)


def critical_llama(device_name, context):
    shape, device = find_model("llama-2-7b"), find_accelerator(device_name)
    return critical_batch_size(
        weight_bytes=weight_bytes(shape, "float16"),
        params_active=shape.params_active,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        flop_per_s=device.fp16_flop_per_s,
        mean_context_tokens=context,
        kv_bytes_per_token=kv_bytes_per_token(shape),
    )


@pytest.mark.parametrize(("name", "published"), [("A10G", 116.7), ("A100-40", 200.6)])
def test_without_context_the_general_formula_gives_the_posts_figure(name, published):
    assert critical_llama(name, 0) == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize("name", ["A10G", "A100-40", "A100-80", "H100-SXM"])
def test_llama_2_7b_at_384_tokens_never_turns_compute_bound(name):
    """A sequence reads 384 * 0.5 MiB = 201 MB and brings 13.5 GFLOP: 67 FLOP a byte."""
    assert critical_llama(name, 384) is None


def test_at_the_critical_batch_both_bounds_take_equally_long():
    shape, device = find_model("llama-3-8b"), find_accelerator("A100-40")
    common = {
        "weight_bytes": weight_bytes(shape, "float16"),
        "params_active": shape.params_active,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "flop_per_s": device.fp16_flop_per_s,
        "mean_context_tokens": 300.0,
        "kv_bytes_per_token": kv_bytes_per_token(shape),
    }
    batch = critical_batch_size(**common)
    read_bytes = common["weight_bytes"] + batch * 300 * common["kv_bytes_per_token"]
    memory_s = read_bytes / common["bandwidth_bytes_per_s"]
    assert memory_s == pytest.approx(2 * shape.params_active * batch / common["flop_per_s"])
