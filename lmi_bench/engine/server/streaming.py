"""Sending a stream: the status waits for the first token, every event is one write."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from aiohttp import web

from lmi_bench.engine.server.answer import Answer, Piece
from lmi_bench.errors import EngineError

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
    answer: Answer,
    *,
    headers: dict[str, str],
    encode_chunk: Callable[[list[Piece]], bytes],
    encode_end: Callable[[], bytes],
    encode_failure: Callable[[EngineError], bytes],
    envelope: Envelope = PLAIN,
) -> web.StreamResponse:
    """Stream an answer as it grows.

    encode_chunk    the pieces of one engine event; `answer.finish_reason` is set with the last
    encode_end      what follows the last chunk
    encode_failure  the error that ends a stream under status 200

    An engine that fails before the first token raises EngineError, so that the reply can still
    carry a real status. Whatever ends this, the answer is closed and its blocks are freed.
    """
    writes = _writes(answer, encode_chunk, encode_end, encode_failure)
    response = web.StreamResponse(headers=envelope.headers(headers))
    try:
        if envelope.at_once:
            body = b"".join([envelope.wrap(data) async for data in writes])
            return web.Response(body=body, headers=envelope.headers(headers))
        async for data in writes:
            if not response.prepared:
                await response.prepare(request)
            await response.write(envelope.wrap(data))
        await response.write_eof()
    except ConnectionResetError:  # the client has gone: nobody is left to tell
        LOGGER.debug("a client left in the middle of its stream")
    finally:
        answer.close()
    return response


async def _writes(
    answer: Answer,
    encode_chunk: Callable[[list[Piece]], bytes],
    encode_end: Callable[[], bytes],
    encode_failure: Callable[[EngineError], bytes],
) -> AsyncIterator[bytes]:
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
