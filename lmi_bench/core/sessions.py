"""Agent sessions: requests that wait for each other's answers, recorded or made up.

Recorded ones, in a file (JSON, JSON lines) or a folder of *.json, are of three kinds:

Weka's: an object for each session, with `requests` of `t` (s), `in`, `out` (tokens), `hash_ids` of
blocks of `block_size` tokens and `api_time` (s), and, among them, `subagent` entries with requests
of their own. A request waits for the one before it and for the sub-agents between the two, unless
they were launched without waiting.
Qwen-Bailian's: a line for each request, with `chat_id`, `parent_chat_id` (whose answer it waits
for), `timestamp` (s), `input_length`, `output_length`, `hash_ids` of blocks of 16 tokens.
OpenTelemetry's (OTLP/JSON): a session is a trace, a request a span with `gen_ai.usage` of input and
output tokens. It waits for the calls that ended last before it, looked for in the innermost span
around it first: an agent's calls follow each other, its first call follows its parent's last one.

The wait is the recorded time from the last of these answers to the request.
"""

import math
import random
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from lmi_bench.core import lengths
from lmi_bench.core.durable import json_values, read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.traces import MAY_MISFIT, MOST_STAMP_S, block_tokens_of, trace_request

WEKA_BLOCK_TOKENS: Final = 64
_LAUNCHED: Final = "async_launched"  # a sub-agent that its parent does not wait for
_MOST_NESTED: Final = 8
_AGENT_KINDS: Final = ("gen_ai.operation.name", "openinference.span.kind", "traceloop.span.kind")

Parts = tuple[tuple[str, int], ...]
"""(key, tokens) of the parts of a prompt in order: equal keys are equal text. A key that begins
with a slash is the same text in all sessions, any other in the requests of one session."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One request of a session.

    after   numbers of the requests whose answers it waits for; empty: the session's start
    wait_s  seconds from the last of these answers to its sending: tools, thought
    """

    input_tokens: int
    output_tokens: int
    parts: Parts
    after: tuple[int, ...] = ()
    wait_s: float = 0.0


_Times = dict[str, tuple[float, float]]  # start and end in seconds
Session = tuple[SessionRequest, ...]
"""The requests of a session; each waits only for earlier ones."""


class Recorded(list[Session]):
    """Sessions of a recording, and its kind: weka, bailian, otel, or several."""

    kind: str = ""


def read_sessions(path: Path, idle_cap_s: float | None = None) -> Recorded:
    """The sessions of a file or of the *.json files of a folder.

    idle_cap_s  longer gaps between the starts of a session's requests are shortened to this

    Raises InputError that names the file and what cannot be read of it.
    """
    found: list[list[_Recorded]] = []
    kinds = set()
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        entries = json_values(read_text(file), file)
        keys = {key for entry in entries if isinstance(entry, dict) for key in entry}
        kind, read = next((kind for key, kind in _KINDS.items() if key in keys), ("weka", _weka))
        kinds.add(kind)
        try:
            found += filter(None, read(entries))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
            raise InputError(
                f"{file} cannot be read as sessions of Weka's, Qwen-Bailian's or OpenTelemetry's kind: {exc!r}"
            ) from exc
    requests = [each for session in found for each in session]
    if not requests:
        raise InputError(f"{path} holds no session with a request")
    if len(odd := [each for each in requests if not each.fits]) > MAY_MISFIT * len(requests):
        size = odd[0].parts[0][1]
        raise InputError(f"{path}: {len(odd):,} requests do not fit blocks of {size} tokens")
    if sum(each.of_session for each in requests) <= 0:
        for each in requests:
            each.start_s += each.within_s
    sessions = Recorded(_session(session, idle_cap_s, path) for session in found)
    sessions.kind = " and ".join(sorted(kinds))
    return sessions


