"""The engine's settings as options, the same in every command that starts one.

A field is named as the setting is in the scenario's `engine` section. None leaves the setting to
the scenario, and then to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option

_MODEL: Final = "Engine: model"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How the model is held in memory and how a step is computed: all that `compile` depends on."""

    GROUP: ClassVar = _MODEL

    tensor_parallel: Annotated[
        str | None,
        Option("Tensor-parallel degree, or max: all devices or cores.", ("--tp",), default="1"),
    ] = None
    backend: Annotated[
        str | None,
        Option(
            "Back end: native (C++, compiled at first use), torch, triton (GPU only), or auto: "
            "native where machine and model allow it. Bundled engine only.",
            default="auto",
        ),
    ] = None
    device: Annotated[
        str | None, Option("Device of the torch back end: cpu or cuda.", default="cpu")
    ] = None
    enforce_eager: Annotated[
        str | None,
        Option(
            "CUDA graphs on a GPU: on, or off for less memory and slower steps.",
            ("--graphs",),
            old_names=("--enforce-eager=off", "--cuda-graphs=on"),
            default="on",
            metavar="on|off",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            "Weight format: float32, bfloat16 or float16.", default="bfloat16; simulated: float16"
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        Option(
            "KV-cache format of the bundled engine: float32, bfloat16 or float16.",
            default="as the weights",
        ),
    ] = None
    num_blocks: Annotated[
        int | None, Option("Number of KV-cache blocks.", default="from memory")
    ] = None
    block_size: Annotated[
        int | None,
        Option("Size of a KV-cache block in tokens.", default="64; simulated: the profile's"),
    ] = None
    max_model_len: Annotated[
        int | None, Option("Longest request in tokens, with its answer.", default="the model's")
    ] = None
    rope_scaling: Annotated[
        str | None,
        Option(
            "RoPE scaling for requests longer than the model was trained for: linear:2, dynamic:4 "
            "or yarn:4. Bundled engine only; `lmi-bench perplexity` shows what it costs."
        ),
    ] = None
    memory_share: Annotated[
        float | None,
        Option(
            "Share of the free memory for the KV cache, 0 to 1. Simulated: share of the device's "
            "memory for weights and cache.",
            default="0.5; simulated: the profile's",
        ),
    ] = None
    threads: Annotated[
        int | None, Option("CPU threads of the engine.", default="all free cores")
    ] = None
    quantize: Annotated[
        str | None,
        Option(
            "Quantization of the bundled engine's weights: none, int8, awq-int4 (LMI's awq), "
            "awq-int3, smoothquant or fp8.",
            default="none",
        ),
    ] = None
    smoothquant_alpha: Annotated[
        float | None,
        Option(
            "SmoothQuant: share of outliers moved into the weights, 0 to 1.",
            default="0.8",
            rare=True,
        ),
    ] = None
    smoothquant_per_token: Annotated[
        bool | None,
        Option(
            "SmoothQuant scales of activations: each token's own, or one for all.",
            ("--smoothquant-per-token/--smoothquant-per-tensor",),
            default="per token",
            rare=True,
        ),
    ] = None
    smoothquant_per_channel: Annotated[
        bool | None,
        Option(
            "SmoothQuant scales of weights: each channel's own, or one for all.",
            ("--smoothquant-per-channel/--smoothquant-per-matrix",),
            default="per channel",
            rare=True,
        ),
    ] = None
    calibration: Annotated[
        str | None,
        Option(
            "Text or JSON lines for calibrating awq and smoothquant.",
            default="a built-in text",
            rare=True,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class CompiledOptions:
    """Decode steps that are compiled, at start or ahead of time."""

    GROUP: ClassVar = _MODEL

    compile: Annotated[
        bool | None,
        Option(
            "Decode steps compiled at start, and kept for the next one.",
            ("--compile/--no-compile",),
            default="no",
        ),
    ] = None
    compile_shapes: Annotated[
        str | None,
        Option(
            "Shapes of compiled or captured steps, SEQUENCESxTOKENS: 1x512,8x512.",
            default="from the engine's limits",
        ),
    ] = None
    artefact: Annotated[
        str | None, Option("Folder of compiled steps, made by `compile` for this very engine.")
    ] = None


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Speculative decoding."""

    GROUP: ClassVar = _MODEL

    draft: Annotated[
        str | None,
        Option("Speculative decoding: ngram, or a smaller model of the same vocabulary."),
    ] = None
    draft_tokens: Annotated[
        int | None, Option("Most drafted tokens that a step verifies.", default="4")
    ] = None
    draft_adaptive: Annotated[
        bool | None,
        Option(
            "Drafted tokens: fewer where few are accepted, or always as many.",
            ("--draft-adaptive/--draft-fixed",),
            default="adaptive",
        ),
    ] = None


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

    policy: Annotated[
        str | None, Option("Batching policy: rolling, dynamic or none.", default="rolling")
    ] = None
    kv_layout: Annotated[
        str | None,
        Option(
            "Layout of the KV cache: paged or contiguous.",
            default="paged; simulated: the profile's",
        ),
    ] = None
    batch_size: Annotated[int | None, Option("Requests of a dynamic batch.", default="4")] = None
    max_batch_delay_ms: Annotated[
        float | None, Option("Longest wait for a full dynamic batch in ms.", default="100")
    ] = None
    max_rolling_batch_size: Annotated[
        int | None,
        Option(
            "Most sequences in the rolling batch.",
            ("--max-batch",),
            old_names=("--max-rolling-batch-size",),
            default="32; simulated: the profile's",
        ),
    ] = None
    max_rolling_batch_prefill_tokens: Annotated[
        int | None,
        Option(
            "Most prompt tokens that one step computes.",
            ("--prefill-tokens",),
            old_names=("--max-rolling-batch-prefill-tokens",),
            default="4096; simulated: the profile's",
        ),
    ] = None
    chunked_prefill: Annotated[
        bool | None,
        Option(
            "Prefill in chunks beside decoding, or whole.",
            ("--chunked-prefill/--whole-prefill",),
            default="whole; simulated: the profile's",
        ),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        Option(
            "Prefix cache: prompts that begin alike share blocks.",
            ("--prefix-caching/--no-prefix-caching",),
            default="no",
        ),
    ] = None
    recompute_on_join: Annotated[
        bool | None,
        Option(
            "KV cache when a request joins: all recomputed, as by old engines, or extended.",
            ("--recompute-on-join/--insert-on-join",),
            default="extended",
            rare=True,
        ),
    ] = None
    follow_memory: Annotated[
        bool | None,
        Option(
            "KV-cache size: limited to memory that is free while serving, or fixed.",
            ("--follow-memory/--fixed-memory",),
            default="fixed",
            rare=True,
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int | None,
        Option("Most requests that run or wait; others are refused.", default="no limit"),
    ] = None
    max_input_tokens: Annotated[
        int | None, Option("Longest prompt in tokens.", default="what the answer leaves")
    ] = None
    max_batch_total_tokens: Annotated[
        int | None, Option("Most tokens in the KV cache.", default="from memory")
    ] = None
    replicas: Annotated[
        int | None, Option("Copies of the model behind one router.", default="1")
    ] = None
    router: Annotated[
        str | None,
        Option(
            "Router of the replicas: round-robin, least-outstanding or random.",
            default="round-robin",
        ),
    ] = None
    draft_acceptance: Annotated[
        float | None,
        Option("Probability (0 to 1) that a drafted token is accepted: simulated only."),
    ] = None
    profile: Annotated[
        str | None,
        Option(
            "Timing profile of a simulated engine: a file of `calibrate`, or tgi-2023, vllm-0.12, "
            "vllm-0.19.",
            default="tgi-2023",
        ),
    ] = None


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
