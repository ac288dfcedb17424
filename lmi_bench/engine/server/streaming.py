"""Sends answers, one or several per prompt: one write per event; the first sends the status.

Each of several choices is a separate engine request with its own random draws. With prefix caching
the first one computes the prompt alone and the others share its blocks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aiohttp import web

from lmi_bench.core.errors import CapacityError, EngineError
from lmi_bench.engine.server.answer import Answer, Piece, Prompt
from lmi_bench.engine.server.state import ServerState

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


class Reply(Protocol):
    """A protocol's encoding of one or several answers, whose `finish_reason` is set with their
    last pieces."""

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """The pieces of one engine event of an answer."""

    def end(self) -> bytes:
        """The end of the stream."""

    def failure(self, exc: EngineError) -> bytes:
        """An error after status 200 was sent."""


def writes(answers: Sequence[Answer], reply: Reply) -> AsyncIterator[bytes]:
    """One write per engine event of an answer; of several, one per step.

    Raises EngineError if the engine fails before the first token.
    """
    return _writes(answers[0], reply) if len(answers) == 1 else _choice_writes(answers, reply)


async def _writes(answer: Answer, reply: Reply) -> AsyncIterator[bytes]:
    chunks = answer.chunks()
    yield reply.event(await anext(chunks))
    try:
        async for chunk in chunks:
            yield reply.event(chunk)
        end = reply.end()
    except EngineError as exc:
        end = reply.failure(exc)
    if end:
        yield end


MAX_CHOICES = 128  # OpenAI's limit


async def submit_choices(state: ServerState, prompt: Prompt, count: int) -> list[Answer]:
    """Start `count` answers; the caller must close them.

    If blocks of the prompt can be shared, this returns after the first answer's first token. The
    choices use consecutive seeds from the request's, so that the first equals a single answer.
    Raises what `ServerState.submit` raises, and then none of them runs.
    """
    config = state.engine.config
    limit = config.max_concurrent_requests
    if limit is not None and count > limit:
        raise CapacityError(
            f"{count} choices are {count} requests to the engine, which accepts {limit} at once: "
            "request fewer, or raise max_concurrent_requests"
        )
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


async def _choice_writes(answers: Sequence[Answer], reply: Reply) -> AsyncIterator[bytes]:
    """The answers' streams merged in token order. Ends with the last answer."""
    news: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: an answer has ended

    async def follow(number: int) -> None:
        try:
            async for chunk in answers[number].chunks():
                news.put_nowait(reply.event(chunk, number))
        finally:
            news.put_nowait(None)

    running, begun = len(answers), False
    followers = asyncio.gather(*map(follow, range(running)), return_exceptions=True)
    # a cancelled gather ends with an exception, which asyncio would log as never retrieved
    followers.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        while running:
            items = [await news.get()]
            while not news.empty():
                items.append(news.get_nowait())
            running -= items.count(None)
            data = b"".join([item for item in items if item is not None])
            if data:
                begun = True
                yield data
        failure = next((failed for failed in await followers if failed is not None), None)
        if failure is None:
            yield reply.end()
        elif begun and isinstance(failure, EngineError):
            yield reply.failure(failure)
        else:
            raise failure
    finally:
        followers.cancel()
