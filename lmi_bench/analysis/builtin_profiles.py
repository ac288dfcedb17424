"""The profiles that ship: constants with where they were fitted, and how far they may be off."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from importlib.resources import files
from typing import Final

from lmi_bench.analysis.profiles import EngineProfile, StepParameters, profile_from_json
from lmi_bench.engine.scheduling.config import KvLayout

_PROFILES = files("lmi_bench.catalog") / "data" / "profiles"


def _shipped(name: str) -> EngineProfile:
    return profile_from_json((_PROFILES / f"{name}.json").read_text(encoding="utf-8"))


# Before any cell is seen: what kernels and hosts of this kind are known to reach, with wide room.
EAGER_GPU_PRIOR: Final = EngineProfile(
    name="TGI",
    version="1.x (2023)",
    fitted_on="nothing yet: prior of an eager PyTorch server on GPUs",
    fitted_date="2026-11-21",
    accelerators=(),
    vendors=("nvidia",),
    parameters=StepParameters(
        bandwidth_share=0.75,
        compute_share=0.65,
        host_per_layer_s=0.4e-3,
        host_per_sequence_s=0.2e-3,
        host_per_prompt_token_s=5e-6,
        host_stretch_per_rank=0.04,
        nvlink_latency_s=10e-6,
        nvlink_share=0.7,
        pcie_latency_s=30e-6,
        pcie_share=0.5,
        gap_per_layer_s=50e-6,
        request_overhead_s=10e-3,
        moe_share=0.6,
    ),
    log_sd={
        "bandwidth_share": 0.15,
        "compute_share": 0.15,
        "host_per_layer_s": 0.7,
        "host_per_sequence_s": 0.7,
        "host_per_prompt_token_s": 1.0,
        "host_stretch_per_rank": 0.7,
        "nvlink_latency_s": 0.7,
        "nvlink_share": 0.3,
        "pcie_latency_s": 0.7,
        "pcie_share": 0.4,
        "gap_per_layer_s": 0.8,
        "request_overhead_s": 0.8,
        "moe_share": 0.4,
    },
    host_factor_log_sd=0.25,
    residual_log_sd=0.15,
    memory_share=0.95,
    reserve_bytes=1.6e9,
    kv_layout=KvLayout.CONTIGUOUS,
    max_batch_size=1024,
    max_prefill_tokens=4096,
)

# A server with CUDA graphs and chunked prefill, such as vLLM, before a cell of it is seen:
# launching a step costs little; what a layer takes beyond its reads is gaps between its kernels.
GRAPH_GPU_PRIOR: Final = replace(
    EAGER_GPU_PRIOR,
    name="vLLM",
    version="any",
    fitted_on="nothing yet: prior of a server with CUDA graphs and chunked prefill",
    parameters=replace(
        EAGER_GPU_PRIOR.parameters,
        bandwidth_share=0.85,
        host_per_layer_s=5e-6,
        host_per_sequence_s=30e-6,
        host_per_prompt_token_s=1e-6,
        nvlink_latency_s=8e-6,
        request_overhead_s=30e-3,
    ),
    log_sd={
        **EAGER_GPU_PRIOR.log_sd,
        "host_stretch_per_rank": 0.35,
        "gap_per_layer_s": 0.5,
        "request_overhead_s": 1.0,
    },
    host_factor_log_sd=0.0,
    memory_share=0.9,
    reserve_bytes=4e9,
    kv_layout=KvLayout.PAGED,
    max_prefill_tokens=8192,
    chunked_prefill=True,
)

# SGLang likewise, but a step is either of prompts or of decoding, and waiting prompts come first:
# --enable-mixed-chunk is off by default (SGLang's documentation, Server Arguments).
SGLANG_PRIOR: Final = replace(
    GRAPH_GPU_PRIOR,
    name="SGLang",
    fitted_on="nothing yet: prior of a server with CUDA graphs whose prompts pause decoding",
    chunked_prefill=False,
)

# The bundled engine on a processor, before a sweep of it is seen: one rank, eager steps.
BUNDLED_CPU_PRIOR: Final = EngineProfile(
    name="bundled engine",
    version="on this processor",
    fitted_on="nothing yet: prior of an eager engine on a few cores",
    fitted_date="2026-11-21",
    accelerators=(),
    vendors=("cpu",),
    parameters=StepParameters(
        bandwidth_share=0.6,
        compute_share=0.4,
        host_per_layer_s=0.0,  # who launches kernels computes them: a gap, beside nothing
        host_per_sequence_s=0.2e-3,
        host_per_prompt_token_s=5e-6,
        host_stretch_per_rank=0.0,
        nvlink_latency_s=0.0,
        nvlink_share=1.0,
        pcie_latency_s=0.0,
        pcie_share=1.0,
        gap_per_layer_s=0.2e-3,
        attention_share=0.4,
        unhidden_share=0.5,
        rows_read_share=0.9,
    ),
    log_sd={
        "bandwidth_share": 0.5,
        "compute_share": 0.5,
        "host_per_sequence_s": 1.0,
        "host_per_prompt_token_s": 1.0,
        "gap_per_layer_s": 1.0,
        "attention_share": 0.7,
        "unhidden_share": 0.7,
        "rows_read_share": 0.15,
    },
    residual_log_sd=0.3,
    memory_share=0.8,
    reserve_bytes=0.3e9,
    kv_layout=KvLayout.PAGED,
    max_batch_size=32,
    max_prefill_tokens=4096,
    block_size=64,
)

# Another server on this machine's processor, such as vLLM's CPU build: prompt chunks beside
# running sequences, and processes of its own that share the cores with whoever asks.
SERVED_CPU_PRIOR: Final = replace(
    BUNDLED_CPU_PRIOR,
    name="server",
    version="on this processor",
    fitted_on="nothing yet: prior of a server on a few cores",
    parameters=replace(BUNDLED_CPU_PRIOR.parameters, request_overhead_s=10e-3),
    log_sd={**BUNDLED_CPU_PRIOR.log_sd, "request_overhead_s": 1.0},
    max_batch_size=256,
    max_prefill_tokens=2048,
    chunked_prefill=True,
    block_size=16,
)


# Fitted by benchmarks/fit_profiles.py --refit, which prints their errors.
TGI_2023: Final = _shipped("tgi_2023")
VLLM_0_12: Final = _shipped("vllm_0_12")
VLLM_0_19: Final = _shipped("vllm_0_19")

_EAGER_ENGINES = ("tgi", "text-generation-inference", "huggingface", "deepspeed")
_LEAST_LOG_SD = 0.05


def prior_of_engine(
    engine: str, *, models: Collection[str], accelerators: Collection[str], open_loop: bool
) -> EngineProfile:
    """What to start a fit of that engine from.

    engine  as a table names it, empty for the endpoints of 2023

    A profile that was fitted to one of the models on one of the accelerators is left out, so that
    no judgement rests on what was fitted to the very cells that it is judged on.
    """
    eager = not engine or engine.startswith(_EAGER_ENGINES)
    general = EAGER_GPU_PRIOR if eager else GRAPH_GPU_PRIOR
    if engine.startswith("sglang"):
        general = SGLANG_PRIOR
    kin = [VLLM_0_19, VLLM_0_12] if open_loop else [VLLM_0_12, VLLM_0_19]
    if eager:
        kin = [TGI_2023]
    elif not engine.startswith("vllm"):
        kin = []
    for profile in kin:
        if set(profile.models) & set(models) and set(profile.accelerators) & set(accelerators):
            continue
        return _widened(profile, general)
    return general


def _widened(profile: EngineProfile, general: EngineProfile) -> EngineProfile:
    """The profile as a prior for other cells: twice its deviations, no correlations."""
    return replace(
        profile,
        log_sd={
            name: min(general.log_sd.get(name, sd), max(2 * sd, _LEAST_LOG_SD))
            for name, sd in profile.log_sd.items()
        },
        log_correlation=(),
    )
