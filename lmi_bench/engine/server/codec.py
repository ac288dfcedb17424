"""The tokenizer interface that the server needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class StreamDecoder(Protocol):
    """Turns one stream of tokens into text pieces whose concatenation is the decoded text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text completed by these tokens; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """The remaining text at the end of the stream."""
        ...


class Codec(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, including special tokens if the model needs them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        ...

    def special_token(self, token_id: int) -> str | None:
        """The name of a token without text, such as `</s>`; None for all others."""
        ...

    def detokenizer(self, behind: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one stream of tokens that follows the tokens `behind`."""
        ...
