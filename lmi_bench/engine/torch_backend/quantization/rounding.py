"""Rounds weight matrices, packs their values into bytes, and dequantizes them, without kernels.

A weight has shape (outputs, inputs) and is rounded from float32. Packing has no padding, for fast
unpacking: a row's inputs are split into as many runs as values share a byte, and a byte has one
value of each run, so unpacking takes one shift per run and no shuffling. 4 bits take 1/2 byte per
weight, 3 bits 3/8 (two bits in one array, the third in another).

AWQ's public checkpoint format has 4 bits, eight values per int32, in its kernel's order. For a
matrix of K inputs and N outputs in groups of g inputs: `qweight` int32 (K, N/8), `qzeros` int32
(K/g, N/8), `scales` float16 (K/g, N). The eight values of an int32, lowest bits first, are those of
outputs 0 2 4 6 1 3 5 7 of its run of eight. weight = (value - zero) * scale.
Source: the `gemm` layout of mit-han-lab/llm-awq and AutoAWQ.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizeSettings, Scheme

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
_SMALLEST_SCALE: Final = 1e-8


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """w = values * scale, or where there are zeros, w = (values - zeros) * scale.

    values  shape (outputs, inputs): int8 or float8_e4m3fn; with zeros uint8, 0 to 2^bits - 1
    scale   float32, shape (outputs,), or (outputs, groups) with one for each group of neighbouring
            inputs
    zeros   uint8, shape (outputs, groups)
    """

    values: Tensor
    scale: Tensor
    zeros: Tensor | None = None
    bits: int = 8

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.numel() // self.scale.numel()

    def floats(self) -> Tensor:
        """The dequantized weight, float32."""
        groups = self.values.float().view(*self.scale.shape, self.group_size)
        if self.zeros is not None:
            groups -= self.zeros[..., None]
        return (groups * self.scale[..., None]).view(self.values.shape)


def round_int8(weight: Tensor, *, per_channel: bool = True) -> QuantizedWeight:
    """Round symmetrically to -127 .. 127, with a scale per output or one for all."""
    largest = weight.abs().amax(dim=1) if per_channel else weight.abs().amax().expand(len(weight))
    scale = (largest / 127).clamp_min(_SMALLEST_SCALE)
    values = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(values, scale.contiguous())


def round_grouped(weight: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Round asymmetrically with a scale and a zero per `group_size` inputs, as AWQ's code does.

    scale = (max - min) / (2^bits - 1), zero = -round(min / scale); 0 is kept exactly
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group_size, group_size)
    # a group with one sign would have its zero outside 0 .. top: extend the range to 0
    high, low = groups.amax(dim=-1).clamp_min_(0), groups.amin(dim=-1).clamp_max_(0)
    top = 2**bits - 1
    scale = ((high - low) / top).clamp_min_(_SMALLEST_SCALE)
    zeros = (-(low / scale).round_()).clamp_(0, top)
    values = (groups / scale[..., None]).round_().add_(zeros[..., None]).clamp_(0, top)
    return QuantizedWeight(values.view(rows, columns).to(torch.uint8), scale, zeros.byte(), bits)


def round_fp8(weight: Tensor) -> QuantizedWeight:
    """Round to float8; each output's largest value becomes 448, the largest in E4M3."""
    scale = (weight.abs().amax(dim=1) / FP8_MAX).clamp_min(_SMALLEST_SCALE)
    return QuantizedWeight((weight / scale[:, None]).to(FP8), scale)


def round_weight(weight: Tensor, settings: QuantizeSettings, group_size: int) -> QuantizedWeight:
    """Round a float32 weight with the settings' scheme."""
    match settings.scheme:
        case Scheme.INT8:
            return round_int8(weight)
        case Scheme.SMOOTHQUANT:
            return round_int8(weight, per_channel=settings.per_channel)
        case Scheme.AWQ_INT4 | Scheme.AWQ_INT3:
            return round_grouped(weight, settings.scheme.bits, group_size)
        case Scheme.FP8:
            return round_fp8(weight)
    raise ValueError(f"{settings.scheme} quantizes nothing")


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack `8 / bits` values into each byte; bits is 1, 2 or 4.

    values   uint8 below 2^bits, shape (rows, columns), columns a multiple of 8 / bits
    returns  uint8, shape (rows, columns * bits / 8)
    """
    runs = values.chunk(8 // bits, dim=1)
    packed = runs[0].clone()
    for number, run in enumerate(runs[1:], start=1):
        packed |= run << (number * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_bits`."""
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=1)


def pack_3bit(values: Tensor) -> tuple[Tensor, Tensor]:
    """The low two bits and the high bit of values below 8, packed separately."""
    return pack_bits(values & 3, 2), pack_bits(values >> 2, 1)


def unpack_3bit(low: Tensor, high: Tensor) -> Tensor:
    """Inverse of `pack_3bit`."""
    return unpack_bits(low, 2) | (unpack_bits(high, 1) << 2)


def _eights_in_words(values: Tensor, bits: int) -> Tensor:
    """Pack eight neighbouring values into a word, lowest bits first: (rows, columns) to int64
    (rows, columns / 8)."""
    runs = values.view(len(values), -1, 8).long()
    words = runs[..., 0]
    for number in range(1, 8):
        words = words | runs[..., number] << (bits * number)
    return words


def _eights_of_words(words: Tensor, bits: int) -> Tensor:
    """Inverse of `_eights_in_words`, from words of any integer type: (rows, columns / 8) to uint8
    (rows, columns / 8, 8)."""
    shifts = torch.arange(0, 8 * bits, bits, dtype=words.dtype, device=words.device)
    values: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return values.to(torch.uint8)


def pack_3bit_for_file(values: Tensor) -> Tensor:
    """Pack eight neighbouring values into three bytes, lowest bits first, so that a row can be
    split by bytes; shape (rows, columns) to (rows, columns * 3 / 8)."""
    words = _eights_in_words(values, 3)[..., None]
    return words.view(torch.uint8)[..., :3].flatten(1)


def unpack_3bit_from_file(packed: Tensor) -> Tensor:
    """Inverse of `pack_3bit_for_file`."""
    parts = packed.view(len(packed), -1, 3).int()
    words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)
    return _eights_of_words(words, 3).flatten(1)


_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_awq(packed: Tensor) -> Tensor:
    """int32 (rows, N/8) to uint8 values (rows, N)."""
    return _eights_of_words(packed, 4)[..., torch.tensor(_ORDER).argsort()].flatten(1)


def pack_awq(values: Tensor) -> Tensor:
    """uint8 values (rows, N) to int32 (rows, N/8)."""
    words = _eights_in_words(values.view(len(values), -1, 8)[..., list(_ORDER)].flatten(1), 4)
    return words[..., None].view(torch.int32)[..., 0].contiguous()


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    """The matrix from a checkpoint's three tensors, with outputs as rows."""
    return QuantizedWeight(
        unpack_awq(qweight).t().contiguous(),
        scales.float().t().contiguous(),
        unpack_awq(qzeros).t().contiguous(),
        bits=4,
    )


def to_awq(weight: QuantizedWeight) -> dict[str, Tensor]:
    """A grouped matrix's three tensors by name; the number of outputs must be a multiple of 8."""
    assert weight.zeros is not None
    return {
        "qweight": pack_awq(weight.values.t().contiguous()),
        "qzeros": pack_awq(weight.zeros.t().contiguous()),
        "scales": weight.scale.t().to(torch.float16).contiguous(),
    }
