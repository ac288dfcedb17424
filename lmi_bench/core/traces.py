"""Recorded traffic: traces of request times and lengths, and recorded conversations.

Traces are read by their columns: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens,
GeneratedTokens), BurstGPT's (CSV with Timestamp in s, Request tokens, Response tokens), and JSON
lines with timestamp, input_length, output_length and hash_ids, one for
each block of prompt tokens (equal ids are equal text): Mooncake's (ms, blocks of 512) and
Qwen-Bailian's (seconds, blocks of 16; known by its chat_id). The lengths must fit the blocks.

Conversations are JSON lines, or one JSON list, of ShareGPT's `conversations` ([{"from": "human",
"value": ...}, ...]), or of `messages` or LMSYS's `conversation` ([{"role": "user", "content":
...}, ...]). Of a recorded answer only the length is used: a replay continues from those it gets.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmi_bench.core.durable import json_values, read_text, table_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import MOST_TIME_S, MOST_TOKENS
from lmi_bench.core.units import ms_to_s

_DIALOGUES = ("conversations", "messages", "conversation")
_USER, _ASSISTANT = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A user's message and its answer ("" if there was none)."""

    asked: str
    answered: str = ""


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """One conversation; `system`: its system prompt."""

    turns: tuple[RecordedTurn, ...]
    system: str = ""


def read_conversations(path: Path) -> tuple[RecordedConversation, ...]:
    """The conversations of a file that have a user's turn.

    Raises InputError that names the first entry that cannot be read.
    """
    text = read_text(path)
    found = []
    for number, entry in enumerate(_entries(path, text), start=1):
        messages = next((entry[key] for key in _DIALOGUES if key in entry), None)
        if not isinstance(messages, list):
            raise InputError(f"{path}: entry {number} has neither `conversations` (ShareGPT) nor `messages`")
        try:
            conversation = _conversation(messages)
        except (KeyError, TypeError, AttributeError) as exc:
            raise InputError(f"{path}: entry {number} cannot be read: {exc!r}") from exc
        if conversation.turns:
            found.append(conversation)
    if not found:
        raise InputError(f"{path} holds no conversation with a user's turn")
    return tuple(found)


def _entries(path: Path, text: str) -> Sequence[Mapping[str, Any]]:
    entries = json_values(text, path)
    if not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: each entry must be a JSON object")
    return entries


def _conversation(messages: Sequence[Mapping[str, Any]]) -> RecordedConversation:
    """Turns in order; adjacent messages of one role are merged."""
    system: list[str] = []
    turns: list[RecordedTurn] = []
    for message in messages:
        role = str(message.get("from", message.get("role"))).lower()
        said = message["value"] if "value" in message else message.get("content")
        if isinstance(said, list):
            said = "\n".join(part["text"] for part in said)
        if said is None and ("content" in message or "tool_calls" in message):  # a tool was called
            continue
        if not isinstance(said, str):
            raise TypeError("a message is not text")
        if role in _USER:
            if turns and not turns[-1].answered:
                turns[-1] = RecordedTurn(f"{turns[-1].asked}\n{said}")
            elif said:
                turns.append(RecordedTurn(said))
        elif role in _ASSISTANT:
            if turns:
                last = turns[-1]
                turns[-1] = RecordedTurn(last.asked, "\n".join(filter(None, (last.answered, said))))
        elif not turns:
            system.append(said)
    return RecordedConversation(tuple(turns), "\n".join(system))


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
"""Tokens of a prompt in a block with a hash id; the last block may be shorter."""
_BLOCK_SIZES = tuple(2**power for power in range(3, 13))  # tried where a trace's own does not fit
MOST_STAMP_S = 1e11  # of a time stamp: the year 5138
MAY_MISFIT = 0.01  # share of requests whose number of ids may differ from their blocks


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    at_s      seconds after the first one
    hash_ids  ids of its prompt's blocks, if the trace has them
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        longest = max(self.input_tokens, self.output_tokens)
        if not abs(self.at_s) <= MOST_STAMP_S or longest > MOST_TOKENS:
            raise ValueError(f"its time or a length is too large: {self}"[:200])


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time, from 0; block_tokens: prompt tokens of a block with a hash id."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def rate_per_s(self) -> float:
        """Mean rate: gaps over the time between the first and the last request."""
        return (len(self.requests) - 1) / self.requests[-1].at_s

    def rate_of(self, number: int) -> float:
        """The same of its first requests; of all if those have one time."""
        span_s = self.requests[number - 1].at_s
        return (number - 1) / span_s if span_s else self.rate_per_s

    def due_s(self, number: int, rate_per_s: float, of: int | None = None) -> float:
        """When a request is due if the first `of`, or all over and over, have this mean rate."""
        plays, place = divmod(number, len(self.requests))
        at_s = self.requests[place].at_s + plays * len(self.requests) / self.rate_per_s
        return at_s * self.rate_of(min(of or len(self.requests), len(self.requests))) / rate_per_s


