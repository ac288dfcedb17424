"""Streams' bytes, from the engine's news to the transport: one turn of the loop a step."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.server.answer import Answer, Piece


class Reply(Protocol):
    """A protocol's encoding of one or several answers, whose `finish_reason` is set with their
    last pieces."""

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """The pieces of one engine event of an answer."""

    def end(self) -> bytes:
        """The end of the stream."""

    def failure(self, exc: EngineError) -> bytes:
        """An error after status 200 was sent."""


class Outbox:
    """Encodes and sends a step's tokens for all streams in one turn of the loop.

    To wake each stream's handler would cost more than its token; and sends that follow one another
    wake a client once for many of them.
    """

    def __init__(self) -> None:
        self._feeds: list[Feed] = []

    def add(self, feed: "Feed") -> None:
        """Send what the feed has, at the end of this turn."""
        if not self._feeds:
            asyncio.get_running_loop().call_soon(self._empty)
        self._feeds.append(feed)

    def _empty(self) -> None:
        feeds, self._feeds = self._feeds, []
        for feed, data in [(feed, feed.look()) for feed in feeds]:
            feed.send_or_wake(data)


class Feed:
    """The encoded answers of one stream."""

    def __init__(self, outbox: Outbox, answers: Sequence[Answer], reply: Reply, *, begun: bool) -> None:
        """begun  True: a failure is no error response any more, but the end of the stream"""
        self._outbox = outbox
        self._running = dict(enumerate(answers))
        self._reply = reply
        self._begun = begun
        self._news = asyncio.Event()
        self._is_told = False
        self._is_full = False
        self._send: Callable[[bytes], bool] | None = None
        self._unsent = b""
        self._failure: Exception | None = None
        for answer in answers:
            answer.generation.on_news = self._on_news

    @property
    def ended(self) -> bool:
        return not self._running

    async def next(self, send: Callable[[bytes], bool] | None = None) -> bytes:
        """The next bytes, which end the stream if `ended` is true then.

        send  for bytes that need nobody to wait; if it returns False, this returns b"" and the
              caller waits until the client has read
        Raises EngineError if the engine fails before anything was sent.
        """
        self._is_full = False
        while not self._is_full:
            data, self._unsent = self._unsent + self._take(), b""
            self._begun = self._begun or bool(data)
            if isinstance(self._failure, EngineError) and self._begun:
                self._running.clear()
                return data + self._reply.failure(self._failure)
            if self._failure is not None:
                raise self._failure
            if self.ended:
                return data + self._reply.end()
            if data:
                return data
            self._send = send
            try:
                await self._news.wait()
            finally:
                self._send = None
            self._news.clear()
        return b""

    def look(self) -> bytes:
        """What can be sent without the handler."""
        self._is_told = False
        return b"" if self._send is None else self._take()

    def send_or_wake(self, data: bytes) -> None:
        if data and self._send is not None and self._failure is None and not self.ended:
            self._is_full = not self._send(data)
            if not self._is_full:
                return
        else:
            self._unsent += data
        self._send = None
        self._news.set()

    def _on_news(self) -> None:
        if not self._is_told:  # once for all choices
            self._is_told = True
            self._outbox.add(self)

    def _take(self) -> bytes:
        parts: list[bytes] = []
        try:
            for number, answer in tuple(self._running.items()):
                while (pieces := answer.take()) is not None:
                    parts.append(self._reply.event(pieces, number))
                if answer.finish_reason is not None:
                    del self._running[number]
        except Exception as exc:  # noqa: BLE001 - the handler raises it
            self._failure = exc
        return b"".join(parts)
