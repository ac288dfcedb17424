"""Outputs in a form that can be kept in git and compared: volatile parts masked, layout fixed.

A file becomes one or two texts. JSON and JSON lines are laid out anew (the order of keys kept),
an HTML page becomes its visible text and the data of its charts, the rest stays as it is.
`settled` takes over the golden digits where two numbers differ by rounding only, so that the
texts can then be compared character by character.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

RELATIVE = 1e-9  # sums may be taken in another order
# What remains of a difference of equal numbers: a standard deviation of equal latencies is a few
# 1e-12 instead of 0, and has no digit that means anything.
ABSOLUTE = 1e-11
ABSOLUTE_OF_A_DEVIATION = 1e-9
WIDTH = 100
LONG_LIST = 200  # a day of ten-second steps is written as runs of equal values

MOMENT = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?| \d\d:\d\d(:\d\d)? UTC)")
# What cannot stay, by a key that tells what holds it: a run's manifest says on what machine and
# with which packages it was made; a level with a price says what it took by the wall clock, also
# where the level itself ran in virtual time.
HIDDEN: dict[str, dict[str, Any]] = {
    "scenario_hash": {"host": "HOST", "versions": "VERSIONS"},
    "spent_usd": {"elapsed_s": "WALL CLOCK", "spent_usd": "WALL CLOCK"},
}
SPENT = re.compile(r"the sweep took [\d.]+ USD")
VERSION = re.compile(r"(lmi-bench |tool_version: )\d+\.\d+[\w.+]*")
NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")


def texts_of(path: str, content: str, days: tuple[str, ...]) -> dict[str, str]:
    """The texts to keep of a file that a command wrote, by the names to keep them under.

    days   today by UTC, before and after the commands: the only dates that are masked
    """
    suffix = PurePosixPath(path).suffix
    if suffix == ".html":
        page = _Page()
        page.feed(content)
        page.close()
        charts = laid_out(_masked(page.charts(), days))
        return {f"{path}.txt": masked_text(page.text(), days), f"{path}.charts.json": charts}
    if suffix == ".json":
        return {path: laid_out(_masked(json.loads(content), days))}
    if suffix == ".jsonl":
        lines = [_masked(json.loads(line), days) for line in content.splitlines()]
        if PurePosixPath(path).name == "requests.jsonl" and len(lines) > 2:
            lines = [{"lines": len(lines)}, lines[0], lines[-1]]
        return {f"{path}.txt": "".join(laid_out(line) for line in lines)}
    name = f"{path}.txt" if suffix == ".py" else path  # or it would be checked as ours
    return {name: masked_text(content, days)}


def masked_text(text: str, days: tuple[str, ...]) -> str:
    """A text without moments, versions, today's date, money spent and blanks at line ends."""
    text = VERSION.sub(r"\1VERSION", MOMENT.sub("MOMENT", text))
    text = SPENT.sub("the sweep took SPENT USD", text)
    for day in days:
        text = text.replace(day, "TODAY")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _masked(value: Any, days: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return masked_text(value, days)[:-1] if value else value
    if isinstance(value, list):
        return [_masked(each, days) for each in value]
    if not isinstance(value, dict):
        return value
    hidden = next((names for mark, names in HIDDEN.items() if mark in value), {})
    return {key: hidden.get(key) or _masked(item, days) for key, item in value.items()}


def laid_out(value: Any) -> str:
    """JSON with one short object or list a line, and a newline at its end."""
    return _lay_out(value, "") + "\n"


def _lay_out(value: Any, indent: str) -> str:
    if isinstance(value, list) and len(value) > LONG_LIST and _flat(value):
        runs = [[len(list(group)), each] for each, group in groupby(value)]
        if len(runs) * 2 < len(value):
            return _lay_out({"runs of [count, value]": runs}, indent)
    short = json.dumps(value)
    if len(indent) + len(short) <= WIDTH or not isinstance(value, dict | list):
        return short
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {_lay_out(item, inner)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        rows = _filled([_lay_out(item, inner) for item in value], WIDTH - len(inner))
        opening, closing = "[", "]"
    body = ",\n".join(inner + row for row in rows)
    return f"{opening}\n{body}\n{indent}{closing}"


def _flat(value: list[Any]) -> bool:
    return not any(isinstance(each, dict | list) for each in value)


def _filled(parts: list[str], width: int) -> list[str]:
    rows: list[str] = []
    for part in parts:
        if rows and "\n" not in rows[-1] + part and len(rows[-1]) + len(part) + 2 <= width:
            rows[-1] += f", {part}"
        else:
            rows.append(part)
    return rows


def settled(name: str, actual: str, golden: str) -> str:
    """The actual text, with the golden digits wherever a number is the same but for rounding."""
    if actual == golden:
        return actual
    if name.endswith((".json", ".jsonl.txt")):
        ours, theirs = _values(actual), _values(golden)
        pairs = zip(ours, theirs + ours[len(theirs) :], strict=False)
        return "".join(laid_out(_settled_value(one, other)) for one, other in pairs)
    return _settled_text(actual, golden)


def _values(text: str) -> list[Any]:
    found, place, reader = [], 0, json.JSONDecoder()
    while place < len(text):
        value, place = reader.raw_decode(text, place)
        found.append(value)
        place += 1  # its newline
    return found


def _settled_value(actual: Any, golden: Any, key: str = "") -> Any:
    if isinstance(actual, float) and isinstance(golden, float):
        return golden if _same(actual, golden, deviation="std" in key) else actual
    if isinstance(actual, dict) and isinstance(golden, dict):
        return {k: _settled_value(v, golden[k], k) if k in golden else v for k, v in actual.items()}
    if isinstance(actual, list) and isinstance(golden, list):
        rest = actual[len(golden) :]
        pairs = zip(actual, golden, strict=False)
        return [_settled_value(one, other, key) for one, other in pairs] + rest
    return actual


def _settled_text(actual: str, golden: str) -> str:
    ours, theirs = actual.splitlines(), golden.splitlines()
    alike = difflib.SequenceMatcher(
        None, [NUMBER.sub("#", x) for x in ours], [NUMBER.sub("#", x) for x in theirs], False
    )
    for start, other, size in alike.get_matching_blocks():
        for step in range(size):
            ours[start + step] = _settled_line(ours[start + step], theirs[other + step])
    return "".join(f"{line}\n" for line in ours)


def _settled_line(actual: str, golden: str) -> str:
    digits = iter(NUMBER.findall(golden))

    def take(found: re.Match[str]) -> str:
        other = next(digits)
        same = "." in found[0] + other and _same(float(found[0]), float(other))
        return other if same else found[0]

    return NUMBER.sub(take, actual)


def _same(one: float, other: float, *, deviation: bool = False) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    least = ABSOLUTE_OF_A_DEVIATION if deviation else ABSOLUTE
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=least)


class _Page(HTMLParser):
    """The visible text of a report, a table's row a line, and the data of its charts."""

    _ROW = re.compile(
        "address|aside|caption|div|dl|dt|figcaption|footer|h[1-4]|header|li|nav|p|section|table|title|tr|ul"
    )
    _OF_THIS_MACHINE = ("Host", "Versions")  # headings of lists of `name | value`

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._figures = ""  # the data of all figures
        self._inside = ""  # of a script or style: its id, or "-"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts: Mapping[str, str | None] = dict(attrs)
        if tag in ("script", "style"):
            self._inside = facts.get("id") or "-"
        elif self._ROW.fullmatch(tag):
            self._parts.append("\n")
        elif tag in ("td", "th", "span"):
            self._parts.append(" | " if tag != "span" else " ")
        if facts.get("title"):
            self._parts.append(f"[{facts['title']}] ")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""
        elif tag == "dt":
            self._parts.append(" | ")
        elif self._ROW.fullmatch(tag):
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._inside == "figures":
            self._figures += data
        elif not self._inside:
            self._parts.append(re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """Its lines, without empty ones and without what the machine is and has installed."""
        kept, hidden = [], False
        for part in "".join(self._parts).split("\n"):
            line = re.sub(r" +", " ", part).strip(" |")
            hidden = line in self._OF_THIS_MACHINE or (hidden and (not line or " | " in line))
            if line and not (hidden and " | " in line):
                kept.append(line)
        return "\n".join(kept)

    def charts(self) -> dict[str, Any]:
        """Each chart's data by its id, keys in order."""
        found = json.loads(self._figures or "{}", object_pairs_hook=_sorted)
        return {each["anchor"]: each for each in found.get("charts", ())}


def _sorted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(sorted(pairs))
