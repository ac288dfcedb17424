"""Settings of `explain`."""

from dataclasses import dataclass

from lmi_bench.core.option import REQUIRED, Settings, option
from lmi_bench.jobs.settings import planning

_DTYPE = "Weight format: float32, float16, bfloat16, float8, int8, int4, mxfp4 or nvfp4."


@dataclass(frozen=True, slots=True)
class MemorySettings(Settings):
    """A batch of equal sequences on one copy."""

    model: str = option(planning.MODEL, value=REQUIRED)
    dtype: str = option(_DTYPE, value="float16")
    kv_dtype: str | None = option(planning.KV_DTYPE)
    batch: int = option("Sequences at once.", value=1, must="at least 1")
    tokens: int = option(
        "Tokens of each sequence, input and output.", value=4096, must="at least 1"
    )
    tensor_parallel: int = option("Devices of one copy.", "--tp", value=1, must="at least 1")
    accelerator: str | None = option("Accelerator, such as A10G, for the shares of its memory.")
    memory_gb: float | None = option(
        "Memory of a device in GB.", default="the accelerator's", must="above 0"
    )
    overhead_gb: float = option(
        "Memory that the framework takes, in GB.", value=0.0, must="at least 0"
    )
    parameters_b: float | None = option(
        "Parameters in 1e9, instead of the model's own number.", must="above 0"
    )


@dataclass(frozen=True, slots=True)
class BatchSettings(Settings):
    """A model on a device."""

    model: str = option(planning.MODEL, value=REQUIRED)
    accelerator: str = option("Accelerator, such as A10G.", value=REQUIRED)
    dtype: str = option(_DTYPE, value="float16")
    tokens: int = option(
        "Cached tokens of each sequence; length of the prompt.", value=4096, must="at least 1"
    )


@dataclass(frozen=True, slots=True)
class BlendedSettings(Settings):
    """A machine with its price and throughput."""

    instance: str | None = option("Instance type, for its price.")
    price: float | None = option("Price in USD per hour.", default="the catalog's", must="above 0")
    throughput: float | None = option("Throughput in output tokens per second.", must="above 0")
    concurrency: float | None = option(
        "Concurrent requests, with --itl instead of a throughput.", must="above 0"
    )
    itl: float | None = option("Median inter-token latency in ms.", must="above 0")
    ratio: float = option("Input tokens for each output token.", value=3.0, must="above 0")
    discount: float = option(
        "Discount on the price, 0 to 1.", value=0.0, must="at least 0 and below 1"
    )


@dataclass(frozen=True, slots=True)
class SavingsSettings(Settings):
    """Two machines."""

    cheap: str = option("Cheaper instance type.", argument=True, metavar="CHEAP")
    dear: str = option("Dearer instance type.", argument=True, metavar="DEAR")
    cheap_price: float | None = option(
        "Price of CHEAP in USD/h.", default="the catalog's", must="above 0"
    )
    dear_price: float | None = option(
        "Price of DEAR in USD/h.", default="the catalog's", must="above 0"
    )
