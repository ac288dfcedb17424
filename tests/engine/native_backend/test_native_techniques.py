"""Speculation, prefix caching and both KV layouts over the native step: no token changes."""

from __future__ import annotations

import asyncio
import random

import pytest

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.native_backend.executor import NativeExecutor
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter, NgramDrafter
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from tests.engine.torch_backend.parity import assert_equal_but_for_near_ties, random_requests


def generate(compiled, folder, requests, *, draft=None, ngram=False, **settings):
    """Tokens of each (prompt, number of tokens, delay), and the engine's counts. Every fourth
    request is awaited before the next: some find a prompt that is done, some one at work."""
    config = SchedulerConfig(**{"num_blocks": 60, "block_size": 16, "max_model_len": 128} | settings)
    options = LoadSettings(dtype="float32", num_blocks=config.num_blocks, block_size=16, threads=2)

    async def main():
        target = executor = NativeExecutor.load(folder, options, compiled=compiled)
        drafter = NgramDrafter(3, shortest=1) if ngram else None
        if draft is not None:
            beside = NativeExecutor.load(draft, options, compiled=compiled, beside=target)
            executor, drafter = DraftingExecutor(target, beside), ExecutorDrafter(3)
        scheduler = Scheduler(config, drafter=drafter)
        async with AsyncEngine(scheduler, executor) as engine:
            running = []
            for number, (prompt, num_tokens, _) in enumerate(requests):
                sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
                running.append(engine.submit(prompt, sampling))
                if number % 4 == 0:
                    await running[-1].wait()
            for generation in running:
                await generation.wait()
            scheduler.audit()
            tokens = [[t for event in g.events for t in event.token_ids] for g in running]
            return tokens, engine.stats().done

    return asyncio.run(main())


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill": True, "num_blocks": 9}])
@pytest.mark.parametrize("drafts", ["smaller model", "itself", "look-up"])
def test_speculation_changes_no_token(make_model, compiled, drafts, settings):
    model = make_model("Llama", num_key_value_heads=2)
    draft = {"itself": model.folder, "look-up": None}.get(drafts, "smaller")
    if draft == "smaller":
        draft = make_model("Llama", num_hidden_layers=1, num_key_value_heads=2).folder
    requests = random_requests(21, 10, longest_prompt=40)
    tokens, stats = generate(compiled, model.folder, requests, draft=draft, ngram=draft is None, **settings)
    assert_equal_but_for_near_ties(model, requests, tokens)
    assert stats.drafted_tokens > 0
    if drafts == "itself":
        assert stats.draft_acceptance_frac > 0.99


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill": True, "num_blocks": 12}])
def test_shared_prefixes_are_computed_once_and_change_no_token(make_model, compiled, settings):
    model = make_model("Llama", num_key_value_heads=2)
    chance = random.Random(2)
    system = [chance.randrange(3, 211) for _ in range(37)]
    requests = [(system + [chance.randrange(3, 211) for _ in range(chance.randint(1, 9))], 8, 0.0) for _ in range(10)]
    tokens, stats = generate(compiled, model.folder, requests, prefix_caching=True, **settings)
    assert_equal_but_for_near_ties(model, requests, tokens)
    assert stats.prefix_hit_tokens >= 32  # two whole blocks of the shared 37 tokens, at least once


def test_a_contiguous_cache_changes_no_token_and_holds_fewer(make_model, compiled):
    """8 blocks of 16 tokens: 12 + 40 tokens reserve 4 of them, so 2 requests fit at once."""
    model = make_model("Llama", num_key_value_heads=2)
    chance = random.Random(6)
    requests = [([chance.randrange(3, 211) for _ in range(12)], 40, 0.0) for _ in range(7)]
    peaks = {}
    for layout in KvLayout:
        tokens, stats = generate(compiled, model.folder, requests, kv_layout=layout, num_blocks=8, max_model_len=64)
        assert_equal_but_for_near_ties(model, requests, tokens)
        peaks[layout] = stats.peak_running
    assert peaks[KvLayout.CONTIGUOUS] == 2
    assert peaks[KvLayout.PAGED] > 2
