"""A name with several addresses: connections and requests are shared out among those that answer.

The machines are loopback addresses; only the look-up of the name is stood in for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter

import pytest

from lmi_bench.core.errors import TargetError
from lmi_bench.loadgen.http.endpoint import find_addresses, parse_endpoint
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.wire.format import find_format
from tests.faults.misbehaving import REQUEST, Misbehaving, good_answer

HOSTS = ("127.0.0.2", "127.0.0.3")
NOBODY = "127.0.0.4"


@contextlib.asynccontextmanager
async def fleet(monkeypatch, *, named=HOSTS):
    """A server on each of HOSTS; the name `fleet` stands for the `named` ones. Gives the port and
    the servers by address."""
    servers, listeners, port = {}, [], 0
    for host in HOSTS:
        servers[host] = Misbehaving(lambda _: [good_answer()])
        listener = await asyncio.start_server(servers[host].handle, host, port)
        port = listener.sockets[0].getsockname()[1]
        listeners.append(listener)
    loop = asyncio.get_running_loop()
    look_up = loop.getaddrinfo

    async def getaddrinfo(host, number, **kind):
        if host != "fleet":
            return await look_up(host, number, **kind)
        found = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in named]
        places = zip(found, named, strict=True)
        return [(kind, socket.SOCK_STREAM, 6, "", (each, number)) for kind, each in places]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
    try:
        yield port, servers
    finally:
        for listener in listeners:
            listener.close()


def target_of(port, **options):
    return HttpTarget(f"http://fleet:{port}", find_format("openai"), model="m", **options)


def test_addresses_that_nobody_serves_are_left_out(monkeypatch):
    async def main():
        async with fleet(monkeypatch, named=(NOBODY, *HOSTS, "::1")) as (port, _):
            return await find_addresses("fleet", port), port

    found, port = run_on_sockets(main())
    assert found == [(socket.AF_INET, (host, port)) for host in HOSTS]


def test_of_addresses_that_nobody_serves_one_is_left_to_say_why(monkeypatch):
    async def main():
        async with fleet(monkeypatch, named=(NOBODY, "127.0.0.5")) as (port, _):
            return await find_addresses("fleet", port), port

    found, port = run_on_sockets(main())
    assert found == [(socket.AF_INET, ("127.0.0.5", port))]


def test_a_name_that_stands_for_nobody_fails_where_it_is_connected_to(monkeypatch):
    async def main():
        async with fleet(monkeypatch, named=(NOBODY, "127.0.0.5")) as (port, _), target_of(port) as target:
            with pytest.raises(TargetError, match="cannot connect to fleet"):
                await target.send(REQUEST)

    run_on_sockets(main())


@pytest.mark.parametrize("connections", ["reuse", "per-request"])
def test_each_address_gets_its_share(monkeypatch, connections):
    """Eight requests, four at once: four on each machine."""

    async def main():
        async with fleet(monkeypatch) as (port, servers), target_of(port, connections=connections) as target:
            await target.open_level(4)
            for _ in range(2):
                await asyncio.gather(*(target.send(REQUEST) for _ in range(4)))
            return Counter({host: len(server.requests) for host, server in servers.items()})

    assert run_on_sockets(main()) == dict.fromkeys(HOSTS, 4)


def test_one_request_at_a_time_visits_all_addresses_in_turn(monkeypatch):
    """With connections to both open, the last one that was freed would always be the same."""

    async def main():
        async with fleet(monkeypatch) as (port, servers), target_of(port) as target:
            await target.open_level(4)
            for _ in range(6):
                await target.send(REQUEST)
            return [len(servers[host].requests) for host in HOSTS]

    assert run_on_sockets(main()) == [3, 3]


def test_an_ipv6_zone_is_connected_to_and_not_named_to_the_server(monkeypatch):
    """Without its zone a link-local address leads nowhere."""
    at = parse_endpoint("http://[fe80::1%25eth0]:8000", find_format("openai"))
    assert (at.host, at.authority) == ("fe80::1%eth0", "[fe80::1]:8000")

    async def main():
        async def getaddrinfo(*_, **__):
            return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 8000, 0, 3))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        return await at.addresses()

    assert asyncio.run(main()) == [(socket.AF_INET6, ("fe80::1", 8000, 0, 3))]


def test_a_name_in_other_letters_is_sent_as_dns_has_it():
    at = parse_endpoint("http://Bücher.example:8000", find_format("openai"))
    assert at.authority == "xn--bcher-kva.example:8000"
