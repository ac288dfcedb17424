"""The engine's settings as options, the same in every command that starts one.

A field is named as the setting is in the scenario's `engine` section; None leaves it to the
scenario and then to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from lmi_bench.core.errors import InputError
from lmi_bench.engine.quantization import parse_scheme

_MODEL, _BATCHING = "Engine: model", "Engine: batching"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is held in memory and computed."""

    tensor_parallel: Annotated[
        str | None,
        typer.Option(
            "--tp",
            help="Tensor-parallel degree, or max: all devices or cores. (default: 1)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            help="Steps of the bundled engine: native (compiled at first use), torch, triton (on a "
            "GPU), or auto: native where machine and model allow it. (default: auto)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Of the bundled engine in torch: cpu or cuda. (default: cpu)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile decode steps at start; kept for the next start. (default: no)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    compile_shapes: Annotated[
        str | None,
        typer.Option(
            help="Of compiled or captured steps: SEQUENCESxTOKENS, as in 1x512,8x512.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    artefact: Annotated[
        str | None,
        typer.Option(
            help="Folder of `lmi-bench compile`; refused where it was made for another engine.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    enforce_eager: Annotated[
        bool | None,
        typer.Option(
            "--enforce-eager/--cuda-graphs",
            help="On a GPU: record no CUDA graphs; less memory, slower steps. (default: graphs)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: float32, bfloat16 or float16. (default: bfloat16; "
            "simulated: float16)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="KV cache of the bundled engine: float32, bfloat16 or float16. "
            "(default: as the weights)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        typer.Option(help="KV-cache blocks. (default: from memory)", rich_help_panel=_MODEL),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a KV-cache block. (default: 64; simulated: the profile's)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a request, prompt and answer. (default: the model's)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            help="Of the bundled engine: longer requests without training, as linear:2, dynamic:4 "
            "or yarn:4; see `lmi-bench perplexity`.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    memory_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the free memory for the KV cache, 0 to 1 (default: 0.5); simulated: "
            "share of the device for weights and cache (default: the profile's).",
            rich_help_panel=_MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads of the engine. (default: the cores that are free to it)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Weights of the bundled engine: none, int8, awq-int4, awq-int3, smoothquant or "
            "fp8; LMI's awq is awq-int4. (default: none)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    smoothquant_alpha: Annotated[
        float | None,
        typer.Option(
            help="How much of the outliers moves into the weights, 0 to 1. (default: 0.8)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    smoothquant_per_token: Annotated[
        bool | None,
        typer.Option(
            "--smoothquant-per-token/--smoothquant-per-tensor",
            help="A scale for each row of activations, or one from calibration.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    smoothquant_per_channel: Annotated[
        bool | None,
        typer.Option(
            "--smoothquant-per-channel/--smoothquant-per-matrix",
            help="A scale for each output of a weight, or one for all.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text or JSON lines that awq and smoothquant look at. (default: built in)",
            rich_help_panel=_MODEL,
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: ngram, or a smaller model with the same vocabulary.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most drafted tokens that a step verifies. (default: 4)", rich_help_panel=_MODEL
        ),
    ] = None
    draft_adaptive: Annotated[
        bool | None,
        typer.Option(
            "--draft-adaptive/--draft-fixed",
            help="Guess fewer tokens, or none, where few guesses hold. (default: adaptive)",
            rich_help_panel=_MODEL,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """Which requests run at once, over how many copies of the model."""

    policy: Annotated[
        str | None,
        typer.Option(
            help="Batching: rolling, dynamic or none. (default: rolling)", rich_help_panel=_BATCHING
        ),
    ] = None
    kv_layout: Annotated[
        str | None,
        typer.Option(
            help="KV cache: paged or contiguous. (default: paged; simulated: the profile's)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Dynamic batching: requests of a batch. (default: 4)", rich_help_panel=_BATCHING
        ),
    ] = None
    max_batch_delay_ms: Annotated[
        float | None,
        typer.Option(
            help="Dynamic batching: longest wait for a full batch, in ms. (default: 100)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    max_rolling_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Most sequences in the rolling batch. (default: 32; simulated: the profile's)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    max_rolling_batch_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most prompt tokens of a step. (default: 4096; simulated: the profile's)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    chunked_prefill: Annotated[
        bool | None,
        typer.Option(
            "--chunked-prefill/--whole-prefill",
            help="Mix prompt chunks with decoding instead of pausing it. (default: whole; "
            "simulated: the profile's)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Share computed blocks between prompts that begin alike. (default: no)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    recompute_on_join: Annotated[
        bool | None,
        typer.Option(
            "--recompute-on-join/--insert-on-join",
            help="Compute the whole batch's cache anew when a request joins, as old engines did.",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    follow_memory: Annotated[
        bool | None,
        typer.Option(
            "--follow-memory/--fixed-memory",
            help="The KV cache grows only into memory that is free while serving.",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests beyond it are refused at once. (default: all wait)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    max_input_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt in tokens. (default: what the answer leaves)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    max_batch_total_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that the KV cache may hold.", rich_help_panel=_BATCHING),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Copies of the model behind one router. (default: 1)", rich_help_panel=_BATCHING
        ),
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            help="Of replicas: round-robin, least-outstanding or random. (default: round-robin)",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    draft_acceptance: Annotated[
        float | None,
        typer.Option(
            help="Simulated: the chance (0 to 1) that a drafted token holds.",
            rich_help_panel=_BATCHING,
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            help="Of a simulated engine: a file of `calibrate`, tgi-2023, vllm-0.12 or vllm-0.19. "
            "(default: tgi-2023)",
            rich_help_panel=_BATCHING,
        ),
    ] = None


def stated_settings(*options: ModelOptions | BatchingOptions) -> dict[str, Any]:
    """The stated ones, by their names in the scenario; raises InputError for a bad degree."""
    stated = {
        name: value
        for group in options
        for name, value in asdict(group).items()
        if value is not None
    }
    if "tensor_parallel" in stated:
        stated["tensor_parallel"] = _degree(stated["tensor_parallel"])
    if "quantize" in stated:
        stated["quantize"] = parse_scheme(stated["quantize"]).value
    if "router" in stated:
        stated["router"] = stated["router"].replace("-", "_")
    return stated


_OF_ONE_POLICY = {
    "batch_size": "dynamic",
    "max_batch_delay_ms": "dynamic",
    "max_rolling_batch_size": "rolling",
    "recompute_on_join": "rolling",
}


def check_policy_flags(policy: str, overrides: Mapping[str, Any]) -> None:
    """Raise InputError for a flag of another batching policy; overrides: fields of a scenario."""
    for name, wanted in _OF_ONE_POLICY.items():
        if overrides.get(f"engine.{name}") is not None and policy != wanted:
            raise InputError(
                f"--{name.replace('_', '-')} is of {wanted} batching, and the policy is {policy}: "
                f"add --policy {wanted} or leave it out"
            )


def _degree(text: str) -> int | str:
    """A tensor-parallel degree or `max`."""
    if text == "max":
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise InputError(f"--tp {text}: write a number of at least 1, or max")
