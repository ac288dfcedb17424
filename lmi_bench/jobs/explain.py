"""What `explain` does: the planner's arithmetic, one term a line, with its formula.

Memory is in GB (1e9 bytes) beside GiB, since the published examples count in GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.analysis.model.memory import (
    BITS_PER_BYTE,
    embedding_params,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    kv_bytes_per_value,
    weight_bytes,
    weight_format,
)
from lmi_bench.analysis.model.roofline import (
    critical_batch_size,
    critical_batch_size_without_cache,
    ops_per_byte,
)
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import bytes_to_gib, ms_to_s
from lmi_bench.jobs.settings.explain import (
    BatchSettings,
    BlendedSettings,
    MemorySettings,
    SavingsSettings,
)
from lmi_bench.models.shape import ModelShape

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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def _bytes(quantity: str, formula: str, amount: float) -> Term:
    return Term(quantity, f"{formula} = {bytes_to_gib(amount):,.2f} GiB", amount / 1e9, "GB")


def memory(settings: MemorySettings) -> Explanation:
    """Weights, KV cache and overhead of a batch; with a degree also on each device."""
    shape, degree = find_model(settings.model), settings.tensor_parallel
    dtype, tokens = settings.dtype, settings.tokens
    value_bytes = kv_bytes_per_value(dtype, settings.kv_dtype)
    params = shape.params_total
    stored = float(weight_bytes(shape, dtype))
    if settings.parameters_b is not None:
        params = round(settings.parameters_b * 1e9)
        stored = params * _nominal_bytes(dtype)
    token = kv_bytes_per_token(shape, bytes_per_value=value_bytes)
    sequence = kv_bytes_per_sequence(shape, tokens, bytes_per_value=value_bytes)
    ranked = kv_bytes_per_sequence(
        shape, tokens, bytes_per_value=value_bytes, tensor_parallel=degree
    )
    cache, overhead = settings.batch * sequence, settings.overhead_gb * 1e9
    terms = [
        *_weight_terms(shape, dtype, params, stored),
        Term("KV cache a token", _kv_formula(shape, value_bytes), token / 1e6, "MB"),
        _bytes("KV cache a sequence", f"{tokens:,} tokens", sequence),
        _bytes("KV cache of the batch", f"{settings.batch:,} sequences", cache),
        _bytes("overhead of the framework", "--overhead-gb", overhead),
        _bytes("sum", "weights + cache + overhead", stored + cache + overhead),
    ]
    notes = []
    if degree > 1:
        terms += [
            _bytes("weights a device", f"weights / {degree}", stored / degree),
            _bytes("KV cache a device", f"cache of one of {degree} ranks", settings.batch * ranked),
        ]
        copies = degree * ranked / sequence
        if copies > 1:
            notes.append(f"the ranks together keep {copies:.3g} copies of the cache")
    if settings.accelerator is not None or settings.memory_gb is not None:
        terms += _device_terms(settings, stored / degree, ranked)
    return Explanation(f"Memory of {shape.name} in {dtype}", tuple(terms), tuple(notes))


def _weight_terms(shape: ModelShape, dtype: str, params: int, stored: float) -> Iterator[Term]:
    """As the format's name says, and as stored with scales and wider embeddings."""
    nominal = _nominal_bytes(dtype)
    text = f"{params / 1e9:,.3f}e9 parameters x {nominal:g} bytes"
    yield _bytes("weights", text, params * nominal)
    if abs(stored / (params * nominal) - 1) > _SAME:
        kept = f"with scales, and {embedding_params(shape) / 1e9:.2f}e9 embeddings in 16 bits"
        yield _bytes("weights as stored", kept, stored)


def _nominal_bytes(dtype: str) -> float:
    """Bytes of a parameter by the format's name alone: 0.5 for 4 bits."""
    return weight_format(dtype).nominal_bits / BITS_PER_BYTE


def _kv_formula(shape: ModelShape, value_bytes: float) -> str:
    if shape.latent_kv_dim:
        return f"{shape.num_layers} layers x {shape.latent_kv_dim} values x {value_bytes:g} bytes"
    heads = f"{shape.num_kv_heads} KV heads x {shape.head_dim}"
    return f"2 x {shape.num_layers} layers x {heads} x {value_bytes:g} bytes"


