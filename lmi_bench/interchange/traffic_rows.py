"""Reads the lines of a log, whatever its format, each as the fields that describe a request.

JSON lines, JSON documents, CSV (any delimiter) and web access logs (nginx, Apache, Envoy, AWS load
balancers), also gzipped. A field is found under the names that servers, gateways and tracing tools
use, in any spelling (`startTime`, `start_time`, `Start Time`), also inside `usage` and the like.
"""

import csv
import gzip
import io
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pandas as pd

from lmi_bench.core.durable import parsed_json, whole_characters
from lmi_bench.core.errors import UNREADABLE, InputError, file_reason
from lmi_bench.core.listener import SILENT, Listener

_FIELDS: Final = json.loads((files("lmi_bench.interchange") / "data" / "log_fields.json").read_text("utf-8"))
_BESIDE: Final[Mapping[str, list[str]]] = _FIELDS.pop("beside")
"""Plain names of counts that leave tokens out, and of those: what a cache held of a prompt
(Anthropic, Bedrock, Langfuse), the thoughts of an answer (Gemini, Langfuse)."""
NAMES: Final[Mapping[str, list[str]]] = _FIELDS
"""Names of each field, the first of them that a line has."""
_INNER_OBJECTS = {
    *("usage", "usageDetails", "usage_details", "usageMetadata"),
    *("request", "response", "body", "metrics", "attributes"),
}
_LISTS = {"data", "logs", "observations", "items", "records", "results", "rows"}
"""Names of the list of requests in a document that an API answered."""
_SHOWN_FIELDS, _MOST_NAMES, _ROWS_AT_ONCE = 24, 10_000, 4000
_LINES_TO_LOOK_AT = 50
_LONGEST_FIELD = 2**31 - 1
_MOST_LINE, _MOST_UNPACKED = 2**27, 200  # characters; times a gzipped log, which has some 30
_PROGRESS_AFTER_S = 2.0
_UTF16 = (b"\xff\xfe", b"\xfe\xff")

_REQUEST = re.compile(
    r"\b(GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS|TRACE|CONNECT) ((?:/|\*|https?://)[^\s\"]*)"
    r"(?: HTTP/[\d.]+)?"
)
_STATUS = re.compile(r'"?\s+"?(\d{3})\b')
_BALANCER = re.compile(r"^(?:(?:https?|h2|grpcs|wss?) )?\d{4}-\d\d-\d\dT\S+ \S+ \S+:\d+ (?:\S+:\d+|-) -?[\d.]+ ")
_DATE = re.compile(
    r"\d{1,2}/\w{3}/\d{4}:\d\d:\d\d:\d\d(?:\.\d+)?(?: [+-]\d{4})?"
    r"|\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\b1\d{9}(?:\.\d+)?\b"
)


@cache
def plain(name: str) -> str:
    """A field's name without case and punctuation, as names are compared.

    >>> plain("@timestamp"), plain("Start Time"), plain("usage.input")
    ('timestamp', 'starttime', 'usageinput')
    """
    return "".join(filter(str.isalnum, name.lower()))


_PLAIN = {kind: tuple(map(plain, names)) for kind, names in NAMES.items()}
_KNOWN = {name for names in _PLAIN.values() for name in names}


