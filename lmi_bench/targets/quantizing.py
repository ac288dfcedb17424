"""Quantization: the engine's settings, facts for the manifest, notes."""

from pathlib import Path
from typing import Any

from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.engine import quantization


def quantize_settings(settings: EngineSection) -> quantization.QuantizeSettings:
    """The engine's settings for quantization; NOT_QUANTIZED without a scheme."""
    scheme = quantization.parse_scheme(settings.quantize)
    if scheme is quantization.Scheme.NONE:
        return quantization.NOT_QUANTIZED
    return quantization.QuantizeSettings(
        scheme,
        alpha=settings.smoothquant_alpha,
        per_token=settings.smoothquant_per_token,
        per_channel=settings.smoothquant_per_channel,
        calibration=None if settings.calibration is None else Path(settings.calibration),
    )


def quantize_facts(
    settings: quantization.QuantizeSettings, weight_bytes: int, quantized: quantization.QuantizedBytes | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {"weight_bytes": weight_bytes}
    if quantized is not None:
        facts["quantization"] = {
            "scheme": quantized.scheme,
            "settings": str(settings),
            "kernels": quantized.kernels,
            "emulated": quantized.emulated,
            "matrices_bytes": quantized.held_bytes,
            "matrices_float_bytes": quantized.float_bytes,
        }
    return facts


def quantize_notes(quantized: quantization.QuantizedBytes | None) -> tuple[str, ...]:
    if quantized is None or not quantized.float_bytes:
        return ()
    held, floats = quantized.held_bytes, quantized.float_bytes
    lines = [
        f"{quantized.scheme}: matrices take {bytes_to_gib(held):.3f} GiB, "
        f"{held / floats:.0%} of {bytes_to_gib(floats):.3f} GiB unquantized; {quantized.kernels}"
    ]
    errors = quantized.relative_error
    if errors:
        name, largest = max(errors.items(), key=lambda item: item[1])
        mean = sum(errors.values()) / len(errors)
        lines.append(f"rounding moves a matrix by {mean:.2%} of its size on average, at most by {largest:.2%} ({name})")
    if quantized.scheme.rounds_activations and not quantized.weights_only:
        lines.append(
            "activations are rounded too: greedy tokens may depend on chunks of the prompt and on "
            "what else is in the batch, in float32 as well"
        )
    if quantized.emulated:
        lines.append(f"warning: {quantized.scheme} is emulated here: its speed means nothing")
    return tuple(lines)
