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

from lmi_bench.deploy.option_table import PREFIX, all_options

_REWRITTEN: Final = {
    "HF_MODEL_QUANTIZE": "option.quantize",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "SM_NUM_GPUS": "option.tensor_parallel_degree",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
    "MAX_BATCH_PREFILL_TOKENS": "option.max_rolling_batch_prefill_tokens",
    "MAX_BATCH_SIZE": "option.max_rolling_batch_size",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
}
_INVERTED: Final = {"ENABLE_CUDA_GRAPHS": "option.enforce_eager"}
_UNTRANSLATED: Final = ("MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS", "MAX_TOTAL_TOKENS")
_UNTRANSLATED_BATCH: Final = ("MAX_BATCH_TOTAL_TOKENS",)


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
    for layer in (_regular(environ), _short(environ), _rewritten(environ)):
        for name, setting in layer.items():
            settings.setdefault(name, setting)
    return settings


def untranslated_variables(environ: Mapping[str, str]) -> list[str]:
    """TGI's limits in the environment that an LMI container ignores."""
    return [name for name in (*_UNTRANSLATED, *_UNTRANSLATED_BATCH) if environ.get(name)]


def environment_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings as environment variables; model id, revision and trust get their short names.

    `engine` has no variable and is omitted: the container's default is right.
    """
    options = all_options()
    variables = {}
    for name, value in settings.items():
        if name == "engine":
            continue
        option = options.get(name)
        if name in ("option.model_id", "option.revision", "option.trust_remote_code"):
            assert option is not None  # the table holds these
            variables[option.environment] = value
        elif option is not None:
            variables[option.variable] = value
        else:
            bare = name.removeprefix(PREFIX).replace(".", "_").upper()
            variables[("OPTION_" if name.startswith(PREFIX) else "SERVING_") + bare] = value
    return variables


def _regular(environ: Mapping[str, str]) -> dict[str, Setting]:
    by_variable = {option.variable: name for name, option in all_options().items()}
    found = {}
    for variable, value in environ.items():
        if not value:
            continue
        if variable in by_variable:
            found[by_variable[variable]] = Setting(value, variable)
        elif variable.startswith("OPTION_"):
            name = PREFIX + variable.removeprefix("OPTION_").lower()
            found[name] = Setting(value, variable)
    return found


def _short(environ: Mapping[str, str]) -> dict[str, Setting]:
    return {
        name: Setting(environ[option.environment], option.environment)
        for name, option in all_options().items()
        if option.environment
        and option.environment not in _REWRITTEN
        and environ.get(option.environment)
    }


def _rewritten(environ: Mapping[str, str]) -> dict[str, Setting]:
    found = {
        name: Setting(environ[variable], variable)
        for variable, name in _REWRITTEN.items()
        if environ.get(variable)
    }
    for variable, name in _INVERTED.items():
        if environ.get(variable):
            graphs = environ[variable].lower() == "true"
            found[name] = Setting("false" if graphs else "true", variable)
    return found
