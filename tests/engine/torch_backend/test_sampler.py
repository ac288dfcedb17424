"""Sampling against transformers' own processors, and the draws against their distribution."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.torch_backend import sampler
from lmi_bench.engine.torch_backend.sampler import RowRequest, choose, draw_tokens, uniform_draw

HISTORY = (3, 4, 4, 9)
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.9, "repetition_penalty": 1.8, "top_k": 12, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 500, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 1e-9},
]


def probabilities(logits, rows):
    """The distribution that each row draws from."""
    chances = sampler._shares(sampler._tempered(logits, rows), rows)
    cut = [i for i, row in enumerate(rows) if row.sampling.top_p < 1.0]
    if cut:
        chances[cut] = sampler._top_p(chances[cut], [rows[i].sampling.top_p for i in cut])
    return chances / chances.sum(dim=-1, keepdim=True)


def request(position=7, seed=1, **settings):
    return RowRequest(SamplingParams(**settings), position, HISTORY, seed)


def transformers_probabilities(logits, temperature, top_k=0, top_p=1.0, repetition_penalty=1.0):
    processors = LogitsProcessorList()
    if repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    return processors(torch.tensor([HISTORY]), logits[None].clone())[0].softmax(-1)


def test_every_row_has_the_distribution_of_transformers_whatever_its_neighbours():
    torch.manual_seed(0)
    logits = torch.randn(len(SETTINGS), 100) * 3
    got = probabilities(logits, [request(**settings) for settings in SETTINGS])
    for row, settings in enumerate(SETTINGS):
        expected = transformers_probabilities(logits[row], **settings)
        torch.testing.assert_close(got[row], expected)


def test_openai_penalties_count_the_answer_and_not_the_prompt():
    """Of 3 4 4 9 the last three are the answer's: 4 loses 0.5 + 2 * 0.25, 9 loses 0.5 + 0.25."""
    logits = torch.linspace(-2, 2, 12)[None]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    expected = logits[0].clone()
    expected[4] -= 1.0
    expected[9] -= 0.75
    drawn = RowRequest(SamplingParams(temperature=1.0, **penalties), 7, HISTORY, 1, num_generated=3)
    torch.testing.assert_close(probabilities(logits, [drawn])[0], expected.softmax(-1))
    first = RowRequest(SamplingParams(temperature=1.0, **penalties), 7, HISTORY, 1)
    torch.testing.assert_close(probabilities(logits, [first])[0], logits[0].softmax(-1))


def test_penalties_that_are_whole_numbers_count_as_floats():
    logits = torch.linspace(-2, 2, 12)[None]
    whole = SamplingParams(temperature=1, presence_penalty=1, frequency_penalty=1, repetition_penalty=2)
    floats = SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=2.0)
    rows = [RowRequest(each, 7, HISTORY, 1, num_generated=3) for each in (whole, floats)]
    both = probabilities(logits.expand(2, -1), rows)
    assert torch.equal(both[0], both[1])


