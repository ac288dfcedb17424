"""Counters of a scheduler's work."""

from dataclasses import asdict, dataclass, fields
from typing import Self

from lmi_bench.engine.scheduling.step_shape import StepShape


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the scheduler was created, or between two such counts.

    prompt_tokens     prompt tokens computed, including recomputation after a preemption
    slot_steps_used   rows of decode steps that yielded a token
    slot_steps_idle   slots of decode steps whose sequence had ended or was preempted while the
                      rest of its dynamic batch continued
    cache_slots_reserved  token slots reserved by running sequences, summed over the steps
    cache_slots_unfilled  those of them without a token yet: the waste of the KV layout
    peak_running      maximum sequences in the batch at one time
    prefix_tokens     prompt tokens looked up in the prefix cache; prefix_hit_tokens: found;
                      host_hit_tokens: those of them on the host
    rebuilt_batches   batches recomputed because a request joined
    drafts            verified drafts, with drafted_tokens in total;
                      accepted_tokens: those of them accepted
    """

    steps: int = 0
    prefill_steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    slot_steps_used: int = 0
    slot_steps_idle: int = 0
    cache_slots_reserved: int = 0
    cache_slots_unfilled: int = 0
    peak_running: int = 0
    prefix_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_hit_tokens: int = 0
    rebuilt_batches: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def slot_waste_frac(self) -> float:
        """Share of the decode steps' slots that were idle."""
        return _share(self.slot_steps_idle, self.slot_steps_used + self.slot_steps_idle) or 0.0

    @property
    def cache_waste_frac(self) -> float:
        """Share of the reserved token slots that held no token."""
        return _share(self.cache_slots_unfilled, self.cache_slots_reserved) or 0.0

    @property
    def prefix_hit_frac(self) -> float | None:
        """Share of the prompt tokens found in the prefix cache; None if none was looked up."""
        return _share(self.prefix_hit_tokens, self.prefix_tokens)

    @property
    def draft_acceptance_frac(self) -> float | None:
        """Share of the drafted tokens that were accepted; None if none was drafted."""
        return _share(self.accepted_tokens, self.drafted_tokens)

    @property
    def tokens_per_decode(self) -> float | None:
        """Mean tokens that a sequence gains in a decode step: above 1 with speculation."""
        rows = self.slot_steps_used
        return _share(rows + self.accepted_tokens, rows)

    def __add__(self, other: Self) -> Self:
        return self._combined(other, 1)

    def __sub__(self, earlier: Self) -> Self:
        return self._combined(earlier, -1)

    def _combined(self, other: Self, sign: int) -> Self:
        names = (field.name for field in fields(self))
        return type(self)(**{key: getattr(self, key) + sign * getattr(other, key) for key in names})

    def count_steps(self, shape: StepShape, batch_slots: int, num_steps: int = 1) -> None:
        """Count steps of one shape; `batch_slots`: size of the dynamic batch when it started."""
        self.steps += num_steps
        self.prompt_tokens += shape.prefill_tokens * num_steps
        self.host_hit_tokens += shape.copied_tokens * num_steps
        if shape.prefill_sequences:
            self.prefill_steps += num_steps
        if shape.decode_sequences:
            self.slot_steps_used += shape.decode_sequences * num_steps
            self.slot_steps_idle += max(0, batch_slots - shape.decode_sequences) * num_steps

    def count_cache(self, reserved: int, filled: int) -> None:
        """Count the running sequences' token slots in one or more steps."""
        self.cache_slots_reserved += reserved
        self.cache_slots_unfilled += reserved - filled


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests in the batch and in the queue, KV cache blocks, and the work done so far."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    done: SchedulerStats

    @property
    def used_frac(self) -> float:
        """Used share of the blocks."""
        return self.used_blocks / self.total_blocks

    def since(self, earlier: "EngineStats") -> dict[str, int | float | None]:
        """Counts of the work done after `earlier`, and their shares, by name. `peak_running` and
        `total_blocks` are the current ones."""
        change = self.done - earlier.done
        change.peak_running = self.done.peak_running
        done: dict[str, int | float | None] = {"total_blocks": self.total_blocks, **asdict(change)}
        done["slot_waste_frac"] = change.slot_waste_frac
        done["cache_waste_frac"] = change.cache_waste_frac
        if change.prefix_tokens:
            done["prefix_hit_frac"] = change.prefix_hit_frac
        if not change.host_hit_tokens:
            del done["host_hit_tokens"]
        if change.drafted_tokens:
            done["draft_acceptance_frac"] = change.draft_acceptance_frac
            done["tokens_per_decode"] = change.tokens_per_decode
        return done
