"""Speculation in the plan: tokens a step, what they cost, and the simulation of the real thing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.capacity import planned_model_for, scheduler_config_for, step_time_model_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup, Speculation
from lmi_bench.analysis.model.speculation import acceptance_of_counts
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.scheduling.step_shape import StepShape

MODEL = find_model("llama-2-7b")
DRAFT = replace(  # TinyLlama 1.1B, from its config.json
    MODEL,
    name="tinyllama-1.1b",
    num_layers=22,
    hidden_size=2048,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=5632,
    params_total=1_100_048_384,
    params_active=1_100_048_384,
)
A100 = find_instance("ml.p4d.24xlarge")
A10G = find_instance("ml.g5.2xlarge")


def model_for(speculation, instance=A10G):
    return planned_model_for(Setup(MODEL, instance, 1, "float16", speculation=speculation), TGI_2023)


def decode(rows, context=400):
    return StepShape(decode_sequences=rows, decode_tokens=rows, decode_context_tokens=rows * context)


@pytest.mark.parametrize(
    ("tokens", "acceptance", "expected"),
    [(4, 0.8, 3.3616), (4, 0.0, 1.0), (4, 1.0, 5.0), (1, 0.5, 1.5), (7, 0.6, 2.4580)],
)
def test_tokens_of_a_step_are_those_of_the_paper(tokens, acceptance, expected):
    """Leviathan et al. 2023, equation 1: (1 - a ** (k + 1)) / (1 - a)."""
    assert Speculation(tokens, acceptance).tokens_per_step == pytest.approx(expected, rel=1e-4)


def test_the_acceptance_behind_counts_is_found_again():
    """k = 3 and a = 0.5: on average (0.5 + 0.25 + 0.125) / 3 of the guesses hold."""
    assert acceptance_of_counts(24_000, 7_000, 3) == pytest.approx(0.5, abs=1e-9)
    assert acceptance_of_counts(10, 10, 3) == pytest.approx(1.0)
    with pytest.raises(InputError, match="no acceptance follows"):
        acceptance_of_counts(0, 0, 3)


def test_guesses_that_never_hold_only_cost():
    plain = step_time_model_for(Setup(MODEL, A10G, 1, "float16"), TGI_2023)
    assert model_for(Speculation(4, 0.0)).step_time_s(decode(1)) > plain.step_time_s(decode(1))


def test_a_free_guess_that_holds_divides_a_memory_bound_step():
    """A lone sequence reads the same weights for five rows as for one: a fifth of a step each,
    but for the rows' own arithmetic and cache."""
    plain = step_time_model_for(Setup(MODEL, A10G, 1, "float16"), TGI_2023)
    sure = model_for(Speculation(4, 1.0))
    ratio = plain.step_time_s(decode(1)) / sure.step_time_s(decode(1))
    assert 4.8 < ratio <= 5.0


def test_speculation_stops_paying_where_arithmetic_binds():
    """Llama 2 7B on A100 with prompts of nothing: 2,000 rows are beyond its critical batch, so that
    five rows a sequence take five times as long for 3.36 tokens."""
    free_host = replace(TGI_2023.parameters, host_per_sequence_s=0.0, host_per_layer_s=0.0)
    profile = replace(TGI_2023, parameters=free_host)
    plain = step_time_model_for(Setup(MODEL, A100, 1, "float16"), profile)
    drafted = planned_model_for(Setup(MODEL, A100, 1, "float16", speculation=Speculation(4, 0.8)), profile)
    assert drafted.step_time_s(decode(1, 10)) < plain.step_time_s(decode(1, 10))
    assert drafted.step_time_s(decode(2000, 10)) > plain.step_time_s(decode(2000, 10))


def test_a_draft_model_costs_its_steps():
    """(k draft steps + one verifying step) / tokens of a step."""
    spec = Speculation(3, 0.7, DRAFT)
    model, target = model_for(spec), step_time_model_for(Setup(MODEL, A10G, 1, "float16"), TGI_2023)
    guess = step_time_model_for(Setup(DRAFT, A10G, 1, "float16"), TGI_2023)
    verify = StepShape(decode_sequences=2, decode_tokens=8, decode_context_tokens=806)
    expected = 3 * guess.step_time_s(decode(2)) + target.step_time_s(verify)
    tokens = 1 + 0.7 + 0.49 + 0.343
    assert model.step_time_s(decode(2)) == pytest.approx(expected / tokens, rel=1e-9)
    assert model.real_steps.step_time_s(verify) == pytest.approx(
        3 * guess.step_time_s(StepShape(0, 0, 0, 0, 2, 2, 798)) + target.step_time_s(verify)
    )


def test_a_draft_takes_memory_for_weights_and_cache():
    plain = Setup(MODEL, A10G, 1, "float16")
    drafted = replace(plain, speculation=Speculation(4, 0.8, DRAFT))
    alone = scheduler_config_for(plain, TGI_2023, 512).num_blocks
    beside = scheduler_config_for(drafted, TGI_2023, 512).num_blocks
    assert beside < 0.75 * alone
    own = replace(plain, speculation=Speculation(4, 0.8, MODEL))
    with pytest.raises(CapacityError, match="with the draft"):
        scheduler_config_for(own, TGI_2023, 512)


def test_a_draft_of_another_vocabulary_is_refused():
    with pytest.raises(InputError, match="must mean the same"):
        model_for(Speculation(4, 0.8, find_model("llama-3.1-8b")))


def test_the_mean_of_the_plan_is_that_of_the_simulated_scheduler():
    """120 sequences of 240 tokens over the engine's scheduler, each guess drawn: throughput within
    4 % of the closed form's, which takes every step to give the average number of tokens. Prompts
    join at once: users out of step would wait for that, and those of the closed form stay in step.
    """
    profile = replace(TGI_2023, max_waiting_tokens=0)
    spec = Speculation(4, 0.7)
    plain = MeasuredLevel(
        Setup(MODEL, A100, 1, "float16", speculation=spec),
        input_tokens=200,
        output_tokens=240,
        load=Load(concurrency=8),
        num_requests=120,
    )
    config = scheduler_config_for(Setup(MODEL, A100, 1, "float16", speculation=spec), profile, 440)
    level = simulate_level(
        LevelSpec(0, Load(concurrency=8), num_requests=120),
        lambda index: PlannedRequest(index, 0.0, 200, 240),
        config,
        model_for(spec, A100),
        speculation=spec,
    )
    assert all(sum(record.exchange.token_counts) == 240 for record in level.records)
    wall_s = max(record.token_times_s[-1] for record in level.records)
    assert predict_cell(profile, plain).throughput_tokens_per_s == pytest.approx(120 * 240 / wall_s, rel=0.04)
