"""Simulates a level: the engine's own scheduler under a load, in predicted time, without a loop.

The records are those of the load generator for the in-process engine in virtual time, event for
event, but come faster: runs of identical decode steps are taken at once. Times are seconds since
the level's start.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile

from lmi_bench.analysis.model.setup import Speculation
from lmi_bench.analysis.model.speculation import SpeculativeModel
from lmi_bench.core.errors import CapacityError, InputError, OverloadedError, TargetErrorKind
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import STATUS_OK, LevelRun, RequestRecord, with_start_marked
from lmi_bench.core.workload import ClosedLoop, LevelSpec, PlannedRequest, arrival_times_s
from lmi_bench.engine.router import RoundRobin, Router
from lmi_bench.engine.scheduling.batch import BatchEntry, StepBatch, StepOutput, WaitUntil
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter, tokens_gained
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.scheduling.stats import SchedulerStats
from lmi_bench.engine.scheduling.step_shape import StepShape, StepTime

Requests = Callable[[int], PlannedRequest]
_OWN_TOKENS = 2**32  # token ids of each request's own text begin at a multiple of this
_MOST_ERRORS = 0.5  # share of failed requests above which nothing more is sent
_TOKEN_ID = 0  # id of every generated token; simulated requests have no stop tokens


def simulate_level(
    spec: LevelSpec,
    requests: Requests,
    scheduler_config: SchedulerConfig,
    step_time: StepTime,
    *,
    seed: int = 0,
    spacing_s: float = 0.0,
    replicas: int = 1,
    router: Router | None = None,
    speculation: Speculation | None = None,
    overhead_s: float = 0.0,
) -> LevelRun:
    """Run one level in predicted time; no answer is too slow for its user.

    requests         the request of a number: its lengths, and for prefix caching its token ids
                     (without any, no prompt has text in common with another)
    seed             seed of the open loop's arrivals
    spacing_s        seconds between the first sends of a closed loop's users
    replicas         engines with a scheduler each; `router` (round robin) picks one a request
    speculation      speculation of the engine, included in `step_time`
    overhead_s       time of a request outside the engine: it reaches it so long after it is sent
    """
    numbers = range(replicas) if replicas > 1 else (None,)
    pool = Pool(replicas, scheduler_config, step_time, speculation)
    engines = [Replica(pool, number) for number in numbers]
    level = LevelRunner(spec, requests, engines, router or RoundRobin(), overhead_s)
    level.run(starts_s(spec, requests, seed, spacing_s))
    return level.result()


def starts_s(spec: LevelSpec, requests: Requests, seed: int, spacing_s: float) -> Iterator[float]:
    """Due times of an open loop's requests, or of the first ones of a closed loop's users."""
    if spec.rate_per_s is None:
        return (n * spacing_s for n in range(spec.concurrency or 0))
    if spec.load.arrivals == "trace":
        recorded = (requests(number).arrival_s for number in range(spec.num_requests or 0))
        limit_s = math.inf if spec.duration_s is None else spec.duration_s
        return takewhile(lambda at_s: at_s < limit_s, recorded)
    seed += spec.repeat
    return arrival_times_s(spec.load, seed=seed, num_requests=spec.num_requests, duration_s=spec.duration_s)


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request that was sent, and its progress; part: what an engine does of it, if not all."""

    planned: PlannedRequest
    due_s: float
    seq_id: int
    reaches_s: float
    replica: "Replica | None" = None
    part: PlannedRequest | None = None
    token_times: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    status: str = STATUS_OK
    error: str | None = None
    finish_reason: str | None = None
    ended_s: float | None = None
    cached_tokens: int | None = None

    def record(self) -> RequestRecord:
        """The record that the load generator would write."""
        return RequestRecord(
            request_id=self.planned.request_id,
            due_s=self.due_s,
            exchange=Exchange(
                self.due_s,
                tuple(self.token_times),
                tuple(self.token_counts),
                finish_reason=self.finish_reason,
                ended_s=self.ended_s,
                replica=None if self.replica is None else self.replica.number,
                cached_tokens=self.cached_tokens,
            ),
            input_tokens=self.planned.input_tokens,
            status=self.status,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal workers: their number, scheduler and step times, of real steps if they speculate."""

    workers: int
    config: SchedulerConfig
    step_time: StepTime
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"a pool needs at least 1 worker, got {self.workers}")
        if isinstance(self.step_time, SpeculativeModel):
            object.__setattr__(self, "step_time", self.step_time.real_steps)

    def prompt(self, request: SentRequest) -> Sequence[int]:
        """Token ids: those of the request, else its own."""
        length = (request.part or request.planned).input_tokens
        known = request.planned.prompt_token_ids or ()
        first = _OWN_TOKENS * (request.seq_id + 1)
        own = range(first, first + length - len(known))
        return [*known, *own] if known else own


@dataclass(slots=True, eq=False)
class Replica:
    """One engine: a scheduler, and its present step or run of identical steps.

    number  None for the only replica
    next_s  time of its next event: the end of the step or run, the time that a dynamic batch waits
            for, or never
    """

    engine: Pool
    number: int | None
    scheduler: Scheduler = field(init=False)
    next_s: float = math.inf
    _requests: dict[int, SentRequest] = field(default_factory=dict)
    _batch: StepBatch | None = None
    _run_ends_s: list[float] = field(default_factory=list)  # ends of the steps of a run
    _run_requests: list[SentRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        speculation = self.engine.speculation
        drafter = None if speculation is None else ExecutorDrafter(speculation.draft_tokens)
        self.scheduler = Scheduler(self.engine.config, drafter=drafter)

    @property
    def outstanding(self) -> int:
        """Number of unanswered requests."""
        return len(self._requests)

    def add(self, request: SentRequest, now_s: float, slack_s: float) -> None:
        """Take a request, or its part. Raises CapacityError or OverloadedError."""
        self._break_run(now_s, slack_s)
        planned = request.part or request.planned
        self.scheduler.add(
            request.seq_id,
            self.engine.prompt(request),
            SamplingParams(max_new_tokens=planned.output_tokens, ignore_eos=planned.ignore_eos),
            now_s,
        )
        request.planned = replace(request.planned, prompt_token_ids=())  # large, of no more use
        self._requests[request.seq_id] = request
        request.replica = self

    def end_step(self, now_s: float) -> list[SentRequest]:
        """End the present step or run; returns the requests that ended with it."""
        ended = []
        if self._run_ends_s:
            self._take_run(len(self._run_ends_s))
        elif self._batch is not None:
            outputs = [self._output(entry) for entry in self._batch.entries]
            for gained in self.scheduler.commit(self._batch, outputs, now_s):
                request = self._requests[gained.seq_id]
                request.token_times.append(now_s)
                request.token_counts.append(len(gained.token_ids))
                if gained.finish_reason is not None:
                    request.finish_reason, request.ended_s = gained.finish_reason, now_s
                    del self._requests[gained.seq_id]
                    ended.append(request)
            self._batch = None
        return ended

    def _output(self, entry: BatchEntry) -> StepOutput:
        if not entry.samples:
            return StepOutput(entry.seq_id)
        acceptance = 0.0 if self.engine.speculation is None else self.engine.speculation.acceptance
        count = tokens_gained(acceptance, entry.seq_id, entry.first_position, entry.draft_length)
        return StepOutput(entry.seq_id, (_TOKEN_ID,) * count)

    def start_step(self, now_s: float, before_s: float) -> None:
        """If idle, begin the next step, or a run; only its first may end after `before_s`."""
        if self._batch is not None or self._run_ends_s:
            return
        if steps := self.scheduler.identical_decode_steps():
            self._start_run(steps, now_s, before_s)
            return
        planned = self.scheduler.plan(now_s)
        if isinstance(planned, StepBatch):
            self._batch = planned
            if self.engine.config.prefix_caching:
                for entry in planned.entries:
                    if entry.begins and entry.num_generated == 0:
                        self._requests[entry.seq_id].cached_tokens = entry.first_position
            self.next_s = now_s + self.engine.step_time.step_time_s(planned.shape)
        else:
            self.next_s = planned.at_s if isinstance(planned, WaitUntil) else math.inf

    def _start_run(self, steps: int, now_s: float, before_s: float) -> None:
        first = self.scheduler.decode_shape()
        rows, context = first.decode_sequences, first.decode_context_tokens
        predict = self.engine.step_time.step_time_s
        ends_s: list[float] = []
        at_s = now_s
        for context_tokens in range(context, context + steps * rows, rows):
            at_s += predict(StepShape.decoding(rows, context_tokens))
            if ends_s and at_s >= before_s:
                break
            ends_s.append(at_s)
        self._run_ends_s = ends_s
        self._run_requests = [self._requests[i] for i in self.scheduler.running_seq_ids()]
        self.next_s = ends_s[-1]

    def _break_run(self, now_s: float, slack_s: float) -> None:
        """An event before the last end of a run: it ends with the present step.

        A step that ends at this instant has ended.
        """
        ends_s = self._run_ends_s
        if not ends_s or ends_s[-1] <= now_s + slack_s:
            return
        done = bisect_right(ends_s, now_s + slack_s)
        if done and ends_s[done - 1] >= now_s - slack_s:
            self._take_run(done)
            self.next_s = math.inf  # between two steps: the next one begins at this instant
            return
        del ends_s[done + 1 :]
        self.next_s = ends_s[done]

    def _take_run(self, num_steps: int) -> None:
        self.scheduler.skip_decode_steps(num_steps, _TOKEN_ID)
        times = self._run_ends_s[:num_steps]
        for request in self._run_requests:
            request.token_times.extend(times)
            request.token_counts.extend([1] * num_steps)
        self._run_ends_s = []


@dataclass(eq=False)
class LevelRunner:
    """Sends requests by the load generator's rules and keeps their results."""

    spec: LevelSpec
    requests: Requests
    replicas: list[Replica]
    router: Router
    overhead_s: float
    _users: ClosedLoop = field(init=False)
    _sent: list[SentRequest] = field(init=False, default_factory=list)
    _coming: deque[SentRequest] = field(init=False, default_factory=deque)  # not yet in the engine
    _num_ended: int = field(init=False, default=0)
    _num_errors: int = field(init=False, default=0)
    _stopped_by: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        spec = self.spec
        self._users = ClosedLoop(
            concurrency=spec.concurrency or 0, num_requests=spec.num_requests, duration_s=spec.duration_s
        )

    def run(self, starts: Iterator[float]) -> None:
        """Process instants until no event is left.

        starts  due times of the open loop's requests, or of the users' first ones
        """
        next_start_s = next(starts, math.inf)
        while True:
            engine_s = min(replica.next_s for replica in self.replicas)
            now_s = min(next_start_s, self._next_coming_s(), engine_s)
            if now_s == math.inf:
                return
            same_s = now_s + self._slack_s(now_s)
            while next_start_s <= same_s:
                if self.spec.rate_per_s is None:
                    self._user_sends(now_s)
                elif self._stopped_by is None:
                    self._send(now_s, next_start_s)
                next_start_s = next(starts, math.inf)
            while self._next_coming_s() <= same_s:
                if not self._take_next(now_s):
                    self._user_sends(now_s)
            for replica in self.replicas:
                if replica.next_s <= same_s:
                    self._end_step(replica, now_s)
            if self._stopped_by is not None:
                next_start_s = math.inf
            horizon_s = min(next_start_s, self._next_coming_s())
            before_s = horizon_s - self._slack_s(horizon_s) if horizon_s < math.inf else horizon_s
            for replica in self.replicas:
                replica.start_step(now_s, before_s)

    def result(self) -> LevelRun:
        """The level as the load generator would return it."""
        self._check_stop_rules(at_end=True)
        spec = self.spec
        if self._stopped_by is None and spec.duration_s is not None and len(self._sent) < (spec.num_requests or 0):
            self._stopped_by = "duration"
        records = with_start_marked([request.record() for request in self._sent], spec)
        done = sum((each.scheduler.stats for each in self.replicas), SchedulerStats())
        return LevelRun(spec, 1, records, self._stopped_by, engine=asdict(done))

    def _end_step(self, replica: Replica, now_s: float) -> None:
        for _ in replica.end_step(now_s):
            self._answered(now_s)

    def _answered(self, now_s: float) -> None:
        self._num_ended += 1
        self._check_stop_rules()
        self._user_sends(now_s)

    def _user_sends(self, now_s: float) -> None:
        """A user of the closed loop is free: it sends until the engine accepts a request."""
        while self.spec.rate_per_s is None:
            if (index := self._users.next_index(now_s)) is None or self._send(now_s, now_s, index):
                return

    def _send(self, now_s: float, due_s: float, index: int | None = None) -> bool:
        """Send the next request; False if the engine refused it at once."""
        number = len(self._sent) if index is None else index
        request = SentRequest(self.requests(number), due_s, number, now_s + self.overhead_s)
        self._sent.append(request)
        if not self.overhead_s:
            return self._enter(request, now_s)
        self._coming.append(request)
        return True

    def _take_next(self, now_s: float) -> bool:
        return self._enter(self._coming.popleft(), now_s)

    def _enter(self, request: SentRequest, now_s: float) -> bool:
        return self._add(request, self.replicas, self.router, now_s)

    def _add(self, request: SentRequest, pool: list[Replica], router: Router, now_s: float) -> bool:
        """Give the request to a replica of the pool; whether that accepted it."""
        outstanding = [replica.outstanding for replica in pool]
        replica = pool[router.pick(outstanding, request.planned.prompt_token_ids)]
        try:
            replica.add(request, now_s, self._slack_s(now_s))
        except (CapacityError, OverloadedError) as exc:
            refused = isinstance(exc, CapacityError)
            self._fail(request, "refused" if refused else "overloaded", str(exc))
            return False
        return True

    def _slack_s(self, at_s: float) -> float:
        """Largest difference between times that count as one instant.

        One replica: two units in the last place, as on the virtual loop. Several: above the
        rounding errors, which grow with the number of steps and must not decide the order.
        """
        return 2 * math.ulp(at_s) if len(self.replicas) == 1 else 1e-10 * at_s

    def _next_coming_s(self) -> float:
        return self._coming[0].reaches_s if self._coming else math.inf

    def _fail(self, request: SentRequest, kind: TargetErrorKind, message: str) -> None:
        request.status, request.error = kind, message
        self._num_ended += 1
        self._num_errors += 1
        self._check_stop_rules()

    def _check_stop_rules(self, *, at_end: bool = False) -> None:
        """The load generator's rule: a level of known length stops when the share is certain."""
        known = None if at_end else self.spec.num_requests
        enough = known is not None or at_end or self._num_ended >= 10
        if self._stopped_by is None and enough and self._num_errors > _MOST_ERRORS * (known or self._num_ended):
            self._stopped_by = "errors"
        if self._stopped_by is not None:
            self._users.stop()
