"""Several engines behind one router: the replicas of a model.

Each replica has its own scheduler and executor, possibly with several devices. A request stays on
its replica. If one replica fails, the group fails: continuing with fewer replicas than requested
would hide the failure.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.async_engine import AsyncEngine, Generation
from lmi_bench.engine.executor import first_of
from lmi_bench.engine.router import Router
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.stats import EngineStats, SchedulerStats


class ReplicaGroup:
    """Several engines as one; an async context manager over all of them."""

    def __init__(self, engines: Sequence[AsyncEngine], router: Router) -> None:
        if not engines:
            raise InputError("a group needs at least 1 replica, got 0")
        self._engines = tuple(engines)
        self._router = router
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "ReplicaGroup":
        for engine in self._engines:
            await self._stack.enter_async_context(engine)
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._stack.__aexit__(*failure)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        beside: Generation | None = None,
        client: str | None = None,
    ) -> Generation:
        """Queue a request on the replica that the router picks, or on that of `beside`.

        The generation's `replica` is its number. Raises what AsyncEngine.submit raises, and
        EngineError once any replica has failed.
        """
        for engine in self._engines:
            if engine.error is not None:
                return engine.submit(prompt_token_ids, sampling)  # raises that error
        replica = None if beside is None else beside.replica
        if replica is None:
            outstanding = [engine.outstanding for engine in self._engines]
            replica = self._router.pick(outstanding, prompt_token_ids)
            limit = self._engines[0].config.max_concurrent_requests
            if limit is not None and outstanding[replica] >= limit:  # another may have room
                replica = outstanding.index(min(outstanding))
        generation = self._engines[replica].submit(prompt_token_ids, sampling, client=client)
        generation.replica = replica
        return generation

    @property
    def config(self) -> SchedulerConfig:
        """A replica's settings, but with `max_concurrent_requests` of all replicas together."""
        config = self._engines[0].config
        limit = config.max_concurrent_requests
        if limit is None:
            return config
        return replace(config, max_concurrent_requests=limit * len(self._engines))

    @property
    def error(self) -> EngineError | None:
        """The error of the first failed replica; None while all work."""
        return next((engine.error for engine in self._engines if engine.error is not None), None)

    async def failed(self) -> EngineError:
        return await first_of(engine.failed() for engine in self._engines)

    def audit(self) -> None:
        for engine in self._engines:
            engine.audit()

    def stats(self) -> EngineStats:
        """Current counts, summed; `peak_running` is the sum of the replicas' peaks."""
        each = [engine.stats() for engine in self._engines]
        return EngineStats(
            running=sum(stats.running for stats in each),
            waiting=sum(stats.waiting for stats in each),
            used_blocks=sum(stats.used_blocks for stats in each),
            total_blocks=sum(stats.total_blocks for stats in each),
            done=sum((stats.done for stats in each), SchedulerStats()),
        )


ServingEngine = AsyncEngine | ReplicaGroup  # an engine, or several behind a router
