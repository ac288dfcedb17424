"""Translates a plan into each server's settings: LMI (djl-serving), TGI, vLLM.

LMI starts as many copies as its container's accelerators allow, behind one queue; TGI and vLLM
start one. Every value that affects memory or concurrency is written out: defaults differ between
versions.
"""

from __future__ import annotations

from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.deploy.plan import DeploymentPlan, lmi_dtype

SERVERS: Final = ("lmi", "tgi", "vllm")
_LOADING_S: Final = 1200
_PREFILL_TOKENS: Final = 4096


def lmi_settings(
    plan: DeploymentPlan,
    *,
    era: str = "C",
    trust_remote_code: bool = False,
    model_loading_timeout_s: int = _LOADING_S,
) -> dict[str, str]:
    """The plan's serving.properties, by key."""
    dtype, quantize = (None, None) if plan.weights_say_their_format else lmi_dtype(plan.dtype)
    settings = {
        "engine": "MPI" if era == "A" else "Python",
        "option.model_id": plan.model_id,
        "option.tensor_parallel_degree": str(plan.tensor_parallel),
        "option.rolling_batch": "auto",
        "option.max_rolling_batch_size": str(plan.slots),
    }
    if era != "A":
        settings["option.max_model_len"] = str(plan.max_model_len)
    if dtype is not None:
        settings["option.dtype"] = dtype
    if quantize is not None:
        settings["option.quantize"] = quantize
    if era == "A":
        settings["option.output_formatter"] = "jsonlines"
        settings["option.max_rolling_batch_prefill_tokens"] = str(
            max(_PREFILL_TOKENS, plan.max_model_len)
        )
    settings |= plan.engine.lmi(era)
    if trust_remote_code:
        settings["option.trust_remote_code"] = "true"
    settings["option.model_loading_timeout"] = str(model_loading_timeout_s)
    return settings


def tgi_environment(plan: DeploymentPlan, *, trust_remote_code: bool = False) -> dict[str, str]:
    """TGI's environment variables for one copy."""
    environment = {
        "HF_MODEL_ID": plan.model_id,
        "SM_NUM_GPUS": str(plan.tensor_parallel),
        "MAX_INPUT_LENGTH": str(plan.max_input_tokens),
        "MAX_TOTAL_TOKENS": str(plan.max_model_len),
        "MAX_BATCH_PREFILL_TOKENS": str(max(_PREFILL_TOKENS, plan.max_input_tokens)),
        # running and queued requests; for minimum latency none may queue
        "MAX_CONCURRENT_REQUESTS": str(1 if plan.slots == 1 else 2 * plan.slots),
    }
    if plan.dtype == "int4":
        named = "gptq" in plan.model_id.lower()
        environment["HF_MODEL_QUANTIZE"] = "gptq" if named else "awq"
    elif plan.dtype == "float8" and plan.weights_say_their_format:
        pass  # the checkpoint's config states its kind of FP8
    elif plan.dtype == "float8":
        environment["HF_MODEL_QUANTIZE"] = "fp8"
    elif plan.dtype == "bfloat16":
        environment["DTYPE"] = "bfloat16"
    elif plan.dtype != "float16":
        raise InputError(f"TGI serves float16, bfloat16, float8 or int4 weights, not {plan.dtype}")
    environment |= plan.engine.tgi()
    if trust_remote_code:
        environment["HF_MODEL_TRUST_REMOTE_CODE"] = "true"
    return environment


def vllm_arguments(plan: DeploymentPlan, *, trust_remote_code: bool = False) -> list[str]:
    """The arguments of `vllm serve` for one copy."""
    arguments = [
        plan.model_id,
        *("--tensor-parallel-size", str(plan.tensor_parallel)),
        *("--max-num-seqs", str(plan.slots)),
        *("--max-model-len", str(plan.max_model_len)),
    ]
    if plan.dtype in ("float16", "bfloat16", "float32"):
        arguments += ["--dtype", plan.dtype]
    elif plan.weights_say_their_format or plan.dtype in ("int4", "mxfp4"):
        pass  # a quantized checkpoint states its format
    elif plan.dtype == "float8":
        arguments += ["--quantization", "fp8"]
    else:
        raise InputError(f"no vLLM setting is known for {plan.dtype} weights")
    arguments += plan.engine.vllm()
    if trust_remote_code:
        arguments.append("--trust-remote-code")
    return arguments
