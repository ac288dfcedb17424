"""A finished level: one line of levels.jsonl, and the only input of the analysis.

Times are milliseconds if the name ends in `_ms`, else seconds. Values that a level does not have
are None; docs/run_files.md says when. The key of a field is its name, but for `index`
(`level`), `load` (`concurrency`, `rate_per_s`) and `latency` (`ttft_ms` ...: see LATENCY_KEY).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import OPTIONAL, JsonValue, Slot, key_of, slot_of, slots_by_field
from lmi_bench.core.load import Load
from lmi_bench.core.server_metrics import ServerMetrics, TtftSplit
from lmi_bench.core.steadiness import Pauses, SpeedStep, SteadyWindow
from lmi_bench.core.workload import LevelSpec

Metric = Literal[
    "ttft",
    "ttft_from_sent",
    "ttft_answer",
    "dispatch_delay",
    "itl",
    "tpot",
    "e2e",
    "e2e_from_sent",
    "latency_per_token",
    "connect",
    "tls",
]
METRICS: tuple[Metric, ...] = get_args(Metric)
LATENCY_KEY: Mapping[Metric, str] = {
    metric: "latency_ms_per_token" if metric == "latency_per_token" else f"{metric}_ms" for metric in METRICS
}
"""The key of levels.jsonl that holds a metric's statistics."""

QUANTILES: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
STATISTICS = ("mean", *QUANTILES, "min", "max", "std")

CUT_SHORT = ("timeout", "errors", "interrupted", "decided")
"""`stopped_by` of levels that ended before their requests were sent."""
FAILED_SHARE = 0.5
"""Share of failed requests above which the others are no measurement of the level."""
KNOWN = "known"
"""`stopped_by` of a level whose quantile (`--stop-when`) was known: it is whole."""
WHOLE = (None, "duration", KNOWN)
GENERATOR_LIMITED = "client: generator-limited"  # an `invalid_reason` that concerns TTFT alone


@dataclass(frozen=True, slots=True)
class Statistics(JsonValue):
    """One latency over a level's requests, ms; None: unknown.

    n            samples
    unsupported  reasons of missing statistics, by name
    """

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None
    std: float | None = None
    n: int | None = None
    unsupported: Mapping[str, str] | None = None

    def value(self, statistic: str) -> float | None:
        """One of STATISTICS by its name."""
        found: float | None = getattr(self, statistic)
        return found

    def why_missing(self, statistic: str) -> str | None:
        """Why a statistic is missing, if known."""
        return (self.unsupported or {}).get(statistic)


NO_STATISTICS = Statistics()


@dataclass(frozen=True, slots=True)
class KnownQuantile(JsonValue):
    """How closely a level knows a quantile (`--stop-when`), at its last look.

    metric    such as ttft_p99; asked: largest distance of its 95 % interval's ends, as a share
    within    that distance; low_ms, high_ms: the interval
    requests  of the look, in the order of their sends; looks: its number
    """

    metric: str
    asked: float
    within: float
    low_ms: float
    high_ms: float
    requests: int
    looks: int

    @property
    def reached(self) -> bool:
        """Whether the interval is as narrow as asked."""
        return self.within <= self.asked


