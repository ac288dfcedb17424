"""Chooses tokens from logits: greedy, or drawn after penalties, temperature, top-k and top-p.

The order and the ties are those of Hugging Face transformers; what it lacks is vLLM's: a bias comes
first, OpenAI's penalties follow the repetition penalty, min-p stands beside top-k. A draw depends
only on the request's seed and the token's position, so a request gives the same tokens in any batch
and after a preemption. Log-probabilities are those of the unmodified logits.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams

_BLOCK: Final = 512  # tokens whose probabilities are summed before one of them is drawn
_CACHED: Final = 1 << 21  # logits that a CPU computes with at a time, to find them in its cache
_PART: Final = 32  # tokens whose highest score is compared before their own are
_DRAWS: Final = 8  # before top-p sorts a row


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Request for one token from one row of logits.

    position  position of the token to choose
    history   all tokens before it; needed only for penalties
    seed      seed of the sequence's draws
    num_generated  number of the history's last tokens that belong to the answer
    forbidden  True for tokens that break the answer's grammar, shape (vocab,); None: no grammar
    banned    ids that would end the request too early: chosen only if the grammar has no others
    """

    sampling: SamplingParams
    position: int
    history: Sequence[int]
    seed: int
    banned: tuple[int, ...] = ()
    num_generated: int = 0
    forbidden: Tensor | None = None

    @property
    def changed(self) -> bool:
        """True if the row's logits are changed before the temperature."""
        return self.sampling.penalised or bool(self.banned) or self.forbidden is not None


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token and, if requested, its natural log-probability and the likeliest tokens."""

    token_id: int
    logprob: float | None
    ranked: Ranked = ()


def choose(logits: Tensor, rows: Sequence[RowRequest]) -> list[Choice]:
    """Choose one token for each row of logits, shape (rows, vocab)."""
    picked = _likeliest(logits, rows)
    vocab = logits.shape[-1]
    for few in (True, False):
        drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy and _draws_from_few(row, vocab) is few]
        most = max(1, len(drawn) if logits.is_cuda else _CACHED // vocab)
        for first in range(0, len(drawn), most):
            some = drawn[first : first + most]
            side_by_side = some[-1] - some[0] + 1 == len(some)  # then no copy is needed
            part = logits[some[0] : some[-1] + 1] if side_by_side else logits[some]
            for i, token_id in zip(some, _draw(part, [rows[i] for i in some]), strict=True):
                picked[i] = token_id
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs]
    if not wanted:
        return [Choice(token_id, None) for token_id in picked]
    counts = [rows[i].sampling.top_logprobs for i in wanted]
    known = dict(zip(wanted, score_tokens(logits[wanted], [picked[i] for i in wanted], counts), strict=True))
    return [Choice(token_id, *known.get(i, (None, ()))) for i, token_id in enumerate(picked)]


def score_tokens(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> tuple[tuple[float, Ranked], ...]:
    """The log-probability of a token for each row of logits, and as many of the likeliest as
    `counts` says."""
    if not token_ids:
        return ()
    scores = torch.log_softmax(logits.float(), dim=-1)
    tokens = torch.tensor(token_ids, device=logits.device)
    logprobs = scores.gather(1, tokens[:, None])[:, 0].tolist()
    return tuple(zip(logprobs, _ranked(scores, counts), strict=True))


def _draws_from_few(row: RowRequest, vocab: int) -> bool:
    """True for a top-k so small that `_candidates` finds it faster than a search of all."""
    return 0 < row.sampling.top_k < vocab // _PART // 2


def _tempered(logits: Tensor, rows: Sequence[RowRequest]) -> Tensor:
    """Scores behind penalties and temperature."""
    scores = _penalised(logits.float(), rows)
    temperatures = [row.sampling.temperature for row in rows]
    return scores if set(temperatures) == {1.0} else scores / _column(temperatures, scores)


def _shares(scores: Tensor, rows: Sequence[RowRequest]) -> Tensor:
    """Shares of the tokens that top-k and min-p leave, which sum to 1 with those they drop."""
    limits = _top_k_and_min_p(scores, rows)
    chances = torch.softmax(scores, dim=-1)
    return chances if limits is None else _where(torch.ge, scores, limits).mul_(chances)


def _draw(logits: Tensor, rows: Sequence[RowRequest]) -> list[int]:
    """One token for each row, none of them greedy; all or none draw from few.

    Top-p rows draw from all tokens until the draw is one of the likeliest with mass `top_p`: that
    is the same distribution, without sorting the vocabulary. A draw that is none of them leaves
    those that are likelier for the next draw. Few rows are left to be sorted.
    """
    scores, ids = _tempered(logits, rows), None
    if _draws_from_few(rows[0], logits.shape[-1]):
        scores, ids = _candidates(scores, max(row.sampling.top_k for row in rows))
    chances = _shares(scores, rows)
    sums = _block_sums(chances)
    draws = [uniform_draw(row.seed, row.position) for row in rows]
    token_ids = draw_tokens(chances, draws, sums)
    left = [i for i, row in enumerate(rows) if row.sampling.top_p < 1.0]
    shares = [rows[i].sampling.top_p for i in left]
    part = chances if len(left) == len(rows) else chances[left]
    masses = sums[left].sum(dim=-1)
    for number in range(1, _DRAWS + 1):
        if not left:
            break
        own = part.gather(1, torch.tensor([[token_ids[i]] for i in left], device=part.device))
        likelier = _where(torch.gt, part, own).mul_(part)
        sums, whole = _block_sums(likelier), masses
        masses = sums.sum(dim=-1)
        above = (masses / whole).tolist()
        out = [at for at, share in enumerate(shares) if above[at] >= share]
        left, shares = [left[at] for at in out], [shares[at] / above[at] for at in out]
        part, sums, masses = likelier[out], sums[out], masses[out]
        if left and number == _DRAWS:
            part = _top_p(part, shares)
            sums = _block_sums(part)
        draws = [uniform_draw(rows[i].seed, rows[i].position, number) for i in left]
        for i, token_id in zip(left, draw_tokens(part, draws, sums), strict=True):
            token_ids[i] = token_id
    if ids is not None:
        token_ids = ids.gather(1, torch.tensor(token_ids, device=ids.device)[:, None])[:, 0].tolist()
    return token_ids


def _block_sums(chances: Tensor) -> Tensor:
    """Sums over each block of the vocabulary, shape (rows, blocks)."""
    whole = chances.shape[-1] // _BLOCK
    blocks = chances[:, : whole * _BLOCK].view(len(chances), whole, _BLOCK).sum(dim=-1)
    rest = chances[:, whole * _BLOCK :].sum(dim=-1, keepdim=True)
    return torch.cat([blocks, rest], dim=1).double()


def draw_tokens(chances: Tensor, draws: Sequence[float], sums: Tensor | None = None) -> list[int]:
    """The token in whose share of the cumulative distribution each draw (0 to 1) falls.

    sums  `_block_sums` of the chances, if they are known
    """
    vocab = chances.shape[-1]
    sums = _block_sums(chances) if sums is None else sums
    points = _column(list(draws), sums) * sums.sum(dim=-1, keepdim=True)
    block, points = _pick(sums, points)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=chances.device)
    inside = chances.gather(1, columns.clamp(max=vocab - 1)).double()
    place, _ = _pick(inside.masked_fill(columns >= vocab, 0.0), points)
    token_ids: list[int] = (block * _BLOCK + place).clamp(max=vocab - 1)[:, 0].tolist()  # of NaN, any
    return token_ids


def _pick(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """In whose share of the cumulative weights each point falls, and how far inside; (rows, 1)."""
    cumulative = weights.cumsum(dim=-1)
    # right: a point of 0 skips what has no weight
    found = torch.searchsorted(cumulative, points, right=True)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1, keepdim=True)
    found = torch.minimum(found, last)
    return found, points - (cumulative.gather(1, found) - weights.gather(1, found))


def uniform_draw(seed: int, position: int, number: int = 0) -> float:
    """A pseudo-random number in [0, 1) that depends only on seed, position and number."""
    text = f"{seed}:{position}" + (f":{number}" if number else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _likeliest(logits: Tensor, rows: Sequence[RowRequest]) -> list[int]:
    """The most likely tokens of the greedy rows; of others any token."""
    if not any(row.sampling.greedy for row in rows):
        return [0] * len(rows)
    picked: list[int] = logits.argmax(dim=-1).tolist()
    penalised = [i for i, row in enumerate(rows) if row.sampling.greedy and row.changed]
    if penalised:
        scores = _penalised(logits[penalised].float(), [rows[i] for i in penalised])
        for i, token_id in zip(penalised, scores.argmax(dim=-1).tolist(), strict=True):
            picked[i] = token_id
    return picked


def _ranked(scores: Tensor, counts: Sequence[int]) -> list[Ranked]:
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
    """Apply the penalties, and exclude tokens that are banned or break the grammar."""
    if not any(row.changed for row in rows):
        return scores
    scores = scores.clone()
    for i, row in enumerate(rows):
        sampling = row.sampling
        if sampling.logit_bias:
            tokens, bias = zip(*sampling.logit_bias, strict=True)
            scores[i, list(tokens)] += torch.tensor(bias, device=scores.device)
        if sampling.repetition_penalty != 1.0:
            _penalise_repetition(scores[i], row)
        if row.num_generated and sampling.counts_answer:
            _penalise_counts(scores[i], row)
        if row.forbidden is not None:
            scores[i].masked_fill_(row.forbidden.to(scores.device), -torch.inf)
        if row.banned:
            ends = scores[i, list(row.banned)]
            scores[i, list(row.banned)] = -torch.inf
            if row.forbidden is not None and scores[i].max() == -torch.inf:
                scores[i, list(row.banned)] = ends
    return scores


def _penalise_repetition(scores: Tensor, row: RowRequest) -> None:
    """Divide, in place, positive logits of tokens seen before by the penalty, and multiply
    negative ones by it. Source: Keskar et al. 2019, arXiv:1909.05858."""
    penalty = row.sampling.repetition_penalty
    seen = _token_ids(row.history, scores)
    values = scores[seen]  # a token that occurs often is written often, and the same each time
    scores[seen] = torch.where(values < 0, values * penalty, values / penalty)


def _penalise_counts(scores: Tensor, row: RowRequest) -> None:
    """Subtract, in place, from the logit of each token that occurs c > 0 times in the answer

        presence_penalty + c * frequency_penalty

    Source: OpenAI's API reference, which counts only sampled tokens.
    """
    tokens = _token_ids(row.history[-row.num_generated :], scores)
    scores[tokens] = scores[tokens] - row.sampling.presence_penalty
    each = scores.new_full(tokens.shape, -row.sampling.frequency_penalty)
    scores.index_add_(0, tokens, each)


def _token_ids(history: Sequence[int], like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(history, dtype=np.int64)).to(like.device)


def _top_k_and_min_p(scores: Tensor, rows: Sequence[RowRequest]) -> Tensor | None:
    """The least score of each row that stays, shape (rows, 1); None if all do. Top-k keeps the k
    highest and their equals, min-p those with a share of the likeliest token's probability."""
    vocab = scores.shape[-1]
    top_ks = [row.sampling.top_k for row in rows]
    cut = [i for i, k in enumerate(top_ks) if 0 < k < vocab]
    floors = [row.sampling.min_p for row in rows]
    if not cut and not any(floors):
        return None
    limits = _column([math.log(p) if p else -math.inf for p in floors], scores)
    if any(floors):
        limits += scores.amax(dim=-1, keepdim=True)
    if cut:
        part = scores if len(cut) == len(rows) else scores[cut]
        highest = part.topk(max(top_ks[i] for i in cut), dim=-1).values
        kth = torch.tensor([[top_ks[i] - 1] for i in cut], device=scores.device)
        limits[cut] = torch.maximum(limits[cut], highest.gather(1, kth))
    return limits


