"""Translates a plan into each server's settings: LMI (djl-serving), TGI, vLLM, SGLang.

LMI starts as many copies as its container's accelerators allow, behind one queue; the others start
one. Every value that affects memory or concurrency is written out: defaults differ between
versions. `unsupported_settings` lists what a server's files cannot express.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from lmi_bench.analysis.fleet.start_up import loads_in_parallel
from lmi_bench.analysis.model.capacity import WITHOUT_FLOAT16
from lmi_bench.analysis.model.memory import weight_bytes
from lmi_bench.analysis.model.setup import OWN_LAYER
from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.models import find_model_entry
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.deploy.checks import era_of
from lmi_bench.deploy.engine_arguments import engine_arguments, version_key
from lmi_bench.deploy.images import Image
from lmi_bench.deploy.plan import NGRAM, DeploymentPlan
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

_PREFILL_TOKENS: Final = 4096
_JUMPSTART_REQUESTS: Final = 128
_LONGEST_NGRAM: Final = 4
_LMI_DTYPES: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "auto": "auto"}
_USUAL: Final = "float16"  # of a plan: 16 bits, as the checkpoint has them
_FLOAT8_SINCE: Final = 8.9  # compute capability
_TGI_CACHE_DTYPE_SINCE: Final = "3.0"
_DRAFT_MODELS_SINCE: Final = "0.14"
"""The first version of vLLM whose second engine takes a draft model (vllm-project/vllm 24322)."""
_WITHOUT_DRAFTS: Final = ("trtllm", "deepspeed")
_NAMES: Final = read_rows("server_settings.csv", "deploy")
_VLLM_ONLY: Final = [row["lmi"] for row in _NAMES if row["lmi_with_vllm_only"]]


def lmi_settings(plan: DeploymentPlan, startup_s: int | None = None) -> dict[str, str]:
    """The plan's serving.properties, by key; without an image for the newest era."""
    engine, image, setup = plan.engine, plan.image, plan.setup
    old = image is not None and era_of(image.djl) == "A"
    dtype = served_dtype(plan, knows_auto=not old)
    stored_bytes = weight_bytes(setup.shape, setup.dtype)
    values = _values(plan) | {
        "engine": "MPI" if old else "Python",
        "batching": "auto",
        "dtype": dtype and _LMI_DTYPES[dtype],
        "formatter": "jsonlines" if old else None,
        "chunked": engine.chunked_prefill,
        "eager": None if engine.cuda_graphs is None else not engine.cuda_graphs,
        "whole_experts": _lmi_splits_experts(plan) or None,
        **_lmi_draft(plan),
        "parallel_loading": loads_in_parallel(setup.instance, weight_bytes=stored_bytes, workers=plan.copies) or None,
        "startup_s": startup_s,
    }
    if old:
        values |= {"context": None, "chunked": None}
    if image is not None and image.engine != "vllm":
        values["memory_share"] = None
    named = _named("lmi", values)
    return _as_text(named if image is None else named | _other_engine(plan, image))


def _values(plan: DeploymentPlan) -> dict[str, Any]:
    """What every server is told, by the first column of data/server_settings.csv."""
    limits = plan.limits
    return {
        "location": plan.weights.location,
        "degree": plan.setup.tensor_parallel,
        "stages": plan.engine.pipeline,
        "sequences": limits.max_num_seqs,
        "context": limits.max_model_len,
        "quantization": _quantization(plan),
        "step_tokens": limits.step_tokens,
        "memory_share": limits.memory_share,
        "eager": plan.engine.cuda_graphs is False or None,
        "cache": "fp8" if plan.has_one_byte_cache else None,
        "trust": plan.trusts_code or None,
    }


