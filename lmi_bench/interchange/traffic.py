"""Reads recorded traffic for the planner: a log of requests, or a trace.

A log is JSON lines, one request on each. Its fields have the names that servers and gateways use,
also below `usage`, `request`, `response` and `body`. If it has texts but no token counts, four
characters count as a token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_trace

_CHARACTERS_PER_TOKEN = 4
_TIMES = (
    "timestamp", "time", "ts", "created", "created_at", "start_time", "started_at",
    "request_time", "arrival_time", "arrived_at", "@timestamp",
)  # fmt: skip
_INPUT = (
    "input_tokens", "prompt_tokens", "num_prompt_tokens", "input_length", "ContextTokens",
    "inputTokenCount", "prompt_len",
)  # fmt: skip
_OUTPUT = (
    "output_tokens", "completion_tokens", "generated_tokens", "output_length", "GeneratedTokens",
    "outputTokenCount", "output_len",
)  # fmt: skip
_INNER_OBJECTS = ("usage", "request", "response", "body", "metrics")
_PROMPTS = ("prompt", "messages", "inputs", "input")
_ANSWERS = ("completion", "generated_text", "output_text", "output", "choices")
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


def read_traffic(path: Path) -> Traffic:
    """Read a log or a trace, recognised by its fields; raises InputError for anything else."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read {path}: {file_reason(exc)}") from exc
    if not first.lstrip().startswith("{"):
        return _trace(path)
    try:
        row = json.loads(first)
    except ValueError as exc:
        raise InputError(f"{path} is not JSON lines: {exc}") from exc
    is_mooncake = {"timestamp", "input_length", "output_length"} <= row.keys()
    return _trace(path) if is_mooncake else _log(path)


def _trace(path: Path) -> Traffic:
    requests = read_trace(path).requests
    prefix = None
    unknown = ["the hour of the day: a trace is read from its first request on"]
    if any(each.hash_ids for each in requests):
        prefix = _of_blocks(requests)
    else:
        unknown.append("shared prefixes: the trace has no text and no hashes of it")
    return Traffic(requests, None, True, prefix, (*unknown, *_NOT_RECORDED), ())


_NOT_RECORDED = (
    "conversations: each turn looks like a separate request",
    "requests that were rejected or abandoned before the log was written",
)


def _of_blocks(requests: Sequence[TraceRequest]) -> SharedPrefix:
    """The prefix of prompts given as blocks: each block is compared as one character."""
    blocks = ["".join(chr(0x10000 + i % 0xF0000) for i in each.hash_ids) for each in requests]
    found = shared_prefix(blocks)
    return replace(found, common=found.common * MOONCAKE_BLOCK_TOKENS)


def _log(path: Path) -> Traffic:
    rows = list(_rows(path))
    kept: list[tuple[float | None, int, int]] = []
    texts: list[str] = []
    estimated = left_out = 0
    for row in rows:
        prompt = _first(row, _PROMPTS, _text)
        tokens_in, tokens_out = _number(row, _INPUT), _number(row, _OUTPUT)
        if tokens_in is None and prompt:
            tokens_in, estimated = len(prompt) / _CHARACTERS_PER_TOKEN, estimated + 1
        if tokens_out is None and (answer := _first(row, _ANSWERS, _text)):
            tokens_out = len(answer) / _CHARACTERS_PER_TOKEN
        if not tokens_in or not tokens_out or _failed(row):
            left_out += 1
            continue
        kept.append(
            (_first(row, _TIMES, _epoch_s), max(1, round(tokens_in)), max(1, round(tokens_out)))
        )
        if prompt:
            texts.append(prompt)
    if len(kept) < 2:
        raise InputError(
            f"{path}: {len(kept)} of {len(rows)} lines have prompt and answer lengths; "
            f"expected are {_INPUT[0]} or {_INPUT[1]}, {_OUTPUT[0]} or {_OUTPUT[1]} (also below "
            "usage), or text in prompt or messages"
        )
    return _put_together(kept, texts, estimated=estimated, left_out=left_out)


def _put_together(
    kept: list[tuple[float | None, int, int]], texts: list[str], *, estimated: int, left_out: int
) -> Traffic:
    unknown, notes = list(_NOT_RECORDED), []
    has_times = all(at is not None for at, _, _ in kept)
    start = min((at for at, _, _ in kept if at is not None), default=0.0)
    if not has_times:
        unknown.insert(0, f"rate, bursts, daily curve: not every line has a time ({_TIMES[0]} ...)")
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


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as exc:
                raise InputError(f"{path}, line {number}: not JSON: {exc}") from exc
            if not isinstance(row, Mapping):
                raise InputError(f"{path}, line {number}: expected a JSON object with one request")
            yield row


def _places(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The object and those inside it that may hold a request's fields."""
    yield row
    for name in _INNER_OBJECTS:
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
        real = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if real else None  # type: ignore[arg-type]

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
    status = _number(row, ("status", "status_code", "http_status"))
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
