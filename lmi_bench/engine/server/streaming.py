"""Sends a streamed response: the status waits for the first token, each event is one write."""

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
    """How SageMaker's routes change a container's stream: other headers, each write wrapped.

    at_once  True: send everything at the end
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
    """Send each of `writes` as it arrives; the caller closes the underlying answers.

    headers_first  True: send the status first, so it cannot report a failure; else an exception
                   before the first bytes can still become an error response
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
    except ConnectionResetError:  # the client has disconnected
        LOGGER.debug("a client disconnected during its stream")
    return response


async def stream_writes(
    answer: Answer,
    encode_chunk: Callable[[list[Piece]], bytes],
    encode_end: Callable[[], bytes],
    encode_failure: Callable[[EngineError], bytes],
) -> AsyncIterator[bytes]:
    """One write per engine event of an answer.

    encode_chunk    encodes the pieces of one event; `answer.finish_reason` is set with the last
    encode_end      encodes the end of the stream
    encode_failure  encodes an error after status 200 was sent

    Raises EngineError if the engine fails before the first token.
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
