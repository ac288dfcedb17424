"""What every protocol boils down to: an event of a stream, and the two halves that read it.

A framing (`Splitter`) turns bytes into whole payloads wherever the reads were cut; a protocol
(`WireFormat`) turns a payload into an event. Both are pure, so that the load generator can take
the receive time first and decode later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from lmi_bench.core.errors import TargetError
from lmi_bench.core.workload import PlannedRequest

NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WireEvent:
    """One payload of an answer, whatever its protocol. Most payloads fill one or two fields.

    text           text that it added; "" for a token that shows none
    token_ids      ids that it names: possibly fewer than the tokens it holds
    token_count    tokens that it holds, where the payload says so; None: one if it carries text
                   or an id, else none (`num_tokens`)
    finish_reason  the server's own word, on the event that ends the generation
    input_tokens   the server's count of the prompt; likewise output_tokens, of the whole answer
                   so far
    cached_tokens  tokens of the prompt that the server found in its prefix cache, where it says so
    error          the server's message: the request failed although the status was 200
    error_kind     the bucket of that error, one of `errors.TARGET_ERROR_KINDS`
    reasoning      its tokens are thought, not yet answer
    end            nothing more of this answer counts
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    token_count: int | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    error_kind: str | None = None
    reasoning: bool = False
    end: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of this event: as stated, else one for text or an id."""
        if self.token_count is not None:
            return self.token_count
        return 1 if self.text or self.token_ids else 0


class Splitter(Protocol):
    """Framing: bytes in, whole payloads out, wherever the reads were cut. One for each stream."""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that these bytes completed, in order.

        Raises TargetError("malformed_frame") when a frame is wrong or grows without end.
        """
        ...

    def close(self) -> list[bytes]:
        """What the end of the stream completes: a last payload without its terminator."""
        ...


class WireFormat(Protocol):
    """One protocol: what to send, and how to read the answer."""

    @property
    def name(self) -> str:
        """What `--protocol` calls it."""
        ...

    @property
    def path(self) -> str:
        """Path below the endpoint's address."""
        ...

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        """The body to POST. Raises InputError if the request lacks what the protocol needs."""
        ...

    def new_splitter(self) -> Splitter:
        """A framing for one streamed answer. (The body of an unstreamed one is its payload.)"""
        ...

    def parse(self, payload: bytes) -> WireEvent:
        """Read one payload, or the whole body of an unstreamed answer.

        Raises TargetError("malformed_frame") if it is not of this protocol.
        """
        ...

    def plain_text(self, payload: bytes) -> str | None:
        """Text of a payload that is one ordinary token and says nothing else; None: `parse` it.

        A short cut for nearly every payload of a stream: it may always return None.
        """
        ...

    def error(
        self, status: int, body: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> TargetError:
        """What an HTTP status that is not 2xx means: its bucket, and the server's message.

        headers  of the reply, names in lower case
        """
        ...
