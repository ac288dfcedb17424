"""AWQ's public checkpoint format: 4 bits, eight values per int32, in its kernel's order.

For a matrix of K inputs and N outputs in groups of g inputs: `qweight` int32 (K, N/8), `qzeros`
int32 (K/g, N/8), `scales` float16 (K/g, N). The eight values of an int32, lowest bits first, are
those of outputs 0 2 4 6 1 3 5 7 of its run of eight. weight = (value - zero) * scale.
Source: the `gemm` layout of mit-han-lab/llm-awq and AutoAWQ.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.quantization.rounding import GroupedWeight

_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_INT32: Final = 8
_MASK: Final = 15


def unpack_awq(packed: Tensor) -> Tensor:
    """int32 (rows, N/8) to uint8 values (rows, N)."""
    shifts = torch.arange(0, 4 * _PER_INT32, 4, dtype=torch.int32)
    values = (packed[..., None] >> shifts) & _MASK
    place = torch.tensor(_ORDER).argsort()
    return values[..., place].flatten(1).to(torch.uint8)


def pack_awq(values: Tensor) -> Tensor:
    """uint8 values (rows, N) to int32 (rows, N/8)."""
    runs = values.view(len(values), -1, _PER_INT32)[..., list(_ORDER)].to(torch.int64)
    packed = torch.zeros(runs.shape[:2], dtype=torch.int64)
    for number in range(_PER_INT32):
        packed |= runs[..., number] << (4 * number)
    # the top value reaches the sign bit
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedWeight:
    """The matrix from a checkpoint's three tensors, with outputs as rows."""
    return GroupedWeight(
        unpack_awq(qweight).t().contiguous(),
        scales.float().t().contiguous(),
        unpack_awq(qzeros).t().contiguous(),
        bits=4,
    )


def to_awq(weight: GroupedWeight) -> dict[str, Tensor]:
    """A matrix's three tensors by name; the number of outputs must be a multiple of 8."""
    return {
        "qweight": pack_awq(weight.values.t().contiguous()),
        "qzeros": pack_awq(weight.zeros.t().contiguous()),
        "scales": weight.scale.t().to(torch.float16).contiguous(),
    }
