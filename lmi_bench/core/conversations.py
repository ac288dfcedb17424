"""Recorded conversations: what people said, turn after turn, and how long the answers were.

JSON lines, or one JSON list, of ShareGPT's `conversations` ([{"from": "human", "value": ...}, ...])
or of `messages` ([{"role": "user", "content": ...}, ...]). What was answered is kept for its length
alone: a replay goes on from the answers that it gets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_bench.core.errors import InputError, file_reason

_USER, _ASSISTANT = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """What a person said, and what was answered ("" where nothing was)."""

    asked: str
    answered: str = ""


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """One conversation; `system`: the text before it."""

    turns: tuple[RecordedTurn, ...]
    system: str = ""


def read_conversations(path: Path) -> tuple[RecordedConversation, ...]:
    """The conversations of a file that have a user's turn.

    Raises InputError that names the first entry that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read the conversations {path}: {file_reason(exc)}") from exc
    found = []
    for number, entry in enumerate(_entries(path, text), start=1):
        messages = entry.get("conversations", entry.get("messages"))
        if not isinstance(messages, list):
            raise InputError(
                f"{path}: entry {number} has neither `conversations` (ShareGPT) nor `messages`"
            )
        try:
            conversation = _conversation(messages)
        except (KeyError, TypeError, AttributeError) as exc:
            raise InputError(f"{path}: entry {number} cannot be read: {exc!r}") from exc
        if conversation.turns:
            found.append(conversation)
    if not found:
        raise InputError(f"{path} holds no conversation with a user's turn")
    return tuple(found)


def _entries(path: Path, text: str) -> Sequence[Mapping[str, Any]]:
    try:
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as exc:
        raise InputError(f"{path} is neither JSON lines nor a JSON list: {exc}") from exc
    if not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: each entry must be a JSON object")
    return list(entries)


def _conversation(messages: Sequence[Mapping[str, Any]]) -> RecordedConversation:
    """Turns in their order; neighbouring messages of one speaker are one message."""
    system: list[str] = []
    turns: list[RecordedTurn] = []
    for message in messages:
        who = str(message.get("from", message.get("role"))).lower()
        said = message["value"] if "value" in message else message["content"]
        if not isinstance(said, str):
            raise TypeError("a message is not text")
        if who in _USER:
            if turns and not turns[-1].answered:
                turns[-1] = RecordedTurn(f"{turns[-1].asked}\n{said}")
            elif said:
                turns.append(RecordedTurn(said))
        elif who in _ASSISTANT:
            if turns:
                last = turns[-1]
                turns[-1] = RecordedTurn(last.asked, "\n".join(filter(None, (last.answered, said))))
        elif not turns:
            system.append(said)
    return RecordedConversation(tuple(turns), "\n".join(system))
