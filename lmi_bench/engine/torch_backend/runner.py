"""Runs one whole step in the calling thread: state, packing, forward pass, sampling.

`Forward` is the interface of the step back ends: from the rows of a step to logits. The runner,
common to all, tracks sequences and samples tokens; a back end has the weights and the cache in its
own layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.grammar import Follower
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED, BatchEntry, PromptLogprobs, StepBatch, StepKind, StepOutput
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.torch_backend.attention import PackedStep, PagedAttention, SequenceRows
from lmi_bench.engine.torch_backend.kv_cache import KvCache
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.sampler import Choice, RowRequest, choose, score_tokens
from lmi_bench.models.shape import ModelShape


class Forward(Protocol):
    """A model over its cache. Both calls write the keys and values of every row into the cache."""

    shape: ModelShape
    block_size: int
    num_blocks: int

    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Logits of the sampled rows in sequence order, shape (sampled rows, vocab)."""

    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        """The token with the highest logit, for each sampled row."""


class TorchForward:
    """The back end `torch`: runs on any device and is the reference for the others."""

    def __init__(self, model: Decoder, cache: KvCache, *, num_blocks: int | None = None) -> None:
        """num_blocks  cache blocks available to sequences; None: all"""
        self.shape = model.shape
        self.model = model
        self.cache = cache
        self.block_size = cache.shape.block_size
        self.num_blocks = num_blocks or cache.num_blocks
        self.attention = PagedAttention(cache, model)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        return self.run(self.attention.pack(sequences))

    def run(self, step: PackedStep) -> Tensor:
        """Logits of the step's sampled rows, shape (sampled rows, vocab)."""
        rows = (step.token_ids, step.positions, step.contexts)
        attend = partial(self.attention, step=step)
        return self.model.logits(*rows, attend, step.sampled_rows)

    @torch.inference_mode()
    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        token_ids: list[int] = self.logits(sequences).argmax(dim=-1).tolist()
        return token_ids


@dataclass(slots=True)
class _SequenceState:
    history: list[int]  # ids whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    last_sampled: int | None = None
    follower: Follower | None = None
    prompt_scores: PromptLogprobs = ()  # of a prompt whose log-probabilities were requested
    last_logits: Tensor | None = None  # of its last row so far, shape (1, vocab)


