"""Prefix cache: finds computed KV-cache blocks by their content, for reuse.

A full block is identified by a digest of its tokens and all blocks before it. It stays cached
after its last reference is released, until its memory is needed: the least recently used block is
evicted first, and a sequence's tail before its head, since the tail is useless without the head.
With a host tier it moves to the host's memory, and back when a prompt begins with it. It is in one
place at a time: both are one least recently used cache of the sum of their sizes.
Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4, and vLLM's automatic prefix caching.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lmi_bench.core.errors import EngineError


@dataclass(slots=True, eq=False)
class PrefixCache:
    """Digests of computed blocks, without sequences or reference counts. A cached block is one that
    `find` can return; it is idle while it has no reference. host_blocks: most on the host."""

    host_blocks: int = 0
    _block_of: dict[bytes, int] = field(default_factory=dict)
    _digest_of: dict[int, bytes] = field(default_factory=dict)
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # least recently used first
    _on_host: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # first evicted first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, digests: Iterable[bytes]) -> list[int | None]:
        """The blocks of the longest cached prefix; None for one on the host."""
        found: list[int | None] = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None and digest not in self._on_host:
                break
            found.append(block_id)
        return found

    def insert(self, block_id: int, digest: bytes) -> None:
        """Cache a computed block in use, unless another block has the same content."""
        if digest not in self._block_of:
            self._on_host.pop(digest, None)
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def take_from_host(self, digests: Iterable[bytes]) -> None:
        """Copy the blocks of a prefix that are on the host back to the device."""
        for digest in digests:
            self._on_host.pop(digest, None)

    def is_idle(self, block_id: int) -> bool:
        return block_id in self._idle

    def deactivate(self, block_id: int) -> bool:
        """Record that a block lost its last reference; True if it stays cached, now idle."""
        if block_id not in self._digest_of:
            return False
        self._idle[block_id] = None
        return True

    def reactivate(self, block_id: int) -> None:
        """Record that an idle block is referenced again."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Remove the least recently used idle block from the device and return it."""
        block_id, _ = self._idle.popitem(last=False)
        digest = self._digest_of.pop(block_id)
        del self._block_of[digest]
        self._on_host[digest] = None
        if len(self._on_host) > self.host_blocks:
            self._on_host.popitem(last=False)
        return block_id

    def audit(self, is_held: Sequence[bool]) -> None:
        """Check the tables against each other; raises EngineError if they differ."""
        for digest, block_id in self._block_of.items():
            if self._digest_of.get(block_id) != digest:
                raise EngineError(f"KV block {block_id} has two digests")
            if digest in self._on_host:
                raise EngineError(f"KV block {block_id} is on the device and on the host")
        for block_id in self._digest_of:
            if is_held[block_id] == (block_id in self._idle):
                raise EngineError(f"KV block {block_id} is both in use and idle, or neither")
        if len(self._block_of) != len(self._digest_of) or not self._idle.keys() <= (self._digest_of.keys()):
            raise EngineError("the prefix cache has blocks without a digest")


def block_digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a full block that follows one with digest `before` (empty at the start)."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16).digest()
