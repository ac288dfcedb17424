"""Checks the variables that configure vLLM's, SGLang's and TGI's containers, as written in .env.

AWS's images of vLLM and SGLang turn SM_VLLM_NAME and SM_SGLANG_NAME into the engine's arguments,
which end the container if they are wrong. TGI's are those of its launcher.
"""

from collections.abc import Collection, Mapping
from typing import Final

from lmi_bench.deploy.checks import Verdict
from lmi_bench.deploy.engine_arguments import Argument, engine_arguments
from lmi_bench.deploy.images import find_image
from lmi_bench.deploy.option_table import nearest

PREFIXES: Final = {"vllm": "SM_VLLM_", "sglang": "SM_SGLANG_"}
_TGI_QUANTIZE: Final = (
    "awq compressed-tensors eetq exl2 gptq marlin bitsandbytes bitsandbytes-nf4 "
    "bitsandbytes-fp4 fp8"
)
_COUNTS: Final = (
    *("SM_NUM_GPUS", "MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS", "MAX_TOTAL_TOKENS", "SPECULATE"),
    *("MAX_BATCH_PREFILL_TOKENS", "MAX_BATCH_TOTAL_TOKENS", "MAX_CONCURRENT_REQUESTS"),
)
_TGI: Final = {
    name: Argument(name, "engine", kind, choices, bounds, "", "", "")
    for name, kind, choices, bounds in (
        *((name, "count", "", "") for name in _COUNTS),
        ("CUDA_MEMORY_FRACTION", "float", "", "(0,1]"),
        ("DTYPE", "enum", "float16 bfloat16", ""),
        ("KV_CACHE_DTYPE", "enum", "fp8_e4m3fn fp8_e5m2", ""),
        ("HF_MODEL_QUANTIZE", "enum", _TGI_QUANTIZE, ""),
    )
}


def check_variables(
    kind: str, variables: Mapping[str, str], allowed: Collection[str] = ()
) -> Verdict:
    """Mistakes in a container's variables, by the arguments of the newest image of its kind.

    kind     vllm, sglang or tgi
    allowed  variables to accept although the engine lacks their argument
    """
    mistakes: list[str] = []
    prefix = PREFIXES.get(kind)
    if prefix is None:
        for name in _TGI.keys() & variables.keys():
            problem = _TGI[name].problem(variables[name])
            mistakes += [f"{name}={variables[name]}: {problem}"] if problem else []
        prompt = variables.get("MAX_INPUT_TOKENS") or variables.get("MAX_INPUT_LENGTH", "")
        total = variables.get("MAX_TOTAL_TOKENS", "")
        if prompt.isdecimal() and total.isdecimal() and int(prompt) >= int(total):
            mistakes.append(f"MAX_TOTAL_TOKENS={total} must be above the prompt's limit, {prompt}")
        return Verdict(tuple(sorted(mistakes)), ())
    version = find_image(kind).engine_version
    known = engine_arguments(kind, version)
    for name, value in variables.items():
        if not name.startswith(prefix) or name in allowed:
            continue
        bare = name.removeprefix(prefix).lower()
        names = (bare, bare.removeprefix("no_"), f"{bare}_size")  # SGLang's --tp is --tp-size
        argument = next(filter(None, map(known.get, names)), None)
        if argument is None and bare != "model":
            near = nearest(bare, known).replace("_", "-")
            mistakes.append(f"{name}: {kind} {version} has no argument {bare}{near}")
        elif argument is not None and (problem := argument.problem(value)):
            mistakes.append(f"{name}={value}: {problem}")
    return Verdict(tuple(mistakes), ())
