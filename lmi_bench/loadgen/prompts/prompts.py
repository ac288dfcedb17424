"""Prompts of the requests: synthetic ones of exact token counts, or those of a data set.

A prompt is a pure function of (seed, salt, level, repeat, number), so a resumed run and a second
target get the same lengths in the same order. The salt changes from run to run, because a server
answers prompts that it has seen before faster, from its prefix cache.
"""

import math
import random
from array import array
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar

from lmi_bench.core.durable import json_values, read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import LengthDistribution, parse_lengths
from lmi_bench.core.scenario import WorkloadSection
from lmi_bench.core.sessions import SessionRequest
from lmi_bench.core.traces import Trace, TraceRequest
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 4
"""Rough length of a token of English text, for a data set without a tokenizer."""
_MAX_ADJUSTMENTS = 16
_STABLE_TOKENS = 512

_WORDS = read_text(Path(__file__).parents[1] / "data" / "everyday_words.txt").split()
"""Everyday words that common BPE vocabularies hold as one token each with the space before them."""


class Prompts(Protocol):
    """A source of requests."""

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """Request `number` of a level; negative numbers are its warm-up. Due at 0.0."""


_Value = TypeVar("_Value")
Part = tuple[int, random.Random]  # number of tokens of a part of a prompt, and its random generator
Parts = Sequence[Part]


PromptText = Callable[[PlannedRequest, random.Random, Parts], PlannedRequest]
"""Adds its prompt to a request, from a generator seeded for this prompt and the parts at its
beginning, each with a generator of the same seed in all prompts."""


def _drawn(values: Sequence[_Value], count: int, draw: random.Random, shared: Parts) -> list[_Value]:
    """`count` values: the shared parts first, then the prompt's own."""
    drawn: list[_Value] = []
    for part, part_draw in shared:
        drawn += part_draw.choices(values, k=min(part, count - len(drawn)))
    return drawn + draw.choices(values, k=count - len(drawn))


@dataclass(frozen=True, slots=True)
class Lengths:
    """One kind of request, in tokens, and its share relative to the other kinds."""

    input_tokens: int
    output_tokens: int
    share: float = 1.0


def no_text(request: PlannedRequest, _draw: random.Random, _shared: Parts) -> PlannedRequest:
    """For targets that need lengths only, such as a simulated engine."""
    return request


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Random ids of a vocabulary, for an engine that takes ids. `first_id` skips special ones."""

    vocab_size: int
    first_id: int = 0

    def __call__(self, request: PlannedRequest, draw: random.Random, shared: Parts) -> PlannedRequest:
        ids = _drawn(range(self.first_id, self.vocab_size), request.input_tokens, draw, shared)
        return replace(request, prompt_token_ids=tuple(ids))


def distinct_ids(request: PlannedRequest, draw: random.Random, shared: Parts) -> PlannedRequest:
    """Ids for a simulated prefix cache, which only compares them: equal parts have equal ids."""
    ids = array("q")
    for part, part_draw in (*shared, (request.input_tokens, draw)):
        count = min(part, request.input_tokens - len(ids))
        first = 1 + part_draw.getrandbits(40) << 22  # a range of its own, beside token id 0
        ids.extend(range(first, first + count))
    return replace(request, prompt_token_ids=ids)


def common_words(request: PlannedRequest, draw: random.Random, shared: Parts) -> PlannedRequest:
    """Text for a server whose tokenizer is unavailable: about one token a word."""
    words = _drawn(_WORDS, request.input_tokens, draw, shared)
    return replace(request, prompt_text=" ".join(words))


class ExactText:
    """Text that the tokenizer reads as exactly the requested number of tokens.

    Made of tokens that survive decoding and encoding unchanged, alone and beside each other. Tokens
    that the tokenizer puts before a text are counted as the server counts them, in the first part.
    Raises InputError if the vocabulary has no such tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = _stable_ids(tokenizer)
        self._num_special = len(tokenizer.encode(""))

    def __call__(self, request: PlannedRequest, draw: random.Random, shared: Parts) -> PlannedRequest:
        wanted, special = request.input_tokens, self._num_special
        shared = [(max(0, part - special * (not at)), part_draw) for at, (part, part_draw) in enumerate(shared)]
        ids = _drawn(self._ids, max(1, wanted - special), draw, shared)
        for _ in range(_MAX_ADJUSTMENTS):
            text = self._tokenizer.decode(ids)
            seen = list(self._tokenizer.encode(text))
            if len(seen) == wanted:
                return replace(request, prompt_text=text, prompt_token_ids=tuple(seen))
            if len(seen) > wanted:
                ids = ids[: max(1, len(ids) - (len(seen) - wanted))]
            else:
                ids = ids + draw.choices(self._ids, k=wanted - len(seen))
        raise InputError(
            f"no text of exactly {wanted} tokens was found with this tokenizer "
            f"after {_MAX_ADJUSTMENTS} tries (the last had {len(seen)}): use a data "
            "set instead"
        )


