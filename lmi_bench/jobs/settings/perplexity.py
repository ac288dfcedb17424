"""What `perplexity` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, option


@dataclass(frozen=True, slots=True)
class PerplexitySettings:
    """A model, a text, and the lengths at which the model reads it."""

    model: str = option("Demo model or Hugging Face folder.", "--model", "-m", value=REQUIRED)
    lengths: str = option("Window lengths in tokens, such as 128,256,512.", value="128,256,512")
    rope_scaling: tuple[str, ...] = option(
        "RoPE scaling to score as well: linear:2, dynamic:4 or yarn:4; repeatable.",
        value=(),
        default="none",
    )
    text: Path | None = option(
        "Text, or JSON lines with `text` or `prompt`.", default="a built-in text"
    )
    max_tokens: int = option("Most tokens of the text that are scored.", value=8192)
    dtype: str = option(
        "Number format of the weights: float32, bfloat16 or float16.", value="float32"
    )
    quantize: str = option(
        "Quantization of the weights: none, int8, awq-int4, awq-int3, smoothquant or fp8.",
        value="none",
    )

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise InputError(f"--max-tokens {self.max_tokens}: give at least 2")
