"""Translates a plan into each server's settings: LMI (djl-serving), TGI, vLLM.

LMI starts as many copies as its container's accelerators allow, behind one queue; TGI and vLLM
start one. Every value that affects memory or concurrency is written out: defaults differ between
versions. `unsupported_settings` lists what a server's files cannot express.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from lmi_bench.analysis.model.memory import weight_format
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.deploy.checks import era_of
from lmi_bench.deploy.engine_arguments import engine_arguments, version_key
from lmi_bench.deploy.images import Image
from lmi_bench.deploy.plan import NGRAM, DeploymentPlan
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

SERVERS: Final = ("lmi", "tgi", "vllm")
_LOADING_S: Final = 1200
_PREFILL_TOKENS: Final = 4096
_JUMPSTART_REQUESTS: Final = 128
_JUMPSTART_MODELS: Final = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
_LONGEST_NGRAM: Final = 4
_LMI_DTYPES: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_QUANTIZED: Final = ("int4", "mxfp4")
"""Weights from a quantized checkpoint, whose config states their format."""
_DRAFT_MODELS_SINCE: Final = "0.14"
"""The first version of vLLM whose second engine takes a draft model (vllm-project/vllm 24322)."""
_WITHOUT_DRAFTS: Final = ("trtllm", "deepspeed")
_VLLM_ONLY: Final = (
    *("option.max_model_len", "option.max_rolling_batch_prefill_tokens", "option.enforce_eager"),
    *("option.gpu_memory_utilization", "option.kv_cache_dtype", "option.speculative_config"),
)


def lmi_settings(
    plan: DeploymentPlan,
    image: Image | None = None,
    *,
    trust_remote_code: bool = False,
    model_loading_timeout_s: int = _LOADING_S,
) -> dict[str, str]:
    """The plan's serving.properties, by key; without an image for the newest era."""
    engine, old = plan.engine, image is not None and era_of(image.djl) == "A"
    dtype, quantize = (None, None) if plan.checkpoint_states_dtype else lmi_dtype(plan.setup.dtype)
    prefill = max(_PREFILL_TOKENS, plan.max_model_len) if old else None
    settings = {
        "engine": "MPI" if old else "Python",
        "option.model_id": plan.model_id,
        "option.tensor_parallel_degree": plan.setup.tensor_parallel,
        "option.rolling_batch": "auto",
        "option.max_rolling_batch_size": plan.slots,
        "option.max_model_len": None if old else plan.max_model_len,
        "option.dtype": dtype,
        "option.quantize": quantize,
        "option.output_formatter": "jsonlines" if old else None,
        "option.max_rolling_batch_prefill_tokens": engine.max_prefill_tokens or prefill,
        "option.enable_chunked_prefill": None if old else engine.chunked_prefill,
        "option.gpu_memory_utilization": engine.memory_share,
        "option.enforce_eager": None if engine.cuda_graphs is None else not engine.cuda_graphs,
        "option.kv_cache_dtype": "fp8" if plan.has_one_byte_cache else None,
        **_lmi_draft(plan, image),
        "option.trust_remote_code": trust_remote_code or None,
        "option.model_loading_timeout": model_loading_timeout_s,
    }
    if image is not None:
        settings |= _other_engine(plan, image)
    return _as_text(settings)


def _other_engine(plan: DeploymentPlan, image: Image) -> dict[str, Any]:
    """What TensorRT-LLM and NeuronX read instead of vLLM's options; shapes are compiled."""
    instance, total = plan.setup.instance, plan.max_model_len
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
        "0.26.0": ("option.max_output_len", total - plan.max_input_tokens),
        "0.32.0": ("option.max_output_len", total),
    }.get(image.djl, ("option.max_seq_len", total))
    step = plan.engine.max_prefill_tokens or max(_PREFILL_TOKENS, plan.max_input_tokens)
    return dict.fromkeys(_VLLM_ONLY) | {
        "option.rolling_batch": "auto" if image.djl == "0.26.0" else "trtllm",
        "option.max_input_len": plan.max_input_tokens,
        length: tokens,
        "option.max_num_tokens": None if image.djl == "0.26.0" else step,
    }


