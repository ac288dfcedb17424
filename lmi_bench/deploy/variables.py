"""Checks the variables that configure vLLM's, SGLang's and TGI's containers, as written in .env.

AWS's images of vLLM and SGLang turn SM_VLLM_NAME and SM_SGLANG_NAME into the engine's arguments,
which end the container if they are wrong. TGI's are those of its launcher.
"""

from collections.abc import Collection, Mapping
from typing import Final

from lmi_bench.deploy.checks import Verdict
from lmi_bench.deploy.engine_arguments import engine_arguments
from lmi_bench.deploy.images import find_image
from lmi_bench.deploy.option_table import nearest

PREFIXES: Final = {"vllm": "SM_VLLM_", "sglang": "SM_SGLANG_"}


def check_variables(
    kind: str, variables: Mapping[str, str], allowed: Collection[str] = ()
) -> Verdict:
    """Mistakes in a container's variables, by the arguments of the newest image of its kind.

    kind     vllm, sglang or tgi
    allowed  variables to accept although the engine lacks their argument
    """
    mistakes: list[str] = []
    version = find_image(kind).engine_version
    known, prefix = engine_arguments(kind, version), PREFIXES.get(kind)
    if prefix is None:  # TGI's variables have the names of its arguments
        for name in known.keys() & variables.keys():
            problem = known[name].problem(variables[name])
            mistakes += [f"{name}={variables[name]}: {problem}"] if problem else []
        prompt = variables.get("MAX_INPUT_TOKENS") or variables.get("MAX_INPUT_LENGTH", "")
        total = variables.get("MAX_TOTAL_TOKENS", "")
        if prompt.isdecimal() and total.isdecimal() and int(prompt) >= int(total):
            mistakes.append(f"MAX_TOTAL_TOKENS={total} must be above the prompt's limit, {prompt}")
        return Verdict(tuple(sorted(mistakes)), ())
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