def read_trace(path: Path) -> Trace:
    """Read a trace; requests without input or output tokens are left out.

    Raises InputError for unknown columns, for hash ids that no block size fits, or with fewer than
    two different times.
    """
    rows = _rows(path, read_text(path))
    kept = []
    for number, row in enumerate(rows, start=1):
        try:
            request = trace_request(row)
        except (ValueError, TypeError, KeyError, OverflowError) as exc:
            raise InputError(f"{path}: request {number} cannot be read: {exc}") from exc
        if request.input_tokens > 0 and request.output_tokens > 0:
            kept.append(request)
    kept.sort(key=lambda request: request.at_s)
    if len(kept) < 2 or kept[-1].at_s == kept[0].at_s:
        raise InputError(f"{path} holds no two requests at different times: it has no rate")
    start_s = kept[0].at_s
    if kept[-1].at_s - start_s > MOST_TIME_S:
        raise InputError(f"{path}: its requests are spread over more than 30 years")
    requests = tuple(replace(request, at_s=request.at_s - start_s) for request in kept)
    try:
        return Trace(requests, block_tokens_of(rows[0], requests))
    except InputError as exc:
        raise InputError(f"{path}: {exc}") from exc


def is_bailian(row: Mapping[str, Any]) -> bool:
    """Whether a row is of Qwen-Bailian's traces: times in seconds, blocks of 16 tokens."""
    return "chat_id" in row


def block_tokens_of(row: Mapping[str, Any], requests: Sequence[TraceRequest]) -> int:
    """Tokens of a block: the trace's own (`block_size` in its rows), else the size that fits.

    A prompt has an id for each full block, and one for the rest or none. Raises InputError if no
    size fits.
    """
    usual = BAILIAN_BLOCK_TOKENS if is_bailian(row) else MOONCAKE_BLOCK_TOKENS
    stated = row.get("block_size")
    if stated is not None and not re.fullmatch(r"[1-9]\d{0,8}", str(stated)):
        raise InputError(f"block_size must be a whole number above 0, got {stated!r}")
    sizes: tuple[int, ...] = (usual, *_BLOCK_SIZES) if stated is None else (int(stated),)
    with_ids = [request for request in requests if request.hash_ids]
    odd: list[TraceRequest] = []
    for size in sizes:
        found = [r for r in with_ids if not 0 <= len(r.hash_ids) - r.input_tokens // size <= 1]
        if len(found) <= MAY_MISFIT * len(with_ids):
            return size
        odd = odd or found
    raise InputError(
        f"{len(odd):,} of {len(with_ids):,} requests do not fit blocks of {sizes[0]} tokens, such "
        f"as {odd[0].input_tokens:,} prompt tokens with {len(odd[0].hash_ids):,} hash ids, and no "
        "other size fits all: state `block_size` in each line, or leave hash_ids out"
    )


def _rows(path: Path, text: str) -> Sequence[Mapping[str, Any]]:
    if text.lstrip().startswith(("{", "[")):
        rows, kinds = _entries(path, text), [_MOONCAKE]
    else:
        rows, kinds = table_rows(text, path), [_AZURE, _BURSTGPT]
    if not rows or not any(set(kind) <= rows[0].keys() for kind in kinds):
        if rows and isinstance(rows[0].get("requests"), list):
            raise InputError(f"{path} holds agent sessions: give it as --agent-trace")
        raise InputError(
            f"{path} is no known trace: a CSV needs the columns {', '.join(_AZURE)} or "
            f"{', '.join(_BURSTGPT)}, JSON lines need the keys {', '.join(_MOONCAKE)}"
        )
    return rows


def trace_request(row: Mapping[str, Any]) -> TraceRequest:
    """A row's request, at the time that it states; raises ValueError, TypeError or KeyError."""
    if "timestamp" in row:
        at = float(row["timestamp"])
        at_s = at if is_bailian(row) else ms_to_s(at)
        ids = tuple(int(each) for each in row.get("hash_ids") or ())
        return TraceRequest(at_s, int(row["input_length"]), int(row["output_length"]), ids)
    if "Timestamp" in row:
        _, asked, answered = (row[name] for name in _BURSTGPT)
        return TraceRequest(float(row["Timestamp"]), int(asked), int(answered))
    stamp = datetime.fromisoformat(str(row["TIMESTAMP"]))
    at_s = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
    return TraceRequest(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
