"""What `compare-accelerators` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.planning import PriceSettings, check_at_least_one


@dataclass(frozen=True, slots=True)
class AcceleratorSettings:
    """A model and the lengths of its requests, on every machine of the catalog."""

    model: Annotated[str, planning.MODEL]
    input_tokens: Annotated[int, planning.INPUT_TOKENS] = 256
    output_tokens: Annotated[int, planning.OUTPUT_TOKENS] = 256
    dtype: Annotated[str | None, planning.DTYPE] = None
    profile: Annotated[str | None, planning.PROFILE] = None
    price_list: PriceSettings = field(default_factory=PriceSettings)

    def __post_init__(self) -> None:
        check_at_least_one(input_tokens=self.input_tokens, output_tokens=self.output_tokens)
