"""Settings classes as the options of a command: declared once, spread over its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from lmi_bench.core.option import Option, filled

RARE = "rare"
OLD_NAMES = "old_names"


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each dataclass parameter replaced by that dataclass's fields.

    Typer reads the options of a command from its signature. A field is annotated with an `Option`
    (or as a parameter would be, `Annotated[..., typer.Option(...)]`); a field that is a dataclass
    itself is spread in turn. The command is called with the dataclass filled in.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    marks: dict[str, Option] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            assert isinstance(parameter.annotation, type)
            groups[parameter.name] = parameter.annotation
            parameters.extend(_parameters(parameter.annotation, marks))
        else:
            annotation = _as_typer(parameter.name, parameter.annotation, marks, None)
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


def _parameters(
    group: type[Any], marks: dict[str, Option], common: Sequence[str] | None = None
) -> Iterator[inspect.Parameter]:
    """One parameter a field, in the order of the fields.

    common  fields that plain help lists, where a group around this one names them as COMMON
    """
    common = vars(group).get("COMMON", common)
    hints = get_type_hints(group, include_extras=True)
    heading = vars(group).get("GROUP")
    for field in fields(group):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _parameters(hint, marks, common)
            continue
        if get_origin(hint) is not Annotated:
            continue  # no option: set by the command itself, or by a caller from Python
        annotation = _as_typer(field.name, hint, marks, heading)
        if common is not None and field.name not in common:
            marks[field.name] = replace(marks[field.name], rare=True)
        default = field.default
        if default is MISSING:
            made = field.default_factory
            default = inspect.Parameter.empty if made is MISSING else made()
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=annotation,
        )


def _as_typer(name: str, annotation: Any, marks: dict[str, Option], heading: str | None) -> Any:
    """The annotation with its `Option` as Typer's own."""
    if get_origin(annotation) is not Annotated:
        return annotation
    bare, *extra = get_args(annotation)
    mark = next((each for each in extra if isinstance(each, Option)), None)
    if mark is None:
        return annotation
    marks[name] = mark
    common: dict[str, Any] = {
        "help": mark.help,
        "metavar": mark.metavar,
        "envvar": mark.envvar,
        "rich_help_panel": mark.group or heading,
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
