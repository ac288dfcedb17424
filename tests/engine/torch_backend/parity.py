"""Runs requests through the whole engine and holds its greedy tokens against transformers'.

Compared exactly, up to the first position where the reference's two best logits lie closer than
1e-4: float32 sums in another order may then choose either. Such positions may end at most 1 % of
the requests of a test, or one of them where it has fewer than 100.
"""

from __future__ import annotations

import asyncio
import random

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.scheduling.stats import SchedulerStats
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings

NEAR_TIE = 1e-4


async def generate(
    folder, requests, *, block_size=8, load=TorchExecutor.load, quantize=NOT_QUANTIZED, drafter=None, **settings
) -> tuple[list, SchedulerStats]:
    """Run (prompt, number of tokens, delay in steps) requests through the engine."""
    config = SchedulerConfig(**{"num_blocks": 200, "max_model_len": 256, "block_size": block_size} | settings)
    executor = load(
        folder,
        LoadSettings(
            dtype="float32", num_blocks=config.num_blocks, block_size=block_size, threads=1, quantize=quantize
        ),
    )
    scheduler = Scheduler(config, drafter=drafter)
    async with AsyncEngine(scheduler, executor) as engine:
        running = []
        for prompt, num_tokens, delay_s in requests:
            await asyncio.sleep(delay_s)
            sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
            running.append(engine.submit(prompt, sampling))
        for generation in running:
            await generation.wait()
        scheduler.audit()
        tokens = [[t for event in g.events for t in event.token_ids] for g in running]
        return tokens, engine.stats().done


def ended_by_near_tie(reference, tokens) -> bool:
    """Hold `tokens` against the reference; True where a near tie ended the comparison."""
    assert len(tokens) == len(reference.token_ids)
    for position, gap in enumerate(reference.gaps):
        if gap < NEAR_TIE:
            return True
        assert tokens[position] == reference.token_ids[position], f"token {position}"
    return False


def random_requests(seed, count, *, longest_prompt=60, longest_output=24, delay_s=0.0):
    chance = random.Random(seed)
    return [
        (
            [chance.randrange(3, 211) for _ in range(chance.randint(1, longest_prompt))],
            chance.randint(1, longest_output),
            chance.random() * delay_s,
        )
        for _ in range(count)
    ]


def assert_equal_but_for_near_ties(model, requests, outputs):
    ties = [
        ended_by_near_tie(model.greedy(prompt, num_tokens), tokens)
        for (prompt, num_tokens, _), tokens in zip(requests, outputs, strict=True)
    ]
    assert sum(ties) <= max(1, 0.01 * len(ties))


def assert_any_mix_gives_the_same_tokens(
    seed, model, requests, *, block_sizes, fewest_cache_tokens, spare_blocks=0, load=TorchExecutor.load, **settings
):
    """Hold requests that arrive one after the other under settings drawn by `seed` against the
    reference."""
    chance = random.Random(seed)
    block_size = chance.choice(block_sizes)
    outputs, _ = asyncio.run(
        generate(
            model.folder,
            requests,
            load=load,
            block_size=block_size,
            num_blocks=-(-chance.randint(fewest_cache_tokens, 300) // block_size) + spare_blocks,
            policy=chance.choice(list(BatchingPolicy)),
            kv_layout=chance.choice(list(KvLayout)),
            batch_size=chance.randint(1, 5),
            max_batch_delay_s=0.002,
            max_rolling_batch_size=chance.randint(1, 12),
            max_rolling_batch_prefill_tokens=chance.randint(40, 120),
            chunked_prefill=chance.random() < 0.5,
            prefix_caching=chance.random() < 0.5,
            **settings,
        )
    )
    assert_equal_but_for_near_ties(model, requests, outputs)