@dataclass(slots=True)
class _Recorded:
    """A request as recorded; `after` by its place in the list.

    within_s    start of the sub-agents around it, from where its own counts, unless the majority
    of_session  of sub-agents' first requests (1 for, -1 against) counts from the session's
    fits        whether it has as many ids as its prompt has blocks
    """

    start_s: float
    took_s: float
    input_tokens: int
    output_tokens: int
    parts: Parts
    after: tuple[int, ...]
    within_s: float = 0.0
    of_session: int = 0
    fits: bool = True

    def __post_init__(self) -> None:
        at_s = abs(self.start_s) + abs(self.within_s)
        if not (at_s <= MOST_STAMP_S and abs(self.took_s) <= lengths.MOST_TIME_S):
            raise ValueError("times must be finite and below 1e11 s")
        if max(self.input_tokens, self.output_tokens) > lengths.MOST_TOKENS:
            raise ValueError(f"a request has more than {lengths.MOST_TOKENS:,} tokens")

    @property
    def end_s(self) -> float:
        return self.start_s + self.took_s


def _session(found: Sequence[_Recorded], idle_cap_s: float | None, path: Path) -> Session:
    cut_s = last_s = min(each.start_s for each in found)  # it begins with its first request
    for each in sorted(found, key=lambda each: each.start_s):  # idle gaps are cut
        cut_s += max(0.0, each.start_s - last_s - (math.inf if idle_cap_s is None else idle_cap_s))
        last_s, each.start_s = each.start_s, each.start_s - cut_s
    requests = []
    for each in found:
        wait_s = each.start_s - max((found[number].end_s for number in each.after), default=0.0)
        if wait_s > lengths.MOST_TIME_S:
            raise InputError(f"{path}: a request waits for more than 30 years")
        tokens = each.input_tokens, each.output_tokens
        requests.append(SessionRequest(*tokens, each.parts, each.after, max(0.0, wait_s)))
    return tuple(requests)


def _weka(entries: Sequence[Any]) -> Iterator[list[_Recorded]]:
    for content in entries:
        found: list[_Recorded] = []
        scope = content.get("hash_id_scope") or "local"
        if scope not in ("local", "global"):
            raise ValueError(f"hash_id_scope must be local or global, got {scope!r}")
        block = "/" * (scope == "global"), int(content.get("block_size", WEKA_BLOCK_TOKENS))
        _follow(content["requests"], 0.0, (), found, block, 0)
        yield found


def _bailian(entries: Sequence[Mapping[str, Any]]) -> Iterator[list[_Recorded]]:
    """A parent that the file does not have leaves its children sessions of their own. Times of
    answers are not recorded: a wait is the time from the parent's start."""
    sessions: dict[str, list[_Recorded]] = {}
    places: dict[str, tuple[Any, ...]] = {}
    rows = [(trace_request(row), row) for row in entries]
    block = block_tokens_of(entries[0], [each for each, _ in rows])
    for each, row in sorted(rows, key=lambda pair: (pair[0].at_s, pair[1].get("turn") or 0)):
        chat, tokens = str(row["chat_id"]), (each.input_tokens, each.output_tokens)
        root, *after = places.get(str(row["parent_chat_id"]), (chat,))
        if min(tokens) < 1:  # left out: its children follow what it followed
            places.update({chat: (root, *after)} if after else {})
            continue
        session = sessions.setdefault(root, [])
        places[chat] = root, len(session)
        at_s = each.at_s - (session[0].start_s if session else 0.0)
        parts = tuple((f"/{number}", block) for number in each.hash_ids)
        session.append(_Recorded(at_s, 0.0, *tokens, parts, tuple(after)))
    for session in sessions.values():
        session[0].start_s = 0.0
        yield session


