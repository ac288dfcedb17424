"""A run as two tidy tables: one row per level, and one row per request.

The level table begins with the columns of the published benchmark tables, so that measured and
published rows can be stacked; every further column has its unit in its name.
"""

from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd

from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import LATENCY_KEY, STATISTICS, Level, Metric
from lmi_bench.core.run_store import Run
from lmi_bench.core.units import s_to_ms

_COPIED_FIELDS = (
    *("valid", "stopped_by", "requests", "errors", "wall_s"),
    *("total_throughput_tokens_per_s", "request_throughput_per_s"),
)
METRICS: tuple[Metric, ...] = (
    "ttft", "ttft_from_sent", "dispatch_delay", "itl", "tpot", "e2e", "e2e_from_sent",
    "latency_per_token",
)  # fmt: skip
_OF_A_REQUEST: tuple[Metric, ...] = ("ttft", "tpot", "e2e", "latency_per_token")


def level_table(run: Run) -> pd.DataFrame:
    """One row per level. A level that was cut short keeps its row, without throughput or latency.

    latency_ms_per_token  is the p90, as in the published tables; the other statistics follow
    """
    return pd.DataFrame([_level_row(run, line) for line in run.levels])


def request_table(run: Run) -> pd.DataFrame:
    """One row per sent request; times are seconds since its level's start."""
    rows = []
    for line, records in zip(run.levels, run.records, strict=True):
        each_s = columns_of(records).each_s(open_loop=line.load.is_open)
        for row, record in enumerate(records):
            times = record.token_times_s
            rows.append(
                {
                    "level": line.index,
                    "attempt": line.attempt,
                    "concurrency": line.load.concurrency,
                    "rate_per_s": line.load.rate_per_s,
                    "request_id": record.request_id,
                    "at_start": record.at_start,
                    "status": record.status,
                    "finish_reason": record.exchange.finish_reason,
                    "due_s": record.due_s,
                    "sent_s": record.sent_s,
                    "first_token_s": times[0] if len(times) else None,
                    "last_token_s": times[-1] if len(times) else None,
                    "ended_s": record.ended_s,
                    "input_tokens": record.input_tokens,
                    "output_tokens": record.output_tokens,
                    **{LATENCY_KEY[each]: _ms(each_s[each][row]) for each in _OF_A_REQUEST},
                    "error": record.error,
                }
            )
    return pd.DataFrame(rows)


def hardware(run: Run) -> dict[str, Any]:
    """The machine, from the run's manifest and the catalog; None for unknown facts."""
    facts = run.manifest.target
    instance, accelerator, number = facts.instance, facts.accelerator, facts.n_accelerators
    if instance is not None:
        with suppress(InputError):  # not in the catalog: only the run's own facts are known
            known = find_instance(instance)
            accelerator = accelerator or known.accelerator.name
            number = number or known.num_accelerators
    return {
        "model": run.manifest.model or None,
        "instance": instance,
        "accelerator": accelerator,
        "n_accelerators": number,
        "tp": facts.tensor_parallel,
        "instance_count": None if instance is None else facts.instances or 1,
    }


def mean_lengths(line: Level) -> tuple[float | None, float | None]:
    """Mean prompt and output length of a level's completed requests, in tokens."""
    if line.completed <= 0:
        return None, None
    tokens = (line.input_tokens, line.output_tokens)
    mean = [None if total is None else total / line.completed for total in tokens]
    return mean[0], mean[1]


def _level_row(run: Run, line: Level) -> dict[str, Any]:
    input_tokens, output_tokens = mean_lengths(line)
    whole = not line.is_cut_short
    row: dict[str, Any] = {
        **hardware(run),
        "total_tokens": None
        if input_tokens is None or output_tokens is None
        else input_tokens + output_tokens,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "concurrency": line.load.concurrency,
        "throughput_tokens_per_s": line.throughput_tokens_per_s if whole else None,
        "latency_ms_per_token": line.of("latency_per_token").p90 if whole else None,
        "table": run.manifest.imported_from or "lmi-bench",
        "run": run.path.name,
        "level": line.index,
        "attempt": line.attempt,
        "rate_per_s": line.load.rate_per_s,
        **{name: getattr(line, name) for name in _COPIED_FIELDS},
        "steady_throughput_tokens_per_s": line.steady.throughput_tokens_per_s,
        "mean_concurrency": line.mean_concurrency,
    }
    for metric in METRICS:
        name, unit = LATENCY_KEY[metric].split("_ms", 1)
        for statistic in STATISTICS:
            row[f"{name}_{statistic}_ms{unit}"] = line.of(metric).value(statistic)
    return row


def _ms(value_s: float) -> float | None:
    return None if np.isnan(value_s) else s_to_ms(float(value_s))
