"""Parts of this machine measured by themselves: all-reduces, and attention over a prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lmi_bench.analysis.model.collectives import CollectiveFit, fit_all_reduce
from lmi_bench.core.durable import write_whole
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import host_facts, usable_cores
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.units import MIB
from lmi_bench.jobs.settings.profile import AttentionSettings, CollectiveSettings
from lmi_bench.targets.bundled import time_all_reduces

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.measure import AttentionShape, AttentionTimes

SCHEMA: Final = 1
SIZES_BYTES: Final = tuple(4**n * 1024 for n in range(8))  # 1 KiB to 16 MiB
TRANSPORTS: Final = ("shared_memory", "gloo")
ALL_TRANSPORTS: Final = (*TRANSPORTS, "nccl")
PROMPTS: Final = (256, 1024, 4096)
FLOAT32_BYTES: Final = 4
_MOST_SCORE_BYTES: Final = 4 * 1024 * MIB


@dataclass(frozen=True, slots=True)
class AllReduces:
    """Seconds of one all-reduce by transport, for each of SIZES_BYTES, and what fits them."""

    ranks: int
    rounds: int
    times_s: dict[str, list[float]]
    fits: dict[str, CollectiveFit]

    def to_json(self) -> dict[str, Any]:
        """As `profile collectives --out` writes it."""
        return {
            "schema": SCHEMA,
            "ranks": self.ranks,
            "rounds": self.rounds,
            "host": host_facts(),
            "all_reduce": {
                name: {
                    "latency_s": fit.latency_s,
                    "bytes_per_s": None if math.isinf(fit.bytes_per_s) else fit.bytes_per_s,
                    "worst_error_frac": fit.worst_error_frac,
                    "points": [
                        {"bytes": size, "time_s": time_s}
                        for size, time_s in zip(SIZES_BYTES, self.times_s[name], strict=True)
                    ],
                }
                for name, fit in self.fits.items()
            },
        }


def time_collectives(settings: CollectiveSettings, listener: Listener = SILENT) -> AllReduces:
    """Measure each transport in turn; raises InputError before anything is started."""
    wanted = [name.replace("-", "_") for name in settings.transport] or list(TRANSPORTS)
    for name in wanted:
        if name not in ALL_TRANSPORTS:
            raise InputError(f"--transport {name}: use shared-memory, gloo, or nccl between GPUs")
    times_s = {}
    for name in wanted:
        listener.note(f"{name.replace('_', ' ')}, {settings.ranks} ranks ...")
        times_s[name] = time_all_reduces(settings.ranks, name, SIZES_BYTES, rounds=settings.rounds)
    fits = {name: fit_all_reduce(SIZES_BYTES, times_s[name]) for name in wanted}
    found = AllReduces(settings.ranks, settings.rounds, times_s, fits)
    if settings.out is not None:
        write_whole(settings.out, found.to_json())
    return found


def time_attention(
    settings: AttentionSettings, listener: Listener = SILENT
) -> list[tuple[AttentionShape, AttentionTimes]]:
    """Measure each prompt length in float32 on every core, with its score matrix and in tiles.

    Raises InputError before anything is measured.
    """
    try:
        from lmi_bench.engine.torch_backend.measure import (
            AttentionShape,
            measure_attention,
        )
    except ImportError as exc:
        raise InputError(
            f"attention is measured with {exc.name}: pip install 'lmi-bench[engine]'"
        ) from exc
    heads, head_dim = settings.heads, settings.head_dim
    shapes = [AttentionShape(count, heads, head_dim) for count in settings.tokens or PROMPTS]
    for shape in shapes:
        if shape.tokens < 1:
            raise InputError(f"--tokens must be at least 1, got {shape.tokens}")
        score_bytes = 2 * shape.score_bytes(FLOAT32_BYTES)
        if score_bytes > _MOST_SCORE_BYTES:
            raise InputError(
                f"--tokens {shape.tokens}: two score matrices of {heads} heads take "
                f"{score_bytes / MIB:,.0f} MiB, more than {_MOST_SCORE_BYTES // MIB:,}: fewer "
                "tokens or --heads"
            )
    found = []
    for shape in shapes:
        listener.note(f"{shape.tokens:,} tokens ...")
        times = measure_attention(shape, rounds=settings.rounds, threads=usable_cores())
        found.append((shape, times))
    return found
