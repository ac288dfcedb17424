"""Parts of this machine measured by themselves: all-reduces, and attention over a prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from lmi_bench.analysis.model.collectives import CollectiveFit, fit_all_reduce
from lmi_bench.core.durable import write_whole
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import host_facts, usable_cores
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.units import MIB
from lmi_bench.jobs.settings.profile import AttentionSettings, CollectiveSettings
from lmi_bench.targets.bundled import time_all_reduces

SCHEMA: Final = 1
SIZES_BYTES: Final = tuple(4**n * 1024 for n in range(8))  # 1 KiB to 16 MiB
TRANSPORTS: Final = ("shared_memory", "gloo")
ALL_TRANSPORTS: Final = (*TRANSPORTS, "nccl")
PROMPTS: Final = (256, 1024, 4096)
_FLOAT32_BYTES: Final = 4
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


@dataclass(frozen=True, slots=True)
class TimedAttention:
    """A prompt's attention in float32, with its whole score matrix in memory and in tiles.

    bytes             moved at least, when the scores do not fit a cache
    worst_difference  between the two results
    """

    tokens: int
    whole_s: float
    tiled_s: float
    whole_bytes: int
    tiled_bytes: int
    flop: float
    worst_difference: float


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
) -> list[TimedAttention]:
    """Measure each prompt length on every core; raises InputError before anything is measured."""
    try:
        from lmi_bench.engine.torch_backend.measure_attention import (
            AttentionShape,
            measure_attention,
        )
    except ImportError as exc:
        raise InputError(
            f"attention is measured with {exc.name}: pip install 'lmi-bench[engine]'"
        ) from exc
    shapes = [
        AttentionShape(count, settings.heads, settings.head_dim)
        for count in settings.tokens or PROMPTS
    ]
    for shape in shapes:
        if shape.tokens < 1:
            raise InputError(f"--tokens must be at least 1, got {shape.tokens}")
        if 2 * shape.score_bytes(_FLOAT32_BYTES) > _MOST_SCORE_BYTES:
            raise InputError(
                f"--tokens {shape.tokens}: two score matrices of {settings.heads} heads take "
                f"{2 * shape.score_bytes(_FLOAT32_BYTES) / MIB:,.0f} MiB, more than "
                f"{_MOST_SCORE_BYTES // MIB:,}: fewer tokens or --heads"
            )
    found = []
    for shape in shapes:
        listener.note(f"{shape.tokens:,} tokens ...")
        times = measure_attention(shape, rounds=settings.rounds, threads=usable_cores())
        found.append(
            TimedAttention(
                shape.tokens,
                times.whole_s,
                times.tiled_s,
                shape.whole_bytes(_FLOAT32_BYTES),
                shape.tiled_bytes(_FLOAT32_BYTES),
                shape.flop,
                times.worst_difference,
            )
        )
    return found
