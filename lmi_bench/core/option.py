"""Options: how a field of a job's settings appears on the command line.

A job's settings are a frozen dataclass. A field that a user may state has `option(...)` as its
value. The fields of a scenario are declared so, too: `Stated` has those that a command takes.
`cli/command.py` turns all of them into options of the command, `jobs/face.py` into keywords of a
function. Nothing here knows a terminal.
"""

import inspect
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from lmi_bench.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Option:
    """One option or argument of a command.

    help      starts with a noun that names the value and gives its unit; no default in it; none:
              the text of the field in its class's docstring
    names     as typed, the first one is the name that messages use; none: made from the field's
              name. A switch that is off by default has that name alone, others `--no-` too
    old_names names of earlier releases: accepted with a note, never shown; `--old=value` where the
              old name was a switch and the new option takes a value
    default   in words, if the default is computed and so not the field's own
    group     heading under which help lists it; none: `GROUP: ClassVar` of the settings class
    rare      listed by --help-all only
    argument  given by its place instead of a name
    bare      value of the option where no number follows its name; None: a value has to follow
    must      range of a number, as the error for another one says it: `above 0 and at most 1`
    one_of    the known words

    Of a scenario's field, where the option differs from it:

    setting   name of the setting; none: the field's
    kind      type as typed; none: the field's, and text for one of several types
    read      makes the field's value of what was typed; raises InputError
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
    must: str | None = None
    one_of: tuple[str, ...] = ()
    setting: str | None = None
    kind: Any = None
    read: Callable[[Any], Any] | None = None

    def name_of(self, field: str) -> str:
        """The name that messages use for the option of this field."""
        return self.names[0] if self.names else flag_of(field)

    def check(self, field: str, value: Any) -> None:
        """Raise InputError for a value that this field's option cannot have; None is none."""
        flag = self.name_of(field)
        for each in value if isinstance(value, tuple) else (value,):
            if each is None:
                continue
            if self.one_of and each not in self.one_of:
                *most, last = self.one_of
                raise InputError(f"{flag} {each}: use {', '.join(most)} or {last}")
            if self.must is not None and not is_within(each, self.must):
                got = f"{each:g}" if isinstance(each, float) else each
                raise InputError(f"{flag} must be {self.must}, got {got}")


def is_within(value: float, limits: str) -> bool:
    """Whether a number is in a range in words.

    >>> [is_within(1.0, words) for words in ("above 0 and at most 1", "0 to 0.5", "2 or more")]
    [True, False, False]
    """
    words = limits.replace(" to ", " at most ")
    found = re.findall(rf"({'|'.join(_COMPARED)}) ?(-?\d[\d.]*)", words)
    return math.isfinite(value) and all(_COMPARED[word](value, float(limit)) for word, limit in found)


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


_COMPARED: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "more than": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
    "less than": operator.lt,
    "": operator.ge,
}
REQUIRED: Final = object()
"""The value of a field that has to be stated."""
_METADATA: Final = "option"


def option(*texts: str | Option, value: Any = None, **more: Any) -> Any:
    """A field of a settings class: its value if none is stated, and its `Option`.

    texts  first the help, or an `Option` that several fields share; then the names. Without a
           help the class's docstring has it, as `field  text`
    more   the other fields of `Option`, or those in which this field differs from the shared one
    """
    has_help = bool(texts) and not str(texts[0]).startswith("-")
    first, names = (texts[0], texts[1:]) if has_help else ("", texts)
    if isinstance(first, Option):
        mark = replace(first, **more)
    else:
        mark = Option(first, tuple(map(str, names)), **more)
    metadata = {_METADATA: mark}
    return field(metadata=metadata) if value is REQUIRED else field(default=value, metadata=metadata)


def _texts(group: type[Any]) -> Mapping[str, str]:
    """What a class's docstring says of each field: `field  text`, then lines that are indented."""
    found, name = {}, ""
    for line in inspect.cleandoc(group.__doc__ or "").split("\n"):
        if entry := re.match(r"(\w+)  +(\S.*)", line):
            name, text = entry.groups()
            found[name] = text
        elif line.startswith(" ") and name:
            found[name] += f" {line.strip()}"
    return found


@dataclass(frozen=True, slots=True)
class Settings:
    """Base of settings that check each option, and then what belongs together, when made."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if mark := each.metadata.get(_METADATA):
                mark.check(each.name, getattr(self, each.name))
        self._check()

    def _check(self) -> None:
        """Raise InputError for values that cannot be meant together."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that a user may state, of a settings class or of one nested in it.

    default  MISSING where the field has to be stated
    place    dotted name in a scenario; none: the scenario does not hold it
    """

    name: str
    kind: Any
    default: Any
    option: Option
    place: str = ""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a user states of a scenario's fields; the others are left to the scenario.

    section  class of the fields, with their `SECTION` in a scenario and the `GROUP` in help
    names    the fields that count; (): all
    values   as typed, by the names of the settings
    """

    section: type[Any]
    names: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> Iterator[Setting]:
        """The fields that a user may state, in their order; help has their defaults in words."""
        hints = get_type_hints(self.section, include_extras=True)
        section, common = self.section.SECTION, self.section.COMMON
        texts = _texts(self.section)
        for each in fields(self.section):
            mark = each.metadata.get(_METADATA)
            if mark is None or (self.names and each.name not in self.names):
                continue
            kind = mark.kind or _typed(hints[each.name])
            name = mark.setting or each.name.removesuffix("_s").removesuffix("_per")
            mark = replace(
                mark,
                help=mark.help or texts[each.name],
                group=mark.group or self.section.GROUP,
                rare=mark.rare or (common is not None and each.name not in common),
                default=mark.default or _in_words(each.default),
                read=mark.read or _reader(mark.name_of(name), hints[each.name]),
            )
            place = f"{section}.{each.name}" if section else each.name
            is_list = get_origin(kind) is tuple
            yield Setting(name, kind if is_list else kind | None, () if is_list else None, mark, place)

    def overrides(self) -> dict[str, Any]:
        """The stated values as a scenario takes them, by their dotted names."""
        return {
            each.place: each.option.read(value) if each.option.read else value
            for each in self.settings()
            if (value := self.values.get(each.name)) is not None
        }


