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
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.plan import NGRAM, DeploymentPlan

SERVERS: Final = ("lmi", "tgi", "vllm")
_LOADING_S: Final = 1200
_PREFILL_TOKENS: Final = 4096
_LONGEST_NGRAM: Final = 4
_LMI_DTYPES: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_QUANTIZED: Final = ("int4", "mxfp4")
"""Weights from a quantized checkpoint, whose config states their format."""


def lmi_settings(
    plan: DeploymentPlan,
    *,
    era: str = "C",
    trust_remote_code: bool = False,
    model_loading_timeout_s: int = _LOADING_S,
) -> dict[str, str]:
    """The plan's serving.properties, by key."""
    engine, old = plan.engine, era == "A"
    dtype, quantize = (None, None) if plan.checkpoint_states_dtype else lmi_dtype(plan.setup.dtype)
    prefill = max(_PREFILL_TOKENS, plan.max_model_len) if old else None
    draft_model = None if plan.draft == NGRAM or era == "C" else plan.draft
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
        "option.speculative_config": _speculative_config(plan) if era == "C" else None,
        "option.speculative_draft_model": draft_model,
        "option.speculative_length": None if draft_model is None else plan.draft_tokens,
        "option.trust_remote_code": trust_remote_code or None,
        "option.model_loading_timeout": model_loading_timeout_s,
    }
    return _as_text(settings)


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


def unsupported_settings(plan: DeploymentPlan, server: str, era: str = "C") -> list[str]:
    """Engine settings that this server's files cannot express; the user must set them."""
    chunked, draft_model = plan.engine.chunked_prefill is not None, plan.draft not in (None, NGRAM)
    missing = {
        "tgi": {
            "chunked_prefill": chunked,
            f"kv_dtype {plan.engine.kv_dtype}": plan.has_one_byte_cache,
            f"draft {plan.draft}": draft_model,
        },
        "lmi": {
            "chunked_prefill": chunked and era == "A",
            "draft ngram": plan.draft == NGRAM and era != "C",
        },
    }
    return [name for name, is_missing in missing.get(server, {}).items() if is_missing]


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
