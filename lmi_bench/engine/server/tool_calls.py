"""Finds the tool calls in a model's answer while its text arrives.

Models write JSON with name and arguments (in `<tool_call>`: Hermes, Qwen; alone, a list of them or
several behind semicolons: Llama, Phi), a name before its JSON arguments (DeepSeek, Kimi, Mistral),
or a name and tagged pairs (GLM, Qwen3-Coder), or Python (`python_calls`); gpt-oss divides an answer
into channels. A call begins where its arguments do; what only looks like one stays text.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from lmi_bench.engine.server.codec import overlap
from lmi_bench.engine.server.python_calls import in_json, python_calls

_FIELDS: Final = r'(?:"(?:type|id|index)"\s*:\s*(?:"[^"\\]*"|\d+)\s*,\s*)*'
_HEAD: Final = (
    rf'\s*\{{\s*{_FIELDS}"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*{_FIELDS}'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME: Final = r"\s*(?P<name>[\w.-]+)\s*"
_TAGGED: Final = [
    re.compile(form)
    for form in (
        "<tool_call>" + _HEAD,
        r"<tool_call>\s*(?=\{)",
        rf"<tool_call>{_NAME}(?P<pairs>(?:<arg_key>[\s\S]*?</arg_value>\s*)*+)</tool_call>",
        rf"(?:<tool_call>\s*)?<function={_NAME}>(?P<pairs>[\s\S]*?)</function>",
        rf"\[TOOL_CALLS\]{_NAME}(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{{)",
        r"\[TOOL_CALLS\]\s*\[?" + _HEAD,
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        rf"{_NAME}(?:<｜tool▁sep｜>|```json)\s*(?=\{{)",
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"(?P<name>[\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)",
    )
]
_BEGINS: Final = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<｜tool▁call", "<|tool_call_begin", "<|tool_calls_")
_PYTHON_BEGINS: Final = ("<|python_start|>", "<|tool_call_start|>", "<function_calls>")
_FIRST_BEGIN: Final = re.compile(
    "|".join(map(re.escape, _BEGINS + _PYTHON_BEGINS)) + r"|\A\s*+(?:[\[{]|functools|<\|python_tag)"
)
_PYTHON: Final = re.compile(rf"(?:{'|'.join(map(re.escape, _PYTHON_BEGINS))})?\s*+(?=\[?\s*+([\w.]++)\()")
_PAIR: Final = re.compile(
    r"<(?:arg_key>(.*?)</arg_key>\s*<arg_value>|parameter=([^>]+)>\n?)(.*?)\n?</(?:arg|param)", re.DOTALL
)
# between the calls of an answer that has nothing else: the first one's other fields, and a list's;
# possessive, since a long blank answer or call could be divided between the parts in too many ways
_BETWEEN: Final = (
    r"\s*+(?:functools|<\|python_tag\|>)?"
    r'(?:\s*,\s*"\w+"\s*:\s*(?:"[^"\\]*"|\d+|null))*+[\s\[\]};,]*+'
)
_BARE: Final = [re.compile(_BETWEEN + form) for form in (_HEAD, r"(?=\{)")]
_BARE_BEGINS: Final = ("{", "[", "functools", "<|python_tag|>")
_CHANNEL_BEGINS: Final = ("<|channel|>", "<|start|>", "to=")
_CHANNEL_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MESSAGE: Final = "<|message|>"
_CHANNEL_END: Final = re.compile("|".join(map(re.escape, _CHANNEL_ENDS)))
_BEFORE_HEAD: Final = re.compile(r"<(?!\|(?:start|channel|constrain)\|>)")
_CALLED: Final = re.compile(r"to=functions\.([\w.-]+)")
_THOUGHT: Final = re.compile(r"to=|<\|channel\|>\s*analysis")
_TURN: Final = re.compile(r"[{}>]")  # without one no call begins or ends


Tools = Sequence[Mapping[str, Any]]


class _Call(NamedTuple):
    start: int  # in the text
    end: int
    name: str
    arguments: str  # so far
    is_open: bool = False  # more of them follow


class CallFinder:
    """Divides one answer into content, reasoning and calls."""

    def __init__(self, most: int | None, tools: Tools = (), *, in_channels: bool = False) -> None:
        """most  calls to take at most; 0: everything is content; None: any number
        tools  as the request has them: whether a pair's value is a text or JSON
        in_channels  the model writes as gpt-oss does
        """
        self._most = most
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._in_channels = in_channels
        self._text = ""
        self._message: str | None = None  # what is open in a channel; "": none is; None: none was yet
        self._python: re.Match[str] | Literal[False] | None = None  # before calls in Python; False: they are none
        self._waits: bool | None = None  # for a turn; True: in a call's arguments
        self._returned = 0  # characters of the content
        self._argument_chars: list[int] = []  # of each call, that were returned

    @property
    def num_found(self) -> int:
        return len(self._argument_chars)

    def push(self, text: str, *, ended: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """What this text adds to the content, to the reasoning and to the calls, as OpenAI streams
        them: a call's name with the begin of its arguments, then more of them. `ended`: no text
        follows."""
        if self._in_channels:
            self._text += text
            if self._message is not None or _may_begin(self._text, _CHANNEL_BEGINS):
                return self._read_channels(ended=ended)
            self._in_channels, text, self._text = False, self._text, ""  # a grammar's answer
        if self._most == 0:
            return text, "", []
        self._text += text
        if self._python is None and "(" in text and (begin := _FIRST_BEGIN.search(self._text)):
            found = _PYTHON.match(self._text, begin.start())
            self._python, self._waits = found is not None and found[1] in self._tools and found, None
        if self._python and not ended:  # read once
            return "", "", []
        if self._waits is not None and not (ended or _TURN.search(text)):  # else a long call is read at each token
            if not (self._waits and text):
                return "", "", []
            self._argument_chars[-1] += len(text)
            return "", "", [{"index": self.num_found - 1, "function": {"arguments": text}}]
        content, calls = self._divided(ended=ended)
        more, self._returned = content[self._returned :], len(content)
        if content and not calls:  # no bare call; "-" for what is read
            self._text, self._returned = "-" + self._text[len(content) :], 1
        added: list[dict[str, Any]] = []
        for index, (name, arguments) in enumerate(calls[: self._most]):
            if index == self.num_found:
                added.append(_new_call(index, name, arguments))
                self._argument_chars.append(len(arguments))
            elif rest := arguments[self._argument_chars[index] :]:
                added.append({"index": index, "function": {"arguments": rest}})
                self._argument_chars[index] = len(arguments)
        return more, "", added

    def _read_channels(self, *, ended: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """What `push` returns. All text that is read is dropped, so that none is read twice."""
        text, at = self._text, 0
        shown: dict[str, list[str]] = {"content": [], "reasoning": []}
        added: list[dict[str, Any]] = []
        while True:
            if not self._message:
                begin = text.find(_MESSAGE, at)
                if begin < 0:
                    break
                head, at = _BEFORE_HEAD.split(text[at:begin])[-1], begin + len(_MESSAGE)
                self._message = self._begun(head, added) if "<" in head else ""
                continue
            end = _CHANNEL_END.search(text, at)
            held = 0 if end or ended else max(overlap(text, each) for each in _CHANNEL_ENDS)
            last = end.start() if end else len(text) - held
            body, at = text[at:last], last
            if self._message == "call" and added:
                added[-1]["function"]["arguments"] += body
            elif self._message == "call" and body:
                added.append({"index": self.num_found - 1, "function": {"arguments": body}})
            elif self._message in shown:
                shown[self._message].append(body)
            if not end:
                break
            self._message = ""
        self._text = text[at:]
        return "".join(shown["content"]), "".join(shown["reasoning"]), added

    def _begun(self, head: str, added: list[dict[str, Any]]) -> str:
        """What the message behind `head` is; a call, with the function as recipient, is added."""
        called = _CALLED.search(head)
        if called is None:
            return "reasoning" if _THOUGHT.search(head) else "content"
        if self._most is not None and self.num_found >= self._most:
            return "a call too many"
        added.append(_new_call(self.num_found, called[1]))
        self._argument_chars.append(0)
        return "call"

    def _divided(self, *, ended: bool) -> tuple[str, list[tuple[str, str]]]:
        """The content that is certain by now, and name and arguments so far of each call."""
        text, self._waits = self._text, None
        if self._python and (found := python_calls(text[self._python.end() :], self._tools)):
            return text[: self._python.start()], found
        bare, at = _may_begin(text, _BARE_BEGINS), 0
        calls: list[_Call] = []
        while call := self._next_call(at, bare=bare):
            calls.append(call)
            at = call.end
        if calls:
            self._waits = True if calls[-1].is_open and len(calls) <= (self._most or len(calls)) else None
            return text[: calls[0].start], [call[2:4] for call in calls]
        if bare or ended:
            self._waits = False if text.lstrip().startswith(("{", "[")) else None
            return text if ended else "", []
        begins = _BEGINS if self._python is False else _BEGINS + _PYTHON_BEGINS
        opened = [at for begin in begins if (at := text.find(begin)) >= 0]
        held, self._waits = max(overlap(text, begin) for begin in begins), False if opened else None
        return text[: min([*opened, len(text) - held])], []

    def _next_call(self, at: int, *, bare: bool) -> _Call | None:
        found = [form.match(self._text, at) for form in _BARE] if bare else []
        found += [each for form in _TAGGED for each in form.finditer(self._text, at)]
        calls = [call for each in found if each and (call := self._read(each))]
        return min(calls, key=lambda call: call.start, default=None)

    def _read(self, found: re.Match[str]) -> _Call | None:
        """The call that begins with `found`; None if it is none, or not whole yet."""
        start, end = found.span()
        given, text = found.groupdict(), self._text
        if "pairs" in given:
            tool = self._tools.get(given["name"])
            if tool is None:
                return None
            kinds = (tool.get("parameters") or {}).get("properties") or {}
            pairs = {
                (key or named): _value(value, kinds.get(key or named))
                for key, named, value in _PAIR.findall(given["pairs"])
            }
            return _Call(start, end, given["name"], in_json(pairs))
        whole, last = _object_at(text, end)
        if "name" in given:
            return _Call(start, last, given["name"], text[end:last], is_open=whole is None)
        if whole is None:
            return None
        name, arguments = whole.get("name"), whole.get("arguments", whole.get("parameters"))
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            return None
        return _Call(start, last, name, in_json(arguments))


def _may_begin(text: str, forms: Sequence[str]) -> bool:
    """Whether a text, which may go on, begins with one of these."""
    lead = text.lstrip()
    return any(lead.startswith(form) or form.startswith(lead) for form in forms)


def _new_call(index: int, name: str, arguments: str = "") -> dict[str, Any]:
    head = {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
    return head | {"function": {"name": name, "arguments": arguments}}


def _value(text: str, schema: Any) -> Any:
    """A pair's value: as text where the tool wants one, else what it is in JSON, if it is."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _object_at(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The JSON object at `start` and its end; None, and the end of the text, if it has none."""
    try:
        found, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, len(text)
    return found, end
