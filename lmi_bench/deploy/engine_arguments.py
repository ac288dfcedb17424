"""The arguments of vLLM, SGLang and TGI, version by version, and whether a value fits one.

benchmarks/engine_arguments.py writes the first two tables from the engines' sources. A row holds
from the version `since` up to, but not including, `until`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.option import is_within
from lmi_bench.deploy.option_table import value_problem

_WORDS = {"[": "at least", "(": "more than", "]": "at most", ")": "less than"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an engine.

    part     engine, or frontend: of the engine's own HTTP server, which LMI does not start
    kind     int, count (from 1), size (an int, or one such as 32k), float, bool, str, enum, json or
             list
    range    range of a number in interval notation; empty: none is stated
    """

    name: str
    part: str
    kind: str
    choices: str
    range: str
    default: str
    since: str
    until: str

    def problem(self, value: str) -> str | None:
        """Why a value is invalid, or None; None in Python's spelling always passes."""
        if value == "None":
            return None
        problem = value_problem(self.kind, self.choices.split(), value)
        if problem or not self.range or value_problem("float", (), value) is not None:
            return problem
        ends = zip(self.range[:1] + self.range[-1:], self.range[1:-1].split(","), strict=True)
        limits = " and ".join(f"{_WORDS[sign]} {end}" for sign, end in ends if end)
        return None if is_within(float(value), limits) else f"expected {limits}"


@cache
def argument_history(engine: str) -> tuple[Argument, ...]:
    """Every row of an engine: vllm, sglang or tgi."""
    return tuple(Argument(**row) for row in read_rows(f"engine_arguments/{engine}.csv", "deploy"))


@cache
def engine_arguments(engine: str, version: str) -> Mapping[str, Argument]:
    """The arguments of one version, by name; empty for a version before the first known."""
    at = version_key(version)
    return {
        row.name: row
        for row in argument_history(engine)
        if version_key(row.since) <= at and (not row.until or at < version_key(row.until))
    }


@cache
def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare by."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
