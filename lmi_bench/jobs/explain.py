"""What `explain` does: the planner's arithmetic, one term a line, with its formula.

Memory is in GB (1e9 bytes) beside GiB, since the published examples count in GB.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.analysis.model import memory as model_memory
from lmi_bench.analysis.model import roofline
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
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


def _bytes(quantity: str, formula: str, amount: float) -> Term:
    return Term(quantity, f"{formula} = {bytes_to_gib(amount):,.2f} GiB", amount / 1e9, "GB")


def memory(settings: settings_of.MemorySettings) -> Explanation:
    """Weights, KV cache and overhead of a batch; with a degree also on each device."""
    shape, dtype, degree = find_model(settings.model), settings.dtype, settings.tensor_parallel
    nominal = model_memory.weight_format(dtype).nominal_bits / model_memory.BITS_PER_BYTE
    params, stored = shape.params_total, float(model_memory.weight_bytes(shape, dtype))
    if settings.parameters_b is not None:
        params = round(settings.parameters_b * 1e9)
        stored = params * nominal
    value_bytes = model_memory.kv_bytes_per_value(dtype, settings.kv_dtype)
    sequence_on = partial(
        model_memory.kv_bytes_per_sequence, shape, settings.tokens, bytes_per_value=value_bytes
    )
    whole, ranked = sequence_on(), sequence_on(tensor_parallel=degree)
    cache, overhead = settings.batch * whole, settings.overhead_gb * 1e9
    weights = f"{params / 1e9:,.3f}e9 parameters x {nominal:g} bytes"
    terms = [_bytes("weights", weights, params * nominal)]
    if abs(stored / (params * nominal) - 1) > _SAME:
        wide = model_memory.embedding_params(shape) / 1e9
        kept = f"with scales, and {wide:.2f}e9 embeddings in 16 bits"
        terms.append(_bytes("weights as stored", kept, stored))
    values = f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim}"
    if shape.latent_kv_dim:
        values = f"{shape.num_layers} layers x {shape.latent_kv_dim} values"
    token = model_memory.kv_bytes_per_token(shape, bytes_per_value=value_bytes)
    terms += [
        Term("KV cache a token", f"{values} x {value_bytes:g} bytes", token / 1e6, "MB"),
        _bytes("KV cache a sequence", f"{settings.tokens:,} tokens", whole),
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
        copies = degree * ranked / whole
        if copies > 1:
            notes.append(f"the ranks together keep {copies:.3g} copies of the cache")
    total = (settings.memory_gb or 0.0) * 1e9
    if not total and settings.accelerator is not None:
        total = float(find_accelerator(settings.accelerator).memory_bytes)
    if total:
        terms += _device_terms(total, stored / degree, overhead, ranked)
    return Explanation(f"Memory of {shape.name} in {dtype}", tuple(terms), tuple(notes))


def _device_terms(total: float, weights: float, overhead: float, sequence: float) -> Iterator[Term]:
    """Shares of a device's bytes without any reserve, and the sequences that fit into the rest."""
    share, left = 100 * weights / total, total - weights - overhead
    text = f"{weights / 1e9:.2f} of {total / 1e9:.4g} GB"
    yield Term("weights' share of a device", text, share, "%")
    yield Term("left on a device", "100 % less the weights", 100 - share, "%")
    fitting = f"{left / 1e9:.2f} GB left / {sequence / 1e9:.3f} GB a sequence"
    yield Term("sequences that fit", fitting, max(0, left // sequence), "")


def batch(settings: settings_of.BatchSettings) -> Explanation:
    """Critical batch size with and without the cache, and arithmetic intensities."""
    shape, device = find_model(settings.model), find_accelerator(settings.accelerator)
    dtype, n, d = settings.dtype, settings.tokens, shape.head_dim
    format_ = model_memory.weight_format(dtype)
    peak, bandwidth = device.peak_flop_per_s(format_.compute_dtype), device.bandwidth_bytes_per_s
    if peak is None or bandwidth is None:
        raise InputError(f"{device.name}: the data sheet has no peak in {dtype} or no bandwidth")
    size = format_.bits / model_memory.BITS_PER_BYTE
    value_bytes = model_memory.kv_bytes_per_value(dtype)
    bare = roofline.critical_batch_size_without_cache(
        bytes_per_weight=size, flop_per_s=peak, bandwidth_bytes_per_s=bandwidth
    )
    cached = roofline.critical_batch_size(
        weight_bytes=model_memory.weight_bytes(shape, dtype),
        params_active=shape.params_active,
        bandwidth_bytes_per_s=bandwidth,
        flop_per_s=peak,
        mean_context_tokens=n,
        kv_bytes_per_token=model_memory.kv_bytes_per_token(shape, bytes_per_value=value_bytes),
    )
    speeds = f"{peak / 1e12:g} TFLOP/s / {bandwidth / 1e9:g} GB/s"
    ratio, unit = roofline.ops_per_byte(peak, bandwidth), "FLOP/byte"
    prompt = (4 * n * n * d + 3 * n * n) / (8 * n * n + 8 * n * d)
    rows = (
        ("operations a byte of the device", speeds, ratio, unit),
        ("critical batch size, weights only", f"{size:g} bytes / 2 x the above", bare, "rows"),
        (f"critical batch size, with {n:,} cached tokens each", "(W / BW) / (2 P / F - L k / BW)",
         cached, "rows"),
        (f"intensity of attention over a prompt of {n:,} tokens",
         "(4 N^2 d + 3 N^2) / (8 N^2 + 8 N d)", prompt, unit),
    )  # fmt: skip
    terms = [Term(*row) for row in rows]
    if not shape.latent_kv_dim:
        heads = f"{shape.num_heads} heads / {shape.num_kv_heads} KV heads"
        step = 2 * shape.num_heads / shape.num_kv_heads / value_bytes
        text = f"2 x {heads} / {value_bytes:g} bytes"
        terms.append(Term("intensity of attention in a decode step", text, step, unit))
    notes = () if cached else ("reading the cache takes longer than arithmetic at any batch",)
    return Explanation(f"Batch of {shape.name} in {dtype} on {device.name}", tuple(terms), notes)


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
    terms = (
        Term("price", f"{stated:g} x (1 - {settings.discount:g})", paid, "USD/h"),
        Term("throughput", "stated, or concurrency / p50 ITL", tokens, "tok/s"),
        Term("1M output tokens", "price / (throughput x 3600 / 1e6)", output, "USD"),
        Term("1M blended tokens", f"the above / ({ratio:g} + 1)", output / (ratio + 1), "USD"),
    )
    note = f"a convention: {ratio:g} input tokens for each output token share one price"
    return Explanation("Blended price", terms, (note,))


def savings(settings: settings_of.SavingsSettings) -> Explanation:
    """How much cheaper one machine is, and the throughput from which its tokens are cheaper."""
    prices = []
    for name, stated in (
        (settings.cheap, settings.cheap_price),
        (settings.dear, settings.dear_price),
    ):
        origin = "as stated" if stated is not None else find_instance(name).price_provenance or ""
        prices.append(Term(name, origin, _price(name, stated), "USD/h"))
    cheap, dear = (each.value or 0.0 for each in prices)
    terms = (
        *prices,
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