def _in_words(default: Any) -> str | None:
    if default is None or default is False or default in ("", ()):
        return None
    (first,) = default if isinstance(default, tuple) else (default,)
    return f"{first:g}" if isinstance(first, int | float) else str(first)


def _typed(hint: Any) -> Any:
    """The type in which a field's value is typed: text for a list or one of several types."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Path if Path in parts else _typed(parts[0])
    if origin in (Union, UnionType):
        found = {_typed(part) for part in parts if part is not NoneType}
        return found.pop() if len(found) == 1 else str
    if hint == tuple[str, ...]:
        return hint  # an option that may be repeated
    return str if origin in (Literal, tuple) else hint


def _reader(flag: str, hint: Any) -> Callable[[Any], Any] | None:
    """Reads what was typed for a field of this type; None: it is the value."""
    if hint == tuple[str, ...]:
        return None
    words = [word for one in get_args(hint) if get_origin(one) is Literal for word in get_args(one)]
    if any(get_origin(one) is tuple for one in kinds(hint)):
        return lambda text: text if text in words else numbers(flag, text)
    return str if _typed(hint) is Path else None


def settings_of(group: type[Any], common: Sequence[str] | None = None, usual: Any = None) -> Iterator[Setting]:
    """The fields with an option, in their order; the options know their heading and rarity.

    common  fields that plain help lists, where a class around this one names them as COMMON
    usual   value with the defaults, where the class around this one has others
    """
    common = vars(group).get("COMMON", common)
    hints, texts = get_type_hints(group), _texts(group)
    for each in fields(group):
        hint = hints[each.name]
        if isinstance(each.default, Stated):
            found = each.default.settings()
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings_of(hint, common, None if each.default is MISSING else each.default)
            continue
        elif mark := each.metadata.get(_METADATA):
            mark = replace(mark, help=mark.help or texts[each.name])
            found = iter([Setting(each.name, hint, each.default, mark)])
        else:
            continue
        for one in found:
            mark = replace(
                one.option,
                group=one.option.group or vars(group).get("GROUP"),
                rare=one.option.rare or (common is not None and one.name not in common),
            )
            yield replace(one, option=mark, default=getattr(usual, one.name, one.default))


def stated(settings: Any) -> Iterator[Setting]:
    """The fields whose value is not their default, those of nested settings, too."""
    values = dict(values_of(settings))
    for each in settings_of(type(settings)):
        if values.get(each.name, each.default) != each.default:
            yield each


def values_of(settings: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields, those of nested settings, too."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(value, Stated):
            yield from value.values.items()
        elif is_dataclass(value):
            yield from values_of(value)
        else:
            yield each.name, value


def overrides(settings: Any) -> dict[str, Any]:
    """What settings, and those nested in them, state of a scenario, by its dotted names."""
    if isinstance(settings, Stated):
        return settings.overrides()
    found: dict[str, Any] = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            found |= overrides(value)
    return found


def filled(group: type[Any], given: dict[str, Any], usual: Any = None) -> Any:
    """The settings from their fields' values by name, which are removed from `given`.

    usual  value with the defaults, where they are not the class's
    """
    hints = get_type_hints(group)
    values: dict[str, Any] = {}
    for each in fields(group):
        hint = hints[each.name]
        if isinstance(each.default, Stated):
            typed = {one.name: given.pop(one.name, None) for one in each.default.settings()}
            stated = {name: value for name, value in typed.items() if value not in (None, [], ())}
            values[each.name] = replace(each.default, values=stated)
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            around = None if each.default is MISSING else each.default
            values[each.name] = filled(hint, given, around)
        elif each.name in given and _METADATA in each.metadata:
            # else another class's field of this name is meant
            value = given.pop(each.name)
            # a command line hands a list over for every option that may be repeated
            is_tuple = any(get_origin(one) is tuple for one in kinds(hint))
            values[each.name] = tuple(value) if is_tuple and value is not None else value
    return group(**values) if usual is None else replace(usual, **values)


def kinds(kind: Any) -> tuple[Any, ...]:
    """A type and the members of its union."""
    return (kind, *get_args(kind))


def numbers(flag: str, text: str) -> list[float | int]:
    """The numbers of a comma list; raises InputError that names the option and the part."""
    found: list[float | int] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise InputError(f"{flag}: {part!r} is not a number; write for example 1,2,4") from None
        found.append(int(value) if value.is_integer() else value)
    return found
