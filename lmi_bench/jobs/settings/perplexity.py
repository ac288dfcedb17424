"""What `perplexity` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class PerplexitySettings:
    """A model, a text, and the lengths at which the model reads it."""

    model: Annotated[str, Option("Demo model or Hugging Face folder.", ("--model", "-m"))]
    lengths: Annotated[str, Option("Window lengths in tokens, such as 128,256,512.")] = (
        "128,256,512"
    )
    rope_scaling: Annotated[
        tuple[str, ...],
        Option(
            "RoPE scaling to score as well: linear:2, dynamic:4 or yarn:4; repeatable.",
            default="none",
        ),
    ] = ()
    text: Annotated[
        Path | None,
        Option("Text, or JSON lines with `text` or `prompt`.", default="a built-in text"),
    ] = None
    max_tokens: Annotated[int, Option("Most tokens of the text that are scored.")] = 8192
    dtype: Annotated[str, Option("Number format of the weights: float32, bfloat16 or float16.")] = (
        "float32"
    )
    quantize: Annotated[
        str,
        Option("Quantization of the weights: none, int8, awq-int4, awq-int3, smoothquant or fp8."),
    ] = "none"

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise InputError(f"--max-tokens {self.max_tokens}: give at least 2")
