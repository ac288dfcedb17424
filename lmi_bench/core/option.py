"""Options: how a field of a job's settings appears on the command line.

A job's settings are a frozen dataclass. A field that a user may state has `option(...)` as its
value, or is annotated `Annotated[type, OPTION]` with an `Option` that several classes share.
`cli/command.py` turns it into an option of the command, `jobs/face.py` into a keyword of a
function. Nothing here knows a terminal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """One option or argument of a command.

    help      starts with a noun that names the value and gives its unit; no default in it
    names     as typed, the first one is the name that messages use; none: made from the field's
              name. A switch that is off by default has that name alone, others `--no-` too
    old_names names of earlier releases: accepted with a note, never shown; `--old=value` where the
              old name was a switch and the new option takes a value
    default   in words, if the default is computed and so not the field's own
    group     heading under which help lists it; none: `GROUP: ClassVar` of the settings class
    rare      listed by --help-all only
    argument  given by its place instead of a name
    bare      value of the option where no number follows its name; None: a value has to follow
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
    bare: int | None = None

    def name_of(self, field: str) -> str:
        """The name that messages use for the option of this field."""
        return self.names[0] if self.names else flag_of(field)


def flag_of(field: str) -> str:
    """A field's name as an option's.

    >>> flag_of("max_tokens")
    '--max-tokens'
    """
    return f"--{field.replace('_', '-')}"


def default_note(option: Option, default: Any) -> str:
    """` (default: ...)` as help texts end: in words, or the value; empty for none.

    >>> default_note(Option("Port."), 8080)
    ' (default: 8080)'
    """
    is_silent = default is MISSING or default is False or default in (None, (), "")
    shown = option.default or (None if is_silent else default)
    return "" if shown is None else f" (default: {shown})"


REQUIRED: Final = object()
"""The value of a field that has to be stated."""
_METADATA: Final = "option"


def option(shared: str | Option, /, *names: str, value: Any = None, **more: Any) -> Any:
    """A field of a settings class: its value if none is stated, and its `Option`.

    shared  a help text, or an `Option` that several fields share
    more    the other fields of `Option`, or those in which this field differs from the shared one
    """
    mark = replace(shared, **more) if isinstance(shared, Option) else Option(shared, names, **more)
    metadata = {_METADATA: mark}
    return (
        field(metadata=metadata) if value is REQUIRED else field(default=value, metadata=metadata)
    )


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
    for each in fields(group):
        hint = hints[each.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings_of(hint, common)
            continue
        mark = each.metadata.get(_METADATA)
        found = option_of(hint) if mark is None else (hint, mark)
        if found is None:
            continue
        kind, mark = found
        mark = replace(
            mark,
            group=mark.group or vars(group).get("GROUP"),
            rare=mark.rare or (common is not None and each.name not in common),
        )
        made = each.default_factory
        default = each.default if made is MISSING else made()
        yield Setting(each.name, kind, default, mark)


def option_of(hint: Any) -> tuple[Any, Option] | None:
    """The type and the option of an annotation; None where it has no option."""
    if get_origin(hint) is not Annotated:
        return None
    kind, *marks = get_args(hint)
    return next(((kind, mark) for mark in marks if isinstance(mark, Option)), None)


def stated(settings: Any) -> Iterator[Setting]:
    """The fields whose value is not their default, those of nested settings, too."""
    values = dict(values_of(settings))
    return (each for each in settings_of(type(settings)) if values[each.name] != each.default)


def values_of(settings: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields, those of nested settings, too."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from values_of(value)
        else:
            yield each.name, value


def filled(group: type[Any], given: dict[str, Any]) -> Any:
    """The settings from their fields' values by name, which are removed from `given`."""
    hints = get_type_hints(group, include_extras=True)
    values = {}
    for each in fields(group):
        hint = hints[each.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            values[each.name] = filled(hint, given)
        elif each.name in given:
            value = given.pop(each.name)
            # a command line hands a list over for every option that may be repeated
            kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            is_tuple = any(get_origin(one) is tuple for one in kinds(kind))
            values[each.name] = tuple(value) if is_tuple and value is not None else value
    return group(**values)


def kinds(kind: Any) -> tuple[Any, ...]:
    """A type and the members of its union."""
    return (kind, *get_args(kind))
