"""Agent sessions as a load: each request is due when the answers that it waits for have come.

The prompts are those of the session, whatever the target answers: the parts that requests share are
the same text, byte for byte, so that a prefix cache finds in them what it would find in the
recorded traffic. Another play of a session has other text, except for what all sessions share.
"""

import random
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.manifest import RecordedSessions
from lmi_bench.core.scenario import WorkloadSection
from lmi_bench.core.sessions import Parts, Session, made_up, parse_agents, read_sessions
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.loadgen.prompts import prompts as texts
from lmi_bench.loadgen.prompts.dialogues import Following, NumTurns

ANSWER_S: Final = 0.03
"""Seconds a token that answers are taken to last where a session begins in its middle."""
SessionOf = Callable[[int], Session]  # a session by its number


@dataclass(eq=False, slots=True)
class Play:
    """A session in progress: the requests that are still to be sent, by their number in it."""

    waiting: dict[int, tuple[Following, set[int]]]

    def begin(self) -> list[Following]:
        """The requests that wait for none, each given once."""
        ready = [number for number, (_, awaited) in self.waiting.items() if not awaited]
        return [self.waiting.pop(number)[0] for number in ready]

    def after(self, request: PlannedRequest, _reply: Exchange | None) -> list[Following]:
        """The requests whose last awaited answer this one is."""
        for _, awaited in self.waiting.values():
            awaited.discard(request.turn)
        return self.begin()


