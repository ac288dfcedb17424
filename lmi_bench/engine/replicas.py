"""Several engines behind one router: the copies of a model that share a machine or a fleet.

Each replica has a scheduler and an executor of its own, and perhaps several devices. A request
stays where the router sent it. One that fails fails the group: to measure or to serve with fewer
replicas than were asked for would hide it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from types import TracebackType
from typing import Protocol

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.async_engine import AsyncEngine, Generation
from lmi_bench.engine.engine_stats import EngineStats
from lmi_bench.engine.router import Router
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams


class ServingEngine(Protocol):
    """What answers requests: an engine, or several behind a router."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        beside: Generation | None = None,
    ) -> Generation:
        """Queue a request, at the place of `beside` if one is given; see AsyncEngine.submit."""
        ...

    @property
    def config(self) -> SchedulerConfig:
        """The settings of the whole: `max_concurrent_requests` counts all places."""
        ...

    def stats(self) -> EngineStats:
        """Counts at this moment, over all replicas."""
        ...

    def audit(self) -> None:
        """Hold the books of the KV cache against the requests; see AsyncEngine.audit."""
        ...

    @property
    def error(self) -> EngineError | None:
        """Why nothing can be answered any more, None while it can."""
        ...

    async def failed(self) -> EngineError:
        """Return when nothing can be answered any more, with the reason."""
        ...


class ReplicaGroup:
    """Engines side by side; an async context manager over all of them."""

    def __init__(self, engines: Sequence[AsyncEngine], router: Router) -> None:
        if not engines:
            raise InputError("a group needs at least 1 replica, got 0")
        self._engines = tuple(engines)
        self._router = router
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ReplicaGroup:
        for engine in self._engines:
            await self._stack.enter_async_context(engine)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(exc_type, exc, traceback)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        beside: Generation | None = None,
    ) -> Generation:
        """Queue a request at the replica that the router picks, or at that of `beside`; `replica`
        of the generation says which.

        Raises what AsyncEngine.submit raises, and EngineError once any replica has failed.
        """
        for engine in self._engines:
            if engine.error is not None:
                return engine.submit(prompt_token_ids, sampling)  # raises that error
        replica = None if beside is None else beside.replica
        if replica is None:
            replica = self._router.pick([engine.outstanding for engine in self._engines])
        generation = self._engines[replica].submit(prompt_token_ids, sampling)
        generation.replica = replica
        return generation

    @property
    def config(self) -> SchedulerConfig:
        """A replica's settings, with the requests that all of them take together."""
        config = self._engines[0].config
        limit = config.max_concurrent_requests
        if limit is None:
            return config
        return replace(config, max_concurrent_requests=limit * len(self._engines))

    @property
    def error(self) -> EngineError | None:
        """Why the first replica that failed did, None while none has."""
        return next((engine.error for engine in self._engines if engine.error is not None), None)

    async def failed(self) -> EngineError:
        """Return when a replica has failed, with the reason."""
        waiting = [asyncio.ensure_future(engine.failed()) for engine in self._engines]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for future in waiting:
                future.cancel()

    def audit(self) -> None:
        """Hold each replica's books against its requests; see AsyncEngine.audit."""
        for engine in self._engines:
            engine.audit()

    def stats(self) -> EngineStats:
        """Counts at this moment, added up; `peak_running` is the sum of the replicas' peaks."""
        each = [engine.stats() for engine in self._engines]
        return EngineStats(
            **{
                field.name: sum(getattr(stats, field.name) for stats in each)
                for field in fields(EngineStats)
            }
        )
