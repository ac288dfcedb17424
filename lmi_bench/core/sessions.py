"""Agent sessions: requests that wait for each other's answers, recorded or made up.

Recorded ones, in a file (JSON, JSON lines) or a folder of *.json, are of three kinds:

Weka's: an object for each session, with `requests` of `t` (s), `in`, `out` (tokens), `hash_ids` of
blocks of `block_size` tokens and `api_time` (s), and, among them, `subagent` entries with requests
of their own. A request waits for the one before it and for the sub-agents between the two, unless
they were launched without waiting.
Qwen-Bailian's: a line for each request, with `chat_id`, `parent_chat_id` (whose answer it waits
for), `timestamp` (s), `input_length`, `output_length`, `hash_ids` of blocks of 16 tokens.
OpenTelemetry's (OTLP/JSON): a session is a trace, a request a span with `gen_ai.usage` of input and
output tokens. It waits for those that ended last before it began in the nearest span around it that
has such: an agent's calls follow each other, its first one the parent's last before it.

The wait is the recorded time from the last of these answers to the request.
"""

import math
import random
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from lmi_bench.core import lengths
from lmi_bench.core.durable import json_values, read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.traces import BAILIAN_BLOCK_TOKENS, MOST_STAMP_S

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


Session = tuple[SessionRequest, ...]
"""The requests of a session; each waits only for earlier ones."""


