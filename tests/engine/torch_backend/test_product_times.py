"""The products of a step, apart from the rest of it."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.measure import product_time_s
from lmi_bench.engine.torch_backend.models.decoder import AttentionBlock, Layer
from lmi_bench.report.optimization import STAGES, VariantMemory, VariantQuality, VariantResult, optimization_tables
from tests.engine.torch_backend.test_runner import Steps


class Counted:
    """Stands for a matrix, or an MLP, and notes the sizes that it is given."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.given: list[tuple[int, ...]] = []

    def __call__(self, x):
        self.given.append(tuple(x.shape))
        return self.inner(x)

    def add(self, x, residual):
        self.given.append(tuple(x.shape))
        return self.inner.add(x, residual)


def test_every_product_of_a_layer_is_run_once_a_round(make_llama):
    """Four heads of 16 features, two of them with keys; a round to warm up and three to time."""
    steps = Steps(make_llama(num_key_value_heads=2).folder)
    model = steps.executor._ranks.forwards.eager.model
    layer = model.layers[0]
    counted = [Counted(layer.attention.qkv), Counted(layer.attention.out), Counted(layer.mlp)]
    block = AttentionBlock(4, 2, counted[0], counted[1])
    model.layers = [Layer(layer.attention_norm, block, layer.mlp_norm, counted[2])]
    assert product_time_s(model, 3) > 0
    asyncio.run(steps.executor.close())
    assert [each.given for each in counted] == [[(3, 64)] * 4] * 3


@pytest.mark.parametrize("family", ["Falcon", "Mixtral"])
def test_products_of_every_kind_are_timed_quantized_too(make_model, family):
    steps = Steps(make_model(family).folder, quantize=QuantizeSettings(Scheme.INT8))
    try:
        assert asyncio.run(steps.executor.time_products(2)) > 0
    finally:
        asyncio.run(steps.executor.close())


def result(name, ms, *, emulated=False):
    return VariantResult(
        name=name,
        engine={},
        quality=VariantQuality(2.0, 1, 1.0, 0.0, None, {}),
        memory=VariantMemory(1, 1.0, 1),
        products_ms=ms,
        kernels=None,
        emulated=emulated,
        levels=(),
        throughput_ratios={},
        usd_per_1m_output=None,
        job=dict.fromkeys(STAGES, 1.0),
        saved=None,
    )


def test_the_table_sets_products_against_the_baselines_and_leaves_out_the_emulated():
    results = [
        result("baseline", {"1": 2.0, "8": 4.0}),
        result("int3", {"1": 5.0, "8": 6.0}),
        result("over ranks", {}),
        result("fp8", {"1": 9.0, "8": 9.0}, emulated=True),
    ]
    (table,) = [t for t in optimization_tables(results) if "products" in t.caption]
    shown = [[cell.text for cell in row.cells] for row in table.rows]
    assert [row[0] for row in shown] == ["baseline", "int3"]
    assert [float(text) for text in shown[1][1:]] == [5.0, 2.5, 6.0, 1.5]
