"""Reads recorded traffic for the planner: a log of requests, or a trace.

A log is JSON lines, a CSV with a heading, or lines of a web server or load balancer (nginx, Apache,
ALB). Its fields have the names that servers, gateways and their exports use, in any case and with
or without underscores, also below `usage`, `request`, `response` and `body`. If it has texts but no
token counts, four characters count as a token.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_trace

_CHARACTERS_PER_TOKEN = 4
_TIMES = (
    "timestamp", "time", "ts", "created", "createdat", "starttime", "startedat", "requesttime",
    "arrivaltime", "arrivedat", "@timestamp",
)  # fmt: skip
_INPUT = (
    "inputtokens", "prompttokens", "numprompttokens", "inputlength", "contexttokens",
    "inputtokencount", "promptlen", "inputusage",
)  # fmt: skip
_OUTPUT = (
    "outputtokens", "completiontokens", "generatedtokens", "outputlength", "outputtokencount",
    "outputlen", "outputusage",
)  # fmt: skip
_BELOW = ("usage", "usagedetails", "request", "response", "body", "metrics")
_PROMPTS = ("prompt", "messages", "inputs", "input")
_ANSWERS = ("completion", "generatedtext", "outputtext", "output", "choices")
_FIELDS = ("time", "input", "output")
_WEB_LOG = re.compile(r'\[(\d+/\w+/\d+:\d+:\d+:\d+ [+-]\d+)\] "(\w+) [^"]*" (\d{3})')
_ALB_LOG = re.compile(r'^\w+ (\d{4}-\d\d-\d\dT\S+) .*? (\d{3}|-) (?:\d{3}|-) \d+ \d+ "(\w+) ')
_AZURE = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
_EPOCH_MS_FROM = 1e11  # seconds beyond it would be the year 5138


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """How much of the prompts is the same text at their beginning, which a prefix cache can find.

    common    length of the longest beginning that at least half of the prompts have
    repeated  share (0 to 1) of all prompt text that repeats the beginning of another prompt: the
              hit rate of an unlimited cache
    """

    common: int
    repeated: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Recorded requests, and what their source does not contain.

    requests       in order of time, from 0; without times all at 0
    start_epoch_s  Unix time of the first; None where times are relative or missing
    has_times      whether the requests' times are known
    prefix         shared by the prompts, in tokens; None if the prompts are not recorded
    unknown        what such a source does not contain
    notes          how it was read
    """

    requests: tuple[TraceRequest, ...]
    start_epoch_s: float | None
    has_times: bool
    prefix: SharedPrefix | None
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


