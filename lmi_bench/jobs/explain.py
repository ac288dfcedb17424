"""What `explain` does: the planner's arithmetic, one term a line, with its formula.

Memory is in GB (1e9 bytes) beside GiB, since the published examples count in GB. The terms are the
rows of data/explained.csv.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.analysis.model import memory as model_memory
from lmi_bench.analysis.model.roofline import FLOP_PER_PARAMETER, Roofline
from lmi_bench.analysis.model.step_costs import compute_dtype
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import bytes_to_gib, ms_to_s
from lmi_bench.jobs.settings import plan as settings_of

_SAME = 1e-3  # relative difference of sizes that are called equal


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity: its formula with the numbers filled in, its value and unit."""

    quantity: str
    formula: str
    value: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The terms of one calculation, and what to keep in mind."""

    title: str
    terms: tuple[Term, ...]
    notes: tuple[str, ...] = ()


def _terms(of: str, facts: Mapping[str, Any]) -> Iterator[Term]:
    """The terms of a calculation whose values are among the facts, in the order of the table."""
    for row in read_rows("explained.csv", "jobs"):
        if row["of"] == of and row["value"] in facts:
            value, unit, formula = facts[row["value"]], row["unit"], row["formula"].format(**facts)
            if unit == "bytes":
                formula += f" = {bytes_to_gib(value):,.2f} GiB"
                value, unit = value / 1e9, "GB"
            yield Term(row["quantity"].format(**facts), formula, value, unit)


def memory(settings: settings_of.MemorySettings) -> Explanation:
    """Weights, KV cache and overhead of a batch; with a degree also on each device."""
    shape, dtype, degree = find_model(settings.model), settings.dtype, settings.tensor_parallel
    nominal = model_memory.weight_format(dtype).nominal_bits / model_memory.BITS_PER_BYTE
    params, stored = shape.params_total, float(model_memory.weight_bytes(shape, dtype))
    if settings.parameters_b is not None:
        params = round(settings.parameters_b * 1e9)
        stored = params * nominal
    value_bytes = model_memory.kv_bytes_per_value(dtype, settings.kv_dtype)
    sequence_on = partial(model_memory.kv_bytes_per_sequence, shape, settings.tokens, bytes_per_value=value_bytes)
    whole, ranked = sequence_on(), sequence_on(tensor_parallel=degree)
    cache, overhead = settings.batch * whole, settings.overhead_gb * 1e9
    values = f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim}"
    if shape.latent_kv_dim:
        values = f"{shape.num_layers} layers x {shape.latent_kv_dim} values"
    elif shape.cached_layers < shape.num_layers or shape.sliding_kv_heads:
        values = f"{model_memory.kv_bytes_per_token(shape, bytes_per_value=1):,.0f} values"
    token = model_memory.kv_bytes_per_token(shape, bytes_per_value=value_bytes)
    facts: dict[str, Any] = {"params_b": params / 1e9, "nominal": nominal}
    facts |= {"weights": params * nominal, "degree": degree}
    facts |= {"values": values, "value_bytes": value_bytes, "token_mb": token / 1e6}
    facts |= {"tokens": settings.tokens, "sequence": whole, "batch": settings.batch, "cache": cache}
    facts |= {"overhead": overhead, "sum": stored + cache + overhead}
    if abs(stored / (params * nominal) - 1) > _SAME:
        embeddings_b = model_memory.embedding_params(shape) / 1e9
        facts |= {"stored": stored, "embeddings_b": embeddings_b}
    notes = []
    if degree > 1:
        facts |= {"rank_weights": stored / degree, "rank_cache": settings.batch * ranked}
        copies = degree * ranked / whole
        if copies > 1:
            notes.append(f"the ranks together keep {copies:.3g} copies of the cache")
    total = (settings.memory_gb or 0.0) * 1e9
    if not total and settings.accelerator is not None:
        total = float(find_accelerator(settings.accelerator).memory_bytes)
    if total:  # without any reserve
        own, left = stored / degree, total - stored / degree - overhead
        share = 100 * own / total
        facts |= {"share_gb": own / 1e9, "device_gb": total / 1e9, "share": share}
        facts |= {"left_share": 100 - share, "fitting": max(0, left // ranked)}
        facts |= {"left_gb": left / 1e9, "sequence_gb": ranked / 1e9}
    title = f"Memory of {shape.name} in {dtype}"
    return Explanation(title, tuple(_terms("memory", facts)), tuple(notes))


def batch(settings: settings_of.BatchSettings) -> Explanation:
    """Critical batch size with and without the cache, and arithmetic intensities."""
    shape, device = find_model(settings.model), find_accelerator(settings.accelerator)
    dtype, n, d = settings.dtype, settings.tokens, shape.head_dim
    format_ = model_memory.weight_format(dtype)
    peak = device.peak_flop_per_s(compute_dtype(device, dtype))
    bandwidth = device.bandwidth_bytes_per_s
    if peak is None or bandwidth is None:
        raise InputError(f"{device.name}: the data sheet has no peak in {dtype} or no bandwidth")
    size = format_.bits / model_memory.BITS_PER_BYTE
    value_bytes = model_memory.kv_bytes_per_value(dtype)
    roof = Roofline(
        peak,
        bandwidth,
        model_memory.weight_bytes(shape, dtype),
        n * model_memory.kv_bytes_per_token(shape, bytes_per_value=value_bytes),
        FLOP_PER_PARAMETER * shape.params_active,
    )
    cached, read = roof.critical_batch, shape.params_total - shape.encoder_params
    used = shape.params_active
    bare = size * read / used / FLOP_PER_PARAMETER * roof.ops_per_byte
    experts = f" x {read / 1e9:.4g} / {used / 1e9:.4g} parameters" if shape.is_moe else ""
    facts: dict[str, Any] = {"tera": peak / 1e12, "giga": bandwidth / 1e9, "size": size}
    facts |= {"tokens": n, "ratio": roof.ops_per_byte, "bare": bare, "cached": cached}
    facts |= {"experts": experts}
    facts |= {"prompt": (4 * n * n * d + 3 * n * n) / (8 * n * n + 8 * n * d)}
    if not shape.latent_kv_dim:
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        facts |= {"heads": heads, "kv_heads": kv_heads, "value_bytes": value_bytes}
        facts |= {"step": 2 * heads / kv_heads / value_bytes}
    notes = () if cached else ("reading the cache takes longer than arithmetic at any batch",)
    title = f"Batch of {shape.name} in {dtype} on {device.name}"
    return Explanation(title, tuple(_terms("batch", facts)), notes)


def blended(settings: settings_of.BlendedSettings) -> Explanation:
    """The blended price as published: output price / (ratio + 1), a convention."""
    stated, ratio = _price(settings.instance, settings.price), settings.ratio
    tokens = settings.throughput
    if tokens is None:
        if settings.concurrency is None or settings.itl is None:
            raise InputError("give --throughput, or --concurrency and --itl (p50 in ms)")
        tokens = settings.concurrency / ms_to_s(settings.itl)
    paid = (1 - settings.discount) * stated
    output = usd_per_1m_tokens(paid, tokens)
    assert output is not None
    facts = {"stated": stated, "discount": settings.discount, "paid": paid, "tokens": tokens}
    facts |= {"output": output, "ratio": ratio, "blended": output / (ratio + 1)}
    note = f"a convention: {ratio:g} input tokens for each output token share one price"
    return Explanation("Blended price", tuple(_terms("blended", facts)), (note,))


def savings(settings: settings_of.SavingsSettings) -> Explanation:
    """How much cheaper one machine is, and the throughput from which its tokens are cheaper."""
    facts: dict[str, Any] = {"cheap": settings.cheap, "dear": settings.dear}
    for side, stated in (("cheap", settings.cheap_price), ("dear", settings.dear_price)):
        origin = "as stated" if stated is not None else find_instance(facts[side]).price_provenance
        facts |= {f"{side}_origin": origin or "", f"{side}_usd": _price(facts[side], stated)}
    cheap, dear = facts["cheap_usd"], facts["dear_usd"]
    facts |= {"saved": 100 * (1 - cheap / dear), "break_even": 100 * cheap / dear}
    title = f"{settings.cheap} against {settings.dear}"
    return Explanation(title, tuple(_terms("savings", facts)))


def _price(instance: str | None, price: float | None) -> float:
    if price is None and instance is not None:
        price = find_instance(instance).price_usd_per_hour
    if price is None:
        raise InputError(f"no price of {instance or 'the machine'} is known: give --price USD/h")
    return price
