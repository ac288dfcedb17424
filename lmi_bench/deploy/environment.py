"""LMI settings from environment variables, with the precedence of the LMI containers.

    1  serving.properties beside the model
    2  OPTION_X for option.x, SERVING_X for a key without prefix
    3  short names: HF_MODEL_ID, TENSOR_PARALLEL_DEGREE, ...
    4  TGI's and SageMaker's names, rewritten by the container's entry script

`MAX_CONCURRENT_REQUESTS` is a queue length here and a hard limit in TGI; TGI's MAX_INPUT_LENGTH,
MAX_TOTAL_TOKENS and MAX_BATCH_TOTAL_TOKENS are not translated.
Source: djl-serving's configurations.md and dockerd-entrypoint-with-cuda-compat.sh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lmi_bench.deploy.option_table import PREFIX, all_options, variable_of

_REWRITTEN: Final = {
    "HF_MODEL_QUANTIZE": "option.quantize",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "SM_NUM_GPUS": "option.tensor_parallel_degree",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
    "MAX_BATCH_PREFILL_TOKENS": "option.max_rolling_batch_prefill_tokens",
    "MAX_BATCH_SIZE": "option.max_rolling_batch_size",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
}
_GRAPHS: Final = "ENABLE_CUDA_GRAPHS"  # the opposite of option.enforce_eager
_UNTRANSLATED: Final = (
    *("MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS", "MAX_TOTAL_TOKENS", "MAX_BATCH_TOTAL_TOKENS"),
)
_SHORT_NAMED: Final = ("option.model_id", "option.revision", "option.trust_remote_code")


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value and its origin: a file or a variable's name."""

    value: str
    origin: str


def effective_settings(
    properties: Mapping[str, str], environ: Mapping[str, str], *, source: str
) -> dict[str, Setting]:
    """The settings that an LMI container would use; empty variables count as absent."""
    settings = {name: Setting(value, source) for name, value in properties.items()}
    options = all_options()
    present = {variable: value for variable, value in environ.items() if value}
    regular = {option.variable: name for name, option in options.items()}
    for variable, value in present.items():
        if variable in regular or variable.startswith("OPTION_"):
            passed_on = PREFIX + variable.removeprefix("OPTION_").lower()
            settings.setdefault(regular.get(variable, passed_on), Setting(value, variable))
    short = {option.environment: name for name, option in options.items()}
    own = {variable: name for variable, name in short.items() if variable not in _REWRITTEN}
    for variable, name in (own | _REWRITTEN).items():
        if variable in present:
            settings.setdefault(name, Setting(present[variable], variable))
    graphs = present.get(_GRAPHS)
    if graphs is not None:
        eager = "false" if graphs.lower() == "true" else "true"
        settings.setdefault("option.enforce_eager", Setting(eager, _GRAPHS))
    return settings


def untranslated_variables(environ: Mapping[str, str]) -> list[str]:
    """TGI's limits in the environment that an LMI container ignores."""
    return [name for name in _UNTRANSLATED if environ.get(name)]


def environment_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings as environment variables; model id, revision and trust get their short names.

    `engine` has no variable and is omitted: the container's default is right.
    """
    options = all_options()
    return {
        options[name].environment if name in _SHORT_NAMED else variable_of(name): value
        for name, value in settings.items()
        if name != "engine"
    }
