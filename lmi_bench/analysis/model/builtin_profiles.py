"""The profiles that ship: constants with where they were fitted, and how far they may be off."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Final

from lmi_bench.analysis.model.engine_defaults import SGLANG, SMALL_CHUNKS, V1, vllm_defaults
from lmi_bench.analysis.model.profiles import EngineProfile, StepParameters, profile_from_json
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
        narrow_share=0.45,  # kernels of 2023; those of the priors below have been reworked
        narrow_launch_s=0.4e-3,  # two Triton launches: groups in act order cannot be split
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
        "narrow_share": 0.35,
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
        narrow_launch_s=0.0,
        host_per_sequence_s=30e-6,
        host_per_prompt_token_s=1e-6,
        nvlink_latency_s=8e-6,
        request_overhead_s=30e-3,
        narrow_share=0.65,
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
    defaults=SGLANG,
)

# vLLM before its V1 engine (0.8): a step is planned and its answers are sent while the GPU waits,
# about 0.1 ms a layer of the models that it is used for, and prompts pause decoding.
VLLM_V0_PRIOR: Final = replace(
    SGLANG_PRIOR,
    name="vLLM",
    version="before 0.8",
    fitted_on="nothing yet: prior of a server with CUDA graphs whose host works between the steps",
    parameters=replace(
        GRAPH_GPU_PRIOR.parameters,
        gap_per_layer_s=150e-6,
        host_per_sequence_s=0.15e-3,
        host_per_prompt_s=2.5e-3,
        request_overhead_s=8e-3,
        narrow_share=0.45,  # its AWQ kernels were those of 2023
    ),
    log_sd={**GRAPH_GPU_PRIOR.log_sd, "host_per_prompt_s": 0.7},
    max_batch_size=256,
    defaults=SMALL_CHUNKS,
    widen_first_rows=256,  # its AWQ layers hand more rows to the dense product
)

# 0.6 and 0.7: the server is a process of its own, and answers are sent while the next step runs.
VLLM_0_6_PRIOR: Final = replace(
    VLLM_V0_PRIOR,
    version="0.6 and 0.7",
    parameters=replace(
        VLLM_V0_PRIOR.parameters,
        gap_per_layer_s=120e-6,
        host_per_sequence_s=0.1e-3,
        host_per_prompt_s=1.2e-3,
        request_overhead_s=15e-3,
        narrow_share=0.65,  # Marlin's
    ),
    widen_first_rows=0,
)

# TGI from 2.0 on: CUDA graphs, its host in Rust, prompts in steps of their own.
TGI_GRAPH_PRIOR: Final = replace(
    SGLANG_PRIOR,
    name="TGI",
    version="2.x",
    fitted_on="nothing yet: prior of a server with CUDA graphs whose prompts pause decoding",
    defaults="",
)

# TensorRT-LLM before it had a server (`trtllm-serve`): its own benchmark calls the engine.
TRT_LLM_PRIOR: Final = replace(
    GRAPH_GPU_PRIOR,
    name="TensorRT-LLM",
    version="before 0.16",
    fitted_on="nothing yet: prior of an engine without a server around it",
    parameters=replace(GRAPH_GPU_PRIOR.parameters, request_overhead_s=2e-3),
    shared_head_dims=(128, 256),  # of its XQA kernels (`shouldUse` of release 0.9)
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
_TRT_LLM: Final = ("tensorrt", "trt")
_SERVED_TRT_LLM: Final = (0, 16)
_LEAST_LOG_SD = 0.05
_V1_OF_VLLM: Final = (0, 8)
_OVERLAPPED_VLLM: Final = (0, 6)
_GRAPHS_OF_TGI: Final = (2, 0)
_VERSION = re.compile(r"\bv?(\d+)\.(\d+)(?:\.(\d+))?")


def prior_of_engine(
    engine: str,
    *,
    models: Collection[str],
    accelerators: Collection[str],
    open_loop: bool,
    marks: Collection[str] = (),
) -> EngineProfile:
    """What to start a fit of that engine from.

    engine  as a table names it, empty for the endpoints of 2023; its version decides between
            generations (vLLM before and after its V1 engine, TGI before and after CUDA graphs)
            and, of the shipped profiles, for the nearest one
    marks   of the measured levels (`cells.marks_of`)

    A profile that was fitted to any of those levels is left out, and without marks one that was
    fitted to one of the models on one of the accelerators, so that no judgement rests on what was
    fitted to the very cells that it is judged on.
    """
    version = _version_of(engine)
    eager = not engine or engine.startswith(_EAGER_ENGINES)
    general, kin = GRAPH_GPU_PRIOR, list[EngineProfile]()
    if eager and (version is None or version < _GRAPHS_OF_TGI):
        general, kin = EAGER_GPU_PRIOR, [TGI_2023]
    elif eager:
        general = TGI_GRAPH_PRIOR
    elif engine.startswith("sglang"):
        general = SGLANG_PRIOR
    elif engine.startswith(_TRT_LLM) and version is not None and version < _SERVED_TRT_LLM:
        general = TRT_LLM_PRIOR
    elif engine.startswith("vllm"):
        if version is not None and version < _V1_OF_VLLM:
            v0 = VLLM_V0_PRIOR if version < _OVERLAPPED_VLLM else VLLM_0_6_PRIOR
            return replace(v0, defaults=vllm_defaults(version))
        general = replace(GRAPH_GPU_PRIOR, defaults=V1)
        kin = [VLLM_0_19, VLLM_0_12] if open_loop else [VLLM_0_12, VLLM_0_19]
        if version is not None:
            kin.sort(key=partial(_distance, version))
    for profile in kin:
        if not _has_seen(profile, models, accelerators, marks):
            return _widened(profile, general)
    return general


def _has_seen(
    profile: EngineProfile,
    models: Collection[str],
    accelerators: Collection[str],
    marks: Collection[str],
) -> bool:
    if profile.fitted_cells and marks:
        return not set(profile.fitted_cells).isdisjoint(marks)
    return bool(set(profile.models) & set(models) and set(profile.accelerators) & set(accelerators))


def _version_of(engine: str) -> tuple[int, ...] | None:
    """The numbers, two or three, in `vllm 0.6.3.post1`; None without any."""
    found = _VERSION.search(engine)
    return None if found is None else tuple(int(part) for part in found.groups() if part)


def _distance(version: tuple[int, ...], profile: EngineProfile) -> int:
    """How many minor versions lie between; those of other major versions are far."""
    own = _version_of(profile.version)
    if own is None:
        return 10**6
    return abs(version[0] - own[0]) * 1000 + abs(version[1] - own[1])


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