def _lmi_draft(plan: DeploymentPlan, image: Image | None) -> dict[str, Any]:
    """The draft in the words of the image's engine; LMI-Distributed has names of its own."""
    if plan.draft is None:
        return {}
    if _takes_speculative_config(image):
        version = "" if image is None else image.engine_version
        is_early = version and version_key(version) < version_key(_DRAFT_MODELS_SINCE)
        if is_early and plan.draft != NGRAM:
            raise InputError(
                f"vLLM {version} in this image takes no draft model, the first is "
                f"{_DRAFT_MODELS_SINCE}: --image lmi19 or newer, or --draft ngram"
            )
        return {"option.speculative_config": _speculative_config(plan)}
    if plan.draft == NGRAM or (image is not None and image.family in _WITHOUT_DRAFTS):
        return {}
    return {
        "option.speculative_draft_model": plan.draft,
        "option.speculative_length": plan.draft_tokens,
    }


def _takes_speculative_config(image: Image | None) -> bool:
    if image is None or image.engine != "vllm" or not image.engine_version:
        return image is None or era_of(image.djl) == "C"
    return "speculative_config" in engine_arguments(image.engine, image.engine_version)


def tgi_environment(plan: DeploymentPlan, *, trust_remote_code: bool = False) -> dict[str, str]:
    """TGI's environment variables for one copy."""
    engine = plan.engine
    prefill = max(_PREFILL_TOKENS, plan.max_input_tokens)
    variables = {
        "HF_MODEL_ID": plan.model_id,
        "SM_NUM_GPUS": plan.setup.tensor_parallel,
        "MAX_INPUT_LENGTH": plan.max_input_tokens,
        "MAX_TOTAL_TOKENS": plan.max_model_len,
        "MAX_BATCH_PREFILL_TOKENS": engine.max_prefill_tokens or prefill,
        # running and queued requests; for minimum latency none may queue
        "MAX_CONCURRENT_REQUESTS": 1 if plan.slots == 1 else 2 * plan.slots,
        **_tgi_dtype(plan),
        "CUDA_MEMORY_FRACTION": engine.memory_share,
        "CUDA_GRAPHS": 0 if engine.cuda_graphs is False else None,
        "SPECULATE": plan.draft_tokens if plan.draft == NGRAM else None,
        "HF_MODEL_TRUST_REMOTE_CODE": trust_remote_code or None,
    }
    return _as_text(variables)


def vllm_arguments(plan: DeploymentPlan, *, trust_remote_code: bool = False) -> list[str]:
    """The arguments of `vllm serve` for one copy."""
    engine, dtype = plan.engine, plan.setup.dtype
    states_dtype = plan.checkpoint_states_dtype or dtype in _QUANTIZED
    if dtype not in (*_LMI_DTYPES, "float8") and not states_dtype:
        raise InputError(f"no vLLM setting is known for {dtype} weights")
    options = {
        "tensor-parallel-size": plan.setup.tensor_parallel,
        "max-num-seqs": plan.slots,
        "max-model-len": plan.max_model_len,
        "dtype": dtype if dtype in _LMI_DTYPES else None,
        "quantization": "fp8" if dtype == "float8" and not states_dtype else None,
        "max-num-batched-tokens": engine.max_prefill_tokens,
        "enable-chunked-prefill": engine.chunked_prefill,
        "gpu-memory-utilization": engine.memory_share,
        "enforce-eager": engine.cuda_graphs is False or None,
        "kv-cache-dtype": "fp8" if plan.has_one_byte_cache else None,
        "speculative-config": _speculative_config(plan),
        "trust-remote-code": trust_remote_code or None,
    }
    arguments = [plan.model_id]
    for name, text in _as_text(options).items():
        if isinstance(options[name], bool):
            arguments.append(f"--{name}" if options[name] else f"--no-{name}")
        else:
            arguments += [f"--{name}", text]
    return arguments


