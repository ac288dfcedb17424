"""Several answers to one prompt: the choices of a request.

They are requests of their own to the engine, each with draws of its own. Where the engine keeps
computed prompts, the first one's is computed alone and the others share its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from lmi_bench.core.errors import CapacityError, EngineError
from lmi_bench.engine.server.answer import Answer, Piece, Prompt
from lmi_bench.engine.server.state import ServerState

MAX_CHOICES = 128  # as OpenAI allows


async def submit_choices(state: ServerState, prompt: Prompt, count: int) -> list[Answer]:
    """Start `count` answers; the caller closes them whatever happens.

    Where blocks of the prompt can be shared this returns with the first one's first token. With a
    seed the choices have this one and those that follow it, so that the first is what the request
    alone would get. Raises what `ServerState.submit` raises, and then none of them runs.
    """
    limit = state.engine.config.max_concurrent_requests
    if limit is not None and count > limit:
        raise CapacityError(
            f"{count} choices are {count} requests to the engine, which takes {limit} at once: ask "
            "for fewer, or raise max_concurrent_requests"
        )
    answers = [state.submit(prompt)]
    first = answers[0].generation
    try:
        shares = count > 1 and _shares_blocks(state, prompt)
        if shares:
            await first.started()
        for number in range(1, count):
            own = replace(prompt, sampling=replace(prompt.sampling, seed=_seed(prompt, number)))
            answers.append(state.submit(own, beside=first if shares else None))
    except BaseException:
        end_all(state, answers)
        raise
    return answers


def end_all(state: ServerState, answers: Sequence[Answer]) -> None:
    """Give up those that have not ended, and count each."""
    for answer in answers:
        answer.close()
        state.count(answer)


async def complete_all(answers: Sequence[Answer]) -> None:
    """Wait for the whole of each. Raises EngineError if the engine fails."""
    if len(answers) == 1:
        await answers[0].complete()
    else:
        await asyncio.gather(*(answer.complete() for answer in answers))


async def choice_writes(
    answers: Sequence[Answer],
    encode_chunk: Callable[[list[Piece], int], bytes],
    encode_end: Callable[[], bytes],
    encode_failure: Callable[[EngineError], bytes],
) -> AsyncIterator[bytes]:
    """The answers' streams in one, in the order in which the tokens come: a write a step.

    encode_chunk  a choice's pieces of one engine event, and its number

    Raises EngineError where the engine fails before the first token. The answers' ends end this.
    """
    news: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: one of them has ended

    async def follow(number: int) -> None:
        try:
            async for chunk in answers[number].chunks():
                news.put_nowait(encode_chunk(chunk, number))
        finally:
            news.put_nowait(None)

    running, begun = len(answers), False
    followers = asyncio.gather(*map(follow, range(running)), return_exceptions=True)
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
            yield encode_end()
        elif begun and isinstance(failure, EngineError):
            yield encode_failure(failure)
        else:
            raise failure
    finally:
        followers.cancel()


def _shares_blocks(state: ServerState, prompt: Prompt) -> bool:
    """Whether a second request would find part of the prompt computed."""
    config = state.engine.config
    return config.prefix_caching and len(prompt.token_ids) > config.block_size


def _seed(prompt: Prompt, number: int) -> int | None:
    seed = prompt.sampling.seed
    return None if seed is None else seed + number
