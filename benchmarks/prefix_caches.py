"""Prefix caches: simulated hit rates of recorded traces, and the bundled engine against simulation.

    python benchmarks/prefix_caches.py conversation_trace.jsonl synthetic_trace.jsonl

The traces are Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache 2.0).

First table: the simulated scheduler with the engine's prefix cache against a least recently used
cache over the hash ids alone, written here, for the first `--requests` of each trace. The LRU cache
knows no steps, running sequences or preemptions.

Second table: requests of the last trace whose first block comes ten times or more, at a sixteenth
of their lengths (blocks of 32 tokens), on the bundled engine with its real prefix cache, in passes
of other requests each. Recorded times of steps, fitted by least squares to their shapes, are those
of the simulation: those of the same pass, and those of the pass before, which a machine with other
work on it may have run at another speed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import nnls

from lmi_bench.analysis.fit.forecast import hit_share
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.load import Load
from lmi_bench.core.scenario_sections import EngineSection
from lmi_bench.core.traces import Trace, read_trace
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.loadgen.prompts.prompts import TokenIds, TracePrompts, distinct_ids
from lmi_bench.loadgen.run.in_process_target import InProcessTarget
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.targets.bundled import open_torch_engine

BLOCK = 16
SHORTER = 16
OFTEN = 10
CACHES = (50_000, 500_000, 5_000_000)


class Quick:
    """Steps short enough that few sequences run at once."""

    def step_time_s(self, shape: Any) -> float:
        return 1e-3 + 1e-6 * float(shape.prefill_tokens)


def replayed(trace: Trace, capacity: int) -> float:
    """Share of prompt tokens in an LRU cache of so many blocks; answers take blocks, too."""
    cache: OrderedDict[int, None] = OrderedDict()
    names: dict[tuple[int, int, int], int] = {}
    hit = tokens = answers = 0
    for each in trace.requests:
        chain, before = [], -1
        for place in range(each.input_tokens // BLOCK):
            block, offset = divmod(place * BLOCK, trace.block_tokens)
            key = before, each.hash_ids[block], offset
            before = names.setdefault(key, len(names))
            chain.append(before)
        found, most = 0, (each.input_tokens - 1) // BLOCK
        while found < most and chain[found] in cache:
            found += 1
        hit, tokens = hit + found * BLOCK, tokens + each.input_tokens
        more = (each.input_tokens + each.output_tokens - 1) // BLOCK - len(chain)
        chain += range(-answers - more, -answers)
        answers += more
        for name in reversed(chain):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit / tokens


def simulated(trace: Trace, capacity: int) -> float:
    """The same of the engine's scheduler in predicted time."""
    prompts = TracePrompts(trace, distinct_ids, seed=0)
    load = Load(rate_per_s=trace.rate_per_s, arrivals="trace")
    spec = LevelSpec(0, load, num_requests=len(trace.requests))
    longest = max(each.input_tokens + each.output_tokens for each in trace.requests)
    config = SchedulerConfig(
        num_blocks=max(capacity, longest // BLOCK + 1),
        max_model_len=longest + 1,
        max_rolling_batch_size=256,
        max_rolling_batch_prefill_tokens=8192,
        chunked_prefill=True,
        prefix_caching=True,
    )
    run = simulate_level(spec, lambda n: prompts.request(spec, n), config, Quick())
    return hit_share(run.records).value


def print_hits(paths: list[Path], requests: int) -> None:
    print("| trace | requests | cache, tokens | LRU over ids | simulated | difference, points |")
    print("|---|---|---|---|---|---|")
    for path in paths:
        whole = read_trace(path)
        trace = replace(whole, requests=whole.requests[:requests])
        for tokens in CACHES:
            one, other = replayed(trace, tokens // BLOCK), simulated(trace, tokens // BLOCK)
            print(
                f"| {path.stem} | {len(trace.requests):,} | {tokens:,} | {one:.2%} | {other:.2%} "
                f"| {100 * (other - one):+.2f} |",
                flush=True,
            )


@dataclass
class Recording:
    """An executor whose steps are timed, from the end of the step before if it was busy."""

    executor: Any
    rows: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ended: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    async def execute(self, batch: Any) -> Any:
        began = time.perf_counter()
        outputs = await self.executor.execute(batch)
        ended = time.perf_counter()
        self.rows.append(features(batch.shape))
        busy = batch.shape.decode_sequences or began - self.ended < 2e-3
        self.seconds.append(ended - (self.ended if busy and self.ended else began))
        self.ended = ended
        return outputs


def features(shape: Any) -> list[float]:
    return [
        1.0,
        shape.decode_sequences,
        shape.decode_context_tokens,
        shape.prefill_sequences,
        shape.prefill_tokens,
        shape.prefill_context_pairs,
    ]


class Fitted:
    """Recorded step times, by their shapes, with their mean: other work makes some steps longer."""

    def __init__(self, recording: Recording) -> None:
        rows, seconds = np.array(recording.rows), np.array(recording.seconds)
        scale = rows.max(axis=0) + (rows.max(axis=0) == 0)
        costs, _ = nnls(rows / scale, seconds)
        self._costs = costs / scale

    def step_time_s(self, shape: Any) -> float:
        return float(self._costs @ features(shape))


def measured(parts: Any, spec: LevelSpec, prompts: TracePrompts) -> tuple[Any, Recording]:
    """One pass of the real engine, and its steps."""
    runs: list[Any] = []
    recording = Recording(parts.executors[0])

    async def main() -> None:
        engine = AsyncEngine(Scheduler(parts.config), recording)
        recording.executor.close, closes = _nothing, recording.executor.close
        async with engine:
            await run_sweep(
                [spec],
                InProcessTarget(engine),
                None,
                prompts=prompts,
                summarise=summarise_level,
                on_level=lambda run, _line: runs.append(run),
            )
        recording.executor.close = closes

    asyncio.run(main())
    return runs[0], recording


async def _nothing() -> None:
    """The executor is used again."""


def short(trace: Trace, first: int, count: int) -> Trace:
    """Some requests at a sixteenth of their lengths, from time 0; of blocks that come often."""
    seen = Counter(each.hash_ids[0] for each in trace.requests)
    often = [each for each in trace.requests if seen[each.hash_ids[0]] >= OFTEN]
    chosen = often[first : first + count]
    requests = tuple(
        replace(
            each,
            at_s=each.at_s - chosen[0].at_s,
            input_tokens=max(1, each.input_tokens // SHORTER),
            output_tokens=max(1, each.output_tokens // SHORTER),
        )
        for each in chosen
        if each.input_tokens + each.output_tokens < 1900 * SHORTER
    )
    return Trace(requests, trace.block_tokens // SHORTER)


def print_engine(path: Path, passes: int, requests: int, rate_per_s: float) -> None:
    settings = EngineSection.model_validate({"prefix_caching": True})
    parts = open_torch_engine("demo-15m", settings)
    trace = read_trace(path)
    ids = TokenIds(parts.tokenizer.vocab_size, first_id=300)
    load = Load(rate_per_s=rate_per_s, arrivals="trace")
    print("| pass | hits | simulated | TTFT mean, ms | own steps | error | steps before | error |")
    print("|---|---|---|---|---|---|---|---|")
    before: Fitted | None = None
    errors: dict[str, list[float]] = {"own": [], "before": []}
    for number in range(passes + 1):
        part = short(trace, number * requests, requests)
        prompts = TracePrompts(part, ids, seed=number)
        spec = LevelSpec(0, load, num_requests=len(part.requests))
        run, recording = measured(parts, spec, prompts)
        own, real = Fitted(recording), ttft_ms(run)
        if before is not None:
            cells = []
            for name, steps in (("own", own), ("before", before)):
                told = simulate_level(spec, partial(prompts.request, spec), parts.config, steps)
                errors[name].append(ttft_ms(told) / real - 1)
                cells += [f"{ttft_ms(told):.1f}", f"{errors[name][-1]:+.1%}"]
            hits = hit_share(told.records).value
            found = (run.engine or {}).get("prefix_hit_frac") or 0.0
            print(f"| {number} | {found:.1%} | {hits:.1%} | {real:.1f} | {' | '.join(cells)} |")
        before = own
    for name, found_errors in errors.items():
        mean, size = fmean(found_errors), fmean(map(abs, found_errors))
        print(f"\n{name} steps: mean error {mean:+.1%}, mean absolute {size:.1%}")


def ttft_ms(run: Any) -> float:
    """Mean time to first token of a level."""
    return 1e3 * fmean(each.token_times_s[0] - each.due_s for each in run.records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--pass-requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--engine-only", action="store_true")
    given = parser.parse_args()
    if not given.engine_only:
        print_hits(given.traces, given.requests)
    print()
    print_engine(given.traces[-1], given.passes, given.pass_requests, given.rate)


if __name__ == "__main__":
    main()
