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
from lmi_bench.core.scenario_fields import Fields, NotNegative, Positive, PositiveInt, Text

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
class ModelFields(Fields):
    """How the model is held in memory and how a step is computed.

    Steps are compiled at start, taken from the user's cache, or compiled ahead of time. The triton
    back end's device is always cuda. The calibration that is built in is a short text. None for
    group_query_attention: KV heads go to ranks evenly, as vLLM deals them.

    tensor_parallel  Tensor-parallel degree, or max: all devices or cores.
    group_query_attention  KV heads on ranks, with NeuronX's padding: shard-over-heads or
        replicated-heads.
    backend  Back end of the bundled engine: native (C++, compiled at first use), torch, triton (GPU
        only), or auto: native if machine and model allow it.
    device  Device of the torch back end: cpu or cuda.
    enforce_eager  CUDA graphs on a GPU: on, or off for less memory and slower steps.
    dtype  Weight format: float32, bfloat16 or float16; simulated and of an endpoint also float8,
        int8, int4, mxfp4 or nvfp4.
    kv_dtype  KV-cache format (bundled): float32, bfloat16, float16 or, in torch and triton, float8.
    kv_tokens  Tokens that the KV cache of a copy holds, as its server logs them (simulated).
    num_blocks  Number of KV-cache blocks.
    block_size  Size of a KV-cache block in tokens.
    max_model_len  Maximum length of a request and its answer in tokens.
    rope_scaling  RoPE scaling of the bundled engine for requests beyond the trained positions:
        linear:2, dynamic:4 or yarn:4; `lmi-bench perplexity` measures its cost.
    memory_share  Share of free memory for the KV cache, 0 to 1; simulated: of all memory, with
        weights.
    threads  CPU threads of the engine.
    quantize  Quantization (bundled): none, int8, awq-int4 (LMI's awq), awq-int3, smoothquant or
        fp8.
    smoothquant_alpha  SmoothQuant: share of outliers moved into the weights, 0 to 1.
    smoothquant_per_token  SmoothQuant scales of activations: one for each token, or one for all.
    smoothquant_per_channel  SmoothQuant scales of weights: one for each channel, or one for all.
    calibration  Calibration text (or JSON lines) of awq and smoothquant.
    compile  Decode steps compiled at start, and kept for the next start.
    compile_shapes  Shapes of compiled or captured steps, SEQUENCESxTOKENS: 1x512,8x512.
    artefact  Folder of compiled steps, made by `compile` for this engine.
    draft  Draft of speculative decoding: ngram, or a smaller model with the same vocabulary.
    draft_tokens  Maximum drafted tokens that a step verifies.
    draft_adaptive  Number of drafted tokens: lower after few were accepted, or fixed.
    """

    SECTION = "engine"
    GROUP = "Engine: model"

    tensor_parallel: PositiveInt | Literal["max"] | None = option(
        "--tp", default="1; simulated: the smallest that fits", read=_degree
    )
    group_query_attention: Literal["shard-over-heads", "replicated-heads"] | None = option(
        default="evenly, without padding", rare=True
    )
    backend: Literal["auto", "native", "torch", "triton"] = option(value="auto")
    device: Literal["cpu", "cuda"] | None = option(default="cpu")
    enforce_eager: bool = option(
        "--graphs",
        old_names=("--enforce-eager=off", "--cuda-graphs=on"),
        value=False,
        default="on",
        metavar="on|off",
        kind=str,
        read=_eager,
    )
    dtype: WeightDtype | None = option(default="bfloat16; simulated: the published weights'")
    kv_dtype: Literal["float32", "bfloat16", "float16", "float8"] | None = option(default="as the weights")
    kv_tokens: PositiveInt | None = option(default="from memory", rare=True)
    num_blocks: PositiveInt | None = option(default="from memory", rare=True)
    block_size: PositiveInt | None = option(default="64; simulated: the profile's", rare=True)
    max_model_len: PositiveInt | None = option(default="the model's")
    rope_scaling: str | None = option()
    memory_share: Annotated[float, Gt(0), Le(1)] | None = option(
        default="0.5, on a GPU alone 0.9; simulated: the profile's"
    )
    threads: PositiveInt | None = option(default="all free cores")
    quantize: Literal["none", "int8", "awq", "awq-int4", "awq-int3", "smoothquant", "fp8"] = option(value="none")
    smoothquant_alpha: Share = option(value=0.8, rare=True)
    smoothquant_per_token: bool = option(
        "--smoothquant-per-token/--smoothquant-per-tensor", value=True, default="per token", rare=True
    )
    smoothquant_per_channel: bool = option(
        "--smoothquant-per-channel/--smoothquant-per-matrix", value=True, default="per channel", rare=True
    )
    calibration: str | None = option(default="built in", rare=True)
    compile: bool = option(value=False, default="no")
    compile_shapes: str | None = option(default="from the engine's limits", rare=True)
    artefact: str | None = option()
    draft: Text | None = option()
    draft_tokens: PositiveInt = option(value=4)
    draft_adaptive: bool = option("--draft-adaptive/--draft-fixed", value=True, default="adaptive", rare=True)


