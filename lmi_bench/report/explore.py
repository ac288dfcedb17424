"""Data of the views that the page draws by the reader's choice: levels, candidates, rooflines.

Numbers have four digits and levels a fixed size, so that a long run does not make a large page.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import numpy as np

from lmi_bench.analysis.fit.from_run import mean_lengths, setup_of_run
from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.model.capacity import roofline_of
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.repeats import steady_lines
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.level import LATENCY_KEY, Level, Metric
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.units import ms_to_s

QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1)
BINS, LANES, SAMPLE, CANDIDATES = 40, 30, 200_000, 100
_METRICS: tuple[Metric, ...] = ("ttft", "itl", "latency_per_token", "e2e")
_PLAIN = """
    instance instances tensor_parallel replicas accelerator price_usd_per_hour usd_per_1m_output_tokens
"""
_FIGURES = ("throughput_tokens_per_s", "ttft_p90_ms", "itl_p50_ms", "latency_per_token_p90_ms", "capacity_rate_per_s")
_MEMORY = ("device_gib", "weights_gib", "kv_cache_gib")


def candidates_data(candidates: Sequence[Candidate], chosen: Candidate | None) -> list[Any]:
    """The first candidates: prices, figures as [predicted, low, high], memory of a device."""
    rows = []
    for each in candidates[:CANDIDATES]:
        known = each.to_json()
        row = {key: known[key] for key in _PLAIN.split()}
        row |= {key: [*known[key].values()][:3] for key in _FIGURES if key in known}
        row["memory"] = [known["memory"].get(key) for key in _MEMORY]
        row["spare"] = each.cost.spare_machines
        rows.append(_short(row | {"meets": each.meets_slos, "chosen": each == chosen}))
    return rows


def fleet_roofline(answer: Recommendation, chosen: Candidate | None) -> dict[str, Any] | None:
    """The roofline of one device of the chosen fleet, with the planned load as working point."""
    figures = {} if chosen is None else chosen.figures
    speed, gap = figures.get("throughput_tokens_per_s"), figures.get("itl_p50_ms")
    if chosen is None or speed is None or gap is None or not speed.value:
        return None
    question, setting = answer.question, chosen.setting
    copies = (chosen.instances - chosen.cost.spare_machines) * chosen.copies
    try:
        setup = Setup(
            find_model(question.model),
            find_instance(chosen.instance),
            chosen.tensor_parallel,
            setting.dtype or question.dtype,
            kv_dtype=setting.kv_dtype,
            speculation=setting.speculation,
        )
    except LmiBenchError:
        return None
    name = "planned load" if question.states_load else question.load
    point = (name, speed.times(1 / max(1, copies)), gap)
    return _roofline(setup, (question.input_tokens, question.output_tokens), [point])


def _roofline(
    setup: Setup, tokens: tuple[int, int], points: Iterable[tuple[str, Estimate, Estimate]]
) -> dict[str, Any] | None:
    """TFLOP/s and TB/s of a device, and its working points: FLOP/byte and TFLOP/s, each as
    [predicted, low, high].

    points  name, output tokens/s of a copy, and ms between tokens: together the mean batch

    None without data sheets, and with speculation, whose steps give more than a token.
    """
    if setup.speculation is not None:
        return None
    try:
        roof = roofline_of(setup, input_tokens=tokens[0], output_tokens=tokens[1])
    except LmiBenchError:
        return None
    tera = 1e-12

    def batch(tokens_per_s: float, gap_ms: float) -> float:
        return max(1.0, tokens_per_s * ms_to_s(gap_ms))

    found: dict[str, Any] = _short(
        {
            "device": setup.instance.accelerator.name,
            "peak": roof.peak_flop_per_s * tera,
            "bandwidth": roof.bandwidth_bytes_per_s * tera,
            "points": [
                {
                    "name": name,
                    "batch": batch(speed.value, gap.value),
                    "x": [roof.flop_per_byte(batch(speed.value, gap_ms)) for gap_ms in (gap.value, gap.low, gap.high)],
                    "y": [each * roof.flop_per_token * tera for each in (speed.value, speed.low, speed.high)],
                }
                for name, speed, gap in points
            ],
        }
    )
    return found


def levels_data(run: Run, label: str) -> dict[str, Any]:
    """The last attempt of each level, steady if one was; accelerators of all copies if known."""
    steady, both = steady_lines(run.levels), zip(run.levels, run.records, strict=False)
    last = {line.load: (line, here) for line, here in both if line in steady}
    ordered = sorted(last.values(), key=lambda pair: pair[0].load.value)
    levels = [_short(_level(line, records)) for line, records in ordered if records]
    facts = run.manifest.target
    return {
        "label": label,
        "gpus": facts.tensor_parallel and facts.tensor_parallel * (facts.copies or 1),
        "levels": levels,
        "roof": _run_roofline(run, [line for line, _ in ordered]),
    }


def _run_roofline(run: Run, lines: Sequence[Level]) -> dict[str, Any] | None:
    """The roofline of a run on a known machine, with a working point for each level."""
    setup, copies = setup_of_run(run), run.manifest.target.copies or 1
    points, tokens = [], None
    for line in lines:
        speed, gap_ms = line.throughput_tokens_per_s, line.of("tpot").mean
        with suppress(LmiBenchError):
            tokens = mean_lengths(run.path, line)
            if speed and gap_ms:
                per_copy = speed / copies
                exact = Estimate(per_copy, per_copy, per_copy), Estimate(gap_ms, gap_ms, gap_ms)
                points.append((line.name, *exact))
    return _roofline(setup, tokens, points) if setup and tokens and points else None


def _level(line: Level, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Quantiles in ms (empirical, of at most SAMPLE values), time line and first requests.

    usable  False: invalid or cut short
    bin_s   seconds of a bin; in_flight, tokens_per_s and errors (by kind) of each bin
    server  means of the server's own gauges over the level
    lanes   sent, first token, end in microseconds, the status, and the lane if several have one
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
        "name": line.name if line.valid else f"{line.name} (invalid)",
        "usable": line.valid and not line.is_cut_short,
        "load": line.load.value,
        "throughput": line.throughput_tokens_per_s,
        "quantiles": {
            LATENCY_KEY[key]: np.quantile(values[key], QUANTILES).tolist() for key in _METRICS if values[key].size
        },
        "bin_s": bin_s,
        "in_flight": (np.diff(busy_s) / bin_s).tolist(),
        "tokens_per_s": (tokens / bin_s).tolist(),
        "errors": dict(errors),
        "server": {
            name: gauge.mean
            for name in ("running", "waiting", "kv_usage_frac")
            if line.server and (gauge := getattr(line.server, name)) and gauge.mean is not None
        },
        "lanes": [*_lanes(records, ended_s.tolist())],
    }


def _lanes(records: Sequence[RequestRecord], ends_s: Sequence[float]) -> Iterator[list[Any]]:
    """The first requests, each in a lane; of conversations the first ones whole, each in as many
    lanes as it has requests at once."""
    rows, first = [*zip(records, ends_s, strict=True)], 0  # first: lane of a conversation
    if records[0].session is None:
        yield from (_bar(*row) for row in rows[:LANES])
        return
    rows.sort(key=lambda row: (row[0].session or 0, row[0].sent_s))
    for session, of_session in groupby(rows, key=lambda row: row[0].session):
        ended_s: list[float] = []  # of each lane
        bars = []
        for record, end_s in of_session:
            free = (lane for lane, at_s in enumerate(ended_s) if at_s <= record.sent_s)
            lane = next(free, len(ended_s))
            ended_s[lane : lane + 1] = [end_s]
            bars.append([*_bar(record, end_s), first + lane + 1, f"session {session}"])
        first += len(ended_s)
        if first > LANES and bars[0][-2] > 1:
            return
        yield from (bar for bar in bars if bar[-2] <= LANES)


def _bar(record: RequestRecord, end_s: float) -> list[Any]:
    times_s = (record.sent_s, next(iter(record.token_times_s), None), end_s)
    return [*(None if at is None else round(1e6 * at) for at in times_s), record.status]


def _short(value: Any) -> Any:
    """The value with four digits a number; what is not finite becomes None."""
    content = json.dumps(value)
    return json.loads(content, parse_float=lambda text: float(f"{float(text):.4g}"), parse_constant=lambda _: None)
