"""What an executor owes the scheduler, with batches made by hand."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from lmi_bench.core.errors import CapacityError, EngineError, InputError
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED, BatchEntry, StepBatch, StepKind
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings

PROMPT = (5, 17, 99, 3, 42, 7, 150, 8, 61)
GREEDY = SamplingParams()


def entry(seq_id, token_ids, first, blocks=(), *, samples=True, sampling=GREEDY, drafts=0):
    if drafts:
        kind = StepKind.VERIFY
    else:
        kind = StepKind.PREFILL if len(token_ids) > 1 else StepKind.DECODE
    return BatchEntry(seq_id, kind, token_ids, first, blocks, samples, sampling, drafts)


def step(*entries, released=()):
    return StepBatch(0, entries, StepShape(), released)


class Steps:
    """An executor whose steps are run one by one."""

    def __init__(self, folder: Path, **settings) -> None:
        self.executor = TorchExecutor.load(
            folder, LoadSettings(**{"dtype": "float32", "num_blocks": 16, "block_size": 4, "threads": 1} | settings)
        )

    def run(self, *entries, released=()):
        return asyncio.run(self.executor.execute(step(*entries, released=released)))

    def tokens(self, *entries, released=()):
        return [output.token_ids for output in self.run(*entries, released=released)]


@pytest.fixture
def steps(llama):
    made = Steps(llama.folder, sampling_seed=1)
    yield made
    asyncio.run(made.executor.close())


def test_a_token_that_the_host_has_not_seen_is_the_one_sampled_last(llama, steps):
    expected = llama.greedy(PROMPT, 4).token_ids
    got = steps.tokens(entry(1, PROMPT, 0, (3, 5, 1)))[0]
    for position in range(len(PROMPT), len(PROMPT) + 3):
        blocks = (9,) if position == 12 else ()
        got += steps.tokens(entry(1, (LAST_SAMPLED,), position, blocks))[0]
    assert list(got) == expected


def test_an_earlier_chunk_of_a_prompt_gives_no_token(llama, steps):
    assert steps.tokens(entry(1, PROMPT[:5], 0, (3, 5), samples=False)) == [()]
    assert steps.tokens(entry(1, PROMPT[5:], 5, (1,))) == [tuple(llama.greedy(PROMPT, 1).token_ids)]


def test_outputs_come_in_the_order_of_the_entries_whatever_their_lengths(llama, steps):
    prompts = [PROMPT[:1], PROMPT, PROMPT[:4], PROMPT[:2]]
    entries = [entry(i, prompt, 0, tuple(range(3 * i, 3 * i + 3))) for i, prompt in enumerate(prompts)]
    outputs = steps.run(*entries)
    assert [output.seq_id for output in outputs] == [0, 1, 2, 3]
    expected = [tuple(llama.greedy(prompt, 1).token_ids) for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected


def test_position_0_starts_a_sequence_anew_in_other_blocks(llama, steps):
    """As after a preemption, when its old blocks hold another sequence."""
    steps.run(entry(1, PROMPT, 0, (0, 1, 2)))
    steps.run(entry(2, PROMPT[::-1], 0, (0, 1, 2)))
    again = steps.tokens(entry(1, PROMPT, 0, (4, 5, 6)))
    assert again == [tuple(llama.greedy(PROMPT, 1).token_ids)]


def test_a_released_sequence_is_forgotten(steps):
    steps.run(entry(1, PROMPT, 0, (0, 1, 2)), entry(2, PROMPT, 0, (3, 4, 5)))
    steps.run(entry(2, (LAST_SAMPLED,), 9), released=(1,))
    with pytest.raises(EngineError, match="sequence 1 continues at position 9"):
        steps.run(entry(1, (LAST_SAMPLED,), 9))


def test_right_drafts_are_all_accepted_and_one_token_more(llama, steps):
    expected = llama.greedy(PROMPT, 5).token_ids
    steps.run(entry(1, PROMPT, 0, (0, 1, 2)))
    got = steps.tokens(entry(1, (LAST_SAMPLED, *expected[1:4]), 9, (3,), drafts=3))
    assert list(got[0]) == expected[1:5]


def test_a_wrong_draft_ends_what_is_accepted_and_leaves_no_trace(llama, steps):
    expected = llama.greedy(PROMPT, 6).token_ids
    wrong = (expected[2] + 1) % 211
    steps.run(entry(1, PROMPT, 0, (0, 1, 2)))
    got = steps.tokens(entry(1, (expected[0], expected[1], wrong, 4), 9, (3,), drafts=3))
    assert list(got[0]) == expected[1:3]
    more = steps.tokens(entry(1, (LAST_SAMPLED,), 11))[0]
    more += steps.tokens(entry(1, (LAST_SAMPLED,), 12))[0]
    assert list(more) == expected[3:5]


def test_logprobs_are_those_of_the_models_own_logits(llama, steps):
    drawn = SamplingParams(logprobs=True, temperature=1.7, top_k=20, seed=3)
    asked = SamplingParams(logprobs=True)
    outputs = steps.run(
        entry(1, PROMPT, 0, (0, 1, 2), sampling=asked),
        entry(2, PROMPT, 0, (3, 4, 5), sampling=drawn),
        entry(3, PROMPT, 0, (6, 7, 8)),
    )
    expected = torch.log_softmax(llama.logits(PROMPT)[-1], -1)
    for output in outputs[:2]:
        assert output.logprobs == pytest.approx((expected[output.token_ids[0]].item(),), abs=1e-4)
    assert outputs[2].logprobs is None


def test_a_seeded_request_draws_the_same_in_any_batch(llama, steps):
    drawn = SamplingParams(temperature=5.0, seed=11)
    alone = steps.tokens(entry(1, PROMPT, 0, (0, 1, 2), sampling=drawn))[0]
    beside = steps.tokens(entry(7, PROMPT[:3], 0, (3,)), entry(8, PROMPT, 0, (4, 5, 6), sampling=drawn))[1]
    assert alone == beside


def test_requests_without_a_seed_draw_apart(steps):
    """At temperature 50 the 211 tokens are nearly equally likely."""
    drawn = SamplingParams(temperature=50.0)
    tokens = [steps.tokens(entry(i, PROMPT, 0, (0, 1, 2), sampling=drawn))[0][0] for i in range(20)]
    assert len(set(tokens)) > 10


def penalised_greedy(llama, count):
    """Tokens under a penalty of 1000, where every seen token falls behind; the rule by hand."""
    history = list(PROMPT)
    for _ in range(count):
        logits = llama.logits(history)[-1].clone()
        seen = list(set(history))
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1000, logits[seen] / 1000)
        history.append(int(logits.argmax()))
    return history[len(PROMPT) :]


def test_a_penalised_request_repeats_nothing_that_it_has_seen(llama, steps):
    strict = SamplingParams(repetition_penalty=1000.0)
    got = [steps.tokens(entry(1, PROMPT, 0, (0, 1, 2, 3, 4), sampling=strict))[0][0]]
    got += [steps.tokens(entry(1, (LAST_SAMPLED,), position, sampling=strict))[0][0] for position in range(9, 14)]
    assert got == penalised_greedy(llama, 6)


def test_a_rejected_draft_does_not_count_as_seen(llama, steps):
    strict = SamplingParams(repetition_penalty=1000.0)
    expected = penalised_greedy(llama, 3)
    steps.run(entry(1, PROMPT, 0, (0, 1, 2, 3), sampling=strict))
    early = (expected[0], expected[2])  # the draft is right one step too soon
    assert steps.tokens(entry(1, early, 9, sampling=strict, drafts=1)) == [(expected[1],)]
    assert steps.tokens(entry(1, (LAST_SAMPLED,), 10, sampling=strict)) == [(expected[2],)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry(1, (211,), 0, (0,)), "token id 211 is outside the vocabulary of 211"),
        (entry(1, PROMPT, 0, (0, 1)), "9 tokens but 2 blocks of 4"),
        (entry(1, PROMPT, 0, (0, 1, 16)), "not all below 16"),
        (entry(1, (LAST_SAMPLED,), 0, (0,)), "has sampled no token yet"),
    ],
)
def test_a_step_that_would_spoil_the_cache_is_refused(steps, wrong, message):
    with pytest.raises(EngineError, match=message):
        steps.run(wrong)


def test_steps_run_in_one_thread_that_is_not_the_loops(llama, monkeypatch):
    steps = Steps(llama.folder)
    threads = set()
    run = steps.executor._ranks.runner.run

    def noted(batch):
        threads.add(threading.current_thread())
        return run(batch)

    monkeypatch.setattr(steps.executor._ranks.runner, "run", noted)
    steps.run(entry(1, PROMPT, 0, (0, 1, 2)))
    steps.run(entry(1, (LAST_SAMPLED,), 9))
    asyncio.run(steps.executor.close())
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_close_ends_the_thread(llama):
    before = threading.active_count()
    steps = Steps(llama.folder)
    steps.run(entry(1, PROMPT, 0, (0, 1, 2)))
    asyncio.run(steps.executor.close())
    assert threading.active_count() <= before + 1  # asyncio.to_thread's own may stay


@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_cache_takes_the_bytes_of_the_formula(make_llama, block_size, dtype, width):
    """2 * B * N * bytes * layers * kv_heads * head_dim, with one sequence that fills it."""
    model = make_llama(num_key_value_heads=2)
    executor = Steps(model.folder, num_blocks=10, block_size=block_size, dtype=dtype).executor
    cache = executor._ranks.runner._forward.cache
    allocated = sum(pages.nbytes for pages in (*cache.keys, *cache.values))
    assert allocated == 2 * (10 * block_size) * width * 2 * 2 * 16
    assert executor.kv_cache_bytes == allocated
    asyncio.run(executor.close())


def test_the_number_of_blocks_follows_from_the_free_memory(llama):
    executor = Steps(llama.folder, num_blocks=None, memory_share=1e-4, most_cache_tokens=1 << 40).executor
    bytes_per_block = executor.kv_cache_bytes / executor.num_blocks
    whole = executor.free_memory_bytes * 1e-4 / bytes_per_block
    assert executor.num_blocks == int(whole)
    asyncio.run(executor.close())


def test_the_cache_is_capped_in_tokens(llama):
    executor = Steps(llama.folder, num_blocks=None, most_cache_tokens=1000).executor
    assert executor.num_blocks == 250
    asyncio.run(executor.close())


def test_a_share_too_small_for_one_block_is_refused_with_numbers(llama):
    with pytest.raises(CapacityError, match=r"KV-cache block of 4,096 bytes"):
        Steps(llama.folder, num_blocks=None, memory_share=1e-12)


def test_a_wrong_dtype_is_refused(llama):
    with pytest.raises(InputError, match="'float8' is unknown; the torch back end has: float32"):
        Steps(llama.folder, dtype="float8")


def test_given_tokens_are_scored_as_transformers_scores_them(llama, steps):
    """Each one's log-softmax in the row before it."""
    given, continuation = list(PROMPT), [4, 77, 13, 200, 9]
    logprobs = torch.log_softmax(llama.logits(given + continuation), -1)
    expected = [logprobs[len(given) - 1 + number, token_id].item() for number, token_id in enumerate(continuation)]
    got = asyncio.run(steps.executor.score(given, continuation))
    assert got == pytest.approx(expected, abs=1e-4)


def test_nothing_is_scored_over_a_sequence_that_is_in_the_cache(steps):
    steps.run(entry(1, PROMPT, 0, (0, 1, 2)))
    with pytest.raises(EngineError, match="1 sequences are in the cache"):
        asyncio.run(steps.executor.score(PROMPT, [4]))
