"""Text to token ids and back, read from a model folder's tokenizer.json. Knows nothing of torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import InputError

_UNFINISHED: Final = "�"  # what `tokenizers` decodes bytes to that are not (yet) UTF-8
_CONTEXT_TOKENS: Final = 6  # of a prompt: enough for a whole character and the word before it


class Tokenizer:
    """The tokenizer of one model folder.

    vocab_size     ids are below it
    eos_token_ids  ids that end a generation, as the folder's generation settings state them
    folder         None where it was read from elsewhere
    """

    def __init__(
        self, tokenizer: Any, eos_token_ids: Iterable[int] = (), folder: Path | None = None
    ) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()  # a tokenizer that was saved while training may cut or fill up
        tokenizer.no_padding()
        self.folder = folder
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self._special_tokens: dict[int, str] = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `folder`/tokenizer.json and the ids that end a generation.

        Raises InputError where the file is absent or broken, or `tokenizers` is not installed.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(
                f"{folder} has no tokenizer.json: give a folder with a fast tokenizer "
                "(transformers writes one with tokenizer.save_pretrained)"
            )
        try:
            tokenizer = _fast_tokenizer_class().from_file(str(path))
        except InputError:
            raise
        except Exception as exc:  # the library raises bare Exception for any broken file
            raise InputError(f"{path} cannot be read as a tokenizer: {exc}") from exc
        return cls(tokenizer, _eos_token_ids(folder), folder)

    @classmethod
    def from_json(cls, content: str, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """A tokenizer from the content of a tokenizer.json.

        Raises InputError where `tokenizers` is not installed.
        """
        return cls(_fast_tokenizer_class().from_str(content), eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with those that the model wants around it (such as a first BOS).

        Half a surrogate pair, which JSON can carry and UTF-8 cannot, counts as "?".
        """
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def special_token(self, token_id: int) -> str | None:
        """The name of a token that `decode` passes over, such as `</s>`; None for others."""
        return self._special_tokens.get(token_id)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every token has the same id in both."""
        ours: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return bool(ours == other._tokenizer.get_vocab(with_added_tokens=True))

    def detokenizer(self, behind: Sequence[int] = ()) -> Detokenizer:
        """A decoder for one stream of tokens, which go on from those of `behind`."""
        return Detokenizer(self, self._shown(behind[-_CONTEXT_TOKENS:]))

    def _shown(self, token_ids: Iterable[int]) -> list[int]:
        """Without the special tokens, which `decode` passes over."""
        return [token_id for token_id in token_ids if token_id not in self._special_tokens]


class Detokenizer:
    """Turns one stream of tokens into text pieces as they come.

    A character may be spread over several tokens, and whether a token starts with a space may
    depend on the one before it. So new tokens are decoded behind those of the last piece, and
    kept back while they end in half a character. The pieces joined are what decoding all tokens
    adds to the text before them: the whole, where there is none.
    """

    def __init__(self, tokenizer: Tokenizer, behind: list[int]) -> None:
        """behind  the tokens just before the stream, no special ones among them"""
        self._tokenizer = tokenizer
        self._context = behind  # then the last piece, which starts where a character does
        self._context_text = tokenizer.decode(behind) if behind else ""
        self._pending: list[int] = []  # not emitted yet

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        self._pending.extend(self._tokenizer._shown(token_ids))
        return self._emit(at_end=False)

    def finish(self) -> str:
        """What is left at the end of the stream: nothing, or U+FFFD for broken bytes."""
        return self._emit(at_end=True)

    def _emit(self, *, at_end: bool) -> str:
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._context + self._pending)
        if text.endswith(_UNFINISHED) and not at_end:
            return ""
        if text.startswith(self._context_text):
            piece = text[len(self._context_text) :]
        else:  # broken bytes right behind: some decoders then give up the good ones before them too
            piece = self._tokenizer.decode(self._pending)
        self._context = self._pending
        self._context_text = self._tokenizer.decode(self._context)
        self._pending = []
        return piece


def _fast_tokenizer_class() -> Any:
    try:
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError as exc:
        raise InputError(
            "reading a tokenizer needs the package tokenizers: pip install 'lmi-bench[engine]'"
        ) from exc
    return FastTokenizer


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-sequence ids: generation_config.json goes before config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as exc:
            raise InputError(f"{path} is not a JSON object: {exc}") from exc
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(int(token_id) for token_id in value)
    return ()
