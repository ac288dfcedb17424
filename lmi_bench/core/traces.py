"""Recorded traffic: when requests came and how long they were.

Read by their columns: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens,
GeneratedTokens) and Mooncake's (JSON lines with timestamp in ms, input_length, output_length, and
hash_ids, one for each block of 512 tokens of the prompt: equal ids are equal text, so what requests
shared is shared again).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.units import ms_to_s

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a prompt that one of Mooncake's hash ids stands for; the last block may be shorter."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    at_s      seconds after the first one
    hash_ids  of the blocks of its prompt, where the trace has them
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time, from 0."""

    requests: tuple[TraceRequest, ...]

    @property
    def rate_per_s(self) -> float:
        """Mean rate: gaps over the time between the first and the last request."""
        return (len(self.requests) - 1) / self.requests[-1].at_s

    def due_s(self, number: int, rate_per_s: float) -> float:
        """When a request is due if the trace is stretched so that its mean rate is another."""
        return self.requests[number].at_s * self.rate_per_s / rate_per_s


def read_trace(path: Path) -> Trace:
    """Read a trace; requests without input or output tokens are left out.

    Raises InputError where the columns are not known, or fewer than two instants remain.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read the trace {path}: {file_reason(exc)}") from exc
    rows = _rows(path, text)
    kept = []
    for number, row in enumerate(rows, start=1):
        try:
            request = _request(row)
        except (ValueError, TypeError, KeyError) as exc:
            raise InputError(f"{path}: request {number} cannot be read: {exc}") from exc
        if request.input_tokens > 0 and request.output_tokens > 0:
            kept.append(request)
    kept.sort(key=lambda request: request.at_s)
    if len(kept) < 2 or kept[-1].at_s == kept[0].at_s:
        raise InputError(f"{path} holds no two requests at different times: it has no rate")
    start_s = kept[0].at_s
    return Trace(tuple(replace(request, at_s=request.at_s - start_s) for request in kept))


def _rows(path: Path, text: str) -> Sequence[Mapping[str, Any]]:
    if text.lstrip().startswith("{"):
        try:
            rows: list[Mapping[str, Any]] = [
                json.loads(line) for line in text.splitlines() if line.strip()
            ]
        except ValueError as exc:
            raise InputError(f"{path} is not JSON lines: {exc}") from exc
        known = all(name in rows[0] for name in _MOONCAKE)
    else:
        rows = list(csv.DictReader(text.splitlines()))
        known = bool(rows) and all(name in rows[0] for name in _AZURE)
    if not known:
        raise InputError(
            f"{path} is no trace that is known: a CSV needs {', '.join(_AZURE)}, JSON lines need "
            f"{', '.join(_MOONCAKE)}"
        )
    return rows


def _request(row: Mapping[str, Any]) -> TraceRequest:
    if "timestamp" in row:
        at_s = ms_to_s(float(row["timestamp"]))
        return TraceRequest(
            at_s,
            int(row["input_length"]),
            int(row["output_length"]),
            tuple(int(each) for each in row.get("hash_ids") or ()),
        )
    stamp, _, rest = str(row["TIMESTAMP"]).partition(".")
    digits = "".join(c for c in rest if c.isdigit())[:9]  # Azure writes seven: too many to parse
    at_s = datetime.fromisoformat(stamp).timestamp() + (float(f"0.{digits}") if digits else 0.0)
    return TraceRequest(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