def read_traffic(
    path: Path,
    *,
    fields: Mapping[str, str] = MappingProxyType({}),
    assumed: tuple[int, int] | None = None,
) -> Traffic:
    """Read a log or a trace, recognised by its fields; raises InputError for anything else.

    fields   names in the log of `time`, `input` and `output` (tokens)
    assumed  input and output tokens of requests whose line has none
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read {path}: {file_reason(exc)}") from exc
    rows = _rows(path, first)
    head = next(rows, {})
    trace = (_AZURE, {"timestamp", "input_length", "output_length"})
    if any(names <= head.keys() for names in trace) and not fields:
        return _trace(path)
    return _log(path, [head, *rows], fields, assumed)


def _trace(path: Path) -> Traffic:
    requests = read_trace(path).requests
    prefix = None
    unknown = ["the hour of the day: a trace is read from its first request on"]
    if any(each.hash_ids for each in requests):
        prefix = _of_blocks(requests)
    else:
        unknown.append("shared prefixes: the trace has no text and no hashes of it")
    return Traffic(requests, None, True, prefix, (*unknown, *_NEVER), ())


_NEVER = (
    "conversations: each turn looks like a separate request",
    "requests that were rejected or abandoned before the log was written",
)


def _of_blocks(requests: Sequence[TraceRequest]) -> SharedPrefix:
    """The prefix of prompts given as blocks: each block is compared as one character."""
    blocks = ["".join(chr(0x10000 + i % 0xF0000) for i in each.hash_ids) for each in requests]
    found = shared_prefix(blocks)
    return replace(found, common=found.common * MOONCAKE_BLOCK_TOKENS)


def _log(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    fields: Mapping[str, str],
    assumed: tuple[int, int] | None,
) -> Traffic:
    times, inputs, outputs = (
        (_plain(fields[name]), *known) if name in fields else known
        for name, known in zip(_FIELDS, (_TIMES, _INPUT, _OUTPUT), strict=True)
    )
    kept: list[tuple[float | None, int, int]] = []
    texts: list[str] = []
    estimated = guessed = left_out = 0
    for row in map(_normalised, rows):
        prompt = _first(row, _PROMPTS, _text)
        tokens_in, tokens_out = _number(row, inputs), _number(row, outputs)
        if tokens_in is None and prompt:
            tokens_in, estimated = len(prompt) / _CHARACTERS_PER_TOKEN, estimated + 1
        if tokens_out is None and (answer := _first(row, _ANSWERS, _text)):
            tokens_out = len(answer) / _CHARACTERS_PER_TOKEN
        if assumed is not None:
            guessed += not (tokens_in and tokens_out)
            tokens_in, tokens_out = tokens_in or assumed[0], tokens_out or assumed[1]
        if not tokens_in or not tokens_out or _failed(row):
            left_out += 1
            continue
        kept.append(
            (_first(row, times, _epoch_s), max(1, round(tokens_in)), max(1, round(tokens_out)))
        )
        if prompt:
            texts.append(prompt)
    if len(kept) < 2:
        seen = ", ".join(map(str, list(rows[0])[:12])) or "none"
        raise InputError(
            f"{path}: {len(kept)} of {len(rows)} lines have prompt and answer lengths; expected "
            "are input_tokens or prompt_tokens, output_tokens or completion_tokens (also below "
            f"usage), or text in prompt or messages. Its fields: {seen}. Name them with --fields "
            "input=NAME,output=NAME, or give lengths with --assume 500/200"
        )
    found = _put_together(kept, texts, estimated=estimated, left_out=left_out, times=times)
    if not guessed:
        return found
    return replace(found, notes=(*found.notes, f"{guessed} lines have no lengths: as --assume"))


def _put_together(
    kept: list[tuple[float | None, int, int]],
    texts: list[str],
    *,
    estimated: int,
    left_out: int,
    times: Sequence[str],
) -> Traffic:
    unknown, notes = list(_NEVER), []
    has_times = all(at is not None for at, _, _ in kept)
    start = min((at for at, _, _ in kept if at is not None), default=0.0)
    if not has_times:
        tried = ", ".join(times[:6])
        unknown.insert(0, f"rate, bursts, daily curve: not every line has a time ({tried} ...)")
    elif len({at for at, _, _ in kept}) < 2:
        has_times = False
        unknown.insert(0, "rate, bursts, daily curve: all lines have the same time")
    requests = sorted(
        (
            TraceRequest((at or 0.0) - start if has_times else 0.0, tokens_in, tokens_out)
            for at, tokens_in, tokens_out in kept
        ),
        key=lambda each: each.at_s,
    )
    if estimated:
        by_text = f"{_CHARACTERS_PER_TOKEN} characters a token"
        notes.append(f"{estimated} prompt lengths are estimated from text, {by_text}")
    if left_out:
        notes.append(f"{left_out} lines failed or have no lengths: left out")
    prefix = None
    if len(texts) > len(kept) / 2:
        found = shared_prefix(texts)
        prefix = replace(found, common=round(found.common / _CHARACTERS_PER_TOKEN))
    else:
        unknown.append("shared prefixes: the log does not hold the prompts")
    absolute = has_times and start > _EPOCH_MS_FROM / 1000
    if has_times and not absolute:
        unknown.append("the hour of the day: times are not calendar times")
    return Traffic(
        tuple(requests),
        start if absolute else None,
        has_times,
        prefix,
        tuple(unknown),
        tuple(notes),
    )


def _rows(path: Path, first: str) -> Iterator[Mapping[str, Any]]:
    """The requests as mappings; `first` is the first line, which tells the kind of file."""
    with path.open(encoding="utf-8-sig") as file:
        if first.lstrip().startswith("{"):
            yield from _json_rows(path, file)
        elif _WEB_LOG.search(first) or _ALB_LOG.search(first):
            yield from filter(None, map(_web_row, file))
        else:
            mark = next((mark for mark in ("\t", ";") if mark in first), ",")
            yield from csv.DictReader(file, delimiter=mark)


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise InputError(f"{path}, line {number}: not JSON: {exc}") from exc
        if not isinstance(row, Mapping):
            raise InputError(f"{path}, line {number}: expected a JSON object with one request")
        yield row


def _web_row(line: str) -> Mapping[str, Any] | None:
    """Time and status of a POST in an access log; None for other lines."""
    if found := _WEB_LOG.search(line):
        at, method, status = found.groups()
        time = datetime.strptime(at, "%d/%b/%Y:%H:%M:%S %z").isoformat()
    elif found := _ALB_LOG.search(line):
        time, status, method = found.groups()
    else:
        return None
    return {"time": time, "status": status} if method == "POST" else None


def _plain(name: str) -> str:
    """A field's name in any spelling: `startTime`, `start_time`, `Start Time`."""
    return re.sub(r"[_\- ]", "", name).lower()


