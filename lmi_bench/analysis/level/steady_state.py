"""Closed form of one copy of a model in steady state, to screen all candidates.

With B sequences always running and their starts spread evenly, each answer takes one cycle:

    cycle(B) = (output - 1) * decode_step(B) + B * prompt_step;  rate(B) = B / cycle(B)

because B prompts, its own included, pause a sequence; those that come in one decode step share its
prompt step, and with chunked prefill join it. Where prompts join only every J decode steps (TGI), k
fit one step, so at most k * (output - 1) / J run however large the cache is. A prompt that comes
within J steps of the last join waits for their end: a share r / (1 + r) of the prompts, with r
arrivals in that time. Under random arrivals the batch varies like a Poisson count, so a quantile q
of a latency is that at B + z(q) * sqrt(B); the queue for a prompt step is that of k servers with
equal services (Sakasegawa 1977, halved). Accurate to about 10 %; finalists are simulated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from lmi_bench.analysis.model.speculation import PricedSteps
from lmi_bench.analysis.model.step_time import Binding
from lmi_bench.core.level import QUANTILES
from lmi_bench.engine.scheduling.step_shape import StepShape

LATENCY_LOAD_LIMIT = 0.8
"""Share of the predicted capacity beyond which an open loop's latency is withheld: a capacity error
of 10 % is a latency error of 100 % there."""
_HALVINGS = 40


def bisect(rises: Callable[[float], bool], low: float, high: float, steps: int) -> tuple[float, float]:
    """The interval after `steps` halvings; the middle becomes its lower end if `rises(middle)`."""
    for _ in range(steps):
        middle = (low + high) / 2
        if rises(middle):
            low = middle
        else:
            high = middle
    return low, high


@dataclass(frozen=True, slots=True)
class SteadyState:
    """A copy under equal requests.

    slots          sequences that can run together; batch_limit: the engine's own limit on them
    open_loop      random arrivals (quantiles spread) or waiting users (the batch is fixed)
    cached_tokens  tokens of each prompt in the prefix cache; overhead_s: time outside the engine
    join_steps     decode steps between two joins of waiting prompts, of which step_tokens tokens
                   fit one step (0: they join at once); both limit the slots
    chunked        prompts join decode steps
    prompt_step_s  time of the step that computes one prompt, with its new_tokens
    """

    model: PricedSteps
    input_tokens: int
    output_tokens: int
    slots: int
    open_loop: bool
    batch_limit: int | None = None
    cached_tokens: int = 0
    overhead_s: float = 0.0
    join_steps: int = 0
    step_tokens: int = 0
    chunked: bool = False
    prompt_step_s: float = field(init=False)
    new_tokens: int = field(init=False)
    _decode_s: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict)
    _prompts_s: dict[tuple[int, int], float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "new_tokens", self.input_tokens - self.cached_tokens)
        object.__setattr__(self, "prompt_step_s", self.model.step_time_s(self.prompt_shape()))
        if self.join_steps:
            rounds = max(1.0, (self.output_tokens - 1) / self.join_steps)
            most = math.floor(self._joiners * rounds)
            limit = most if self.batch_limit is None else min(most, self.batch_limit)
            object.__setattr__(self, "batch_limit", limit)
            object.__setattr__(self, "slots", min(self.slots, limit))

    @property
    def _joiners(self) -> int:
        """Most prompts that join together."""
        return max(1, self.step_tokens // self.new_tokens)

    def prompt_shape(self, count: int = 1) -> StepShape:
        """The step that computes so many prompts."""
        found, new = self.cached_tokens, self.new_tokens
        return StepShape(
            prefill_sequences=count,
            prefill_tokens=count * new,
            prefill_context_pairs=count * (new * found + new * (new + 1) // 2),
            prefill_context_tokens=count * found,
        )

    def _each_prompt_s(self, batch: float) -> float:
        """Seconds that a prompt adds to the steps of those that are computed together."""
        joining = batch * max(1, self.join_steps) / max(1, self.output_tokens - 1)
        key = max(1, min(round(joining), self._joiners)), max(1, round(batch)) * self.chunked
        if key not in self._prompts_s:
            count, shape = key[0], self.prompt_shape(key[0])
            decode = self.decode_shape(batch)
            if self.chunked:  # they join the decode step, which has read the weights already
                fields = ("decode_sequences", "decode_tokens", "decode_context_tokens")
                shape = replace(shape, **{name: getattr(decode, name) for name in fields})
            all_s = self.model.step_time_s(shape)
            all_s -= self._whole_step_s(decode.decode_sequences) * self.chunked
            self._prompts_s[key] = all_s / count
        return self._prompts_s[key]

    def decode_shape(self, batch: float) -> StepShape:
        """The decode step of a batch whose sequences are half through their output on average."""
        rows = max(1, round(batch))
        context = self.input_tokens + self.output_tokens / 2
        return StepShape.decoding(rows, round(rows * context))

    def decode_step_s(self, batch: float) -> float:
        """Seconds of a decode step, interpolated between whole batches."""
        low = max(1, math.floor(batch))
        low_s = self._whole_step_s(low)
        if batch <= low:
            return low_s
        return low_s + (self._whole_step_s(low + 1) - low_s) * (batch - low)

    def _whole_step_s(self, batch: int) -> float:
        """Seconds of a whole batch's decode step, cached."""
        if batch not in self._decode_s:
            self._decode_s[batch] = self.model.step_time_s(self.decode_shape(batch))
        return self._decode_s[batch]

    def cycle_s(self, batch: float) -> float:
        """Seconds from a sequence's start to its end among `batch` running ones."""
        decode_s = (self.output_tokens - 1) * self.decode_step_s(batch)
        return decode_s + max(1.0, batch) * self._each_prompt_s(batch)

    def rate_per_s(self, batch: float) -> float:
        """Completed requests each second of so many running sequences, or waiting users."""
        if self.open_loop:
            return batch / self.cycle_s(batch)
        window_s, share = self._join_wait(batch)
        return batch / (self.cycle_s(batch) + self.overhead_s + share * window_s / 2)

    def _join_wait(self, batch: float) -> tuple[float, float]:
        """Seconds after a join in which no other prompt joins, and the share that comes then."""
        if not self.join_steps or batch < 2:
            return 0.0, 0.0
        window_s = self.join_steps * self.decode_step_s(min(batch, self.slots))
        coming = window_s * batch / self.cycle_s(batch)
        return window_s, coming / (1 + coming)

    @property
    def saturated_rate_per_s(self) -> float:
        """Requests each second with every slot busy."""
        return self.slots / self.cycle_s(self.slots)

    def batch_at(self, rate_per_s: float) -> float:
        """Mean running sequences at that arrival rate; all slots at or above saturation."""
        if rate_per_s >= self.saturated_rate_per_s:
            return float(self.slots)
        slots = float(self.slots)
        return bisect(lambda batch: self.rate_per_s(batch) < rate_per_s, 0.0, slots, _HALVINGS)[1]

    def latency_s(self, metric: str, statistic: str, batch: float) -> float:
        """One statistic of a latency metric with `batch` sequences running on average.

        metric     ttft, itl, tpot, e2e or latency_per_token; statistic: mean, p50 ... p99
        """
        if metric in ("itl", "tpot") and self.output_tokens == 1:
            return 0.0  # there is none, so it misses no limit
        quantile = QUANTILES.get(statistic, 0.5)
        busy = batch
        if self.open_loop:
            busy += max(0.0, NormalDist().inv_cdf(quantile)) * math.sqrt(batch)
        busy = min(busy, self.slots)
        prompt_s = self.prompt_step_s
        if metric == "ttft":
            return self._ttft_s(busy, batch, quantile)
        if metric == "itl" and statistic != "mean":
            prompts = self._prompts_between_tokens(busy / max(1, self.output_tokens - 1), quantile)
            return self.decode_step_s(busy) + prompts * self._each_prompt_s(busy)
        cycle_s = self.cycle_s(busy)
        if metric in ("itl", "tpot"):
            return (cycle_s - prompt_s) / max(1, self.output_tokens - 1)
        e2e_s = cycle_s - prompt_s + self._ttft_s(busy, batch, quantile)
        return e2e_s if metric == "e2e" else e2e_s / self.output_tokens

    def _prompts_between_tokens(self, mean: float, quantile: float) -> int:
        """Quantile of the number of prompts computed between two tokens of a sequence.

        A Poisson count under random arrivals; with even starts a whole number beside the mean.
        """
        if not self.open_loop:
            return math.floor(mean) + (1 if quantile > 1 - mean % 1 else 0)
        if mean > 700:  # nearly a normal distribution, and exp(-mean) is no number soon
            return round(mean + NormalDist().inv_cdf(quantile) * math.sqrt(mean))
        count, term = 0, math.exp(-mean)
        below = term
        while below < quantile:
            count += 1
            term *= mean / count
            below += term
        return count

    def _ttft_s(self, busy: float, batch: float, quantile: float) -> float:
        """The time outside, the present step, the prompts ahead, and the prompt itself."""
        prompt_s = self.prompt_step_s
        alone_s = self.overhead_s + prompt_s
        if batch <= 1 and not self.open_loop:
            return alone_s
        each_s, most = self._each_prompt_s(busy), self._joiners
        step_s = self.decode_step_s(busy) * min(1.0, batch) * self.chunked
        served_s = each_s + step_s / most
        load = min(0.95, self.rate_per_s(batch) * served_s)
        mean_wait_s = served_s / 2 * math.pow(load, math.sqrt(2 * (most + 1)) - 1) / (1 - load)
        window_s, share = self._join_wait(batch)
        join_s = window_s * max(0.0, 1 - (1 - quantile) / share) if share else 0.0
        join_s = max(join_s, quantile * self.decode_step_s(busy))
        if self.chunked:  # its own step
            alone_s = self.overhead_s + max(prompt_s, step_s + each_s)
            beside = self._prompts_between_tokens(batch / max(1, self.output_tokens - 1), quantile)
            join_s += min(beside, most) * each_s
        return alone_s + join_s - math.log(1 - quantile) * mean_wait_s

    def limiting_part(self, batch: float) -> str:
        """What limits the rate: kv_memory, batch_limit, or the step's part that binds."""
        if batch >= 0.99 * self.slots:
            roomier = self.slots * 1.25
            if self.rate_per_s(roomier) > 1.05 * self.rate_per_s(self.slots):
                return "batch_limit" if self.slots == self.batch_limit else "kv_memory"
        return self.binding(batch)

    def binding(self, batch: float) -> Binding:
        """The part of the steps that takes most of the time of a request and its prompt."""
        parts = ((self.output_tokens - 1, self.decode_shape(batch)), (max(1.0, batch), self.prompt_shape()))
        spent_s = dict[Binding, float]()
        for steps, shape in parts:
            for part, seconds in self.model.explain(shape).seconds_by_limit().items():
                spent_s[part] = spent_s.get(part, 0.0) + steps * seconds
        return max(spent_s, key=lambda part: spent_s[part])
