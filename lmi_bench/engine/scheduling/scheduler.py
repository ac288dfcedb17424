"""The scheduler: turns requests into steps under one of three batching policies.

The scheduler plans steps but does not run them: time comes in as `now_s`, steps go out as
`StepBatch`, results come back through `commit`. Requests are served first come, first served, in
order of (arrival, index). When blocks run out, the youngest running sequence is preempted: its
blocks are freed, and its prompt and output so far are recomputed later. The oldest is never
preempted while another runs, and `add` rejects a request that could not run alone, so every request
finishes.

A batch may be planned before the previous one is committed; a token not yet known is then
LAST_SAMPLED. Blocks of a sequence in flight are freed at the commit of its last batch, and nothing
is preempted before every batch is committed: until then `plan` returns None.
"""

from collections import abc, deque

from lmi_bench.core.errors import EngineError, InputError, OverloadedError
from lmi_bench.engine.scheduling.batch import (
    LAST_SAMPLED,
    BatchEntry,
    CommittedTokens,
    StepBatch,
    StepKind,
    StepOutput,
    WaitUntil,
)
from lmi_bench.engine.scheduling.block_manager import BlockManager
from lmi_bench.engine.scheduling.clients import Clients
from lmi_bench.engine.scheduling.config import BatchingPolicy, SchedulerConfig
from lmi_bench.engine.scheduling.drafting import Drafter
from lmi_bench.engine.scheduling.join_rule import JoinRule
from lmi_bench.engine.scheduling.residents import Residents
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.sequence import Sequence
from lmi_bench.engine.scheduling.stats import SchedulerStats
from lmi_bench.engine.scheduling.step_shape import StepShape


