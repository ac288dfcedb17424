"""An endpoint's address: its URL, the addresses of its host, and the request head.

A name may stand for several machines (those of a load balancer, or every replica of a headless
Kubernetes service). Connections take the addresses in turn: with all on the first one, a single
machine would be measured as if it were the fleet.
"""

import asyncio
import base64
import contextlib
import ipaddress
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi_bench import __version__
from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.redaction import redact_text
from lmi_bench.loadgen.http.connection import Address, connect
from lmi_bench.loadgen.http.receive import receiver_of
from lmi_bench.wire.event import WireFormat

PROBE_TIMEOUT_S = 3.0
"""An address that accepts no connection within this time, s, is not used if another one does."""


async def find_addresses(host: str, port: int) -> list[Address]:
    """Addresses of a host that accept a connection, all of one family.

    A single address is not tried. If none answers, the last one is returned, and connecting to it
    reports why. Raises TargetError of kind "connect" if the name is unknown.
    """
    loop = asyncio.get_running_loop()
    try:
        found: list[Any] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise TargetError("connect", f"cannot find the address of {host!r}: {exc.strerror}") from exc
    places: list[Address] = [  # an IPv6 zone stands in its fourth place
        (family, place if place[3:4] > (0,) else (str(place[0]), int(place[1]))) for family, *_, place in found
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
    with contextlib.suppress(TargetError):
        probe = await connect(
            receiver_of(asyncio.get_running_loop()),
            address,
            tls_context=None,
            host="",
            peer="",
            kernel_stamps=False,
            timeout_s=PROBE_TIMEOUT_S,
        )
        probe.close()
        return True
    return False


UNIX_SCHEME = "http+unix"
"""`http+unix://%2Frun%2Fserver.sock/v1`: a Unix socket, its path quoted in place of a host."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy of the environment; `name` is safe to show, its own headers are not."""

    host: str
    port: int
    name: str
    headers: Mapping[str, str] = field(repr=False)


def find_proxy(scheme: str, host: str, port: int) -> Proxy | None:
    """The proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names for a host and NO_PROXY does not
    exclude; never for this machine. Raises InputError for a proxy that does not speak HTTP."""
    named = urllib.request.getproxies()
    url = named.get(scheme) or named.get("all")
    direct = any(_covers(each.strip(), host) for each in named.get("no", "").split(","))
    if not url or direct or is_this_machine(host) or urllib.request.proxy_bypass(f"{host}:{port}"):
        return None
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    own_port = None
    with contextlib.suppress(ValueError):  # its text may hold a part of the password
        own_port = parts.port or 80
    if parts.scheme != "http" or not parts.hostname or own_port is None:
        raise InputError(
            f"the environment's proxy for {host} is no http:// address: name one in "
            f"{scheme.upper()}_PROXY, or set NO_PROXY={host} to connect directly"
        )
    headers = {} if (own := _basic(parts)) is None else {"Proxy-Authorization": own}
    return Proxy(parts.hostname, own_port, f"http://{parts.hostname}:{own_port}", headers)


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine, also by the address that a server says it listens on."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified
    return host.rstrip(".") == "localhost"


def _covers(excluded: str, host: str) -> bool:
    """Whether a part of NO_PROXY that urllib does not know, a network or *.domain, is of a host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(re.sub(r"[][]", "", excluded), strict=False)
    return excluded.startswith("*.") and host.endswith(excluded[1:])


def _basic(parts: urllib.parse.SplitResult) -> str | None:
    """The authorization that a URL's user and password stand for."""
    if parts.username is None:
        return None
    pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The destination of requests: the complete path, and the authorization from the URL.

    proxy  the one that the requests go through
    unix   path of the socket that stands for host and port
    """

    scheme: str
    host: str
    port: int
    path: str
    authorization: str | None = None
    proxy: Proxy | None = None
    unix: str | None = None

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"

    @property
    def peer(self) -> str:
        """Where its connections lead, for messages."""
        return self.unix or (self.proxy.name if self.proxy else f"{self.host}:{self.port}")

    async def addresses(self) -> list[Address]:
        """The addresses to connect to; raises TargetError if the name is unknown."""
        if self.unix is not None:
            return [(socket.AF_UNIX, self.unix)]
        via = self.proxy or self
        return await find_addresses(via.host, via.port)

    @property
    def forwarder(self) -> Proxy | None:
        """The proxy that gets the requests themselves, as many open a tunnel to port 443 alone."""
        return self.proxy if self.scheme == "http" else None

    def request_target(self, path: str) -> str:
        """The path as a request line names it: to a forwarding proxy the whole URL."""
        return path if self.forwarder is None else f"http://{self.authority}{path}"

    @property
    def tunnel(self) -> bytes:
        """The request for a tunnel through the proxy; empty: none is needed."""
        if self.proxy is None or self.forwarder is not None:
            return b""
        place = f"{self.authority}:443" if self.port == 443 else self.authority
        headers = header_lines({"Host": place, **self.proxy.headers})
        return b"CONNECT %b HTTP/1.1\r\n%b\r\n" % (place.encode(), headers)


def parse_endpoint(url: str, wire_format: WireFormat) -> Endpoint:
    """The endpoint of a URL for a protocol.

    Without a path, or with one that ends in `/v1`, the protocol's path is added; any other path is
    used unchanged. Raises InputError if it is no http(s) URL.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
        host = (parts.hostname or "" if parts.scheme != UNIX_SCHEME else "localhost").encode("idna").decode()
    except ValueError as exc:
        raise InputError(f"{redact_text(url)!r} is not a URL: {exc}") from exc
    is_unix = parts.scheme == UNIX_SCHEME
    if parts.scheme not in ("http", "https", UNIX_SCHEME) or not parts.hostname:
        shown = redact_text(url).rpartition("@")[2]  # one without a scheme may hold a password, too
        raise InputError(f"{shown!r} is not an address: write for example http://localhost:8000")
    host = host.replace("%25", "%", 1) if ":" in host else host  # of an IPv6 zone, as URLs quote it
    port = port or (443 if parts.scheme == "https" else 80)
    path = parts.path.rstrip("/")
    if not path:
        path = wire_format.path
    elif path.endswith("/v1") and wire_format.path.startswith("/v1/"):
        path += wire_format.path.removeprefix("/v1")
    if parts.query:
        path += f"?{parts.query}"
    return Endpoint(
        scheme="http" if is_unix else parts.scheme,
        host=host,
        port=port,
        path=urllib.parse.quote(path, safe="/?&=%:+,;@!$'()*~-._"),
        authorization=_basic(parts),
        proxy=find_proxy(parts.scheme, host, port),
        unix=urllib.parse.unquote(parts.netloc) if is_unix else None,
    )


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises InputError for what cannot be a header; its value may be a key and is not shown."""
    for name, value in headers.items():
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise InputError(f"{name!r} is not the name of an HTTP header")
        if any(char in "\r\n\0" or ord(char) > 255 for char in value):
            raise InputError(f"the value of header {name!r} must be one line of Latin-1")


def request_head(endpoint: Endpoint, headers: Mapping[str, str]) -> bytes:
    """The request's bytes before its Content-Length."""
    merged = {"Host": endpoint.authority, "User-Agent": f"lmi-bench/{__version__}"}
    merged |= {"Accept": "*/*", "Content-Type": "application/json"}
    if endpoint.authorization is not None:
        merged["Authorization"] = endpoint.authorization
    if endpoint.forwarder is not None:
        merged |= endpoint.forwarder.headers
    check_headers(headers)
    for name, value in headers.items():
        for known in [known for known in merged if known.lower() == name.lower()]:
            del merged[known]
        merged[name] = value
    target = endpoint.request_target(endpoint.path)
    return f"POST {target} HTTP/1.1\r\n".encode("latin-1") + header_lines(merged)


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as sent on the wire."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    return "".join(lines).encode("latin-1", "replace")
