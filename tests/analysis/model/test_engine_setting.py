"""Engine settings as candidates: what each changes, and that more choice never costs more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Layout, RequestKind, Workload, plan_copy
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, GRAPH_GPU_PRIOR, TGI_2023
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting, settings_of
from lmi_bench.analysis.model.setup import Speculation
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.slo import Slo
from lmi_bench.core.workload import LevelSpec

LLAMA = Workload(find_model("llama-2-7b"), "float16", 256, 64)
G5, P4D = find_instance("ml.g5.2xlarge"), find_instance("ml.p4d.24xlarge")


def plan(setting, workload=LLAMA, instance=G5, degree=1):
    return plan_copy(Layout(instance, degree, setting), workload, TGI_2023, open_loop=True)


def ask(settings, **options):
    request = RecommendRequest(
        LLAMA,
        TGI_2023,
        load=Load(rate_per_s=8.0),
        slos=(Slo("itl", "p90", 80.0),),
        instances=(G5, P4D),
        degrees=(1,),
        settings=settings,
        **options,
    )
    return recommend(request)


def test_combinations_are_listed_once_and_what_is_there_already_is_no_change():
    axes = {"dtype": ("fp16", "int4"), "max_batch_size": (TGI_2023.max_batch_size, 8)}
    assert settings_of(axes, dtype="float16", profile=TGI_2023) == (
        AS_STATED,
        EngineSetting(max_batch_size=8),
        EngineSetting(dtype="int4"),
        EngineSetting(dtype="int4", max_batch_size=8),
    )


def test_a_draft_stands_beside_no_draft():
    guess = Speculation(4, 0.8)
    found = settings_of({"speculation": (None, guess)}, dtype="float16", profile=TGI_2023)
    assert found == (AS_STATED, EngineSetting(speculation=guess))


def test_too_many_combinations_are_refused():
    axes = {"max_batch_size": range(1, 50), "memory_share": (0.8, 0.9)}
    with pytest.raises(InputError, match="98 combinations"):
        settings_of(axes, dtype="float16", profile=TGI_2023)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch_size": 0}, "--max-batch must be at least 1"),
        ({"memory_share": 1.2}, "--memory-share"),
        ({"dtype": "int5"}, "int5"),
        ({"kv_dtype": "int3"}, "int3"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        EngineSetting(**values)


def test_a_cache_of_8_bits_holds_twice_the_tokens():
    """The budget is the same bytes, a token half of them."""
    wide, narrow = (plan(EngineSetting(kv_dtype=name)).config for name in (None, "float8"))
    assert narrow.cache_tokens == pytest.approx(2 * wide.cache_tokens, abs=2 * wide.block_size)


def test_four_bits_read_fewer_bytes_a_step():
    """A lone row reads 13.5 GB of weights in 16 bits and 3.9 GB in 4: a faster step."""
    wide, narrow = (plan(EngineSetting(dtype=name)).steady for name in (None, "int4"))
    assert narrow.decode_step_s(1) < 0.7 * wide.decode_step_s(1)


def test_a_limit_on_the_batch_is_the_number_of_slots():
    assert plan(EngineSetting(max_batch_size=3)).steady.slots == 3


def test_a_smaller_share_of_the_memory_leaves_fewer_slots():
    """24 GB at 0.95 or 0.75: 4.8 GB less of cache."""
    most, less = (plan(EngineSetting(memory_share=s)).steady.slots for s in (None, 0.75))
    assert less < most


def test_graphs_take_the_launching_out_of_a_step():
    """The host's part of 32 layers goes from the eager prior's to the graph prior's."""
    eager = replace(TGI_2023, parameters=EAGER_GPU_PRIOR.parameters)
    graphs = EngineSetting(cuda_graphs=True).profile(eager)
    launch = GRAPH_GPU_PRIOR.parameters.host_per_layer_s
    assert graphs.parameters.host_per_layer_s == launch
    assert EngineSetting(cuda_graphs=False).profile(eager) == eager


