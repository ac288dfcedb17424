"""The fields of a scenario's engine, in the groups that commands take; see `scenario_fields`.

The bundled and the simulated engine have them; an endpoint keeps its own. None leaves a setting to
the engine: the bundled one has its defaults, a simulated one those of its profile; blocks and
lengths follow from memory and model. The run's manifest records the values in use.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option
from lmi_bench.core.scenario_fields import Fields, NotNegative, PositiveInt, Text

WeightDtype = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4", "mxfp4", "nvfp4"]
Share = Annotated[float, Ge(0), Le(1)]


def _degree(text: str) -> int | str:
    if text == "max":
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise InputError(f"--tp {text}: write a number of at least 1, or max")


def _eager(text: str) -> bool:
    """Whether no CUDA graphs are recorded."""
    if text not in ("on", "off"):
        raise InputError(f"--graphs {text}: write on or off")
    return text == "off"


@dataclass(frozen=True)
class StepFields(Fields):
    """How the model is held in memory and how a step is computed: all that `compile` depends on.

    device       of the torch back end: triton's is always cuda
    calibration  built in is a short text in the package
    group_query_attention  None: KV heads go to ranks evenly, as vLLM deals them
    """

    SECTION = "engine"
    GROUP = "Engine: model"

    tensor_parallel: PositiveInt | Literal["max"] | None = option(
        "Tensor-parallel degree, or max: all devices or cores.",
        "--tp",
        default="1; simulated: the smallest that fits",
        read=_degree,
    )
    group_query_attention: Literal["shard-over-heads", "replicated-heads"] | None = option(
        "KV heads on ranks, with NeuronX's padding: shard-over-heads or replicated-heads.",
        default="evenly, without padding",
        rare=True,
    )
    backend: Literal["auto", "native", "torch", "triton"] = option(
        "Back end of the bundled engine: native (C++, compiled at first use), torch, triton (GPU "
        "only), or auto: native if machine and model allow it.",
        value="auto",
    )
    device: Literal["cpu", "cuda"] | None = option(
        "Device of the torch back end: cpu or cuda.", default="cpu"
    )
    enforce_eager: bool = option(
        "CUDA graphs on a GPU: on, or off for less memory and slower steps.",
        "--graphs",
        old_names=("--enforce-eager=off", "--cuda-graphs=on"),
        value=False,
        default="on",
        metavar="on|off",
        kind=str,
        read=_eager,
    )
    dtype: WeightDtype | None = option(
        "Weight format: float32, bfloat16 or float16; simulated and of an endpoint also float8, "
        "int8, int4, mxfp4 or nvfp4.",
        default="bfloat16; simulated: the published weights'",
    )
    kv_dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "KV-cache format (bundled): float32, bfloat16 or float16.", default="as the weights"
    )
    kv_tokens: PositiveInt | None = option(
        "Tokens that the KV cache of a copy holds, as its server logs them (simulated).",
        default="from memory",
        rare=True,
    )
    num_blocks: PositiveInt | None = option(
        "Number of KV-cache blocks.", default="from memory", rare=True
    )
    block_size: PositiveInt | None = option(
        "Size of a KV-cache block in tokens.", default="64; simulated: the profile's", rare=True
    )
    max_model_len: PositiveInt | None = option(
        "Maximum length of a request and its answer in tokens.", default="the model's"
    )
    rope_scaling: str | None = option(
        "RoPE scaling of the bundled engine for requests beyond the trained positions: linear:2, "
        "dynamic:4 or yarn:4; `lmi-bench perplexity` measures its cost."
    )
    memory_share: Annotated[float, Gt(0), Le(1)] | None = option(
        "Share of free memory for the KV cache, 0 to 1; simulated: of all memory, with weights.",
        default="0.5; simulated: the profile's",
    )
    threads: PositiveInt | None = option("CPU threads of the engine.", default="all free cores")
    quantize: Literal["none", "int8", "awq", "awq-int4", "awq-int3", "smoothquant", "fp8"] = option(
        "Quantization (bundled): none, int8, awq-int4 (LMI's awq), awq-int3, smoothquant or fp8.",
        value="none",
    )
    smoothquant_alpha: Share = option(
        "SmoothQuant: share of outliers moved into the weights, 0 to 1.", value=0.8, rare=True
    )
    smoothquant_per_token: bool = option(
        "SmoothQuant scales of activations: one for each token, or one for all.",
        "--smoothquant-per-token/--smoothquant-per-tensor",
        value=True,
        default="per token",
        rare=True,
    )
    smoothquant_per_channel: bool = option(
        "SmoothQuant scales of weights: one for each channel, or one for all.",
        "--smoothquant-per-channel/--smoothquant-per-matrix",
        value=True,
        default="per channel",
        rare=True,
    )
    calibration: str | None = option(
        "Calibration text (or JSON lines) of awq and smoothquant.", default="built in", rare=True
    )


@dataclass(frozen=True)
class CompiledFields(Fields):
    """Decode steps compiled at start, or taken from the user's cache, or compiled ahead of time."""

    SECTION = "engine"
    GROUP = "Engine: model"

    compile: bool = option(
        "Decode steps compiled at start, and kept for the next start.", value=False, default="no"
    )
    compile_shapes: str | None = option(
        "Shapes of compiled or captured steps, SEQUENCESxTOKENS: 1x512,8x512.",
        default="from the engine's limits",
        rare=True,
    )
    artefact: str | None = option("Folder of compiled steps, made by `compile` for this engine.")


