"""Matches names to catalog rows, ignoring case, separators, publisher and variant.

`meta-llama/Llama-2-7b-chat-hf`, `Llama 2 7B Chat` and `llama2-7b` are one architecture: chat,
instruct and quantized variants have their base model's shape.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from lmi_bench.core.errors import InputError

T = TypeVar("T")

# Words in a model's name that do not change its shape.
_VARIANT_WORD = re.compile(
    r"hf|chat|instruct|it|base|meta|dynamic|awq|gptq|fp\d+|bf16|int\d|\dbit|kv"
    r"|(quantized\.?)?(w\d+a\d+)?"
)
_NEAREST_SHOWN = 3


def plain_key(name: str) -> str:
    """A name without case and separators: `NVIDIA A10G 24GB` -> `nvidiaa10g24gb`."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def model_key(name: str) -> str:
    """A model's name without publisher, case, separators and variant words.

    >>> model_key("meta-llama/Llama-2-7b-chat-hf"), model_key("Llama 2 7B")
    ('llama27b', 'llama27b')
    """
    words = re.split(r"[\s_-]+", name.strip().lower().rsplit("/", maxsplit=1)[-1])
    return re.sub(r"[^a-z0-9]", "", "".join(w for w in words if not _VARIANT_WORD.fullmatch(w)))


def variant_words(name: str) -> frozenset[str]:
    """Words in a model's name that distinguish variants of the same shape.

    >>> sorted(variant_words("meta-llama/Llama-3.1-8B-Instruct"))
    ['instruct']
    """
    words = re.split(r"[\s_-]+", name.strip().lower().rsplit("/", maxsplit=1)[-1])
    variant = frozenset(word for word in words if word and _VARIANT_WORD.fullmatch(word))
    return variant - {"hf", "base", "meta"}


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names most similar to `name`, best first."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=_NEAREST_SHOWN, cutoff=0.3)
    return [by_lower[candidate] for candidate in close]


def unknown_name_error(what: str, name: str, known: Iterable[str], advice: str) -> InputError:
    """The error for a name without a row, with the nearest names."""
    nearest = nearest_names(name, known)
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return InputError(f"{what} {name!r} is not in the catalog{hint}. {advice}")


def index_by_key(entries: Iterable[tuple[str, T]]) -> Mapping[str, T]:
    """Map keys to values; raises ValueError if two different rows have the same key."""
    index: dict[str, T] = {}
    for key, value in entries:
        if index.setdefault(key, value) != value:
            raise ValueError(f"two catalog rows have the key {key!r}")
    return index
