"""The engine's loop: plan a step, run it, deliver its tokens.

`AsyncEngine._serve` is the whole loop. Times come from the event loop's clock, so the same code
runs in real and in virtual time.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lmi_bench.core.clock import settle
from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.executor import Executor, WatchedExecutor
from lmi_bench.engine.memory_budget import MemoryBudget
from lmi_bench.engine.scheduling.batch import (
    CommittedTokens,
    PromptLogprobs,
    StepBatch,
    StepKind,
    StepOutput,
    WaitUntil,
)
from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.scheduling.stats import EngineStats

OnStep = Callable[[StepBatch, float, float], None]
OnEnd = Callable[["Generation"], None]


class TokenEvent(NamedTuple):
    """Tokens that a request got from one step, at `time_s` on the loop's clock."""

    time_s: float
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[Ranked, ...] | None = None


@dataclass(eq=False, repr=False, slots=True)
class Generation:
    """One request in the engine, from `submit` to its end.

    events              all events so far, kept after the end
    finish_reason       None while it runs, or if the engine failed
    prompt_logprobs     of the prompt's tokens from the second on, known with its first token
    drafted_tokens      draft tokens for this request; accepted_tokens: those accepted
    replica             number of its replica; None without replicas
    on_news             called at once with each event and the end; it must return quickly
    error               why it got no end, if the engine failed
    submitted_s ...     times on the loop's clock
    """

    _engine: "AsyncEngine"
    seq_id: int
    submitted_s: float
    replica: int | None = None
    on_news: Callable[[], None] | None = None
    events: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    error: EngineError | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event | None = None  # created when something first iterates

    @property
    def queue_s(self) -> float | None:
        """Seconds in the queue before its first step; None while it waits."""
        return _between(self.submitted_s, self.first_scheduled_s)

    @property
    def prefill_s(self) -> float | None:
        """Seconds from its first step to its first token."""
        return _between(self.first_scheduled_s, self.first_token_s)

    @property
    def decode_s(self) -> float | None:
        """Seconds from its first token to its end; None before the end."""
        return _between(self.first_token_s, self.finished_s)

    async def started(self) -> None:
        """Return at the first token, or at the end if there is none. Raises EngineError if the
        engine fails before."""
        async for _ in self:
            return

    async def wait(self) -> None:
        """Return when the request ends. Raises EngineError if the engine fails."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Every event from the first on, as it occurs. Raises EngineError if the engine fails.
        Several consumers may iterate. The load generator uses `wait` instead."""
        position = 0
        while True:
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self._ended.is_set():
                break
            if self._news is None:
                self._news = asyncio.Event()
            await self._news.wait()
        if self.error is not None:
            raise self.error

    def stop(self, reason: str) -> None:
        """End the request now with this finish reason; no effect if it has ended."""
        if not self._ended.is_set():
            self._engine._stop(self, reason)

    def _end(self, now_s: float, reason: str | None, error: EngineError | None = None) -> None:
        self.finished_s = now_s
        self.finish_reason = reason
        self.error = error
        self._ended.set()
        self._wake()
        self.on_news = None  # who listens refers to this: the two would wait for a collection
        if self._engine._on_end is not None:
            self._engine._on_end(self)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None
        if self.on_news is not None:
            self.on_news()