class ModelRunner:
    """Executes StepBatch values over one back end. A sequence's block table and last token are kept
    between batches; an entry with `begins` resets them, and `released_seq_ids` drops them."""

    def __init__(self, forward: Forward, *, sampling_seed: int) -> None:
        """sampling_seed  seed for requests without one"""
        self._forward = forward
        self._sampling_seed = sampling_seed
        self._states: dict[int, _SequenceState] = {}

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> list[StepOutput]:
        """Run a step; returns one output per entry, in the batch's order."""
        for seq_id in batch.released_seq_ids:
            self._states.pop(seq_id, None)
        if not batch.entries:
            return []
        sequences = [self._advance(entry) for entry in batch.entries]
        choices = self._choices(batch.entries, sequences)
        outputs = []
        taken = 0
        for entry, rows in zip(batch.entries, sequences, strict=True):
            outputs.append(self._output(entry, rows, choices[taken : taken + rows.sampled]))
            taken += rows.sampled
        return outputs

    def _choices(self, entries: Sequence[BatchEntry], sequences: Sequence[SequenceRows]) -> list[Choice]:
        """One choice per sampled row; without logits if all entries need only the likeliest
        token."""
        if all(_takes_likeliest(entry) for entry in entries):
            return [Choice(token_id, None) for token_id in self._forward.likeliest(sequences)]
        scored = [_scores_prompt(entry) for entry in entries]
        logits = self._forward.logits(
            [
                replace(rows, sampled=len(rows.token_ids)) if all_rows else rows
                for rows, all_rows in zip(sequences, scored, strict=True)
            ]
        )
        if any(scored):
            logits = self._score_prompts(entries, sequences, logits)
        requests = [
            request for entry, rows in zip(entries, sequences, strict=True) for request in self._requests(entry, rows)
        ]
        return choose(logits, requests) if requests else []

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], num_given: int) -> list[float]:
        """Natural log-probabilities of `token_ids[num_given:]`, each given all tokens before it.
        Overwrites the cache from its first block on: the runner must have no sequences."""
        if self._states:
            raise EngineError(f"{len(self._states)} sequences are in the cache: score before")
        size = self._forward.block_size
        blocks = tuple(range(-(-len(token_ids) // size)))
        sampled = len(token_ids) - num_given + 1
        entry = BatchEntry(0, StepKind.PREFILL, token_ids, 0, blocks, True, SamplingParams())
        rows = replace(self._advance(entry), sampled=sampled)
        self._states.clear()
        scores = torch.log_softmax(self._forward.logits([rows])[:-1].float(), dim=-1)
        tokens = torch.tensor(token_ids[num_given:], device=scores.device)
        values: list[float] = scores.gather(1, tokens[:, None])[:, 0].tolist()
        return values

    def _score_prompts(
        self, entries: Sequence[BatchEntry], sequences: Sequence[SequenceRows], logits: Tensor
    ) -> Tensor:
        """Keep the scores of the prompts' tokens that these rows foretell; returns the logits of
        the sampled rows alone."""
        kept, taken = [], 0
        for entry, rows in zip(entries, sequences, strict=True):
            count = len(rows.token_ids) if _scores_prompt(entry) else rows.sampled
            own, taken = logits[taken : taken + count], taken + count
            kept.append(own[count - rows.sampled :])
            if _scores_prompt(entry):
                state, tokens = self._states[entry.seq_id], rows.token_ids
                if state.last_logits is None:
                    tokens = tokens[1:]
                else:
                    own = torch.cat([state.last_logits, own])
                state.last_logits = own[-1:].clone()
                counts = [entry.sampling.top_logprobs] * len(tokens)
                state.prompt_scores += score_tokens(own[: len(tokens)], tokens, counts)
        return torch.cat(kept)

    def _advance(self, entry: BatchEntry) -> SequenceRows:
        """Update a sequence's state for this entry and return its rows."""
        if entry.begins:
            grammar = entry.sampling.grammar
            follower = None if grammar is None else Follower(grammar)
            cached = list(entry.cached_token_ids)
            self._states[entry.seq_id] = _SequenceState(cached, follower=follower)
        state = self._states.get(entry.seq_id)
        if state is None or len(state.history) < entry.first_position:
            raise EngineError(
                f"sequence {entry.seq_id} continues at position {entry.first_position} but only "
                f"its first {0 if state is None else len(state.history)} tokens are known"
            )
        token_ids = [self._known_id(entry, state, token_id) for token_id in entry.token_ids]
        state.block_table.extend(entry.new_block_ids)
        state.history[entry.first_position :] = token_ids
        self._check_rows(entry, state)
        return SequenceRows(
            token_ids=token_ids,
            first_position=entry.first_position,
            block_table=state.block_table,
            sampled=1 + entry.draft_length if entry.samples else 0,
        )

    def _known_id(self, entry: BatchEntry, state: _SequenceState, token_id: int) -> int:
        if token_id == LAST_SAMPLED:
            if state.last_sampled is None:
                raise EngineError(f"sequence {entry.seq_id} has sampled no token yet")
            return state.last_sampled
        if not 0 <= token_id < self._forward.shape.vocab_size:
            raise EngineError(
                f"sequence {entry.seq_id}: token id {token_id} is outside the vocabulary of "
                f"{self._forward.shape.vocab_size:,}"
            )
        return token_id

    def _check_rows(self, entry: BatchEntry, state: _SequenceState) -> None:
        """Reject a plan that would access unassigned cache: it would corrupt other sequences."""
        tokens, size = len(state.history), self._forward.block_size
        if tokens > self._forward.shape.max_positions:
            raise EngineError(
                f"sequence {entry.seq_id} has {tokens:,} tokens; the model supports "
                f"{self._forward.shape.max_positions:,} positions"
            )
        if tokens > len(state.block_table) * size:
            raise EngineError(
                f"sequence {entry.seq_id} has {tokens:,} tokens but {len(state.block_table)} blocks of {size}"
            )
        if any(not 0 <= block < self._forward.num_blocks for block in entry.new_block_ids):
            raise EngineError(
                f"sequence {entry.seq_id}: blocks {entry.new_block_ids} are not all below {self._forward.num_blocks}"
            )

    def _requests(self, entry: BatchEntry, rows: SequenceRows) -> list[RowRequest]:
        """One request per sampled row; a verified row's history ends with its draft token."""
        seed = entry.sampling.seed
        if seed is None:
            seed = self._sampling_seed + entry.seq_id
        history, follower = self._states[entry.seq_id].history, self._states[entry.seq_id].follower
        penalised = entry.sampling.penalised
        first = rows.context_tokens - rows.sampled + 1
        requests = []
        for number, position in enumerate(range(first, first + rows.sampled)):
            num_generated = entry.num_generated + number
            banned = self._banned(entry.sampling, num_generated + 1)
            before = history[:position] if penalised else ()
            forbidden = None
            if follower is not None:
                forbidden = torch.from_numpy(follower.forbidden(history[position - num_generated : position]))
            requests.append(RowRequest(entry.sampling, position, before, seed, banned, num_generated, forbidden))
        return requests

    def _banned(self, sampling: SamplingParams, number: int) -> tuple[int, ...]:
        """Ids that would end a request at its `number`-th token, before its minimum length."""
        if number > sampling.min_tokens:
            return ()
        ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ends += sampling.eos_token_ids
        return tuple(token_id for token_id in ends if token_id < self._forward.shape.vocab_size)

    def _output(self, entry: BatchEntry, rows: SequenceRows, choices: Sequence[Choice]) -> StepOutput:
        if not choices:
            return StepOutput(entry.seq_id)
        accepted = [choices[0]]
        drafts = rows.token_ids[len(rows.token_ids) - entry.draft_length :]
        for draft, following in zip(drafts, choices[1:], strict=True):
            # accepting only drafts equal to the sampled token keeps the distribution
            if draft != accepted[-1].token_id:
                break
            accepted.append(following)
        self._states[entry.seq_id].last_sampled = accepted[-1].token_id
        logprobs = tuple(c.logprob for c in accepted if c.logprob is not None)
        return StepOutput(
            entry.seq_id,
            tuple(choice.token_id for choice in accepted),
            logprobs if entry.sampling.logprobs else None,
            tuple(c.ranked for c in accepted) if entry.sampling.top_logprobs else None,
            self._prompt_scores(entry) if _scores_prompt(entry) else None,
        )

    def _prompt_scores(self, entry: BatchEntry) -> PromptLogprobs:
        state = self._states[entry.seq_id]  # after a preemption, generated tokens follow the prompt
        return state.prompt_scores[: len(state.history) - entry.num_generated - 1]


def _scores_prompt(entry: BatchEntry) -> bool:
    return entry.sampling.prompt_logprobs and entry.kind is StepKind.PREFILL


def _takes_likeliest(entry: BatchEntry) -> bool:
    """True if the entry needs only the token with the highest logit."""
    sampling = entry.sampling
    return not (entry.samples or _scores_prompt(entry)) or (
        sampling.greedy
        and not sampling.penalised
        and not sampling.logprobs
        and sampling.grammar is None
        and entry.num_generated >= sampling.min_tokens
    )