def text_request(
    number: int, text: str, output_tokens: int, tokenizer: Tokenizer | None, **more: Any
) -> PlannedRequest:
    """A request with this text; without a tokenizer its length is an estimate."""
    ids = () if tokenizer is None else tuple(tokenizer.encode(text))
    length = len(ids) or estimated_tokens(text)
    return PlannedRequest(number, 0.0, length, output_tokens, prompt_token_ids=ids, prompt_text=text, **more)


def estimated_tokens(text: str) -> int:
    """Tokens of a text, by its characters; at least one."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


class TextCounter:
    """Counts the tokens of a text that follows a prompt, without those put before every text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_special = len(tokenizer.encode(""))

    def __call__(self, text: str) -> int:
        """Tokens of `text`, at least one."""
        return max(1, len(self._tokenizer.encode(text)) - self._num_special)


_LONGEST_BLOCK = 1000


LengthsOf = Callable[[int, int], Lengths]  # the lengths of a request, from its number and the seed


@dataclass(eq=False)
class SyntheticPrompts:
    """Requests of given lengths with made-up words.

    lengths        kinds of request, which come in exact shares, shuffled in small blocks; or a
                   function
    shared_prefix  tokens at the beginning that all prompts of the run have in common
    corpus         number of documents and their tokens: each prompt has one behind the prefix, the
                   k-th most popular with a chance of 1/k; None: no documents
    """

    lengths: Sequence[Lengths] | LengthsOf
    text: PromptText
    _: KW_ONLY
    seed: int
    salt: str = ""
    ignore_eos: bool = True
    shared_prefix: int = 0
    corpus: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        count = 0 if self.corpus is None else self.corpus[0]
        self._chances = list(accumulate(1 / rank for rank in range(1, count + 1)))
        self._lengths = self.lengths if callable(self.lengths) else _mixed(tuple(self.lengths))

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        lengths = self._lengths(number, self.seed)
        planned = PlannedRequest(number, 0.0, lengths.input_tokens, lengths.output_tokens, ignore_eos=self.ignore_eos)
        draw = random.Random(f"{self._place(level)}/{number}")
        return self.text(planned, draw, self._shared(level, number))

    def _place(self, level: LevelSpec) -> str:
        return f"{self.seed}/{self.salt}/{level_place(level)}"

    def _shared(self, level: LevelSpec, number: int) -> list[Part]:
        text = f"{self.seed}/{self.salt}"
        parts = [(self.shared_prefix, random.Random(f"{text}/prefix"))] if self.shared_prefix else []
        if self.corpus is not None:
            draw = random.Random(f"{self._place(level)}/{number}/document")
            rank = bisect(self._chances, draw.random() * self._chances[-1])
            parts.append((self.corpus[1], random.Random(f"{text}/document {rank}")))
        return parts


def _mixed(kinds: Sequence[Lengths]) -> LengthsOf:
    """Kinds of request in exact shares."""
    block = _block(kinds)

    def lengths(number: int, seed: int) -> Lengths:
        block_number, place = divmod(number, len(block))
        order = list(block)
        random.Random(f"{seed}/mix/{block_number}").shuffle(order)
        return kinds[order[place]]

    return lengths if len(block) > 1 else lambda _number, _seed: kinds[block[0]]


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Lengths from distributions, prompts by `more_input` longer: the same at every level."""

    input_lengths: LengthDistribution
    output_lengths: LengthDistribution
    more_input: int = 0

    def __call__(self, number: int, seed: int) -> Lengths:
        draw = random.Random(f"{seed}/lengths/{number}")
        prompt = self.more_input + self.input_lengths.draw(draw)
        return Lengths(prompt, self.output_lengths.draw(draw))


def distributions(workload: WorkloadSection) -> tuple[LengthDistribution, LengthDistribution]:
    """Input and output lengths of a workload; fixed if it names no distribution."""
    return (
        parse_lengths(workload.input_lengths or f"fixed({workload.input_tokens})"),
        parse_lengths(workload.output_lengths or f"fixed({workload.output_tokens})"),
    )


class TracePrompts(SyntheticPrompts):
    """Requests with a trace's lengths and, at a level with a rate, its times stretched to it.

    options  as for SyntheticPrompts

    Raises InputError for a shared prefix beside hash ids, or as long as the prompts.
    """

    def __init__(self, trace: Trace, text: PromptText, **options: Any) -> None:
        super().__init__(self._recorded, text, **options)
        self._trace = trace
        if self.shared_prefix and any(each.hash_ids for each in trace.requests):
            raise InputError("the trace's hash_ids state what its prompts share: leave --shared-prefix out")
        if self.shared_prefix >= (mean := mean_lengths(trace.requests).input_tokens):
            raise InputError(
                f"a shared prefix of {self.shared_prefix} tokens does not fit the trace's prompts of {mean}"
            )

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """Request `number` of a level; beyond the trace's end it starts over, with other text."""
        planned = super().request(level, number)
        if level.rate_per_s is None or number < 0:
            return planned
        return replace(planned, arrival_s=self._trace.due_s(number, level.rate_per_s, level.num_requests))

    def _recorded(self, number: int, _seed: int) -> Lengths:
        recorded = self._trace.requests[number % len(self._trace.requests)]
        return Lengths(recorded.input_tokens, recorded.output_tokens)

    def _shared(self, level: LevelSpec, number: int) -> list[Part]:
        """The recorded blocks: equal ids are equal text in every request of a play of the trace."""
        play, place = divmod(number, len(self._trace.requests))
        recorded = self._trace.requests[place]
        if not recorded.hash_ids or number < 0:
            return super()._shared(level, number)
        blocks = f"{self._place(level)}/play {play}/block"
        return [(self._trace.block_tokens, random.Random(f"{blocks} {each}")) for each in recorded.hash_ids]


