"""The engine's settings as options, the same in every command that starts one."""

from dataclasses import dataclass
from typing import Any, Final

from lmi_bench.core.engine_fields import BatchingFields, CompiledFields, DraftFields, StepFields
from lmi_bench.core.option import Option, Stated, overrides

STEP_TRACE: Final = Option("File for a Chrome trace of the engine's steps and requests.")
STEPS: Final = Stated(StepFields)
BATCHING: Final = Stated(BatchingFields)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is held in memory and computed."""

    steps: Stated = STEPS
    compiled: Stated = Stated(CompiledFields)
    drafting: Stated = Stated(DraftFields)


def stated_settings(*groups: Any) -> dict[str, Any]:
    """The stated settings by their names in the scenario's `engine` section.

    groups  settings whose scenario fields are all the engine's

    Raises InputError for a value that cannot be read.
    """
    found = {name: value for group in groups for name, value in overrides(group).items()}
    stated = {name.removeprefix("engine."): value for name, value in found.items()}
    if "quantize" in stated:
        from lmi_bench.engine.quantization import parse_scheme

        stated["quantize"] = parse_scheme(stated["quantize"]).value
    return stated
