"""Default scheduler settings of engines by version, model and device.

Published tables do not state them, so the engine's defaults are the likeliest values. vLLM before
0.5.4: whole prompts, as many in a step as one of the model's context. From 0.5.4 to 0.7, of models
with more than 32,768 positions (and no sliding window): chunks, 512 tokens a step (pull request
6666), 2,048 from 0.6.5 on (10544). From 0.8 on (V1): chunks, 8,192 tokens and 1,024 sequences on
devices of at least 70 GiB but for the A100, else 2,048 and 256 (`arg_utils.py`, a server's
context). SGLang: prompt steps by the device's memory (`server_args.py`).
"""

import math
from dataclasses import replace
from typing import Final

from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.accelerators import Accelerator
from lmi_bench.core.units import GIB
from lmi_bench.models.shape import ModelShape

WHOLE_PROMPTS: Final = "vllm 0.4"
SMALL_CHUNKS: Final = "vllm 0.5.4"
CHUNKS: Final = "vllm 0.6.5"
V1: Final = "vllm 0.8"
SGLANG: Final = "sglang"

_LONG_CONTEXT = 32_768
_LEAST_STEP_TOKENS = 2048
_CHUNK_TOKENS = {SMALL_CHUNKS: 512, CHUNKS: 2048}
_LARGE_BYTES: Final = 70 * GIB
_V1_LARGE, _V1_SMALL = (8192, 1024), (2048, 256)
_SGLANG_TOKENS: Final = ((35 * GIB, 2048), (60 * GIB, 4096))


def vllm_defaults(version: tuple[int, ...] | None) -> str:
    """The rule of a version such as (0, 6, 3); None: the newest."""
    if version is None or version >= (0, 8):
        return V1
    if version >= (0, 6, 5):
        return CHUNKS
    return SMALL_CHUNKS if version >= (0, 5, 4) else WHOLE_PROMPTS


def as_set(
    profile: EngineProfile, shape: ModelShape, device: Accelerator, cache_tokens: float = math.inf
) -> EngineProfile:
    """The profile with its scheduler settings for that model on that device.

    cache_tokens  tokens that the copy's cache holds: an engine does not start with a longer context

    A profile without a rule (`defaults` is empty, as in the result) stays as it is. The settings of
    V1 and SGLang are upper bounds: lower values of the profile stay.
    """
    rule = profile.defaults
    if not rule:
        return profile
    if rule in (V1, SGLANG):
        tokens, batch = _by_memory(rule, device)
        return replace(
            profile,
            max_prefill_tokens=min(tokens, profile.max_prefill_tokens),
            max_batch_size=min(batch or profile.max_batch_size, profile.max_batch_size),
            defaults="",
        )
    context = int(min(cache_tokens, shape.max_positions))
    chunk = _CHUNK_TOKENS.get(rule)
    if chunk and context > _LONG_CONTEXT and shape.sliding_window is None:
        return replace(profile, chunked_prefill=True, max_prefill_tokens=chunk, defaults="")
    whole = max(_LEAST_STEP_TOKENS, context)
    return replace(profile, chunked_prefill=False, max_prefill_tokens=whole, defaults="")


def _by_memory(rule: str, device: Accelerator) -> tuple[int, int]:
    """Tokens of a step, and limit on sequences (0: none)."""
    if rule == V1:
        large = device.memory_bytes >= _LARGE_BYTES and not device.name.startswith("A100")
        return _V1_LARGE if large else _V1_SMALL
    fitting = (tokens for below, tokens in _SGLANG_TOKENS if device.memory_bytes < below)
    return next(fitting, _V1_LARGE[0]), 0