class Scheduler:
    """Plans steps over one KV cache. Not thread-safe: one loop owns it."""

    def __init__(self, config: SchedulerConfig, *, drafter: Drafter | None = None) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self._drafter = drafter
        self._sequences: dict[int, Sequence] = {}  # until their blocks are free
        self._clients = Clients(config)
        self._waiting = self._clients.queue
        self._residents = Residents(config)
        self._in_flight: deque[tuple[StepBatch, list[Sequence]]] = deque()
        self._released: list[int] = []
        self._next_index = 0
        self._next_step_id = 0
        self._batch_slots = 0  # size of the running dynamic batch when it started
        self._join = JoinRule(config.waiting_served_ratio, config.max_waiting_tokens)
        self._mixes_prefill = config.chunked_prefill and config.policy is BatchingPolicy.ROLLING
        self._deals_prompts = self._mixes_prefill and config.client_share < 1
        self._max_running = config.max_running

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._residents.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, including preempted ones, and those held outside it."""
        return len(self._waiting) + self._clients.num_held

    @property
    def blocks(self) -> BlockManager:
        """The KV blocks: how many are free, in use and allowed."""
        return self._residents.blocks

    def set_block_budget(self, num_blocks: int) -> None:
        """Limit the KV blocks in use from now on.

        The limit is at least what the longest request needs, or that would wait forever, and at
        most all blocks. If more are in use, sequences continue until one needs another block;
        then the youngest are preempted.
        """
        longest = self.blocks.blocks_for(min(self.config.max_model_len, self.config.cache_tokens))
        self.blocks.budget = min(self.config.num_blocks, max(longest, num_blocks))

    def audit(self) -> None:
        """Check the blocks' reference counts against the block tables; raises EngineError."""
        self.blocks.audit(seq.held_block_ids for seq in self._sequences.values())

    def running_seq_ids(self) -> list[int]:
        """The sequences in the batch, oldest first."""
        return [seq.seq_id for seq in self._residents.running]

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """The blocks of a sequence, in order of its positions; empty while it waits.

        Blocks outside its window stay listed, although another sequence may use them by now.
        """
        seq = self._sequences.get(seq_id)
        return () if seq is None else tuple(seq.block_ids)

    def add(
        self,
        seq_id: int,
        prompt_token_ids: abc.Sequence[int],
        sampling: SamplingParams,
        arrival_s: float,
        client: str | None = None,
    ) -> Sequence:
        """Queue a request that arrived at `arrival_s`. The prompt is kept, not copied. Clients
        take turns; those without one are first come, first served.

        Raises CapacityError if it can never run, OverloadedError if max_concurrent_requests, or
        the client's share of them, are already in the engine.
        """
        num_prompt_tokens = len(prompt_token_ids)
        self.config.check_fits(seq_id, num_prompt_tokens, sampling.max_new_tokens)
        limit = self.config.max_concurrent_requests
        if limit is not None and self.num_running + self.num_waiting >= limit:
            raise OverloadedError(
                f"{limit} requests are already in the engine (max_concurrent_requests): retry later, or raise the limit"
            )
        if client is not None:
            self._clients.check(client)
        if seq_id in self._sequences:
            raise InputError(f"request {seq_id} is already in the engine: ids must be unique")
        seq = Sequence(
            seq_id=seq_id,
            index=self._next_index,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            arrival_s=arrival_s,
            num_prompt_tokens=num_prompt_tokens,
            tokens_to_fill=num_prompt_tokens,
        )
        self._next_index += 1
        self._sequences[seq_id] = seq
        if client is None:
            self._clients.put(seq)
        else:
            self._clients.add(seq, client)
        return seq

    def plan(self, now_s: float) -> StepBatch | WaitUntil | None:
        """The step to run now, or how long to wait for one; None: until a request or commit."""
        entries: list[BatchEntry] = []
        members: list[Sequence] = []
        if self._drafter is not None and self._in_flight:
            return None  # the number of accepted draft tokens is known only after the commit
        if self.config.recompute_on_join and not self._clear_for_newcomer():
            return None
        if self._mixes_prefill:
            if not self._make_room():
                return None
            decode = self._plan_decode(entries, members)
            prefill = self._plan_prefill(entries, members, now_s)
        else:
            before = self.num_running
            prefill, decode = self._plan_prefill(entries, members, now_s), (0, 0, 0)
            if self.num_running > before:
                self._join.admitted(before)
            if not entries:
                if not self._make_room():
                    return None
                decode = self._plan_decode(entries, members)
                self._join.after_decoding(1)
        if not entries:
            is_dynamic = self.config.policy is BatchingPolicy.DYNAMIC
            at_s = self._batch_leaves_s() if is_dynamic and not self._in_flight else None
            return None if at_s is None else WaitUntil(at_s)
        batch = StepBatch(
            step_id=self._next_step_id,
            entries=tuple(entries),
            shape=StepShape(*prefill, *decode, self._residents.take_copied_tokens()),
            released_seq_ids=tuple(self._released),
        )
        self._released.clear()
        self._next_step_id += 1
        self._in_flight.append((batch, members))
        self.stats.count_steps(batch.shape, self._batch_slots)
        self.stats.count_cache(*self._residents.slots())
        return batch

    def commit(self, batch: StepBatch, outputs: abc.Sequence[StepOutput], now_s: float) -> list[CommittedTokens]:
        """Process the results of the oldest batch in flight; `now_s` is the end of its step.

        Returns each sequence's new tokens, in batch order; sequences that have ended meanwhile
        get none. Raises EngineError if the outputs do not match this batch.
        """
        if not self._in_flight or self._in_flight[0][0] is not batch:
            raise EngineError(f"step {batch.step_id} is not the oldest step in flight")
        if len(outputs) != len(batch.entries):
            raise EngineError(
                f"step {batch.step_id} has {len(batch.entries)} entries, the executor returned {len(outputs)} outputs"
            )
        _, members = self._in_flight.popleft()
        committed: list[CommittedTokens] = []
        ended = False
        for entry, seq, output in zip(batch.entries, members, outputs, strict=True):
            entry.check(output)
            seq.num_in_flight -= 1
            if entry.samples:
                seq.num_pending -= 1
            if seq.finish_reason is not None:  # it ended while this step ran
                if not seq.num_in_flight:
                    self._release(seq)
                continue
            computed = entry.first_position + len(entry.token_ids)
            if entry.kind is StepKind.VERIFY:  # positions of rejected tokens are overwritten
                computed = seq.num_computed = entry.first_position + len(output.token_ids)
            if not output.token_ids:
                self._residents.cache_full_blocks(seq, computed)
                self._residents.free_outside_window(seq, computed)
                continue
            gained = seq.accept(output, entry.draft_length, self.stats)
            committed.append(gained)
            self._residents.cache_full_blocks(seq, min(computed, seq.num_tokens))
            if gained.finish_reason is not None:
                ended = True
                seq.finish_reason = gained.finish_reason
                if not seq.num_in_flight:
                    self._release(seq)
            else:
                self._residents.free_outside_window(seq, computed)
        if ended:
            running = self._residents.running
            self._residents.running = [seq for seq in running if seq.finish_reason is None]
        return committed

    def finish(self, seq_id: int, reason: str) -> None:
        """End a sequence now (stop string, cancellation); no effect if it has ended.

        Its blocks are freed now, or at the commit of its last batch in flight.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq.finish_reason is not None:
            return
        seq.finish_reason = reason
        if not seq.admitted:
            self._clients.remove(seq)
            del self._sequences[seq_id]
            return
        self._residents.remove(seq)
        if not seq.num_in_flight:
            self._release(seq)

    def decode_shape(self) -> StepShape:
        """The shape of the next step if `identical_decode_steps` is above 0."""
        context = sum(seq.num_computed for seq in self._residents.running)
        return StepShape.decoding(self.num_running, context + self.num_running)

    def identical_decode_steps(self) -> int:
        """Number of steps from now in which only the context lengths change.

        In each of them every running sequence decodes one token without finishing, none joins and
        the blocks suffice, provided that no request arrives or is cancelled and no token ends a
        sequence early. 0: the next step may be different.
        """
        residents = self._residents
        if not residents.running or residents.num_filling:
            return 0
        windowed_cache = self.config.prefix_caching and self.config.attention_window is not None
        if self._in_flight or self._drafter is not None or windowed_cache:
            return 0  # blocks that a window frees on the way decide which cached ones go
        most = min(seq.num_left for seq in residents.running) - 1
        if self._next_to_admit() is not None:
            if self._may_join():
                return 0
            most = min(most, self._join.steps_to_wait)
        if self._waiting and self.num_running < self._max_running:
            # the oldest waits for blocks: a window frees some, a step may complete cached ones
            until = 0 if self.config.prefix_caching else residents.steps_until_window_frees()
            most = most if until is None else min(most, until)
        return residents.steps_that_fit(most)

    def skip_decode_steps(self, num_steps: int, token_id: int) -> None:
        """Apply `num_steps` identical decode steps at once: each gave each sequence `token_id`.

        Only for simulations, since no executor sees the blocks. The scheduler's state equals that
        after `num_steps` rounds of `plan` and `commit`; at most `identical_decode_steps()`.
        """
        shape = self.decode_shape()
        self._join.after_decoding(num_steps)
        self.stats.count_cache(*self._residents.slots_over_steps(num_steps))
        self._residents.take_steps(num_steps, token_id)
        self._next_step_id += num_steps
        self.stats.generation_tokens += num_steps * shape.decode_sequences
        self.stats.count_steps(shape, self._batch_slots, num_steps)

    # Admission

    def _next_to_admit(self, shares: abc.Mapping[str | None, int] | None = None) -> Sequence | None:
        """The oldest waiting sequence if a batch slot and enough blocks are free.

        shares  of a step's prompt tokens: the oldest whose client has some left
        """
        if not self._waiting or self.num_running >= self._max_running:
            return None
        if self.config.policy is BatchingPolicy.DYNAMIC and self._batch_slots:
            return None  # nothing joins a dynamic batch before it ends
        seq: Sequence | None = self._waiting[0]
        if shares is not None:
            seq = next((each for each in self._waiting if shares.get(each.client)), None)
        return seq if seq is not None and self._residents.has_room_for(seq) else None

    def _may_begin(self, seq: Sequence) -> bool:
        """Whether a slot and enough blocks are free for a waiting sequence now."""
        has_slot = self.num_running < self._max_running and self._may_join()
        return has_slot and self._residents.has_room_for(seq)

    def _may_join(self) -> bool:
        """Whether waiting requests may be admitted beside the running ones now."""
        least = self._join.least_joiners(self.num_running)
        return least == 0 or self._residents.can_take(self._waiting, least, self.config)

    def _admit(self, seq: Sequence) -> None:
        self._waiting.remove(seq)  # the first, unless that one's client has had its share
        self._clients.turn = max(self._clients.turn, seq.turn)
        self._residents.admit(seq)
        if self.config.prefix_caching:
            self.stats.prefix_tokens += seq.tokens_to_fill
            self.stats.prefix_hit_tokens += seq.num_cached
        self.stats.peak_running = max(self.stats.peak_running, self.num_running)

    def _start_dynamic_batch(self, now_s: float) -> None:
        """Start a batch if it is full or its oldest request has waited long enough."""
        if self._residents.running or self._in_flight:
            return
        self._batch_slots = 0
        at_s = self._batch_leaves_s()
        if at_s is None or at_s > now_s:
            return
        while (seq := self._next_to_admit()) is not None:
            self._admit(seq)
        self._batch_slots = self.num_running

    def _batch_leaves_s(self) -> float | None:
        """When the next dynamic batch starts; None while no request waits."""
        if not self._waiting:
            return None
        is_full = len(self._waiting) >= self.config.batch_size
        return self._waiting[0].arrival_s + (0.0 if is_full else self.config.max_batch_delay_s)

    def _plan_prefill(
        self, entries: list[BatchEntry], members: list[Sequence], now_s: float
    ) -> tuple[int, int, int, int]:
        """Plan a step's prompt chunks: begun prompts first, then new requests, oldest first.

        A prompt is split only with chunked prefill or if it exceeds a step's prefill limit.
        Returns the prefill fields of the step's shape.
        """
        if self.config.policy is BatchingPolicy.DYNAMIC:
            self._start_dynamic_batch(now_s)
        if not self._residents.num_filling and not self._waiting:
            return (0, 0, 0, 0)
        budget = limit = self.config.max_rolling_batch_prefill_tokens
        rows = pairs = context = 0
        shares: dict[str | None, int] | None = None
        if self._deals_prompts:
            shares = self._clients.prompt_shares(self._residents.filling(), limit, self._may_begin)
        for seq in self._filling(shares):
            left = seq.tokens_to_fill - seq.num_computed
            if left > budget and not (self._mixes_prefill or seq.tokens_to_fill > limit):
                break
            room = budget if shares is None else min(budget, shares.get(seq.client, 0))
            count = min(left, room)
            if not count:
                continue  # the step is full, or its client's share of it
            if not seq.admitted:
                self._admit(seq)
                left = seq.tokens_to_fill - seq.num_computed  # less after a prefix-cache hit
                count = min(left, room)
            first = seq.num_computed
            begins = first == seq.num_cached
            last_chunk = count == left
            entries.append(
                BatchEntry(
                    seq_id=seq.seq_id,
                    kind=StepKind.PREFILL,
                    token_ids=seq.token_ids(first, count),
                    first_position=first,
                    new_block_ids=tuple(seq.block_ids) if begins else (),
                    samples=last_chunk,
                    sampling=seq.sampling,
                    num_generated=len(seq.output_token_ids),
                    cached_token_ids=seq.token_ids(0, first) if begins and first else (),
                )
            )
            members.append(seq)
            seq.num_computed += count
            seq.num_in_flight += 1
            if last_chunk:
                seq.num_pending += 1
                self._residents.num_filling -= 1
            budget -= count
            if shares is not None:
                shares[seq.client] -= count
            rows += 1
            pairs += count * first + count * (count + 1) // 2
            context += first
        return (rows, limit - budget, pairs, context)

    def _filling(self, shares: abc.Mapping[str | None, int] | None) -> abc.Iterator[Sequence]:
        """Sequences with prompt tokens left to compute; then new ones while there is room."""
        yield from self._residents.filling()
        if self.config.policy is BatchingPolicy.DYNAMIC:
            return  # the batch was admitted as a whole
        if not self._may_join():
            return
        while (seq := self._next_to_admit(shares)) is not None:
            yield seq
            if not seq.admitted:  # the step is full
                return

    def _make_room(self) -> bool:
        """Ensure one more token slot for each decoding sequence, by preemption if necessary.

        False: blocks are missing, and batches in flight must be committed before a preemption.
        """
        while self._residents.spare_blocks() < 0:
            if self._in_flight:
                return False
            self._send_back_youngest()
            self.stats.preemptions += 1
        return True

    def _clear_for_newcomer(self) -> bool:
        """Return the whole batch to the queue if a waiting request can join it.

        The batch precedes the new request there, so all are admitted and recomputed together: in
        one step, or in several before the next decode if the batch has more than
        max_rolling_batch_prefill_tokens. False: batches in flight must be committed first.
        """
        residents = self._residents
        if not residents.running:
            self._join.decoded = 0
        if residents.num_filling or not self._join.decoded or self._next_to_admit() is None:
            return True
        if self._in_flight:
            return False
        while residents.running:
            self._send_back_youngest()
        self._join.decoded = 0
        self.stats.rebuilt_batches += 1
        return True

    def _send_back_youngest(self) -> None:
        seq = self._residents.running[-1]
        self._residents.remove(seq)
        self._free(seq)
        seq.restart()
        self._clients.put(seq)

    def _plan_decode(self, entries: list[BatchEntry], members: list[Sequence]) -> tuple[int, int, int]:
        """Plan one token for each sequence with a computed prompt; returns the decode fields."""
        rows = tokens = context = 0
        spare = self._residents.spare_blocks() if self._drafter is not None else 0
        for seq in self._residents.decoding():
            position, pending = seq.num_computed, seq.num_pending
            new_block_ids: tuple[int, ...] = ()
            if position == seq.slot_capacity:
                new_block_ids = self._residents.grow(seq, 1)
            token_ids: tuple[int, ...] = (LAST_SAMPLED if pending else seq.output_token_ids[-1],)
            kind, drafted = StepKind.DECODE, 0
            if self._drafter is not None and seq.num_left > 1:
                draft = self._drafter(seq, seq.num_left - 1)[: seq.num_left - 1]
                missing = self.blocks.blocks_for(position + 1 + len(draft)) - len(seq.block_ids)
                if 0 < missing <= spare:
                    new_block_ids += self._residents.grow(seq, missing)
                    spare -= missing
                draft = draft[: seq.slot_capacity - position - 1]  # a draft preempts no sequence
                if draft:
                    kind, drafted = StepKind.VERIFY, len(draft)
                    token_ids += draft
            sampling, generated = seq.sampling, len(seq.output_token_ids) + pending
            step = (kind, token_ids, position, new_block_ids)
            entries.append(BatchEntry(seq.seq_id, *step, True, sampling, drafted, generated))
            members.append(seq)
            seq.num_computed = position + 1 + drafted
            seq.num_pending = pending + 1
            seq.num_in_flight += 1
            rows += 1
            tokens += 1 + drafted
            context += position + 1 + drafted
        return (rows, tokens, context)

    def _release(self, seq: Sequence) -> None:
        self._free(seq)
        del self._sequences[seq.seq_id]
        self._clients.leave(seq)

    def _free(self, seq: Sequence) -> None:
        self._residents.release(seq)
        if seq.num_computed > seq.num_cached:  # otherwise the executor has never seen it
            self._released.append(seq.seq_id)
