"""The queue of waiting sequences: oldest first, or clients in turn."""

import heapq

from lmi_bench.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Sequences in order of (turn, arrival, index). The heap keeps sequences that ended while
    waiting until they reach the top; `len` does not count them.

    A client's sequences have turns one after the other, the first no earlier than that of the
    sequence that left the queue last: start-time fair queueing (Goyal et al. 1996) by requests.
    """

    __slots__ = ("_heap", "_num_waiting", "_turn", "_turns")

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Sequence]] = []
        self._num_waiting = 0
        self._turn = 0
        self._turns: dict[str, int] = {}  # each client's last one

    def __len__(self) -> int:
        return self._num_waiting

    def take_turn(self, seq: Sequence, client: str) -> None:
        """Give a new sequence its client's next turn."""
        if not self._num_waiting:  # forget clients that new ones are not behind
            self._turns = {who: turn for who, turn in self._turns.items() if turn >= self._turn}
        seq.turn = self._turns[client] = max(self._turn, self._turns.get(client, 0) + 1)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.turn, *seq.order, seq))
        self._num_waiting += 1

    def head(self) -> Sequence | None:
        """The oldest sequence, which stays in the queue; None if it is empty."""
        heap = self._heap
        while heap and heap[0][3].finish_reason is not None:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def oldest(self, most: int) -> list[Sequence]:
        """At most that many of the oldest sequences, in order."""
        live = (entry for entry in self._heap if entry[3].finish_reason is None)
        return [entry[3] for entry in heapq.nsmallest(most, live)]

    def pop_head(self) -> None:
        """Remove the sequence that `head` returned."""
        self._turn = max(self._turn, heapq.heappop(self._heap)[0])
        self._num_waiting -= 1

    def discard(self, seq: Sequence) -> None:
        """Stop counting a waiting sequence that is already marked as finished."""
        assert seq.finish_reason is not None
        self._num_waiting -= 1
