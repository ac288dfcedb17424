"""Counters of a scheduler's work."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.engine.scheduling.step_shape import StepShape


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the scheduler was created.

    prompt_tokens     prompt tokens computed, including recomputation after a preemption
    slot_steps_used   rows of decode steps that yielded a token
    slot_steps_idle   slots of decode steps whose sequence had ended or was preempted while the
                      rest of its dynamic batch continued
    cache_slots_reserved  token slots reserved by running sequences, summed over the steps
    cache_slots_unfilled  those of them without a token yet: the waste of the KV layout
    peak_running      maximum sequences in the batch at one time
    prefix_tokens     prompt tokens looked up in the prefix cache; prefix_hit_tokens: found
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
    rebuilt_batches: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def slot_waste_frac(self) -> float:
        """Share of the decode steps' slots that were idle."""
        slots = self.slot_steps_used + self.slot_steps_idle
        return self.slot_steps_idle / slots if slots else 0.0

    def count_steps(self, shape: StepShape, batch_slots: int, num_steps: int = 1) -> None:
        """Count steps of one shape; `batch_slots`: size of the dynamic batch when it started."""
        self.steps += num_steps
        self.prompt_tokens += shape.prefill_tokens * num_steps
        if shape.prefill_sequences:
            self.prefill_steps += num_steps
        if shape.decode_sequences:
            self.slot_steps_used += shape.decode_sequences * num_steps
            self.slot_steps_idle += max(0, batch_slots - shape.decode_sequences) * num_steps

    def count_cache(self, reserved: int, filled: int) -> None:
        """Count the running sequences' token slots in one or more steps."""
        self.cache_slots_reserved += reserved
        self.cache_slots_unfilled += reserved - filled
