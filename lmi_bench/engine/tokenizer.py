"""Converts text to token ids and back with a model folder's tokenizer.json, without torch."""

import json
import os
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import CapacityError, InputError, installed
from lmi_bench.models.folder import optional_object

_UNFINISHED: Final = "�"  # how `tokenizers` decodes bytes that are not (yet) UTF-8
_HIDDEN: Final = [byte for byte in range(256) if byte < 33 or 126 < byte < 161 or byte == 173]
_BYTE_LEVEL: Final = {256 + i: byte for i, byte in enumerate(_HIDDEN)}
"""The byte of each other character in the names of GPT-2's byte-level tokens."""
_BYTE_CHARS: Final = set(map(chr, {*_BYTE_LEVEL, *range(256)}.difference(_HIDDEN)))
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_CONTEXT_TOKENS: Final = 6  # prompt tokens: enough for a whole character and the word before it


class Tokenizer:
    """The tokenizer of one model folder.

    vocab_size     all ids are below it
    eos_token_ids  ids that end a generation, from the folder's generation settings
    folder         None if it was not read from a folder
    sampling       the sampling settings that the folder states
    max_new_tokens of an answer to a request that states none; None: the folder does not say
    longest_token_bytes  most bytes of a text that one token can stand for; None: unknown
    is_byte_level        a token's bytes do not depend on the tokens before it
    has_channels         the model divides an answer into channels, as gpt-oss does
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = (), folder: Path | None = None) -> None:
        self._tokenizer, self.folder = tokenizer, folder
        tokenizer.no_truncation()  # a tokenizer saved during training may truncate or pad
        tokenizer.no_padding()
        stated = optional_object(folder / "generation_config.json") if folder is not None else {}
        self.sampling: Mapping[str, float] = {
            name: stated[name] for name in _SAMPLING if type(stated.get(name)) in (int, float)
        }
        most = stated.get("max_new_tokens")
        self.max_new_tokens: int | None = most if type(most) is int and most > 0 else None
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        saved = json.loads(tokenizer.to_str())
        self.longest_token_bytes = _longest_token_bytes(saved)
        decoders = {step["type"] for step in _parts(saved["decoder"])}
        self.is_byte_level = "ByteLevel" in decoders
        names = [f"<0x{byte:02X}>" for byte in range(256)] if "ByteFallback" in decoders else []
        self._bytes = {tokenizer.token_to_id(name): bytes([byte]) for byte, name in enumerate(names)}
        added = tokenizer.get_added_tokens_decoder().items()
        self._alone = cache(lambda token_id: self.decode([token_id], skip_special_tokens=False))
        self._special_tokens: dict[int, str] = {i: t.content for i, t in added if t.special}
        self.has_channels = "<|channel|>" in self._special_tokens.values()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json and the ids that end a generation. Raises InputError if the
        file is missing or invalid, or `tokenizers` is not installed."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json: write one with transformers' save_pretrained")
        with installed("reading a tokenizer"):
            from tokenizers import Tokenizer as FastTokenizer
        with _explained(f"{path} cannot be read as a tokenizer"), _without_stderr():
            tokenizer = FastTokenizer.from_file(str(path))
            tokenizer.no_padding()  # it may be of any length
            tokenizer.encode("a")  # what a post-processor lacks shows only here
        return cls(tokenizer, eos_token_ids(folder), folder)

    @classmethod
    def from_json(cls, content: str, eos_token_ids: Iterable[int] = ()) -> "Tokenizer":
        """From the content of a tokenizer.json. Raises InputError if `tokenizers` is missing."""
        with installed("reading a tokenizer"):
            from tokenizers import Tokenizer as FastTokenizer
        return cls(FastTokenizer.from_str(content), eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The ids of `text`, including special tokens that the model needs (such as BOS). Half a
        surrogate pair, valid in JSON but not in UTF-8, becomes "?".

        most  raise CapacityError for more ids
        """
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        # a batch of one lets other threads run meanwhile, which `encode` does not
        with _explained("the tokenizer cannot encode the text"):
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoded) > most:  # a list of millions would hold up others
            raise CapacityError(f"the text has {len(encoded)} tokens, more than {most}")
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """What one token adds to a text, also a special one; U+FFFD for a part of a character."""
        one, two = (self.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return one if _UNFINISHED in one else two[len(one) :]

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, which may be a part of a character."""
        if not self.is_byte_level:
            return self._bytes.get(token_id) or self.token_text(token_id).encode()
        name: str = self._tokenizer.id_to_token(token_id) or ""
        if _BYTE_CHARS.issuperset(name):
            return name.translate(_BYTE_LEVEL).encode("latin-1")
        return name.encode()  # an added token's

    def special_token(self, token_id: int) -> str | None:
        """The name of a token that `decode` skips, such as `</s>`; None for others."""
        return self._special_tokens.get(token_id)

    def same_vocabulary(self, other: "Tokenizer") -> bool:
        """True if every token has the same id in both."""
        ours: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return bool(ours == other._tokenizer.get_vocab(with_added_tokens=True))

    def detokenizer(self, behind: Sequence[int] = (), *, special: bool = False) -> "Detokenizer":
        """special: the text has its special tokens, too"""
        return Detokenizer(self, self._shown(behind[-_CONTEXT_TOKENS:]), special=special)

    def _shown(self, token_ids: Iterable[int]) -> list[int]:
        """The ids without special tokens, which `decode` skips."""
        return [token_id for token_id in token_ids if token_id not in self._special_tokens]


class Detokenizer:
    """Turns one stream of tokens into text pieces as they arrive.

    A character may span several tokens, so its bytes are held back until it is whole. Whether a
    token starts with a space may depend on the one before it, so the two are decoded together. The
    joined pieces are what all tokens add to the text before them.
    """

    def __init__(self, tokenizer: Tokenizer, behind: list[int], *, special: bool) -> None:
        """behind  the tokens just before the stream, without special ones"""
        self._tokenizer, self._special = tokenizer, special
        self._context = behind  # later the last token
        self._before = self._decode(behind)  # the context's text
        self._utf8 = getincrementaldecoder("utf-8")("replace" if tokenizer.is_byte_level else "strict")
        self._is_broken = False  # one of the bytes behind the last text is no UTF-8

    def push(self, token_ids: Iterable[int]) -> str:
        """The text completed by these tokens; empty while a character is incomplete."""
        shown = token_ids if self._special else self._tokenizer._shown(token_ids)
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, shown)))
        return "".join(map(self._next, shown))

    def finish(self) -> str:
        """The remaining text at the end of the stream: empty, or U+FFFD for invalid bytes."""
        return self._utf8.decode(b"", final=True) if self._tokenizer.is_byte_level else self._end_bytes()

    def _next(self, token_id: int) -> str:
        behind, before = self._context, self._before
        self._context, self._before = [token_id], self._tokenizer._alone(token_id)
        if byte := self._tokenizer._bytes.get(token_id):
            try:
                return _UNFINISHED if self._is_broken else self._utf8.decode(byte)
            except UnicodeDecodeError as exc:  # as `decode`: one for each byte, and for those behind
                self._is_broken = True
                return _UNFINISHED * len(exc.object)
        text = self._decode([*behind, token_id])
        own = text[len(before) :] if text.startswith(before) else self._before
        return self._end_bytes() + own

    def _end_bytes(self) -> str:
        """Text for the bytes that no more will follow."""
        held = b"" if self._is_broken else self._utf8.getstate()[0]
        self._utf8.reset()
        self._is_broken = False
        return _UNFINISHED * len(held)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=not self._special)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise InputError in place of what the library raises: bare Exception, or a panic."""
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, Exception) or type(exc).__name__ == "PanicException":
            raise InputError(f"{what}: {exc}") from exc
        raise


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what is written to stderr: a panic writes lines of its own."""
    with os.fdopen(os.dup(2)) as kept, Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept.fileno(), 2)


def _longest_token_bytes(saved: Any) -> int | None:
    """From the content of a tokenizer.json; None if a token may stand for text of any length, since
    text is dropped on the way or what is unknown is one token."""
    model = saved["model"]
    steps = [*_parts(saved["normalizer"]), *_parts(saved["pre_tokenizer"])]
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]  # of what has no token of its own
    if not model.get("byte_fallback"):
        shown = set(range(256)) - set(_HIDDEN)
        bytes_of = [chr(code) for code in (*shown, *_BYTE_LEVEL)]
    strips = any(token["lstrip"] or token["rstrip"] for token in saved["added_tokens"])
    if model["type"] != "BPE" or strips or not all(map(_keeps_text, steps)):
        return None
    if not all(name in model["vocab"] for name in bytes_of):
        return None
    names = [*model["vocab"], *(token["content"] for token in saved["added_tokens"])]
    composes = any(each["type"] == "NFC" for each in steps)  # to a third of the bytes at most
    return max(len(name.encode()) for name in names) * (3 if composes else 1)


def _parts(step: Any) -> list[Any]:
    if not step or step["type"] != "Sequence":
        return [step] if step else []
    return step.get("normalizers") or step.get("pretokenizers") or step.get("decoders") or []


def _keeps_text(step: Any) -> bool:
    """True if a normalizer or pre-tokenizer drops nothing, and shortens nothing but by composing
    characters."""
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        found = step["pattern"].get("String")
        return found is not None and len(found.encode()) <= len(step["content"].encode())
    return step["type"] in ("ByteLevel", "Metaspace", "Digits", "Prepend", "NFC")


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-sequence ids, from generation_config.json first, then config.json, where those of
    a wrapper count before its text model's."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        stated = optional_object(path)
        value, text = stated.get("eos_token_id"), stated.get("text_config")
        if value is None and isinstance(text, dict):
            value = text.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        if value is not None and not all(type(each) is int for each in found):
            raise InputError(f"{path}: eos_token_id must be a whole number or a list of such")
        if value is not None:
            return tuple(found)
    return ()
