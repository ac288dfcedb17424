"""Conversations as a load: the prompt of each turn includes all earlier turns and answers.

The number of turns, their lengths and the pauses follow from the seed and the conversation's
number alone; the earlier answers in a prompt are those that the target gave.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.lengths import Pauses, parse_lengths
from lmi_bench.core.scenario import WorkloadSection
from lmi_bench.core.traces import RecordedConversation, read_conversations
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.loadgen.prompts import prompts as texts

NumTurns = Callable[[int], int]  # turns of a conversation, by its number


@dataclass(frozen=True, slots=True)
class Following:
    """A request, or what it adds to a conversation, `pause_s` after the last awaited answer."""

    request: PlannedRequest
    pause_s: float = 0.0


class Talk(Protocol):
    """A conversation or session in progress: which requests follow from which answers."""

    def begin(self) -> Sequence[Following]:
        """The requests that wait for no answer."""

    def after(self, request: PlannedRequest, reply: Exchange | None) -> Sequence[Following]:
        """The requests that this answer was the last to be awaited for."""


@dataclass(eq=False, slots=True)
class Dialogue:
    """One conversation in progress; `turns`: the words that each turn adds."""

    session: int
    turns: Sequence[Following]
    tokenizer: Tokenizer | None = None
    _place: int = 0

    def begin(self) -> list[Following]:
        """The first turn."""
        return self.after(None, None)

    def after(self, request: PlannedRequest | None, reply: Exchange | None) -> list[Following]:
        """The turn after this request's answer; none after the last."""
        if self._place == len(self.turns):
            return []
        turn = self.turns[self._place]
        said = replace(turn.request, session=self.session, turn=self._place, of_turns=len(self.turns))
        if not said.messages and said.prompt_text:
            said = replace(said, messages=(("user", said.prompt_text),))
        if request is not None and reply is not None:
            said = self._after(request, reply, said)
        self._place += 1
        return [Following(said, turn.pause_s)]

    def _after(self, asked: PlannedRequest, reply: Exchange, said: PlannedRequest) -> PlannedRequest:
        """The new words after the conversation so far, in each form that a target may accept.
        Reasoning is left out, as clients of chat servers do."""
        answered = reply.output_tokens
        if answered is None:
            answered = sum(reply.token_counts)
        answered = max(0, answered - reply.reasoning_tokens)
        answer = reply.text[reply.thought_chars :]
        ids: tuple[int, ...] = ()
        if asked.prompt_token_ids and said.prompt_token_ids:
            reply_ids = list(reply.token_ids)
            if not reply_ids and self.tokenizer is not None and answer:
                special = len(self.tokenizer.encode(""))
                reply_ids = self.tokenizer.encode(answer)[special:]
            ids = (*asked.prompt_token_ids, *reply_ids, *said.prompt_token_ids)
        text = said.prompt_text and f"{asked.prompt_text}{answer}\n{said.prompt_text}"
        messages = (*asked.messages, ("assistant", answer), *said.messages)
        return replace(
            said,
            input_tokens=len(ids) or asked.input_tokens + answered + said.input_tokens,
            prompt_token_ids=ids,
            prompt_text=text,
            messages=messages if said.messages else (),
        )


@dataclass(eq=False)
class MadeUpDialogues:
    """Conversations whose turns have the lengths of a workload.

    first, later  prompts of the first turn, and what each later turn adds
    num_turns     number of turns of a conversation
    """

    first: texts.Prompts
    later: texts.Prompts
    num_turns: NumTurns
    pauses: Pauses
    _: KW_ONLY
    seed: int
    tokenizer: Tokenizer | None = None

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """A request on its own, for the warm-up."""
        return self.first.request(level, number)

    def begin(self, level: LevelSpec, session: int, first_number: int) -> Dialogue:
        """A conversation; its requests are numbered from `first_number`."""
        draw = random.Random(f"{self.seed}/pauses/{session}")
        turns = [Following(self.first.request(level, first_number))]
        for place in range(1, self.num_turns(session)):
            said = self.later.request(level, first_number + place)
            turns.append(Following(said, self.pauses.draw(draw)))
        return Dialogue(session, turns, self.tokenizer)


@dataclass(eq=False)
class RecordedDialogues:
    """Conversations of a file, shuffled by the seed, over and over.

    output_tokens  length of an answer that was not recorded
    salt           prefix of each conversation, so that no prefix cache has seen it
    """

    conversations: Sequence[RecordedConversation]
    pauses: Pauses
    _: KW_ONLY
    output_tokens: int
    seed: int
    salt: str = ""
    ignore_eos: bool = True
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        self._recorded = texts.over_and_over(self.conversations, f"{self.seed}/conversations")

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """The first turn of a conversation, for the warm-up."""
        (first,) = self.begin(level, number, number).begin()
        return replace(first.request, session=None)

    def num_turns(self, session: int) -> int:
        return len(self._recorded(session).turns)

    def begin(self, level: LevelSpec, session: int, first_number: int) -> Dialogue:
        conversation = self._recorded(session)
        draw = random.Random(f"{self.seed}/pauses/{session}")
        turns = []
        for place, turn in enumerate(conversation.turns):
            system = conversation.system if place == 0 else ""
            if self.salt and place == 0:
                salt = f"[{self.salt}-{texts.level_place(level)}-{session}]"
                system = f"{salt} {system}".strip()
            said = self._request(first_number + place, system, turn.asked, turn.answered)
            turns.append(Following(said, self.pauses.draw(draw) if place else 0.0))
        return Dialogue(session, turns, self.tokenizer)

    def _request(self, number: int, system: str, asked: str, answered: str) -> PlannedRequest:
        text, tokenizer = f"{system}\n{asked}" if system else asked, self.tokenizer
        count = texts.estimated_tokens if tokenizer is None else texts.TextCounter(tokenizer)
        output_tokens = max(1, count(answered) if answered else self.output_tokens)
        messages = (("system", system), ("user", asked)) if system else (("user", asked),)
        options: dict[str, Any] = {"messages": messages, "ignore_eos": self.ignore_eos}
        return texts.text_request(number, text, output_tokens, tokenizer, **options)


Dialogues = MadeUpDialogues | RecordedDialogues


def num_turns(workload: WorkloadSection, seed: int) -> NumTurns:
    """The number of turns of each conversation of a workload; raises InputError without a file."""
    if workload.conversations is not None:
        conversations = read_conversations(Path(workload.conversations))
        recorded = texts.over_and_over(conversations, f"{seed}/conversations")
        return lambda session: len(recorded(session).turns)
    distribution = parse_lengths(workload.turns or "1")
    return lambda session: distribution.draw(random.Random(f"{seed}/turns/{session}"))


def first_numbers(num_turns: NumTurns, num_sessions: int | None) -> Iterator[tuple[int, int]]:
    """(conversation, number of its first request) of a level, in order."""
    number = 0
    for session in itertools.count() if num_sessions is None else range(num_sessions):
        yield session, number
        number += num_turns(session)
