"""Tokenizers that are at hand without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lmi_bench.engine.tokenizer import Tokenizer

DEMO_NAMES: Final = ("demo-15m", "demo-110m")


def find_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model folder or a demo model; None where there is none at hand.

    Loads no torch, so that a sweep over HTTP can make prompts of exact lengths.
    """
    folder = Path(model)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    if model in DEMO_NAMES:
        from lmi_bench.engine.torch_backend.demo_vocabulary import (
            EOS_TOKEN_ID,
            demo_tokenizer_json,
        )

        return Tokenizer.from_json(demo_tokenizer_json(), eos_token_ids=(EOS_TOKEN_ID,))
    return None
