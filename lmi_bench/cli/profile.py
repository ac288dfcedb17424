"""`lmi-bench profile`: what parts of this machine cost, measured by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.profile import AttentionSettings, CollectiveSettings

if TYPE_CHECKING:
    from lmi_bench.jobs.profile import AllReduces

profile = typer.Typer(
    name="profile", help="Measure parts of this machine by themselves.", no_args_is_help=True
)


@profile.command()
@spread_options
def collectives(settings: CollectiveSettings) -> None:
    """Time the all-reduce of tensor parallelism by size, and fit latency + bytes / rate."""
    from lmi_bench.cli.console import say, terminal
    from lmi_bench.jobs.profile import time_collectives

    with terminal() as listener:
        found = time_collectives(settings, listener)
    _print_collectives(found)
    if settings.out is not None:
        say(f"written: {settings.out}")


def _print_collectives(found: AllReduces) -> None:
    from lmi_bench.cli.console import print_table
    from lmi_bench.jobs.profile import SIZES_BYTES

    print_table(
        f"All-reduce of {found.ranks} ranks, us a call (float32 arrays, median of "
        f"{found.rounds} rounds)",
        [
            {
                "KiB": size // 1024,
                **{
                    name.replace("_", " "): _shown(times_s[i] * 1e6)
                    for name, times_s in found.times_s.items()
                },
            }
            for i, size in enumerate(SIZES_BYTES)
        ],
    )
    print_table(
        "time = latency + bytes / rate",
        [
            {
                "transport": name.replace("_", " "),
                "latency us": _shown(fit.latency_s * 1e6),
                "rate GB/s": _shown(fit.bytes_per_s / 1e9),
                "worst error %": round(100 * fit.worst_error_frac),
            }
            for name, fit in found.fits.items()
        ],
        left=("transport",),
    )


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


@profile.command()
@spread_options
def attention(settings: AttentionSettings) -> None:
    """Time a prompt's attention with its whole score matrix and in tiles, and count the bytes."""
    from lmi_bench.cli.console import note, print_table, terminal
    from lmi_bench.core.host import usable_cores
    from lmi_bench.core.units import MIB
    from lmi_bench.jobs.profile import FLOAT32_BYTES, time_attention

    with terminal() as listener:
        found = time_attention(settings, listener)
    print_table(
        f"Attention of one layer over a prompt ({settings.heads} heads of {settings.head_dim}, "
        f"float32, {usable_cores()} threads, median of {settings.rounds})",
        [
            {
                "tokens": f"{shape.tokens:,}",
                "whole ms": f"{1e3 * times.whole_s:.1f}",
                "tiled ms": f"{1e3 * times.tiled_s:.1f}",
                "ratio": f"{times.whole_s / times.tiled_s:.1f}",
                "whole MiB": f"{shape.whole_bytes(FLOAT32_BYTES) / MIB:,.0f}",
                "tiled MiB": f"{shape.tiled_bytes(FLOAT32_BYTES) / MIB:,.0f}",
                "whole FLOP/B": f"{shape.flop / shape.whole_bytes(FLOAT32_BYTES):,.0f}",
                "tiled FLOP/B": f"{shape.flop / shape.tiled_bytes(FLOAT32_BYTES):,.0f}",
                "most apart": f"{times.worst_difference:.0e}",
            }
            for shape, times in found
        ],
    )
    note(
        "whole: every score is in memory; tiled: none is (FlashAttention). MiB: moved at least, "
        "when the scores do not fit a cache; FLOP/B: arithmetic intensity"
    )
