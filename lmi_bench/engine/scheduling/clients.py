"""Clients of one queue: whose turn it is, and how much of the engine one of them may have.

Turns are start-time fair queueing (Goyal et al. 1996) by requests: a request stands behind the last
one of its client, and no earlier than the one that left the queue last. They do not help while one
client has every slot of the batch: with a share, its further requests are held outside the queue
until its others end, and beyond its share of the engine's requests they are refused. Prompts that
are computed in chunks share a step's tokens: a short one does not wait for another client's long
ones.
"""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

from lmi_bench.core.errors import OverloadedError
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sequence import Sequence


@dataclass(slots=True, eq=False)
class Clients:
    """The queue, oldest first or clients in turn, and what each client has in the engine.

    turn      of the sequence that was admitted last
    num_held  sequences that wait outside the queue
    """

    config: SchedulerConfig
    queue: deque[Sequence] = field(default_factory=deque)
    turn: int = 0
    num_held: int = 0
    _turns: dict[str, int] = field(default_factory=dict)  # each client's last one
    _entered: Counter[str] = field(default_factory=Counter)  # in the queue or admitted
    _held: dict[str, deque[Sequence]] = field(default_factory=dict)

    def check(self, client: str) -> None:
        """Raise OverloadedError if the client has its share of the engine's requests."""
        share, limit = self.config.client_share, self.config.max_concurrent_requests
        if share < 1 and limit is not None:
            most = max(1, math.floor(share * limit))
            if self._entered[client] + len(self._held.get(client, ())) >= most:
                raise OverloadedError(
                    f"{most} requests of this client are already in the engine, its share of "
                    f"{limit} (max_concurrent_requests): retry later"
                )

    def add(self, seq: Sequence, client: str) -> None:
        """Queue a client's new sequence in turn, or hold it."""
        if not self.queue:  # forget clients that new ones are not behind
            self._turns = {who: turn for who, turn in self._turns.items() if turn >= self.turn}
        seq.client, seq.turn = client, max(self.turn, self._turns.get(client, 0) + 1)
        self._turns[client] = seq.turn
        most = math.floor(self.config.client_share * self.config.max_running)
        if self.config.client_share < 1 and self._entered[client] >= max(1, most):
            self._held.setdefault(client, deque()).append(seq)
            self.num_held += 1
        else:
            self._entered[client] += 1
            self.put(seq)

    def prompt_shares(
        self, begun: list[Sequence], limit: int, may_join: Callable[[Sequence], bool]
    ) -> dict[str | None, int] | None:
        """Prompt tokens that each client may have of a step's `limit`: equal shares, and what one
        does not need goes to the others. None if there is room for all.

        begun     sequences whose prompts are being computed
        may_join  whether one more, of the client that has waited longest without any, may be
        """
        wanted = Counter[str | None]()
        for seq in begun:
            wanted[seq.client] += seq.tokens_to_fill - seq.num_computed
        new = next((seq for seq in self.queue if seq.client not in wanted), None)
        if new is not None and may_join(new):
            wanted[new.client] = new.tokens_to_fill
        if wanted.total() <= limit:
            return None
        shares = dict[str | None, int]()
        for client, tokens in sorted(wanted.items(), key=itemgetter(1)):
            left = limit - sum(shares.values())
            shares[client] = min(tokens, math.ceil(left / (len(wanted) - len(shares))))
        return shares

    def put(self, seq: Sequence) -> None:
        """Put a sequence in its place in the queue."""
        if not self.queue or _place(self.queue[-1]) < _place(seq):
            self.queue.append(seq)  # the usual place, however many wait
        else:
            insort(self.queue, seq, key=_place)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence that waits out of the queue, or from those that are held."""
        held = self._held.get(seq.client) if seq.client is not None else None
        if held and seq in held:
            held.remove(seq)
            self.num_held -= 1
            return
        self.queue.remove(seq)
        self.leave(seq)

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended: its client's next one may enter the queue."""
        if seq.client is None:
            return
        self._entered[seq.client] -= 1
        if held := self._held.get(seq.client):
            self._entered[seq.client] += 1
            self.num_held -= 1
            self.put(held.popleft())
        elif not self._entered[seq.client]:
            del self._entered[seq.client]
            self._held.pop(seq.client, None)


def _place(seq: Sequence) -> tuple[int, float, int]:
    """Clients in turn, then by arrival."""
    return seq.turn, seq.arrival_s, seq.index
