"""Finds the tool calls in a model's answer while its text arrives.

Models write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere (Hermes, Qwen), or
an answer of JSON alone: a call, a list of them, or several behind semicolons, where `parameters`
may stand for `arguments` (Llama 3, Mistral). A call begins where its arguments do; what only looks
like one stays text.
"""

import json
import re
import uuid
from typing import Any, Final

from lmi_bench.engine.server.codec import overlap

_BEGIN: Final = "<tool_call>"
_HEAD: Final = (
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_TAGGED: Final = re.compile(_BEGIN + _HEAD)
_BARE: Final = re.compile(r"[\s\[\]};,]*" + _HEAD)


class CallFinder:
    """Divides one answer into content and calls."""

    def __init__(self, most: int | None) -> None:
        """most  calls to take at most; 0: everything is content; None: any number"""
        self._most = most
        self._text = ""
        self._content_chars = 0  # that were returned
        self._argument_chars: list[int] = []  # of each call, that were returned

    @property
    def num_found(self) -> int:
        return len(self._argument_chars)

    def push(self, text: str, *, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """What this text adds to the content and to the calls, as OpenAI streams them: a call's
        name with the begin of its arguments, then more of them. `ended`: no text follows."""
        if self._most == 0:
            return text, []
        self._text += text
        content, calls = _divided(self._text, ended=ended)
        more, self._content_chars = content[self._content_chars :], len(content)
        if content and not calls:  # a text, no bare call: "-" stands for what is read
            self._text, self._content_chars = "-" + self._text[len(content) :], 1
        added: list[dict[str, Any]] = []
        for index, (name, arguments) in enumerate(calls[: self._most]):
            if index == self.num_found:
                head = {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
                added.append(head | {"function": {"name": name, "arguments": arguments}})
                self._argument_chars.append(len(arguments))
            elif rest := arguments[self._argument_chars[index] :]:
                added.append({"index": index, "function": {"arguments": rest}})
                self._argument_chars[index] = len(arguments)
        return more, added


def _divided(text: str, *, ended: bool) -> tuple[str, list[tuple[str, str]]]:
    """The content that is certain by now, and name and arguments so far of each call."""
    bare = text.lstrip()[:1] in ("", "{", "[")
    find = _BARE.match if bare else _TAGGED.search
    begins, at = [], 0
    calls = []
    while found := find(text, at):
        begins.append(found.start())
        at = _end_of_object(text, found.end())
        calls.append((found["name"], text[found.end() : at]))
    if calls:
        return text[: begins[0]], calls
    if bare or ended:
        return text if ended else "", []
    opened = text.find(_BEGIN)
    return text[: opened if opened >= 0 else len(text) - overlap(text, _BEGIN)], []


def _end_of_object(text: str, start: int) -> int:
    """The end of the JSON object at `start`; of the text, if the object has none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)
