"""Sends answers, one or several per prompt: one write a step; the first sends the status.

Each of several choices is a separate engine request with its own random draws. With prefix caching
the first one computes the prompt alone and the others share its blocks.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

from aiohttp import HttpVersion11, web

from lmi_bench.core.errors import CapacityError
from lmi_bench.engine.server.answer import Answer, Prompt
from lmi_bench.engine.server.feed import Feed, Reply
from lmi_bench.engine.server.state import ServerState

LOGGER = logging.getLogger(__name__)
_MOST_UNSENT_BYTES = 2**16  # to a client that reads slowly; more waits in the engine's tokens


@dataclass(frozen=True, slots=True)
class Envelope:
    """How SageMaker's routes change a container's stream: other headers, each write wrapped.

    at_once  True: send everything at the end
    """

    headers: Callable[[dict[str, str]], dict[str, str]]
    wrap: Callable[[bytes], bytes]
    at_once: bool = False


_PLAIN = Envelope(headers=dict, wrap=bytes)
ENVELOPE = ContextVar("envelope", default=_PLAIN)
"""Of the request that a task answers, set by SageMaker's routes."""


async def send_stream(
    state: ServerState,
    request: web.Request,
    answers: Sequence[Answer],
    reply: Reply,
    *,
    headers: dict[str, str],
    headers_first: bool = False,
) -> web.StreamResponse:
    """Send the answers as they grow; the caller closes them.

    headers_first  True: send the status first, so it cannot report a failure; else an exception
                   before the first bytes can still become an error response
    """
    envelope = ENVELOPE.get()
    response = web.StreamResponse(headers=envelope.headers(headers))
    feed = Feed(state.outbox, answers, reply, begun=headers_first)
    if envelope.at_once:
        body = [envelope.wrap(await feed.next())]
        while not feed.ended:
            body.append(envelope.wrap(await feed.next()))
        return web.Response(body=b"".join(body), headers=envelope.headers(headers))

    is_chunked = request.version >= HttpVersion11  # else the end of the connection ends it

    def send(data: bytes) -> bool:
        transport = request.transport
        if transport is None or transport.is_closing():
            return False  # the handler's next write raises
        data = envelope.wrap(data)
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
        return transport.get_write_buffer_size() <= _MOST_UNSENT_BYTES

    try:
        if headers_first:
            await response.prepare(request)
        data = await feed.next()
        await response.prepare(request)
        while not feed.ended:
            if data:
                await response.write(envelope.wrap(data))
            await request.writer.drain()
            data = await feed.next(send)
        await response.write_eof(envelope.wrap(data))
    except ConnectionResetError:  # the client has disconnected
        LOGGER.debug("a client disconnected during its stream")
    return response


MAX_CHOICES = 128  # OpenAI's limit


def check_count(state: ServerState, count: int) -> None:
    """Raise CapacityError if so many answers could never be accepted together."""
    limit = state.engine.config.max_concurrent_requests
    if limit is not None and count > limit:
        raise CapacityError(
            f"{count} choices are {count} requests to the engine, which accepts {limit} at once: "
            "request fewer, or raise max_concurrent_requests"
        )


async def submit_choices(state: ServerState, prompt: Prompt, count: int) -> list[Answer]:
    """Start `count` answers; the caller must close them.

    If blocks of the prompt can be shared, this returns after the first answer's first token. The
    choices use consecutive seeds from the request's, so that the first equals a single answer.
    Raises what `ServerState.submit` raises, and then none of them runs.
    """
    config = state.engine.config
    check_count(state, count)
    answers = [state.submit(prompt)]
    first = answers[0].generation
    try:
        shares = config.prefix_caching and len(prompt.token_ids) > config.block_size and count > 1
        if shares:
            await first.started()
        for number in range(1, count):
            seed = None if prompt.sampling.seed is None else prompt.sampling.seed + number
            own = replace(prompt, sampling=replace(prompt.sampling, seed=seed))
            answers.append(state.submit(own, beside=first if shares else None))
    except BaseException:
        end_all(state, answers)
        raise
    return answers


def end_all(state: ServerState, answers: Sequence[Answer]) -> None:
    """Cancel unfinished answers, and count each."""
    for answer in answers:
        answer.close()
        state.totals.add(answer)


async def complete_all(answers: Sequence[Answer]) -> None:
    """Wait until every answer is complete. Raises EngineError if the engine fails."""
    if len(answers) == 1:
        await answers[0].complete()
    else:
        await asyncio.gather(*(answer.complete() for answer in answers))
