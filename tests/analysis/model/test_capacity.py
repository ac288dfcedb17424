"""Scheduler settings of a model on a machine, and the theory knee."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.capacity import memory_plan_for, roofline_of, scheduler_config_for, step_time_model_for
from lmi_bench.analysis.model.memory import expert_params
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import jumpstart_cells
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.scheduling.config import KvLayout


def config(model="llama-2-7b", instance="ml.g5.2xlarge", tp=1, total=512, dtype="float16"):
    return scheduler_config_for(Setup(find_model(model), find_instance(instance), tp, dtype), TGI_2023, total)


def test_the_cache_is_what_share_weights_and_reserve_leave():
    """0.95 * 22,888 MiB - 13.477 GB - 1.6 GB = 7.72 GB of blocks of 16 * 0.5 MiB."""
    left_bytes = 0.95 * 22888 * 2**20 - 2 * 6738415616 - 1.6e9
    settings = config()
    assert settings.num_blocks == int(left_bytes // (16 * 2**19))
    assert settings.kv_layout is KvLayout.CONTIGUOUS


def test_a_model_that_does_not_fit_is_refused_with_its_numbers():
    with pytest.raises(CapacityError, match=r"ml\.p4d\.24xlarge: 41\.8 GiB of weights"):
        config("falcon-180b", "ml.p4d.24xlarge", 8)


def test_falcon_7b_is_refused_on_four_devices():
    with pytest.raises(CapacityError, match="71 query heads"):
        config("falcon-7b", "ml.g5.12xlarge", 4)


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(InputError, match=r"has 4 accelerator\(s\)"):
        config(instance="ml.g5.12xlarge", tp=8)


def test_requests_beyond_the_positions_of_the_model_are_refused():
    with pytest.raises(CapacityError, match="at most 4,096 tokens"):
        config(total=5000)


def test_llama_2_7b_never_turns_compute_bound_at_384_tokens():
    setup = Setup(find_model("llama-2-7b"), find_instance("ml.g5.2xlarge"), 1, "float16")
    assert roofline_of(setup, input_tokens=256, output_tokens=256).critical_batch is None
    plan = memory_plan_for(setup, TGI_2023, input_tokens=256, output_tokens=256)
    held = (0.95 * 22888 * 2**20 - 2 * 6738415616 - 1.6e9) // 2**28
    assert plan.sequences_guaranteed == int(held)


def test_with_grouped_queries_compute_binds_from_a_batch_on():
    """Llama 3 8B on A100-80 at 150 tokens: (16.06e9 / 2.039e12) / (16.06e9 / 312e12 - 9.6e-6)."""
    setup = Setup(find_model("llama-3-8b"), find_instance("ml.p4de.24xlarge"), 1, "float16")
    by_hand = (16.0605e9 / 2.039e12) / (16.0605e9 / 312e12 - 150 * 131072 / 2.039e12)
    batch = roofline_of(setup, input_tokens=100, output_tokens=100).critical_batch
    assert batch == pytest.approx(by_hand, rel=1e-3)


def test_the_simulated_sweep_of_a_published_instance_is_close_to_it():
    """g5.2xlarge, 256 / 256, concurrency 1 to 64: each level within 25 %, median within 10 %."""
    shape, instance = find_model("llama-2-7b"), find_instance("ml.g5.2xlarge")
    model = step_time_model_for(Setup(shape, instance, 1, "float16"), TGI_2023)
    rows = [row for row in jumpstart_cells("concurrency") if row.table == "instance_comparison"]
    errors = []
    latency = {}
    for row in rows:
        if row.instance_type != instance.instance_type:
            continue
        level = simulate_level(
            LevelSpec(0, Load(concurrency=row.concurrency), num_requests=3 * row.concurrency),
            lambda i: PlannedRequest(i, 0.0, 256, 256),
            config(),
            model,
        )
        line = summarise_level(level)
        errors.append(abs(line.throughput_tokens_per_s / row.throughput_tokens_per_s - 1))
        latency[row.concurrency] = line.of("latency_per_token").max
    assert len(errors) == 7
    assert max(errors) <= 0.25
    assert sorted(errors)[3] <= 0.10
    # the knees of the published table: 100 ms at 32 users, twice the least latency at 16
    assert max(c for c, ms in latency.items() if ms <= 100) in (16, 32, 64)
    assert max(c for c, ms in latency.items() if ms <= 2 * latency[1]) in (8, 16, 32)


def test_a_step_of_one_sequence_reads_only_the_experts_that_it_uses():
    """Mixtral 8x7B, two of eight experts: one token reads the active parameters, many read all."""
    setup = Setup(find_model("mixtral-8x7b"), find_instance("ml.p4de.24xlarge"), 1, "float16")
    roof = roofline_of(setup, input_tokens=128, output_tokens=16)
    shape = setup.shape
    one = 2 * shape.params_active / (2 * shape.params_active + roof.sequence_bytes)
    assert roof.flop_per_byte(1) == pytest.approx(one, rel=1e-3)
    many = 200 * 2 * shape.params_active / (2 * shape.params_total + 200 * roof.sequence_bytes)
    assert roof.flop_per_byte(200) == pytest.approx(many, rel=1e-3)


def test_experts_in_four_bits_are_less_of_the_bytes_than_of_the_parameters():
    """gpt-oss 120B: experts in 4.25 bits beside 2.12e9 parameters in 16."""
    setup = Setup(find_model("gpt-oss-120b"), find_instance("ml.p5.48xlarge"), 1, "mxfp4")
    experts, rest = expert_params(setup.shape) * 4.25, 16 * 2.12e9
    roof = roofline_of(setup, input_tokens=1000, output_tokens=1000)
    assert roof.expert_share == pytest.approx(experts / (experts + rest), rel=1e-3)