def read_sessions(path: Path, idle_cap_s: float | None = None) -> list[Session]:
    """The sessions of a file or of the *.json files of a folder.

    idle_cap_s  longer gaps between the starts of a session's requests are shortened to this

    Raises InputError that names the file and what cannot be read of it.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    sessions: list[Session] = []
    for file in files:
        entries = json_values(read_text(file), file)
        keys = {key for entry in entries if isinstance(entry, dict) for key in entry}
        read = next((kind for key, kind in _KINDS.items() if key in keys), _weka)
        try:
            sessions += [_session(found, idle_cap_s) for found in read(entries) if found]
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
            raise InputError(
                f"{file} cannot be read as sessions of Weka's, Qwen-Bailian's or OpenTelemetry's "
                f"kind: {exc!r}"
            ) from exc
    if not sessions:
        raise InputError(f"{path} holds no session with a request")
    return sessions


@dataclass(slots=True)
class _Recorded:
    """A request as recorded; `after` by its place in the list."""

    start_s: float
    took_s: float
    input_tokens: int
    output_tokens: int
    parts: Parts
    after: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (abs(self.start_s) <= MOST_STAMP_S and abs(self.took_s) <= lengths.MOST_TIME_S):
            raise ValueError("times must be finite and below 1e11 s")
        if max(self.input_tokens, self.output_tokens) > lengths.MOST_TOKENS:
            raise ValueError(f"a request has more than {lengths.MOST_TOKENS:,} tokens")

    @property
    def end_s(self) -> float:
        return self.start_s + self.took_s


def _session(found: Sequence[_Recorded], idle_cap_s: float | None) -> Session:
    shifts_s = _shifts_s(found, idle_cap_s)
    requests = []
    for each in found:
        ends_s = [found[number].end_s - shifts_s[found[number].start_s] for number in each.after]
        wait_s = each.start_s - shifts_s[each.start_s] - max(ends_s, default=0.0)
        if wait_s > lengths.MOST_TIME_S:
            raise ValueError("a request waits for more than 30 years")
        tokens = each.input_tokens, each.output_tokens
        requests.append(SessionRequest(*tokens, each.parts, each.after, max(0.0, wait_s)))
    return tuple(requests)


def _check_blocks(found: Sequence[_Recorded], block: int, place: str) -> None:
    """Raise ValueError where the numbers of ids are not those of the prompts' blocks."""
    with_ids = [each for each in found if each.parts]
    misfits = sum(not 0 <= len(x.parts) - x.input_tokens // block <= 1 for x in with_ids)
    if misfits > 0.01 * len(found):
        raise ValueError(f"{place}: {misfits} requests do not fit blocks of {block} tokens")


def _weka(entries: Sequence[Any]) -> Iterator[list[_Recorded]]:
    for number, content in enumerate(entries, start=1):
        found: list[_Recorded] = []
        block = int(content.get("block_size", WEKA_BLOCK_TOKENS))
        _follow(content["requests"], 0.0, (), found, block, 0)
        _check_blocks(found, block, f"session {number}")
        yield found


def _bailian(entries: Sequence[Mapping[str, Any]]) -> Iterator[list[_Recorded]]:
    """A parent that the file does not have leaves its children sessions of their own. Times of
    answers are not recorded: a wait is the time from the parent's start."""
    sessions: dict[str, list[_Recorded]] = {}
    places: dict[str, tuple[str, int]] = {}
    for row in sorted(entries, key=lambda row: float(row["timestamp"])):
        chat, asked, answered = str(row["chat_id"]), int(row["input_length"]), row["output_length"]
        root, *after = places.get(str(row["parent_chat_id"]), (chat,))
        session = sessions.setdefault(root, [])
        parts = tuple((f"/{number}", BAILIAN_BLOCK_TOKENS) for number in row.get("hash_ids") or ())
        if asked > 0 and int(answered) > 0:
            places[chat] = root, len(session)
            at_s = float(row["timestamp"]) - (session[0].start_s if session else 0.0)
            session.append(_Recorded(at_s, 0.0, asked, int(answered), parts, tuple(after)))
    for session in sessions.values():
        if session:
            session[0].start_s = 0.0
        _check_blocks(session, BAILIAN_BLOCK_TOKENS, "a conversation")
        yield session


def _follow(
    entries: Sequence[Mapping[str, Any]],
    offset_s: float,
    before: tuple[int, ...],
    found: list[_Recorded],
    block: int,
    depth: int,
) -> tuple[int, ...]:
    """Add an agent's requests; returns the numbers of those that its parent waits for.

    offset_s  start of the agent, if its times count from there
    before    the requests that its first one waits for
    block     tokens of a block with an id
    """
    if depth > _MOST_NESTED:
        raise ValueError(f"sub-agents more than {_MOST_NESTED} deep")
    last, waited = before, set(before)
    for entry in entries:
        at_s = offset_s + float(entry["t"])
        if entry["type"] == "subagent":
            inner = entry["requests"]
            first_s = min((float(each["t"]) for each in inner), default=math.inf)
            starts_s = at_s if first_s < float(entry["t"]) else offset_s
            ended = _follow(inner, starts_s, last, found, block, depth + 1)
            if entry.get("status") != _LAUNCHED:
                waited |= set(ended)
            continue
        input_tokens, output_tokens = int(entry["in"]), int(entry["out"])
        took_s = float(entry.get("api_time") or 0.0)
        if input_tokens > 0 and output_tokens > 0:
            parts = tuple((str(int(each)), block) for each in entry.get("hash_ids") or ())
            after = tuple(sorted(waited))
            found.append(_Recorded(at_s, took_s, input_tokens, output_tokens, parts, after))
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


@dataclass(slots=True, eq=False)
class _Place:
    """A call, or a span with calls in it: first start, last end, number of the first."""

    start_s: float
    end_s: float
    number: int
    inside: dict[str, "_Place"] = field(default_factory=dict)

    def ended_last(self, at_s: float) -> list["_Place"]:
        """Those inside that ended before a time, after the latest start among them."""
        ended = [each for each in self.inside.values() if each.end_s <= at_s]
        latest_s = max((each.start_s for each in ended), default=0.0)
        return [each for each in ended if each.end_s >= latest_s]


def _calls_of(
    calls: Mapping[tuple[str, ...], Mapping[str, Any]], agents: Container[str]
) -> list[_Recorded]:
    """A trace's calls by their paths. Each waits for what ended last before it in the innermost
    span around it that has such, and carries the context of its own agent only."""
    found: list[_Recorded] = []
    lines: list[list[_Place]] = []
    trace, begins_s = _Place(0.0, 0.0, 0), math.nan
    for number, (path, span) in enumerate(calls.items()):
        start_s, end_s = (int(span[f"{at}TimeUnixNano"]) / 1e9 for at in ("start", "end"))
        begins_s = begins_s if number else start_s
        start_s, end_s = start_s - begins_s, end_s - begins_s
        found.append(_Recorded(start_s, end_s - start_s, *_usage(span), (), ()))
        lines.append([trace])
        for each in path:
            place = lines[-1][-1].inside.setdefault(each, _Place(start_s, end_s, number))
            place.end_s = max(place.end_s, end_s)
            lines[-1].append(place)
    own: dict[str | None, _Place] = {}
    for number, (path, line, call) in enumerate(zip(calls, lines, found, strict=True)):
        lasts = (around.ended_last(call.start_s) for around in reversed(line[:-1]))
        todo, awaited = next(filter(None, lasts), []), []
        while todo:
            place = todo.pop()
            todo += place.ended_last(math.inf)
            awaited += [] if place.inside or place.number >= number else [place]
        call.after = tuple(sorted(place.number for place in awaited))
        agent = next((above for above in reversed(path[:-1]) if above in agents), None)
        mine = own.setdefault(agent, _Place(0.0, 0.0, 0))
        before = [each for each in awaited if each in mine.inside.values()]
        call.parts = _grown(call, number, found, before or mine.ended_last(call.start_s))
        mine.inside[path[-1]] = line[-1]
    return found


def _grown(
    call: _Recorded, number: int, found: Sequence[_Recorded], before: Sequence[_Place]
) -> Parts:
    """What prompts share is not recorded: one with room for the longest prompt of those before it,
    and its answer, is taken to begin with both, as an agent's growing context does."""
    context: Parts = ()
    for place in sorted(before, key=lambda place: found[place.number].input_tokens):
        each = found[place.number]
        if each.input_tokens + each.output_tokens <= call.input_tokens:
            context = (*each.parts, (f"answer{place.number}", each.output_tokens))
    own = call.input_tokens - sum(tokens for _, tokens in context)
    return (*context, (f"own{number}", own)) if own else context


def _stated(span: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {each["key"]: each["value"] for each in span.get("attributes") or ()}


def _is_agent(span: Mapping[str, Any]) -> bool:
    """Whether a span is marked as an agent's, as OpenTelemetry, OpenInference or Traceloop do."""
    stated = _stated(span)
    kinds = (stated.get(name, {}).get("stringValue", "") for name in _AGENT_KINDS)
    marks = (str(span.get("name", "")).partition(" ")[0], *kinds)
    return any(mark.lower() in ("invoke_agent", "agent") for mark in marks)


def _usage(span: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens in and out of a span; 0 where it does not state them."""
    stated = _stated(span)

    def tokens(*names: str) -> int:
        found: Mapping[str, Any] = next((stated[n] for n in names if n in stated), {})
        return int(found.get("intValue", found.get("doubleValue", 0)))

    return (
        tokens("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        tokens("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    )


_KINDS: Final = {"chat_id": _bailian, "resourceSpans": _open_telemetry}


def _shifts_s(found: Sequence[_Recorded], idle_cap_s: float | None) -> dict[float, float]:
    """How much earlier a request that was recorded at this time starts when idle gaps are cut."""
    shifts_s: dict[float, float] = {}
    cut_s, last_s = 0.0, 0.0
    for start_s in sorted({each.start_s for each in found}):
        cut_s += max(0.0, start_s - last_s - (math.inf if idle_cap_s is None else idle_cap_s))
        shifts_s[start_s], last_s = cut_s, start_s
    return shifts_s


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
        if re.fullmatch(r"0|1|0?\.\d+", value) is None:
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
