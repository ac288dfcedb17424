"""Agent sessions as a load: each request is due when the answers that it waits for have come.

The prompts are those of the session, whatever the target answers: the parts that requests share are
the same text, byte for byte, so that a prefix cache finds in them what it would find in the
recorded traffic. Another play of a session has other text, except for what all sessions share.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.scenario import WorkloadSection
from lmi_bench.core.sessions import Session, made_up, parse_agents, read_sessions
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.loadgen.prompts import prompts as texts
from lmi_bench.loadgen.prompts.dialogues import Following, NumTurns

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

    begins_within  True: the first session of each lane of a closed loop begins at a random request,
                   as if it had been going on; the warm-up primes the cache with what was before
    recorded       number of sessions, after which they are played again; None: endless
    """

    sessions: SessionOf
    text: texts.PromptText
    seed: int
    salt: str = ""
    ignore_eos: bool = True
    begins_within: bool = False
    recorded: int | None = None
    _prepared: dict[tuple[str, int], Play] = field(default_factory=dict)

    @classmethod
    def of(
        cls, workload: WorkloadSection, text: texts.PromptText, *, seed: int, **options: Any
    ) -> Self:
        """The workload's sessions: recorded ones, shuffled by the seed, or made up."""
        if workload.agent_trace is None:
            sessions: SessionOf = partial(made_up, parse_agents(workload.agents or ""), seed)
        else:
            recorded = read_sessions(Path(workload.agent_trace), workload.idle_cap_s)
            sessions = texts.over_and_over(recorded, f"{seed}/agents")
            options["recorded"] = len(recorded)
        return cls(sessions, text, seed, begins_within=workload.begins_within, **options)

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """For the warm-up, with one token asked: the prompt before the first request of a lane that
        begins within a session, else text that no request of the level has."""
        lane = -1 - number
        first = self._first(level, lane)
        return self._planned(level, lane if first else number, max(0, first - 1), number, 1)

    def turns_at(self, level: LevelSpec) -> NumTurns:
        """Number of requests of each session at a level."""
        return lambda session: len(self.sessions(session)) - self._first(level, session)

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
        recorded, first = self.sessions(session), self._first(level, session)
        return Play(
            {
                turn: (
                    Following(
                        self._planned(level, session, turn, first_number + turn - first),
                        each.wait_s if turn > first or not first else 0.0,
                    ),
                    {number for number in each.after if number >= first},
                )
                for turn, each in enumerate(recorded)
                if turn >= first
            }
        )

    def mean_lengths(self, count: int = 64) -> texts.Lengths:
        """Mean lengths of the requests of the first sessions, rounded to tokens."""
        return texts.mean_lengths([one for number in range(count) for one in self.sessions(number)])

    def _first(self, level: LevelSpec, session: int) -> int:
        """The request at which a session begins."""
        if not self.begins_within or session >= (level.concurrency or 0):
            return 0
        return random.Random(f"{self.seed}/within/{session}").randrange(len(self.sessions(session)))

    def _planned(
        self, level: LevelSpec, session: int, turn: int, number: int, output_tokens: int = 0
    ) -> PlannedRequest:
        recorded = self.sessions(session)
        each = recorded[turn]
        planned = PlannedRequest(
            number, 0.0, each.input_tokens, output_tokens or each.output_tokens,
            ignore_eos=self.ignore_eos, session=None if number < 0 else session, turn=turn,
            of_turns=len(recorded) - self._first(level, session),
        )  # fmt: skip
        everywhere = f"{self.seed}/{self.salt}"
        own = f"{everywhere}/{texts.level_place(level)}/{session}"
        if self.recorded:  # what sessions share is new in each play of all of them
            everywhere = f"{everywhere}/{texts.level_place(level)}/play {session // self.recorded}"
        parts = [
            (tokens, random.Random(f"{everywhere if key[0] == '/' else own}/part {key}"))
            for key, tokens in each.parts
        ]
        return self.text(planned, random.Random(f"{own}/{turn}"), parts)