def _follow(
    entries: Sequence[Mapping[str, Any]],
    within_s: float,
    before: tuple[int, ...],
    found: list[_Recorded],
    block: tuple[str, int],
    depth: int,
) -> tuple[int, ...]:
    """Add an agent's requests; returns the numbers of those that its parent waits for.

    within_s  start of the agent, if its times count from there
    before    the requests that its first one waits for
    block     what an id's key begins with, and the tokens of its block
    """
    if depth > _MOST_NESTED:
        raise ValueError(f"sub-agents more than {_MOST_NESTED} deep")
    last, waited = before, set(before)
    for entry in entries:
        at_s = float(entry["t"])
        if entry["type"] == "subagent":
            inner, number = entry["requests"], len(found)
            ended = _follow(inner, within_s + at_s, last, found, block, depth + 1)
            if at_s > 0 and number < len(found):
                first_s = min(float(each["t"]) for each in inner)
                found[number].of_session += 1 if first_s > at_s / 2 else -1
            if entry.get("status") != _LAUNCHED:
                waited |= set(ended)
            continue
        input_tokens, output_tokens = int(entry["in"]), int(entry["out"])
        took_s = float(entry.get("api_time") or 0.0)
        if input_tokens > 0 and output_tokens > 0:
            key, size = block
            parts = tuple((f"{key}{int(each)}", size) for each in entry.get("hash_ids") or ())
            each = _Recorded(
                at_s,
                took_s,
                input_tokens,
                output_tokens,
                parts,
                tuple(sorted(waited)),
                within_s,
                fits=not parts or 0 <= len(parts) - input_tokens // size <= 1,
            )
            found.append(each)
            last = (len(found) - 1,)
            waited = set(last)
    return tuple(waited)


def _open_telemetry(entries: Sequence[Mapping[str, Any]]) -> Iterator[list[_Recorded]]:
    spans = {
        (span["traceId"], span["spanId"]): span
        for entry in entries
        for resource in entry.get("resourceSpans") or ()
        for scope in resource.get("scopeSpans") or ()
        for span in scope.get("spans") or ()
    }
    paths = {place: _path(spans, *place) for place, span in spans.items() if min(_usage(span)) > 0}
    # a framework's span around the client's has the same usage
    outer = {(trace, above) for (trace, _), path in paths.items() for above in path[:-1]}
    agents = {place for place in outer if _is_agent(spans[place])}
    traces: dict[str, dict[tuple[str, ...], Mapping[str, Any]]] = {}
    for place in sorted(paths, key=lambda place: int(spans[place]["startTimeUnixNano"])):
        if place not in outer:
            traces.setdefault(place[0], {})[paths[place]] = spans[place]
    for trace, calls in traces.items():
        yield _calls_of(calls, {number for of, number in agents if of == trace})


def _path(spans: Mapping[tuple[str, str], Any], trace: str, number: str) -> tuple[str, ...]:
    """The spans of the file around a span, the outermost first, and itself."""
    path = [number]
    while (trace, above := spans[trace, path[-1]].get("parentSpanId")) in spans:
        if above in path:
            raise ValueError(f"span {above} is inside itself")
        path.append(above)
    return tuple(reversed(path))


