"""Backends, JumpStart's settings, and the same file on the bundled engine."""

from __future__ import annotations

import pytest

from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.deploy.backend_choice import CHOSEN, EFFECTS, OUT, auto_resolves_to, choose_backend, degree_note
from lmi_bench.deploy.bundled_engine import bundled_settings
from lmi_bench.deploy.option_table import Setting
from lmi_bench.deploy.server_settings import jumpstart_environment


@pytest.mark.parametrize(
    ("model", "instance", "era", "chosen"),
    [
        ("llama-2-7b", "ml.g5.12xlarge", "A", "LMI-Distributed"),
        ("llama-2-7b", "ml.g5.12xlarge", "C", "vLLM"),
        ("mixtral-8x7b", "ml.p4d.24xlarge", "B", "LMI-Distributed"),
        ("llama-2-7b", "ml.inf2.48xlarge", "A", "NeuronX"),
        ("llama-2-7b", "ml.inf2.48xlarge", "C", "vLLM"),
    ],
)
def test_one_backend_is_chosen_and_every_one_has_its_reason(model, instance, era, chosen):
    verdicts = choose_backend(find_model(model), find_instance(instance), era)
    assert [v.backend for v in verdicts if v.verdict == CHOSEN] == [chosen]
    assert verdicts[0].backend == chosen
    assert all(v.reason for v in verdicts)
    assert len(verdicts) == 7


def verdict(backend, model, instance, era):
    verdicts = choose_backend(find_model(model), find_instance(instance), era)
    return next(v for v in verdicts if v.backend == backend)


def test_a_mixture_of_experts_has_every_backend_but_neuronx():
    assert verdict("NeuronX", "mixtral-8x7b", "ml.inf2.48xlarge", "A").verdict == OUT
    assert verdict("NeuronX", "llama-2-7b", "ml.inf2.48xlarge", "A").verdict == CHOSEN
    for backend in ("LMI-Distributed", "vLLM", "TensorRT-LLM"):
        assert verdict(backend, "mixtral-8x7b", "ml.g5.48xlarge", "A").verdict != OUT


def test_a_compiled_backend_names_the_gpu_it_is_compiled_for():
    reason = verdict("TensorRT-LLM", "mistral-7b", "ml.g5.12xlarge", "A").reason
    assert "for this GPU type only (A10G)" in reason


def test_a_gpu_without_bfloat16_is_told():
    for machine in ("ml.g4dn.12xlarge", "p3dn.24xlarge"):
        assert "has no bfloat16" in verdict("vLLM", "llama-2-7b", machine, "B").reason
    assert "bfloat16" not in verdict("vLLM", "llama-2-7b", "ml.g5.12xlarge", "B").reason


@pytest.mark.parametrize(
    ("instance", "degrees", "padded"),
    [
        ("ml.inf2.48xlarge", "1 (24 workers), 2 (12 workers), 4 (6 workers), 8 (3 workers)", "12 and 24"),
        ("ml.trn1.32xlarge", "8 (4 workers), 32 (1 workers); `max` is 32", None),
        ("ml.g5.48xlarge", "8 accelerators: 1 (8 workers)", None),
    ],
)
def test_degrees_of_aws_silicon_are_cores_that_its_runtime_allows(instance, degrees, padded):
    """Llama 3 8B has 32 query heads; the Neuron guide: 1, 2, 4, 8, 12 and 24 on Inferentia2, 1, 2,
    8 and 32 on Trainium. The post served it on 24 cores."""
    note = degree_note(find_model("llama-3-8b"), find_instance(instance))
    assert degrees in note
    assert (", 24 (1 workers)" in note) == (instance == "ml.inf2.48xlarge")
    assert ("padded to a multiple of" in note) == (padded is not None)
    assert padded is None or f"multiple of {padded}" in note


def test_every_backend_says_what_is_real_here_and_what_needs_its_device():
    verdicts = choose_backend(find_model("llama-2-7b"), find_instance("ml.g5.12xlarge"), "A")
    assert {row["backend"] for row in EFFECTS} == {each.backend for each in verdicts}
    assert all(row["bundled"] and row["device"] for row in EFFECTS)


def test_auto_is_a_named_scheduler_in_every_version():
    gpu = find_instance("ml.g5.12xlarge")
    assert auto_resolves_to(gpu, "A") == "lmi-dist"
    assert "vllm" in auto_resolves_to(gpu, "B")
    assert "async" in auto_resolves_to(gpu, "C")


@pytest.mark.parametrize(("instance", "shards"), [("ml.g5.2xlarge", 1), ("ml.g5.12xlarge", 4), ("ml.p4d.24xlarge", 8)])
def test_jumpstart_set_a_shard_for_each_gpu_and_the_whole_context(instance, shards):
    """The posts: SM_NUM_GPUS 1, 4, 8 by instance; 4095 and 4096 tokens; 128 at once."""
    shape = find_model("llama-2-7b")
    assert jumpstart_environment(shape, find_instance(instance)) == {
        "SM_NUM_GPUS": str(shards),
        "MAX_INPUT_LENGTH": "4095",
        "MAX_TOTAL_TOKENS": "4096",
        "MAX_BATCH_PREFILL_TOKENS": "4096",
        "MAX_CONCURRENT_REQUESTS": "128",
    }


