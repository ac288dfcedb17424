"""The results of a run: the only data that passes from the load generator to the analysis.

Times in a finished level's records are seconds since the level's start, monotonic.

A request's record is one line of requests.jsonl, of plain JSON values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, get_type_hints, overload

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.json_value import slot_of
from lmi_bench.core.lengths import MOST_TIME_S
from lmi_bench.core.level import GeneratorReport
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.server_metrics import ServerMetrics
from lmi_bench.core.workload import LevelSpec, PlannedRequest

STATUS_OK = "ok"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of a level: one line of requests.jsonl.

    due_s     when it should have been sent; the time from then to `sent_s` is the dispatch delay
              that the generator caused
    exchange  what the target gave; a failed request keeps what had arrived
    input_tokens, output_tokens  the server's count if it gave one; otherwise the planned prompt
              length and the tokens counted here
    status    "ok" or the kind of the error
    session, turn  conversation number and turn within it, from 0
    of_turns  number of requests that its conversation sends in this level; 0: not known
    asked_tokens   requested answer length; 0: not known
    at_start       first request of a closed loop's user: it waited behind those of all the others,
                   so it is in no latency statistic and in no verdict of an SLO
    """

    request_id: int
    due_s: float
    exchange: Exchange
    input_tokens: int = 0
    output_tokens: int = 0
    status: str = STATUS_OK
    error: str | None = None
    session: int | None = None
    turn: int = 0
    of_turns: int = 0
    asked_tokens: int = 0
    at_start: bool = False

    def __post_init__(self) -> None:
        if not self.output_tokens and self.exchange.token_counts:
            object.__setattr__(self, "output_tokens", sum(self.exchange.token_counts))

    @property
    def ok(self) -> bool:
        """Whether the request was answered in full."""
        return self.status == STATUS_OK

    @property
    def sent_s(self) -> float:
        """When the request was sent."""
        return self.exchange.sent_s

    @property
    def token_times_s(self) -> Sequence[float]:
        """Arrival time of each event that carried tokens."""
        return self.exchange.token_times_s

    @property
    def ended_s(self) -> float | None:
        """When the request ended, if later than its last token."""
        return self.exchange.ended_s

    @classmethod
    def completed(cls, request: PlannedRequest, due_s: float, exchange: Exchange) -> Self:
        """The record of an answered request."""
        counted = exchange.input_tokens
        return cls(
            request_id=request.request_id,
            due_s=due_s,
            exchange=exchange,
            input_tokens=request.input_tokens if counted is None else counted,
            output_tokens=exchange.output_tokens or 0,
            session=request.session,
            turn=request.turn,
            of_turns=request.of_turns,
            asked_tokens=request.output_tokens,
        )

    @classmethod
    def failed(cls, request: PlannedRequest, due_s: float, error: TargetError, *, sent_s: float | None = None) -> Self:
        """The record of a failed request, with what had arrived before the failure."""
        if error.exchange is None:
            exchange = Exchange(due_s if sent_s is None else sent_s)
            record = replace(cls.completed(request, due_s, exchange), asked_tokens=0)
        else:
            record = cls.completed(request, due_s, error.exchange)
        return replace(record, status=error.kind, error=str(error))

    def shifted(self, start_s: float) -> Self:
        """The same record with times relative to `start_s`, without the answer's text."""
        return replace(self, due_s=self.due_s - start_s, exchange=self.exchange.shifted(start_s))


def counted(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that latencies and SLOs count: all but those of a closed loop's start."""
    return [record for record in records if not record.at_start]


def is_at_start(record: RequestRecord, spec: LevelSpec) -> bool:
    """Whether a request of the level is the first of a closed loop's user."""
    number = record.request_id if record.session is None else record.session
    return record.turn == 0 and number < spec.start_requests


def with_start_marked(records: Sequence[RequestRecord], spec: LevelSpec) -> tuple[RequestRecord, ...]:
    """A level's records, with the first request of each user marked if enough others remain."""
    if not spec.left_out_of(len(records)):
        return tuple(records)
    return tuple(replace(one, at_start=True) if is_at_start(one, spec) else one for one in records)


@dataclass(frozen=True, slots=True)
class LevelRun:
    """A finished level: its records in request order, and why it ended early, if it did.

    stopped_by  None, or the rule that cut the level short ("timeout", "errors", "duration",
                "interrupted", "decided": a search knew its verdict, "known": --stop-when)
    connect_s   time to open each connection of the level, TLS included; tls_s: its handshake
    engine      work of the engine in this process: counts, shares as fractions
    """

    spec: LevelSpec
    attempt: int
    records: tuple[RequestRecord, ...]
    stopped_by: str | None = None
    check: GeneratorReport = field(default_factory=GeneratorReport)
    engine: Mapping[str, float | None] | None = None
    connect_s: Sequence[float] = ()
    tls_s: Sequence[float] = ()
    server: ServerMetrics | None = None


_OPTIONAL = (
    *("first_answer_s", "reasoning_tokens", "streamed", "replica", "queue_s", "prefill_s", "decode_s"),
    *("connect_s", "retries", "tls_s", "held_s", "cached_tokens", "adapter"),
)
"""Fields of an exchange that are written only when they differ from the default."""
_OF_EXCHANGE = ("finish_reason", "ended_s", *_OPTIONAL)
_OF_RECORD = tuple(each.name for each in fields(RequestRecord) if each.name != "exchange")
_NUMBERS = frozenset((int, float))
_NEEDED = frozenset(
    ("request_id", "due_s", "sent_s", "token_times_s", "token_counts", "input_tokens", "output_tokens", "status")
)
_ACCEPTED = {
    key: slot_of(key, hint).accepts for kind in (Exchange, RequestRecord) for key, hint in get_type_hints(kind).items()
}
_KNOWN_KINDS: set[tuple[object, ...]] = set()  # keys and types of lines that were right
_SHOWN = 40  # characters of a wrong value
_DEFAULTS = {field.name: field.default for field in fields(Exchange) if field.name in _OPTIONAL}


def request_line(level: int, attempt: int, record: RequestRecord, secrets: Sequence[str]) -> dict[str, Any]:
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


def check_line(line: Mapping[str, Any], file: object) -> None:
    """Raise InputError for a line that is no record's: what is missing, or has another type."""
    kinds = (*line, *map(type, line.values()))
    problem = _problem_of(line) if kinds not in _KNOWN_KINDS else ""
    times_s, counts = line.get("token_times_s", ()), line.get("token_counts", ())
    if not problem and not (
        len(times_s) == len(counts) and {*map(type, times_s)} <= _NUMBERS and {*map(type, counts)} <= {int}
    ):
        problem = "token_times_s and token_counts must be as many numbers"
    if not problem:
        ends = [each(values, default=0) for each in (min, max) for values in (times_s, counts)]
        ends += [value for value in line.values() if type(value) in _NUMBERS]
        ends.append(sum(times_s) * 0)  # NaN if one of them is NaN
        if large := [value for value in ends if not abs(value) <= MOST_TIME_S]:
            problem = f"{large[0]:g} is no time of a level in seconds, and no count"
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
    exchange = Exchange(
        line["sent_s"],
        line["token_times_s"],
        line["token_counts"],
        **{name: line[name] for name in _OF_EXCHANGE if name in line},
    )
    return RequestRecord(exchange=exchange, **{key: line[key] for key in _OF_RECORD if key in line})


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


def _ns(seconds: float) -> float:
    """Round to the nanosecond: finer digits are noise and triple the size of the file."""
    return round(seconds, 9)
