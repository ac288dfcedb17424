"""A setting that a target has no use for is refused as an option and named in a scenario file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.listener import SILENT
from lmi_bench.core.option import settings_of
from lmi_bench.core.scenario import ClientSection, EngineSection, SageMakerSection, parse_scenario
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.jobs.settings.sweep import SweepSettings
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.models.folder import shape_of_folder
from lmi_bench.targets import bundled
from lmi_bench.targets.applies import (
    Kind,
    idle_beside_engine,
    idle_in_engine,
    kind_of,
    option_of,
    refuse_idle,
    refuse_impossible,
    stated_names,
)
from lmi_bench.targets.bench import NO_ACCESS, Access
from lmi_bench.targets.drafting import drafter_for
from lmi_bench.targets.open import open_bench
from lmi_bench.targets.parts import scheduler_config
from lmi_bench.targets.simulated import open_simulated_engine
from tests.loadgen.aws.runtime_server import dummy_credentials, runtime_server

URL, SIMULATED, SAGEMAKER = "http://127.0.0.1:8000", "sim:ml.g5.2xlarge", "sagemaker:mine"
WORDS = "engine settings without effect here: "

ENGINE_VALUES = {
    "backend": "torch",
    "group_query_attention": "replicated-heads",
    "device": "cuda",
    "compile": True,
    "compile_shapes": "1x64",
    "artefact": "steps",
    "enforce_eager": True,
    "policy": "dynamic",
    "kv_layout": "contiguous",
    "batch_size": 7,
    "max_batch_delay_ms": 5.0,
    "max_rolling_batch_size": 3,
    "max_rolling_batch_prefill_tokens": 99,
    "chunked_prefill": True,
    "max_concurrent_requests": 9,
    "prefix_caching": True,
    "host_cache_gib": 4.0,
    "host_cache_gb_per_s": 9.0,
    "recompute_on_join": True,
    "follow_memory": True,
    "max_input_tokens": 5,
    "max_waiting_tokens": 7,
    "waiting_served_ratio": 0.5,
    "max_batch_total_tokens": 320,
    "dtype": "float32",
    "kv_dtype": "float32",
    "tensor_parallel": 2,
    "replicas": 2,
    "router": "random",
    "num_blocks": 9,
    "kv_tokens": 5000,
    "block_size": 32,
    "max_model_len": 96,
    "rope_scaling": "linear:2",
    "memory_share": 0.93,
    "threads": 1,
    "quantize": "int8",
    "smoothquant_alpha": 0.3,
    "smoothquant_per_token": False,
    "smoothquant_per_channel": False,
    "calibration": "a.txt",
    "draft": "ngram",
    "draft_tokens": 2,
    "draft_adaptive": False,
    "draft_acceptance": 0.5,
    "profile": "vllm-0.19",
}
BESIDE = {
    "batch_size": {"policy": "dynamic"},
    "max_batch_delay_ms": {"policy": "dynamic"},
    "router": {"replicas": 2},
    "draft": {"draft_acceptance": 0.5},
    "draft_tokens": {"draft": "ngram", "draft_acceptance": 0.5},
    "draft_adaptive": {"draft": "ngram", "draft_acceptance": 0.5},
    "draft_acceptance": {"draft": "ngram", "draft_acceptance": 0.9},
    "smoothquant_alpha": {"quantize": "smoothquant"},
    "smoothquant_per_token": {"quantize": "smoothquant"},
    "smoothquant_per_channel": {"quantize": "smoothquant"},
    "calibration": {"quantize": "smoothquant"},
    "compile_shapes": {"compile": True},
    "group_query_attention": {"tensor_parallel": 2},
    "host_cache_gib": {"prefix_caching": True},
    "host_cache_gb_per_s": {"prefix_caching": True, "host_cache_gib": 4.0},
}
"""What a setting needs beside it to have an effect."""
OTHERS = {
    "protocol": "lmi",
    "stream": False,
    "client.timestamps": "user",
    "client.receive": "python",
    "client.first_token_timeout_s": 9.0,
    "client.retries": "aws-standard",
    "client.connections": 2,
    "client.adapters": {"toy": 1.0},  # the server has no other name
    "client.priority": "realtime",
    "client.cacert": "authority.pem",
    "client.insecure": True,
}
IN_SWEEPS = {"client.session_header", "client.reset_prefix_cache"}
"""Settings that need conversations, or another request (`end_to_end/test_client_mixes.py`)."""
OF_SAGEMAKER = {
    "sagemaker.endpoint_url": "http://127.0.0.1:9",
    "sagemaker.inference_component": "part",
    "sagemaker.target_variant": "blue",
    "sagemaker.custom_attributes": "a=b",
}


def flat(value):
    """Plain values of an object, without those that differ from one object to the next."""
    if isinstance(value, dict):
        return {str(key): flat(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [flat(each) for each in value]
    fields = getattr(value, "__slots__", None) or getattr(value, "__dict__", None)
    module = type(value).__module__
    if not fields or not module.startswith("lmi_bench") or not isinstance(value, object):
        return (
            repr(value)
            if isinstance(value, str | int | float | bool | None)
            else str(getattr(value, "name", type(value).__name__))
        )
    return {name: flat(getattr(value, name)) for name in fields if name != "sampling_seed"}


def simulated_engine(settings):
    parts = open_simulated_engine("llama-2-7b", "ml.g5.12xlarge", settings, max_total_tokens=512)
    executors = [vars(each) for each in parts.executors]
    router = parts.router if len(parts.executors) > 1 else None
    shared = [parts.config, parts.facts, vars(parts.drafter) if parts.drafter else None]
    return [flat(executors), router, flat(shared), parts.profile]


def bundled_engine(settings):
    """What would be loaded, and how it would be scheduled; nothing is loaded."""
    refuse_impossible("bundled", settings)
    plan = bundled._plan("demo-15m", settings, SILENT)
    load = bundled._load_settings(plan, None)
    derived = SchedulerConfig(num_blocks=64, block_size=plan.block_size, max_model_len=96)
    shape = shape_of_folder(plan.folder)
    drafter = drafter_for(settings, shape, None)
    # the settings themselves always differ: what counts is what follows from them
    plan = replace(plan, settings=EngineSection(replicas=settings.replicas))
    router = settings.router if settings.replicas > 1 else None
    scheduled = scheduler_config(settings, derived)
    return [flat([plan, load, scheduled, vars(drafter) if drafter else None]), router, settings.follow_memory]


def built(make, settings):
    """What the settings make, or that they are refused, which is no silence either."""
    try:
        return make(EngineSection(**settings))
    except (InputError, CapacityError) as exc:
        return str(exc)


def is_idle(kind: Kind, name, settings):
    try:
        refuse_idle(kind, [f"engine.{name}"], EngineSection(**settings))
    except InputError:
        return True
    return False


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", EngineSection.model_fields)
@pytest.mark.parametrize(("kind", "make"), [("simulated", simulated_engine), ("bundled", bundled_engine)])
def test_an_engine_setting_changes_the_engine_or_is_refused(kind, make, name, beside):
    around = BESIDE.get(name, {}) if beside else {}
    if beside and kind == "bundled":
        around = {key: value for key, value in around.items() if key != "draft_acceptance"}
    value = ENGINE_VALUES[name]
    if kind == "simulated" and name in ("kv_layout", "chunked_prefill"):
        around = around | {"profile": "tgi-2023"}  # contiguous, whole prompts
        value = {"kv_layout": "paged", "chunked_prefill": True}[name]
    settings = around | {name: value}
    if is_idle(kind, name, settings):
        if name not in ("draft_acceptance", "profile"):
            named = idle_in_engine(kind, EngineSection(**settings))
            assert name in " ".join(named)
    else:
        assert built(make, settings) != built(make, around)


@pytest.mark.parametrize("target", [URL, SAGEMAKER])
@pytest.mark.parametrize("name", EngineSection.model_fields)
def test_an_endpoint_keeps_its_own_engine_settings(target, name):
    """Only the degree and the number format are recorded, for a calibration on the run."""
    settings = {name: ENGINE_VALUES[name]}
    recorded = name in ("tensor_parallel", "dtype")
    assert is_idle(kind_of(target), name, settings) is not recorded
    assert bool(idle_in_engine(kind_of(target), EngineSection(**settings))) is not recorded


@pytest.mark.parametrize("name", {**OTHERS, **OF_SAGEMAKER})
@pytest.mark.parametrize("target", ["engine", SIMULATED, URL, SAGEMAKER])
def test_settings_of_connections_and_of_sagemaker_are_for_those(target, name):
    value = {**OTHERS, **OF_SAGEMAKER}[name]
    scenario = parse_scenario({"target": target}).with_overrides({name: value})
    has_effect = target == SAGEMAKER or (target == URL and name in OTHERS)
    assert bool(idle_beside_engine(scenario)) is not has_effect
    if has_effect:
        refuse_idle(kind_of(target), stated_names({name: value}), scenario.engine)
    else:
        with pytest.raises(InputError, match=f"{option_of(name)} is for "):
            refuse_idle(kind_of(target), stated_names({name: value}), scenario.engine)


def test_every_setting_of_a_section_is_walked():
    assert set(ENGINE_VALUES) == set(EngineSection.model_fields)
    assert {name for name in OTHERS if "." in name} | IN_SWEEPS == {
        f"client.{name}" for name in ClientSection.model_fields
    }
    assert set(OF_SAGEMAKER) == {f"sagemaker.{name}" for name in SageMakerSection.model_fields}


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_of_connections_changes_what_is_sent(name, monkeypatch, tmp_path):
    dummy_credentials(monkeypatch, tmp_path)
    with runtime_server(signed=False) as url:
        plain = parse_scenario({"target": url, "protocol": "openai", "model": "toy"})
        stated = plain.with_overrides({name: OTHERS[name]})
        usual, changed = (sent_by(open_bench(scenario, NO_ACCESS)) for scenario in (plain, stated))
    assert usual != changed


def test_another_process_opens_the_same_server_without_asking_it():
    """From the scenario and the answers that this one has; the server may be away meanwhile."""
    with runtime_server(signed=False) as url:
        bench = open_bench(parse_scenario({"target": url}), NO_ACCESS)
    again = open_bench(parse_scenario(bench.scenario.canonical()), Access(asked=bench.asked))
    assert sent_by(again) == sent_by(bench)
    older = {"tokenizer": None, "format": {"length_field": "max_tokens"}}
    chat = bench.scenario.with_overrides({"protocol": "openai-chat"})
    assert "max_tokens" in str(sent_by(open_bench(chat, Access(asked=older))))


def sent_by(bench):
    """What a bench's own connection is made with."""
    made = []

    def record(target, *args, _init=HttpTarget.__init__, **keywords):
        _init(target, *args, **keywords)
        made.extend([flat(args[1:]), flat(keywords | {"count_tokens": None})])

    async def kind(target):
        return type(target).__name__

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpTarget, "__init__", record)
        return [bench.run(kind), *made]


