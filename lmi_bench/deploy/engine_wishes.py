"""Translates the engine settings chosen by `recommend` into each server's options.

`unsaid` lists the settings that a server's files cannot express, so that the user sets them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.kv_cache import kv_bytes_per_value

NGRAM: Final = "ngram"
_DRAFT_TOKENS: Final = 5
_LOOK_UP_TOKENS: Final = 4  # longest n-gram


@dataclass(frozen=True, slots=True)
class EngineWishes:
    """Engine settings; None keeps the server's default.

    kv_dtype            number format of the KV cache
    draft               `ngram`, or the location of a draft model inside the container
    draft_tokens        draft tokens per step
    max_prefill_tokens  prompt tokens per step
    memory_share        share of a device's memory, 0 to 1
    """

    kv_dtype: str | None = None
    draft: str | None = None
    draft_tokens: int = _DRAFT_TOKENS
    max_prefill_tokens: int | None = None
    chunked_prefill: bool | None = None
    memory_share: float | None = None
    cuda_graphs: bool | None = None

    @classmethod
    def of_setting(cls, setting: EngineSetting) -> EngineWishes:
        """The settings of a recommended candidate; a draft keeps its name there."""
        spoken = setting.speculation
        draft = None
        if spoken is not None:
            draft = NGRAM if spoken.draft is None else spoken.draft.name
        return cls(
            kv_dtype=setting.kv_dtype,
            draft=draft,
            draft_tokens=_DRAFT_TOKENS if spoken is None else spoken.draft_tokens,
            max_prefill_tokens=setting.max_prefill_tokens,
            chunked_prefill=setting.chunked_prefill,
            memory_share=setting.memory_share,
            cuda_graphs=setting.cuda_graphs,
        )

    def lmi(self, era: str) -> dict[str, str]:
        """Lines of serving.properties for an era of djl-serving (A, B, C)."""
        found = {}
        if self.max_prefill_tokens is not None:
            found["option.max_rolling_batch_prefill_tokens"] = str(self.max_prefill_tokens)
        if self.chunked_prefill is not None and era != "A":
            found["option.enable_chunked_prefill"] = _word(self.chunked_prefill)
        if self.memory_share is not None:
            found["option.gpu_memory_utilization"] = f"{self.memory_share:g}"
        if self.cuda_graphs is not None:
            found["option.enforce_eager"] = _word(not self.cuda_graphs)
        if self._narrow_cache:
            found["option.kv_cache_dtype"] = "fp8"
        if self.draft is not None and era == "C":
            found["option.speculative_config"] = json.dumps(self._speculative_config)
        elif self.draft not in (None, NGRAM):
            found["option.speculative_draft_model"] = str(self.draft)
            found["option.speculative_length"] = str(self.draft_tokens)
        return found

    def tgi(self) -> dict[str, str]:
        """TGI's environment variables."""
        found = {}
        if self.max_prefill_tokens is not None:
            found["MAX_BATCH_PREFILL_TOKENS"] = str(self.max_prefill_tokens)
        if self.memory_share is not None:
            found["CUDA_MEMORY_FRACTION"] = f"{self.memory_share:g}"
        if self.cuda_graphs is False:
            found["CUDA_GRAPHS"] = "0"
        if self.draft == NGRAM:
            found["SPECULATE"] = str(self.draft_tokens)
        return found

    def vllm(self) -> list[str]:
        """Arguments of `vllm serve`."""
        found = []
        if self.max_prefill_tokens is not None:
            found += ["--max-num-batched-tokens", str(self.max_prefill_tokens)]
        if self.chunked_prefill is not None:
            found.append(f"--{'' if self.chunked_prefill else 'no-'}enable-chunked-prefill")
        if self.memory_share is not None:
            found += ["--gpu-memory-utilization", f"{self.memory_share:g}"]
        if self.cuda_graphs is False:
            found.append("--enforce-eager")
        if self._narrow_cache:
            found += ["--kv-cache-dtype", "fp8"]
        if self.draft is not None:
            found += ["--speculative-config", json.dumps(self._speculative_config)]
        return found

    def unsaid(self, server: str, era: str = "C") -> list[str]:
        """Settings that this server's files cannot express; the user must set them."""
        missing = []
        if server == "tgi":
            if self.chunked_prefill is not None:
                missing.append("chunked_prefill")
            if self._narrow_cache:
                missing.append(f"kv_dtype {self.kv_dtype}")
            if self.draft not in (None, NGRAM):
                missing.append(f"draft {self.draft}")
        elif server == "lmi":
            if self.chunked_prefill is not None and era == "A":
                missing.append("chunked_prefill")
            if self.draft == NGRAM and era != "C":
                missing.append("draft ngram")
        return missing

    @property
    def _narrow_cache(self) -> bool:
        """True if the cache has one byte per value, the only format that must be requested."""
        return self.kv_dtype is not None and kv_bytes_per_value("float16", self.kv_dtype) == 1

    @property
    def _speculative_config(self) -> dict[str, Any]:
        if self.draft == NGRAM:
            return {
                "method": "ngram",
                "num_speculative_tokens": self.draft_tokens,
                "prompt_lookup_max": _LOOK_UP_TOKENS,
            }
        return {"model": self.draft, "num_speculative_tokens": self.draft_tokens}


def _word(value: bool) -> str:
    return "true" if value else "false"
