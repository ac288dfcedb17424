"""What a scheduler has done so far, in counts."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.engine.scheduling.step_shape import StepShape


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the scheduler was made.

    prompt_tokens     prompt tokens computed, those computed again after a preemption included
    slot_steps_used   rows of decode steps that gave a token
    slot_steps_idle   slots of decode steps whose member had ended or lost its blocks while the
                      rest of its dynamic batch ran on
    cache_slots_reserved  token slots that running sequences held, summed over the steps; and
    cache_slots_unfilled  those of them that held no token yet: the waste of the KV layout
    peak_running      most sequences in the batch at one time
    prefix_tokens     prompt tokens that the prefix cache was asked for; prefix_hit_tokens: found
    rebuilt_batches   batches whose sequences were all computed anew because a request joined
    drafts            guesses of one or more tokens that were verified, drafted_tokens together;
                      accepted_tokens: those of them that held
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
        """Share of the decode steps' slots that stood idle."""
        slots = self.slot_steps_used + self.slot_steps_idle
        return self.slot_steps_idle / slots if slots else 0.0

    def count_steps(self, shape: StepShape, batch_slots: int, num_steps: int = 1) -> None:
        """Count steps of one shape; `batch_slots`: members with which a dynamic batch left."""
        self.steps += num_steps
        self.prompt_tokens += shape.prefill_tokens * num_steps
        if shape.prefill_sequences:
            self.prefill_steps += num_steps
        if shape.decode_sequences:
            self.slot_steps_used += shape.decode_sequences * num_steps
            self.slot_steps_idle += max(0, batch_slots - shape.decode_sequences) * num_steps

    def count_cache(self, reserved: int, filled: int) -> None:
        """Count the token slots that the running sequences hold in a step, or in several."""
        self.cache_slots_reserved += reserved
        self.cache_slots_unfilled += reserved - filled
