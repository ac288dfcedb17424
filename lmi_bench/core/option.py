"""How a field of a job's settings is offered on a command line: declared once, beside the field.

A job's settings are a frozen dataclass. A field that a user may state is annotated
`Annotated[type, Option(...)]`; `cli/options/spread.py` turns it into an option of the command, and
`jobs/face.py` into a keyword of a function. Nothing here knows a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """One option or argument of a command.

    help      starts with a noun that names the value and gives its unit; no default in it
    names     as typed, the first one is the name that messages use; none: made from the field's
              name, `--no-` put before it for the other value of a switch
    old_names names of earlier releases: accepted with a note, never shown; `--old=value` where the
              old name was a switch and the new option takes a value
    default   in words, where the default is worked out and the field's own says nothing
    group     heading under which help lists it; none: `GROUP: ClassVar` of the settings class
    rare      listed by --help-all only
    argument  given by its place instead of a name
    """

    help: str
    names: tuple[str, ...] = ()
    old_names: tuple[str, ...] = ()
    default: str | None = None
    metavar: str | None = None
    group: str | None = None
    envvar: str | None = None
    rare: bool = False
    argument: bool = False

    def name_of(self, field: str) -> str:
        """The name that messages use for the option of this field."""
        return self.names[0] if self.names else f"--{field.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that a user may state, of a settings class or of one nested in it.

    default  MISSING where the field has to be stated
    """

    name: str
    kind: Any
    default: Any
    option: Option


def settings_of(group: type[Any], common: Sequence[str] | None = None) -> Iterator[Setting]:
    """The fields with an option, in their order; the options know their heading and rarity.

    common  fields that plain help lists, where a class around this one names them as COMMON
    """
    common = vars(group).get("COMMON", common)
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings_of(hint, common)
        elif (found := option_of(hint)) is not None:
            kind, option = found
            option = replace(
                option,
                group=option.group or vars(group).get("GROUP"),
                rare=option.rare or (common is not None and field.name not in common),
            )
            made = field.default_factory
            default = field.default if made is MISSING else made()
            yield Setting(field.name, kind, default, option)


def option_of(hint: Any) -> tuple[Any, Option] | None:
    """The type and the option of an annotation; None where it has no option."""
    if get_origin(hint) is not Annotated:
        return None
    kind, *marks = get_args(hint)
    return next(((kind, mark) for mark in marks if isinstance(mark, Option)), None)


def stated(settings: Any) -> Iterator[Setting]:
    """The fields whose value is not their default, those of nested settings, too."""
    values = dict(_values(settings))
    return (each for each in settings_of(type(settings)) if values[each.name] != each.default)


def _values(settings: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from _values(value)
        else:
            yield field.name, value


def filled(group: type[Any], given: dict[str, Any]) -> Any:
    """The settings class made of its fields' values by name, which are taken out of `given`."""
    hints = get_type_hints(group, include_extras=True)
    values = {}
    for field in fields(group):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            values[field.name] = filled(hint, given)
        elif field.name in given:
            value = given.pop(field.name)
            # a command line hands a list over for every option that may be repeated
            is_tuple = any(get_origin(kind) is tuple for kind in kinds(get_args(hint)[0]))
            values[field.name] = tuple(value) if is_tuple and value is not None else value
    return group(**values)


def kinds(kind: Any) -> tuple[Any, ...]:
    """A type, and those that it is a union of."""
    return (kind, *get_args(kind))
