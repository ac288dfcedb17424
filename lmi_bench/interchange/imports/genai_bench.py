"""Results of genai-bench: one file a scenario and a number of users.

Its `tpot` is (E2E - TTFT) / (n - 1) of a request, as ours; times are in the unit that the file
names, seconds unless it was told otherwise. It leaves the speed of answers out whose tokens came
within a millisecond of each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    missing,
    number_of,
    stated_load,
    statistics,
    summary_line,
    whole_of,
)

_METRICS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e_latency": "e2e_ms"}
_NAMES = {
    "mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99",
    "min": "min", "max": "max", "std": "stddev",
}  # fmt: skip
_UNIT_MS = {"s": 1e3, "ms": 1.0}
_NO_GAPS = "genai-bench gives one mean gap a request (our TPOT), not the gaps"
_FIXED_LENGTHS = re.compile(r"D\((\d+), ?(\d+)\)")


def is_genai_bench(content: Mapping[str, Any]) -> bool:
    """Whether an object is what genai-bench wrote of one scenario and number of users."""
    found = content.get("aggregated_metrics")
    return isinstance(found, Mapping) and "stats" in found and "num_concurrency" in found


def read_genai_bench(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One level of an experiment."""
    unit = str(content.get("_time_unit", "s"))
    if unit not in _UNIT_MS:
        raise InputError(f"the file's unit {unit!r} of a latency is not known")
    level = content["aggregated_metrics"]
    stats = level["stats"]
    completed = whole_of(level, "num_completed_requests")
    latencies = {
        key: statistics(_in_ms(stats.get(name) or {}, _UNIT_MS[unit]), n=completed)
        for name, key in _METRICS.items()
    }
    line = summary_line(
        load or stated_load(concurrency=whole_of(level, "num_concurrency")),
        tool="genai-bench",
        requests=whole_of(level, "num_requests"),
        errors=whole_of(level, "num_error_requests"),
        input_tokens=number_of(stats.get("num_input_tokens") or {}, "sum"),
        output_tokens=number_of(stats.get("num_output_tokens") or {}, "sum"),
        wall_s=number_of(level, "run_duration"),
        throughput=number_of(level, "mean_output_throughput_tokens_per_s"),
        total_throughput=number_of(level, "mean_total_tokens_throughput_tokens_per_s"),
        request_throughput=number_of(level, "requests_per_second"),
        latencies={**latencies, "itl_ms": missing(_NO_GAPS)},
        extra={
            "scenario": level.get("scenario"),
            "status_codes": level.get("error_codes_frequency") or {},
        },
    )
    lengths = _FIXED_LENGTHS.fullmatch(str(level.get("scenario")))
    workload = {}
    if lengths is not None:
        workload = {"input_tokens": int(lengths[1]), "output_tokens": int(lengths[2])}
    return Imported("genai-bench", (ImportedLevel(line),), workload=workload)


def _in_ms(found: Mapping[str, Any], scale: float) -> dict[str, float | None]:
    return {
        ours: None if value is None else value * scale
        for ours, theirs in _NAMES.items()
        for value in [number_of(found, theirs)]
    }