def _device_terms(
    settings: MemorySettings, weights_bytes: float, sequence_bytes: float
) -> Iterator[Term]:
    """Shares of a device's memory without any reserve, and the sequences that fit into the rest."""
    total = (settings.memory_gb or 0.0) * 1e9
    if not total and settings.accelerator is not None:
        total = float(find_accelerator(settings.accelerator).memory_bytes)
    share = weights_bytes / total
    text = f"{weights_bytes / 1e9:.2f} of {total / 1e9:.4g} GB"
    left = total - weights_bytes - settings.overhead_gb * 1e9
    yield Term("weights' share of a device", text, 100 * share, "%")
    yield Term("left on a device", "100 % less the weights", 100 * (1 - share), "%")
    fitting = f"{left / 1e9:.2f} GB left / {sequence_bytes / 1e9:.3f} GB a sequence"
    yield Term("sequences that fit", fitting, max(0, left // sequence_bytes), "")


def batch(settings: BatchSettings) -> Explanation:
    """Critical batch size with and without the cache, and arithmetic intensities."""
    shape, device = find_model(settings.model), find_accelerator(settings.accelerator)
    dtype, context = settings.dtype, settings.tokens
    format_ = weight_format(dtype)
    peak, bandwidth = device.peak_flop_per_s(format_.compute_dtype), device.bandwidth_bytes_per_s
    if peak is None or bandwidth is None:
        raise InputError(f"{device.name}: the data sheet has no peak in {dtype} or no bandwidth")
    weights, size = weight_bytes(shape, dtype), format_.bits / BITS_PER_BYTE
    value_bytes = kv_bytes_per_value(dtype)
    cached = kv_bytes_per_token(shape, bytes_per_value=value_bytes)
    found = critical_batch_size(
        weight_bytes=weights,
        params_active=shape.params_active,
        bandwidth_bytes_per_s=bandwidth,
        flop_per_s=peak,
        mean_context_tokens=context,
        kv_bytes_per_token=cached,
    )
    n, d = context, shape.head_dim
    bare = critical_batch_size_without_cache(
        bytes_per_weight=size, flop_per_s=peak, bandwidth_bytes_per_s=bandwidth
    )
    terms: tuple[Term, ...] = (
        Term(
            "operations a byte of the device",
            f"{peak / 1e12:g} TFLOP/s / {bandwidth / 1e9:g} GB/s",
            ops_per_byte(peak, bandwidth),
            "FLOP/byte",
        ),
        Term("critical batch size, weights only", f"{size:g} bytes / 2 x the above", bare, "rows"),
        Term(
            f"critical batch size, with {context:,} cached tokens each",
            "(W / BW) / (2 P / F - L k / BW)",
            found,
            "rows",
        ),
        Term(
            f"intensity of attention over a prompt of {n:,} tokens",
            "(4 N^2 d + 3 N^2) / (8 N^2 + 8 N d)",
            (4 * n * n * d + 3 * n * n) / (8 * n * n + 8 * n * d),
            "FLOP/byte",
        ),
    )
    if not shape.latent_kv_dim:
        ratio = 2 * shape.num_heads / shape.num_kv_heads / value_bytes
        heads = f"{shape.num_heads} heads / {shape.num_kv_heads} KV heads"
        text = f"2 x {heads} / {value_bytes:g} bytes"
        terms += (Term("intensity of attention in a decode step", text, ratio, "FLOP/byte"),)
    notes = () if found else ("reading the cache takes longer than arithmetic at any batch",)
    return Explanation(f"Batch of {shape.name} in {dtype} on {device.name}", terms, notes)


def blended(settings: BlendedSettings) -> Explanation:
    """The blended price as published: output price / (ratio + 1), a convention."""
    price = _price(settings.instance, settings.price)
    tokens = settings.throughput
    if tokens is None:
        if settings.concurrency is None or settings.itl is None:
            raise InputError("give --throughput, or --concurrency and --itl (p50 in ms)")
        tokens = settings.concurrency / ms_to_s(settings.itl)
    paid = (1 - settings.discount) * price
    output = usd_per_1m_tokens(paid, tokens)
    assert output is not None
    ratio = settings.ratio
    terms = (
        Term(
            "price",
            f"{price:g} x (1 - {settings.discount:g})",
            (1 - settings.discount) * price,
            "USD/h",
        ),
        Term("throughput", "stated, or concurrency / p50 ITL", tokens, "tok/s"),
        Term("1M output tokens", "price / (throughput x 3600 / 1e6)", output, "USD"),
        Term("1M blended tokens", f"the above / ({ratio:g} + 1)", output / (ratio + 1), "USD"),
    )
    note = f"a convention: {ratio:g} input tokens for each output token share one price"
    return Explanation("Blended price", terms, (note,))


def savings(settings: SavingsSettings) -> Explanation:
    """How much cheaper one machine is, and the throughput from which its tokens are cheaper."""
    machines = {settings.cheap: settings.cheap_price, settings.dear: settings.dear_price}
    cheap, dear = (_price(name, stated) for name, stated in machines.items())
    terms = (
        *(
            Term(name, _origin(name, stated), _price(name, stated), "USD/h")
            for name, stated in machines.items()
        ),
        Term("cheaper by", f"1 - {cheap:g} / {dear:g}", 100 * (1 - cheap / dear), "%"),
        Term("break-even throughput", f"of {settings.dear}'s tok/s", 100 * cheap / dear, "%"),
    )
    return Explanation(f"{settings.cheap} against {settings.dear}", terms)


def _price(instance: str | None, price: float | None) -> float:
    if price is None and instance is not None:
        price = find_instance(instance).price_usd_per_hour
    if price is None:
        raise InputError(f"no price of {instance or 'the machine'} is known: give --price USD/h")
    return price


def _origin(instance: str, price: float | None) -> str:
    """Where a machine's price is from."""
    return "as stated" if price is not None else find_instance(instance).price_provenance or ""
