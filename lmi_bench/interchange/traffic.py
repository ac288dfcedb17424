"""Recorded traffic for the planner: the times and lengths of a log's requests.

`traffic_rows` reads the file. If a log has texts but no token counts, four characters count as a
token; lengths that it does not hold at all can be assumed. Lines that are no request of an LLM are
left out and counted.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.traces import (
    BAILIAN_BLOCK_TOKENS,
    MOONCAKE_BLOCK_TOKENS,
    TraceRequest,
    is_bailian,
)
from lmi_bench.interchange.traffic_rows import NAMES, LogFile, Row, as_object, request_line
from lmi_bench.interchange.traffic_statistics import SharedPrefix, shared_prefix

_CHARACTERS_PER_TOKEN = 4
_EPOCH_MS_FROM = 1e11  # seconds beyond it would be the year 5138
_LATEST = 1e20  # beyond nanoseconds of the year 5138
_MOONCAKE_MS_TO = 1e9  # a relative time in ms, 11 days; an epoch in seconds is larger
_LEAST_EPOCH_S, _LAST_EPOCH_S = 1e8, 4.2e9  # 1973 to 2103
_MOST_TOKENS = 10_000_000
_MOST_TEXTS = 20_000  # prompts that are compared for a shared prefix
_MAY_LACK_A_TIME = 0.1  # share of the lines; with more the rate would be understated
_DATE = re.compile(
    r"(?:\d{4}[-/]?\d\d[-/]?\d\d[T ]\d\d"  # ISO 8601, also with slashes
    r"|\d{1,2}/\w{3}/\d{4}:\d\d"  # access logs
    r"|(?:\w{3}, )?\d{1,2} \w{3} \d{4} \d\d?):?\d\d"  # mail
)
_ZONE = re.compile(r"(?:Z|UTC|GMT|[+-]\d\d:?\d\d)\]?$")
_CALLS = re.compile(
    r"completions|/(responses|messages|generate|generate_stream|invocations|invoke|chat|converse)\b"
    r"|invoke-with-response-stream|converse-stream|[gG]enerateContent"
)
_OTHER_WORK = re.compile(
    r"^(SPAN|EVENT|TRACE|AGENT|TOOL|CHAIN|RETRIEVER|GUARDRAIL|EVALUATOR)$"
    r"|embedding|image|speech|transcription|rerank|moderation",
    re.IGNORECASE,
)
_NUMBERS = (int, float, str)
_EMPTY = ("", None, "{}", "[]", "null", "None")
_OUTCOME = {"status", "level", "error", "type", "cached"}
_WEB = {"request", "method", "path"}
_FAILURES = ("failure", "failed", "error")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Recorded requests, and what their source does not contain.

    requests       in order of time, from 0; without times all at 0
    start_epoch_s  Unix time of the first; None where times are relative or missing
    assumed        number of requests with an assumed length
    prefix         shared by the prompts, in tokens; None if the prompts are not recorded
    """

    requests: tuple[TraceRequest, ...]
    start_epoch_s: float | None
    has_times: bool
    assumed: int
    prefix: SharedPrefix | None
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


_NOT_RECORDED = (
    "conversations: each turn looks like a separate request",
    "requests that were rejected or abandoned before the log was written",
)


def parse_fields(text: str) -> dict[str, str]:
    """The names in `time=startTime,input=usage.prompt`; raises InputError for other texts."""
    pairs = [part.partition("=") for part in text.split(",")]
    fields = {kind.strip(): name.strip() for kind, _, name in pairs}
    if (
        len(fields) < len(pairs)
        or not fields.keys() <= {"time", "input", "output"}
        or "" in fields.values()
    ):
        raise InputError(
            f"--fields {text}: write time=NAME,input=NAME,output=NAME with each at most once, a "
            "name inside an object with dots, such as input=usage.prompt_tokens"
        )
    return fields


def parse_assumed(text: str) -> tuple[int, int]:
    """Prompt and answer length in `500/200`; raises InputError for other texts."""
    found = re.fullmatch(r"\s*(\d{1,8})\s*/\s*(\d{1,8})\s*", text)
    lengths = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not all(1 <= length <= _MOST_TOKENS for length in lengths):
        raise InputError(
            f"--assume {text}: write prompt/answer length in tokens, each from 1 to "
            f"{_MOST_TOKENS:,}, such as 500/200"
        )
    return lengths


def read_traffic(
    path: Path,
    *,
    fields: Mapping[str, str] | None = None,
    assume: tuple[int, int] | None = None,
    listener: Listener = SILENT,
) -> Traffic:
    """Read a log of requests; raises InputError for a file that holds none.

    fields  names of the fields with the time, the prompt's and the answer's length
    assume  prompt and answer length of a request for which the log has none
    """
    log = LogFile(path, fields or {}, listener)
    found = _Found(log, assume or (None, None))
    for row in log.rows():
        if log.is_web and assume is None:
            raise InputError(
                f"{path} is an access log, which holds no token counts: add --assume IN/OUT, the "
                "mean prompt and answer length in tokens, such as --assume 500/200"
            )
        if reason := found.add(row):
            log.left_out[reason] += 1
    found.check()
    return found.traffic()


@dataclass(slots=True)
class _Found:
    """The requests read so far.

    values      of each request five numbers: its time (NaN: none), prompt and answer length,
                whether one of them is assumed, and whether its path is of an LLM API (-1: no path)
    texts       every stride-th of the prompts
    seen        number of lines with a field that the user named
    block_tokens  prompt tokens of a block with a hash id, in traces that have them
    unreadable  first value of each kind that was there but could not be read
    """

    log: LogFile
    assume: tuple[float | None, float | None]
    values: array[float] = field(default_factory=lambda: array("d"))
    texts: list[str] = field(default_factory=list)
    stride: int = 1
    prompts: int = 0
    estimated: int = 0
    is_mooncake: bool = False
    block_tokens: int | None = None
    has_zone: bool = True
    ids: set[int] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    unreadable: dict[str, object] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> str | None:
        """Keep a row's request; the reason to leave it out, if there is one."""
        found = self.log.request(row)
        method = path = None
        if not found.plan.keys().isdisjoint(_WEB):
            method, path = found.first("request", request_line) or (
                found.first("method", _word),
                found.first("path", _word),
            )
        if reason := _no_call(found, method):
            return reason
        prompt = found.first("prompt", _text)
        tokens_in = self._length(row, found, "input", prompt)
        tokens_out = self._length(row, found, "output", None)
        is_assumed = None in (tokens_in, tokens_out)
        tokens_in = self.assume[0] if tokens_in is None else tokens_in
        tokens_out = self.assume[1] if tokens_out is None else tokens_out
        if tokens_in is None or tokens_out is None:
            return "no prompt or answer length"
        if not (0 < tokens_in <= _MOST_TOKENS and 0 < tokens_out <= _MOST_TOKENS):
            return f"length outside 1 to {_MOST_TOKENS:,}"
        at_s = self._time(row, found)
        if (name := found.first("id", _word)) is not None:
            copy = hash((name, at_s, tokens_in, tokens_out))
            if copy in self.ids:
                return "repeated, same id, time and lengths"
            self.ids.add(copy)
        is_call = -1 if path is None else _CALLS.search(path) is not None
        self.values.extend(
            (math.nan if at_s is None else at_s, tokens_in, tokens_out, is_assumed, is_call)
        )
        if text := found.first("blocks", _blocks) or prompt:
            if self.prompts % self.stride == 0:
                self.texts.append(text)
            self.prompts += 1
            if len(self.texts) > _MOST_TEXTS:
                self.texts, self.stride = self.texts[::2], self.stride * 2
        return None

    def _length(
        self, row: Mapping[str, Any], found: Row, kind: str, text: str | None
    ) -> float | None:
        """The prompt's or the answer's length in tokens, counted or by its text."""
        if kind in self.log.given:
            value = self._given(row, kind)
            length, text = _tokens(value), _text(value)
        elif (length := found.first(kind, _tokens)) is None and kind == "output":
            text = found.first("answer", _text)
        if length is not None or text is None:
            return length
        self.estimated += kind == "input"
        return len(text) / _CHARACTERS_PER_TOKEN

    def _given(self, row: Mapping[str, Any], kind: str) -> object:
        """The value of a field that the user named."""
        value = self.log.at(row, kind)
        self.seen[kind] += value not in (None, "")
        return value

    def _time(self, row: Mapping[str, Any], found: Row) -> float | None:
        if "time" in self.log.given:
            raw = self._given(row, "time")
            at_s = epoch_s(raw)
        else:
            at_s = found.first("time", epoch_s)
            if at_s is None:
                at_s = found.first("request_time", _calendar_s)
            raw = (
                None
                if self.values and at_s is not None
                else found.first("time", lambda value: value or None)
            )
        if not self.values:
            self.is_mooncake = _is_mooncake(row)
            if self.is_mooncake or is_bailian(row):
                usual = MOONCAKE_BLOCK_TOKENS if self.is_mooncake else BAILIAN_BLOCK_TOKENS
                self.block_tokens = int(row.get("block_size", usual))
            self.has_zone = not isinstance(raw, str) or ":" not in raw or bool(_ZONE.search(raw))
        if at_s is None and raw is not None:
            self.unreadable.setdefault("time", raw)
        return at_s / 1000 if at_s is not None and self.is_mooncake else at_s

    def check(self) -> None:
        """Raises InputError if the log has no request, or a named field on no line."""
        log = self.log
        if not log.first:
            raise InputError(
                f"{log.path} holds no request: expected are JSON objects, CSV with a header, or an "
                "access log"
            )
        for kind, name in log.given.items():
            if not self.seen[kind] and (self.values or log.at(log.first, kind) is None):
                raise InputError(
                    f"--fields {kind}={name}: no line of {log.path} has it; its fields: "
                    f"{log.described()}"
                )
        if not self.values:
            raise InputError(
                f"{log.path}: 0 of {log.lines:,} lines are requests with prompt and answer "
                f"lengths ({_listed(log.left_out)}); fields: {log.described()}; expected are "
                f"{NAMES['input'][1]} and {NAMES['output'][1]} or the like: name yours with "
                "--fields input=NAME,output=NAME, or add --assume 500/200 for a log without them"
            )

    def traffic(self) -> Traffic:
        """The requests in order of time, and what is known of them."""
        at_s, lengths, assumed, notes = self._kept()
        why = self._no_rate(at_s)
        start = 0.0 if why else float(at_s[0])
        times = np.zeros(len(at_s)) if why else at_s - start
        columns = (times.tolist(), *lengths.astype(int).tolist())
        absolute = not why and start > _LEAST_EPOCH_S
        unknown = list(_NOT_RECORDED)
        if why:
            unknown.insert(0, f"rate, bursts, daily curve: {why}")
        elif not absolute:
            unknown.append("the hour of the day: times are not calendar times")
            notes.append(f"times are relative, in {'ms' if self.is_mooncake else 's'}")
        if absolute and self.log.is_late:
            notes.append("times are as logged: most servers log the end of an answer")
        if absolute and not self.has_zone:
            notes.append("times without a zone are taken as UTC")
        prefix = None
        if self.prompts > len(at_s) / 2:
            scale = self.block_tokens or 1 / _CHARACTERS_PER_TOKEN
            prefix = shared_prefix(self.texts)
            prefix = replace(prefix, common=round(prefix.common * scale))
        else:
            unknown.append("shared prefixes: the log does not hold the prompts")
        return Traffic(
            requests=tuple(map(TraceRequest, *columns)),
            start_epoch_s=start if absolute else None,
            has_times=not why,
            assumed=assumed,
            prefix=prefix,
            unknown=tuple(unknown),
            notes=tuple(notes),
        )

    def _kept(self) -> tuple[np.ndarray, np.ndarray, int, list[str]]:
        """Times and lengths in order of time, the number of assumed ones, and notes."""
        log, notes = self.log, []
        values = np.frombuffer(self.values).reshape(-1, 5).copy()
        calls = values[:, 4]
        if (calls == 1).any():
            log.left_out["no LLM call, by path"] = int((calls == 0).sum())
            values = values[calls != 0]
        elif (calls == 0).any():
            notes.append("no path of a known LLM API: every POST counts as a call")
        at_s = values[:, 0]
        is_date = (at_s > _LEAST_EPOCH_S) & (at_s < _LAST_EPOCH_S)
        if is_date.mean() > 0.5:  # 0 is no date
            at_s[~is_date] = np.nan
        timeless = np.isnan(at_s)
        if 0 < timeless.mean() <= _MAY_LACK_A_TIME:
            log.left_out["no readable time"] = int(timeless.sum())
            values = values[~timeless]
        values = values[np.lexsort(values.T[2::-1])]
        lengths = np.maximum(1, np.round(values[:, 1:3]))
        if assumed := int(values[:, 3].sum()):
            notes.append(f"lengths are assumed (--assume) for {assumed:,} requests")
        if left_out := log.left_out.total():
            notes.append(f"left out: {left_out:,} of {log.lines:,} lines ({_listed(log.left_out)})")
        if self.estimated:
            by_text = f"{_CHARACTERS_PER_TOKEN} characters a token"
            notes.append(f"{self.estimated:,} prompt lengths are estimated from text, {by_text}")
        if self.stride > 1:
            notes.append(f"shared prefixes are those of {len(self.texts):,} prompts")
        same = (np.diff(values[:, :3], axis=0) == 0).all(axis=1)
        if copies := int((same & (values[1:, 0] % 1 != 0)).sum()):  # whole seconds coincide
            notes.append(f"{copies:,} lines repeat time and lengths of another: counted")
        return values[:, 0], lengths.T, assumed, notes

    def _no_rate(self, at_s: np.ndarray) -> str:
        """Why the times give no rate; empty if they do."""
        if len(at_s) < 2:
            return "the log has a single request"
        missing = int(np.isnan(at_s).sum())
        if not missing:
            return "" if at_s[-1] > at_s[0] else "all lines have the same time"
        text = f"{missing:,} of {len(at_s):,} lines have no readable time"
        if self.log.is_web:
            return text
        if (bad := self.unreadable.get("time")) is not None:
            text += f", such as {_shown(bad)}"
        return (
            f"{text}; tried {self.log.given.get('time') or ', '.join(NAMES['time'])}; fields seen: "
            f"{self.log.described()}; name the right one with --fields time=NAME"
        )


