"""Addresses of a host: which of them answer, and whose turn it is.

A name may stand for several machines (a load balancer's own, or every replica's, as a headless
Kubernetes service lists them). Each of them gets its share of the connections: all on the first
one would measure one machine and call it the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Sequence

from lmi_bench.core.errors import TargetError
from lmi_bench.loadgen.http.connection import Address, connect
from lmi_bench.loadgen.http.receive import receiver_of

PROBE_TIMEOUT_S = 3.0
"""An address that takes no connection within this, where another one does, gets none."""


class Turns:
    """Addresses in turn, one after the other and round again; at least one."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.all = tuple(addresses)
        self._turns = itertools.cycle(self.all)

    def next(self) -> Address:
        """The address whose turn it is."""
        return next(self._turns)


async def find_addresses(host: str, port: int) -> list[Address]:
    """Addresses of a host that take a connection; of one family, that of the first to do so.

    A name with a single address is not tried, and one of which none answers gives its last: who
    connects says why. Raises TargetError of kind "connect" where the name is not known.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise TargetError(
            "connect", f"cannot find the address of {host!r}: {exc.strerror}"
        ) from exc
    places: list[Address] = [
        (family, (str(place[0]), int(place[1]))) for family, _, _, _, place in found
    ]
    addresses = list(dict.fromkeys(places))
    if len(addresses) == 1:
        return addresses
    answers = await asyncio.gather(*(_answers(address) for address in addresses))
    answering = [each for each, answer in zip(addresses, answers, strict=True) if answer]
    if not answering:
        return addresses[-1:]
    return [each for each in answering if each[0] == answering[0][0]]


async def _answers(address: Address) -> bool:
    """Whether an address takes a connection."""
    with contextlib.suppress(TargetError):
        probe = await connect(
            receiver_of(asyncio.get_running_loop()),
            address,
            tls_context=None,
            host=address[1][0],
            kernel_stamps=False,
            timeout_s=PROBE_TIMEOUT_S,
        )
        probe.close()
        return True
    return False