@dataclass(frozen=True, slots=True)
class GeneratorReport(JsonValue):
    """The load generator's check of itself during a level.

    receiver             reader of the sockets: "native", "python", "mixed"; "" without sockets
    priority             of the receiving threads, as granted: "SCHED_FIFO 1", "nice -10", "normal",
                         "normal: not permitted", "mixed"; None without sockets
    token_counts         source of the token counts: "server", "tokenizer", "chunks", or several of
                         them, the most frequent first; "" without sockets
    receive_delay_p99_s  p99 of the time between a read's arrival in the kernel and its harvest, or
                         an upper bound of it without a kernel time
    merged_share         share of the tokens that shared a read with a later one of their stream
    unsure_share         share of the tokens whose time such a read hides by more than 1 ms;
                         unsure_first_share: of the first tokens
    ttft_error_bound_ms  upper bound on the generator's error of the TTFT p99, and as a share of it
                         (`_frac`); likewise the ITL p99, and the p50 of both (`error_bound`)
    itl_p99_interval_ms  interval that contains the true ITL p99
    asked_load, achieved_load  requests a second, or users in flight while the level was full
    workers              processes that sent
    clock_error_bound_ms  upper bound on how far the workers' hosts disagree about the time of an
                         event; None: all workers have one clock
    valid                False if the offered load was missed; `reason`: the cause and what to do
    """

    dispatch_delay_p50_s: float | None = None
    dispatch_delay_p99_s: float | None = None
    dispatch_delay_max_s: float | None = None
    loop_lag_p99_s: float | None = None
    cpu_share: float | None = None
    timestamps: str | None = None
    receiver: str | None = None
    token_counts: str | None = None
    receive_delay_p99_s: float | None = None
    merged_share: float | None = None
    unsure_share: float | None = None
    unsure_first_share: float | None = None
    unstamped_share: float | None = None
    clock_steps: int | None = None
    ttft_error_bound_frac: float | None = None
    itl_error_bound_frac: float | None = None
    asked_load: float | None = None
    achieved_load: float | None = None
    workers: int | None = None
    valid: bool | None = None
    reason: str | None = None
    ttft_error_bound_ms: float | None = None
    ttft_p50_error_bound_ms: float | None = None
    itl_error_bound_ms: float | None = None
    itl_p50_error_bound_ms: float | None = None
    itl_p99_interval_ms: Sequence[float] | None = None
    clock_error_bound_ms: float | None = field(default=None, metadata=OPTIONAL)
    priority: str | None = field(default=None, metadata=OPTIONAL)

    def p99_bound(self, metric: Literal["ttft", "itl"]) -> tuple[float | None, float | None]:
        """Error bound of the metric's p99: in ms, and as a share of it; None: unknown."""
        if metric == "ttft":
            return self.ttft_error_bound_ms, self.ttft_error_bound_frac
        return self.itl_error_bound_ms, self.itl_error_bound_frac


@dataclass(frozen=True, slots=True)
class Turns(JsonValue):
    """TTFT of the turns `first_turn` to `last_turn` of conversations, counted from 1."""

    first_turn: int
    last_turn: int
    ttft_ms: Statistics


@dataclass(frozen=True, slots=True)
class Sessions(JsonValue):
    """A level's conversations: their number, length, and TTFT of first and later turns.

    ttft_by_turns      of the turns 1, 2, 3 to 4, 5 to 8, ... as far as there were any
    finished           conversations whose every request was answered
    time_to_finish_ms  of these, from the first due time to the last answer
    """

    started: int | None = None
    failed: int | None = None
    turns_mean: float | None = None
    ttft_first_turn_ms: Statistics = NO_STATISTICS
    ttft_later_turns_ms: Statistics = NO_STATISTICS
    ttft_by_turns: tuple[Turns, ...] | None = field(default=None, metadata=OPTIONAL)
    finished: int | None = None
    time_to_finish_ms: Statistics = NO_STATISTICS


@dataclass(frozen=True, slots=True)
class UnplannedLengths(JsonValue):
    """Answers of another length than requested; means are over all with a requested length."""

    requests: int
    asked_tokens_mean: float
    output_tokens_mean: float


@dataclass(frozen=True, slots=True)
class UnequalCounts(JsonValue):
    """Answers whose token count by the server differs from their chunks."""

    requests: int
    server_tokens: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Held(JsonValue):
    """Requests that a cap delayed, and their mean wait."""

    requests: int
    mean_ms: float


