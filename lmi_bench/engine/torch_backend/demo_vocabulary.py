"""The demo models' vocabulary: 32,000 ASCII strings, uniquely decodable in any order.

Token ids 0 to 2 are `<unk>`, `<s>` and `</s>`; every other one is a space and a word of one to
four small letters: " a", " ab", " abc", " baca". Text splits uniquely at its spaces and angle
brackets, so any sequence of ids survives conversion to text and back: a prompt with an exact token
count can be sent to a text-only endpoint. Other text becomes `<unk>`, one per run of letters or
per character.
"""

import json
from itertools import islice, product
from string import ascii_lowercase
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE: Final = 32_000
EOS_TOKEN_ID: Final = 2
_MARKS: Final = ("<unk>", "<s>", "</s>")
_PIECES: Final = r"</?[a-z]+>| [a-z]+|[A-Za-z0-9]+|[\s\S]"


def demo_tokens() -> list[str]:
    """The vocabulary's strings; a token's id is its index."""
    letters, vowels = ascii_lowercase, "aeiou"
    patterns: list[tuple[str, ...]] = [(letters,), (letters,) * 2, (letters,) * 3, (letters, vowels) * 2]
    words = ("".join(word) for pattern in patterns for word in product(*pattern))
    return [*_MARKS, *(f" {word}" for word in islice(words, VOCAB_SIZE - len(_MARKS)))]


def demo_tokenizer_json() -> str:
    """The content of a tokenizer.json with this vocabulary."""
    vocab = {token: token_id for token_id, token in enumerate(demo_tokens())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=_MARKS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    text: str = tokenizer.to_str()
    return json.dumps(json.loads(text), separators=(",", ":"))
