"""All-reduces measured, fitted, printed and written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lmi_bench.analysis.model.collectives import CollectiveFit, fit_all_reduce
from lmi_bench.cli.console import note, print_table, say
from lmi_bench.core.durable import write_whole
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import host_facts
from lmi_bench.targets.bundled import time_all_reduces

SCHEMA: Final = 1
SIZES_BYTES: Final = tuple(4**n * 1024 for n in range(8))  # 1 KiB to 16 MiB
TRANSPORTS: Final = ("shared_memory", "gloo")
ALL_TRANSPORTS: Final = (*TRANSPORTS, "nccl")


def run_collectives(ranks: int, transports: Sequence[str], rounds: int, out: Path | None) -> None:
    """Measure each transport in turn; raises InputError before anything is started."""
    wanted = [name.replace("-", "_") for name in transports] or list(TRANSPORTS)
    for name in wanted:
        if name not in ALL_TRANSPORTS:
            raise InputError(f"--transport {name}: use shared-memory, gloo, or nccl between GPUs")
    if ranks < 2:
        raise InputError(f"--ranks {ranks}: an all-reduce needs at least 2")
    if rounds < 1:
        raise InputError(f"--rounds {rounds}: at least 1 is needed")
    times = {}
    for name in wanted:
        note(f"{name.replace('_', ' ')}, {ranks} ranks ...")
        times[name] = time_all_reduces(ranks, name, SIZES_BYTES, rounds=rounds)
    fits = {name: fit_all_reduce(SIZES_BYTES, times[name]) for name in wanted}
    print_table(
        f"All-reduce of {ranks} ranks, us a call (float32 arrays, median of {rounds} rounds)",
        [
            {
                "KiB": size // 1024,
                **{name.replace("_", " "): _shown(times[name][i] * 1e6) for name in wanted},
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
            for name, fit in fits.items()
        ],
        left=("transport",),
    )
    if out is not None:
        document = _document(ranks, rounds, times, fits)
        write_whole(out, document)
        say(f"written: {out}")


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _document(
    ranks: int, rounds: int, times: dict[str, list[float]], fits: dict[str, CollectiveFit]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ranks": ranks,
        "rounds": rounds,
        "host": host_facts(),
        "all_reduce": {
            name: {
                "latency_s": fit.latency_s,
                "bytes_per_s": None if math.isinf(fit.bytes_per_s) else fit.bytes_per_s,
                "worst_error_frac": fit.worst_error_frac,
                "points": [
                    {"bytes": size, "time_s": time_s}
                    for size, time_s in zip(SIZES_BYTES, times[name], strict=True)
                ],
            }
            for name, fit in fits.items()
        },
    }
