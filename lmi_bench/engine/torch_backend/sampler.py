"""Chooses tokens from logits: greedy, or drawn after penalties, temperature, top-k and top-p.

The order and the ties are those of Hugging Face transformers; OpenAI's penalties, which it lacks,
follow the repetition penalty as in vLLM. A draw depends only on the request's seed and the token's
position, so a request gives the same tokens in any batch and after a preemption. Log-probabilities
are those of the unmodified logits.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Request for one token from one row of logits.

    position  position of the token to choose
    history   all tokens before it; needed only for penalties
    seed      seed of the sequence's draws
    num_generated  number of the history's last tokens that belong to the answer
    banned    ids that must not be chosen because they would end the request too early
    """

    sampling: SamplingParams
    position: int
    history: Sequence[int]
    seed: int
    banned: tuple[int, ...] = ()
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token and, if requested, its natural log-probability and the likeliest tokens."""

    token_id: int
    logprob: float | None
    ranked: Ranked = ()


def choose(logits: Tensor, rows: Sequence[RowRequest]) -> list[Choice]:
    """Choose one token for each row of logits, shape (rows, vocab)."""
    picked = _likeliest(logits, rows)
    drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
    if drawn:
        chances = probabilities(logits[drawn], [rows[i] for i in drawn])
        draws = [uniform_draw(rows[i].seed, rows[i].position) for i in drawn]
        for i, token_id in zip(drawn, draw_tokens(chances, draws), strict=True):
            picked[i] = token_id
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs]
    if not wanted:
        return [Choice(token_id, None) for token_id in picked]
    scores = torch.log_softmax(logits[wanted].float(), dim=-1)
    tokens = torch.tensor([picked[i] for i in wanted], device=logits.device)
    logprobs = scores.gather(1, tokens[:, None])[:, 0].tolist()
    ranked = _ranked(scores, [rows[i].sampling.top_logprobs for i in wanted])
    known = dict(zip(wanted, zip(logprobs, ranked, strict=True), strict=True))
    return [Choice(token_id, *known.get(i, (None, ()))) for i, token_id in enumerate(picked)]


def probabilities(logits: Tensor, rows: Sequence[RowRequest]) -> Tensor:
    """The distribution that each row draws from, shape (rows, vocab), float32. No row may be
    greedy."""
    scores = _penalised(logits.float(), rows)
    scores = scores / _column([row.sampling.temperature for row in rows], scores)
    _keep_top_k(scores, [row.sampling.top_k for row in rows])
    _keep_top_p(scores, [row.sampling.top_p for row in rows])
    return torch.softmax(scores, dim=-1)


def draw_tokens(chances: Tensor, draws: Sequence[float]) -> list[int]:
    """The token in whose share of the cumulative distribution each draw (0 to 1) falls."""
    cumulative = chances.double().cumsum(dim=-1)
    points = _column(list(draws), cumulative) * cumulative[:, -1:]
    # right: a draw of 0 skips tokens with probability 0
    token_ids = torch.searchsorted(cumulative, points, right=True)[:, 0]
    last = chances.shape[-1] - 1 - (chances > 0).flip(-1).int().argmax(-1)
    return torch.minimum(token_ids, last).tolist()


def uniform_draw(seed: int, position: int) -> float:
    """A pseudo-random number in [0, 1) that depends only on seed and position."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _likeliest(logits: Tensor, rows: Sequence[RowRequest]) -> list[int]:
    picked: list[int] = logits.argmax(dim=-1).tolist()
    penalised = [
        i
        for i, row in enumerate(rows)
        if row.sampling.greedy and (row.sampling.penalised or row.banned)
    ]
    if penalised:
        scores = _penalised(logits[penalised].float(), [rows[i] for i in penalised])
        for i, token_id in zip(penalised, scores.argmax(dim=-1).tolist(), strict=True):
            picked[i] = token_id
    return picked


def _ranked(scores: Tensor, counts: list[int]) -> list[Ranked]:
    """The `counts` highest scores of each row, with their tokens."""
    most = min(max(counts), scores.shape[-1])
    if most == 0:
        return [()] * len(counts)
    values, tokens = scores.topk(most, dim=-1)
    return [
        tuple(zip(ids[:count], row[:count], strict=True))
        for ids, row, count in zip(tokens.tolist(), values.tolist(), counts, strict=True)
    ]


def _penalised(scores: Tensor, rows: Sequence[RowRequest]) -> Tensor:
    """Apply the penalties, and exclude banned tokens."""
    if not any(row.sampling.penalised or row.banned for row in rows):
        return scores
    scores = scores.clone()
    for i, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1.0:
            _penalise_repetition(scores[i], row)
        if row.num_generated and row.sampling.counts_answer:
            _penalise_counts(scores[i], row)
        if row.banned:
            scores[i, list(row.banned)] = -torch.inf
    return scores


def _penalise_repetition(scores: Tensor, row: RowRequest) -> None:
    """Divide, in place, positive logits of tokens seen before by the penalty, and multiply
    negative ones by it. Source: Keskar et al. 2019, arXiv:1909.05858."""
    penalty = row.sampling.repetition_penalty
    seen = torch.tensor(sorted(set(row.history)), device=scores.device)
    values = scores[seen]
    scores[seen] = torch.where(values < 0, values * penalty, values / penalty)


def _penalise_counts(scores: Tensor, row: RowRequest) -> None:
    """Subtract, in place, from the logit of each token that occurs c > 0 times in the answer

        presence_penalty + c * frequency_penalty

    Source: OpenAI's API reference, which counts only sampled tokens.
    """
    sampling = row.sampling
    counts = Counter(row.history[-row.num_generated :])
    taken = [sampling.presence_penalty + c * sampling.frequency_penalty for c in counts.values()]
    scores[list(counts)] -= torch.tensor(taken, dtype=scores.dtype, device=scores.device)


def _keep_top_k(scores: Tensor, top_ks: list[int]) -> None:
    """Mask, in place, all but the k highest scores of a row; equal ones stay together."""
    vocab = scores.shape[-1]
    rows = [i for i, k in enumerate(top_ks) if 0 < k < vocab]
    if not rows:
        return
    highest = torch.topk(scores[rows], max(top_ks[i] for i in rows), dim=-1).values
    kth = torch.tensor([[top_ks[i] - 1] for i in rows], device=scores.device)
    limits = highest.gather(1, kth)
    scores[rows] = scores[rows].masked_fill(scores[rows] < limits, -torch.inf)


def _keep_top_p(scores: Tensor, top_ps: list[float]) -> None:
    """Mask, in place, all but the smallest set of likeliest tokens with mass `top_p` or more."""
    rows = [i for i, p in enumerate(top_ps) if p < 1.0]
    if not rows:
        return
    ordered, tokens = scores[rows].sort(dim=-1)
    below = ordered.softmax(dim=-1).cumsum(dim=-1)
    dropped = below <= 1.0 - _column([top_ps[i] for i in rows], below)
    dropped[:, -1] = False  # the likeliest always stays, despite rounding
    mask = torch.zeros_like(dropped).scatter_(1, tokens, dropped)
    scores[rows] = scores[rows].masked_fill(mask, -torch.inf)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