def test_openai_penalties_are_a_bias_of_transformers_behind_the_repetition_penalty():
    """transformers has no such penalties, but a bias for a token, and the order of processors."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * 3
    settings = {"temperature": 0.8, "repetition_penalty": 1.7, "top_k": 20, "top_p": 0.9}
    sampling = SamplingParams(presence_penalty=-0.5, frequency_penalty=1.5, **settings)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.7),
            SequenceBiasLogitsProcessor([[[4], 0.5 - 2 * 1.5], [[9], 0.5 - 1.5]]),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
        ]
    )
    expected = processors(torch.tensor([HISTORY]), logits.clone())[0].softmax(-1)
    row = RowRequest(sampling, 7, HISTORY, 1, num_generated=3)
    torch.testing.assert_close(probabilities(logits, [row])[0], expected)


def test_a_greedy_row_takes_the_likeliest_token_that_is_left_by_its_penalties():
    logits = torch.zeros(3, 12)
    logits[:, 4], logits[:, 7] = 1.0, 0.5
    strong = SamplingParams(presence_penalty=0.4, frequency_penalty=0.1)  # 4 falls to 0.4
    weak = SamplingParams(presence_penalty=0.2, frequency_penalty=0.1)  # 4 falls to 0.6
    rows = [RowRequest(s, 7, HISTORY, 1, num_generated=3) for s in (strong, weak)]
    rows.append(RowRequest(strong, 7, HISTORY, 1, num_generated=1))  # 9 alone is the answer's
    assert [choice.token_id for choice in choose(logits, rows)] == [7, 4, 4]
    assert logits[0, 4] == 1.0


def test_draws_follow_the_distribution():
    chances = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25, 0.0])
    count = 4000
    draws = [uniform_draw(9, position) for position in range(count)]
    tokens = draw_tokens(chances.expand(count, -1), draws)
    counts = torch.bincount(torch.tensor(tokens), minlength=6)
    assert counts[1] == counts[5] == 0
    possible = [0, 2, 3, 4]
    assert chisquare(counts[possible], chances[possible].double() * count).pvalue > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.6},
        {"min_p": 0.2},
        {"min_p": 0.1, "top_p": 0.7, "top_k": 90},
    ],
)
def test_tokens_are_drawn_from_the_distribution_in_any_part_of_a_large_vocabulary(settings):
    """Two whole blocks of probabilities and a part of one; with top-p 0.05 most rows are sorted."""
    count, vocab = 6000, 1300
    logits = torch.zeros(vocab)
    places = torch.randperm(vocab, generator=torch.Generator().manual_seed(2))[:200]
    logits[places] = torch.linspace(2, 6, 200)
    rows = [request(position=i, seed=4, temperature=1.0, **settings) for i in range(count)]
    expected = probabilities(logits[None], rows[:1])[0]
    tokens = [choice.token_id for choice in choose(logits.expand(count, -1), rows)]
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    often = expected * count >= 5
    seen, due = counts[often].double(), expected[often].double() * count
    rest = torch.tensor([count - seen.sum(), count - due.sum()])
    if rest[1] >= 5:
        seen, due = torch.cat([seen, rest[:1]]), torch.cat([due, rest[1:]])
    assert chisquare(seen, due * seen.sum() / due.sum()).pvalue > 1e-3
    alone = [choose(logits[None], [row])[0].token_id for row in rows[:50]]
    assert alone == tokens[:50]


def test_min_p_and_a_bias_are_those_of_transformers():
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(8)) * 3
    settings = {"temperature": 0.8, "repetition_penalty": 1.4}
    sampling = SamplingParams(min_p=0.1, logit_bias=((4, 2.5), (7, -100.0)), **settings)
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[4], 2.5], [[7], -100.0]]),
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(0.8),
            MinPLogitsWarper(0.1),
        ]
    )
    expected = processors(torch.tensor([HISTORY]), logits.clone())[0].softmax(-1)
    torch.testing.assert_close(probabilities(logits, [RowRequest(sampling, 7, HISTORY, 1)])[0], expected)
    greedy = RowRequest(SamplingParams(logit_bias=((13, 99.0),)), 7, HISTORY, 1)
    assert choose(logits, [greedy])[0].token_id == 13


@pytest.mark.parametrize("vocab", [64, 1000, 4096 + 17])
def test_all_that_top_k_keeps_is_among_its_candidates(vocab):
    """With many equals, in any place: some side by side, some in the rest behind whole parts."""
    scores = torch.randint(0, 40, (8, vocab), generator=torch.Generator().manual_seed(3)).float()
    scores[0, -3:] = scores[1, :5] = 99.0
    scores[2] = 5.0
    scores[3, 7:] = -torch.inf
    for count in (1, max(1, vocab // 65)):
        values, tokens = sampler._candidates(scores, count)
        assert torch.equal(tokens.sort(dim=-1).values, tokens)
        assert torch.equal(values, scores.gather(1, tokens).double())
        least = scores.topk(count).values[:, -1:]
        for row in range(8):
            kept = torch.nonzero((scores[row] >= least[row]) & scores[row].isfinite())[:, 0]
            assert set(kept.tolist()) <= set(tokens[row].tolist())
    few, _ = sampler._candidates(torch.randn(4, vocab), 1)
    assert few.shape[-1] == 32 + vocab % 32


def test_rows_with_a_small_top_k_draw_what_they_draw_from_the_whole_vocabulary(monkeypatch):
    """Logits as bfloat16 has them, with equals at every limit."""
    chance = torch.Generator().manual_seed(12)
    logits = (torch.randn(60, 8000, generator=chance) * 3).bfloat16().float()
    logits[::7, 100:4000] = -torch.inf
    cases = [
        {"top_k": 40},
        {"top_k": 1, "temperature": 0.7},
        {"top_k": 50, "top_p": 0.9, "temperature": 1.3},
        {"top_k": 20, "top_p": 0.1, "min_p": 0.02},
        {"top_k": 100, "repetition_penalty": 1.7, "presence_penalty": 0.5, "logit_bias": ((4, 9.0),)},
        {"top_p": 0.8},
        {"top_k": 5000, "top_p": 0.9},
        {"temperature": 0.0},
    ]
    samplings = [SamplingParams(**{"temperature": 1.0} | case) for case in cases]
    rows = [
        [RowRequest(samplings[i % 8], position, HISTORY, i, num_generated=2) for i in range(60)]
        for position in range(20)
    ]
    tokens = [[choice.token_id for choice in choose(logits, each)] for each in rows]
    alone = [choose(logits[i : i + 1], [rows[0][i]])[0].token_id for i in range(60)]
    assert alone == tokens[0]
    monkeypatch.setattr(sampler, "_PART", 8000)  # so no top-k is small
    assert [[choice.token_id for choice in choose(logits, each)] for each in rows] == tokens


def test_the_ends_of_the_draw_give_tokens_that_can_come():
    chances = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    assert draw_tokens(chances, [0.0]) == [1]
    assert draw_tokens(chances, [1.0 - 2**-53]) == [2]
    assert draw_tokens(chances, [1.0]) == [2]  # where sums of shares round up
    assert draw_tokens(torch.tensor([[0.5, 0.5]]), [1.0]) == [1]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}])
def test_logits_that_are_no_numbers_give_some_token_of_the_vocabulary(settings):
    logits = torch.full((1, 6400 + 7), torch.nan)
    (choice,) = choose(logits, [request(temperature=1.0, **settings)])
    assert 0 <= choice.token_id < 6407


def test_rows_between_greedy_ones_draw_what_they_draw_alone():
    logits = torch.randn(7, 90, generator=torch.Generator().manual_seed(6))
    rows = [request(seed=i, temperature=0.0 if i % 3 == 1 else 1.0) for i in range(7)]
    alone = [choose(logits[i : i + 1], [row])[0].token_id for i, row in enumerate(rows)]
    assert [choice.token_id for choice in choose(logits, rows)] == alone


def test_draws_are_even_and_depend_on_seed_and_position():
    draws = [uniform_draw(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(draws)) == 2000
    assert all(0 <= draw < 1 for draw in draws)
    tenths = torch.bincount((torch.tensor(draws) * 10).long(), minlength=10)
    assert chisquare(tenths).pvalue > 1e-3


def test_greedy_and_drawn_rows_stand_side_by_side():
    torch.manual_seed(1)
    logits = torch.randn(3, 50)
    rows = [request(), request(temperature=1.0, top_k=1), request(temperature=1.0, logprobs=True)]
    choices = choose(logits, rows)
    assert choices[0].token_id == logits[0].argmax()
    assert choices[1].token_id == logits[1].argmax()
    assert choices[0].logprob is None
    expected = torch.log_softmax(logits[2], -1)[choices[2].token_id].item()
    assert choices[2].logprob == pytest.approx(expected, rel=1e-5)


def test_the_likeliest_tokens_come_with_their_log_probabilities():
    """As many as each row asks for, drawn or not; more than there are tokens give all."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
    rows = [
        request(logprobs=True, top_logprobs=2),
        request(temperature=1.0, logprobs=True),
        request(temperature=1.0, logprobs=True, top_logprobs=9),
    ]
    two, none, all_six = (choice.ranked for choice in choose(logits, rows))
    expected = torch.log_softmax(logits, dim=-1).sort(descending=True)
    assert [token for token, _ in two] == expected.indices[0, :2].tolist()
    assert [value for _, value in two] == pytest.approx(expected.values[0, :2].tolist())
    assert none == ()
    assert [token for token, _ in all_six] == expected.indices[2].tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 9e-6, 1e-5, 1e-3])
def test_a_temperature_near_nothing_takes_the_likeliest_token(temperature):
    """Logits of 40 divided by 1e-38 are infinite in float32, and their softmax is not a number."""
    logits = torch.zeros(2, 64)
    logits[0, 17], logits[1, 3] = 40.0, -40.0
    logits[1, 5] = 0.5
    rows = [request(temperature=temperature), request(position=8, temperature=temperature)]
    assert [choice.token_id for choice in choose(logits, rows)] == [17, 5]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty must be between -2 and 2, got 2.1"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be between -2 and 2, got -3"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"stop_token_ids": (7, -5)}, "token id must be 0 or more, got -5"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, says):
    with pytest.raises(InputError, match=says):
        SamplingParams(**wrong)
