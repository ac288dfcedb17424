"""The bundled engine in this process as a target: no sockets, token times from the engine."""

import asyncio
from dataclasses import dataclass, field

from lmi_bench.core.clock import is_virtual
from lmi_bench.core.errors import CapacityError, InputError, OverloadedError, TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.engine.async_engine import Generation
from lmi_bench.engine.replicas import ServingEngine
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.stats import EngineStats
from lmi_bench.loadgen.http.outcome import cancelled


@dataclass(slots=True, eq=False)
class InProcessTarget:
    """An engine that runs on the same loop; times are that loop's clock.

    simulated      its executor sleeps on the loop's clock, so virtual time is allowed
    eos_token_ids  tokens that end a request unless it ignores them
    overhead_s     time of a request before a simulated engine gets it
    """

    engine: ServingEngine
    simulated: bool = False
    eos_token_ids: tuple[int, ...] = ()
    overhead_s: float = 0.0
    # of the requests sent last: when, and what lets them through
    _gate: tuple[float, asyncio.Event] = field(default_factory=lambda: (-1.0, asyncio.Event()), init=False)

    def engine_stats(self) -> EngineStats:
        """The engine's counts at this moment."""
        return self.engine.stats()

    async def send(self, request: PlannedRequest) -> Exchange:
        """Generate the complete answer; a cancellation stops it and frees its blocks.

        Raises TargetError if the engine refuses it, EngineError if the engine failed.
        """
        if is_virtual() and not self.simulated:
            raise InputError("this engine computes in real time: virtual time is for simulated targets only")
        sampling = SamplingParams(
            max_new_tokens=request.output_tokens, ignore_eos=request.ignore_eos, eos_token_ids=self.eos_token_ids
        )
        prompt = request.prompt_token_ids or range(request.input_tokens)
        sent_s = asyncio.get_running_loop().time()
        if self.overhead_s:
            await self._outside(sent_s)
        try:
            generation = self.engine.submit(prompt, sampling)
        except CapacityError as exc:
            raise TargetError("refused", str(exc)) from exc
        except OverloadedError as exc:
            raise TargetError("overloaded", str(exc)) from exc
        try:
            await generation.wait()
        except asyncio.CancelledError as exc:
            generation.stop("cancelled")
            raise cancelled(_exchange(request, generation, sent_s)) from exc
        exchange = _exchange(request, generation, sent_s)
        if generation.finish_reason == "error":
            raise TargetError("server_error", "the engine failed the request", exchange=exchange)
        return exchange

    async def _outside(self, sent_s: float) -> None:
        """Wait until the request reaches the engine; those of one instant keep their order."""
        if self._gate[0] != sent_s:
            self._gate = sent_s, asyncio.Event()
            asyncio.get_running_loop().call_at(sent_s + self.overhead_s, self._gate[1].set)
        await self._gate[1].wait()


def _exchange(request: PlannedRequest, generation: Generation, sent_s: float) -> Exchange:
    events = [event for event in generation.events if event.token_ids]
    return Exchange(
        sent_s=sent_s,
        token_times_s=tuple(event.time_s for event in events),
        token_counts=tuple(len(event.token_ids) for event in events),
        finish_reason=generation.finish_reason,
        input_tokens=request.input_tokens,
        output_tokens=sum(len(event.token_ids) for event in events),
        ended_s=generation.finished_s,
        queue_s=generation.queue_s,
        prefill_s=generation.prefill_s,
        decode_s=generation.decode_s,
        replica=generation.replica,
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
    )