@dataclass(frozen=True)
class DraftFields(Fields):
    """Speculative decoding."""

    SECTION = "engine"
    GROUP = "Engine: model"

    draft: Text | None = option(
        "Draft of speculative decoding: ngram, or a smaller model with the same vocabulary."
    )
    draft_tokens: PositiveInt = option("Maximum drafted tokens that a step verifies.", value=4)
    draft_adaptive: bool = option(
        "Number of drafted tokens: lower after few were accepted, or fixed.",
        "--draft-adaptive/--draft-fixed",
        value=True,
        default="adaptive",
        rare=True,
    )


@dataclass(frozen=True)
class BatchingFields(Fields):
    """Batching, replicas, and what only a simulation needs; follow_memory keeps 5 % free."""

    SECTION = "engine"
    GROUP = "Engine: batching"

    policy: Literal["none", "dynamic", "rolling"] = option(
        "Batching policy: rolling, dynamic or none.", value="rolling"
    )
    kv_layout: Literal["paged", "contiguous"] | None = option(
        "KV-cache layout: paged or contiguous.",
        default="paged; simulated: the profile's",
        rare=True,
    )
    batch_size: PositiveInt = option("Requests of a dynamic batch.", value=4, rare=True)
    max_batch_delay_ms: NotNegative = option(
        "Maximum wait for a full dynamic batch in ms.", value=100.0, rare=True
    )
    max_rolling_batch_size: PositiveInt | None = option(
        "Maximum sequences in the rolling batch.",
        "--max-batch",
        old_names=("--max-rolling-batch-size",),
        default="32; simulated: the profile's",
    )
    max_rolling_batch_prefill_tokens: PositiveInt | None = option(
        "Maximum prompt tokens of one step.",
        "--prefill-tokens",
        old_names=("--max-rolling-batch-prefill-tokens",),
        default="4096; simulated: the profile's",
    )
    chunked_prefill: bool | None = option(
        "Prefill: in chunks within decode steps, or whole.",
        "--chunked-prefill/--whole-prefill",
        default="whole; simulated: the profile's",
    )
    max_waiting_tokens: PositiveInt | None = option(
        "Decode steps after which waiting prompts may pause the running sequences, as in TGI.",
        default="at once; simulated: the profile's",
        rare=True,
    )
    waiting_served_ratio: NotNegative | None = option(
        "Waiting prompts, relative to the running sequences, that may pause them before that.",
        default="1.2",
        rare=True,
    )
    prefix_caching: bool | None = option(
        "Prefix cache: prompts with a common prefix share blocks.", default="no"
    )
    recompute_on_join: bool | None = option(
        "KV cache when a request joins: recomputed for all, as in old engines, or extended.",
        "--recompute-on-join/--insert-on-join",
        default="extended",
        rare=True,
    )
    follow_memory: bool | None = option(
        "KV-cache size: limited to memory that is free while serving, or fixed.",
        "--follow-memory/--fixed-memory",
        default="fixed",
        rare=True,
    )
    max_concurrent_requests: PositiveInt | None = option(
        "Maximum requests that run or wait; others are refused.", default="no limit", rare=True
    )
    max_input_tokens: PositiveInt | None = option(
        "Maximum prompt length in tokens.", default="what the answer leaves"
    )
    max_batch_total_tokens: PositiveInt | None = option(
        "Maximum tokens in the KV cache.", default="from memory", rare=True
    )
    replicas: PositiveInt = option("Copies of the model behind one router.", value=1)
    router: Literal["round_robin", "least_outstanding", "prefix_affine", "random"] = option(
        "Router of the replicas: round-robin, least-outstanding, prefix-affine or random.",
        value="round_robin",
        default="round-robin",
        read=lambda text: text.replace("-", "_"),
    )
    draft_acceptance: Share | None = option(
        "Probability that a drafted token is accepted, 0 to 1: simulated only.", rare=True
    )
    profile: str | None = option(
        "Timing profile (simulated): a file of `calibrate`, or one of `catalog profiles`.",
        default="vllm",
    )
