"""Options that several commands share: declared once, spread over each command's signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each dataclass parameter replaced by that dataclass's fields.

    Typer reads the options of a command from its signature. A field is annotated as a parameter
    would be (`Annotated[..., typer.Option(...)]`) and has a default; the command is called with
    the dataclass filled in.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = inspect.Parameter.KEYWORD_ONLY
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=kind))
            continue
        group = parameter.annotation
        assert isinstance(group, type)
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters.extend(
            inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
            for field in fields(group)
        )

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(spread)["__signature__"] = inspect.Signature(parameters)
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread
