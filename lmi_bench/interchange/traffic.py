"""Recorded traffic for the planner: the times and lengths of a log's requests.

`traffic_rows` reads the file. If a log has texts but no token counts, four characters count as a
token; lengths that it does not hold at all can be assumed. Lines that are no request of an LLM are
left out and counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from lmi_bench.core import traces
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import MOST_TOKENS
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.interchange.traffic_rows import (
    NAMES,
    Columns,
    LogFile,
    as_number,
    as_object,
    field_at,
    filled,
    mapped,
    request_line,
)
from lmi_bench.interchange.traffic_statistics import SharedPrefix, shared_prefix

_CHARACTERS_PER_TOKEN = 4
_EPOCH_MS_FROM = 1e11  # seconds beyond it would be the year 5138
_LATEST = 1e20  # beyond nanoseconds of the year 5138
_MOONCAKE_MS_TO = 1e9  # a relative time in ms, 11 days; an epoch in seconds is larger
_LEAST_EPOCH_S, _LAST_EPOCH_S = 1e8, 4.2e9  # 1973 to 2103
_MOST_TEXTS = 20_000  # prompts that are compared for a shared prefix
_MAY_LACK_A_TIME = 0.1  # share of the lines; with more the rate would be understated
_DATE = re.compile(
    r"(?:(?:19|20)\d\d[-/]?\d\d[-/]?\d\d[T ]\d\d"  # ISO 8601, also with slashes
    r"|\d{1,2}/\w{3}/(?:19|20)\d\d:\d\d"  # access logs
    r"|(?:\w{3}, )?\d{1,2} \w{3} (?:19|20)\d\d \d\d?):?\d\d"  # mail
)
_DATE_FORMS: Final = ("ISO8601", "%d/%b/%Y %H:%M:%S %z", "mixed")
_EPOCH: Final = pd.Timestamp(0, tz="UTC")
_ZONE = re.compile(r"(?:Z|UTC|GMT|[+-]\d\d:?\d\d)\]?$")
_CALLS = re.compile(
    r"completions|/(responses|messages|generate|generate_stream|invocations|invoke|chat|converse)\b"
    r"|invoke-with-response-stream|converse-stream|[gG]enerateContent"
)
_OTHER_WORK = re.compile(
    r"^(SPAN|EVENT|TRACE|AGENT|TOOL|CHAIN|RETRIEVER|GUARDRAIL|EVALUATOR)$"
    r"|embedding|image_|speech|transcription|rerank|moderation",
    re.IGNORECASE,
)
_LENGTHS: Final = ["input", "output"]
_EMPTY = ("", None, "{}", "[]", "null", "None")
_FAILURES = ("failure", "failed", "error")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Recorded requests, and what their source does not contain.

    requests       in order of time, from 0; without times all at 0
    start_epoch_s  Unix time of the first; None where times are relative or missing
    assumed        number of requests with an assumed length
    prefix         shared by the prompts, in tokens; None if the prompts are not recorded
    """

    requests: tuple[traces.TraceRequest, ...]
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
    if len(fields) < len(pairs) or not fields.keys() <= {"time", "input", "output"} or "" in fields.values():
        raise InputError(
            f"--fields {text}: write time=NAME,input=NAME,output=NAME with each at most once, a "
            "name inside an object with dots, such as input=usage.prompt_tokens"
        )
    return fields