def _calls_of(calls: Mapping[tuple[str, ...], Mapping[str, Any]], agents: Container[str]) -> list[_Recorded]:
    """A trace's calls by their paths. Each waits for what ended last before it in the innermost
    span around it that has such. What prompts share is not recorded: one with room for the longest
    prompt of its own agent before it, and its answer, is taken to begin with both."""
    found: list[_Recorded] = []
    numbers = {path[-1]: number for number, path in enumerate(calls)}
    begins_s = min(int(span["startTimeUnixNano"]) for span in calls.values()) / 1e9
    inside: dict[str, _Times] = {}  # each span: what is in it, with the times of its calls
    for path, span in calls.items():
        times = (int(span[f"{at}TimeUnixNano"]) / 1e9 - begins_s for at in ("start", "end"))
        start_s, end_s = times
        found.append(_Recorded(start_s, end_s - start_s, *_usage(span), (), ()))
        for above, below in pairwise(("", *path)):
            first_s, last_s = inside.setdefault(above, {}).get(below, (start_s, end_s))
            inside[above][below] = first_s, max(last_s, end_s)
    own: dict[str, _Times] = {}
    for path, call in zip(calls, found, strict=True):
        around = (_ended_last(inside[above], call.start_s) for above in ("", *path)[-2::-1])
        todo, awaited = next(filter(None, around), []), []
        for span_id in todo:  # which grows
            todo += _ended_last(inside.get(span_id, {}), math.inf)
            if numbers.get(span_id, math.inf) < numbers[path[-1]]:
                awaited.append(span_id)
        call.after = tuple(sorted(numbers[each] for each in awaited))
        mine = own.setdefault(next((each for each in path[-2::-1] if each in agents), ""), {})
        before = [each for each in awaited if each in mine] or _ended_last(mine, call.start_s)
        for number in sorted(map(numbers.__getitem__, before), key=lambda n: found[n].input_tokens):
            earlier = found[number]
            if earlier.input_tokens + earlier.output_tokens <= call.input_tokens:
                call.parts = (*earlier.parts, (f"answer{number}", earlier.output_tokens))
        if rest := call.input_tokens - sum(tokens for _, tokens in call.parts):
            call.parts += ((f"own{numbers[path[-1]]}", rest),)
        mine[path[-1]] = call.start_s, call.end_s
    return found


def _ended_last(times_s: _Times, at_s: float) -> list[str]:
    """What ended before a time, and after the latest start of what did."""
    ended = {each: times for each, times in times_s.items() if times[1] <= at_s}
    latest_s = max((start_s for start_s, _ in ended.values()), default=0.0)
    return [each for each, (_, end_s) in ended.items() if end_s >= latest_s]