def test_options_are_named_as_the_command_line_has_them():
    for each in settings_of(SweepSettings):
        stated = each.option.name_of(each.name).partition("/")[0]
        if each.place != "stream":  # streaming is the default, so the option is its opposite
            assert option_of(each.place or each.name) == stated


@pytest.mark.parametrize(
    ("target", "flags", "said"),
    [
        (URL, {"engine.policy": "dynamic"}, "--policy is for .*an endpoint keeps its own"),
        (SIMULATED, {"engine.threads": 2}, "--threads is for .*a simulated engine computes"),
        (SIMULATED, {"engine.enforce_eager": True}, "--graphs is for .*computes nothing"),
        (SIMULATED, {"engine.router": "random"}, "--router is for several replicas"),
        (SIMULATED, {"stream": False}, "--no-stream is for an endpoint"),
        (SIMULATED, {"engine.batch_size": 8}, "--batch-size is for dynamic batching"),
        (URL, {"step_trace": "a"}, "--step-trace is for an engine in this process"),
        ("engine", {"engine.profile": "tgi-2023"}, "--profile is for a simulated engine"),
        (URL, {"sagemaker.target_variant": "a"}, "--target-variant is for a SageMaker endpoint"),
    ],
)
def test_an_option_without_effect_is_refused(target, flags, said):
    with pytest.raises(InputError, match=said):
        refuse_idle(kind_of(target), stated_names(flags), EngineSection())


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (URL, {"client.connections": 2, "stream": False, "protocol": "lmi", "engine.dtype": None}),
        (SAGEMAKER, {"sagemaker.target_variant": "a", "client.retries": "aws-standard"}),
        (SIMULATED, {"engine.num_blocks": 64, "stream": True, "client.receive": None}),
        ("engine", {"engine.threads": 2}),
        (URL, {"engine.tensor_parallel": 4, "engine.dtype": "float8"}),
    ],
)
def test_an_option_that_the_target_knows_is_not(target, flags):
    refuse_idle(kind_of(target), stated_names(flags), EngineSection())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 8, "max_batch_delay_ms": 5}, "batch_size, max_batch_delay_ms (for dyn"),
        ({"policy": "dynamic", "max_rolling_batch_size": 8}, "max_rolling_batch_size (for rol"),
        ({"router": "random"}, "router (for several replicas)"),
        ({"draft_tokens": 2, "draft_adaptive": False}, "draft_tokens, draft_adaptive (for spec"),
        ({"quantize": "int8", "smoothquant_alpha": 0.3}, "smoothquant_alpha (for quantize smooth"),
        ({"quantize": "int8", "calibration": "a.txt"}, "calibration (for awq and smoothquant)"),
        ({"compile_shapes": "1x64"}, "compile_shapes (for compiled or captured steps)"),
        ({"enforce_eager": True}, "enforce_eager (for a GPU)"),
        ({"num_blocks": 9, "memory_share": 0.3}, "memory_share (for a cache whose size"),
        ({"profile": "tgi-2023"}, "profile (for a simulated engine)"),
        ({"router": "random", "draft_tokens": 2}, "router (for several replicas); draft_tokens ("),
    ],
)
def test_what_changes_nothing_in_the_bundled_engine_is_named(settings, named):
    (line,) = idle_in_engine("bundled", EngineSection(**settings))
    for part in named.split("; "):
        assert part in line
    assert line.startswith(WORDS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 4},  # the default, stated
        {"policy": "dynamic", "batch_size": 8},
        {"max_rolling_batch_size": 8, "chunked_prefill": True},
        {"replicas": 2, "router": "random", "threads": 2, "backend": "torch"},
        {"draft": "ngram", "draft_tokens": 2},
        {"quantize": "smoothquant", "smoothquant_alpha": 0.3, "calibration": "a.txt"},
        {"compile": True, "compile_shapes": "1x64"},
        {"device": "cuda", "compile_shapes": "1x64"},
        {"backend": "triton", "enforce_eager": True},
    ],
)
def test_what_counts_is_not_named(settings):
    assert idle_in_engine("bundled", EngineSection(**settings)) == ()


def test_an_engine_that_computes_nothing_has_no_threads():
    settings = EngineSection(threads=4, backend="torch", block_size=32)
    (line,) = idle_in_engine("simulated", settings)
    assert line.startswith(f"{WORDS}backend, threads (for the bundled engine: a simulated")


def test_a_simulated_cache_has_the_blocks_that_were_stated():
    """As many tokens as with the profile's blocks of 1, down to a whole block."""
    usual, stated = (
        open_simulated_engine(
            "llama-2-7b", "ml.g5.2xlarge", EngineSection(block_size=size), max_total_tokens=512
        ).config
        for size in (None, 32)
    )
    assert stated.block_size == 32
    assert usual.cache_tokens - 32 < stated.cache_tokens <= usual.cache_tokens


@pytest.mark.parametrize("dtype", ["float8", "int8", "int4", "mxfp4"])
def test_narrow_weights_are_simulated_and_recorded_but_not_computed(dtype):
    engine = EngineSection(dtype=dtype)
    refuse_impossible("simulated", engine)
    refuse_idle("url", ["engine.dtype"], engine)
    with pytest.raises(InputError, match=f"--dtype {dtype}: the bundled engine takes float32, .*--quantize"):
        refuse_impossible("bundled", engine)
