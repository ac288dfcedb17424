"""The state of an engine at one time, and its work between two times."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lmi_bench.engine.scheduling.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests in the batch and in the queue, KV cache blocks, and the work done so far."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    done: SchedulerStats

    def since(self, earlier: EngineStats) -> dict[str, int | float | None]:
        """Counts of the work done after `earlier`, and their shares, by name.

        `peak_running` and `total_blocks` are the current ones.
        """
        change = self.done - earlier.done
        change.peak_running = self.done.peak_running
        done: dict[str, int | float | None] = {"total_blocks": self.total_blocks, **asdict(change)}
        done["slot_waste_frac"] = change.slot_waste_frac
        done["cache_waste_frac"] = change.cache_waste_frac
        if change.prefix_tokens:
            done["prefix_hit_frac"] = change.prefix_hit_frac
        if change.drafted_tokens:
            done["draft_acceptance_frac"] = change.draft_acceptance_frac
            done["tokens_per_decode"] = change.tokens_per_decode
        return done
