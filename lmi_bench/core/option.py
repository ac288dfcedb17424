"""How a field of a job's settings is offered on a command line: declared once, beside the field.

A job's settings are a frozen dataclass. A field that a user may state is annotated
`Annotated[type, Option(...)]`; `cli/options/spread.py` turns it into an option of the command, and
a caller from Python passes the field itself. Nothing here knows a terminal.
"""

from __future__ import annotations

from dataclasses import dataclass


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
