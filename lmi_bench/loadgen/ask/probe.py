"""Single requests to an address before a measurement; their speed does not matter."""

import contextlib
import http.client
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lmi_bench.core.clock import alarm
from lmi_bench.core.errors import InputError
from lmi_bench.core.redaction import redact_text
from lmi_bench.loadgen.http.answer import said_by
from lmi_bench.loadgen.http.endpoint import check_headers, parse_endpoint
from lmi_bench.wire.event import WireFormat
from lmi_bench.wire.format import find_format
from lmi_bench.wire.json_format import load_object

GET_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 8 * 2**20  # a metrics page of many adapters and replicas is long
_UNKNOWN_ISSUER = (18, 19, 20, 21)  # OpenSSL's codes of a certificate that nothing here vouches for
TELL_AFTER_S = 2.0  # after this long, print what the program is waiting for
_RESETS, _RESET_TRIES, _RESET_PAUSE_S = ("/reset_prefix_cache", "/flush_cache"), 4, 0.05
OVERRUN_LINES, OVERRUN_S = 100, 10.0
"""Stop reading a probe's answer after 100 lines or 10 s: the server ignores the asked length."""


class UnansweredError(InputError):
    """A request reached the server but got no complete answer in time."""


class EndlessError(UnansweredError):
    """The answer is already far longer than requested."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply; status 0 if none came in time."""

    status: int
    content_type: str = ""
    body: bytes = b""

    def json_object(self) -> dict[str, Any]:
        """The body's object if the status is 200, else an empty one."""
        return (load_object(self.body) or {}) if self.status == 200 else {}


class _OverrunError(http.client.HTTPException):
    """An answer far beyond the requested length; its text: what has arrived so far."""


