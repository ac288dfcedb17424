"""The engine's settings as options, the same in every command that starts one.

A field is named as the setting is in the scenario's `engine` section. None leaves the setting to
the scenario, and then to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option

_MODEL: Final = "Engine: model"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How the model is held in memory and how a step is computed: all that `compile` depends on."""

    GROUP: ClassVar = _MODEL

    tensor_parallel: str | None = option(
        "Tensor-parallel degree, or max: all devices or cores.", "--tp", default="1"
    )
    backend: str | None = option(
        "Back end: native (C++, compiled at first use), torch, triton (GPU only), or auto: "
        "native where machine and model allow it. Bundled engine only.",
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
        "Weight format: float32, bfloat16 or float16.", default="bfloat16; simulated: float16"
    )
    kv_dtype: str | None = option(
        "KV-cache format of the bundled engine: float32, bfloat16 or float16.",
        default="as the weights",
    )
    num_blocks: int | None = option("Number of KV-cache blocks.", default="from memory")
    block_size: int | None = option(
        "Size of a KV-cache block in tokens.", default="64; simulated: the profile's"
    )
    max_model_len: int | None = option(
        "Longest request in tokens, with its answer.", default="the model's"
    )
    rope_scaling: str | None = option(
        "RoPE scaling for requests longer than the model was trained for: linear:2, dynamic:4 "
        "or yarn:4. Bundled engine only; `lmi-bench perplexity` shows what it costs."
    )
    memory_share: float | None = option(
        "Share of the free memory for the KV cache, 0 to 1. Simulated: share of the device's "
        "memory for weights and cache.",
        default="0.5; simulated: the profile's",
    )
    threads: int | None = option("CPU threads of the engine.", default="all free cores")
    quantize: str | None = option(
        "Quantization of the bundled engine's weights: none, int8, awq-int4 (LMI's awq), "
        "awq-int3, smoothquant or fp8.",
        default="none",
    )
    smoothquant_alpha: float | None = option(
        "SmoothQuant: share of outliers moved into the weights, 0 to 1.", default="0.8", rare=True
    )
    smoothquant_per_token: bool | None = option(
        "SmoothQuant scales of activations: each token's own, or one for all.",
        "--smoothquant-per-token/--smoothquant-per-tensor",
        default="per token",
        rare=True,
    )
    smoothquant_per_channel: bool | None = option(
        "SmoothQuant scales of weights: each channel's own, or one for all.",
        "--smoothquant-per-channel/--smoothquant-per-matrix",
        default="per channel",
        rare=True,
    )
    calibration: str | None = option(
        "Text or JSON lines for calibrating awq and smoothquant.",
        default="a built-in text",
        rare=True,
    )


@dataclass(frozen=True, slots=True)
class CompiledOptions:
    """Decode steps that are compiled, at start or ahead of time."""

    GROUP: ClassVar = _MODEL

    compile: bool | None = option(
        "Decode steps compiled at start, and kept for the next one.",
        "--compile/--no-compile",
        default="no",
    )
    compile_shapes: str | None = option(
        "Shapes of compiled or captured steps, SEQUENCESxTOKENS: 1x512,8x512.",
        default="from the engine's limits",
    )
    artefact: str | None = option(
        "Folder of compiled steps, made by `compile` for this very engine."
    )


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Speculative decoding."""

    GROUP: ClassVar = _MODEL

    draft: str | None = option(
        "Speculative decoding: ngram, or a smaller model of the same vocabulary."
    )
    draft_tokens: int | None = option("Most drafted tokens that a step verifies.", default="4")
    draft_adaptive: bool | None = option(
        "Drafted tokens: fewer where few are accepted, or always as many.",
        "--draft-adaptive/--draft-fixed",
        default="adaptive",
    )


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is held in memory and computed."""

    steps: StepOptions = StepOptions()
    compiled: CompiledOptions = CompiledOptions()
    drafting: DraftOptions = DraftOptions()


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """Which requests run at once, over how many replicas; and what only a simulation needs."""

    GROUP: ClassVar = "Engine: batching"

    policy: str | None = option("Batching policy: rolling, dynamic or none.", default="rolling")
    kv_layout: str | None = option(
        "Layout of the KV cache: paged or contiguous.", default="paged; simulated: the profile's"
    )
    batch_size: int | None = option("Requests of a dynamic batch.", default="4")
    max_batch_delay_ms: float | None = option(
        "Longest wait for a full dynamic batch in ms.", default="100"
    )
    max_rolling_batch_size: int | None = option(
        "Most sequences in the rolling batch.",
        "--max-batch",
        old_names=("--max-rolling-batch-size",),
        default="32; simulated: the profile's",
    )
    max_rolling_batch_prefill_tokens: int | None = option(
        "Most prompt tokens that one step computes.",
        "--prefill-tokens",
        old_names=("--max-rolling-batch-prefill-tokens",),
        default="4096; simulated: the profile's",
    )
    chunked_prefill: bool | None = option(
        "Prefill in chunks beside decoding, or whole.",
        "--chunked-prefill/--whole-prefill",
        default="whole; simulated: the profile's",
    )
    prefix_caching: bool | None = option(
        "Prefix cache: prompts that begin alike share blocks.",
        "--prefix-caching/--no-prefix-caching",
        default="no",
    )
    recompute_on_join: bool | None = option(
        "KV cache when a request joins: all recomputed, as by old engines, or extended.",
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
        "Most requests that run or wait; others are refused.", default="no limit"
    )
    max_input_tokens: int | None = option(
        "Longest prompt in tokens.", default="what the answer leaves"
    )
    max_batch_total_tokens: int | None = option(
        "Most tokens in the KV cache.", default="from memory"
    )
    replicas: int | None = option("Copies of the model behind one router.", default="1")
    router: str | None = option(
        "Router of the replicas: round-robin, least-outstanding or random.", default="round-robin"
    )
    draft_acceptance: float | None = option(
        "Probability (0 to 1) that a drafted token is accepted: simulated only."
    )
    profile: str | None = option(
        "Timing profile of a simulated engine: a file of `calibrate`, or tgi-2023, vllm-0.12, "
        "vllm-0.19.",
        default="tgi-2023",
    )


def stated_settings(*groups: Any) -> dict[str, Any]:
    """The stated settings by their names in the scenario's `engine` section.

    groups  dataclasses of this module

    Raises InputError for a value that cannot be read.
    """
    stated = {name: value for name, value in _values(groups) if value is not None}
    for name, read in _READERS.items():
        if name in stated:
            stated[name] = read(stated[name])
    return stated


def _values(groups: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields, those of nested groups too."""
    for group in groups:
        for field in fields(group):
            value = getattr(group, field.name)
            if is_dataclass(value):
                yield from _values((value,))
            else:
                yield field.name, value


def _degree(text: str) -> int | str:
    """A tensor-parallel degree or `max`."""
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


def _router(text: str) -> str:
    return text.replace("-", "_")


_READERS: Final = {
    "tensor_parallel": _degree,
    "enforce_eager": _eager,
    "quantize": _scheme,
    "router": _router,
}
