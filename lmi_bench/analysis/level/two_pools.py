"""Prefill and decode in separate pools, in closed form: docs/planner_model.md (Layouts).

The wait for P prefill workers is that of P servers with equal services (Sakasegawa 1977, halved);
where they compute prompts no faster than X requests a second, waiting users are what is left.
Prompts that wait together are computed in one step, up to the step's tokens, as by the scheduler.
"""

import math
from dataclasses import dataclass, field

from lmi_bench.analysis.level.steady_state import SteadyState, bisect
from lmi_bench.core.errors import InputError

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
    prefill_load: float

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
    """

    prefill: SteadyState
    decode: SteadyState
    prefill_workers: int
    decode_workers: int
    step_tokens: int
    transfer_s: float
    overhead_s: float = 0.0
    prompts_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        if self.prefill_workers < 1 or self.decode_workers < 1:
            raise InputError(
                f"{self.prefill_workers} prefill and {self.decode_workers} decode workers: each "
                "pool needs at least one"
            )
        most = max(1, self.step_tokens // self.prefill.input_tokens)
        counts = {min(most, 1 << n) for n in range(most.bit_length() + 1)}
        step_s, shape = self.prefill.model.step_time_s, self.prefill.prompt_shape
        rates = [count / step_s(shape(count)) for count in counts]
        object.__setattr__(self, "prompts_per_s", self.prefill_workers * max(rates))

    def at(self, batch: float) -> PoolPoint:
        """The pools with so many sequences on each decode worker, if prompts keep up."""
        tpot_s = self.decode.decode_step_s(batch)
        decoded = max(1, self.decode.output_tokens - 1)
        rate = self.decode_workers * batch / (decoded * tpot_s)
        load = min(_FULL, rate / self.prompts_per_s)
        servers = self.prefill_workers
        service_s = servers / self.prompts_per_s
        queue_s = (
            service_s * load ** (math.sqrt(2 * (servers + 1)) - 1) / (2 * servers * (1 - load))
        )
        alone_s = self.overhead_s + self.prefill.prompt_step_s + self.transfer_s
        return PoolPoint(rate, alone_s + queue_s, tpot_s, batch, load)

    @property
    def most(self) -> PoolPoint:
        """The highest rate: every decode slot busy, or the prefill pool."""
        slots = float(self.decode.slots)
        full = self.at(slots)
        if full.rate_per_s <= _FULL * self.prompts_per_s:
            return full
        limit = _FULL * self.prompts_per_s
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
        return PoolPoint(top.rate_per_s, wait_s, top.tpot_s, top.batch, top.prefill_load)

    def at_rate(self, rate_per_s: float) -> PoolPoint | None:
        """An open loop; None where the pools cannot keep up."""
        top = self.most
        if rate_per_s >= top.rate_per_s:
            return None
        return self.at(
            bisect(lambda b: self.at(b).rate_per_s < rate_per_s, 0.0, top.batch, _HALVINGS)[0]
        )
