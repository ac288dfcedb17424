"""The options of djl-serving and its LMI containers, and the settings that a container would use.

Three eras use the same names but behave differently: A up to djl-serving 0.26 (2023), B from 0.27
to 0.34, C since 0.35. The precedence of settings:

    1  SAGEMAKER_NUM_MODEL_WORKERS and its kin, since 0.35 (SageMakerCompatibility.java)
    2  serving.properties beside the model
    3  OPTION_X for option.x, SERVING_X for a key without prefix
    4  short names: HF_MODEL_ID, TENSOR_PARALLEL_DEGREE, ...
    5  TGI's and SageMaker's names, rewritten by the container's entry script

`MAX_CONCURRENT_REQUESTS` is a queue length here and a hard limit in TGI; TGI's MAX_INPUT_LENGTH,
MAX_TOTAL_TOKENS and MAX_BATCH_TOTAL_TOKENS are not translated. Source: option tables, code and
configurations.md of the branches 0.26.0-dlc to 0.36.0-lmi27-dlc, and
dockerd-entrypoint-with-cuda-compat.sh.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.durable import parsed_json
from lmi_bench.core.errors import InputError

PREFIX: Final = "option."
ERAS: Final = {"A": "to 0.26", "B": "0.27 to 0.34", "C": "since 0.35"}

_FORMS: Final = {row["kind"]: (row["pattern"], row["expected"]) for row in read_rows("value_kinds.csv", "deploy")}
"""Pattern of a valid value of each kind, and its description."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of serving.properties.

    name         name with its prefix: `option.` if the model handler reads it
    kind         int, count (from 1), float, bool, str, enum, json, or int_or_max
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

    def problem(self, value: str) -> str | None:
        """Why a value is invalid for this option, or None."""
        return value_problem(self.kind, self.choices, value)


def value_problem(kind: str, choices: Sequence[str], value: str) -> str | None:
    """Why a value is invalid for a kind and its choices, or None."""
    if kind == "enum":
        good = value.lower() in (choice.lower() for choice in choices)
        return None if good else f"expected one of {', '.join(choices)}"
    pattern, expected = _FORMS.get(kind, (r".*", "text"))
    if not re.fullmatch(pattern, value, re.DOTALL):
        return f"expected {expected}"
    if kind == "json":
        try:
            parsed_json(value)
        except ValueError as exc:
            return f"expected {expected} ({exc})"
    return None


@cache
def all_options() -> Mapping[str, Option]:
    """All known options by name."""
    rows: Iterable[dict[str, Any]] = read_rows("lmi_options.csv", "deploy")
    lists = ("choices", "backends")
    return {row["name"]: Option(**(row | {name: tuple(row[name].split()) for name in lists})) for row in rows}


def variable_of(name: str) -> str:
    """The regular environment variable of a key: OPTION_X for option.x, SERVING_X for x."""
    bare = name.removeprefix(PREFIX).replace(".", "_").upper()
    return f"{'OPTION' if name.startswith(PREFIX) else 'SERVING'}_{bare}"


def find_option(name: str) -> Option:
    """Find an option, with or without its prefix; raises InputError with the nearest name."""
    options = all_options()
    found = options.get(name) or options.get(PREFIX + name)
    if found is None:
        raise InputError(f"option {name!r} is not known{nearest(name)}")
    return found


def nearest(name: str, known: Iterable[str] | None = None, cutoff: float = 0.6) -> str:
    """A suggestion for an unknown name, to append to a sentence; empty if nothing is near."""
    names = {n.removeprefix(PREFIX): n for n in (all_options() if known is None else known)}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[close[0]]}?" if close else ""


_GRAPHS: Final = "ENABLE_CUDA_GRAPHS"  # the opposite of option.enforce_eager
_SHORT_NAMED: Final = ("option.model_id", "option.revision", "option.trust_remote_code")


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value and its origin: a file or a variable's name."""

    value: str
    origin: str


def effective_settings(
    properties: Mapping[str, str], environ: Mapping[str, str], *, source: str, era: str = "C"
) -> dict[str, Setting]:
    """The settings that an LMI container would use; empty variables count as absent."""
    settings = {name: Setting(value, source) for name, value in properties.items()}
    options = all_options()
    present = {variable: value for variable, value in environ.items() if value}
    regular = {variable_of(name): name for name in options}
    if era != "A":
        regular["OPTION_ENGINE"] = "engine"
    for variable, value in present.items():
        if variable in regular or variable.startswith("OPTION_"):
            passed_on = PREFIX + variable.removeprefix("OPTION_").lower()
            settings.setdefault(regular.get(variable, passed_on), Setting(value, variable))
    short = {option.environment: name for name, option in options.items()}
    rewritten = {variable: name for variable, (name,) in _variables("last").items()}
    own = {variable: name for variable, name in short.items() if variable not in rewritten}
    for variable, name in (own | rewritten).items():
        if variable in present:
            settings.setdefault(name, Setting(present[variable], variable))
    graphs = present.get(_GRAPHS)
    if graphs is not None:
        eager = "false" if graphs.lower() == "true" else "true"
        settings.setdefault("option.enforce_eager", Setting(eager, _GRAPHS))
    for variable, names in _variables("above the file").items() if era == "C" else ():
        if variable in present:
            settings |= dict.fromkeys(names, Setting(present[variable], variable))
    return settings


def untranslated_variables(environ: Mapping[str, str]) -> list[str]:
    """TGI's limits in the environment that an LMI container ignores."""
    return [name for name in _variables("not read") if environ.get(name)]


def _variables(priority: str) -> dict[str, list[str]]:
    """TGI's and SageMaker's variables of a priority, with the names of the keys that they set."""
    rows = read_rows("lmi_variables.csv", "deploy")
    return {row["variable"]: row["names"].split() for row in rows if row["priority"] == priority}


def environment_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings as environment variables; model id, revision and trust get their short names.

    `engine` is omitted: the container's default is right, and up to 0.26 it has no variable.
    """
    options = all_options()
    return {
        options[name].environment if name in _SHORT_NAMED else variable_of(name): value
        for name, value in settings.items()
        if name != "engine"
    }
