"""One line of requests.jsonl: a request record as plain JSON values, and back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints, overload

from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.json_value import slot_of
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.redaction import redact_text

_OPTIONAL = (
    "first_answer_s", "reasoning_tokens", "streamed", "replica", "queue_s", "prefill_s", "decode_s",
    "connect_s", "retries", "tls_s", "held_s", "cached_tokens", "adapter",
)  # fmt: skip
"""Fields of an exchange that are written only when they differ from the default."""
_NUMBERS = frozenset((int, float))
_NEEDED = frozenset((
    "request_id", "due_s", "sent_s", "token_times_s", "token_counts", "input_tokens",
    "output_tokens", "status",
))  # fmt: skip
_ACCEPTED = {
    key: slot_of(key, hint).accepts
    for kind in (Exchange, RequestRecord)
    for key, hint in get_type_hints(kind).items()
}
_KNOWN_KINDS: set[tuple[object, ...]] = set()  # keys and types of lines that were right
_SHOWN = 40  # characters of a wrong value
_DEFAULTS = {field.name: field.default for field in fields(Exchange) if field.name in _OPTIONAL}


def request_line(
    level: int, attempt: int, record: RequestRecord, secrets: Sequence[str]
) -> dict[str, Any]:
    """The line of a record; times are rounded to the nanosecond, `secrets` are removed."""
    exchange = record.exchange
    line = {
        "level": level,
        "attempt": attempt,
        "request_id": record.request_id,
        "due_s": _ns(record.due_s),
        "sent_s": _ns(exchange.sent_s),
        "token_times_s": [_ns(time_s) for time_s in exchange.token_times_s],
        "token_counts": list(exchange.token_counts),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "status": record.status,
        "error": None if record.error is None else redact_text(record.error, secrets),
        "finish_reason": exchange.finish_reason,
        "ended_s": None if exchange.ended_s is None else _ns(exchange.ended_s),
    }
    for name in _OPTIONAL:
        if name == "cached_tokens" and record.asked_tokens:
            line["asked_tokens"] = record.asked_tokens
        value = getattr(exchange, name)
        if value != _DEFAULTS[name]:
            line[name] = _ns(value) if name.endswith("_s") else value
    if record.session is not None:
        line |= {"session": record.session, "turn": record.turn}
    if record.of_turns:
        line["of_turns"] = record.of_turns
    if record.at_start:
        line["at_start"] = True
    return line


def check_line(line: Mapping[str, Any], file: Path) -> None:
    """Raise InputError for a line that is no record's: what is missing, or has another type."""
    kinds = (*line, *map(type, line.values()))
    problem = _problem_of(line) if kinds not in _KNOWN_KINDS else ""
    times_s, counts = line.get("token_times_s", ()), line.get("token_counts", ())
    if not problem and not (
        len(times_s) == len(counts)
        and {*map(type, times_s)} <= _NUMBERS
        and {*map(type, counts)} <= {int}
    ):
        problem = "token_times_s and token_counts must be as many numbers"
    if problem:
        where = f"level {line['level']}, request {line.get('request_id')}"
        raise InputError(f"{file}: {where}: {problem}")
    _KNOWN_KINDS.add(kinds)


def _problem_of(line: Mapping[str, Any]) -> str:
    if absent := _NEEDED - line.keys():
        return f"it has no {min(absent)}"
    wrong = [key for key in line.keys() & _ACCEPTED if type(line[key]) not in _ACCEPTED[key]]
    return f"{wrong[0]} cannot be {str(line[wrong[0]])[:_SHOWN]!r}" if wrong else ""


def record_of(line: Mapping[str, Any]) -> RequestRecord:
    """The record that a line describes."""
    return RequestRecord(
        request_id=line["request_id"],
        due_s=line["due_s"],
        exchange=Exchange(
            line["sent_s"],
            tuple(line["token_times_s"]),
            tuple(line["token_counts"]),
            finish_reason=line.get("finish_reason"),
            ended_s=line.get("ended_s"),
            **{name: line[name] for name in _OPTIONAL if name in line},
        ),
        input_tokens=line["input_tokens"],
        output_tokens=line["output_tokens"],
        status=line["status"],
        error=line.get("error"),
        session=line.get("session"),
        turn=line.get("turn", 0),
        of_turns=line.get("of_turns", 0),
        asked_tokens=line.get("asked_tokens", 0),
        at_start=line.get("at_start", False),
    )


class StoredRecords(Sequence[RequestRecord]):
    """A level's records as its run folder has them; a record is made when it is looked at.

    lines  in request order
    kept   what a reader computes from all lines and does not want to compute again
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = lines
        self.kept: Any = None
        self._made: tuple[RequestRecord, ...] | None = None

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, index: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RequestRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> RequestRecord | tuple[RequestRecord, ...]:
        found = self.lines[index]
        return record_of(found) if isinstance(found, Mapping) else tuple(map(record_of, found))

    def __iter__(self) -> Iterator[RequestRecord]:
        if self._made is None:
            self._made = tuple(map(record_of, self.lines))
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def _ns(seconds: float) -> float:
    """Round to the nanosecond: finer digits are noise and triple the size of the file."""
    return round(seconds, 9)