def unsupported_settings(
    plan: DeploymentPlan, server: str, image: Image | None = None
) -> list[str]:
    """Engine settings that this server's files cannot express; the user must set them."""
    engine, draft = plan.engine, f"draft {plan.draft}"
    chunked, draft_model = engine.chunked_prefill is not None, plan.draft not in (None, NGRAM)
    cache = {f"kv_dtype {engine.kv_dtype}": plan.has_one_byte_cache}
    old = image is not None and bool(image.djl) and era_of(image.djl) == "A"
    missing = {"chunked_prefill": chunked and (server == "tgi" or old)}
    if server == "tgi":
        missing |= cache | {draft: draft_model}
    elif image is not None and image.engine != "vllm":
        missing |= cache | {
            draft: plan.draft == NGRAM or (draft_model and image.family in _WITHOUT_DRAFTS),
            "memory_share": engine.memory_share is not None,
            "cuda_graphs": engine.cuda_graphs is not None,
        }
    else:
        missing[draft] = plan.draft == NGRAM and not _takes_speculative_config(image)
    return [name for name, is_missing in missing.items() if is_missing]


def lmi_dtype(dtype: str) -> tuple[str | None, str | None]:
    """LMI's dtype and quantize for a number format of the planner; None omits the setting."""
    if dtype in _LMI_DTYPES:
        return _LMI_DTYPES[dtype], None
    if dtype == "float8":
        return None, "fp8"
    if dtype in _QUANTIZED:
        return None, None
    raise InputError(
        f"no LMI setting is known for {weight_format(dtype).name} weights: use "
        "float16, bfloat16, float32, float8, int4 or mxfp4 (a quantized checkpoint)"
    )


def _tgi_dtype(plan: DeploymentPlan) -> dict[str, str | None]:
    """TGI's variables for the weights' format; a checkpoint states its own kind of FP8."""
    match plan.setup.dtype:
        case "int4":
            return {"HF_MODEL_QUANTIZE": "gptq" if "gptq" in plan.model_id.lower() else "awq"}
        case "float8":
            return {"HF_MODEL_QUANTIZE": None if plan.checkpoint_states_dtype else "fp8"}
        case "bfloat16":
            return {"DTYPE": "bfloat16"}
        case "float16":
            return {}
    raise InputError(
        f"TGI serves float16, bfloat16, float8 or int4 weights, not {plan.setup.dtype}"
    )


def _speculative_config(plan: DeploymentPlan) -> str | None:
    """vLLM's JSON for the draft; None without one."""
    if plan.draft is None:
        return None
    tokens = {"num_speculative_tokens": plan.draft_tokens}
    if plan.draft == NGRAM:
        return json.dumps({"method": "ngram", **tokens, "prompt_lookup_max": _LONGEST_NGRAM})
    return json.dumps({"model": plan.draft, **tokens})


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
        raise CapacityError(
            f"{shape.name} cannot be split over the accelerators of {instance.instance_type}"
        )
    variables = {
        "SM_NUM_GPUS": shards,
        "MAX_INPUT_LENGTH": context - 1,
        "MAX_TOTAL_TOKENS": context,
        "MAX_BATCH_PREFILL_TOKENS": max(_PREFILL_TOKENS, context),
        "MAX_CONCURRENT_REQUESTS": _JUMPSTART_REQUESTS,
    }
    return _as_text(variables)


def jumpstart_provenance(shape: ModelShape) -> str:
    """The origin of JumpStart's values, for display."""
    if shape.name.lower() in _JUMPSTART_MODELS:
        return "as published in the benchmark of JumpStart's endpoints for Llama 2 (2023)"
    return "by the rule that JumpStart used for Llama 2 (2023), with this model's own context"