def _is_mooncake(row: Mapping[str, Any]) -> bool:
    """Whether a row is of Mooncake's trace, whose times are ms after its beginning."""
    at = row.get("timestamp")
    return (
        {"timestamp", "input_length", "output_length"} <= row.keys()
        and not is_bailian(row)
        and isinstance(at, int | float)
        and ("hash_ids" in row or at < _MOONCAKE_MS_TO)
    )


def _listed(left_out: Counter[str]) -> str:
    return "; ".join(f"{reason}: {count:,}" for reason, count in left_out.most_common() if count)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."


def _word(value: object) -> str | None:
    return None if value in _EMPTY or not isinstance(value, (str, int)) else str(value)


def _tokens(value: object) -> float | None:
    """A number of tokens, also as text; infinite and NaN are lengths that no request has."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:
        return None


def _blocks(value: object) -> str | None:
    """Ids of a prompt's blocks as text, each as one character."""
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        return None
    return "".join(chr(0x10000 + each % 0xF0000) for each in value)


def epoch_s(value: object) -> float | None:
    """Unix seconds of a date or a number (s, ms, us, ns), or seconds of the log's own clock.

    >>> epoch_s("[10/Oct/2000:13:55:36 -0700]") == epoch_s("2000-10-10T20:55:36Z") == 971211336
    True
    """
    if isinstance(value, str) and (":" in value or "T" in value):  # a day alone is no time
        return _date_s(value)
    if (number := _tokens(value)) is None or not 0 <= number < _LATEST:
        return None
    while number > _EPOCH_MS_FROM:
        number /= 1000
    return number