def _stated(span: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {each["key"]: each["value"] for each in span.get("attributes") or ()}


def _is_agent(span: Mapping[str, Any]) -> bool:
    """Whether a span is marked as an agent's, as OpenTelemetry, OpenInference or Traceloop do, or
    as a tool's: what that asks of a model has a context of its own."""
    kinds = [_stated(span).get(name, {}).get("stringValue") for name in _AGENT_KINDS]
    marks = {str(mark).lower() for mark in (str(span.get("name")).partition(" ")[0], *kinds)}
    return not marks.isdisjoint(("invoke_agent", "agent", "execute_tool", "tool"))


def _usage(span: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens in and out of a span; 0 where it does not state them."""
    stated, asked_answered = _stated(span), []
    for names in (("input", "prompt"), ("output", "completion")):
        keys = (*(f"gen_ai.usage.{name}_tokens" for name in names), f"llm.token_count.{names[1]}")
        found: Mapping[str, Any] = next((stated[key] for key in keys if key in stated), {})
        asked_answered.append(int(found.get("intValue", found.get("doubleValue", 0))))
    return asked_answered[0], asked_answered[1]


_KINDS: Final = {"chat_id": ("bailian", _bailian), "resourceSpans": ("otel", _open_telemetry)}


@dataclass(frozen=True, slots=True)
class AgentShape:
    """What made-up sessions are drawn from, in tokens and seconds.

    steps      calls of the main agent, each with the context so far; sub_steps: of a sub-agent
    fan_chance  chance that a call starts sub-agents, whose answers the next call waits for; fan:
               their number
    system     instructions and tools, the same text in all sessions; task: a session's own
    result     what a tool, or a sub-agent, adds to the context; answer: what a call generates
    context    most tokens of a call, input and output: an agent ends at a call that would be longer
    wait       seconds of a tool
    """

    steps: lengths.LengthDistribution
    fan: lengths.LengthDistribution
    sub_steps: lengths.LengthDistribution
    system: lengths.LengthDistribution
    task: lengths.LengthDistribution
    result: lengths.LengthDistribution
    answer: lengths.LengthDistribution
    context: lengths.LengthDistribution
    wait: lengths.Pauses
    fan_chance: float


USUAL_AGENTS: Final = (
    "steps=uniform(6,18),fan=uniform(2,4),sub_steps=uniform(2,6),system=4000,"
    "task=lognormal(1500,1500),result=lognormal(800,1000),answer=lognormal(200,200),context=32768,"
    "wait=lognormal(2,3),fan_chance=0.15"
)


def parse_agents(text: str) -> AgentShape:
    """Read NAME=VALUE,...; what is not named is as in `USUAL_AGENTS`. Raises InputError for others.

    >>> parse_agents("steps=4,wait=exponential(2)").steps.most
    4
    """
    read: dict[str, Any] = {}
    known = [each.name for each in fields(AgentShape)]
    for part in re.split(r",(?![^(]*\))", f"{USUAL_AGENTS},{text}".replace(" ", "").rstrip(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise InputError(f"agents: no {part!r}; known are {', '.join(known)}, as in steps=8")
        if name != "fan_chance":
            read[name] = (lengths.parse_seconds if name == "wait" else lengths.parse_lengths)(value)
            continue
        if re.fullmatch(r"(0|1)(\.0*)?|0?\.\d+", value) is None:
            raise InputError(f"agents: fan_chance is a number from 0 to 1, got {value!r}")
        read[name] = float(value)
    return AgentShape(**read)


@lru_cache(maxsize=1024)
def made_up(shape: AgentShape, seed: int, number: int) -> Session:
    """A session by its number: tool calls of a growing context, and sub-agents side by side."""
    system = shape.system.draw(random.Random(f"{seed}/system"))
    making = _Making(shape, random.Random(f"{seed}/agents/{number}"), ("/system", system))
    making.main()
    return tuple(making.found)


@dataclass(slots=True)
class _Making:
    """A session in the making: the requests so far."""

    shape: AgentShape
    draw: random.Random
    system: tuple[str, int]
    found: list[SessionRequest] = field(default_factory=list)

    def main(self) -> None:
        shape, draw = self.shape, self.draw
        context: Parts = (self.system, ("task", shape.task.draw(draw)))
        after: tuple[int, ...] = ()
        for _ in range(shape.steps.draw(draw)):
            ended = self.call(context, after, shape.wait.draw(draw) if after else 0.0)
            if ended is None:
                break
            context, after = context + ended, (len(self.found) - 1,)
            if draw.random() < shape.fan_chance:
                wait_s, parents = shape.wait.draw(draw), after
                count = shape.fan.draw(draw)
                after = tuple(self.sub_agent(parents, wait_s) for _ in range(count))
                reports = {number: shape.result.draw(draw) for number in after}
                context += tuple((f"report{key}", tokens) for key, tokens in reports.items())

    def sub_agent(self, after: tuple[int, ...], wait_s: float) -> int:
        """The number of its last request; it starts with the others of its fan-out."""
        own = (f"task{len(self.found)}", self.shape.task.draw(self.draw))
        context: Parts = (self.system, own)
        for _ in range(self.shape.sub_steps.draw(self.draw)):
            ended = self.call(context, after, wait_s)
            if ended is None:
                break
            context, after = context + ended, (len(self.found) - 1,)
            wait_s = self.shape.wait.draw(self.draw)
        return after[0]

    def call(self, context: Parts, after: tuple[int, ...], wait_s: float) -> Parts | None:
        """Add a call; what it adds to the context, or None if it would be too long."""
        number, answer = len(self.found), self.shape.answer.draw(self.draw)
        tokens = sum(part[1] for part in context)
        longest = self.shape.context.most
        if not number:  # a session has at least one
            tokens, answer = min(tokens, longest - 1), min(answer, max(1, longest - tokens))
        if tokens + answer > longest:
            return None
        self.found.append(SessionRequest(tokens, answer, context, after, wait_s))
        return (f"answer{number}", answer), (f"result{number}", self.shape.result.draw(self.draw))
