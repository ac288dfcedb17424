"""Finds engine profiles by name: a file written by `calibrate`, or a profile that ships."""

from __future__ import annotations

from pathlib import Path

from lmi_bench.analysis.model.builtin_profiles import (
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    TGI_2023,
    VLLM_0_6_PRIOR,
    VLLM_0_12,
    VLLM_0_19,
    VLLM_V0_PRIOR,
)
from lmi_bench.analysis.model.profiles import EngineProfile, profile_from_json
from lmi_bench.core.errors import InputError

SHIPPED = {
    "tgi-2023": TGI_2023,
    "vllm-0.12": VLLM_0_12,
    "vllm-0.19": VLLM_0_19,
    "eager-prior": EAGER_GPU_PRIOR,
    "graph-prior": GRAPH_GPU_PRIOR,
    "vllm-v0-prior": VLLM_V0_PRIOR,
    "vllm-v0.6-prior": VLLM_0_6_PRIOR,
}


VLLM_PROFILES = ("vllm-0.12", "vllm-0.19")
DEFAULT_PROFILE = "vllm-0.12"
"""The vLLM profile with the smaller errors on tables that neither has seen."""


def default_note(name: str | None) -> str | None:
    """Note about the default profile; None if a profile was named."""
    if name is not None:
        return None
    label = SHIPPED[DEFAULT_PROFILE].label
    return f"planned for {label}; --profile names another engine or a file of `calibrate`"


def find_profile(name: str | None) -> EngineProfile:
    """The profile with this name or in this file; None: today's engine. Raises InputError."""
    name = DEFAULT_PROFILE if name is None else name
    shipped = SHIPPED.get(name.lower())
    if shipped is not None:
        return shipped
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as exc:
        raise InputError(
            f"--profile {name}: no such file ({exc.strerror}), nor one of {', '.join(SHIPPED)}"
        ) from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"--profile {name} is not a text file") from exc
    return profile_from_json(text)
