"""Prefill and decode in separate pools: conservation, order of events, and the closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from lmi_bench.analysis.level.cells import capacity_tokens_per_s, pools_of, predict_cell, regime_of
from lmi_bench.analysis.level.simulator import Pool
from lmi_bench.analysis.level.two_pools import simulate_pools
from lmi_bench.analysis.model.builtin_profiles import GRAPH_GPU_PRIOR
from lmi_bench.analysis.model.capacity import planned_model_for, scheduler_config_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel, cell_from_json, cell_to_json
from lmi_bench.analysis.model.setup import Parallelism, PrefillPool, Setup, pools_bytes_per_s
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.records import STATUS_OK
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.jobs.predict import predict
from lmi_bench.jobs.settings.plan import PredictSettings

CONFIG = SchedulerConfig(
    num_blocks=400,
    block_size=16,
    max_model_len=512,
    kv_layout=KvLayout.PAGED,
    max_rolling_batch_size=8,
    max_rolling_batch_prefill_tokens=512,
    chunked_prefill=False,
)


@dataclass
class Steps:
    """10 ms a step and 0.1 ms a prompt token; keeps the shapes of all steps."""

    shapes: list

    def step_time_s(self, shape):
        self.shapes.append(shape)
        return 0.01 + 1e-4 * shape.prefill_tokens


def drawn(number):
    draw = Random(number)
    return PlannedRequest(number, 0.0, draw.randint(1, 300), draw.randint(1, 60))


def run(load, *, workers=(2, 3), transfer_s=0.25, requests=drawn, config=CONFIG, number=60, links=1):
    prefill, decode = Steps([]), Steps([])
    level = simulate_pools(
        LevelSpec(0, load=load, num_requests=number),
        requests,
        Pool(workers[0], config, prefill),
        Pool(workers[1], config, decode),
        lambda tokens: transfer_s + 1e-4 * tokens,
        links=links,
    )
    return level.records, prefill.shapes, decode.shapes


@pytest.mark.parametrize("load", [Load(12), Load(1), Load(rate_per_s=40.0)])
def test_every_request_is_answered_once_with_all_its_tokens(load):
    records, _, _ = run(load)
    assert [record.status for record in records] == [STATUS_OK] * 60
    for record in records:
        asked = drawn(record.request_id)
        assert sum(record.exchange.token_counts) == asked.output_tokens
        assert record.exchange.finish_reason == "length"


def test_no_token_comes_before_the_cache_has_moved():
    """One prefill step is 10 ms and 0.1 ms a token at least, a decode step 10 ms."""
    records, _, _ = run(Load(12))
    for record in records:
        times = record.exchange.token_times_s
        assert list(times) == sorted(times)
        if len(times) > 1:
            computed_s, moved_s = (at_least + 1e-4 * record.input_tokens for at_least in (0.01, 0.25))
            assert times[0] - record.due_s >= computed_s + moved_s - 1e-9
            assert times[1] - times[0] >= 0.01 - 1e-9


def test_prompts_are_computed_once_and_never_beside_decoding():
    _, prefill, decode = run(Load(12))
    assert sum(shape.prefill_tokens for shape in prefill) == sum(drawn(number).input_tokens for number in range(60))
    assert not any(shape.decode_sequences for shape in prefill)
    assert not any(shape.prefill_tokens for shape in decode)


def test_decode_steps_give_every_token_but_the_first():
    records, _, _ = run(Load(12))
    tokens = sum(sum(record.exchange.token_counts) for record in records)
    _, _, decode = run(Load(1), workers=(1, 1))
    assert sum(shape.decode_sequences for shape in decode) == tokens - len(records)


def test_a_lone_request_has_the_times_of_its_parts():
    """100 prompt tokens: 20 ms; 260 ms on the link; 9 steps of 10 ms."""
    records, _, _ = run(Load(1), requests=lambda n: PlannedRequest(n, 0.0, 100, 10), number=3)
    first = records[0].exchange
    assert first.token_times_s[0] == pytest.approx(0.02 + 0.26)
    assert first.token_times_s[1] == pytest.approx(0.02 + 0.26 + 0.01)
    assert first.token_times_s[-1] == pytest.approx(0.02 + 0.26 + 9 * 0.01)


@pytest.mark.parametrize("links", [1, 4])
@pytest.mark.parametrize("load", [Load(48), Load(rate_per_s=80.0)])
def test_a_worker_s_links_never_carry_more_than_they_can(load, links):
    """60 requests, of which 58 have a second token, each at least 0.25 s on one of 2 x n links."""
    records, _, _ = run(load, links=links)
    moved = [each for each in records if len(each.exchange.token_times_s) > 1]
    took_s = max(each.exchange.token_times_s[0] for each in moved)
    least_s = sum(0.25 + 1e-4 * each.input_tokens for each in moved) / (2 * links)
    assert least_s <= took_s - 0.01 <= 1.3 * least_s


def test_the_link_that_is_free_first_decides_between_idle_workers():
    """A prompt each 100 ms, computed in 20 ms and sent in 250: three workers take turns, no cache
    waits; the first idle one alone would carry four a second."""
    load = Load(rate_per_s=10.0, arrivals="constant")

    def same(number):
        return PlannedRequest(number, 0.0, 100, 10)

    records, _, _ = run(load, workers=(3, 2), transfer_s=0.24, requests=same)
    waits_s = [each.exchange.token_times_s[0] - each.due_s for each in records]
    assert max(waits_s) == pytest.approx(0.27, abs=1e-6)


def test_requests_that_never_fit_are_refused_and_the_others_go_on():
    def requests(number):
        return PlannedRequest(number, 0.0, 1000 if number == 5 else 50, 10)

    records, _, _ = run(Load(4), requests=requests, number=20)
    assert [record.request_id for record in records if record.status != STATUS_OK] == [5]


def test_a_pool_without_workers_is_refused():
    with pytest.raises(InputError, match="at least 1 worker"):
        run(Load(1), workers=(0, 1))


def cell(users, *, prompt=4000, workers=(1, 2), **more):
    machine = bare_machine(find_accelerator("H200"), 8)
    groups = Parallelism(True, attention_groups=8)
    setup = Setup(find_model("deepseek-v3"), machine, 8, "float8")
    pool = PrefillPool(replace(setup, parallelism=more.pop("prefill_split", groups)), workers[0])
    return MeasuredLevel(setup, prompt, 400, Load(users), 10 * users, replicas=workers[1], prefill=pool, **more)


@pytest.mark.parametrize(
    ("users", "prompt", "link"),
    [
        *((1, 4000, 50e9), (8, 1000, 50e9), (32, 1000, 50e9), (64, 4000, 50e9)),
        *((100, 6000, 50e9), (1, 4000, 1e8), (64, 4000, 1e8)),
    ],
)
def test_the_closed_form_agrees_with_the_simulation(users, prompt, link):
    """Below and beyond the rate of the prefill pool or its links, tokens and times within 12 %."""
    level = cell(users, prompt=prompt, prefill_split=Parallelism())
    level = replace(level, prefill=replace(level.prefill, link_bytes_per_s=link))
    predicted = predict_cell(GRAPH_GPU_PRIOR, level)
    setups = (level.prefill.setup, level.setup)
    configs = [scheduler_config_for(each, GRAPH_GPU_PRIOR, prompt + 400) for each in setups]
    models = [planned_model_for(each, GRAPH_GPU_PRIOR) for each in setups]
    draw = Random(1)
    outputs = [draw.randint(360, 440) for _ in range(level.num_requests)]
    records = simulate_pools(
        LevelSpec(0, load=Load(users), num_requests=level.num_requests),
        lambda number: PlannedRequest(number, 0.0, prompt, outputs[number]),
        Pool(1, configs[0], models[0]),
        Pool(2, replace(configs[1], max_model_len=prompt + 500), models[1]),
        level.prefill.transfer_s,
        overhead_s=GRAPH_GPU_PRIOR.parameters.request_overhead_s,
        links=level.prefill.setup.devices,
    ).records
    tokens = sum(sum(record.exchange.token_counts) for record in records)
    wall_s = max(record.exchange.token_times_s[-1] for record in records)
    tpot_s = sum(
        (each.exchange.token_times_s[-1] - each.exchange.token_times_s[0]) / (sum(each.exchange.token_counts) - 1)
        for each in records
    ) / len(records)
    assert predicted.throughput_tokens_per_s == pytest.approx(tokens / wall_s, rel=0.12)
    assert predicted.tpot_mean_s == pytest.approx(tpot_s, rel=0.12)


@pytest.mark.parametrize(
    ("users", "link", "binds"),
    [(1, 50e9, "bandwidth"), (1, 1e7, "pool_link"), (64, 1e8, "pool_link"), (400, 50e9, "compute")],
)
def test_what_binds_is_where_most_of_a_request_s_time_goes(users, link, binds):
    """Decode steps of a lone request; caches on a slow link; 400 users wait for prompts."""
    level = cell(users, prompt=8000)
    level = replace(level, prefill=replace(level.prefill, link_bytes_per_s=link))
    assert regime_of(GRAPH_GPU_PRIOR, level, predict_cell(GRAPH_GPU_PRIOR, level)) == binds


def test_more_prefill_workers_raise_a_rate_that_prompts_limit():
    few = predict_cell(GRAPH_GPU_PRIOR, cell(400, prompt=8000, workers=(1, 4)))
    many = predict_cell(GRAPH_GPU_PRIOR, cell(400, prompt=8000, workers=(4, 4)))
    assert many.throughput_tokens_per_s > 1.5 * few.throughput_tokens_per_s
    assert many.ttft_mean_s < few.ttft_mean_s


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_worker_computes_a_prompt_of_each_attention_group_in_a_step(chunked):
    whole = cell(400, prompt=8000, workers=(1, 4))
    spread = replace(whole.prefill.setup, parallelism=Parallelism(expert_parallel=True, attention_groups=8))
    profile = replace(GRAPH_GPU_PRIOR, chunked_prefill=chunked, max_prefill_tokens=8192)
    pools = pools_of(profile, replace(whole, prefill=replace(whole.prefill, setup=spread)))
    step_s = pools.prefill.model.step_time_s(pools.prefill.prompt_shape(8))
    assert pools.prompts_per_s == pytest.approx(8 / step_s)
    config = scheduler_config_for(spread, profile, 8400, prompts_alone=True)
    assert config.max_rolling_batch_prefill_tokens == 8 * 8192
    beside = scheduler_config_for(spread, profile, 8400).max_rolling_batch_prefill_tokens
    assert beside == (8 * 8192 if chunked else 8400)


def test_a_request_of_pools_goes_through_a_router():
    quick = predict_cell(GRAPH_GPU_PRIOR, cell(1, prompt=64, workers=(1, 1)))
    assert 0.1 < quick.ttft_mean_s < 0.2


def test_the_capacity_is_that_of_the_slower_pool():
    """Twice the prompt workers carry twice as much while prompts limit, and then no more."""
    one, two, many = (
        capacity_tokens_per_s(GRAPH_GPU_PRIOR, cell(1, prompt=8000, workers=workers))
        for workers in ((1, 8), (2, 8), (50, 2))
    )
    assert two == pytest.approx(2 * one, rel=0.01)
    decode = pools_of(GRAPH_GPU_PRIOR, cell(1, prompt=8000, workers=(50, 2))).decode
    slots_s = 399 * decode.decode_step_s(decode.slots)
    assert many == pytest.approx(2 * decode.slots * 400 / slots_s, rel=0.01)


def test_the_transfer_is_the_prompt_s_cache_over_the_link():
    """DeepSeek-V3 caches 61 x 576 values of 2 bytes a token: 4,000 tokens are 281 MB."""
    pool = cell(1).prefill
    assert pool.transfer_s(4000) == pytest.approx(61 * 576 * 2 * 4000 / 50e9)
    slow = replace(cell(1), prefill=replace(pool, link_bytes_per_s=1e9))
    more_s = pools_of(GRAPH_GPU_PRIOR, slow).transfer_s - pool.transfer_s(4000)
    later_s = predict_cell(GRAPH_GPU_PRIOR, slow).ttft_mean_s - predict_cell(GRAPH_GPU_PRIOR, cell(1)).ttft_mean_s
    assert later_s == pytest.approx(more_s, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "devices", "gigabytes_per_s"),
    [
        ("ml.g5.12xlarge", 4, 8.0),
        ("ml.g5.12xlarge", 5, 1.25),
        ("ml.p4d.24xlarge", 8, 300.0),
        ("ml.p4d.24xlarge", 16, 6.25),
        ("ml.p6e-gb200.36xlarge", 8, 50.0),
    ],
)
def test_pools_share_a_machine_s_link_or_its_network(machine, devices, gigabytes_per_s):
    """Four A10G on a shared bridge of 32 GB/s and 40 Gbit/s; eight A100 on NVLink, 400 Gbit/s."""
    rate = pools_bytes_per_s(find_instance(machine), devices)
    assert rate == pytest.approx(gigabytes_per_s * 1e9)


@pytest.mark.parametrize(
    ("workers", "gbps", "gigabytes_per_s"),
    [("2:2", None, 8.0), ("4:4", None, 1.25), ("4:4", 10.0, 1.25), ("2:2", 100.0, 12.5)],
)
def test_predict_moves_caches_at_the_machine_s_rate(workers, gbps, gigabytes_per_s):
    settings = PredictSettings(
        model="llama-3.1-8b",
        instance="ml.g5.12xlarge",
        tensor_parallel=1,
        concurrency="1",
        input_tokens=1000,
        output_tokens=10,
        disaggregate=workers,
        network_gbps=gbps,
    )
    link = predict(settings).forecasts[0].cell.prefill.link_bytes_per_s
    assert link == pytest.approx(gigabytes_per_s * 1e9)


def test_slow_links_limit_the_capacity():
    """8 devices send 281 MB each at 0.1 GB/s: 2.85 prompts a second, of 400 tokens."""
    slow = replace(cell(64), prefill=replace(cell(1).prefill, link_bytes_per_s=1e8))
    assert capacity_tokens_per_s(GRAPH_GPU_PRIOR, slow) == pytest.approx(2.85 * 400, rel=0.01)


def test_a_level_of_two_pools_survives_its_json():
    level = cell(64)
    assert cell_from_json(cell_to_json(level), None) == level