def _normalised(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        _plain(str(name)): _normalised(value) if isinstance(value, Mapping) else value
        for name, value in row.items()
    }
    for usage in (found.get("usage"), found.get("usagedetails")):
        if isinstance(usage, dict):  # Langfuse's; elsewhere these names are texts
            usage.setdefault("inputtokens", usage.get("input"))
            usage.setdefault("outputtokens", usage.get("output"))
    return found


def _places(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The object and those inside it that may hold a request's fields."""
    yield row
    for name in _BELOW:
        inner = row.get(name)
        if isinstance(inner, Mapping):
            yield from _places(inner)


def _first(
    row: Mapping[str, Any], names: Sequence[str], read: Callable[[object], Any]
) -> Any | None:
    for place in _places(row):
        for name in names:
            value = read(place.get(name))
            if value is not None:
                return value
    return None


def _number(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    def read(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            number = float(value)
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    return _first(row, names, read)


def _epoch_s(value: object) -> float | None:
    """Unix seconds, or seconds of the log's own clock."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        number = float(value)
        while number > _EPOCH_MS_FROM:  # ms, us or ns
            number /= 1000
        return number
    if isinstance(value, str):
        if re.fullmatch(r"\d+(\.\d+)?", value):
            return _epoch_s(float(value))
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return None


def _text(value: object) -> str | None:
    """A prompt or an answer, with the roles of its messages; None where it is not recorded."""
    if isinstance(value, str):
        return value or None
    if not isinstance(value, Sequence):
        return None
    parts = []
    for each in value:
        if isinstance(each, str):
            parts.append(each)
        elif isinstance(each, Mapping):
            message = each.get("message")
            inner = message if isinstance(message, Mapping) else each
            parts.append(
                f"{inner.get('role', '')}: {inner.get('content') or inner.get('text', '')}"
            )
    return "\n".join(parts) or None


def _failed(row: Mapping[str, Any]) -> bool:
    status = _number(row, ("status", "statuscode", "httpstatus", "elbstatuscode"))
    return (status is not None and status >= 400) or bool(row.get("error"))


def shared_prefix(prompts: Sequence[str]) -> SharedPrefix:
    """The shared beginnings of prompts, with lengths in characters.

    In sorted order a text shares its longest beginning with a neighbour, so the length of all
    texts less the sum over neighbours is the size of their prefix tree.

    >>> shared_prefix(["system a", "system b", "other"])
    SharedPrefix(common=7, repeated=0.3333333333333333)
    """
    ordered = sorted(prompts)
    whole = sum(map(len, ordered))
    if len(ordered) < 2 or not whole:
        return SharedPrefix(0, 0.0)
    half = max(2, -(-len(ordered) // 2))
    common = max(
        _common(ordered[first], ordered[first + half - 1])
        for first in range(len(ordered) - half + 1)
    )
    repeated = sum(_common(before, after) for before, after in pairwise(ordered))
    return SharedPrefix(common, repeated / whole)


def _common(one: str, other: str) -> int:
    """Length of the beginning that both have, by bisection, since texts are long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
