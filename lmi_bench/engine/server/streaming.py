"""Sending a stream: the status waits for the first token, every event is one write."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from aiohttp import web

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.server.answer import Answer, Piece

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a route around the container's makes of a stream: other headers, each write wrapped.

    at_once  nothing is sent before all of it is there
    """

    headers: Callable[[dict[str, str]], dict[str, str]]
    wrap: Callable[[bytes], bytes]
    at_once: bool = False


PLAIN = Envelope(headers=dict, wrap=bytes)


async def send_stream(
    request: web.Request,
    writes: AsyncIterator[bytes],
    *,
    headers: dict[str, str],
    envelope: Envelope = PLAIN,
    headers_first: bool = False,
) -> web.StreamResponse:
    """Send each of `writes` as it comes; whoever calls closes the answers that they are made from.

    headers_first  the status is sent before the first of them, and so cannot tell of a failure;
                   else what `writes` raises before its first bytes can still become a reply
    """
    response = web.StreamResponse(headers=envelope.headers(headers))
    try:
        if envelope.at_once:
            body = b"".join([envelope.wrap(data) async for data in writes])
            return web.Response(body=body, headers=envelope.headers(headers))
        if headers_first:
            await response.prepare(request)
        async for data in writes:
            if not response.prepared:
                await response.prepare(request)
            await response.write(envelope.wrap(data))
        await response.write_eof()
    except ConnectionResetError:  # the client has gone: nobody is left to tell
        LOGGER.debug("a client left in the middle of its stream")
    return response


async def stream_writes(
    answer: Answer,
    encode_chunk: Callable[[list[Piece]], bytes],
    encode_end: Callable[[], bytes],
    encode_failure: Callable[[EngineError], bytes],
) -> AsyncIterator[bytes]:
    """An answer as it grows, a write an engine event.

    encode_chunk    the pieces of one engine event; `answer.finish_reason` is set with the last
    encode_end      what follows the last chunk
    encode_failure  the error that ends a stream under status 200

    Raises EngineError where the engine fails before the first token.
    """
    chunks = answer.chunks()
    yield encode_chunk(await anext(chunks))
    try:
        async for chunk in chunks:
            yield encode_chunk(chunk)
        end = encode_end()
    except EngineError as exc:
        end = encode_failure(exc)
    if end:
        yield end
