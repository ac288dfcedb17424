"""Agent sessions: requests that wait for each other's answers, recorded or made up.

Recorded ones are Weka's: a JSON object for each session, in a file, in JSON lines or in a folder,
with `requests` of `t` (s), `in`, `out` (tokens), `hash_ids` of blocks of `block_size` tokens and
`api_time` (s), and, among them, `subagent` entries with requests of their own. A request waits for
the one before it and for the sub-agents between the two, unless they were launched without waiting;
the wait is the recorded time from the last of these answers to it.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.durable import json_values, read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import LengthDistribution, Pauses, parse_lengths, parse_seconds

WEKA_BLOCK_TOKENS: Final = 64
_LAUNCHED: Final = "async_launched"  # a sub-agent that its parent does not wait for
_MOST_NESTED: Final = 8

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
    found = [
        _weka(content, f"{file}: session {number}", idle_cap_s)
        for file in files
        for number, content in enumerate(json_values(read_text(file), file), start=1)
    ]
    sessions = [session for session in found if session]
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
    hash_ids: Sequence[int]
    after: tuple[int, ...]


def _weka(content: Any, place: str, idle_cap_s: float | None) -> Session:
    try:
        entries, block = content["requests"], int(content.get("block_size", WEKA_BLOCK_TOKENS))
        found: list[_Recorded] = []
        _follow(entries, 0.0, (), found, 0)
        with_ids = [each for each in found if each.hash_ids]
        spare = [len(each.hash_ids) - each.input_tokens // block for each in with_ids]
        misfits = sum(not 0 <= each <= 1 for each in spare)
        if misfits > 0.01 * len(found):
            raise ValueError(f"{misfits} requests do not fit blocks of {block} tokens")
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
        raise InputError(
            f"{place} is not one of Weka's (requests with t, in, out, hash_ids): {exc!r}"
        ) from exc
    shifts_s = _shifts_s(found, idle_cap_s)
    requests = []
    for each in found:
        parents = [found[number] for number in each.after]
        ends_s = [p.start_s + p.took_s - shifts_s[p.start_s] for p in parents]
        wait_s = each.start_s - shifts_s[each.start_s] - max(ends_s, default=0.0)
        parts = tuple((str(number), block) for number in each.hash_ids)
        tokens = each.input_tokens, each.output_tokens
        requests.append(SessionRequest(*tokens, parts, each.after, max(0.0, wait_s)))
    return tuple(requests)


def _follow(
    entries: Sequence[Mapping[str, Any]],
    offset_s: float,
    before: tuple[int, ...],
    found: list[_Recorded],
    depth: int,
) -> tuple[int, ...]:
    """Add an agent's requests; returns the numbers of those that its parent waits for.

    offset_s  start of the agent, if its times count from there
    before    the requests that its first one waits for
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
            ended = _follow(inner, starts_s, last, found, depth + 1)
            if entry.get("status") != _LAUNCHED:
                waited |= set(ended)
            continue
        input_tokens, output_tokens = int(entry["in"]), int(entry["out"])
        took_s = float(entry.get("api_time") or 0.0)
        if not math.isfinite(at_s) or not math.isfinite(took_s):
            raise ValueError("times must be finite")
        if input_tokens > 0 and output_tokens > 0:
            ids = [int(each) for each in entry.get("hash_ids") or ()]
            after = tuple(sorted(waited))
            found.append(_Recorded(at_s, took_s, input_tokens, output_tokens, ids, after))
            last = (len(found) - 1,)
            waited = set(last)
    return tuple(waited)


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

    steps: LengthDistribution
    fan: LengthDistribution
    sub_steps: LengthDistribution
    system: LengthDistribution
    task: LengthDistribution
    result: LengthDistribution
    answer: LengthDistribution
    context: LengthDistribution
    wait: Pauses
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
            read[name] = (parse_seconds if name == "wait" else parse_lengths)(value)
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
