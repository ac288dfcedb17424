"""Speculative decoding on the real executor: greedy tokens stay, draws keep their distribution."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import torch
from scipy import stats as scipy_stats

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.scheduling.adaptive_drafting import AdaptiveDrafter
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter, NgramDrafter
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings

DRAFT = {"num_hidden_layers": 1, "num_key_value_heads": 2}
NEAR_TIE = 1e-4


def generate(folder, requests, *, draft=None, ngram=False, k=3, adaptive=False, **settings):
    """Tokens of each (prompt, sampling), and the engine's counts."""
    config = SchedulerConfig(**{"num_blocks": 200, "max_model_len": 256, "block_size": 8} | settings)
    options = LoadSettings(
        dtype="float32", num_blocks=config.num_blocks, block_size=config.block_size, threads=1, sampling_seed=5
    )

    async def main():
        executor = target = TorchExecutor.load(folder, options)
        drafter = NgramDrafter(k, shortest=1) if ngram else None
        if draft is not None:
            executor = DraftingExecutor(target, TorchExecutor.load(draft, options, beside=target))
            drafter = ExecutorDrafter(k)
        if adaptive:
            drafter = AdaptiveDrafter(drafter, k, probe_every=5)
        scheduler = Scheduler(config, drafter=drafter)
        async with AsyncEngine(scheduler, executor) as engine:
            running = [engine.submit(prompt, sampling) for prompt, sampling in requests]
            for generation in running:
                await generation.wait()
            scheduler.audit()
            tokens = [[t for event in g.events for t in event.token_ids] for g in running]
            return tokens, engine.stats().done

    return asyncio.run(main())


def random_requests(count, **sampling):
    chance = random.Random(4)
    return [
        (
            [chance.randrange(3, 211) for _ in range(chance.randint(1, 40))],
            SamplingParams(max_new_tokens=chance.randint(1, 24), ignore_eos=True, **sampling),
        )
        for _ in range(count)
    ]


def assert_greedy(model, requests, outputs):
    """transformers' tokens, up to a near tie, which may end few of the cases."""
    ties = 0
    for (prompt, sampling), tokens in zip(requests, outputs, strict=True):
        reference = model.greedy(prompt, sampling.max_new_tokens)
        assert len(tokens) == len(reference.token_ids)
        for got, expected, gap in zip(tokens, reference.token_ids, reference.gaps, strict=True):
            if gap < NEAR_TIE:
                ties += 1
                break
            assert got == expected
    assert ties <= 0.01 * len(requests)


@pytest.mark.parametrize(
    "settings",
    [{}, {"chunked_prefill": True, "max_rolling_batch_prefill_tokens": 7}, {"num_blocks": 28, "block_size": 4}],
    ids=["plain", "chunked prefill", "preemption"],
)
@pytest.mark.parametrize("drafts", ["model", "model, adaptive", "itself", "look-up"])
def test_greedy_tokens_are_those_without_speculation(llama, make_llama, settings, drafts):
    requests = random_requests(12)
    draft = None
    if drafts != "look-up":
        draft = llama.folder if drafts == "itself" else make_llama(**DRAFT).folder
    tokens, stats = generate(
        llama.folder, requests, draft=draft, ngram=draft is None, adaptive="adaptive" in drafts, **settings
    )
    assert_greedy(llama, requests, tokens)
    assert (stats.preemptions > 0) == ("num_blocks" in settings)
    if drafts == "itself":
        assert stats.draft_acceptance_frac > 0.99  # but for near ties


def test_a_model_that_repeats_itself_gives_look_up_several_tokens_a_step(llama):
    """Where only three tokens are left to choose from, a greedy model soon goes in a circle."""
    ends = tuple(token_id for token_id in range(211) if token_id not in (3, 50, 77))
    sampling = SamplingParams(max_new_tokens=120, min_tokens=120, stop_token_ids=ends)
    requests = [([5, 6, 7], sampling)]
    tokens, stats = generate(llama.folder, requests, ngram=True)
    assert tokens == generate(llama.folder, requests)[0]
    assert stats.tokens_per_decode > 2
    assert stats.steps < 60


