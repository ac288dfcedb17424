"""What is served on what: a model in its number formats, on some devices of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.analysis.model.speculation import Speculation
from lmi_bench.catalog.instances import Instance
from lmi_bench.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Setup:
    """One copy of a model, without its engine: what a profile is asked about.

    tensor_parallel  devices that the copy is split over
    dtype, kv_dtype  of the weights and of the cache; None: as the weights, 16 bits beside
                     narrower ones
    speculation      of the engine; None: one token a step
    """

    shape: ModelShape
    instance: Instance
    tensor_parallel: int
    dtype: str
    kv_dtype: str | None = None
    speculation: Speculation | None = None