@dataclass(frozen=True)
class BatchingFields(Fields):
    """Batching, replicas, and what only a simulation needs; follow_memory keeps 5 % free.

    policy  Batching policy: rolling, dynamic or none.
    kv_layout  KV-cache layout: paged or contiguous.
    batch_size  Requests of a dynamic batch.
    max_batch_delay_ms  Maximum wait for a full dynamic batch in ms.
    max_rolling_batch_size  Maximum sequences in the rolling batch.
    max_rolling_batch_prefill_tokens  Maximum prompt tokens of one step.
    chunked_prefill  Prefill: in chunks within decode steps, or whole.
    max_waiting_tokens  Decode steps after which waiting prompts may pause the running sequences, as
        in TGI.
    waiting_served_ratio  Waiting prompts, relative to the running sequences, that may pause them
        before that.
    prefix_caching  Prefix cache: prompts with a common prefix share blocks.
    host_cache_gib  Host memory of a copy for evicted prefix blocks, in GiB: simulated.
    host_cache_gb_per_s  Rate at which each device gets them back, in GB/s.
    recompute_on_join  KV cache when a request joins: recomputed for all, as in old engines, or
        extended.
    follow_memory  KV-cache size: limited to memory that is free while serving, or fixed.
    max_concurrent_requests  Maximum requests that run or wait; others are refused.
    max_input_tokens  Maximum prompt length in tokens.
    max_batch_total_tokens  Maximum tokens in the KV cache.
    replicas  Copies of the model behind one router.
    router  Router of the replicas: round-robin, least-outstanding, prefix-affine or random.
    draft_acceptance  Probability that a drafted token is accepted, 0 to 1: simulated only.
    profile  Timing profile (simulated): a file of `calibrate`, or one of `profiles list`.
    """

    SECTION = "engine"
    GROUP = "Engine: batching"

    policy: Literal["none", "dynamic", "rolling"] = option(value="rolling")
    kv_layout: Literal["paged", "contiguous"] | None = option(default="paged; simulated: the profile's", rare=True)
    batch_size: PositiveInt = option(value=4, rare=True)
    max_batch_delay_ms: NotNegative = option(value=100.0, rare=True)
    max_rolling_batch_size: PositiveInt | None = option(
        "--max-batch", old_names=("--max-rolling-batch-size",), default="32; simulated: the profile's"
    )
    max_rolling_batch_prefill_tokens: PositiveInt | None = option(
        "--prefill-tokens", old_names=("--max-rolling-batch-prefill-tokens",), default="4096; simulated: the profile's"
    )
    chunked_prefill: bool | None = option(
        "--chunked-prefill/--whole-prefill", default="whole; simulated: the profile's"
    )
    max_waiting_tokens: PositiveInt | None = option(default="at once; simulated: the profile's", rare=True)
    waiting_served_ratio: NotNegative | None = option(default="1.2", rare=True)
    prefix_caching: bool | None = option(default="no")
    host_cache_gib: Positive | None = option(rare=True)
    host_cache_gb_per_s: Positive | None = option(
        setting="host_cache_gb_per_s", default="0.8 of its PCIe link's", rare=True
    )
    recompute_on_join: bool | None = option("--recompute-on-join/--insert-on-join", default="extended", rare=True)
    follow_memory: bool | None = option("--follow-memory/--fixed-memory", default="fixed", rare=True)
    max_concurrent_requests: PositiveInt | None = option(default="no limit; serve: 4096", rare=True)
    max_input_tokens: PositiveInt | None = option(default="what the answer leaves")
    max_batch_total_tokens: PositiveInt | None = option(default="from memory", rare=True)
    replicas: PositiveInt = option(value=1)
    router: Literal["round_robin", "least_outstanding", "prefix_affine", "random"] = option(
        value="round_robin", default="round-robin", read=lambda text: text.replace("-", "_")
    )
    draft_acceptance: Share | None = option(rare=True)
    profile: str | None = option(default="vllm")