def test_a_prompt_longer_than_a_step_needs_chunks():
    with pytest.raises(InputError, match="256 tokens exceed 100"):
        plan(EngineSetting(max_prefill_tokens=100))
    chunked = plan(EngineSetting(max_prefill_tokens=100, chunked_prefill=True))
    assert chunked.config.max_rolling_batch_prefill_tokens == 100


def test_chunks_shorten_the_longest_gap_between_tokens():
    """2,048 prompt tokens at once pause the others for as long; 256 at a time do not."""
    workload = replace(LLAMA, input_tokens=2048, output_tokens=32)

    def longest_gap_s(setting):
        level = plan(setting, workload).simulate(LevelSpec(0, Load(rate_per_s=0.5), num_requests=12))
        times = (record.token_times_s for record in level.records)
        return max(b - a for own in times for a, b in pairwise(own))

    whole = EngineSetting(chunked_prefill=False)
    chunks = EngineSetting(chunked_prefill=True, max_prefill_tokens=256)
    assert longest_gap_s(chunks) < 0.6 * longest_gap_s(whole)


def test_guesses_that_always_hold_give_all_tokens_of_a_step_at_once():
    """4 guesses that hold and the token after them: 5 tokens an event, 64 in 13 events."""
    setting = EngineSetting(speculation=Speculation(4, 1.0))
    level = plan(setting).simulate(LevelSpec(0, Load(concurrency=1), num_requests=1))
    counts = level.records[0].exchange.token_counts
    assert sum(counts) == 64
    assert max(counts) == 5


def test_fewer_copies_than_fit_are_rented_as_they_are():
    layout = Layout(P4D, 2, EngineSetting(copies=3))
    assert layout.copies == 3
    with pytest.raises(InputError, match="5 copies at TP 2 need 10 devices, it has 8"):
        plan(EngineSetting(copies=5), instance=P4D, degree=2)


def test_settings_compete_and_the_cheapest_that_keeps_the_slos_wins():
    alone = ask((AS_STATED,))
    both = ask((AS_STATED, EngineSetting(dtype="int4")))
    assert both.recommended.price_usd_per_hour <= alone.recommended.price_usd_per_hour
    assert {c.setting.dtype for c in both.candidates} == {None, "int4"}


def test_rounded_weights_come_with_the_caveat_on_quality():
    answer = ask((EngineSetting(dtype="int4"),))
    assert any("effect of rounding" in text for text in answer.warnings)
    assert not any("effect of rounding" in text for text in ask((AS_STATED,)).warnings)


def test_a_setting_stands_in_the_file():
    answer = ask((AS_STATED, EngineSetting(dtype="int4", max_batch_size=16)))
    document = answer.to_json()
    assert {c["setting"]["max_batch_size"] for c in document["candidates"]} == {None, 16}


KINDS = (RequestKind(100, 10, 3.0), RequestKind(1000, 50, 1.0))


def test_a_mix_is_planned_with_its_means_and_holds_its_longest():
    """(3 * 100 + 1000) / 4 = 325 in, (3 * 10 + 50) / 4 = 20 out; 1,050 tokens at most."""
    workload = Workload.mixed(LLAMA.shape, "float16", KINDS)
    assert (workload.input_tokens, workload.output_tokens) == (325, 20)
    assert workload.most_tokens == 1050
    assert plan(AS_STATED, workload).config.max_model_len == 1050


def test_a_mix_is_simulated_by_its_shares():
    """A quarter of 4,000 draws within four standard deviations, 27 each."""
    draw = Workload.mixed(LLAMA.shape, "float16", KINDS).requests(seed=1)
    long = sum(draw(number).input_tokens == 1000 for number in range(4000))
    assert long == pytest.approx(1000, abs=110)
    assert draw(7) == draw(7)


def test_bursts_need_more_machines_than_even_arrivals():
    def capacity(burstiness):
        workload = replace(LLAMA, burstiness=burstiness)
        slos = (Slo("ttft", "p90", 800.0),)
        answer = recommend(
            RecommendRequest(workload, TGI_2023, load=Load(rate_per_s=1.0), slos=slos, instances=(G5,), degrees=(1,))
        )
        return answer.recommended.figures["capacity_rate_per_s"].low

    assert capacity(0.2) < 0.9 * capacity(1.0)
