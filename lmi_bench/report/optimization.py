"""The tables of an optimization job: what each combination of techniques costs and gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.core.units import MIB
from lmi_bench.report.formats import MISSING, count, number, share, usd
from lmi_bench.report.table import NOTES, Cell, Field, Table, table_of

_EMULATED = "emulated"
_WORST = 3
STAGES = {
    "load_s": "loading, s",
    "quality_s": "quality, s",
    "sweep_s": "sweep, s",
    "prepare_s": "weights, s",
    "devices": "devices",
    "device_s": "device-seconds",
}
"""Seconds of a variant's stages, with their titles; prepare_s: of writing quantized weights."""


@dataclass(frozen=True, slots=True)
class VariantQuality:
    """The scores of a text, and greedy outputs beside the baseline's.

    output_error_of_layer  relative error of each matrix's outputs by its name, and their mean
    accepted_frac          share of a draft's tokens that held; None without a draft
    """

    perplexity: float
    scored_tokens: int
    agreement_frac: float
    logprob_shift: float
    mean_output_error: float | None
    output_error_of_layer: Mapping[str, float]
    accepted_frac: float | None = None


@dataclass(frozen=True, slots=True)
class VariantMemory:
    """Memory of weights and cache, and the cache's size if both take the baseline's memory."""

    weight_bytes: int
    kv_bytes_per_token: float
    kv_tokens_in_baseline_memory: int


@dataclass(frozen=True, slots=True)
class VariantResult:
    """A variant, as `optimize.json` keeps it: the fields are its keys.

    engine             settings that differ from the defaults
    products_ms        time of a decode step's matrix products, by its sequences
    levels             speed at each number of users; empty if the arithmetic is only emulated
    throughput_ratios  to the baseline, by level: ratio and its 95 % interval
    undecided          levels whose ratio is no further from 1 than that of equal engines, or of the
                       products of equal weights
    job                what it took, by the names in `STAGES`
    """

    name: str
    engine: Mapping[str, Any]
    quality: VariantQuality
    memory: VariantMemory
    products_ms: Mapping[str, float]
    kernels: str | None
    emulated: bool
    levels: Sequence[Mapping[str, float | None]]
    throughput_ratios: Mapping[str, Sequence[float | None]]
    usd_per_1m_output: float | None
    job: Mapping[str, float]
    saved: str | None
    undecided: Sequence[str] = ()


_VARIANT: Field[VariantResult] = Field("Variant", lambda each: Cell(each.name, each.kernels or ""), numeric=False)


def optimization_tables(results: Sequence[VariantResult]) -> tuple[Table, ...]:
    """The variants side by side, the worst matrices, the matrix products, and the jobs' times.

    results  the baseline first
    """
    tables = (_side_by_side(results), _errors(results), _products(results), _jobs(results))
    return tuple(table for table in tables if table is not None)


def _products(results: Sequence[VariantResult]) -> Table | None:
    base = results[0].products_ms
    if not base:
        return None
    fields = [_VARIANT]
    for rows, base_ms in base.items():
        fields += [
            Field(f"ms at {rows}", lambda each, rows=rows: number(each.products_ms[rows])),  # type: ignore[misc]
            Field(
                f"of the baseline's at {rows}",
                lambda each, rows=rows, ms=base_ms: number(each.products_ms[rows] / ms),  # type: ignore[misc]
            ),
        ]
    timed = [each for each in results if each.products_ms and not each.emulated]
    return table_of("Matrix products of a decode step", fields, timed, NOTES["matrix products"])


def _jobs(results: Sequence[VariantResult]) -> Table:
    stages = (
        Field(title, lambda each, key=key: number(each.job[key]))  # type: ignore[misc]
        for key, title in STAGES.items()
    )
    note = "Loading holds calibration unless an earlier job left its factors; speculation has none."
    return table_of("What the job took", (_VARIANT, *stages), results, note)


def _side_by_side(results: Sequence[VariantResult]) -> Table:
    loads = [level["concurrency"] for level in results[0].levels]

    def missing(each: VariantResult) -> str:
        return _EMULATED if each.emulated else MISSING

    def speed(title: str, load: float | None, key: str) -> Field[VariantResult]:
        def cell(each: VariantResult) -> str:
            by_load = {level["concurrency"]: level[key] for level in each.levels}
            value = by_load.get(load)
            return missing(each) if value is None else number(value)

        return Field(title, cell, "Speed")

    first = loads[0] if loads else 1
    fields: tuple[Field[VariantResult], ...] = (
        _VARIANT,
        Field("perplexity", lambda each: number(each.quality.perplexity, 4), "Quality"),
        Field("same tokens", lambda each: share(each.quality.agreement_frac), "Quality"),
        Field("logprob shift", lambda each: number(each.quality.logprob_shift), "Quality"),
        Field("output error", lambda each: share(each.quality.mean_output_error), "Quality"),
        Field("guesses held", lambda each: share(each.quality.accepted_frac), "Quality"),
        Field("weights, MiB", lambda each: number(each.memory.weight_bytes / MIB), "Memory"),
        Field("KV tokens", lambda each: count(each.memory.kv_tokens_in_baseline_memory), "Memory"),
        *(speed(f"tok/s at {load}", load, "throughput_tokens_per_s") for load in loads),
        speed(f"ms/token at {first}", first, "latency_ms_per_token_mean"),
        Field("tok/s against the baseline", lambda each: _ratio(each) or missing(each), "Speed"),
        Field("USD/1M out", lambda each: _EMULATED if each.emulated else usd(each.usd_per_1m_output), "Price"),
    )
    return table_of("Variants side by side", fields, results, NOTES["variants"].format(results[-1].name))


def _ratio(result: VariantResult) -> str:
    """The ratio of the last, highest level with its interval; empty where there is none."""
    if not result.throughput_ratios:
        return ""
    level, (middle, low, high) = list(result.throughput_ratios.items())[-1]
    interval = f" ({number(low)} to {number(high)})" if low else ", one round"
    return f"{number(middle)}{interval}" + (", not shown" if level in result.undecided else "")


def _errors(results: Sequence[VariantResult]) -> Table | None:
    worst = [
        (result.name, name, error)
        for result in results
        for name, error in sorted(result.quality.output_error_of_layer.items(), key=lambda item: -item[1])[:_WORST]
    ]
    if not worst:
        return None
    fields: tuple[Field[tuple[str, str, float]], ...] = (
        Field("Variant", lambda each: each[0], numeric=False),
        Field("matrix", lambda each: each[1], numeric=False),
        Field("error of outputs", lambda each: share(each[2])),
    )
    note = "|rounded outputs - outputs| / |outputs| on calibration text; all in optimize.json."
    return table_of("Matrices that rounding moves most", fields, worst, note)
