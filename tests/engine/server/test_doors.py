"""Who may ask, and how long a request may take to arrive."""

import asyncio
import contextlib
import gc
import json
import sys

import pytest
from aiohttp.web_protocol import RequestHandler

from lmi_bench.engine.server import app as server_app
from lmi_bench.engine.server.sagemaker_routes import SignatureCheck

ROUTES = ["/invocations", "/v1/completions", "/generate", "/endpoints/toy/invocations"]
BODY = {"prompt": "a", "inputs": "a", "max_tokens": 1, "parameters": {"max_new_tokens": 1}}


async def raw(url, data):
    """What the server answers first to these bytes; nothing if it closes the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    async with asyncio.timeout(120):
        answer = await reader.read(4096)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return answer


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("header", "is_let_in"),
    [
        (None, False),
        ("Bearer other", False),
        ("k", False),
        ("Bearer é", False),
        ("Bearer k", True),
        ("bearer  k", True),
    ],
)
def test_a_request_needs_the_key_where_there_is_one(serve_toy, route, header, is_let_in):
    headers = {} if header is None else {"Authorization": header}

    async def main():
        async with (
            serve_toy(app_options={"api_key": "k"}) as server,
            server.client.post(route, json=BODY, headers=headers) as response,
        ):
            return response.status, response.headers.get("WWW-Authenticate"), await response.text()

    status, scheme, text = asyncio.run(main())
    assert (status != 401) == is_let_in
    assert scheme == (None if is_let_in else "Bearer")
    if not is_let_in:
        assert "API key is missing or wrong" in text
        json.loads(text)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"Content-Type": "text/plain"}, True),
        ({"Content-Type": "text/plain", "Origin": "https://evil.example"}, False),
        ({"Content-Type": "text/plain; a=json", "Origin": "null"}, False),
        ({"Origin": "https://evil.example"}, False),
        ({"Content-Type": "application/json; charset=utf-8", "Origin": "https://a.example"}, True),
    ],
)
def test_a_web_page_must_ask_before_it_sends(serve_toy, route, headers, is_let_in):
    """A browser sends a page's JSON elsewhere after a preflight alone, which nothing here grants;
    plain text or a body without a type would need none."""
    skips = {"skip_auto_headers": ["Content-Type"]}

    async def main():
        async with (
            serve_toy() as server,
            server.client.post(route, data=json.dumps(BODY), headers=headers, **skips) as response,
        ):
            return response.status, await response.text()

    status, text = asyncio.run(main())
    passes_on = route.startswith(("/invocations", "/endpoints/"))
    assert status == (200 if is_let_in or passes_on else 415)
    assert ("a web page must send Content-Type" in text) == (status == 415)


def test_a_signature_is_the_key_where_it_is_asked_for(serve_toy):
    """Both are in the same header."""
    options = {"api_key": "k", "signature_check": SignatureCheck("AKIDEXAMPLE", "secret")}

    async def main():
        async with serve_toy(app_options=options) as server:
            keys = {"Authorization": "Bearer k"}
            found = []
            for route, headers in ((ROUTES[3], {}), (ROUTES[3], keys), (ROUTES[0], {}), (ROUTES[0], keys)):
                async with server.client.post(route, json=BODY, headers=headers) as response:
                    found.append((response.status, response.headers.get("x-amzn-ErrorType")))
            return found

    unsigned, keyed, refused, let_in = asyncio.run(main())
    assert unsigned == (403, "MissingAuthenticationTokenException")
    assert keyed == (403, "IncompleteSignatureException")
    assert (refused[0], let_in[0]) == (401, 200)


def test_a_load_balancer_needs_no_key(serve_toy):
    async def main():
        async with serve_toy(app_options={"api_key": "k"}) as server:
            found = []
            for path in ("/ping", "/health", "/metrics"):
                async with server.client.get(path) as response:
                    found.append(response.status)
            return found

    assert asyncio.run(main()) == [200, 200, 401]


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"", b""),
        (b"POST /invocations HTTP/1.1\r\nHost: a\r\n", b""),
        (b"POST /invocations HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{", b"408"),
    ],
)
def test_a_request_that_does_not_come_is_not_waited_for(serve_toy, monkeypatch, data, answer):
    monkeypatch.setattr(server_app, "REQUEST_TIMEOUT_S", 0.2)

    async def main():
        async with serve_toy() as server:
            found = await raw(server.url, data)
            status, *_ = await server.post("/invocations", {"inputs": "a"})
            return found, status

    found, status = asyncio.run(main())
    assert answer in found
    assert (found == b"") == (answer == b"")
    assert status == 200


@pytest.mark.parametrize("begun", [b"", b"POST /invocations HTTP/1.1\r\nHo"])
def test_a_later_request_that_does_not_come_is_not_waited_for_either(serve_toy, monkeypatch, begun):
    monkeypatch.setattr(server_app, "KEEP_ALIVE_S", 0.2)

    async def main():
        async with serve_toy() as server:
            host, _, port = server.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n" + begun)
            async with asyncio.timeout(120):
                answer = await reader.read()  # until the server closes
            writer.close()
            return answer

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200")


def test_an_answer_may_take_longer_than_its_request(serve_toy, monkeypatch, slow_steps):
    monkeypatch.setattr(server_app, "REQUEST_TIMEOUT_S", 0.1)

    async def main():
        async with serve_toy(executor=slow_steps) as server:
            body = {"inputs": "a", "parameters": {"max_new_tokens": 20}}
            return await server.post("/invocations", body)

    status, _, text = asyncio.run(main())
    assert status == 200
    assert text


def test_a_closed_connection_is_forgotten_before_its_first_request_would_be_late(serve_toy):
    """And the interpreter's settings are as before the server."""

    def settings():
        return sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()

    async def main():
        async with serve_toy() as server:
            during = settings()
            for _ in range(5):
                await raw(server.url, b"GET /ping HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await asyncio.sleep(0)
            gc.collect()
            return during, sum(isinstance(each, RequestHandler) for each in gc.get_objects())

    before = settings()
    during, held = asyncio.run(main())
    assert held == 0
    assert during != before == settings()
