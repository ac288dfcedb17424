"""The queue of waiting sequences, oldest first."""

import heapq

from lmi_bench.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Sequences in order of (arrival, index). The heap keeps sequences that ended while waiting
    until they reach the top; `len` does not count them."""

    __slots__ = ("_heap", "_num_waiting")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (*seq.order, seq))
        self._num_waiting += 1

    def head(self) -> Sequence | None:
        """The oldest sequence, which stays in the queue; None if it is empty."""
        heap = self._heap
        while heap and heap[0][2].finish_reason is not None:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def oldest(self, most: int) -> list[Sequence]:
        """At most that many of the oldest sequences, in order."""
        live = (entry for entry in self._heap if entry[2].finish_reason is None)
        return [entry[2] for entry in heapq.nsmallest(most, live)]

    def pop_head(self) -> None:
        """Remove the sequence that `head` returned."""
        heapq.heappop(self._heap)
        self._num_waiting -= 1

    def discard(self, seq: Sequence) -> None:
        """Stop counting a waiting sequence that is already marked as finished."""
        assert seq.finish_reason is not None
        self._num_waiting -= 1
