"""The set-up of one copy: a model in its number formats on devices of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.analysis.model.speculation import Speculation
from lmi_bench.catalog.instances import Instance
from lmi_bench.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Setup:
    """One copy of a model, without its engine.

    tensor_parallel  devices that the copy is split over
    dtype, kv_dtype  of the weights and the cache; None: 32 bits with 32-bit weights, else 16
    speculation      of the engine; None: one token a step
    """

    shape: ModelShape
    instance: Instance
    tensor_parallel: int
    dtype: str
    kv_dtype: str | None = None
    speculation: Speculation | None = None
