"""Finds engine profiles by name: those that ship, those that the user keeps, and files."""

import os
from dataclasses import replace
from pathlib import Path

from lmi_bench.analysis.model import builtin_profiles
from lmi_bench.analysis.model.profiles import EngineProfile, profile_from_json
from lmi_bench.catalog.fresh_prices import fresh_prices_file
from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import GIB

SHIPPED = {
    "vllm": builtin_profiles.VLLM,
    "sglang": builtin_profiles.SGLANG_PRIOR,
    "sglang-b200": builtin_profiles.SGLANG_B200,
    "sglang-mi300x": builtin_profiles.SGLANG_MI300X,
    "sglang-mi355x": builtin_profiles.SGLANG_MI355X,
    "trt-llm": builtin_profiles.TRT_LLM_PRIOR,
    "trt-llm-h200": builtin_profiles.TRT_LLM_H200,
    "trt-llm-b200": builtin_profiles.TRT_LLM_B200,
    "tgi-3": builtin_profiles.TGI_3_PRIOR,
    "tgi-2": builtin_profiles.TGI_GRAPH_PRIOR,
    "tgi-2023": builtin_profiles.TGI_2023,
    "bundled-h200": builtin_profiles.BUNDLED_H200,
    "vllm-0.12": builtin_profiles.VLLM_0_12,
    "vllm-0.19": builtin_profiles.VLLM_0_19,
    "eager-prior": builtin_profiles.EAGER_GPU_PRIOR,
    "graph-prior": builtin_profiles.GRAPH_GPU_PRIOR,
    "vllm-v0-prior": builtin_profiles.VLLM_V0_PRIOR,
    "vllm-v0.6-prior": builtin_profiles.VLLM_0_6_PRIOR,
}


VLLM_PROFILES = ("vllm", "vllm-0.19")
DEFAULT_PROFILE = "vllm"
"""The joint fit to all tables of vLLM at hand; vllm-0.12 and vllm-0.19 are fits to one each."""


def default_note(name: str | None) -> str | None:
    """Note about the default profile; None if a profile was named."""
    if name is not None:
        return None
    label = SHIPPED[DEFAULT_PROFILE].label
    return f"planned for {label}; --profile names another engine or a file of `calibrate`"


def find_profile(name: str | None, cache_tokens: int | None = None) -> EngineProfile:
    """The profile with this name or in this file; None: today's engine. Raises InputError.

    cache_tokens  tokens that the cache of a copy holds, as its server logs it; None: by memory
    """
    if name is None:
        profile = replace(SHIPPED[DEFAULT_PROFILE], engine_named=False)
    elif name.lower() in SHIPPED:
        profile = SHIPPED[name.lower()]
    else:
        kept = kept_profile_file(name)
        is_kept = os.path.isfile(kept) and not os.path.exists(name)  # noqa: PTH110, PTH113
        profile = _read(kept if is_kept else Path(name))
    return profile if cache_tokens is None else replace(profile, cache_tokens=cache_tokens)


def with_host(profile: EngineProfile, engine: EngineSection, shares: bool) -> EngineProfile:
    """The profile with the engine's host cache; raises InputError unless prompts begin alike."""
    gib, gb_s = engine.host_cache_gib, engine.host_cache_gb_per_s
    if (gib, gb_s) == (None, None):
        return profile
    if gib is None or not shares:
        raise InputError(
            "a host cache is for prompts that begin alike: give --host-cache-gib with --turns, "
            "--shared-prefix, --documents or a --trace with hash ids, or leave its options out"
        )
    return replace(profile, host_cache_bytes=gib * GIB, host_bytes_per_s=gb_s and gb_s * 1e9)


def kept_profile_file(name: str) -> Path:
    """Where the user keeps the profile of that name."""
    return fresh_prices_file().parent / "profiles" / f"{name}.json"


def kept_profiles() -> dict[str, EngineProfile]:
    """The profiles that the user keeps, by name; raises InputError for a file that is none."""
    return {path.stem: _read(path) for path in sorted(kept_profile_file("").parent.glob("*.json"))}


def _read(path: Path) -> EngineProfile:
    if not os.path.exists(path):  # noqa: PTH110  false also for a name too long
        raise InputError(f"--profile {path}: no such file, nor one of {', '.join(SHIPPED)}")
    text = read_text(path)
    try:
        return profile_from_json(text)
    except InputError as exc:
        raise InputError(f"{path}: {exc}") from exc