def _candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """All scores of each row that are no less than its `count` highest, beside others, and their
    tokens, in order; both of shape (rows, some).

    They are in parts of the row whose maxima are no less than the `count` highest maxima, which are
    found several times as fast. In float64, since their sums depend on what is between them.
    """
    size, vocab = scores.shape[-1] // _PART, scores.shape[-1]
    whole, rest = scores[:, : size * _PART].view(-1, _PART, size), scores[:, size * _PART :]
    maxima = whole.amax(dim=1)
    least = maxima.topk(count, dim=-1).values[:, -1:].clamp(min=torch.finfo(scores.dtype).min)
    most = max(count, int((maxima >= least).sum(dim=-1).max()))
    parts = maxima.topk(most, dim=-1).indices.sort(dim=-1).values[:, None].expand(-1, _PART, -1)
    ids = torch.arange(vocab, device=scores.device)
    own = ids[: size * _PART].view(_PART, size).expand(len(scores), -1, -1).gather(2, parts).flatten(1)
    values = torch.cat([whole.gather(2, parts).flatten(1), rest], dim=1)
    return values.double(), torch.cat([own, ids[size * _PART :].expand(len(scores), -1)], dim=1)


def _where(compare: Callable[..., Tensor], values: Tensor, limits: Tensor) -> Tensor:
    """1.0 where the comparison holds, else 0.0: on a CPU several times as fast as truth values."""
    return compare(values, limits, out=torch.empty_like(values))


def _top_p(chances: Tensor, top_ps: list[float]) -> Tensor:
    """Only the smallest set of likeliest tokens with share `top_p` of a row's sum or more."""
    ordered = chances.sort(dim=-1, descending=True).values
    cumulative = ordered.double().cumsum(dim=-1)
    above = cumulative - ordered
    kept = (above < _column(top_ps, above) * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    limits = ordered.gather(1, kept - 1)
    return _where(torch.ge, chances, limits).mul_(chances)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
