"""State shared by all routes: engine, tokenizer, model name, limits, and request statistics.

A request is counted when it ends, for any reason. Times are measured in the engine, without the
network.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, sub
from typing import Final
from urllib.parse import quote

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.async_engine import Generation
from lmi_bench.engine.replicas import ServingEngine
from lmi_bench.engine.server.answer import Answer, Prompt, openai_finish_reason
from lmi_bench.engine.server.codec import Codec
from lmi_bench.engine.server.feed import Outbox
from lmi_bench.models.hf_config import read_table

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# unlike vLLM's: 1-2-5 steps from 1 ms to 500 s; powers of two up to 128 Ki tokens
SECONDS_BOUNDS = tuple(float(f"{step}e{power}") for power in range(-3, 3) for step in (1, 2, 5))
TOKENS_BOUNDS = tuple(float(2**power) for power in range(18))


class Histogram:
    """Counts observations by upper bound; the last bucket counts those above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, *values: float) -> None:
        """Count values; bounds are inclusive, as in Prometheus."""
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += sum(values)

    def samples(self, name: str, label: str) -> Iterator[str]:
        """The sample lines: cumulative buckets, sum and count."""
        total = 0
        bounds = [f"{bound:g}" for bound in self._bounds] + ["+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {total}'
        yield f"{name}_sum{{{label}}} {self._sum:.10g}"
        yield f"{name}_count{{{label}}} {total}"


METRICS: Final = read_table("metrics.csv", __package__)
"""vLLM's names, with their help: gauges and counters of this field of EngineStats, histograms of a
request's time since another one."""

_TIMES: Final = [(row["name"], row["since"], row["counts"]) for row in METRICS if row["since"]]


class RequestTotals:
    """Counts since the server started. `finished` has vLLM's names of the reasons."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.histograms = {
            row["name"]: Histogram(SECONDS_BOUNDS if row["name"].endswith("_seconds") else TOKENS_BOUNDS)
            for row in METRICS
            if row["kind"] == "histogram"
        }

    def add(self, answer: Answer) -> None:
        """Add a finished request; one that never ran has only an end-to-end latency."""
        generation, seen = answer.generation, self.histograms
        self.finished[openai_finish_reason(answer.finish_reason)] += 1
        tokens = sum(len(event.token_ids) for event in generation.events)
        seen["request_prompt_tokens"].observe(len(answer.prompt.token_ids))
        seen["request_generation_tokens"].observe(tokens)
        for name, start, end in _TIMES:
            start_s, end_s = getattr(generation, start), getattr(generation, end)
            if start_s is not None and end_s is not None:
                seen[name].observe(end_s - start_s)
        times_s = [event.time_s for event in generation.events]
        seen["inter_token_latency_seconds"].observe(*map(sub, times_s[1:], times_s))


CLIENT: ContextVar[str | None] = ContextVar("client", default=None)
"""The client of the request that a task answers, if clients take turns."""

LOGGER = logging.getLogger(__name__)
MAX_STOP_STRINGS = 16
_MAX_NAMES_LOGGED = 100
_MAX_HEADER_CHARS = 1000
_MAX_ENCODED = 2  # long texts at once: each takes many times its own memory, its thread keeps it
_LONG_TEXT_CHARS = 8192  # encoding more would block the loop for milliseconds


@dataclass(slots=True)
class ServerState:
    """One served model.

    max_model_len    maximum tokens (prompt + output) per request
    vocab_size       all token ids of the model are below it; may differ from the tokenizer's
    created          Unix time of the server's start, for `/v1/models`
    totals           statistics of finished requests
    """

    engine: ServingEngine
    codec: Codec
    model_name: str
    max_model_len: int
    vocab_size: int
    created: int = field(default_factory=lambda: int(time.time()))
    totals: RequestTotals = field(default_factory=RequestTotals)
    outbox: Outbox = field(default_factory=Outbox)
    _encoders: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_MAX_ENCODED))
    _names_logged: set[str] = field(default_factory=set)

    async def encode(
        self, text: str, truncate: int | None = None, *, add_special_tokens: bool = True, limited: bool = True
    ) -> list[int]:
        """The prompt's token ids, only the last `truncate` if given; a long text is encoded in a
        thread.

        limited  raise CapacityError if they exceed the model's context, without a truncation
        """
        limited = limited and truncate is None
        longest, limit = self.codec.longest_token_bytes, self.max_model_len
        too_long = (
            f"this model's maximum context length is {limit} tokens, and the prompt, of "
            f"{len(text)} characters, has more: shorten it"
        )
        if limited and longest is not None and len(text) > limit * longest:
            raise CapacityError(too_long)
        most = limit if limited else None
        encode = partial(self.codec.encode, text, add_special_tokens=add_special_tokens, most=most)
        try:
            if len(text) > _LONG_TEXT_CHARS:
                token_ids = await asyncio.get_running_loop().run_in_executor(self._encoders, encode)
            else:
                token_ids = encode()
        except CapacityError:
            raise CapacityError(too_long) from None
        return token_ids if truncate is None else token_ids[-truncate:]

    def submit(self, prompt: Prompt, *, beside: Generation | None = None) -> Answer:
        """Start to generate; the caller must close the answer.

        beside  a request on whose replica this one shares the computed prompt
        Raises InputError or CapacityError (client errors), OverloadedError, EngineError.
        """
        num_prompt, num_new = len(prompt.token_ids), prompt.sampling.max_new_tokens
        if num_prompt == 0:
            raise InputError("the prompt has no tokens: send at least one")
        biased = [token_id for token_id, _ in prompt.sampling.logit_bias]
        highest = max(max(prompt.token_ids), *biased, 0)
        if highest >= self.vocab_size:  # it would crash the engine's step
            raise InputError(f"token id {highest} is not in the vocabulary: ids go from 0 to {self.vocab_size - 1}")
        if num_prompt + num_new > self.max_model_len:
            raise CapacityError(
                f"this model's maximum context length is {self.max_model_len} tokens, but "
                f"{num_prompt + num_new} were requested ({num_prompt} in the prompt, {num_new} "
                "in the output): shorten the prompt or request fewer tokens"
            )
        generation = self.engine.submit(prompt.token_ids, prompt.sampling, beside=beside, client=CLIENT.get())
        shown = self.codec.detokenizer(prompt.token_ids, special=prompt.shows_special)
        return Answer(generation, prompt, shown)

    def ignored_header(self, names: list[str]) -> dict[str, str]:
        """A header that lists fields unknown to this server; logs each name once."""
        if not names:
            return {}
        shown = [quote(name[:100], safe="") for name in names]  # a key may contain anything
        for name in shown:
            if name not in self._names_logged and len(self._names_logged) < _MAX_NAMES_LOGGED:
                self._names_logged.add(name)
                LOGGER.warning("ignored an unknown request parameter: %s", name)
        return {"X-Ignored-Parameters": ", ".join(shown)[:_MAX_HEADER_CHARS]}


def render_metrics(state: ServerState) -> str:
    """`/metrics` for Prometheus under vLLM's names; `kv_cache_usage_perc` is 0 to 1, as there."""
    label = f'model_name="{_escape(state.model_name)}",engine="0"'
    stats, totals = state.engine.stats(), state.totals
    lines: list[str] = []
    for row in METRICS:
        name = f"vllm:{row['name']}"
        lines += [f"# HELP {name} {row['help']}", f"# TYPE {name} {row['kind']}"]
        if row["kind"] == "histogram":
            lines += totals.histograms[row["name"]].samples(name, label)
        elif row["counts"]:
            lines.append(f"{name}{{{label}}} {attrgetter(row['counts'])(stats):.10g}")
        else:
            for reason, count in sorted(totals.finished.items()):
                lines.append(f'{name}{{{label},finished_reason="{_escape(reason)}"}} {count}')
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    """A label value, escaped for the exposition format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
