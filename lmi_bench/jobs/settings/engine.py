"""The engine's settings as options, the same in every command that starts one."""

from dataclasses import fields
from typing import Any, Final

from lmi_bench.core.engine_fields import BatchingFields, ModelFields
from lmi_bench.core.option import Option, Stated, overrides
from lmi_bench.engine.quantization import parse_scheme

STEP_TRACE: Final = Option("File for a Chrome trace of the engine's steps and requests.")
_NOT_OF_STEPS: Final = (*("compile", "compile_shapes", "artefact"), *("draft", "draft_tokens", "draft_adaptive"))
MODEL: Final = Stated(ModelFields)
COMPILED: Final = Stated(
    ModelFields, tuple(each.name for each in fields(ModelFields) if each.name not in _NOT_OF_STEPS)
)
"""What the steps that are compiled ahead of time depend on."""
BATCHING: Final = Stated(BatchingFields)


def stated_settings(*groups: Any) -> dict[str, Any]:
    """The stated settings by their names in the scenario's `engine` section.

    groups  settings whose scenario fields are all the engine's

    Raises InputError for a value that cannot be read.
    """
    found = {name: value for group in groups for name, value in overrides(group).items()}
    stated = {name.removeprefix("engine."): value for name, value in found.items()}
    if "quantize" in stated:
        stated["quantize"] = parse_scheme(stated["quantize"]).value
    return stated
