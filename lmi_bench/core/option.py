"""Command-line options of a job's settings, declared beside the fields.

A job's settings are a frozen dataclass. A field that a user may set has `option(...)` as its
value, or is annotated `Annotated[type, OPTION]` with an `Option` that several classes share.
`cli/options/spread.py` turns it into an option of the command, `jobs/face.py` into a keyword of a
function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """One option or argument of a command.

    help      starts with a noun that names the value and gives its unit; no default in it
    names     as typed; messages use the first one; none: derived from the field's name, with
              `--no-` for the other value of a switch
    old_names names of earlier releases: accepted with a note, never shown; `--old=value` where the
              old name was a switch and the new option takes a value
    default   text for a default that is computed
    group     heading under which help lists it; none: `GROUP: ClassVar` of the settings class
    rare      listed by --help-all only
    argument  positional
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


REQUIRED: Final = object()
"""The value of a required field."""
_METADATA: Final = "option"


def option(help: str, *names: str, value: Any = None, **more: Any) -> Any:  # noqa: A002
    """A field of a settings class: its default and its `Option`.

    more  the other fields of `Option`
    """
    metadata = {_METADATA: Option(help, names, **more)}
    return (
        field(metadata=metadata) if value is REQUIRED else field(default=value, metadata=metadata)
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that a user may set, of a settings class or of one nested in it.

    default  MISSING if the field is required
    """

    name: str
    kind: Any
    default: Any
    option: Option


def settings_of(group: type[Any], common: Sequence[str] | None = None) -> Iterator[Setting]:
    """The fields with an option, in order, each option with its heading and rarity.

    common  fields in plain help, if an enclosing class names them as COMMON
    """
    common = vars(group).get("COMMON", common)
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        hint = hints[each.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings_of(hint, common)
        elif (found := _option_of_field(each, hint)) is not None:
            kind, mark = found
            mark = replace(
                mark,
                group=mark.group or vars(group).get("GROUP"),
                rare=mark.rare or (common is not None and each.name not in common),
            )
            made = each.default_factory
            default = each.default if made is MISSING else made()
            yield Setting(each.name, kind, default, mark)


def _option_of_field(each: Field[Any], hint: Any) -> tuple[Any, Option] | None:
    """The type and the option of a field, from its value or its annotation."""
    if (mark := each.metadata.get(_METADATA)) is not None:
        return hint, mark
    return option_of(hint)


def option_of(hint: Any) -> tuple[Any, Option] | None:
    """The type and the option of an annotation; None without an option."""
    if get_origin(hint) is not Annotated:
        return None
    kind, *marks = get_args(hint)
    return next(((kind, mark) for mark in marks if isinstance(mark, Option)), None)


def stated(settings: Any) -> Iterator[Setting]:
    """The fields whose value is not their default, nested settings included."""
    values = dict(_values(settings))
    return (each for each in settings_of(type(settings)) if values[each.name] != each.default)


def _values(settings: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from _values(value)
        else:
            yield each.name, value


def filled(group: type[Any], given: dict[str, Any]) -> Any:
    """The settings made from values by field name; used values are removed from `given`."""
    hints = get_type_hints(group, include_extras=True)
    values = {}
    for each in fields(group):
        hint = hints[each.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            values[each.name] = filled(hint, given)
        elif each.name in given:
            value = given.pop(each.name)
            # a command line gives a list for every repeatable option
            kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            is_tuple = any(get_origin(one) is tuple for one in kinds(kind))
            values[each.name] = tuple(value) if is_tuple and value is not None else value
    return group(**values)


def kinds(kind: Any) -> tuple[Any, ...]:
    """A type and the members of its union."""
    return (kind, *get_args(kind))
