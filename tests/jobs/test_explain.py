"""The worked examples of the published posts, as `lmi-bench explain` computes them."""

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.jobs import explain
from lmi_bench.jobs.settings.plan import BatchSettings, BlendedSettings, MemorySettings, SavingsSettings


def _values(explained):
    return {term.quantity: term.value for term in explained.terms}


def test_24_gb_hold_llama_2_7b_and_four_sequences_of_4096_tokens():
    found = _values(explain.memory(MemorySettings("llama-2-7b", memory_gb=24)))
    assert found["weights"] == pytest.approx(13.48, abs=0.01)
    assert found["sequences that fit"] == 4


def test_falcon_40b_takes_160_gb_in_32_bits_and_84_percent_of_each_of_four_a10g_in_16():
    wide = MemorySettings("falcon-40b", dtype="float32", parameters_b=40, overhead_gb=2)
    assert _values(explain.memory(wide))["weights"] == pytest.approx(160)
    shared = MemorySettings("falcon-40b", dtype="bfloat16", parameters_b=40, tensor_parallel=4, memory_gb=24)
    four = _values(explain.memory(shared))
    assert four["weights a device"] == pytest.approx(20)
    assert four["weights' share of a device"] == pytest.approx(100 * 20 / 24)  # printed: 84 %
    eight = MemorySettings("falcon-40b", dtype="bfloat16", parameters_b=40, tensor_parallel=8, memory_gb=24)
    left = _values(explain.memory(eight))["left on a device"]
    assert left == pytest.approx(100 * 14 / 24)  # printed: 60 %


def test_awq_of_llama_3_70b_is_35_gb_by_name_and_more_as_stored():
    found = _values(explain.memory(MemorySettings("llama-3-70b", dtype="int4")))
    assert found["weights"] == pytest.approx(35.3, abs=0.1)
    # 2 x 128,256 x 8,192 embeddings at 2 bytes, the others at 4 bits and (16 + 4) / 128 of scales
    wide = 2 * 128_256 * 8_192
    assert found["weights as stored"] == pytest.approx(
        (wide * 2 + (70.554e9 - wide) * (4 + 20 / 128) / 8) / 1e9, rel=1e-3
    )


def test_a_latent_cache_is_kept_whole_on_each_rank():
    explained = explain.memory(MemorySettings("deepseek-v3", dtype="float8", tensor_parallel=8))
    found = _values(explained)
    assert found["KV cache a device"] == found["KV cache of the batch"]
    assert explained.notes == ("the ranks together keep 8 copies of the cache",)


@pytest.mark.parametrize(("device", "wanted"), [("A10G", 116.7), ("A100-40", 200.6)])
def test_the_critical_batch_size_is_the_devices_operations_a_byte(device, wanted):
    found = _values(explain.batch(BatchSettings("llama-2-7b", device)))
    assert found["critical batch size, weights only"] == pytest.approx(wanted, abs=0.1)
    assert found["intensity of attention over a prompt of 4,096 tokens"] == pytest.approx(62.42, abs=0.01)
    # multi-head attention reads a token's cache for one multiplication and addition a value
    assert found["critical batch size, with 4,096 cached tokens each"] is None


def test_a_mixture_turns_compute_bound_later_by_the_experts_that_a_token_leaves_out():
    """Mixtral on A100-80: 153.0 FLOP a byte, 46.70e9 parameters to read for 12.88e9 used."""
    found = _values(explain.batch(BatchSettings("mixtral-8x7b", "A100-80", tokens=1)))
    bare = found["critical batch size, weights only"]
    assert bare == pytest.approx(153.0 * 46.70 / 12.88, rel=1e-3)
    assert found["critical batch size, with 1 cached tokens each"] == pytest.approx(bare, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "device", "ratio"), [("mxfp4", "H100-SXM", 989e12 / 3.35e12), ("float8", "A10G", 116.7)]
)
def test_weights_are_widened_where_a_device_lacks_their_type(dtype, device, ratio):
    found = _values(explain.batch(BatchSettings("llama-3.1-8b", device, dtype=dtype)))
    assert found["operations a byte of the device"] == pytest.approx(ratio, rel=0.01)


def test_the_blended_price_is_a_quarter_of_the_output_price():
    by_speed = explain.blended(BlendedSettings(price=1.0, throughput=1200))
    assert _values(by_speed)["1M blended tokens"] == pytest.approx(0.0579, abs=1e-4)
    by_gap = explain.blended(BlendedSettings(price=1.0, concurrency=48, itl=40, discount=0.2))
    assert _values(by_gap)["1M output tokens"] == pytest.approx(0.8 / 4.32)
    with pytest.raises(InputError, match="--throughput, or --concurrency and --itl"):
        explain.blended(BlendedSettings(price=1.0))


def test_a_machine_79_88_percent_cheaper_breaks_even_at_a_fifth_of_the_throughput():
    settings = SavingsSettings("ml.g5.12xlarge", "ml.p4d.24xlarge", 20.12, 100.0)
    found = _values(explain.savings(settings))
    assert found["cheaper by"] == pytest.approx(79.88)
    assert found["break-even throughput"] == pytest.approx(20.12)


@pytest.mark.parametrize(
    ("values", "flag"), [({"memory_gb": 0}, "--memory-gb"), ({"batch": 0}, "--batch"), ({"overhead_gb": -1}, "--over")]
)
def test_sizes_that_cannot_be_are_one_line(values, flag):
    with pytest.raises(InputError, match=flag):
        MemorySettings("llama-2-7b", **values)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("gemma-4-31b", "450,560 values"),
        ("qwen3-next-80b-a3b", "12,288 values"),
        ("llama-3.1-8b", "2 x 32 layers x 8 KV heads x 128"),
        ("deepseek-v3", "61 layers x 576"),
    ],
)
def test_the_values_of_a_token_are_those_that_are_cached(model, values):
    """By hand: 10 * 2*4*512 + 50 * 2*16*256; a quarter of 48 layers, of 2 * 2 * 256."""
    told = explain.memory(MemorySettings(model, tokens=4096))
    assert any(term.formula.startswith(values) for term in told.terms)
