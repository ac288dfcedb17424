"""Requests, manifests and reports as templates: YAML in which `$name` stands for a value."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

_PLACE: Final = re.compile(r"\$([a-z_]+)")
_OF_GO: Final = re.compile(r"[-+]?(\.\d+|\d+\.?\d*)([eE][-+]?\d+)?|[-+]?0o[0-7]+|[yYnN]")
"""Texts that Kubernetes reads as numbers or booleans, and PyYAML does not."""


class _PlainDumper(yaml.SafeDumper):
    """Writes a value that occurs twice twice, without an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@dataclass(frozen=True)
class Tag:
    """A CloudFormation function such as !Ref."""

    name: str
    value: str


class _TagLoader(yaml.SafeLoader):
    """Reads such functions, too."""


_PlainDumper.add_representer(Tag, lambda dumper, tag: dumper.represent_scalar(f"!{tag.name}", tag.value))
_PlainDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="'" if _OF_GO.fullmatch(text) else None
    ),
)
_TagLoader.add_multi_constructor("!", lambda _, name, node: Tag(name, node.value))


def filled(file: str, names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """These objects of the template `PACKAGE/data/NAME`, by their names in it, with values.

    file  PACKAGE/NAME

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

    return {name: fill(read_template(file)[name]) for name in names}


def as_yaml(*documents: Any) -> str:
    """The documents of a YAML file, their keys in order."""
    return yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=100)


@cache
def read_template(file: str) -> dict[str, Any]:
    """The objects of a template, without values."""
    package, _, name = file.partition("/")
    path = resources.files(f"lmi_bench.{package}") / "data" / name
    text = path.read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.load(text, Loader=_TagLoader)  # noqa: S506  it is a SafeLoader
    return content
