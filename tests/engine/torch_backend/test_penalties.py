"""OpenAI's penalties through the whole engine, against their rule worked out on transformers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from lmi_bench.engine.scheduling.batch import LAST_SAMPLED
from lmi_bench.engine.scheduling.sampling import SamplingParams
from tests.engine.torch_backend.test_runner import Steps, entry
from tests.engine.torch_backend.test_speculation import DRAFT, NEAR_TIE, generate

STRONG = {"presence_penalty": 0.4, "frequency_penalty": 0.3}


def requests_of(count, **sampling):
    """Prompts that repeat tokens, so that counting them would show."""
    chance = random.Random(6)
    return [
        (
            [chance.randrange(3, 30) for _ in range(chance.randint(4, 40))],
            SamplingParams(max_new_tokens=20, ignore_eos=True, **STRONG | sampling),
        )
        for _ in range(count)
    ]


def by_hand(model, prompt, sampling):
    """The likeliest tokens under logit - presence - count * frequency, counted in the answer; the
    gaps between the two best."""
    answer, gaps = [], []
    for _ in range(sampling.max_new_tokens):
        logits = model.logits([*prompt, *answer])[-1].clone()
        for token_id in set(answer):
            logits[token_id] -= sampling.presence_penalty
            logits[token_id] -= answer.count(token_id) * sampling.frequency_penalty
        best = logits.topk(2)
        answer.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return answer, gaps


def assert_by_hand(model, requests, outputs):
    """The rule's tokens, up to a near tie; each answer repeats less than it would unpenalised."""
    for (prompt, sampling), tokens in zip(requests, outputs, strict=True):
        expected, gaps = by_hand(model, prompt, sampling)
        assert len(tokens) == len(expected)
        sure = next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), len(gaps))
        assert sure > 5
        assert tokens[:sure] == expected[:sure]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked_prefill": True, "max_rolling_batch_prefill_tokens": 7},
        {"num_blocks": 20, "block_size": 4},
        {"prefix_caching": True, "block_size": 4},
    ],
    ids=["plain", "chunked prefill", "preemption", "prefix caching"],
)
@pytest.mark.parametrize("drafts", ["none", "model", "look-up"])
def test_tokens_are_penalised_by_their_count_in_the_answer(llama, make_llama, settings, drafts):
    requests = requests_of(6)
    draft = make_llama(**DRAFT).folder if drafts == "model" else None
    tokens, stats = generate(llama.folder, requests, draft=draft, ngram=drafts == "look-up", **settings)
    assert_by_hand(llama, requests, tokens)
    assert (stats.preemptions > 0) == ("num_blocks" in settings)
    assert (stats.drafted_tokens > 0) == (drafts != "none")


def test_a_verified_row_counts_the_whole_answer_and_the_guesses_before_it(llama):
    """The row behind two right guesses would else take a token of the answer's first two again."""
    strong = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    for prompt, sampling in requests_of(200, **strong):
        answer, gaps = by_hand(llama, prompt, replace(sampling, max_new_tokens=4))
        unpenalised = int(llama.logits([*prompt, *answer[:3]])[-1].argmax())
        if unpenalised in answer[:2] and unpenalised != answer[2] and min(gaps) > NEAR_TIE:
            break
    else:
        pytest.fail("no prompt shows the difference")
    steps = Steps(llama.folder)
    length = len(prompt)
    begin = entry(1, tuple(prompt), 0, tuple(range(12)), sampling=sampling)
    guesses = entry(1, (LAST_SAMPLED, *answer[1:3]), length, sampling=sampling, drafts=2)
    got = [*steps.tokens(begin)[0], *steps.tokens(replace(guesses, num_generated=1))[0]]
    asyncio.run(steps.executor.close())
    assert got == answer


@pytest.mark.parametrize("drafts", ["model", "look-up"])
def test_a_seeded_penalised_request_draws_the_same_under_speculation(llama, make_llama, drafts):
    """A guess counts as part of the answer only in the rows behind it, and only while it holds."""
    requests = requests_of(8, temperature=0.6, top_k=8, seed=3)
    draft = make_llama(**DRAFT).folder if drafts == "model" else None
    plain = generate(llama.folder, requests)[0]
    assert generate(llama.folder, requests, draft=draft, ngram=drafts == "look-up")[0] == plain
    without = requests_of(8, temperature=0.6, top_k=8, seed=3, presence_penalty=0.0, frequency_penalty=0.0)
    assert generate(llama.folder, without)[0] != plain


def test_a_penalty_leaves_its_neighbours_alone(llama):
    plain = [(prompt, SamplingParams(max_new_tokens=12)) for prompt, _ in requests_of(3)]
    alone = generate(llama.folder, plain)[0]
    mixed = generate(llama.folder, [*plain, *requests_of(3)])[0]
    assert mixed[:3] == alone


def test_a_negative_penalty_makes_the_answer_repeat_itself(llama):
    """Two more for each time: once a token leads, it stays ahead."""
    wish = SamplingParams(max_new_tokens=30, ignore_eos=True, frequency_penalty=-2.0)
    ((tokens,), _) = generate(llama.folder, [([5, 6, 7], wish)])
    assert len(set(tokens[-20:])) == 1
