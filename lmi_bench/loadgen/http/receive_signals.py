"""Observations of a target's receiver during a level: the input of the generator's error bound.

Plain arrays, so that the parts of several worker processes add up exactly.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import chain


def _floats(*parts: Iterable[float]) -> MutableSequence[float]:
    return array("d", chain(*parts))


def _counts(*parts: Iterable[int]) -> MutableSequence[int]:
    return array("q", chain(*parts))


@dataclass(slots=True)
class ReceiveSignals:
    """Observations about the receiver, over the answers of a level.

    timestamps     source of the event times: "kernel", "user" or "loop" (a target that measures
                   them itself)
    receiver       reader of the sockets: "native", "python", "mixed", or "" without sockets
    priority       of the receiving thread, as it was granted (`receive.priority_asked`)
    delays_s       user time - kernel time of each read with tokens, or its upper bound; inf if
                   neither is known
    times_s        times of the token events, answer after answer, and `events` how many each has
    late_s         upper bound on the lateness of each; inf: unknown
    merged         events that shared a read with a later one of their stream
    without_stamp  reads with tokens that lack the requested kernel time
    clock_steps    steps of the real-time clock, during which user time was taken
    counted_by     complete answers by source of their token count: "server", "tokenizer", "chunks"
    models         the model that the run's first answer named, by adapter
    other_model    which one a later answer named
    connect_s      time that each new connection took, TLS included; tls_s: of its TLS handshake
    """

    timestamps: str = "loop"
    receiver: str = ""
    priority: str = ""
    delays_s: MutableSequence[float] = field(default_factory=_floats)
    times_s: MutableSequence[float] = field(default_factory=_floats)
    late_s: MutableSequence[float] = field(default_factory=_floats)
    events: MutableSequence[int] = field(default_factory=_counts)
    merged: int = 0
    without_stamp: int = 0
    clock_steps: int = 0
    counted_by: Counter[str] = field(default_factory=Counter)
    models: dict[str, str] = field(default_factory=dict)
    other_model: str = ""
    connect_s: MutableSequence[float] = field(default_factory=_floats)
    tls_s: MutableSequence[float] = field(default_factory=_floats)

    @property
    def tokens(self) -> int:
        """Token events of complete answers."""
        return len(self.times_s)

    def add_answer(self, times_s: Sequence[float], late_s: Sequence[float]) -> None:
        """Add the events of a complete answer."""
        self.times_s.extend(times_s)
        self.late_s.extend(late_s)
        self.events.append(len(times_s))

    def saw_model(self, adapter: str, name: str | None) -> None:
        """Note the model that an answer names, and the first that is not its adapter's first."""
        if name and (first := self.models.setdefault(adapter, name)) != name:
            self.other_model = self.other_model or f"{name[:99]!r}, the run's first of {first[:99]!r}"

    def __add__(self, other: ReceiveSignals) -> ReceiveSignals:
        """The sum, as if from one receiver."""
        both = ReceiveSignals(
            self.timestamps if self.timestamps == other.timestamps else "mixed",
            self.receiver if self.receiver == other.receiver else "mixed",
            self.priority if self.priority == other.priority else "mixed",
            delays_s=_floats(self.delays_s, other.delays_s),
            times_s=_floats(self.times_s, other.times_s),
            late_s=_floats(self.late_s, other.late_s),
            events=_counts(self.events, other.events),
            merged=self.merged + other.merged,
            without_stamp=self.without_stamp + other.without_stamp,
            clock_steps=max(self.clock_steps, other.clock_steps),
            counted_by=self.counted_by + other.counted_by,
            models=dict(self.models),
            other_model=self.other_model or other.other_model,
            connect_s=_floats(self.connect_s, other.connect_s),
            tls_s=_floats(self.tls_s, other.tls_s),
        )
        for adapter, name in other.models.items():
            both.saw_model(adapter, name)
        return both
