"""Expert parallelism, data-parallel attention, pipelines: bytes and times by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.model.builtin_profiles import GRAPH_GPU_PRIOR
from lmi_bench.analysis.model.capacity import (
    memory_plan_for,
    planned_model_for,
    scheduler_config_for,
    step_time_model_for,
)
from lmi_bench.analysis.model.memory import embedding_params, expert_params
from lmi_bench.analysis.model.setup import (
    PLAIN,
    Parallelism,
    Setup,
    Speculation,
    attention_params,
    busiest_rank_sd,
    next_token_layer,
)
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import bare_machine
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.scheduling.step_shape import StepShape

DEEPSEEK = find_model("deepseek-v3")
EXPERTS, GROUPS = Parallelism(expert_parallel=True), Parallelism(True, attention_groups=8)


def setup(parallelism=PLAIN, degree=8, device="H200", **more):
    machine = bare_machine(find_accelerator(device), 8)
    return Setup(DEEPSEEK, machine, degree, "float8", parallelism=parallelism, **more)


def decode(rows, context=1000):
    return StepShape(decode_sequences=rows, decode_tokens=rows, decode_context_tokens=rows * context)


def parts(parallelism, rows, **more):
    return step_time_model_for(setup(parallelism, **more), GRAPH_GPU_PRIOR).explain(decode(rows))


def test_attention_of_deepseek_v3_has_187_million_parameters_a_layer():
    """Its config: latent queries, keys and values there and back, and the output."""
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert attention_params(DEEPSEEK) == pytest.approx(61 * by_hand, rel=0.02)


def test_groups_repeat_attention_and_hold_a_latent_cache_once():
    plain, split = (
        memory_plan_for(setup(each), GRAPH_GPU_PRIOR, input_tokens=7000, output_tokens=1000) for each in (PLAIN, GROUPS)
    )
    more = split.weight_bytes - plain.weight_bytes
    assert more == pytest.approx(attention_params(DEEPSEEK) * 7 / 8)
    assert split.kv_bytes_per_sequence == plain.kv_bytes_per_sequence
    per_device = split.kv_budget_bytes // split.kv_bytes_per_sequence
    assert split.sequences_guaranteed == 8 * per_device
    assert split.sequences_guaranteed > 6 * plain.sequences_guaranteed


def test_a_scheduler_of_groups_takes_the_sequences_of_all():
    plain, split = (scheduler_config_for(setup(each), GRAPH_GPU_PRIOR, 8000) for each in (PLAIN, GROUPS))
    assert split.max_rolling_batch_size == 8 * plain.max_rolling_batch_size
    assert split.num_blocks > 6 * plain.num_blocks


def test_reads_of_the_cache_fall_by_the_number_of_groups_once_all_have_sequences():
    plain, split = parts(PLAIN, 800), parts(GROUPS, 800)
    assert split.kv_s == pytest.approx(plain.kv_s / 8, rel=0.01)
    lone = parts(GROUPS, 1)
    assert lone.kv_s == pytest.approx(parts(PLAIN, 1).kv_s)


def test_a_lone_token_waits_for_the_device_with_most_of_its_experts():
    """8 of 256 experts over 8 devices: one each in the mean, and 1.43 deviations (0.98) more."""
    plain, spread = parts(PLAIN, 1), parts(EXPERTS, 1)
    experts = expert_params(DEEPSEEK) / 256
    one_s = experts / (4.8e12 * GRAPH_GPU_PRIOR.parameters.bandwidth_share)
    assert spread.weights_s - plain.weights_s == pytest.approx(1.43 * 0.984 * one_s, rel=0.01)


def test_with_many_rows_every_expert_is_read_however_they_are_shared_out():
    assert parts(EXPERTS, 2000).weights_s == pytest.approx(parts(PLAIN, 2000).weights_s)


@pytest.mark.parametrize(("ranks", "expected"), [(8, 1.424), (32, 2.070), (72, 2.385)])
def test_the_busiest_of_n_is_the_expected_largest_of_n_normal_values(ranks, expected):
    """Teichroew 1956, tables of expected values of order statistics."""
    assert busiest_rank_sd(ranks) == pytest.approx(expected, rel=0.02)


def test_groups_send_tokens_to_experts_instead_of_adding_up_over_all_devices():
    """Each token: 3 bytes of 7168 to its 8 devices, an eighth of it on each link, 7 of 8 away."""
    profile = GRAPH_GPU_PRIOR
    rate = 450e9 * profile.parameters.nvlink_share
    start_s = parts(GROUPS, 1).all_reduce_s
    row_s = (parts(GROUPS, 1001).all_reduce_s - start_s) / 1000
    assert row_s == pytest.approx(61 * 7168 * 3 * 7 / 8 / rate)
    assert start_s - row_s == pytest.approx(2 * 61 * profile.parameters.nvlink_latency_s)


def test_two_stages_take_the_time_of_half_the_batch_and_a_lone_row_gains_nothing():
    """Between the stages each row sends 14,336 bytes, and either half starts one transfer; the
    scheduler keeps the books of both halves."""
    whole = step_time_model_for(setup(), GRAPH_GPU_PRIOR)
    two = Parallelism(pipeline=2, hosts=2)
    staged = step_time_model_for(setup(two), GRAPH_GPU_PRIOR)
    hops_s = 2 * 1.5e-5
    half = whole.explain(decode(64))
    halves_s = half.total_s + half.serial_s + hops_s + 64 * 14_336 / 50e9
    assert staged.step_time_s(decode(128)) == pytest.approx(halves_s, rel=0.001)
    lone_s = whole.step_time_s(decode(1))
    assert staged.step_time_s(decode(1)) == pytest.approx(lone_s + hops_s, rel=0.001)


def test_stages_share_weights_and_cache():
    plan = memory_plan_for(
        setup(Parallelism(pipeline=2, hosts=2)), GRAPH_GPU_PRIOR, input_tokens=900, output_tokens=100
    )
    one = memory_plan_for(setup(), GRAPH_GPU_PRIOR, input_tokens=900, output_tokens=100)
    assert plan.weight_bytes == one.weight_bytes / 2
    assert plan.kv_bytes_per_sequence == one.kv_bytes_per_sequence / 2


def test_between_hosts_an_all_reduce_takes_the_network_s_time_too():
    """16 devices on 2 hosts: each sends its eighth of the array once over 50 GB/s."""
    one = parts(PLAIN, 1000, degree=8)
    two = parts(Parallelism(hosts=2), 1000, degree=16)
    network_s = 122 * 1000 * 14_336 / 8 / 50e9
    inside_s = 122 * (one.all_reduce_s / 122 - 8e-6) * (15 / 16) / (7 / 8)
    assert two.all_reduce_s == pytest.approx(inside_s + network_s + 122 * (8e-6 + 1.5e-5), rel=0.01)


@pytest.mark.parametrize("split", [PLAIN, EXPERTS, GROUPS, Parallelism(pipeline=2, hosts=2)])
def test_the_fast_price_is_the_explained_time(split):
    model = step_time_model_for(setup(split), GRAPH_GPU_PRIOR)
    price = model.pricer()
    for rows in (1, 3, 8, 100):
        shape = decode(rows, 777)
        assert price(rows, rows * 777, 0, 0, 0.0, 0) == pytest.approx(model.explain(shape).total_s)


def test_the_model_s_own_layer_drafts_for_less_than_a_tenth_of_a_step():
    """One of 61 layers and the head: three drafts and a wider step against one token a step."""
    drafted = setup(speculation=Speculation(3, 1.0, own=True))
    own = drafted.draft
    assert own.num_layers == 1
    assert own.params_total == pytest.approx(DEEPSEEK.params_total / 61 + 2 * 129280 * 7168, rel=0.1)
    step_s = step_time_model_for(setup(), GRAPH_GPU_PRIOR).step_time_s(decode(1))
    token_s = planned_model_for(drafted, GRAPH_GPU_PRIOR).step_time_s(decode(1))
    assert step_s / 4 < token_s < step_s / 2


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [
        ("deepseek-v3", 1, 11.6),
        ("mimo-v2-flash", 3, 0.33),
        ("ernie-4.5-300b-a47b", 1, 0.99),
        ("qwen3-next-80b-a3b", 1, 1.65),
    ],
)
def test_the_layer_that_drafts_has_its_own_parameters(name, layers, billions):
    """MiMo's card: 0.33B a block, dense; Ernie's is dense, too; a layer's mean would be 6 times."""
    shape = find_model(name)
    own = next_token_layer(shape)
    assert shape.mtp_layers == layers
    assert (own.params_total - embedding_params(shape)) / 1e9 == pytest.approx(billions, rel=0.03)
    assert own.params_active <= own.params_total


def test_impossible_splits_say_why():
    dense = replace(setup(GROUPS), shape=find_model("llama-3.1-70b"))
    with pytest.raises(CapacityError, match="no experts"):
        step_time_model_for(dense, GRAPH_GPU_PRIOR)
    with pytest.raises(CapacityError, match="do not divide"):
        step_time_model_for(setup(Parallelism(True, 3)), GRAPH_GPU_PRIOR)
    with pytest.raises(InputError, match="more than 2 x"):
        step_time_model_for(setup(Parallelism(True, hosts=2), degree=32), GRAPH_GPU_PRIOR)


def test_a_split_survives_its_json():
    for each in (PLAIN, EXPERTS, Parallelism(True, 16, 2, 4, 25e9)):
        assert Parallelism(**each.to_json()) == each
