"""The event that every protocol yields, and the interfaces of framing and protocol.

A framing (`Splitter`) turns bytes into whole payloads, however the reads were cut; a protocol
(`WireFormat`) turns a payload into an event. Both are pure, so that the load generator can take
the receive time first and decode later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from lmi_bench.core.errors import TargetError
from lmi_bench.core.workload import PlannedRequest

_MOST_TOKENS = 2**31
NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WireEvent:
    """One payload of a response, in any protocol. Most payloads fill one or two fields.

    text           added text; "" for a token without visible text
    token_ids      ids in the payload: possibly fewer than its tokens
    token_count    tokens in the payload, if it states them; None: 1 if it has text or an id,
                   else 0 (`num_tokens`)
    finish_reason  the server's own word, on the event that ends the generation
    model          who answers, if the payload names it
    input_tokens   prompt tokens as counted by the server
    output_tokens  output tokens so far as counted by the server
    cached_tokens  prompt tokens found in the server's prefix cache, if reported
    reasoning_tokens  of the output tokens, as counted by the server, whether shown or not
    queue_ms, prefill_ms  waiting in the server, and from there to its first token, if reported
    error          the server's message: the request failed although the status was 200
    error_kind     category of that error, one of `errors.TARGET_ERROR_KINDS`
    reasoning      its tokens are reasoning, not yet the answer
    tokenless      it is a whole answer that has no tokens
    end            later payloads of this response do not count
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    token_count: int | None = None
    finish_reason: str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    error: str | None = None
    error_kind: str | None = None
    reasoning: bool = False
    tokenless: bool = False
    end: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError for a text, a count or a word of another kind, which spoils the sums."""
        if not isinstance(self.text, str):
            raise TypeError("its text is not a string")
        counts = (self.token_count, self.output_tokens, self.input_tokens, self.cached_tokens)
        for count in (*counts, self.reasoning_tokens):
            if count is not None and not (type(count) is int and 0 <= count <= _MOST_TOKENS):
                shown = count if type(count) is int else f"of type {type(count).__name__}"
                raise TypeError(f"a count of tokens is {shown}")
        if self.finish_reason is not None and type(self.finish_reason) is not str:
            raise TypeError(f"its finish_reason is of type {type(self.finish_reason).__name__}")

    @property
    def num_tokens(self) -> int:
        """Tokens in this event: as stated, else 1 if it has text or an id."""
        if self.token_count is not None:
            return self.token_count
        return 1 if self.text or self.token_ids else 0


class Splitter(Protocol):
    """Framing: bytes in, whole payloads out, however the reads were cut. One per stream."""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by these bytes, in order. Raises TargetError("malformed_frame") if a
        frame is invalid or too long."""

    def close(self) -> list[bytes]:
        """Payloads completed by the end of the stream: a last one without its terminator."""


class WireFormat(Protocol):
    """One protocol: the request body to send, and how to read the response.

    name  for `--protocol`
    path  below the endpoint's address
    """

    name: str
    path: str

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        """The body to POST. Raises InputError if the request lacks a field that it needs."""

    def new_splitter(self) -> Splitter:
        """A splitter for one streamed response. (An unstreamed body is itself the payload.)"""

    def parse(self, payload: bytes) -> WireEvent:
        """Read one payload, or the whole body of an unstreamed response. Raises
        TargetError("malformed_frame") if it does not follow this protocol."""

    def plain_text(self, payload: bytes) -> str | None:
        """Text of a payload that holds one ordinary token and nothing else; None: `parse` it. A
        fast path for nearly every payload of a stream: it may always return None."""
        return None

    def error(self, status: int, body: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS) -> TargetError:
        """The error for a non-2xx HTTP status: its category and the server's message.

        headers  response headers, names in lower case
        """