def parse_assumed(text: str) -> tuple[int, int]:
    """Prompt and answer length in `500/200`; raises InputError for other texts."""
    found = re.fullmatch(r"\s*(\d{1,8})\s*/\s*(\d{1,8})\s*", text)
    lengths = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not all(1 <= length <= MOST_TOKENS for length in lengths):
        raise InputError(
            f"--assume {text}: write prompt/answer length in tokens, each from 1 to {MOST_TOKENS:,}, such as 500/200"
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
    parts, prompts = list[pd.DataFrame](), _Prompts()
    for columns in log.columns():
        if log.is_web and assume is None:
            raise InputError(
                f"{path} is an access log, which holds no token counts: add --assume IN/OUT, the "
                "mean prompt and answer length in tokens, such as --assume 500/200"
            )
        parts.append(_read(columns, assume or (math.nan, math.nan)))
        prompts.add(parts[-1].pop("prompt").dropna())
    if not parts:
        raise InputError(f"{path} holds no request: expected are JSON objects, CSV with a header, or an access log")
    return _traffic(log, _requests(log, pd.concat(parts, ignore_index=True)), prompts)


@dataclass(slots=True)
class _Prompts:
    """Every stride-th of the prompts, and the number of all."""

    texts: list[str] = field(default_factory=list)
    stride: int = 1
    number: int = 0

    def add(self, prompts: pd.Series) -> None:
        """Keep some of these, and fewer of all where they are too many."""
        self.texts += prompts[-self.number % self.stride :: self.stride].tolist()
        self.number += len(prompts)
        while len(self.texts) > _MOST_TEXTS:
            self.texts, self.stride = self.texts[::2], self.stride * 2


def _read(columns: Columns, assume: tuple[float, float]) -> pd.DataFrame:
    """A row for each line of the log.

    at_s, input, output       seconds and tokens; NaN: not known
    why                       the reason why it is no request; empty: it is one
    is_assumed, is_estimated  whether a length is assumed, or that of the prompt is by its text
    is_call                   whether the path is of an LLM API; missing: no path
    key                       of id, time and lengths; missing: no id
    stamp, prompt             the time as it is in the file; the prompt's text or blocks
    blocks                    number of blocks of the prompt; missing: none
    """
    first, given = columns.first, columns.given
    prompt, line, ids = first("prompt", _text), first("request", request_line), first("id", _word)
    method, path = (
        filled(mapped(line, itemgetter(place)), first(kind, _word)) for place, kind in enumerate(("method", "path"))
    )
    texts = {
        "input": first("input", _text) if "input" in given else prompt,
        "output": first("output" if "output" in given else "answer", _text),
    }
    characters = {kind: mapped(text, len) for kind, text in texts.items()}
    counted = pd.DataFrame({kind: first(kind, as_number) for kind in _LENGTHS}, dtype=float)
    known = counted.fillna(pd.DataFrame(characters, dtype=float) / _CHARACTERS_PER_TOKEN)
    found = known.fillna(dict(zip(_LENGTHS, assume, strict=True)))
    found["at_s"] = _seconds(first("time", _clock))
    if "time" not in given:  # a duration in nginx's logs, where it is no date
        other = _seconds(first("request_time", _clock))
        found["at_s"] = found["at_s"].fillna(other[other > _LEAST_EPOCH_S])
    why = _left_out(columns, method, found[_LENGTHS])
    keys, blocks = ids, first("blocks", _blocks)
    if ids.notna().any():
        keys = pd.util.hash_pandas_object(found.assign(id=ids.map(str)), index=False)
    return found.assign(
        why=why,
        is_assumed=known.isna().any(axis=1),
        is_estimated=counted["input"].isna() & known["input"].notna(),
        is_call=mapped(path, lambda text: _CALLS.search(text) is not None),
        key=keys.astype(object).where(ids.notna(), None),
        stamp=first("time", lambda value: value or None),
        prompt=filled(blocks, prompt).where(why == ""),
        blocks=mapped(blocks, len),
    )


def _requests(log: LogFile, rows: pd.DataFrame) -> pd.DataFrame:
    """The requests in order of time; counts the other rows by the reason to leave them out.

    Raises InputError if there is none, or a field that the user named is on no line.
    """
    log.left_out.update(rows["why"][rows["why"] != ""])
    found = rows[rows["why"] == ""]
    for kind, name in log.given.items():
        if not log.seen[kind] and (len(found) or field_at(log.first, name) is None):
            raise InputError(f"--fields {kind}={name}: no line of {log.path} has it; its fields: {log.described()}")
    if found.empty:
        raise InputError(
            f"{log.path}: 0 of {log.lines:,} lines are requests with prompt and answer "
            f"lengths ({_listed(log.left_out)}); fields: {log.described()}; expected are "
            f"{NAMES['input'][1]} and {NAMES['output'][1]} or the like: name yours with "
            "--fields input=NAME,output=NAME, or add --assume 500/200 for a log without them"
        )

    def leave(reason: str, rows: pd.Series) -> None:
        nonlocal found
        log.left_out[reason] += int(rows.sum())
        found = found[~rows]

    leave("repeated, same id, time and lengths", found["key"].duplicated() & found["key"].notna())
    if found["is_call"].eq(True).any():
        leave("no LLM call, by path", found["is_call"].eq(False))
    is_date = found["at_s"].between(_LEAST_EPOCH_S, _LAST_EPOCH_S, inclusive="neither")
    if is_date.mean() > 0.5 and not _in_ms(log.first):  # 0 is no date
        found = found.assign(at_s=found["at_s"].where(is_date))
    if (timeless := found["at_s"].isna()).mean() <= _MAY_LACK_A_TIME:
        leave("no readable time", timeless)
    return found.sort_values(["at_s", *_LENGTHS], ignore_index=True)


def _traffic(log: LogFile, found: pd.DataFrame, prompts: _Prompts) -> Traffic:
    """The requests, and what is known of them."""
    at_s, stamp, no_rate = found["at_s"], str(found["stamp"].iloc[0]), _no_rate(log, found)
    in_ms, scale = _in_ms(log.first), 1 / _CHARACTERS_PER_TOKEN
    if _is_mooncake(log.first) or traces.is_bailian(log.first):
        sizes = found[["input", "blocks"]].dropna().head(_MOST_TEXTS).astype(int).to_numpy()
        some = [traces.TraceRequest(0.0, each, 1, tuple(range(n))) for each, n in sizes.tolist()]
        scale = traces.block_tokens_of(log.first, some)
    times = (at_s * 0 if no_rate else at_s - at_s[0]).fillna(0) / (1000 if in_ms else 1)
    is_absolute = not (no_rate or in_ms) and at_s[0] > _LEAST_EPOCH_S
    assumed, estimated = int(found["is_assumed"].sum()), int(found["is_estimated"].sum())
    left_out = log.left_out.total()
    # whole seconds coincide
    copies = int((found.duplicated(["at_s", *_LENGTHS]) & (at_s % 1 > 0)).sum())
    prefix = None
    if prompts.number > len(found) / 2:
        prefix = shared_prefix(prompts.texts)
        prefix = replace(prefix, common=round(prefix.common * scale))
    notes = {
        "no path of a known LLM API: every POST counts as a call": found["is_call"].eq(False).any(),
        f"lengths are assumed (--assume) for {assumed:,} requests": assumed,
        f"left out: {left_out:,} of {log.lines:,} lines ({_listed(log.left_out)})": left_out,
        f"{estimated:,} prompt lengths are estimated from text, {_CHARACTERS_PER_TOKEN} characters a token": estimated,
        f"shared prefixes are those of {len(prompts.texts):,} prompts": prompts.stride > 1,
        f"{copies:,} lines repeat time and lengths of another: counted": copies,
        f"times are relative, in {'ms' if in_ms else 's'}": not (no_rate or is_absolute),
        "times are as logged: most servers log the end of an answer": is_absolute and log.is_late,
        "times without a zone are taken as UTC": is_absolute and ":" in stamp and not _ZONE.search(stamp),
    }
    unknown = {
        f"rate, bursts, daily curve: {no_rate}": no_rate,
        **dict.fromkeys(_NOT_RECORDED, True),
        "the hour of the day: times are not calendar times": not (no_rate or is_absolute),
        "shared prefixes: the log does not hold the prompts": prefix is None,
    }
    lengths = found[_LENGTHS].round().clip(lower=1).astype(int)
    return Traffic(
        requests=tuple(map(traces.TraceRequest, times, lengths["input"], lengths["output"])),
        start_epoch_s=float(at_s[0]) if is_absolute else None,
        has_times=not no_rate,
        assumed=assumed,
        prefix=prefix,
        unknown=tuple(text for text, holds in unknown.items() if holds),
        notes=tuple(text for text, holds in notes.items() if holds),
    )


def _no_rate(log: LogFile, found: pd.DataFrame) -> str:
    """Why the times give no rate; empty if they do."""
    at_s, bad = found["at_s"], found[found["at_s"].isna()]
    if len(at_s) < 2:
        return "the log has a single request"
    if bad.empty:
        return "" if at_s.max() > at_s.min() else "all lines have the same time"
    text = f"{len(bad):,} of {len(at_s):,} lines have no readable time"
    if log.is_web:
        return text
    if stamps := [*bad["stamp"].dropna()]:
        text += f", such as {_shown(stamps[0])}"
    return (
        f"{text}; tried {log.given.get('time') or ', '.join(NAMES['time'])}; fields seen: "
        f"{log.described()}; name the right one with --fields time=NAME"
    )


def _is_mooncake(row: Mapping[str, Any]) -> bool:
    """Whether a row is of Mooncake's trace, whose times are in ms."""
    at = row.get("timestamp")
    return (
        {"timestamp", "input_length", "output_length"} <= row.keys()
        and not traces.is_bailian(row)
        and isinstance(at, int | float)
        and ("hash_ids" in row or at < _MOONCAKE_MS_TO)
    )


def _in_ms(row: Mapping[str, Any]) -> bool:
    """Whether times are still in ms: those of Mooncake's trace, but for epochs, read as seconds."""
    return _is_mooncake(row) and row["timestamp"] <= _EPOCH_MS_FROM


def _listed(left_out: Counter[str]) -> str:
    return "; ".join(f"{reason}: {count:,}" for reason, count in left_out.most_common() if count)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."


def _word(value: object) -> str | None:
    return None if value in _EMPTY or not isinstance(value, (str, int)) else str(value)


def _blocks(value: object) -> str | None:
    """Ids of a prompt's blocks as text, each as one character."""
    if not isinstance(value, list):
        return None
    try:
        return "".join([chr(0x10000 + each % 0xF0000) for each in value]) or None
    except TypeError:  # an id that is no number
        return None


def _clock(value: object) -> float | str | None:
    """A date with a time of day, or a number scaled to seconds (from s, ms, us, ns)."""
    if isinstance(value, str) and (":" in value or "T" in value):  # a day alone is no time
        text = value.strip("[]")
        return re.sub(r"(/\d{4}):", r"\1 ", text) if _DATE.match(text) else None
    if (number := as_number(value)) is None or not 0 <= number < _LATEST:
        return None
    while number > _EPOCH_MS_FROM:
        number /= 1000
    return number


def _seconds(clock: pd.Series) -> pd.Series:
    """Unix seconds of dates, in UTC unless they have a zone, or seconds of the log's own clock.

    >>> float(_seconds(pd.Series(["10/Oct/2000 13:55:36 -0700"]))[0])
    971211336.0
    """
    is_date = clock.map(lambda value: isinstance(value, str))
    at_s, left = clock.mask(is_date).astype(float), clock[is_date]
    for form in _DATE_FORMS if len(left) else ():
        dates = pd.to_datetime(left, format=form, utc=True, errors="coerce").dropna()
        at_s[dates.index] = (dates - _EPOCH) / pd.Timedelta(seconds=1)
        left = left.drop(dates.index)
    return at_s.where(at_s >= 0)


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


def _left_out(columns: Columns, method: pd.Series, lengths: pd.DataFrame) -> pd.Series:
    """Why each row is no answered call of an LLM with known lengths; empty if it is one."""
    first, is_web = columns.first, method.notna()
    status = first("status", _word)
    code = mapped(status, as_number).astype(float).replace(0, 200).fillna(200)
    reasons = {
        "failed": (code >= 400)
        | mapped(status, str.lower).isin(_FAILURES)
        | first("error", _is_set).notna()
        | (first("level", _word) == "ERROR"),
        "status not 2xx": is_web & ~code.between(200, 300, inclusive="left"),
        "no generation, by type": mapped(first("type", _word), _OTHER_WORK.search).notna(),
        "answered from a cache": first("cached", _is_set).notna(),
        "not POST": is_web & (mapped(method, str.upper) != "POST"),
        "no prompt or answer length": lengths.isna().any(axis=1),
        f"length outside 1 to {MOST_TOKENS:,}": ((lengths <= 0) | (lengths > MOST_TOKENS)).any(axis=1),
    }
    return pd.Series(np.select([*reasons.values()], [*reasons], default=""), method.index)


def _is_set(value: object) -> bool | None:
    return as_object(value) not in (*_EMPTY, False, 0, "false", "False", "0", {}, []) or None