class AsyncEngine:
    """Runs one scheduler over one executor; an async context manager that closes the executor.

    on_step        called after each step with its batch, its start and its end on the loop's clock
    on_end         called with each request that has ended
    memory_budget  limits the KV blocks in use to the machine's free memory; None: no limit
    error          why the engine failed; None while it works
    seq_ids        unique request numbers; unseeded draws depend on them, so several engines with
                   the same weights need different ones
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        on_step: OnStep | None = None,
        on_end: OnEnd | None = None,
        memory_budget: MemoryBudget | None = None,
        seq_ids: Iterator[int] | None = None,
    ) -> None:
        if executor.block_size != scheduler.config.block_size:
            raise InputError(
                f"the executor has KV blocks of {executor.block_size} tokens, the scheduler "
                f"{scheduler.config.block_size}: give both the same block_size"
            )
        self.config = scheduler.config
        self.error: EngineError | None = None
        self._scheduler = scheduler
        self._executor = executor
        self._on_step = on_step
        self._on_end = on_end
        self._memory_budget = memory_budget
        self._generations: dict[int, Generation] = {}
        self._seq_ids = itertools.count() if seq_ids is None else seq_ids
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error_seen = False
        self._failed = asyncio.Event()

    async def __aenter__(self) -> "AsyncEngine":
        self._task = asyncio.create_task(self._run(), name="engine")
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await asyncio.wait([self._task])
        finally:
            await self._executor.close()
        failed = not self._task.cancelled() and self._task.exception() is not None
        if failed and exc_type is None and not self._error_seen:
            assert self.error is not None
            raise self.error

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        beside: Generation | None = None,
        client: str | None = None,
    ) -> Generation:
        """Queue a request; it arrives now. `beside` has no effect: there is only one engine.

        client  takes turns with others in the queue; None: first come, first served

        Raises CapacityError if it can never fit, InputError if the executor cannot do it,
        OverloadedError if the engine is full, EngineError if it is not running.
        """
        if self.error is not None:
            self._error_seen = True
            raise self.error
        if self._task is None:
            raise EngineError("the engine is not running: enter it with `async with`")
        if sampling.prompt_logprobs and not hasattr(self._executor, "score"):
            raise InputError("this engine has no log-probabilities of prompts: omit them")
        now_s = asyncio.get_running_loop().time()
        seq_id = next(self._seq_ids)
        self._scheduler.add(seq_id, prompt_token_ids, sampling, now_s, client)
        generation = self._generations[seq_id] = Generation(self, seq_id, now_s)
        self._news.set()
        return generation

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    async def failed(self) -> EngineError:
        """Return when the engine has failed, with the reason."""
        await self._failed.wait()
        assert self.error is not None
        return self.error

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            used_blocks=scheduler.blocks.num_used,
            total_blocks=scheduler.blocks.budget,
            done=replace(scheduler.stats),
        )

    def audit(self) -> None:
        """Check the KV cache's reference counts against the requests; raises EngineError."""
        self._scheduler.audit()

    async def _run(self) -> None:
        try:
            await self._serve()
        except asyncio.CancelledError:
            self._fail(EngineError("the engine was shut down"))
            raise
        except Exception as exc:
            self._fail(_as_engine_error(exc))
            raise

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        overlap = self._executor.max_in_flight > 1
        steps: deque[tuple[StepBatch, float, asyncio.Task[list[StepOutput]]]] = deque()
        later: tuple[list[CommittedTokens], float] = ([], 0.0)
        async with asyncio.TaskGroup() as group:
            if isinstance(self._executor, WatchedExecutor):
                group.create_task(_raise_when_lost(self._executor))
            if self._memory_budget is not None:
                group.create_task(self._memory_budget.follow(self._scheduler, self._news.set))
            while True:
                await settle()  # lets requests that arrive now join this step
                self._news.clear()
                start_s = loop.time()
                planned = self._scheduler.plan(start_s)
                if isinstance(planned, StepBatch):
                    if planned.shape.prefill_sequences:
                        self._mark_scheduled(planned, start_s)
                    task = group.create_task(self._executor.execute(planned))
                    if not overlap:
                        await settle()  # the step has started: now streams may take their time
                        self._hand_out(*later)
                        later = self._commit(planned, start_s, await task)
                        continue
                    steps.append((planned, start_s, task))
                    if len(steps) < self._executor.max_in_flight:
                        continue
                self._hand_out(*later)
                later = ([], 0.0)
                if steps:
                    batch, start_s, task = steps.popleft()
                    self._hand_out(*self._commit(batch, start_s, await task))
                else:
                    await self._wait(planned.at_s if isinstance(planned, WaitUntil) else None)

    def _commit(
        self, batch: StepBatch, start_s: float, outputs: list[StepOutput]
    ) -> tuple[list[CommittedTokens], float]:
        """Take a step's tokens and end the requests that have their last one. Returns what is to
        hand out to the others, whose streams encode and send it: the next step comes first."""
        end_s = asyncio.get_running_loop().time()
        committed = self._scheduler.commit(batch, outputs, end_s)
        self._hand_out([gained for gained in committed if gained.finish_reason is not None], end_s)
        if self._on_step is not None:
            self._on_step(batch, start_s, end_s)
        return committed, end_s

    async def _wait(self, at_s: float | None) -> None:
        """Wait until a request arrives or ends, or until `at_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(at_s):
                await self._news.wait()

    def _mark_scheduled(self, batch: StepBatch, start_s: float) -> None:
        for entry in batch.entries:
            if entry.kind is StepKind.PREFILL:
                generation = self._generations.get(entry.seq_id)
                if generation is not None and generation.first_scheduled_s is None:
                    generation.first_scheduled_s = start_s

    def _hand_out(self, committed: list[CommittedTokens], now_s: float) -> None:
        for gained in committed:
            generation = self._generations.get(gained.seq_id)
            if generation is None:  # stopped since, or ended with its last tokens
                continue
            if generation.first_token_s is None:
                generation.first_token_s = now_s
                generation.prompt_logprobs = gained.prompt or ()
            if gained.drafted:
                generation.drafted_tokens += gained.drafted
                generation.accepted_tokens += gained.accepted
            generation.events.append(TokenEvent(now_s, gained.token_ids, gained.logprobs, gained.top_logprobs))
            generation._wake()
            if gained.finish_reason is not None:
                del self._generations[gained.seq_id]
                generation._end(now_s, gained.finish_reason)

    def _stop(self, generation: Generation, reason: str) -> None:
        self._scheduler.finish(generation.seq_id, reason)
        del self._generations[generation.seq_id]
        generation._end(asyncio.get_running_loop().time(), reason)
        self._news.set()

    def _fail(self, error: EngineError) -> None:
        self.error = error
        self._error_seen = bool(self._generations)
        self._failed.set()
        now_s = asyncio.get_running_loop().time()
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation._end(now_s, None, error)


async def _raise_when_lost(executor: WatchedExecutor) -> None:
    raise await executor.lost()


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _as_engine_error(exc: Exception) -> EngineError:
    """The error for the requests; a task group wraps even a single exception."""
    while isinstance(exc, ExceptionGroup):
        exc = exc.exceptions[0]
    if isinstance(exc, EngineError):
        return exc
    error = EngineError(f"a step failed: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error
