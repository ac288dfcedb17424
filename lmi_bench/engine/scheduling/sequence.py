"""The scheduler's state of one request: its tokens, blocks and progress."""

from collections import abc
from dataclasses import dataclass, field

from lmi_bench.engine.scheduling.batch import CommittedTokens, StepOutput
from lmi_bench.engine.scheduling.prefix_cache import block_digest
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.stats import SchedulerStats


@dataclass(eq=False, slots=True)
class Sequence:
    """A request from its arrival to its end. Lengths and positions are in tokens.

    index           order among requests with the same arrival time
    tokens_to_fill  tokens to compute before the next one can be sampled: the prompt, and after a
                    preemption also the output so far
    num_computed    positions in the cache, including those of batches in flight
    num_pending     tokens that batches in flight will sample
    num_in_flight   batches in flight that contain the sequence
    slot_capacity   token slots of its blocks
    block_digests   digests of its full blocks, computed on demand for the prefix cache
    num_cached      tokens found in the prefix cache at the latest admission
    num_inserted_blocks  full blocks inserted into the prefix cache
    num_freed_blocks  blocks at the table's head that were freed: outside every later window
    num_accepted    draft tokens accepted so far; num_rejected: verifications with a rejection
    client, turn    who sent it, and its place in the queue before the arrival; None and 0 if all
                    clients count as one
    drafting, pace  state that a drafter keeps between steps, and its acceptance history
    """

    seq_id: int
    index: int
    prompt_token_ids: abc.Sequence[int]
    sampling: SamplingParams
    arrival_s: float
    num_prompt_tokens: int
    tokens_to_fill: int
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    slot_capacity: int = 0
    num_computed: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    admitted: bool = False
    finish_reason: str | None = None
    block_digests: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_inserted_blocks: int = 0
    num_freed_blocks: int = 0
    client: str | None = None
    turn: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    drafting: object = None
    pace: object = None

    def __lt__(self, other: "Sequence") -> bool:
        """Whether it comes first: by arrival, then index."""
        return (self.arrival_s, self.index) < (other.arrival_s, other.index)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated, not counting those in flight."""
        return self.sampling.max_new_tokens - len(self.output_token_ids) - self.num_pending

    @property
    def held_block_ids(self) -> list[int]:
        """Its blocks without those already freed."""
        return self.block_ids[self.num_freed_blocks :]

    def token_ids(self, first: int, count: int) -> abc.Sequence[int]:
        """The tokens at positions first to first + count - 1, copying as little as possible."""
        end = first + count
        split = self.num_prompt_tokens
        if end <= split:
            whole = first == 0 and end == split
            return self.prompt_token_ids if whole else self.prompt_token_ids[first:end]
        outputs = self.output_token_ids
        if first >= split:
            return tuple(outputs[first - split : end - split])
        return (*self.prompt_token_ids[first:], *outputs[: end - split])

    def digests(self, num_blocks: int, block_size: int) -> list[bytes]:
        """The digests of the first `num_blocks` full blocks, each computed once."""
        known = self.block_digests
        while len(known) < num_blocks:
            tokens = self.token_ids(len(known) * block_size, block_size)
            known.append(block_digest(known[-1] if known else b"", tokens))
        return known[:num_blocks]

    def end_reason(self, token_id: int, num_output_tokens: int) -> str | None:
        """Why the sequence ends with `token_id` as its `num_output_tokens`-th token, or None."""
        sampling = self.sampling
        if num_output_tokens > sampling.min_tokens:
            if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
                return "eos_token"
            if token_id in sampling.stop_token_ids:
                return "stop_sequence"
        return "length" if num_output_tokens >= sampling.max_new_tokens else None

    def accept(self, output: StepOutput, drafted: int, stats: SchedulerStats) -> CommittedTokens:
        """Append an output's tokens, up to one that ends the sequence, and count them."""
        outputs = self.output_token_ids
        token_ids, logprobs, ranked = output.token_ids, output.logprobs, output.top_logprobs
        reason = None
        for count, token_id in enumerate(token_ids, start=1):
            outputs.append(token_id)
            reason = self.end_reason(token_id, len(outputs))
            if reason is not None:
                token_ids = token_ids[:count]
                logprobs = None if logprobs is None else logprobs[:count]
                ranked = None if ranked is None else ranked[:count]
                break
        # one of the output tokens is the model's own, not a draft token
        held = min(len(token_ids), len(output.token_ids) - 1) if drafted else 0
        if drafted:
            stats.drafts += 1
            self.num_accepted += len(output.token_ids) - 1
            self.num_rejected += len(output.token_ids) <= drafted
        stats.generation_tokens += len(token_ids)
        stats.drafted_tokens += drafted
        stats.accepted_tokens += held
        return CommittedTokens(self.seq_id, token_ids, logprobs, ranked, output.prompt, reason, drafted, held)

    def restart(self) -> None:
        """Discard what was computed; all tokens so far are computed again at readmission."""
        self.num_computed = 0
        self.num_cached = 0
        self.num_inserted_blocks = 0
        self.tokens_to_fill = self.num_tokens
        self.admitted = False
