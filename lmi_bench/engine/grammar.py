"""Grammars that an answer must follow: JSON schemas, regular expressions, choices, grammars.

The library llguidance compiles them for a tokenizer and says which tokens may come next; see
docs/decisions/0007-structured-output.md.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lmi_bench.core.errors import InputError, installed
from lmi_bench.engine.scheduling.sampling import Grammar
from lmi_bench.engine.tokenizer import eos_token_ids

_JSON_OPTIONS: Final[Any] = {"whitespace_pattern": r"[ \n\r\t]{1,24}"}  # else weak models never end it
_LIMITS: Final[Any] = {"max_items_in_row": 20_000, "step_max_items": 200_000}
"""Of the library's parser: ten times its own, for schemas with thousands of keys."""
_CACHED: Final = 128
_REASON_CHARS: Final = 300


def read_grammar(kind: Any, value: Any, folder: Path | None, vocab_size: int) -> Grammar:
    """A grammar for the model in `folder`, compiled once to check it.

    kind  json (a schema), regex, choice (a list of texts) or grammar (Lark or GBNF)
    Raises InputError if the value is not one, or uses what the library does not support; if
    llguidance is not installed, or cannot use the model's tokenizer; or if no answer can follow it.
    """
    if folder is None:
        raise InputError("structured output needs a real model: a simulated one has no text")
    with installed("structured output"):
        from llguidance import LLMatcher, grammar_from
    try:
        if kind == "json":
            text = LLMatcher.grammar_from_json_schema(value, overrides=_JSON_OPTIONS)
        elif kind == "choice":  # one terminal: rules are limited in number
            text = grammar_from("lark", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value)))
        else:
            text = grammar_from(kind, value)
        grammar = Grammar(text, folder, vocab_size)
        reason = _compiled(grammar).get_error().partition("\n<state>")[0]
        reason = reason.replace("NoExtensionBias", "no answer can follow it")
    except (ValueError, TypeError) as exc:
        reason = str(exc)
    if reason:
        shown = textwrap.shorten(reason, _REASON_CHARS)
        raise InputError(f"the {kind} cannot be used as a grammar: {shown}")
    return grammar


def calls_grammar(functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """In Lark, a list of one call of OpenAI's functions, or more if `several`."""
    calls = []
    for function in functions:
        head = f'{{"name": {json.dumps(function["name"])}, "parameters": '
        schema = {"x-guidance": _JSON_OPTIONS} | (function.get("parameters") or {"type": "object"})
        calls.append(f'{json.dumps(head)} %json {json.dumps(schema)} "}}"')
    more = '("," call)*' if several else ""
    return f'start: "[" call {more} "]"\ncall: {" | ".join(calls)}'


def is_kept(grammar: Grammar, answer: Sequence[int]) -> bool:
    """Whether an answer, without end tokens, is whole. It is not where the grammar is beyond a
    limit of the library, which then lets only that token follow."""
    matcher = _compiled(grammar).deep_copy()
    return matcher.try_consume_tokens(list(answer)) == len(answer) and bool(matcher.is_accepting())


class Follower:
    """Follows one answer through its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = _compiled(grammar).deep_copy()
        self._taken: list[int] = []

    def forbidden(self, answer: list[int]) -> NDArray[np.bool_]:
        """True for each token that may not follow `answer`, shape (vocabulary,).

        Answers may differ from the last one at their end, where a draft was rejected. A draft may
        also break the grammar; then anything may follow.
        """
        known = len(self._taken)
        while self._taken != answer[: len(self._taken)]:
            self._taken.pop()
        self._matcher.rollback(known - len(self._taken))
        more = answer[len(self._taken) :]
        held = self._matcher.try_consume_tokens(more)
        self._taken += more[:held]
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        is_broken = held < len(more) and not self._matcher.is_stopped()  # then only the end follows
        return np.zeros(len(allowed), np.bool_) if is_broken else allowed == 0


@cache
def _tokenizer(folder: Path, vocab_size: int) -> Any:
    """Shared by a server and its executor: a large vocabulary takes a second."""
    from llguidance import LLTokenizer

    ends = list(eos_token_ids(folder))
    if not ends:
        raise ValueError("the model has no end-of-sequence token")
    return LLTokenizer(str(folder / "tokenizer.json"), n_vocab=vocab_size, eos_token=ends)


@lru_cache(_CACHED)
def _compiled(grammar: Grammar) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    tokenizer = _tokenizer(grammar.folder, grammar.vocab_size)
    matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=LLParserLimits(**_LIMITS))
    matcher.compute_logit_bias()  # shows whether any token may be the first
    return matcher
