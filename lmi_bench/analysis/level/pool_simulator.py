"""Simulates prefill and decode in separate pools, both with the engine's own scheduler.

A decode worker admits a sequence whose cache has moved as it would a prompt, at the cost of a row.
It streams the prompt's first token too, which so comes when the cache has moved, as from vLLM and
SGLang: in the closed form (two_pools.py) the transfer counts to TTFT likewise.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

from lmi_bench.analysis.level.simulator import (
    LevelRunner,
    Pool,
    Replica,
    Requests,
    SentRequest,
    starts_s,
)
from lmi_bench.analysis.model.speculation import SpeculativeModel
from lmi_bench.core.records import LevelRun
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.router import LeastOutstanding, Router
from lmi_bench.engine.scheduling.step_shape import StepShape, StepTime


@dataclass(frozen=True, slots=True)
class _Received:
    """Step times of a decode worker: a sequence whose cache came over the link is one more row."""

    own: StepTime

    def step_time_s(self, shape: StepShape) -> float:
        received = shape.prefill_sequences
        return self.own.step_time_s(
            StepShape(
                decode_sequences=shape.decode_sequences + received,
                decode_tokens=shape.decode_tokens + received,
                decode_context_tokens=shape.decode_context_tokens
                + shape.prefill_tokens
                + shape.prefill_context_tokens,
            )
        )


def simulate_pools(
    spec: LevelSpec,
    requests: Requests,
    prefill: Pool,
    decode: Pool,
    transfer_s: Callable[[int], float],
    *,
    seed: int = 0,
    overhead_s: float = 0.0,
) -> LevelRun:
    """Run one level in predicted time.

    transfer_s  seconds in which the cache of a prompt of so many tokens moves
    Other arguments and the records: `simulate_level`.
    """
    if isinstance(decode.step_time, SpeculativeModel):
        decode = replace(decode, step_time=decode.step_time.real_steps)
    level = _TwoPools(spec, requests, prefill, decode, transfer_s, overhead_s=overhead_s)
    level.run(starts_s(spec, requests, seed, 0.0))
    return level.result()


class _TwoPools(LevelRunner):
    """A level whose requests pass through both pools."""

    def __init__(
        self,
        spec: LevelSpec,
        requests: Requests,
        prefill: Pool,
        decode: Pool,
        transfer_s: Callable[[int], float],
        *,
        overhead_s: float,
    ) -> None:
        # whole prompts are admitted at once: their tokens are already computed
        whole = replace(decode.config, max_rolling_batch_prefill_tokens=decode.config.cache_tokens)
        received = replace(decode, config=whole, step_time=_Received(decode.step_time))
        self._prefill = _replicas(prefill, 0)
        self._decode = _replicas(received, prefill.workers)
        self._routers: tuple[Router, Router] = LeastOutstanding(), LeastOutstanding()
        self._transfer_s = transfer_s
        self._moving: list[tuple[float, int, SentRequest]] = []
        super().__init__(
            spec, requests, [*self._prefill, *self._decode], self._routers[0], overhead_s=overhead_s
        )

    def _next_coming_s(self) -> float:
        sent_s = super()._next_coming_s()
        return min(sent_s, self._moving[0][0]) if self._moving else sent_s

    def _take_next(self, now_s: float) -> bool:
        if self._moving and self._moving[0][0] <= super()._next_coming_s():
            request = heapq.heappop(self._moving)[2]
            request.token_times, request.token_counts = [now_s], [1]
            planned = request.planned
            request.part = replace(
                planned,
                input_tokens=planned.input_tokens + 1,
                output_tokens=planned.output_tokens - 1,
            )
            return self._add(request, self._decode, self._routers[1], now_s)
        return super()._take_next(now_s)

    def _enter(self, request: SentRequest, now_s: float) -> bool:
        request.part = replace(request.planned, output_tokens=1)
        return self._add(request, self._prefill, self._routers[0], now_s)

    def _end_step(self, replica: Replica, now_s: float) -> None:
        in_prefill = any(replica is each for each in self._prefill)
        for request in replica.end_step(now_s):
            if in_prefill and request.planned.output_tokens > 1:
                request.ended_s = request.finish_reason = request.replica = None
                request.token_times, request.token_counts = [], []
                there_s = now_s + self._transfer_s(request.planned.input_tokens)
                heapq.heappush(self._moving, (there_s, request.seq_id, request))
            else:
                self._answered(now_s)


def _replicas(pool: Pool, first: int) -> list[Replica]:
    return [Replica(pool, first + number) for number in range(pool.workers)]
