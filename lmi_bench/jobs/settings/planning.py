"""Options that several planning commands share, each declared once."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from lmi_bench.core.engine_fields import BatchingFields
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option, Settings, Stated, option

ENGINE, WORKLOAD, LOAD = "Engine settings", "Workload", "Load"
MACHINES, PRICES, LIMITS = "Machines", "Prices and purchase", "Limits and objective"

MODEL = Option("Model as a catalog name or folder.", ("--model", "-m"))
INPUT_TOKENS = Option("Prompt length in tokens.", ("--input-tokens", "--isl"), group=WORKLOAD, must="at least 1")
OUTPUT_TOKENS = replace(INPUT_TOKENS, help="Output length in tokens.", names=("--output-tokens", "--osl"))
DTYPE = Option(
    "Weight format: float16, bfloat16, float32, float8, int8, int4, mxfp4 or nvfp4.",
    old_names=("--weight-dtype",),
    default="the checkpoint's, at most 16 bits",
    group=ENGINE,
)
KV_DTYPE = Option("KV-cache format: float16, float32, float8 or int8.", default="as the weights", group=ENGINE)
TENSOR_PARALLEL = Option("Tensor-parallel degree: devices of one copy.", ("--tp",), group=MACHINES, must="at least 1")
PROFILE = Option("Engine profile: a file of `calibrate`, or one of `profiles list`.", default="vllm", group=ENGINE)
KV_TOKENS = Option(
    "Tokens that the KV cache of one copy holds, as vLLM logs it (`GPU KV cache size`).",
    default="by memory",
    group=ENGINE,
    rare=True,
)
ENGINE_VERSION = Option("Engine version that will serve, compared with the profile's.", group=ENGINE, rare=True)
ROUTER = Option(
    "Router of several copies: random, round-robin, least-outstanding or prefix-affine.",
    old_names=("--routing",),
    group=LOAD,
)
MACHINE_PRICE = Option(
    "Price of one machine in USD per hour.",
    ("--machine-price-per-hour",),
    old_names=("--price-per-hour",),
    group=PRICES,
    must="0 USD or more",
)
COMMIT_DISCOUNT = Option(
    "Discount on the on-demand price of committed machines, 0 to 1.", group=PRICES, must="at least 0 and below 1"
)
PREFIX_HIT = Option("Share of each prompt found in the prefix cache, 0 to 1.", group=WORKLOAD, must="0 to 1")
SHARED_PREFIX = Option("Prefix that all prompts share in tokens: simulated.", group=WORKLOAD, must="0 or more")
DOCUMENTS = Option("Documents COUNTxTOKENS, one in each prompt: simulated.", group=WORKLOAD)
TURNS = Option(
    "Turns of conversations that --rate starts; --input-tokens is what each adds: simulated.", group=WORKLOAD
)
TRACE = Option("Recorded traffic of Azure, Mooncake or Bailian: simulated.", group=WORKLOAD)
HOST_CACHE = Stated(BatchingFields, ("host_cache_gib", "host_cache_gb_per_s"))
SEED = Option("Random seed.", group=LOAD, rare=True)
NETWORK_GBPS = Option("Network between machines in Gbit/s for each device.", default="theirs, or 400", group=ENGINE)
RECOMMENDATION = Option("File written by `recommend --json`.", argument=True, metavar="[REC.json]")


@dataclass(frozen=True, slots=True)
class PriceSettings(Settings):
    """Where the prices of the catalog's machines come from.

    prices  Prices to override the catalog, and other machines (YAML or CSV).
    platform  Price platform: sagemaker, ec2, or file (only the machines of --prices).
    """

    GROUP: ClassVar = PRICES

    prices: Path | None = option(metavar="FILE")
    platform: str = option(value="sagemaker", one_of=("sagemaker", "ec2", "file"))

    def _check(self) -> None:
        if self.platform == "file" and self.prices is None:
            raise InputError("--platform file: give the machines with --prices FILE")


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Speculative decoding: the draft model, and the share of its tokens that is accepted."""

    GROUP: ClassVar = ENGINE

    draft: str | None = option("Draft of speculative decoding: ngram, a smaller model, or mtp: the model's own layer.")
    draft_tokens: int | None = option("Drafted tokens that a step verifies.", default="4", rare=True)
    draft_acceptance: str | None = option(
        "Probability that a drafted token is accepted, 0 to 1, or a run that measured it."
    )
