"""What a run leaves behind: the only thing that crosses from running to thinking.

Times inside an `Exchange` are the loop's clock; times in a `RequestRecord` are seconds since its
level's start, monotonic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmi_bench.core.errors import TargetError
from lmi_bench.core.workload import LevelSpec, PlannedRequest

STATUS_OK = "ok"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one request gave, whole, when it ended.

    sent_s            when the request was handed to the target's transport
    token_times_s     one time an event that carried a token; an event is one chunk of the server
    token_counts      tokens in each event (one each where left out)
    ended_s           end of the answer, its trailer included; None: with the last token
    input_tokens      as the server counted them, where it says so; likewise output_tokens
    connect_s         time spent on opening the connection before `sent_s`, if one was opened;
                      tls_s: its TLS handshake alone
    ttft_bound_s      by how much the time from sending to the first token may be too long, at
                      most; None: not known
    first_answer_s    first token of the answer proper, where reasoning came before it
    reasoning_tokens  tokens of that reasoning, as `token_counts` counts them
    streamed          False: the answer came whole, so no time within it is known
    replica           which of several replicas had it, where that is known
    queue_s, prefill_s, decode_s  seconds in each part of the server, where it says so
    retries           sends after the first one, where failures are tried again
    held_s            seconds that it waited, before `sent_s`, for a connection of a limited number
    token_ids         ids of the answer, where the target has them
    cached_tokens     of the prompt, found in the server's prefix cache, where it says so
    thought_chars     characters that `text` begins with which are reasoning, not answer
    """

    sent_s: float
    token_times_s: Sequence[float] = ()
    token_counts: Sequence[int] = ()
    text: str = ""
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    ended_s: float | None = None
    connect_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tls_s: float | None = None
    ttft_bound_s: float | None = None
    first_answer_s: float | None = None
    reasoning_tokens: int = 0
    streamed: bool = True
    replica: int | None = None
    retries: int = 0
    held_s: float = 0.0
    token_ids: Sequence[int] = ()
    cached_tokens: int | None = None
    thought_chars: int = 0

    def __post_init__(self) -> None:
        if not self.token_counts and self.token_times_s:
            object.__setattr__(self, "token_counts", (1,) * len(self.token_times_s))
        if len(self.token_counts) != len(self.token_times_s):
            raise ValueError(
                f"{len(self.token_times_s)} token times but {len(self.token_counts)} counts"
            )


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of a level: one line of requests.jsonl.

    due_s   when it should have been sent; sent_s: when it was. Their difference is the
            dispatch delay that the generator caused.
    status  "ok" or the kind of the error; a failed request keeps what had arrived
    connect_s, tls_s, ttft_bound_s, first_answer_s, reasoning_tokens, streamed, retries, replica
            as in `Exchange`
    queue_s, prefill_s, decode_s  seconds in each part of the server, where the target says so
    held_s  part of the dispatch delay that a cap asked for: on requests in flight, on connections
    session, turn  of a conversation: which one, and the place in it, from 0
    asked_tokens   length of the answer that was asked for; 0: not known
    cached_tokens  as in `Exchange`
    """

    request_id: int
    due_s: float
    sent_s: float
    token_times_s: Sequence[float] = ()
    token_counts: Sequence[int] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    status: str = STATUS_OK
    error: str | None = None
    finish_reason: str | None = None
    ended_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    connect_s: float | None = None
    tls_s: float | None = None
    ttft_bound_s: float | None = None
    first_answer_s: float | None = None
    reasoning_tokens: int = 0
    streamed: bool = True
    replica: int | None = None
    retries: int = 0
    held_s: float = 0.0
    session: int | None = None
    turn: int = 0
    asked_tokens: int = 0
    cached_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.token_counts and self.token_times_s:
            object.__setattr__(self, "token_counts", (1,) * len(self.token_times_s))
        if not self.output_tokens and self.token_counts:
            object.__setattr__(self, "output_tokens", sum(self.token_counts))

    @property
    def ok(self) -> bool:
        """Whether the request was answered in full."""
        return self.status == STATUS_OK

    @classmethod
    def completed(cls, request: PlannedRequest, due_s: float, exchange: Exchange) -> RequestRecord:
        """The record of an answered request; server counts win over counted events."""
        return cls(
            request_id=request.request_id,
            due_s=due_s,
            sent_s=exchange.sent_s,
            token_times_s=exchange.token_times_s,
            token_counts=exchange.token_counts,
            input_tokens=(
                request.input_tokens if exchange.input_tokens is None else exchange.input_tokens
            ),
            output_tokens=(
                sum(exchange.token_counts)
                if exchange.output_tokens is None
                else exchange.output_tokens
            ),
            finish_reason=exchange.finish_reason,
            ended_s=exchange.ended_s,
            queue_s=exchange.queue_s,
            prefill_s=exchange.prefill_s,
            decode_s=exchange.decode_s,
            connect_s=exchange.connect_s,
            tls_s=exchange.tls_s,
            ttft_bound_s=exchange.ttft_bound_s,
            first_answer_s=exchange.first_answer_s,
            reasoning_tokens=exchange.reasoning_tokens,
            streamed=exchange.streamed,
            replica=exchange.replica,
            retries=exchange.retries,
            held_s=exchange.held_s,
            session=request.session,
            turn=request.turn,
            asked_tokens=request.output_tokens,
            cached_tokens=exchange.cached_tokens,
        )

    @classmethod
    def failed(
        cls,
        request: PlannedRequest,
        due_s: float,
        error: TargetError,
        *,
        sent_s: float | None = None,
    ) -> RequestRecord:
        """The record of a request that failed, with what had arrived before."""
        partial = error.exchange
        if isinstance(partial, Exchange):
            return replace(
                cls.completed(request, due_s, partial), status=error.kind, error=str(error)
            )
        return cls(
            request_id=request.request_id,
            due_s=due_s,
            sent_s=due_s if sent_s is None else sent_s,
            input_tokens=request.input_tokens,
            status=error.kind,
            error=str(error),
            session=request.session,
            turn=request.turn,
        )

    def shifted(self, start_s: float) -> RequestRecord:
        """The same record with times counted from `start_s`."""
        return replace(
            self,
            due_s=self.due_s - start_s,
            sent_s=self.sent_s - start_s,
            token_times_s=tuple(t - start_s for t in self.token_times_s),
            ended_s=None if self.ended_s is None else self.ended_s - start_s,
            first_answer_s=None if self.first_answer_s is None else self.first_answer_s - start_s,
        )


@dataclass(frozen=True, slots=True)
class GeneratorCheck:
    """What the load generator says of itself during a level; times in seconds.

    receiver             who read the sockets: "native", "python", "mixed"; "" without sockets
    token_counts         who counted the answers' tokens: "server", "tokenizer", "chunks", or
                         several of them, the most frequent first; "" without sockets
    receive_delay_p99_s  p99 of the time between a read's arrival in the kernel and its harvest, or
                         an upper bound of it where the kernel gives no time
    merged_share         share of the tokens that shared a read with a later one of their stream
    unsure_share         share of the tokens whose time such a read hides by more than 1 ms;
                         unsure_first_share: of the first tokens
    ttft_error_bound_s   by how much the TTFT p99 may be off because of the generator, at most, and
                         as a share of it (`_frac`); likewise the ITL p99, and the p50 of both.
                         None: not known. See `loadgen.error_bound`
    itl_p99_interval_s   where the true ITL p99 lies
    asked_load, achieved_load  requests a second, or users in flight while the level was full
    workers    processes that sent
    valid      False when the offered load was missed; `reason` then says by whom and what to do
    """

    dispatch_delay_p50_s: float = 0.0
    dispatch_delay_p99_s: float = 0.0
    dispatch_delay_max_s: float = 0.0
    loop_lag_p99_s: float = 0.0
    cpu_share: float = 0.0
    timestamps: str = "loop"
    receiver: str = ""
    token_counts: str = ""
    receive_delay_p99_s: float = 0.0
    merged_share: float = 0.0
    unsure_share: float = 0.0
    unsure_first_share: float = 0.0
    unstamped_share: float = 0.0
    clock_steps: int = 0
    ttft_error_bound_s: float | None = None
    ttft_error_bound_frac: float | None = None
    ttft_p50_error_bound_s: float | None = None
    itl_error_bound_s: float | None = None
    itl_error_bound_frac: float | None = None
    itl_p50_error_bound_s: float | None = None
    itl_p99_interval_s: tuple[float, float] | None = None
    asked_load: float | None = None
    achieved_load: float | None = None
    workers: int = 1
    valid: bool = True
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LevelRun:
    """A level that ran: its records in request order, and why it ended early if it did.

    stopped_by  None, or the rule that cut the level short ("timeout", "errors", "duration",
                "interrupted", "decided": a search knew its verdict)
    connect_s   what each connection opened for the level took, TLS included; tls_s: its handshake
    server      what the server said of itself on `/metrics`, where it was asked
    engine      what the engine in this process did meanwhile: counts, shares as fractions
    """

    spec: LevelSpec
    attempt: int
    records: tuple[RequestRecord, ...]
    stopped_by: str | None = None
    check: GeneratorCheck = field(default_factory=GeneratorCheck)
    engine: Mapping[str, float | None] | None = None
    connect_s: Sequence[float] = ()
    tls_s: Sequence[float] = ()
    server: Mapping[str, Any] | None = None