@dataclass(eq=False, repr=False)  # its address and headers may have a key
class Probe:
    """Sends requests to one server; `path` is that of its address, `url` is safe to show.

    tell     called with a message when a request takes long
    context  certificates to accept; None: the system's
    """

    address: str
    headers: Mapping[str, str]
    _: KW_ONLY
    timeout_s: float = 60.0
    tell: Callable[[str], None] = lambda _: None
    context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self.url = redact_text(self.address)
        at = parse_endpoint(self.address, find_format("openai"))
        self.authority = at.authority
        self.path = urllib.parse.urlsplit(self.address).path.rstrip("/")
        self._at = at
        self._way = f" through the environment's proxy {at.peer}" if at.proxy else ""
        own = dict(at.forwarder.headers) if at.forwarder else {}
        if at.authorization is not None:
            own["Authorization"] = at.authorization
        check_headers(self.headers)
        self._headers = {"Accept": "*/*", **own, **self.headers}

    @property
    def keys(self) -> tuple[str, ...]:
        """The credentials in its requests."""
        named = {"authorization", "x-api-key", "api-key"}
        values = [value for name, value in self._headers.items() if name.lower() in named]
        return tuple(part for value in values for part in (value, value.rpartition(" ")[2]))

    def get(self, path: str, method: str = "GET") -> Reply:
        """Ask a path of the URL's API without a body; status 0 if that fails."""
        try:
            with self._announced(f"{method} {path}", GET_TIMEOUT_S):
                return self._ask(method, self._root() + path, None, GET_TIMEOUT_S)
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            return Reply(0)

    def get_itself(self) -> Reply:
        """Ask the address itself, unannounced; raises what connecting and reading do."""
        parts = urllib.parse.urlsplit(self.address)
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        return self._ask("GET", path, None, self.timeout_s)

    def reset_prefix_cache(self) -> None:
        """Empty the server's prefix cache by vLLM's or by SGLang's route; raises InputError if the
        server has neither. SGLang refuses while a request is still on its way out."""
        said: dict[str, str] = {}
        for path in _RESETS * _RESET_TRIES:
            status = self.get(path, "POST").status
            if 200 <= status < 300:
                return
            said[path] = f"HTTP {status}" if status else "no answer"
            time.sleep(_RESET_PAUSE_S)
        answers = ", ".join(f"{path}: {why}" for path, why in said.items())
        raise InputError(
            f"--reset-prefix-cache: {self.url} does not empty its prefix cache "
            f"({answers}); vLLM does if started with VLLM_SERVER_DEV_MODE=1"
        )

    def post(self, wire_format: WireFormat, body: bytes, *, whole: bool = True) -> Reply:
        """POST where this protocol is served.

        whole  False: do not read the body of a 2xx reply
        Raises InputError if nothing answers, UnansweredError if the reply is incomplete.
        """
        path = parse_endpoint(self.address, wire_format).path
        try:
            with self._announced(f"POST {path}", self.timeout_s):
                return self._ask("POST", path, body, self.timeout_s, whole=whole)
        except TimeoutError as exc:
            raise UnansweredError(
                f"{self.url} gave no whole answer to POST {path} within {self.timeout_s:g} s"
            ) from exc
        except _OverrunError as exc:
            raise EndlessError(
                f"{self.url} does not end its answer to POST {path}: asked for a few "
                f"tokens, it sent {exc} and goes on. Does it obey the requested number "
                "of tokens? With --protocol and --model it is measured all the same"
            ) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise UnansweredError(f"{self.url} broke off the answer to POST {path}{self._way}: {exc!r}") from exc

    def _announced(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        """Announce the wait if the block takes long."""
        text = f"waiting for {self.authority} to answer {what}, {limit_s:g} s at most"
        return alarm(TELL_AFTER_S, lambda: self.tell(text))

    def _root(self) -> str:
        """The path prefix before the API's own paths, such as `/openai` in `/openai/v1`."""
        for mark in ("/v1/", "/invocations/", "/predictions/", "/generate/", "/generate_stream/"):
            if mark in self.path + "/":
                return (self.path + "/").partition(mark)[0]
        return self.path

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float, *, whole: bool = True) -> Reply:
        began_s = time.monotonic()
        with contextlib.closing(self._connect(min(timeout_s, GET_TIMEOUT_S))) as connection:
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            headers = dict(self._headers)
            if body is not None:
                headers.setdefault("Content-Type", "application/json")
            target, proxy = self._at.request_target(path), self._at.forwarder
            connection.request(method, target, body=body, headers=headers)
            with contextlib.closing(connection.getresponse()) as reply:
                kind = (reply.getheader("Content-Type") or "").split(";")[0].strip().lower()
                if proxy is not None and kind != "application/json":
                    named = {n.lower().encode(): v.encode() for n, v in reply.getheaders()}
                    if by := said_by(proxy.name, reply.status, named):
                        raise InputError(f"{self.url}: {by}HTTP {reply.status} {reply.reason}")
                if not whole and 200 <= reply.status < 300:
                    return Reply(reply.status, kind)
                return Reply(reply.status, kind, _read(reply, began_s, timeout_s))

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        at, proxy, way = self._at, self._at.proxy, self._way
        via = proxy or at
        connection: http.client.HTTPConnection = _UnixConnection(at.unix or "", timeout_s)
        if at.scheme == "https":
            connection = http.client.HTTPSConnection(via.host, via.port, timeout=timeout_s, context=self.context)
        elif at.unix is None:
            connection = http.client.HTTPConnection(via.host, via.port, timeout=timeout_s)
        if proxy is not None and at.forwarder is None:
            connection.set_tunnel(at.host, at.port, dict(proxy.headers))
        try:
            connection.connect()
        except TimeoutError as exc:
            if connection.sock is not None:  # connected, and silent since
                raise InputError(
                    f"{self.authority} does not answer TLS within {timeout_s:g} s: does "
                    "it speak it? Else write http:// instead of https://"
                ) from exc
            raise InputError(f"no connection to {at.authority}{way} within {timeout_s:g} s") from exc
        except ssl.SSLError as exc:
            hint = ""
            if exc.reason == "WRONG_VERSION_NUMBER":
                hint = ": the port does not speak TLS; write http:// instead of https://"
            elif isinstance(exc, ssl.SSLCertVerificationError):
                hint = f": {exc.verify_message}"
                if exc.verify_code in _UNKNOWN_ISSUER:
                    hint += "; SSL_CERT_FILE=FILE, or sweep --cacert FILE, trusts its PEM file"
            raise InputError(f"TLS with {self.authority} failed ({exc.reason}){hint}") from exc
        except OSError as exc:
            raise InputError(f"nothing answers at {self.url}{way}: {exc.strerror or exc}; is the server up?") from exc
        return connection


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _read(reply: http.client.HTTPResponse, began_s: float, timeout_s: float) -> bytes:
    """A whole body. Raises TimeoutError, or _OverrunError if it does not end."""
    parts: list[bytes] = []
    num_bytes = num_lines = 0
    while part := reply.read1(MAX_REPLY_BYTES):
        parts.append(part)
        num_bytes += len(part)
        num_lines += part.count(b"\n")
        took_s = time.monotonic() - began_s
        too_much = num_bytes > MAX_REPLY_BYTES
        if num_lines > OVERRUN_LINES and (too_much or took_s > OVERRUN_S):
            raise _OverrunError(f"{num_lines:,} lines in {took_s:.0f} s")
        if too_much or took_s > timeout_s:
            raise TimeoutError
    return b"".join(parts)
