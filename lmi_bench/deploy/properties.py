"""Reads and writes serving.properties, Java's key=value format.

Follows java.util.Properties: comments, blanks around the separator, `:` or a blank instead of
`=`, lines continued after a backslash, and escapes.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError

_KEY_END = re.compile(r"(?<!\\)(?:\s*[=:]\s*|\s+)")
_CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*\\$")  # an odd number of backslashes
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str, *, source: str = "serving.properties") -> dict[str, str]:
    """Keys and values in file order.

    Raises InputError if a key occurs twice with different values: djl-serving would silently use
    the last.
    """
    values: dict[str, str] = {}
    for number, line in _logical_lines(text):
        end = _KEY_END.search(line)
        key = _unescaped(line[: end.start()] if end else line)
        value = _unescaped(line[end.end() :].rstrip()) if end else ""
        if values.get(key, value) != value:
            raise InputError(f"{source} line {number}: {key} is {values[key]!r} above and {value!r} here: keep one")
        values[key] = value
    return values


def read_properties(path: Path) -> dict[str, str]:
    """Parse a file; raises InputError when it cannot be read."""
    return parse_properties(read_text(path), source=str(path))


def render_properties(values: Mapping[str, str], *, comments: tuple[str, ...] = ()) -> str:
    """A file that parses back to the same values."""
    lines = [f"# {comment}" for comment in comments]
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r"})
    lines += [f"{key}={value.translate(escapes)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, continuations joined, without comments and empty lines."""
    pending, first = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], start=1):
        line = raw.lstrip()
        if not pending:
            first = number
            if not line or line[0] in "#!":
                continue
        if _CONTINUED.search(line):
            pending += line[:-1]
            continue
        yield first, pending + line
        pending = ""


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text)
