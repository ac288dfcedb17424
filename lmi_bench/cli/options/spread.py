"""Settings classes as the options of a command: declared once, spread over its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, is_dataclass
from typing import Annotated, Any, get_args, get_origin

import typer

from lmi_bench.core.option import Option, filled, option_of, settings_of

RARE = "rare"
OLD_NAMES = "old_names"


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each dataclass parameter replaced by that dataclass's fields.

    Typer reads the options of a command from its signature. A field, or a parameter of the command,
    is annotated with an `Option`; a field that is a dataclass itself is spread in turn. The command
    is called with the dataclass filled in.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    marks: dict[str, Option] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            assert isinstance(parameter.annotation, type)
            groups[parameter.name] = parameter.annotation
            for each in settings_of(parameter.annotation):
                marks[each.name] = each.option
                default = parameter.empty if each.default is MISSING else each.default
                annotation = _as_typer(each.kind, each.option)
                parameters.append(
                    inspect.Parameter(each.name, kind, default=default, annotation=annotation)
                )
            continue
        annotation, found = parameter.annotation, option_of(parameter.annotation)
        if found is not None:
            marks[parameter.name] = found[1]
            annotation = _as_typer(*found)
        parameters.append(parameter.replace(kind=kind, annotation=annotation))

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = filled(group, given)
        command(**given)

    vars(spread)["__signature__"] = inspect.Signature(parameters)
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(spread)[RARE] = frozenset(name for name, mark in marks.items() if mark.rare)
    vars(spread)[OLD_NAMES] = {
        old: mark.name_of(name) + equals + value
        for name, mark in marks.items()
        for old, equals, value in (each.partition("=") for each in mark.old_names)
    }
    return spread


def _as_typer(bare: Any, mark: Option) -> Any:
    """An option as Typer's own."""
    common: dict[str, Any] = {
        "help": mark.help,
        "metavar": mark.metavar,
        "envvar": mark.envvar,
        "rich_help_panel": mark.group,
    }
    if mark.default is not None:
        common["show_default"] = mark.default
    if mark.argument:
        return Annotated[_listed(bare), typer.Argument(**common)]
    return Annotated[_listed(bare), typer.Option(*mark.names, **common)]


def _listed(bare: Any) -> Any:
    """Typer knows a repeatable option as a list; settings are frozen and hold a tuple."""
    for each in (bare, *get_args(bare)):
        if get_origin(each) is tuple:
            items: Any = list[get_args(each)[0]]  # type: ignore[misc]
            return items if each is bare else items | None
    return bare
