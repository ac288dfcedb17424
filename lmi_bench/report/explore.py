"""Data of the views that the page draws by the reader's choice: levels, and candidates.

Numbers have four digits and levels a fixed size, so that a long run does not make a large page.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.core.level import LATENCY_KEY, Level, Metric
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run

QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1)
BINS, LANES, SAMPLE, CANDIDATES = 40, 30, 200_000, 100
_METRICS: tuple[Metric, ...] = ("ttft", "itl", "latency_per_token", "e2e")
_PLAIN = (
    "instance", "instances", "tensor_parallel", "replicas", "accelerator", "price_usd_per_hour",
    "usd_per_1m_output_tokens",
)  # fmt: skip
_FIGURES = ("throughput_tokens_per_s", "ttft_p90_ms", "itl_p50_ms", "latency_per_token_p90_ms")
_MEMORY = ("device_gib", "weights_gib", "kv_cache_gib")


def candidates_data(candidates: Sequence[Candidate], chosen: Candidate | None) -> list[Any]:
    """The first candidates: prices, figures as [predicted, low, high], memory of a device."""
    rows = []
    for each in candidates[:CANDIDATES]:
        known = each.to_json()
        row = {key: known[key] for key in _PLAIN}
        row |= {key: [*known[key].values()][:3] for key in _FIGURES if key in known}
        row["memory"] = [known["memory"].get(key) for key in _MEMORY]
        rows.append(_short(row | {"meets": each.meets_slos, "chosen": each == chosen}))
    return rows


def levels_data(run: Run, label: str) -> dict[str, Any]:
    """The last attempt of each level, by load, with the accelerators of a copy if known."""
    last = {line.load: (line, here) for line, here in zip(run.levels, run.records, strict=False)}
    ordered = sorted(last.values(), key=lambda pair: pair[0].load.value)
    levels = [_short(_level(line, records)) for line, records in ordered if records]
    return {"label": label, "gpus": run.manifest.target.tensor_parallel, "levels": levels}


def _level(line: Level, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Quantiles in ms (empirical, of at most SAMPLE values), time line and first requests.

    bin_s  seconds of a bin; in_flight, tokens_per_s and errors (by kind) of each bin
    lanes  sent, first token, end in seconds, and the status
    """
    columns, is_open = columns_of(records), line.load.is_open
    values = {key: columns.values_ms(key, open_loop=is_open)[0] for key in _METRICS}
    values = {key: found[:: 1 + found.size // SAMPLE] for key, found in values.items()}
    ended_s = np.fmax(columns.sent_s, np.fmax(columns.ended_s, columns.last_s))
    bin_s = max(float(ended_s.max()), 1e-9) / BINS
    edges = np.arange(BINS + 1) * bin_s
    spans = np.array([columns.sent_s, ended_s])
    busy_s = [(1, -1) @ np.maximum(edge - spans, 0).sum(axis=1) for edge in edges]
    bins = np.clip(columns.times_s / bin_s, 0, BINS - 1).astype(int)
    tokens = np.bincount(bins, weights=columns.counts, minlength=BINS)
    errors: defaultdict[str, list[int]] = defaultdict(lambda: [0] * BINS)
    for row in np.flatnonzero(~columns.ok).tolist():
        errors[columns.status[row]][min(BINS - 1, int(ended_s[row] / bin_s))] += 1
    return {
        "name": line.name,
        "load": line.load.value,
        "throughput": line.throughput_tokens_per_s,
        "quantiles": {
            LATENCY_KEY[key]: np.quantile(values[key], QUANTILES).tolist()
            for key in _METRICS
            if values[key].size
        },
        "bin_s": bin_s,
        "in_flight": (np.diff(busy_s) / bin_s).tolist(),
        "tokens_per_s": (tokens / bin_s).tolist(),
        "errors": dict(errors),
        "lanes": [
            [each.sent_s, next(iter(each.token_times_s), None), end_s, each.status]
            for each, end_s in zip(records[:LANES], ended_s.tolist(), strict=False)
        ],
    }


def _short(value: Any) -> Any:
    """The value with four digits a number; what is not finite becomes None."""
    text = json.dumps(value)
    return json.loads(text, parse_float=_four_digits, parse_constant=lambda _: None)


def _four_digits(text: str) -> float:
    return float(f"{float(text):.4g}")
