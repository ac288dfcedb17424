"""What reaches a stream's client, however fast it reads and whatever fails on the way."""

import asyncio
import json
import socket

import pytest

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.server.feed import Feed, Outbox

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = {COMPLETIONS: {"prompt": "a b"}, CHAT: {"messages": [{"role": "user", "content": "a b"}]}}


class Generation:
    on_news = None


class Answer:
    """One that gains what a test puts into `events`; None ends it."""

    def __init__(self):
        self.generation = Generation()
        self.events = []
        self.finish_reason = None

    def gain(self, *events):
        self.events += events
        self.generation.on_news()

    def take(self):
        if not self.events:
            return None
        event = self.events.pop(0)
        if isinstance(event, Exception):
            raise event
        self.finish_reason = "length" if event is None else None
        return [event]


class Reply:
    def event(self, pieces, number=0):
        return f"{number}:{pieces[0]} ".encode()

    def end(self):
        return b"end"

    def failure(self, exc):
        return f"failed: {exc}".encode()


def test_a_slow_client_is_waited_for_and_misses_nothing():
    """`send` says no to its second bytes: then nothing is sent before the handler asks again."""

    async def main():
        answer, sent, takes_more = Answer(), [], [True, False]
        feed = Feed(Outbox(), [answer], Reply(), begun=False)

        def send(data):
            sent.append(data)
            return takes_more.pop(0)

        waiting = asyncio.create_task(feed.next(send))
        for event in ("a", "b", "c"):
            await asyncio.sleep(0)
            answer.gain(event)
            await asyncio.sleep(0)
        handlers = [await waiting, await feed.next(send)]
        answer.gain("d", None)
        return sent, [*handlers, await feed.next(send)], feed.ended

    sent, handlers, ended = asyncio.run(main())
    assert sent == [b"0:a ", b"0:b "]
    assert (handlers, ended) == ([b"", b"0:c ", b"0:d 0:None end"], True)


def test_choices_with_news_in_one_turn_are_sent_together_in_their_tokens_order():
    async def main():
        answers, sent = [Answer(), Answer()], []
        feed = Feed(Outbox(), answers, Reply(), begun=False)
        waiting = asyncio.create_task(feed.next(lambda data: sent.append(data) or True))
        await asyncio.sleep(0)
        answers[1].gain("a", "b")
        answers[0].gain("c")
        await asyncio.sleep(0)
        answers[0].gain(None)
        answers[1].gain(None)
        return sent, await waiting

    assert asyncio.run(main()) == ([b"0:c 1:a 1:b "], b"0:None 1:None end")


async def ended_by(exc, *, begun):
    """What a waiting handler gets from a failure, and whether its stream has ended."""
    answer = Answer()
    feed = Feed(Outbox(), [answer], Reply(), begun=begun)
    waiting = asyncio.create_task(feed.next(lambda data: True))
    await asyncio.sleep(0)
    answer.gain(exc)
    return await waiting, feed.ended


def test_a_failure_ends_a_stream_that_has_begun_and_is_raised_before():
    failure = EngineError("a rank died")
    assert asyncio.run(ended_by(failure, begun=True)) == (b"failed: a rank died", True)
    with pytest.raises(EngineError, match="a rank died"):
        asyncio.run(ended_by(failure, begun=False))


def test_a_fault_in_encoding_ends_the_stream_of_its_handler():
    with pytest.raises(KeyError, match="a fault"):
        asyncio.run(ended_by(KeyError("a fault"), begun=True))


def test_a_client_that_begins_to_read_late_gets_every_token(serve_toy):
    """800 kB of log-probabilities wait for it, more than its socket and the server's hold."""
    call = {"prompt": "a", "max_tokens": 500, "logprobs": 20, "stream": True}

    async def main():
        async with serve_toy() as server:
            host, port = server.url.removeprefix("http://").split(":")
            with socket.socket() as late:
                late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                late.connect((host, int(port)))
                body = json.dumps(call).encode()
                head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
                late.sendall(head.encode() + body)
                await server.until(lambda: server.engine.stats().done.generation_tokens == 500)
                with late.makefile("rb") as answer:
                    return await asyncio.to_thread(answer.read)

    _, events = asyncio.run(main()).split(b"\r\n\r\n")
    *chunks, end = events.split(b"\n\n")[:-1]
    assert len(chunks) == 500
    assert end == b"data: [DONE]"
    chunk = json.loads(chunks[-1].removeprefix(b"data: "))
    assert chunk["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_plain_chunk_is_the_one_with_more_fields_without_them(serve_toy, path):
    call = PROMPTS[path] | {"max_tokens": 3, "stream": True}

    async def main():
        async with serve_toy() as server:
            plain = await server.post(path, call)
            return plain[2], (await server.post(path, call | {"return_token_ids": True}))[2]

    plain, full = ([json.loads(event[6:]) for event in body.split(b"\n\n")[:-2]] for body in asyncio.run(main()))
    for chunk in full:
        for part in (chunk, chunk["choices"][0]):
            part.pop("token_ids", None)
            part.pop("prompt_token_ids", None)
        chunk["id"] = plain[0]["id"]
        chunk["created"] = plain[0]["created"]
    assert plain == full