def _calendar_s(value: object) -> float | None:
    """Unix seconds, if it is not a duration: nginx's request_time is one."""
    at_s = epoch_s(value)
    return at_s if at_s is not None and at_s > _LEAST_EPOCH_S else None


@lru_cache(4096)
def _date_s(text: str) -> float | None:
    """Unix seconds of a date with a time of day, in UTC unless it has a zone."""
    text = text.strip("[]")
    if _DATE.match(text):
        with suppress(ValueError, OverflowError):
            seconds = pd.Timestamp(re.sub(r"(/\d{4}):", r"\1 ", text)).timestamp()
            return seconds if seconds >= 0 else None
    return None


def _text(value: object) -> str | None:
    """A prompt or an answer, with the roles of its messages; None where it is not recorded."""
    if isinstance(value, str):
        return None if value in _EMPTY else value
    if isinstance(value, Mapping):
        value = value.get("messages") or [value]
    if not isinstance(value, Sequence):
        return None
    parts = []
    for each in value:
        if isinstance(each, str):
            parts.append(each)
        elif isinstance(each, Mapping):
            message = each.get("message")
            inner = message if isinstance(message, Mapping) else each
            if said := inner.get("content") or inner.get("text"):
                parts.append(f"{inner.get('role', '')}: {said}")
    return "\n".join(parts) or None


def _no_call(found: Row, method: str | None) -> str | None:
    """Why a row is no answered call of an LLM, by its status, method and type."""
    if not found.plan.keys().isdisjoint(_OUTCOME):
        status = found.first("status", _word) or ""
        code = _tokens(status) or 200
        if code >= 400 or status.lower() in _FAILURES or found.first("error", _is_set):
            return "failed"
        if found.first("level", _word) == "ERROR":
            return "failed"
        if method is not None and not 200 <= code < 300:
            return "status not 2xx"
        if _OTHER_WORK.search(found.first("type", _word) or ""):
            return "no generation, by type"
        if found.first("cached", _is_set):
            return "answered from a cache"
    return "not POST" if method is not None and method.upper() != "POST" else None


def _is_set(value: object) -> bool | None:
    return as_object(value) not in (*_EMPTY, False, 0, "false", "False", "0", {}, []) or None
