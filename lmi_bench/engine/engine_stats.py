"""What an engine holds and has done, and what it did between two looks."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment: what runs and waits, the cache's blocks, and then the counts of
    `SchedulerStats` from the engine's start, which are explained there."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    steps: int
    prefill_steps: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    slot_steps_used: int
    slot_steps_idle: int
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
        return _share(self.slot_steps_idle, self.slot_steps_used + self.slot_steps_idle) or 0.0

    @property
    def cache_waste_frac(self) -> float:
        """Share of the reserved token slots that held no token."""
        return _share(self.cache_slots_unfilled, self.cache_slots_reserved) or 0.0

    @property
    def prefix_hit_frac(self) -> float | None:
        """Share of the prompt tokens that were found computed; None where none was looked up."""
        return _share(self.prefix_hit_tokens, self.prefix_tokens)

    @property
    def draft_acceptance_frac(self) -> float | None:
        """Share of the drafted tokens that held; None where none was drafted."""
        return _share(self.accepted_tokens, self.drafted_tokens)

    @property
    def tokens_per_decode(self) -> float | None:
        """Tokens that a sequence gained from a decode step on average: above 1 with speculation."""
        rows = self.slot_steps_used
        return _share(rows + self.accepted_tokens, rows)

    def since(self, earlier: EngineStats) -> dict[str, int | float | None]:
        """What was done after `earlier`: counts, and the shares of these counts by name.

        `peak_running` and `total_blocks` are those of now.
        """
        now, then = asdict(self), asdict(earlier)
        kept = ("running", "waiting", "used_blocks", "total_blocks", "peak_running")
        change = EngineStats(
            **{name: value - (0 if name in kept else then[name]) for name, value in now.items()}
        )
        done: dict[str, int | float | None] = {
            name: value
            for name, value in asdict(change).items()
            if name not in ("running", "waiting", "used_blocks")
        }
        done["slot_waste_frac"] = change.slot_waste_frac
        done["cache_waste_frac"] = change.cache_waste_frac
        if change.prefix_tokens:
            done["prefix_hit_frac"] = change.prefix_hit_frac
        if change.drafted_tokens:
            done["draft_acceptance_frac"] = change.draft_acceptance_frac
            done["tokens_per_decode"] = change.tokens_per_decode
        return done


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