def test_falcon_7b_runs_on_one_gpu_alone():
    """71 heads: no other degree divides them."""
    environment = jumpstart_environment(find_model("falcon-7b"), find_instance("ml.g5.12xlarge"))
    assert environment["SM_NUM_GPUS"] == "1"


def bundled(simulated=False, era="A", **settings):
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return bundled_settings(
        {name: Setting(str(value), "file") for name, value in named.items()}, simulated=simulated, era=era
    )


@pytest.mark.parametrize("name", ["max_logprobs", "compilation_config", "foo_bar"])
def test_an_option_that_only_the_container_knows_is_no_option_of_compiled_steps(name):
    found = bundled(**{"option__rolling_batch": "auto", f"option__{name}": "4"})
    assert not any("compiled" in note for note in found.notes)


def test_a_container_of_today_chunks_caches_and_batches_as_it_does_unasked():
    found = bundled(era="C", option__rolling_batch="auto")
    assert found.engine == {
        "policy": "rolling",
        "chunked_prefill": True,
        "prefix_caching": True,
        "max_rolling_batch_size": 32,
    }
    assert found.lmi_replies == "async"
    assert "prefix caching on" in found.batching
    stated = bundled(
        era="C", option__rolling_batch="vllm", option__enable_prefix_caching="false", option__max_rolling_batch_size=64
    )
    assert stated.engine["prefix_caching"] is False
    assert stated.engine["max_rolling_batch_size"] == 64
    assert "max_rolling_batch_size" not in bundled(era="C", option__rolling_batch="vllm").engine
    assert bundled(era="B").lmi_replies == "rolling"
    assert bundled(era="C", batch_size=4).lmi_replies == "batched"
    assert bundled(era="B").engine == {"policy": "rolling"}


def test_the_file_of_a_container_sets_the_bundled_engine():
    found = bundled(
        option__model_id="org/model",
        option__tensor_parallel_degree="max",
        option__max_rolling_batch_size=16,
        option__max_rolling_batch_prefill_tokens=1024,
        option__max_model_len=2048,
        option__paged_attention="False",
        option__dtype="fp16",
        option__enable_prefix_caching="true",
        option__speculative_config='{"method": "ngram", "num_speculative_tokens": 3}',
        option__gpu_memory_utilization="0.8",
        option__model_loading_timeout=600,
        option__enforce_eager="true",
        job_queue_size=100,
    )
    assert found.engine == {
        "policy": "rolling",
        "tensor_parallel": "max",
        "max_rolling_batch_size": 16,
        "max_rolling_batch_prefill_tokens": 1024,
        "max_model_len": 2048,
        "kv_layout": "contiguous",
        "dtype": "bfloat16",
        "prefix_caching": True,
        "draft": "ngram",
        "draft_tokens": 3,
        "memory_share": 0.8,
        "max_concurrent_requests": 116,  # 100 wait beside 16 that run
        "enforce_eager": True,
    }
    EngineSection(**found.engine)
    assert (found.model, found.loading_timeout_s) == ("org/model", 600)
    assert found.ignored == ()


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"batch_size": 8, "max_batch_delay": 50}, {"policy": "dynamic", "batch_size": 8}),
        ({"option__rolling_batch": "disable"}, {"policy": "none"}),
        ({"option__rolling_batch": "disable", "batch_size": 4}, {"policy": "dynamic"}),
        ({"option__rolling_batch": "disable", "option__async_mode": "true"}, {"policy": "rolling"}),
        ({"option__rolling_batch": "lmi-dist"}, {"policy": "rolling"}),
        ({}, {"policy": "rolling"}),
    ],
)
def test_batching_follows_the_containers_rules(settings, engine):
    assert engine.items() <= bundled(**settings).engine.items()


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"option__quantize": "awq"}, {"quantize": "awq-int4"}),
        ({"option__quantization": "fp8"}, {"quantize": "fp8"}),
        (
            {"option__quantize": "smoothquant", "option__smoothquant_alpha": 0.5},
            {"quantize": "smoothquant", "smoothquant_alpha": 0.5},
        ),
        ({"option__rotary_scaling_type": "linear", "option__rotary_scaling_factor": 2}, {"rope_scaling": "linear:2"}),
    ],
)
def test_quantization_and_stretched_positions_become_the_engines_own(settings, engine):
    found = bundled(**settings)
    assert engine.items() <= found.engine.items()
    assert found.ignored == ()


def test_compiled_positions_bound_a_request_whatever_the_token_limit():
    """NeuronX compiles n_positions; a longer max_tokens cannot be served."""
    found = bundled(option__n_positions=1024, option__max_tokens=4096)
    assert found.engine["max_model_len"] == 1024


def test_a_simulated_engine_keeps_half_precision():
    assert bundled(simulated=True, option__dtype="fp16").engine["dtype"] == "float16"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"option__quantize": "gptq"}, "file: option.quantize=gptq: the bundled engine has awq,"),
        ({"option__load_in_8bit": "true"}, "the bundled engine has awq"),
        ({"option__speculative_config": '{"a": 1}'}, "neither a model nor the method ngram"),
        ({"option__speculative_config": "{x"}, "is not JSON"),
    ],
)
def test_what_would_be_something_else_here_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        bundled(**settings)
