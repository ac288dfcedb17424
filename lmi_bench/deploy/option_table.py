"""The options of djl-serving and its LMI containers: names, kinds, defaults, backends.

Three eras use the same names but behave differently: A up to djl-serving 0.26 (2023), B from 0.27
to 0.34, C since 0.35. Source: the option tables and code of the project's branches 0.26.0-dlc to
0.36.0-lmi27-dlc.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from lmi_bench.core.errors import InputError

PREFIX: Final = "option."
ERAS: Final = {"A": "to 0.26", "B": "0.27 to 0.34", "C": "since 0.35"}


_FORMS: Final = {
    "int": (r"-?\d+", "a whole number"),
    "int_or_max": (r"max|0*[1-9]\d*", "a whole number of at least 1, or max"),
    "float": (r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", "a number"),
    "bool": (r"(?i:true|false)", "true or false"),
    "json": (r"[{\[].*", "JSON in one line"),
}
"""Pattern of a valid value of each kind, and its description."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of serving.properties.

    name         with its prefix: `option.` if the model handler reads it
    kind         int, float, bool, str, enum, json, or int_or_max
    choices      values of an enum
    backends     backends that read it; ("all",) for every one
    eras         letters of `ERAS` in which it has an effect
    environment  a short environment variable besides the regular one; empty: none
    engine_setting  the bundled engine's setting of the same meaning; `*`: derived from several
                 options; empty: no effect on the bundled engine
    """

    name: str
    kind: str
    choices: tuple[str, ...]
    default: str
    backends: tuple[str, ...]
    eras: str
    environment: str
    engine_setting: str
    meaning: str

    @property
    def variable(self) -> str:
        """The regular environment variable."""
        return variable_of(self.name)

    def problem(self, value: str) -> str | None:
        """Why a value is invalid for this option, or None."""
        if self.kind == "enum":
            good = value.lower() in (choice.lower() for choice in self.choices)
            return None if good else f"expected one of {', '.join(self.choices)}"
        pattern, expected = _FORMS.get(self.kind, (r".*", "text"))
        return None if re.fullmatch(pattern, value, re.DOTALL) else f"expected {expected}"


@cache
def all_options() -> Mapping[str, Option]:
    """All known options by name."""
    rows: Iterable[dict[str, Any]] = csv.DictReader(data_file("lmi_options.csv").splitlines())
    lists = ("choices", "backends")
    return {
        row["name"]: Option(**(row | {name: tuple(row[name].split()) for name in lists}))
        for row in rows
    }


def variable_of(name: str) -> str:
    """The regular environment variable of a key: OPTION_X for option.x, SERVING_X for x."""
    bare = name.removeprefix(PREFIX).replace(".", "_").upper()
    return f"{'OPTION' if name.startswith(PREFIX) else 'SERVING'}_{bare}"


def data_file(name: str) -> str:
    """The text of a data file of this package."""
    return resources.files("lmi_bench.deploy").joinpath("data").joinpath(name).read_text("utf-8")


def find_option(name: str) -> Option:
    """Find an option, with or without its prefix; raises InputError with the nearest name."""
    options = all_options()
    found = options.get(name) or options.get(PREFIX + name)
    if found is None:
        raise InputError(f"option {name!r} is not known{nearest(name)}")
    return found


def nearest(name: str, known: Iterable[str] | None = None) -> str:
    """A suggestion for an unknown name, to append to a sentence; empty if nothing is near."""
    names = {n.removeprefix(PREFIX): n for n in (all_options() if known is None else known)}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=0.6)
    return f"; did you mean {names[close[0]]}?" if close else ""
