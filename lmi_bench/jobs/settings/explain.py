"""Settings of `explain`."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option, check_at_least_one, flag_of, option
from lmi_bench.jobs.settings import planning

_DTYPE = "Weight format: float32, float16, bfloat16, float8, int8, int4, mxfp4 or nvfp4."


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """A batch of equal sequences on one copy."""

    model: Annotated[str, planning.MODEL]
    dtype: str = option(_DTYPE, value="float16")
    kv_dtype: Annotated[str | None, planning.KV_DTYPE] = None
    batch: int = option("Sequences at once.", value=1)
    tokens: int = option("Tokens of each sequence, input and output.", value=4096)
    tensor_parallel: int = option("Devices of one copy.", "--tp", value=1)
    accelerator: str | None = option("Accelerator, such as A10G, for the shares of its memory.")
    memory_gb: float | None = option("Memory of a device in GB.", default="the accelerator's")
    overhead_gb: float = option("Memory that the framework takes, in GB.", value=0.0)
    parameters_b: float | None = option("Parameters in 1e9, instead of the model's own number.")

    def __post_init__(self) -> None:
        check_at_least_one(
            batch=self.batch, tokens=self.tokens, tensor_parallel=self.tensor_parallel
        )
        _check_positive(self, "memory_gb", "parameters_b")
        if not 0 <= self.overhead_gb < math.inf:
            raise InputError(f"--overhead-gb must be at least 0, got {self.overhead_gb:g}")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """A model on a device."""

    model: Annotated[str, planning.MODEL]
    accelerator: Annotated[str, Option("Accelerator, such as A10G.")]
    dtype: str = option(_DTYPE, value="float16")
    tokens: int = option("Cached tokens of each sequence; length of the prompt.", value=4096)

    def __post_init__(self) -> None:
        check_at_least_one(tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class BlendedSettings:
    """A machine with its price and throughput."""

    instance: str | None = option("Instance type, for its price.")
    price: float | None = option("Price in USD per hour.", default="the catalog's")
    throughput: float | None = option("Throughput in output tokens per second.")
    concurrency: float | None = option("Concurrent requests, with --itl instead of a throughput.")
    itl: float | None = option("Median inter-token latency in ms.")
    ratio: float = option("Input tokens for each output token.", value=3.0)
    discount: float = option("Discount on the price, 0 to 1.", value=0.0)

    def __post_init__(self) -> None:
        _check_positive(self, "price", "throughput", "concurrency", "itl", "ratio")
        if not 0 <= self.discount < 1:
            raise InputError(f"--discount must be at least 0 and below 1, got {self.discount:g}")


@dataclass(frozen=True, slots=True)
class SavingsSettings:
    """Two machines."""

    cheap: str = option("Cheaper instance type.", argument=True, metavar="CHEAP")
    dear: str = option("Dearer instance type.", argument=True, metavar="DEAR")
    cheap_price: float | None = option("Price of CHEAP in USD/h.", default="the catalog's")
    dear_price: float | None = option("Price of DEAR in USD/h.", default="the catalog's")

    def __post_init__(self) -> None:
        _check_positive(self, "cheap_price", "dear_price")


def _check_positive(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag_of(name)} must be above 0, got {value:g}")