@dataclass(eq=False)
class AgentSessions:
    """Sessions of a workload, over and over.

    begins_within  True: the first session of each lane of a closed loop begins when a random
                   request is due, as if it had been going on; the warm-up primes the cache
    recorded       kind and number of sessions, which are played again; None: endless
    """

    sessions: SessionOf
    text: texts.PromptText
    seed: int
    salt: str = ""
    ignore_eos: bool = True
    begins_within: bool = False
    recorded: RecordedSessions | None = None
    _prepared: dict[tuple[str, int], Play] = field(default_factory=dict)
    _primed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: WorkloadSection, text: texts.PromptText, *, seed: int, **options: Any) -> Self:
        """The workload's sessions: recorded ones, shuffled by the seed, or made up."""
        if workload.agent_trace is None:
            sessions: SessionOf = partial(made_up, parse_agents(workload.agents or ""), seed)
        else:
            recorded = read_sessions(Path(workload.agent_trace), workload.idle_cap_s)
            sessions = texts.over_and_over(recorded, f"{seed}/agents")
            options["recorded"] = RecordedSessions(recorded.kind, len(recorded))
        return cls(sessions, text, seed, begins_within=workload.begins_within, **options)

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """For the warm-up, with one token asked: a prompt that a lane which begins within a session
        had sent before, else text that no request of the level has."""
        primed = self.primed(level)
        lane, turn = primed[-1 - number] if -len(primed) <= number < 0 else (number, 0)
        return self._planned(level, lane, turn, number, output_tokens=1)

    def primed(self, level: LevelSpec) -> list[tuple[int, int]]:
        """(session, request) of the prompts that the warm-up primes a level's cache with."""
        lanes = (level.concurrency or 0) if self.begins_within else 0
        if lanes not in self._primed:
            each = ((lane, turn) for lane in range(lanes) for turn in self._sent(level, lane))
            self._primed[lanes] = list(each)
        return self._primed[lanes]

    def turns_at(self, level: LevelSpec) -> NumTurns:
        """Number of requests of each session at a level."""
        return lambda session: len(self._pauses_s(level, session))

    def prepare(self, level: LevelSpec, sessions: Iterable[tuple[int, int]], tokens: int) -> None:
        """Make the prompts of the first sessions (number, number of the first request), up to so
        many tokens, before the clock runs."""
        self._prepared = {}
        for session, first_number in sessions:
            play = self.begin(level, session, first_number)
            self._prepared[texts.level_place(level), session] = play
            tokens -= sum(each.request.input_tokens for each, _ in play.waiting.values())
            if tokens < 0:
                return

    def begin(self, level: LevelSpec, session: int, first_number: int) -> Play:
        """A session; its requests are numbered from `first_number`."""
        prepared = self._prepared.pop((texts.level_place(level), session), None)
        if prepared is not None:
            return prepared
        pauses_s, waiting = self._pauses_s(level, session), {}
        for number, (turn, pause_s) in enumerate(pauses_s.items(), start=first_number):
            planned = self._planned(level, session, turn, number, len(pauses_s))
            awaited = pauses_s.keys() & self.sessions(session)[turn].after
            waiting[turn] = Following(planned, pause_s), awaited
        return Play(waiting)

    def mean_lengths(self, count: int = 64) -> texts.Lengths:
        """Mean lengths of the requests of the first sessions, rounded to tokens."""
        return texts.mean_lengths([one for number in range(count) for one in self.sessions(number)])

    def _pauses_s(self, level: LevelSpec, session: int) -> dict[int, float]:
        """The requests that a session sends, and the pause of each after what it waits for, or
        after the session's start."""
        recorded = self.sessions(session)
        if not self.begins_within or session >= (level.concurrency or 0):
            return {turn: each.wait_s for turn, each in enumerate(recorded)}
        due_s: list[float] = []
        for each in recorded:
            ends_s = (due_s[n] + ANSWER_S * recorded[n].output_tokens for n in each.after)
            due_s.append(max(ends_s, default=0.0) + each.wait_s)
        now_s = random.Random(f"{self.seed}/within/{session}").choice(due_s)
        pauses_s = {turn: at_s - now_s for turn, at_s in enumerate(due_s) if at_s >= now_s}
        for turn in pauses_s:
            if not pauses_s.keys().isdisjoint(recorded[turn].after):
                pauses_s[turn] = recorded[turn].wait_s
        return pauses_s

    def _sent(self, level: LevelSpec, session: int) -> list[int]:
        """Of the requests that were before a lane's first ones, those that hold all that the later
        ones begin with: the last of each agent that goes on."""
        prompts = [each.parts for each in self.sessions(session)]
        ahead, best, found = self._pauses_s(level, session), [], list[int]()
        past = sorted(set(range(len(prompts))) - ahead.keys(), key=prompts.__getitem__)
        for turn in ahead if past else ():
            place = bisect(past, prompts[turn], key=prompts.__getitem__)
            beside = past[max(0, place - 1) : place + 1]  # no other begins with more of it
            best.append(max((_alike(prompts[each], prompts[turn]), each, turn) for each in beside))
        for alike, each, turn in sorted(best, reverse=True):
            if all(_alike(prompts[other], prompts[turn]) < alike for other in found):
                found.append(each)
        return found

    def _planned(
        self, level: LevelSpec, session: int, turn: int, number: int, of_turns: int = 0, output_tokens: int = 0
    ) -> PlannedRequest:
        each = self.sessions(session)[turn]
        planned = PlannedRequest(
            number,
            0.0,
            each.input_tokens,
            output_tokens or each.output_tokens,
            ignore_eos=self.ignore_eos,
            session=None if number < 0 else session,
            turn=turn,
            of_turns=of_turns,
        )
        everywhere = f"{self.seed}/{self.salt}"
        own = f"{everywhere}/{texts.level_place(level)}/{session}"
        if self.recorded:  # what sessions share is new in each play of all of them
            play = session // self.recorded.number
            everywhere = f"{everywhere}/{texts.level_place(level)}/play {play}"
        parts = [
            (tokens, random.Random(f"{everywhere if key[0] == '/' else own}/part {key}")) for key, tokens in each.parts
        ]
        return self.text(planned, random.Random(f"{own}/{turn}"), parts)


def _alike(one: Parts, other: Parts) -> int:
    """Number of parts that two prompts begin with."""
    unlike = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unlike, min(len(one), len(other)))
