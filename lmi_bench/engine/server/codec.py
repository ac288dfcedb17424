"""What the server needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class StreamDecoder(Protocol):
    """Turns one stream of tokens into pieces of text that joined are the decoded whole."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        ...

    def finish(self) -> str:
        """What is left at the end of the stream."""
        ...


class Codec(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, special tokens included where the model wants them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        ...

    def special_token(self, token_id: int) -> str | None:
        """The name of a token that is no text, such as `</s>`; None for every other one."""
        ...

    def detokenizer(self, behind: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one stream, whose tokens go on from those of `behind`."""
        ...
