"""Requests and manifests as templates in data/: YAML in which `$name` stands for a plan's value."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

_PLACE: Final = re.compile(r"\$([a-z_]+)")


class PlainDumper(yaml.SafeDumper):
    """Writes a value that occurs twice twice, without an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def filled(file: str, names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """These objects of a template, by their names in it, with a plan's values.

    A text that is a `$name` as a whole becomes the value, whatever its type. A key whose value is
    None is left out.
    """

    def fill(part: Any) -> Any:
        if isinstance(part, dict):
            found = ((key, fill(value)) for key, value in part.items())
            return {key: value for key, value in found if value is not None}
        if isinstance(part, list):
            return [fill(each) for each in part]
        place = _PLACE.fullmatch(part) if isinstance(part, str) else None
        return values[place[1]] if place else part

    return {name: fill(_template(file)[name]) for name in names}


@cache
def _template(file: str) -> dict[str, Any]:
    path = resources.files("lmi_bench.deploy") / "data" / file
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content
