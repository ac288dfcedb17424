"""Which block of the KV cache holds which piece of text, so that it need not be computed again.

A full block is known by a digest of its tokens and of all blocks before it. It stays known when
its last holder leaves, until its memory is needed: the block that has been idle longest goes
first, and of one sequence the tail before its head, since a tail is of no use without the head.
Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4, and vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lmi_bench.core.errors import EngineError


class PrefixCache:
    """Digests of computed blocks. Knows neither sequences nor who holds a block.

    A block is known (`find` gives it) or not; a known one is idle while nobody holds it.
    """

    __slots__ = ("_block_of", "_digest_of", "_idle")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def num_idle(self) -> int:
        """Known blocks that nobody holds."""
        return len(self._idle)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning."""
        found: list[int] = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def learn(self, block_id: int, digest: bytes) -> None:
        """A held block is computed; another block with the same content keeps its place."""
        if digest not in self._block_of:
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def is_idle(self, block_id: int) -> bool:
        """Whether a block is known and nobody holds it."""
        return block_id in self._idle

    def rest(self, block_id: int) -> bool:
        """A block lost its last holder: True if it stays known, idle from now on."""
        if block_id not in self._digest_of:
            return False
        self._idle[block_id] = None
        return True

    def wake(self, block_id: int) -> None:
        """An idle block is held again."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Forget the block that has been idle longest, and give it."""
        block_id, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block_id)]
        return block_id

    def audit(self, is_held: Sequence[bool]) -> None:
        """Hold the books against each other; raises EngineError if they differ."""
        for digest, block_id in self._block_of.items():
            if self._digest_of.get(block_id) != digest:
                raise EngineError(f"KV block {block_id} is known by two digests")
        for block_id in self._digest_of:
            if is_held[block_id] == (block_id in self._idle):
                raise EngineError(f"KV block {block_id} is both held and idle, or neither")
        if len(self._block_of) != len(self._digest_of) or not self._idle.keys() <= (
            self._digest_of.keys()
        ):
            raise EngineError("the prefix cache holds blocks that it does not know")


def block_digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a full block behind a block with digest `before` (empty at the start)."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16).digest()
