"""The results of a run: the only data that passes from the load generator to the analysis.

Times in a finished level's records are seconds since the level's start, monotonic.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from lmi_bench.core.errors import TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import GeneratorReport
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
    def failed(
        cls,
        request: PlannedRequest,
        due_s: float,
        error: TargetError,
        *,
        sent_s: float | None = None,
    ) -> Self:
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


def with_start_marked(
    records: Sequence[RequestRecord], spec: LevelSpec
) -> tuple[RequestRecord, ...]:
    """A level's records, with the first request of each user marked if enough others remain."""
    if not spec.left_out_of(len(records)):
        return tuple(records)
    return tuple(
        replace(each, at_start=True) if is_at_start(each, spec) else each for each in records
    )


@dataclass(frozen=True, slots=True)
class LevelRun:
    """A finished level: its records in request order, and why it ended early, if it did.

    stopped_by  None, or the rule that cut the level short ("timeout", "errors", "duration",
                "interrupted", "decided": a search knew its verdict)
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
