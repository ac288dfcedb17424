"""Prefill and decode in separate pools, in closed form and simulated with the engine's scheduler.

The closed form is in docs/planner_model.md (Layouts). The wait for P prefill workers is that of P
servers with equal services (Sakasegawa 1977, halved); where they compute prompts no faster than X
requests a second, waiting users are what is left. Prompts that wait together are computed in one
step, up to the step's tokens, as by the scheduler.

A simulated decode worker admits a sequence whose cache has moved as it would a prompt, at the cost
of a row. It streams the prompt's first token too, which so comes when the cache has moved, as from
vLLM and SGLang: in the closed form the transfer counts to TTFT likewise. Each device of a prefill
worker sends one cache at a time; caches that find all of them busy wait in order.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmi_bench.analysis.level import simulator
from lmi_bench.analysis.level.steady_state import SteadyState, bisect
from lmi_bench.core.errors import InputError
from lmi_bench.core.records import LevelRun
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.router import LeastOutstanding, Router
from lmi_bench.engine.scheduling.step_shape import StepShape, StepTime

_HALVINGS = 50
_FULL = 0.999  # of the prefill pool's rate


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """Both pools in steady state.

    rate_per_s  requests answered each second; batch: decoding sequences of each decode worker
    """

    rate_per_s: float
    ttft_s: float
    tpot_s: float
    batch: float

    def e2e_s(self, output_tokens: int) -> float:
        """Send to last token."""
        return self.ttft_s + (output_tokens - 1) * self.tpot_s


@dataclass(frozen=True, slots=True)
class TwoPools:
    """Two pools under equal requests.

    prefill, decode        a worker of each; `decode` has the output's lengths and its slots
    prefill_workers, decode_workers  their numbers
    step_tokens            prompt tokens of a prefill step; at least one prompt runs
    transfer_s             time of a prompt's cache on the link
    overhead_s             time of a request outside the engines
    links                  caches that a prefill worker sends at once
    prompts_per_s          that all prefill workers compute and send
    """

    prefill: SteadyState
    decode: SteadyState
    prefill_workers: int
    decode_workers: int
    step_tokens: int
    transfer_s: float
    overhead_s: float = 0.0
    links: int = 1
    prompts_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        if self.prefill_workers < 1 or self.decode_workers < 1:
            raise InputError(
                f"{self.prefill_workers} prefill and {self.decode_workers} decode workers: each pool needs at least one"
            )
        most = max(1, self.step_tokens // self.prefill.input_tokens)
        counts = {min(most, 1 << n) for n in range(most.bit_length() + 1)}
        step_s, shape = self.prefill.model.step_time_s, self.prefill.prompt_shape
        rates = [count / step_s(shape(count)) for count in counts]
        each = min(max(rates), self.links / self.transfer_s)
        object.__setattr__(self, "prompts_per_s", self.prefill_workers * each)

    def at(self, batch: float) -> PoolPoint:
        """The pools with so many sequences on each decode worker, if prompts keep up."""
        tpot_s = self.decode.decode_step_s(batch)
        decoded = max(1, self.decode.output_tokens - 1)
        rate = self.decode_workers * batch / (decoded * tpot_s)
        load = min(_FULL, rate / self.prompts_per_s)
        servers = self.prefill_workers
        service_s = servers / self.prompts_per_s
        queue_s = service_s * load ** (math.sqrt(2 * (servers + 1)) - 1) / (2 * servers * (1 - load))
        alone_s = self.overhead_s + self.prefill.prompt_step_s + self.transfer_s
        return PoolPoint(rate, alone_s + queue_s, tpot_s, batch)

    @property
    def most(self) -> PoolPoint:
        """The highest rate: every decode slot busy, or the prefill pool."""
        slots, limit = float(self.decode.slots), _FULL * self.prompts_per_s
        full = self.at(slots)
        if full.rate_per_s <= limit:
            return full
        low, _ = bisect(lambda batch: self.at(batch).rate_per_s < limit, 0.0, slots, _HALVINGS)
        return self.at(low)

    def with_users(self, users: int) -> PoolPoint:
        """A closed loop of so many users."""
        top, output = self.most, self.decode.output_tokens

        def fewer(batch: float) -> bool:
            point = self.at(batch)
            return point.rate_per_s * point.e2e_s(output) < users

        if not fewer(top.batch):
            return self.at(bisect(fewer, 0.0, top.batch, _HALVINGS)[0])
        wait_s = users / top.rate_per_s - (output - 1) * top.tpot_s
        return replace(top, ttft_s=wait_s)

    def binding(self, point: PoolPoint) -> str:
        """What takes most of a request's time: the link, decode's limit, or a part of steps."""
        if point.batch >= _FULL * self.decode.slots:
            return self.decode.limiting_part(point.batch)
        prompt_s, decode_s = self.prefill.prompt_step_s, (self.decode.output_tokens - 1) * point.tpot_s
        first_s = point.ttft_s - self.overhead_s
        # prompts queue for the slower of the workers and their links
        for_link = math.isclose(self.prompts_per_s, self.prefill_workers * self.links / self.transfer_s)
        link_s = first_s - prompt_s if for_link else self.transfer_s
        if link_s > max(decode_s, first_s - link_s):
            return "pool_link"
        decodes = decode_s > first_s - link_s
        worker = self.decode if decodes else self.prefill
        shape = worker.decode_shape(point.batch) if decodes else worker.prompt_shape()
        spent_s = worker.model.explain(shape).seconds_by_limit()
        return max(spent_s, key=lambda part: spent_s[part])

    def at_rate(self, rate_per_s: float) -> PoolPoint | None:
        """An open loop; None where the pools cannot keep up."""
        top = self.most
        if rate_per_s >= top.rate_per_s:
            return None
        return self.at(bisect(lambda b: self.at(b).rate_per_s < rate_per_s, 0.0, top.batch, _HALVINGS)[0])


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
                decode_context_tokens=shape.decode_context_tokens + shape.prefill_tokens + shape.prefill_context_tokens,
            )
        )


def simulate_pools(
    spec: LevelSpec,
    requests: simulator.Requests,
    prefill: simulator.Pool,
    decode: simulator.Pool,
    transfer_s: Callable[[int], float],
    *,
    seed: int = 0,
    overhead_s: float = 0.0,
    links: int = 1,
) -> LevelRun:
    """Run one level in predicted time.

    transfer_s  seconds in which the cache of a prompt of so many tokens moves
    links       caches that a prefill worker sends at once
    Other arguments and the records: `simulate_level`.
    """
    # whole prompts are admitted at once: their tokens are already computed
    whole = replace(decode.config, max_rolling_batch_prefill_tokens=decode.config.cache_tokens)
    decode = replace(decode, config=whole, step_time=_Received(decode.step_time))
    pools = _replicas(prefill, 0), _replicas(decode, prefill.workers)
    router, every = _FirstFree([[0.0] * links for _ in pools[0]]), [*pools[0], *pools[1]]
    level = _TwoPools(spec, requests, every, router, overhead_s, *pools, transfer_s)
    level.run(simulator.starts_s(spec, requests, seed, 0.0))
    return level.result()


@dataclass
class _FirstFree(LeastOutstanding):
    """Of prefill workers with equally few requests that whose link is free first."""

    free_s: list[list[float]]  # of each worker's links, as heaps

    def pick(self, outstanding: Sequence[int], prompt: Sequence[int] = ()) -> int:
        return min(range(len(outstanding)), key=lambda n: (outstanding[n], self.free_s[n][0]))


@dataclass(eq=False)
class _TwoPools(simulator.LevelRunner):
    """A level whose requests pass through both pools."""

    router: _FirstFree
    prefill: list[simulator.Replica]
    decode: list[simulator.Replica]
    transfer_s: Callable[[int], float]
    _to_decode: Router = field(init=False, default_factory=LeastOutstanding)
    _moving: list[tuple[float, int, simulator.SentRequest]] = field(init=False, default_factory=list)

    def _next_coming_s(self) -> float:
        sent_s = super()._next_coming_s()
        return min(sent_s, self._moving[0][0]) if self._moving else sent_s

    def _take_next(self, now_s: float) -> bool:
        if self._moving and self._moving[0][0] <= super()._next_coming_s():
            request = heapq.heappop(self._moving)[2]
            request.token_times, request.token_counts = [now_s], [1]
            prompt, output = request.planned.input_tokens + 1, request.planned.output_tokens - 1
            request.part = replace(request.planned, input_tokens=prompt, output_tokens=output)
            return self._add(request, self.decode, self._to_decode, now_s)
        return super()._take_next(now_s)

    def _enter(self, request: simulator.SentRequest, now_s: float) -> bool:
        request.part = replace(request.planned, output_tokens=1)
        return self._add(request, self.prefill, self.router, now_s)

    def _end_step(self, replica: simulator.Replica, now_s: float) -> None:
        worker = next((n for n, each in enumerate(self.prefill) if each is replica), None)
        for request in replica.end_step(now_s):
            if worker is not None and request.planned.output_tokens > 1:
                request.ended_s = request.finish_reason = request.replica = None
                request.token_times, request.token_counts = [], []
                free_s = self.router.free_s[worker]
                there_s = max(now_s, free_s[0]) + self.transfer_s(request.planned.input_tokens)
                heapq.heapreplace(free_s, there_s)
                heapq.heappush(self._moving, (there_s, request.seq_id, request))
            else:
                self._answered(now_s)


def _replicas(pool: simulator.Pool, first: int) -> list[simulator.Replica]:
    return [simulator.Replica(pool, first + number) for number in range(pool.workers)]
