"""Attention with and without its score matrix: measured, counted and printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lmi_bench.cli.console import note, print_table
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import usable_cores
from lmi_bench.core.units import MIB

_FLOAT32_BYTES: Final = 4
_MOST_SCORE_BYTES: Final = 4 * 1024 * MIB


def run_attention(tokens: Sequence[int], heads: int, head_dim: int, rounds: int) -> None:
    """One row a prompt length; raises InputError before anything is measured."""
    try:
        from lmi_bench.engine.torch_backend.measure_attention import (
            AttentionShape,
            measure_attention,
        )
    except ImportError as exc:
        raise InputError(
            f"attention is measured with {exc.name}: pip install 'lmi-bench[engine]'"
        ) from exc
    for name, count in (("heads", heads), ("head-dim", head_dim), ("rounds", rounds)):
        if count < 1:
            raise InputError(f"--{name} must be at least 1, got {count}")
    shapes = [AttentionShape(count, heads, head_dim) for count in tokens]
    for shape in shapes:
        if shape.tokens < 1:
            raise InputError(f"--tokens must be at least 1, got {shape.tokens}")
        if 2 * shape.score_bytes(_FLOAT32_BYTES) > _MOST_SCORE_BYTES:
            raise InputError(
                f"--tokens {shape.tokens}: two score matrices of {heads} heads take "
                f"{2 * shape.score_bytes(_FLOAT32_BYTES) / MIB:,.0f} MiB, more than "
                f"{_MOST_SCORE_BYTES // MIB:,}: fewer tokens or --heads"
            )
    threads = usable_cores()
    rows = []
    for shape in shapes:
        note(f"{shape.tokens:,} tokens ...")
        times = measure_attention(shape, rounds=rounds, threads=threads)
        whole, tiled = shape.whole_bytes(_FLOAT32_BYTES), shape.tiled_bytes(_FLOAT32_BYTES)
        rows.append(
            {
                "tokens": f"{shape.tokens:,}",
                "whole ms": f"{1e3 * times.whole_s:.1f}",
                "tiled ms": f"{1e3 * times.tiled_s:.1f}",
                "ratio": f"{times.whole_s / times.tiled_s:.1f}",
                "whole MiB": f"{whole / MIB:,.0f}",
                "tiled MiB": f"{tiled / MIB:,.0f}",
                "whole FLOP/B": f"{shape.flop / whole:,.0f}",
                "tiled FLOP/B": f"{shape.flop / tiled:,.0f}",
                "most apart": f"{times.worst_difference:.0e}",
            }
        )
    print_table(
        f"Attention of one layer over a prompt ({heads} heads of {head_dim}, float32, "
        f"{threads} threads, median of {rounds})",
        rows,
    )
    note(
        "whole: every score is in memory; tiled: none is (FlashAttention). MiB: moved at least, "
        "when the scores do not fit a cache; FLOP/B: arithmetic intensity"
    )
