"""Prefix caching on the real executor: the same tokens with fewer of them computed."""

from __future__ import annotations

import asyncio
import random

import pytest

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings


def generate(folder, requests, *, drafts=False, **settings):
    config = SchedulerConfig(**{"num_blocks": 120, "block_size": 4} | settings)
    options = LoadSettings(dtype="float32", num_blocks=config.num_blocks, block_size=4, threads=1, sampling_seed=1)

    async def main():
        executor = target = TorchExecutor.load(folder, options)
        if drafts:
            draft = TorchExecutor.load(folder, options, beside=target)
            executor = DraftingExecutor(target, draft)
        scheduler = Scheduler(config, drafter=ExecutorDrafter(3) if drafts else None)
        async with AsyncEngine(scheduler, executor) as engine:
            running = []
            for number, (prompt, sampling) in enumerate(requests):
                running.append(engine.submit(prompt, sampling))
                if number % 4 == 0:
                    await running[-1].wait()  # so that some find a finished prompt, some a running
            for generation in running:
                await generation.wait()
            scheduler.audit()
            tokens = [[t for event in g.events for t in event.token_ids] for g in running]
            return tokens, engine.stats().done

    return asyncio.run(main())


def chat_requests(**sampling):
    """Prompts that begin alike and go on apart."""
    chance = random.Random(2)
    system = [chance.randrange(3, 211) for _ in range(21)]
    return [
        (
            system[: chance.choice([21, 21, 13])] + [chance.randrange(3, 211) for _ in range(chance.randint(1, 9))],
            SamplingParams(max_new_tokens=chance.randint(2, 12), ignore_eos=True, **sampling),
        )
        for _ in range(14)
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"chunked_prefill": True, "max_rolling_batch_prefill_tokens": 7}, {"num_blocks": 16}, {"drafts": True}],
    ids=["plain", "chunked prefill", "little memory", "drafts"],
)
def test_shared_blocks_change_no_token(llama, settings):
    requests = chat_requests()
    expected, plain = generate(llama.folder, requests)
    tokens, stats = generate(llama.folder, requests, prefix_caching=True, **settings)
    assert tokens == expected
    assert stats.prefix_hit_tokens > 0
    if settings == {}:
        assert stats.prompt_tokens == plain.prompt_tokens - stats.prefix_hit_tokens


def test_a_repetition_penalty_sees_the_tokens_that_were_not_computed(llama):
    """Under a penalty of 1000 a token that is forgotten would be repeated."""
    requests = chat_requests(repetition_penalty=1000.0)
    expected, _ = generate(llama.folder, requests)
    tokens, stats = generate(llama.folder, requests, prefix_caching=True)
    assert tokens == expected
    assert stats.prefix_hit_tokens > 100