def _named(server: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by their names in a server's files; None where one is not stated."""
    return {row[server]: values.get(row["value"]) for row in _NAMES if row[server]}


def _other_engine(plan: DeploymentPlan, image: Image) -> dict[str, Any]:
    """What TensorRT-LLM and NeuronX read instead of vLLM's options; shapes are compiled."""
    instance, limits = plan.setup.instance, plan.limits
    total = limits.max_model_len
    if image.family == "neuronx":
        cores = (instance.neuron_cores or instance.num_accelerators) // instance.num_accelerators
        return dict.fromkeys(_VLLM_ONLY) | {
            "engine": "Python",
            "option.n_positions": total,
            "option.tensor_parallel_degree": plan.setup.tensor_parallel * cores,
        }
    if image.family != "trtllm":
        return {}
    # max_output_len was the answer's length in 0.26, then the whole sequence's, then renamed
    length, tokens = {
        "0.26.0": ("option.max_output_len", total - limits.max_input_tokens),
        "0.32.0": ("option.max_output_len", total),
    }.get(image.djl, ("option.max_seq_len", total))
    step = plan.engine.max_prefill_tokens or max(_PREFILL_TOKENS, limits.max_input_tokens)
    return dict.fromkeys(_VLLM_ONLY) | {
        "option.rolling_batch": "auto" if image.djl == "0.26.0" else "trtllm",
        "option.max_input_len": limits.max_input_tokens,
        length: tokens,
        "option.max_num_tokens": None if image.djl == "0.26.0" else step,
    }


def _lmi_draft(plan: DeploymentPlan) -> dict[str, Any]:
    """The draft in the words of the image's engine; LMI-Distributed has names of its own."""
    image = plan.image
    if plan.draft is None:
        return {}
    if _takes_speculative_config(image):
        return {"draft_config": _speculative_config(plan)}
    if plan.draft == NGRAM or (image is not None and image.family in _WITHOUT_DRAFTS):
        return {}
    return {"draft": plan.draft, "draft_tokens": plan.draft_tokens}


def _lmi_splits_experts(plan: DeploymentPlan) -> bool:
    """True if LMI's vLLM keeps whole experts on each device, as planned."""
    image = plan.image
    known = "" if image is None or image.engine != "vllm" else image.engine_version
    takes = image is None or "enable_expert_parallel" in engine_arguments("vllm", known)
    return bool(plan.engine.expert_parallel) and takes


def _takes_speculative_config(image: Image | None) -> bool:
    if image is None or image.engine != "vllm" or not image.engine_version:
        return image is None or era_of(image.djl) == "C"
    return "speculative_config" in engine_arguments(image.engine, image.engine_version)


def tgi_environment(plan: DeploymentPlan) -> dict[str, str]:
    """TGI's environment variables for one copy."""
    engine, limits = plan.engine, plan.limits
    values = {
        "prompt": limits.max_input_tokens,
        "prefill": max(engine.max_prefill_tokens or _PREFILL_TOKENS, limits.max_input_tokens),
        # running and queued requests; for minimum latency none may queue
        "requests": 1 if limits.max_num_seqs == 1 else 2 * limits.max_num_seqs,
        **_tgi_dtype(plan),
        "cache": "fp8_e4m3fn" if _tgi_has_one_byte_cache(plan) else None,
        "graphs": 0 if engine.cuda_graphs is False else None,
        "draft_tokens": plan.draft_tokens if plan.draft == NGRAM else None,
    }
    return _as_text(_named("tgi", _values(plan) | values))


def _tgi_has_one_byte_cache(plan: DeploymentPlan) -> bool:
    """True if TGI can keep the plan's one-byte cache: by its version and the device."""
    capability = plan.setup.instance.accelerator.compute_capability or 0.0
    version = plan.image.engine_version if plan.image else ""
    is_old = bool(version) and version_key(version) < version_key(_TGI_CACHE_DTYPE_SINCE)
    return plan.has_one_byte_cache and capability >= _FLOAT8_SINCE and not is_old


def vllm_arguments(plan: DeploymentPlan) -> dict[str, str]:
    """The arguments of `vllm serve` for one copy; the value of a switch is true."""
    engine, limits, degree = plan.engine, plan.limits, plan.setup.tensor_parallel
    groups = plan.setup.parallelism.attention_groups
    values = {
        "degree": 1 if engine.dp_attention else degree,
        "attention_copies": degree if engine.dp_attention else None,
        "whole_experts": engine.expert_parallel or None,
        "sequences": -(-limits.max_num_seqs // groups),
        "dtype": served_dtype(plan),
        "step_tokens": -(-limits.step_tokens // groups),
        "chunked": engine.chunked_prefill or None,
        "unchunked": engine.chunked_prefill is False or None,
        "draft_config": _speculative_config(plan),
    }
    return _as_text(_named("vllm", _values(plan) | values))


def sglang_arguments(plan: DeploymentPlan) -> dict[str, str]:
    """The arguments of `sglang.launch_server` for one copy; the value of a switch is true."""
    engine, draft, degree = plan.engine, plan.draft, plan.setup.tensor_parallel
    values = _values(plan) | {
        "expert_degree": degree if engine.expert_parallel else None,
        "attention_copies": degree if engine.dp_attention else None,
        "dp_attention": engine.dp_attention or None,
        "dtype": served_dtype(plan),
        "memory_share": math.floor(plan.limits.static_share * 1e5) / 1e5,
        "cache": "fp8_e4m3" if plan.has_one_byte_cache else None,
    }
    if engine.chunked_prefill is False:
        values["step_tokens"] = -1
    if draft == NGRAM:
        values |= {"drafting": "NGRAM", "draft_tokens": plan.draft_tokens}
    elif draft is not None:
        is_own = draft == OWN_LAYER
        values |= {
            "drafting": "NEXTN" if is_own else "STANDALONE",
            "draft": None if is_own else draft,
            "draft_steps": plan.draft_tokens,
            "draft_branches": 1,
            "draft_tokens": plan.draft_tokens + 1,
        }
    return _as_text(_named("sglang", values))


def unsupported_settings(plan: DeploymentPlan, server: str) -> list[str]:
    """Engine settings that this server's files cannot express; the user must set them."""
    engine, image, draft = plan.engine, plan.image, f"draft {plan.draft}"
    chunked, draft_model = engine.chunked_prefill is not None, plan.draft not in (None, NGRAM)
    cache = {f"kv_dtype {engine.kv_dtype}": plan.has_one_byte_cache}
    old = image is not None and bool(image.djl) and era_of(image.djl) == "A"
    missing = {"chunked_prefill": chunked and (server == "tgi" or old)}
    split = engine.split
    if server == "lmi" and _lmi_splits_experts(plan):
        split = replace(engine, expert_parallel=None).split
    missing[split] = bool(split) and server not in ("vllm", "sglang")
    if server == "tgi":
        missing |= ({} if _tgi_has_one_byte_cache(plan) else cache) | {draft: draft_model}
    elif server == "lmi" and image is not None and image.engine != "vllm":
        missing |= cache | {
            draft: plan.draft == NGRAM or (draft_model and image.family in _WITHOUT_DRAFTS),
            "memory_share": engine.memory_share is not None,
            "cuda_graphs": engine.cuda_graphs is not None,
        }
    elif server == "lmi":
        missing[draft] = plan.draft == NGRAM and not _takes_speculative_config(image)
    return [name for name, is_missing in missing.items() if is_missing]


def served_dtype(plan: DeploymentPlan, *, knows_auto: bool = True) -> str | None:
    """The type of 16- or 32-bit weights: the checkpoint's, unless the user states another.

    None: the checkpoint states a narrower format.

    knows_auto  True if the server finds the checkpoint's type by itself, as `auto`

    Raises InputError for a type that the engine refuses for this model.
    """
    shape, dtype, device = plan.setup.shape, plan.setup.dtype, plan.setup.instance.accelerator
    is_wide = dtype in ("bfloat16", "float32")
    is_stated = is_wide or (dtype == _USUAL and plan.weights.stated_dtype)
    if shape.architecture in WITHOUT_FLOAT16 and (is_stated or not device.has_bfloat16) and not is_wide:
        advice = "leave out --dtype"
        if not device.has_bfloat16:
            advice = f"take a GPU with bfloat16, which {device.name} lacks"
        raise InputError(f"{shape.name} overflows in float16, which engines refuse: {advice}, or --dtype float32")
    if plan.weights.states_dtype and not is_stated:
        return None
    if is_stated or knows_auto:
        return dtype if is_stated else "auto"
    try:
        published = find_model_entry(shape.name).checkpoint_dtype
    except InputError:
        return _USUAL  # a folder
    return "bfloat16" if published == "bfloat16" and device.has_bfloat16 else _USUAL


def _quantization(plan: DeploymentPlan) -> str | None:
    """The quantization at the start-up of 16-bit weights; None if the checkpoint has a format."""
    return "fp8" if plan.setup.dtype == "float8" and not plan.weights.states_dtype else None


def _tgi_dtype(plan: DeploymentPlan) -> dict[str, str | None]:
    """TGI's values for the weights' format; a checkpoint states its own kind of FP8."""
    match plan.setup.dtype:
        case "int4":
            name = plan.weights.location.lower()  # else TGI finds the method in the checkpoint
            return {"quantization": next((m for m in ("gptq", "awq") if m in name), None)}
        case "float8":
            return {"quantization": _quantization(plan)}
        case "float16" | "bfloat16":
            dtype = served_dtype(plan, knows_auto=False)
            return {"quantization": None, "dtype": None if dtype == _USUAL else dtype}
    raise InputError(f"TGI serves float16, bfloat16, float8 or int4 weights, not {plan.setup.dtype}")


def _speculative_config(plan: DeploymentPlan) -> str | None:
    """vLLM's JSON for the draft; None without one."""
    if plan.draft is None:
        return None
    version = "" if plan.image is None else plan.image.engine_version
    is_early = version and version_key(version) < version_key(_DRAFT_MODELS_SINCE)
    if is_early and plan.draft not in (NGRAM, OWN_LAYER):
        raise InputError(
            f"vLLM {version} in this image takes no draft model, the first is "
            f"{_DRAFT_MODELS_SINCE}: --image lmi19 or newer, or --draft ngram"
        )
    key = "method" if plan.draft in (NGRAM, OWN_LAYER) else "model"
    config = {key: plan.draft, "num_speculative_tokens": plan.draft_tokens}
    if plan.draft == NGRAM:
        config["prompt_lookup_max"] = _LONGEST_NGRAM
    return json.dumps(config)


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that are not None, as the files write them."""
    return {name: _text(value) for name, value in settings.items() if value is not None}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def jumpstart_environment(shape: ModelShape, instance: Instance) -> dict[str, str]:
    """TGI's variables as JumpStart set them in 2023, published for Llama 2 (context 4,096).

    One shard per accelerator if the heads allow it, requests up to the whole context of the model,
    128 of them at once. Raises CapacityError if neither all accelerators nor one can be used.
    """
    context = shape.max_positions
    degrees = (instance.num_accelerators, 1)
    shards = next((n for n in degrees if tensor_parallel_problem(shape, n) is None), None)
    if shards is None:
        raise CapacityError(f"{shape.name} cannot be split over the accelerators of {instance.instance_type}")
    variables = {
        "SM_NUM_GPUS": shards,
        "MAX_INPUT_LENGTH": context - 1,
        "MAX_TOTAL_TOKENS": context,
        "MAX_BATCH_PREFILL_TOKENS": max(_PREFILL_TOKENS, context),
        "MAX_CONCURRENT_REQUESTS": _JUMPSTART_REQUESTS,
    }
    return _as_text(variables)
