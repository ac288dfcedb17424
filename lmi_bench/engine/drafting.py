"""Speculative decoding with a draft model: one executor drafts, another verifies.

The draft model has its own cache but uses the target's block tables, with the same number of
blocks, so it needs no block manager. It samples with the request's settings and seed: a draft token
is accepted if the target samples the same one. Source: Leviathan et al. 2023, arXiv:2211.17192.
"""

import asyncio
from dataclasses import dataclass, field, replace

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.executor import Executor, WatchedExecutor, first_of
from lmi_bench.engine.scheduling.batch import DRAFTED, BatchEntry, StepBatch, StepKind, StepOutput
from lmi_bench.engine.scheduling.step_shape import StepShape


@dataclass(slots=True)
class _Mirror:
    """The draft model's progress in a sequence.

    filled  positions whose keys and values it has cached; tail: the known tokens after them
    drafts  its draft tokens of this step
    """

    filled: int
    tail: list[int] = field(default_factory=list)
    new_block_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()


class DraftingExecutor:
    """Implements `Executor` over a target and a draft: replaces every DRAFTED by a draft token.

    Both have the same block size and vocabulary; the caller ensures that the draft has as many
    blocks and positions as the target. Closes both.
    """

    max_in_flight = 1  # the draft starts from the previous step's token

    def __init__(self, target: Executor, draft: Executor) -> None:
        if target.block_size != draft.block_size:
            raise InputError(
                f"the draft model has KV blocks of {draft.block_size} tokens, the target model "
                f"{target.block_size}: they share block tables and need the same size"
            )
        self.block_size = target.block_size
        self._target = target
        self._draft = draft
        self._mirrors: dict[int, _Mirror] = {}

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Draft, then run the step; one output per entry, in batch order."""
        for seq_id in batch.released_seq_ids:
            self._mirrors.pop(seq_id, None)
        await self._follow(batch)
        entries = tuple(self._with_drafts(entry) for entry in batch.entries)
        outputs = await self._target.execute(replace(batch, entries=entries))
        for entry, output in zip(entries, outputs, strict=True):
            if entry.kind is StepKind.VERIFY:
                self._settle(entry, len(output.token_ids))
        return outputs

    async def close(self) -> None:
        try:
            await self._target.close()
        finally:
            await self._draft.close()

    async def lost(self) -> EngineError:
        """Return when either executor has lost a part; never if neither can."""
        watched = [e for e in (self._target, self._draft) if isinstance(e, WatchedExecutor)]
        if not watched:
            await asyncio.get_running_loop().create_future()
        return await first_of([executor.lost() for executor in watched])

    async def _follow(self, batch: StepBatch) -> None:
        """Run the draft model over the step's prompts and draft tokens for its verify rows."""
        prompts: list[BatchEntry] = []
        guessing: list[BatchEntry] = []
        for entry in batch.entries:
            if entry.kind is StepKind.PREFILL:
                prompts.append(replace(entry, samples=False))
                end = entry.first_position + len(entry.token_ids)
                self._mirrors[entry.seq_id] = _Mirror(filled=end)
                continue
            mirror = self._mirrors[entry.seq_id]
            mirror.tail.append(entry.token_ids[0])
            mirror.new_block_ids += entry.new_block_ids
            if entry.kind is StepKind.VERIFY and DRAFTED in entry.token_ids:
                guessing.append(entry)
        released = batch.released_seq_ids
        for step in range(max((entry.draft_length for entry in guessing), default=0)):
            guessing = [entry for entry in guessing if entry.draft_length > step]
            rows = [self._next_row(entry) for entry in guessing]
            shape = _with_rows(batch.shape if prompts else StepShape(), rows)
            outputs = await self._draft.execute(StepBatch(batch.step_id, (*prompts, *rows), shape, released))
            for row, output in zip(rows, outputs[len(prompts) :], strict=True):
                mirror = self._mirrors[row.seq_id]
                mirror.filled += len(row.token_ids)
                mirror.tail = [output.token_ids[0]]
                mirror.drafts += (output.token_ids[0],)
            prompts, released = [], ()
        if prompts or released:
            shape = _with_rows(batch.shape, [])
            await self._draft.execute(StepBatch(batch.step_id, tuple(prompts), shape, released))

    def _next_row(self, entry: BatchEntry) -> BatchEntry:
        """The draft model's next row of a sequence: the tokens that it has not computed yet."""
        mirror = self._mirrors[entry.seq_id]
        new_block_ids, mirror.new_block_ids = mirror.new_block_ids, ()
        return BatchEntry(
            seq_id=entry.seq_id,
            kind=StepKind.DECODE,
            token_ids=tuple(mirror.tail),
            first_position=mirror.filled,
            new_block_ids=new_block_ids,
            samples=True,
            sampling=replace(entry.sampling, logprobs=False, top_logprobs=0),
            num_generated=entry.num_generated + len(mirror.drafts),
        )

    def _with_drafts(self, entry: BatchEntry) -> BatchEntry:
        if entry.kind is not StepKind.VERIFY:
            return entry
        mirror = self._mirrors[entry.seq_id]
        if not mirror.drafts:  # the scheduler drafted
            return entry
        return replace(entry, token_ids=(entry.token_ids[0], *mirror.drafts))

    def _settle(self, entry: BatchEntry, num_tokens: int) -> None:
        """Discard rejected draft tokens: their positions are overwritten."""
        mirror = self._mirrors[entry.seq_id]
        if not mirror.drafts:
            mirror.tail.extend(entry.token_ids[1:num_tokens])
            return
        mirror.drafts = ()
        known_to = entry.first_position + num_tokens  # the position of the newest token
        last_guess = mirror.tail  # not in the cache: it was never an input
        mirror.tail = last_guess if mirror.filled < known_to else []
        mirror.filled = min(mirror.filled, known_to)


def _with_rows(shape: StepShape, rows: list[BatchEntry]) -> StepShape:
    """A shape's prefill part with the draft model's decode rows."""
    return replace(
        shape,
        decode_sequences=len(rows),
        decode_tokens=sum(len(row.token_ids) for row in rows),
        decode_context_tokens=sum(row.first_position + len(row.token_ids) for row in rows),
    )
