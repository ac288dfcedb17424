"""The engine's settings as options, the same in every command that starts one.

A field is named as the setting is in the scenario's `engine` section. None leaves the setting to
the scenario, and then to the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option, option, values_of

_MODEL: Final = "Engine: model"
STEP_TRACE: Final = Option("File for a Chrome trace of the engine's steps and requests.")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How the model is held in memory and how a step is computed: all that `compile` depends on."""

    GROUP: ClassVar = _MODEL

    tensor_parallel: str | None = option(
        "Tensor-parallel degree, or max: all devices or cores.",
        "--tp",
        default="1; simulated: the smallest that fits",
    )
    group_query_attention: str | None = option(
        "KV heads on ranks, with NeuronX's padding: shard-over-heads or replicated-heads.",
        default="evenly, without padding",
        rare=True,
    )
    backend: str | None = option(
        "Back end of the bundled engine: native (C++, compiled at first use), torch, triton (GPU "
        "only), or auto: native if machine and model allow it.",
        default="auto",
    )
    device: str | None = option("Device of the torch back end: cpu or cuda.", default="cpu")
    enforce_eager: str | None = option(
        "CUDA graphs on a GPU: on, or off for less memory and slower steps.",
        "--graphs",
        old_names=("--enforce-eager=off", "--cuda-graphs=on"),
        default="on",
        metavar="on|off",
    )
    dtype: str | None = option(
        "Weight format: float32, bfloat16 or float16; simulated and of an endpoint also float8, "
        "int8, int4, mxfp4 or nvfp4.",
        default="bfloat16; simulated: the published weights'",
    )
    kv_dtype: str | None = option(
        "KV-cache format (bundled): float32, bfloat16 or float16.", default="as the weights"
    )
    kv_tokens: int | None = option(
        "Tokens that the KV cache of a copy holds, as its server logs them (simulated).",
        default="from memory",
        rare=True,
    )
    num_blocks: int | None = option("Number of KV-cache blocks.", default="from memory", rare=True)
    block_size: int | None = option(
        "Size of a KV-cache block in tokens.", default="64; simulated: the profile's", rare=True
    )
    max_model_len: int | None = option(
        "Maximum length of a request and its answer in tokens.", default="the model's"
    )
    rope_scaling: str | None = option(
        "RoPE scaling of the bundled engine for requests beyond the trained positions: linear:2, "
        "dynamic:4 or yarn:4; `lmi-bench perplexity` measures its cost."
    )
    memory_share: float | None = option(
        "Share of free memory for the KV cache, 0 to 1; simulated: of all memory, with weights.",
        default="0.5; simulated: the profile's",
    )
    threads: int | None = option("CPU threads of the engine.", default="all free cores")
    quantize: str | None = option(
        "Quantization (bundled): none, int8, awq-int4 (LMI's awq), awq-int3, smoothquant or fp8.",
        default="none",
    )
    smoothquant_alpha: float | None = option(
        "SmoothQuant: share of outliers moved into the weights, 0 to 1.", default="0.8", rare=True
    )
    smoothquant_per_token: bool | None = option(
        "SmoothQuant scales of activations: one for each token, or one for all.",
        "--smoothquant-per-token/--smoothquant-per-tensor",
        default="per token",
        rare=True,
    )
    smoothquant_per_channel: bool | None = option(
        "SmoothQuant scales of weights: one for each channel, or one for all.",
        "--smoothquant-per-channel/--smoothquant-per-matrix",
        default="per channel",
        rare=True,
    )
    calibration: str | None = option(
        "Calibration text (or JSON lines) of awq and smoothquant.", default="built in", rare=True
    )


@dataclass(frozen=True, slots=True)
class CompiledOptions:
    """Decode steps that are compiled, at start or ahead of time."""

    GROUP: ClassVar = _MODEL

    compile: bool | None = option(
        "Decode steps compiled at start, and kept for the next start.", default="no"
    )
    compile_shapes: str | None = option(
        "Shapes of compiled or captured steps, SEQUENCESxTOKENS: 1x512,8x512.",
        default="from the engine's limits",
        rare=True,
    )
    artefact: str | None = option("Folder of compiled steps, made by `compile` for this engine.")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Speculative decoding."""

    GROUP: ClassVar = _MODEL

    draft: str | None = option(
        "Draft of speculative decoding: ngram, or a smaller model with the same vocabulary."
    )
    draft_tokens: int | None = option("Maximum drafted tokens that a step verifies.", default="4")
    draft_adaptive: bool | None = option(
        "Number of drafted tokens: lower after few were accepted, or fixed.",
        "--draft-adaptive/--draft-fixed",
        default="adaptive",
        rare=True,
    )


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is held in memory and computed."""

    steps: StepOptions = StepOptions()
    compiled: CompiledOptions = CompiledOptions()
    drafting: DraftOptions = DraftOptions()


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """Batching, replicas, and what only a simulation needs."""

    GROUP: ClassVar = "Engine: batching"

    policy: str | None = option("Batching policy: rolling, dynamic or none.", default="rolling")
    kv_layout: str | None = option(
        "KV-cache layout: paged or contiguous.",
        default="paged; simulated: the profile's",
        rare=True,
    )
    batch_size: int | None = option("Requests of a dynamic batch.", default="4", rare=True)
    max_batch_delay_ms: float | None = option(
        "Maximum wait for a full dynamic batch in ms.", default="100", rare=True
    )
    max_rolling_batch_size: int | None = option(
        "Maximum sequences in the rolling batch.",
        "--max-batch",
        old_names=("--max-rolling-batch-size",),
        default="32; simulated: the profile's",
    )
    max_rolling_batch_prefill_tokens: int | None = option(
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
    max_waiting_tokens: int | None = option(
        "Decode steps after which waiting prompts may pause the running sequences, as in TGI.",
        default="at once; simulated: the profile's",
        rare=True,
    )
    waiting_served_ratio: float | None = option(
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
    max_concurrent_requests: int | None = option(
        "Maximum requests that run or wait; others are refused.", default="no limit", rare=True
    )
    max_input_tokens: int | None = option(
        "Maximum prompt length in tokens.", default="what the answer leaves"
    )
    max_batch_total_tokens: int | None = option(
        "Maximum tokens in the KV cache.", default="from memory", rare=True
    )
    replicas: int | None = option("Copies of the model behind one router.", default="1")
    router: str | None = option(
        "Router of the replicas: round-robin, least-outstanding, prefix-affine or random.",
        default="round-robin",
    )
    draft_acceptance: float | None = option(
        "Probability that a drafted token is accepted, 0 to 1: simulated only.", rare=True
    )
    profile: str | None = option(
        "Timing profile (simulated): a file of `calibrate`, or one of `catalog profiles`.",
        default="vllm",
    )


def stated_settings(*groups: Any) -> dict[str, Any]:
    """The stated settings by their names in the scenario's `engine` section.

    groups  dataclasses of this module

    Raises InputError for a value that cannot be read.
    """
    stated = {
        name: value for group in groups for name, value in values_of(group) if value is not None
    }
    for name, read in _READERS.items():
        if name in stated:
            stated[name] = read(stated[name])
    return stated


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


def _scheme(text: str) -> str:
    from lmi_bench.engine.quantization import parse_scheme

    return parse_scheme(text).value


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "tensor_parallel": _degree,
    "enforce_eager": _eager,
    "quantize": _scheme,
    "router": lambda text: text.replace("-", "_"),
}