@dataclass(frozen=True, slots=True)
class Judgement(JsonValue):
    """A level against its SLOs; a search stores it with the level.

    ratio    largest measured / limit; infinite if requests failed
    binding  the SLO with that ratio
    planned  planned requests that count; None if the level's duration was fixed
    sure     a miss that is significant: so many requests over the limit have a probability below
             1 % if the SLO is met
    noise    standard deviation of log(ratio), from its own requests; None: unknown
    """

    passed: bool
    ratio: float
    binding: str
    planned: int | None
    sure: bool = False
    noise: float | None = None

    @classmethod
    def slots(cls) -> Mapping[str, Slot]:
        """JSON has no infinity: an infinite ratio is null there."""
        found = super(Judgement, cls).slots()
        return {**found, "ratio": slot_of("ratio", float | None)._replace(required=True)}

    @classmethod
    def from_json(cls, content: object, where: str = "") -> Self:
        """The judgement of a level's line."""
        values = cls._read(content, where)
        return cls(**{**values, "ratio": math.inf if values["ratio"] is None else values["ratio"]})

    def _written(self, name: str) -> Any:
        if name == "ratio" and not math.isfinite(self.ratio):
            return None
        return super(Judgement, self)._written(name)


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over the attempts of one level; `low` and `high` are None for a single one.

    low, high  95 % interval of the mean
    cv         standard deviation over mean, None for a single attempt
    """

    attempts: int
    mean: float
    low: float | None
    high: float | None
    cv: float | None

    @property
    def half_width(self) -> float:
        """Half of the interval over the mean; infinite for a single attempt."""
        if self.high is None or self.mean == 0:
            return math.inf
        return (self.high - self.mean) / abs(self.mean)


@dataclass(frozen=True, slots=True)
class Level(JsonValue):
    """The results of a level: a line of levels.jsonl.

    requests, errors  None if another tool's file does not say (`sent`, `failed`: then 0)
    stopped_by        the rule that ended the level early: timeout, errors, duration, interrupted,
                      decided or known
    start_requests    first requests of a closed loop's users, in no latency; 0 if too few others
                      were sent, so that all count; None if all count by definition
    speed_unknown     what a level lacks in which no step was looked for; None in virtual time
    search            its judgement, if a search chose the level
    attempts, spread  of several pooled attempts; never in a file
    attempts_left_out  the numbers of others, and why they are not pooled; never in a file
    """

    index: int = field(metadata=key_of("level"))
    attempt: int
    load: Load
    requests: int | None = None
    errors: int | None = None
    start_requests: int | None = None
    errors_by_kind: Mapping[str, int] = field(default_factory=dict)
    error_examples: Mapping[str, Sequence[str]] | None = None
    output_tokens: float | None = None
    input_tokens: float | None = None
    wall_s: float | None = None
    throughput_tokens_per_s: float | None = None
    total_throughput_tokens_per_s: float | None = None
    request_throughput_per_s: float | None = None
    steady: SteadyWindow = field(default_factory=SteadyWindow)
    speed_step: SpeedStep | None = None
    speed_unknown: str | None = None
    pauses: Pauses | None = None
    known: KnownQuantile | None = None
    valid: bool = True
    invalid_reason: str | None = None
    stopped_by: str | None = None
    latency: Mapping[Metric, Statistics] = field(default_factory=dict)
    reasoning_tokens: int | None = None
    reasoning_token_share: float | None = None
    mean_concurrency: float | None = None
    little_law_ratio: float | None = None
    retries: int | None = None
    generator: GeneratorReport = GeneratorReport()
    server: ServerMetrics | None = None
    engine: Mapping[str, float | None] | None = None
    unplanned_lengths: UnplannedLengths | None = None
    unequal_counts: UnequalCounts | None = None
    cached_prompt_frac: float | None = None
    cached_prompt_expected: bool | None = None
    without_finish_reason: int | None = None
    sessions: Sessions | None = None
    ttft_split: TtftSplit | None = None
    max_in_flight: int | None = None
    held: Held | None = None
    requests_by_replica: Mapping[str, int] | None = None
    search: Judgement | None = None
    price_usd_per_hour: float | None = None
    elapsed_s: float | None = None
    spent_usd: float | None = None
    usd_per_1m_output_tokens: float | None = None
    usd_per_1m_total_tokens: float | None = None
    instances: int | None = None
    started_at: str | None = None
    ended_at: str | None = None
    imported_from: str | None = None
    imported: Mapping[str, Any] | None = None
    attempts: int | None = None
    attempts_left_out: Sequence[str] = ()
    spread: Mapping[str, Spread] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The level's name: that of its load."""
        return self.load.name

    @property
    def sent(self) -> int:
        """Requests that were sent, failed ones included."""
        return self.requests or 0

    @property
    def failed(self) -> int:
        """Requests without a complete answer."""
        return self.errors or 0

    @property
    def counted(self) -> int:
        """Requests sent that latencies count."""
        return self.sent - (self.start_requests or 0)

    @property
    def completed(self) -> int:
        """Requests with a complete answer."""
        return self.sent - self.failed

    @property
    def has_failed(self) -> bool:
        """Whether it is no measurement: most of its requests failed, or too many to go on."""
        return self.stopped_by == "errors" or self.failed > FAILED_SHARE * self.sent

    @property
    def is_tokenless(self) -> bool:
        """Whether its answers have no tokens, as embeddings."""
        return self.output_tokens == 0 and self.completed > 0

    @property
    def is_cut_short(self) -> bool:
        """Whether it ended before its requests were sent or its time was over."""
        return self.stopped_by in CUT_SHORT

    def of(self, metric: str) -> Statistics:
        """The statistics of one of METRICS; all None if the level lacks it."""
        return self.latency.get(metric, NO_STATISTICS)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def slots(cls) -> Mapping[str, Slot]:
        """The slot of each key, in the order in which a sweep writes them."""
        return _level_slots()

    @classmethod
    def from_json(cls, content: object, where: str = "") -> Self:
        """The level of a line; InputError names `where` and the field that is damaged."""
        values = cls._read(content, where)
        concurrency, rate_per_s = values.pop("concurrency", None), values.pop("rate_per_s", None)
        try:
            load = Load(concurrency, rate_per_s, sessions=bool(values.get("sessions")))
        except InputError as exc:
            raise InputError(f"{where}: concurrency, rate_per_s: {exc}") from exc
        found = {metric: values.pop(metric, None) for metric in METRICS}
        latency = {metric: each for metric, each in found.items() if each is not None}
        return cls(load=load, latency=latency, **values)

    def _written(self, name: str) -> Any:
        if name in LATENCY_KEY:
            found = self.latency.get(name)  # type: ignore[call-overload]
            return None if found is None else found.to_json()
        if name in ("concurrency", "rate_per_s"):
            return getattr(self.load, name)
        return super(Level, self)._written(name)

    def _is_left_out(self, slot: Slot) -> bool:
        # a level without completed requests has a price but no cost
        if self.file_keys is None and slot.name in _OF_A_PRICE:
            return self.price_usd_per_hour is None and getattr(self, slot.name) is None
        if slot.name in LATENCY_KEY or slot.name in ("concurrency", "rate_per_s"):
            unset = self._written(slot.name) is None
            return unset and (slot.optional or self.file_keys is not None)
        return super(Level, self)._is_left_out(slot)