def mean_lengths(requests: Sequence[TraceRequest | SessionRequest]) -> Lengths:
    """Mean lengths of recorded requests, rounded to tokens."""
    lengths = ((each.input_tokens, each.output_tokens) for each in requests)
    return Lengths(*(round(fmean(tokens)) for tokens in zip(*lengths, strict=True)))


DatasetEntry = tuple[str, int | None]
"""One line of a data set: its text, and the number of output tokens; None: the scenario's."""


@dataclass(eq=False)
class DatasetPrompts:
    """Requests with a data set's own prompts, in an order shuffled by the seed, over and over."""

    entries: Sequence[DatasetEntry]
    _: KW_ONLY
    output_tokens: int
    tokenizer: Tokenizer | None
    seed: int
    salt: str = ""
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        self._entry = over_and_over(self.entries, f"{self.seed}/dataset")

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """Request `number` of a level; the salt, if any, precedes the prompt."""
        text, output_tokens = self._entry(number)
        if self.salt:
            text = f"[{self.salt}-{level_place(level)}-{number}] {text}"
        wanted = output_tokens or self.output_tokens
        return text_request(number, text, wanted, self.tokenizer, ignore_eos=self.ignore_eos)


def load_dataset(path: Path) -> list[DatasetEntry]:
    """Read JSON lines with `prompt` (or `text`) and, if wanted, `output_tokens`. Raises InputError
    that names the first entry that cannot be used."""
    entries: list[DatasetEntry] = []
    for number, content in enumerate(json_values(read_text(path), path), start=1):
        text = content.get("prompt", content.get("text")) if isinstance(content, dict) else None
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}: entry {number} needs a `prompt` (or `text`) that is not empty")
        output_tokens = content.get("output_tokens")
        is_count = type(output_tokens) is int and output_tokens >= 1
        if output_tokens is not None and not is_count:
            raise InputError(
                f"{path}: entry {number}: output_tokens must be a whole number of at least 1, got {output_tokens!r}"
            )
        entries.append((text, output_tokens))
    if not entries:
        raise InputError(f"{path} holds no prompt: write one JSON object a line")
    return entries


def over_and_over(items: Iterable[_Value], seed: str) -> Callable[[int], _Value]:
    """Items by number, in an order shuffled by the seed, over and over; can be pickled."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return partial(_in_turn, order)


def _in_turn(order: Sequence[_Value], number: int) -> _Value:
    return order[number % len(order)]


def level_place(level: LevelSpec) -> str:
    """The level, and its repeat if it is one: other prompts each time, of the same lengths."""
    return f"{level.index}.{level.repeat}" if level.repeat else str(level.index)


def _block(lengths: Sequence[Lengths]) -> list[int]:
    """Indices of the kinds, each as often as its share asks, in the shortest whole numbers.

    Shares that have a common measure in millions only, as those of a log do, are rounded to the
    next whole number in a block of a thousand.
    """
    total = sum(kind.share for kind in lengths)
    shares = [Fraction(kind.share / total).limit_denominator(100) for kind in lengths]
    scale = math.lcm(*(share.denominator for share in shares))
    if scale > _LONGEST_BLOCK:
        shares = [Fraction(kind.share / total) for kind in lengths]
        scale = _LONGEST_BLOCK
    return [at for at, share in enumerate(shares) for _ in range(max(1, round(share * scale)))]


def _stable_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of whole words that stay single tokens when adjacent: those with a space between them, if
    there are any. Of others, such as endings, two may be read as other tokens than each twice."""
    special = list(tokenizer.encode(""))
    draw = random.Random(0)
    candidates = draw.sample(range(tokenizer.vocab_size), k=tokenizer.vocab_size)
    kept: list[int] = []
    joined: list[int] = []
    for token_id in candidates:
        text = tokenizer.decode([token_id])
        if not text.strip().isalpha() or not text.isascii():
            continue
        pair = tokenizer.decode([token_id, token_id, token_id])
        if list(tokenizer.encode(pair)) == [*special, *[token_id] * 3]:
            (kept if len(pair.split()) == 3 else joined).append(token_id)
            if len(kept) == _STABLE_TOKENS:
                break
    if not kept and not joined:
        raise InputError(
            "this tokenizer has no word that is one token beside itself, so "
            "prompts of an exact length cannot be made: use a data set"
        )
    return kept or joined[:_STABLE_TOKENS]