@dataclass(slots=True)
class LogFile:
    """A log and what was seen in it.

    given     fields named by the user, by kind (time, input, output)
    seen      number of lines with each of these
    left_out  number of lines that hold no request, by reason
    is_web    whether it is a web server's access log, which holds no token counts
    is_late   whether its times are when answers ended, as in most access logs
    first     first row, whose fields an error names
    """

    path: Path
    given: Mapping[str, str] = field(default_factory=dict)
    listener: Listener = SILENT
    seen: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    is_web: bool = False
    is_late: bool = False
    lines: int = 0
    first: Mapping[str, Any] = field(default_factory=dict)

    def columns(self) -> Iterator["Columns"]:
        """The known fields, some rows at a time; raises InputError for a file that is no log."""
        try:
            with _opened(self.path) as (lines, share_read):
                started, rows = time.monotonic(), self._rows(lines)
                while some := list(islice(rows, _ROWS_AT_ONCE)):
                    self.first = self.first or some[0]
                    self.lines += len(some)
                    if time.monotonic() > started + _PROGRESS_AFTER_S:
                        shown = f"reading {self.path.name}"
                        self.listener.progress(shown, round(100 * share_read()), 100)
                    yield self._columns(some)
        except (*UNREADABLE, csv.Error) as exc:
            raise InputError(f"cannot read {self.path}: {file_reason(exc)}") from exc
        except RecursionError:
            raise InputError(f"cannot read {self.path}: its JSON is nested too deeply") from None

    def _rows(self, lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
        sample = list(islice(lines, _LINES_TO_LOOK_AT))
        first = next((line for line in sample if line.strip()), "")
        if not first:
            raise InputError(f"{self.path} is empty: a log has a line for each request")
        if "\0" in first or first.count("\N{REPLACEMENT CHARACTER}") > len(first) / 10:
            raise InputError(f"{self.path} is not text: give JSON lines, CSV or an access log, also as .gz")
        lines = chain(sample, lines)
        delimiter = max(",;\t|", key=first.count)
        header = [plain(name) for name in first.split(delimiter)]
        if first.lstrip()[0] == "{" or re.match(r"\s*\[\s*([\[{\]]|$)", first):
            return self._json(lines)
        known = _KNOWN.union(map(plain, self.given.values()))
        if known.isdisjoint(header) and any(map(_REQUEST.search, sample)):
            self.is_web = True
            return self._web(lines)
        return self._table(lines, delimiter)

    def _json(self, lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
        """Objects of JSON lines; of a document, if the first line alone is none."""
        is_first = True
        for line in lines:
            if not line.strip():
                continue
            try:
                values = [parsed_json(line)]
            except ValueError:
                if is_first:
                    values = list(self._document(line + "".join(lines)))
                else:
                    values = []
                    self._left("not JSON")
            is_first = False
            yield from self._objects(values)

    def _document(self, text: str) -> Iterator[Any]:
        """JSON values one after another; a line that cannot be read is left out."""
        decoder, at, text = json.JSONDecoder(), 0, whole_characters(text)
        while at < len(text):
            if text[at] in " \t\r\n,":
                at += 1
                continue
            try:
                value, at = decoder.raw_decode(text, at)
                yield value
            except ValueError:
                end = text.find("\n", at)
                at = len(text) if end < 0 else end + 1
                self._left("not JSON")

    def _objects(self, value: object) -> Iterator[Mapping[str, Any]]:
        if isinstance(value, list):
            for each in value:
                yield from self._objects(each)
        elif not isinstance(value, dict):
            self._left("no JSON object")
        elif "usage" not in value and (names := value.keys() & _LISTS):
            lists = [value[name] for name in names if isinstance(value[name], list)]
            yield from [row for rows in lists for row in rows if isinstance(row, dict)] or [value]
        else:
            yield value

    def _table(self, lines: Iterator[str], delimiter: str) -> Iterator[Mapping[str, Any]]:
        csv.field_size_limit(_LONGEST_FIELD)
        reader = (row for row in csv.reader(lines, delimiter=delimiter) if any(row))
        names = [name.strip() for name in next(reader, ())]
        width = len(names)
        for cells in reader:
            if len(cells) != width and (len(cells) < width or any(cells[width:])):
                self._left(f"not the header's {width} columns")
            else:
                yield dict(zip(names, cells, strict=False))

    def _web(self, lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
        for line in lines:
            found = _REQUEST.search(line)
            if found is None:
                if line.strip():
                    self._left("no HTTP request")
                continue
            before, after = line[: found.start()], line[found.end() :]
            if _BALANCER.match(line):  # its statuses come first, its time of arrival last
                status = before.rstrip(' "').split()[-4]
                at = _DATE.search(after) or _DATE.search(before)
            else:
                code = _STATUS.match(after)
                status = "" if code is None else code[1]
                at = _DATE.search(before) or _DATE.search(after)
                self.is_late = at is not None
            row = {"method": found[1], "path": found[2], "status": status}
            yield row if at is None else row | {"time": at[0]}

    def _left(self, reason: str) -> None:
        self.left_out[reason] += 1
        self.lines += 1

    def _columns(self, rows: Sequence[Mapping[str, Any]]) -> "Columns":
        known = [dict(_fields(row)) for row in rows]
        frame = pd.DataFrame(known, index=range(len(rows)), dtype=object)
        names = map(str, frame)
        ranked = ((rank, n.count("."), kind, n) for n in names for kind, rank in _ranks(n))
        kinds: dict[str, list[str]] = {}
        for *_, kind, name in sorted(ranked):
            kinds.setdefault(kind, []).append(name)
        for kind, wanted in self.given.items():
            name = f"--fields {kind}"
            kinds[kind], frame[name] = [name], [field_at(row, wanted) for row in rows]
            self.seen[kind] += int(frame[name].replace("", None).count())
        return Columns(frame, kinds, self.given)

    def described(self) -> str:
        """The fields of the first row, for a message."""
        names = list(_leaves(self.first))
        more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
        return ", ".join(names[:_SHOWN_FIELDS]) + more if names else "none"


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows as columns, one for each known field, by its dotted name.

    of     the columns of each kind of field, the most specific first
    given  the kinds for which the user named a field, which then is their only column
    """

    frame: pd.DataFrame
    of: Mapping[str, Sequence[str]]
    given: Collection[str] = ()

    def first(self, kind: str, read: Callable[[Any], object]) -> pd.Series:
        """The first value of this kind in each row that can be read; missing without one."""
        found = pd.Series(None, self.frame.index, dtype=object)
        for name in self.of.get(kind, ()):
            found = filled(found, mapped(self.frame[name], read))
        return found


def mapped(values: pd.Series, read: Callable[[Any], object]) -> pd.Series:
    """What is read from each value; missing values stay."""
    return values.map(read, na_action="ignore") if values.notna().any() else values


def filled(values: pd.Series, others: pd.Series) -> pd.Series:
    """The values, and others where they are missing."""
    known = values.notna()
    if not known.any():
        return others
    return pd.Series(np.where(known, values, others), values.index, dtype=object)


def _whole_counts(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row, its counts with the tokens that stand beside them."""
    keys = {plain(key): key for key in row}
    if "prompttokens" in keys:  # LiteLLM's: it holds all of them
        return row
    found = {}
    for count, others in _BESIDE.items():
        known = keys.keys() & {*others}
        if known and count in keys and (number := as_number(row[keys[count]])) is not None:
            found[keys[count]] = number + sum(as_number(row[keys[each]]) or 0 for each in known)
    return {**row, **found}


def _fields(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in _whole_counts(row).items():
        if _ranks(name := f"{prefix}{key}"):
            yield name, value
        if key in _INNER_OBJECTS and isinstance(held := as_object(value), dict):
            yield from _fields(held, f"{name}.")
        elif key in ("input", "output") and isinstance(value, dict):  # Bedrock's has the text, too
            yield from (pair for pair in _fields(value) if pair[0].endswith("TokenCount"))


@lru_cache(_MOST_NAMES)
def _ranks(dotted: str) -> list[tuple[str, int]]:
    """The kinds of field that a name may be of, and its place among the names of each."""
    prefix, _, last = dotted.rpartition(".")
    holder = prefix.rpartition(".")[2]
    is_inner = holder in _INNER_OBJECTS  # also a column such as usage.prompt_tokens
    parent, name = (plain(holder), plain(last)) if is_inner else ("", plain(dotted))
    is_count = name in ("input", "output") and parent.startswith("usage")
    wanted = (parent + name,) if is_count else (name, parent + name)
    return [
        (kind, names.index(known))
        for kind, names in _PLAIN.items()
        if (known := next((each for each in wanted if each in names), None)) is not None
    ]


def request_line(text: object) -> tuple[str, str] | None:
    """Method and path of a request line such as `POST /v1/completions HTTP/1.1`."""
    found = _REQUEST.search(text) if isinstance(text, str) else None
    return None if found is None else (found[1], found[2])


def as_object(value: object) -> object:
    """The value, parsed if it is a JSON object in a cell of a table."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            return parsed_json(value)
        except ValueError:
            return value
    return value


def as_number(value: object) -> float | None:
    """A number, also as text, such as of tokens; infinite for NaN, which no count is."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    except ValueError:
        return None
    return math.inf if math.isnan(number) else number


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Iterator[str], Callable[[], float]]]:
    """The lines of a file, unpacked if it is gzipped, and the share of it that was read."""
    with path.open("rb") as raw:
        size = path.stat().st_size or 1
        packed = raw.peek(2)[:2] == b"\x1f\x8b"
        stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        stream = io.BufferedReader(stream) if packed else raw
        encoding = "utf-16" if stream.peek(2)[:2] in _UTF16 else "utf-8-sig"
        with io.TextIOWrapper(stream, encoding=encoding, errors="replace", newline="") as text:
            yield _lines(path, text, raw, packed=packed), lambda: raw.tell() / size


def _lines(path: Path, text: IO[str], raw: IO[bytes], *, packed: bool) -> Iterator[str]:
    """The lines, none of them so long or so packed that it would fill the memory."""
    read = 0
    while line := text.readline(_MOST_LINE):
        read += len(line)
        if packed and read > max(_MOST_LINE / 2, _MOST_UNPACKED * raw.tell()):
            raise InputError(f"{path} unpacks to over {_MOST_UNPACKED} times its size: unpack it")
        if len(line) == _MOST_LINE:
            raise InputError(f"{path} has a line of over {_MOST_LINE:,} characters: shorten it")
        yield line


def field_at(row: Mapping[str, Any], path: str) -> Any:
    """The value under a name, or inside objects under a name with dots; None without one."""
    if path in row:
        return row[path]
    head, _, rest = path.partition(".")
    inner = as_object(row.get(head))
    return field_at(inner, rest) if rest and isinstance(inner, Mapping) else None


def _leaves(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of a row's values."""
    for key, value in row.items():
        held = as_object(value)
        if isinstance(held, Mapping) and held:
            yield from _leaves(held, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