_OF_A_PRICE = ("price_usd_per_hour", "elapsed_s", "spent_usd", "usd_per_1m_output_tokens", "usd_per_1m_total_tokens")

# The keys in a sweep's order; a question mark marks those that only some levels have.
_KEYS = """
    level attempt stopped_by concurrency rate_per_s requests start_requests? errors errors_by_kind
    error_examples? output_tokens input_tokens wall_s throughput_tokens_per_s
    total_throughput_tokens_per_s request_throughput_per_s steady speed_step? speed_unknown? pauses? known? valid
    invalid_reason ttft_ms ttft_from_sent_ms ttft_answer_ms? reasoning_tokens?
    reasoning_token_share? dispatch_delay_ms itl_ms tpot_ms e2e_ms e2e_from_sent_ms
    latency_ms_per_token mean_concurrency little_law_ratio retries connect_ms tls_ms generator
    server? engine? unplanned_lengths? unequal_counts? cached_prompt_frac? without_finish_reason?
    sessions? ttft_split? max_in_flight? held? requests_by_replica? cached_prompt_expected? search?
    price_usd_per_hour? elapsed_s? spent_usd? usd_per_1m_output_tokens? usd_per_1m_total_tokens?
    instances? started_at? ended_at? imported_from? imported?
"""


@cache
def _level_slots() -> Mapping[str, Slot]:
    by_field = slots_by_field(Level)
    known = {"concurrency": slot_of("concurrency", int | None), "rate_per_s": slot_of("rate_per_s", float | None)}
    known |= {key: slot_of(metric, Statistics | None) for metric, key in LATENCY_KEY.items()}
    slots = {}
    for word in _KEYS.split():
        key = word.removesuffix("?")
        slot = known[key] if key in known else by_field[key]
        slots[key] = slot._replace(optional=word.endswith("?"))
    return MappingProxyType(slots)


NextLevel = Callable[[Sequence[Level]], LevelSpec | None]
"""The level to run after the finished ones; None ends the sweep."""