@pytest.mark.parametrize("drafts", ["model", "look-up"])
def test_a_seeded_request_draws_the_same_tokens_with_and_without_speculation(llama, make_llama, drafts):
    """A draw hangs on seed and position alone, a guess only says where it may be taken early."""
    requests = random_requests(12, temperature=0.8, top_k=30, top_p=0.9, repetition_penalty=1.2, seed=3)
    draft = make_llama(**DRAFT).folder if drafts == "model" else None
    assert (
        generate(llama.folder, requests, draft=draft, ngram=drafts == "look-up")[0]
        == generate(llama.folder, requests)[0]
    )


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
def test_sampled_tokens_follow_the_models_distribution(make_llama, adaptive):
    """Chi-square over a vocabulary of 8: the second and third token, which verification gives,
    against the products of transformers' probabilities over every path to them."""
    shape = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
    shape |= {"bos_token_id": 0, "eos_token_id": 1}
    model = make_llama(**shape)
    draft = make_llama(**shape | {"num_hidden_layers": 1})  # of other weights
    prompt = [3, 5, 2, 7]
    count, temperature = 1500, 1.3
    requests = [
        (prompt, SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=temperature, seed=n))
        for n in range(count)
    ]
    tokens, stats = generate(
        *(model.folder, requests),
        draft=draft.folder,
        k=2,
        adaptive=adaptive,
        max_rolling_batch_size=128,
        num_blocks=400,
    )
    assert 0.1 < stats.draft_acceptance_frac < 0.9  # both kinds of guess occur
    chances = torch.zeros(8, 8, dtype=torch.float64)
    first = (model.logits(prompt)[-1].double() / temperature).softmax(-1)
    for a, b in itertools.product(range(8), range(8)):
        logits = model.logits([*prompt, a, b]).double() / temperature
        second, third = logits[-2].softmax(-1), logits[-1].softmax(-1)
        chances[b] += first[a] * second[b] * third
    observed = torch.zeros(8, 8, dtype=torch.float64)
    for _, b, c, _ in tokens:
        observed[b, c] += 1
    expected = chances * count
    often = expected >= 5  # the test's own condition; the rest is pooled
    seen = [*observed[often].tolist(), observed[~often].sum().item()]
    due = [*expected[often].tolist(), expected[~often].sum().item()]
    assert scipy_stats.chisquare(seen, due).pvalue > 0.01


def test_an_end_is_not_chosen_before_min_tokens(llama):
    """With every token but one an end, that one comes until the minimum is reached."""
    ends = tuple(token_id for token_id in range(211) if token_id != 77)
    for sampling in (
        SamplingParams(max_new_tokens=9, min_tokens=6, stop_token_ids=ends),
        SamplingParams(max_new_tokens=9, min_tokens=6, eos_token_ids=ends),
        SamplingParams(max_new_tokens=9, min_tokens=6, eos_token_ids=ends, temperature=2.0, seed=1),
    ):
        for ngram in (False, True):
            ((*head, last),), _ = generate(llama.folder, [([5, 6, 7], sampling)], ngram=ngram)
            assert head[:6] == [77] * 6
            assert len(head) == 6 or last == 77 or set(head) == {77}


def test_min_tokens_counts_across_a_preemption(llama):
    ends = tuple(token_id for token_id in range(211) if token_id != 77)
    sampling = SamplingParams(max_new_tokens=24, min_tokens=20, stop_token_ids=ends)
    requests = [([5, 6, 7], sampling)] * 4
    tokens, stats = generate(llama.folder, requests, num_blocks=18, block_size=4)
    assert stats.preemptions > 0
    assert all(output[:20] == [77] * 20 for output in tokens)
