"""Reads the catalog's CSV files, and finds rows by name, ignoring case, separators and variant.

Every row names its source. `meta-llama/Llama-2-7b-chat-hf`, `Llama 2 7B Chat` and `llama2-7b` are
one architecture: chat, instruct and quantized variants have their base model's shape.
"""

import csv
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Generic, TypeVar

from lmi_bench.core.errors import InputError

Row = dict[str, str]


def read_rows(name: str, package: str = "catalog") -> list[Row]:
    """The rows of `PACKAGE/data/NAME`, each a mapping from column name to text."""
    path = resources.files(f"lmi_bench.{package}").joinpath("data").joinpath(name)
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def number_or_none(text: str, unit: float = 1.0) -> float | None:
    """A cell as a number of units; None if it is empty, which means unknown, not zero."""
    return float(text) * unit if text.strip() else None


T = TypeVar("T")

# Words in a model's name that do not change its shape.
_VARIANT_WORD = re.compile(
    r"hf|chat|instruct|it|base|meta|dynamic|awq|gptq|(nv|mx)?fp\d+(a\d+)?|bf16|gguf|int\d|\dbit|kv"
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
    return re.sub(r"[^a-z0-9]", "", "".join(model_words(name)))


def model_words(name: str) -> list[str]:
    """The words of a model's name without publisher, case and variant words."""
    return [word for word in _words(name) if not _VARIANT_WORD.fullmatch(word)]


def variant_words(name: str) -> frozenset[str]:
    """Words in a model's name that distinguish variants of the same shape.

    >>> sorted(variant_words("meta-llama/Llama-3.1-8B-Instruct"))
    ['instruct']
    """
    variant = frozenset(word for word in _words(name) if word and _VARIANT_WORD.fullmatch(word))
    return variant - {"hf", "base", "meta"}


def _words(name: str) -> list[str]:
    return re.split(r"[\s_-]+", name.strip().lower().rsplit("/", maxsplit=1)[-1])


def is_same_model(name: str, known: Sequence[str]) -> bool:
    """True for one of the known names or its beginning, and not for a sibling of the same shape.

    >>> is_same_model("Mistral 7B", ["mistral-7b-v0.3"])
    True
    >>> is_same_model("llama-3.3-70b", ["llama-3.1-70b", "meta-llama/Llama-3.1-70B"])
    False
    """
    words = model_words(name)
    return variant_words(name) <= variant_words(known[-1]) and any(
        model_key(each) == model_key(name) or _words(each)[: len(words)] == words for each in known
    )


@dataclass(frozen=True)
class Index(Generic[T]):
    """Finds a catalog row by any of its names.

    what, advice  the kind of row and a hint, for the error about an unknown name
    rows          all rows of the table
    names         a row's names; the first `shown` of them are suggested for unknown names
    key           normalises a name
    """

    what: str
    advice: str
    rows: Callable[[], Iterable[T]]
    names: Callable[[T], Sequence[str]]
    shown: int = 1
    key: Callable[[str], str] = plain_key

    @cached_property
    def _by_key(self) -> Mapping[str, T]:
        """Rows by key; raises ValueError if two different rows have the same key."""
        index: dict[str, T] = {}
        for row in self.rows():
            for name in filter(None, self.names(row)):
                if index.setdefault(self.key(name), row) != row:
                    raise ValueError(f"two catalog rows have the key {self.key(name)!r}")
        return index

    def has(self, name: str) -> bool:
        """Whether a row has this name."""
        return self.key(name) in self._by_key

    def find(self, name: str) -> T:
        """The row with this name; raises InputError with the nearest names."""
        found = self._by_key.get(self.key(name))
        if found is not None:
            return found
        known = (n for row in self.rows() for n in self.names(row)[: self.shown] if n)
        by_lower = {candidate.lower(): candidate for candidate in known}
        close = difflib.get_close_matches(name.lower(), by_lower, n=_NEAREST_SHOWN, cutoff=0.3)
        nearest = ", ".join(by_lower[candidate] for candidate in close)
        hint = f"; nearest: {nearest}" if nearest else ""
        raise InputError(f"{self.what} {name!r} is not in the catalog{hint}. {self.advice}")
