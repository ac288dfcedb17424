"""Single requests to an address before anything is measured; time does not matter here."""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from lmi_bench.errors import InputError
from lmi_bench.loadgen.endpoint import parse_endpoint
from lmi_bench.wire.event import WireFormat
from lmi_bench.wire.format import find_format

GET_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply; status 0 where none came in time."""

    status: int
    content_type: str = ""
    body: bytes = b""

    def json_object(self) -> dict[str, Any]:
        """The body's object if the status is 200, else an empty one."""
        if self.status != 200:
            return {}
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}


class Probe:
    """Asks one server; `path` is that of its URL."""

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_s: float) -> None:
        self.url = url
        at = parse_endpoint(url, find_format("openai"))
        self.authority = at.authority
        self.path = urllib.parse.urlsplit(url).path.rstrip("/")
        self._https, self._host, self._port = at.scheme == "https", at.host, at.port
        own = {} if at.authorization is None else {"Authorization": at.authorization}
        self._headers = {"Accept": "*/*", **own, **headers}
        self._timeout_s = timeout_s

    def get(self, path: str) -> Reply:
        """GET a path of the API that the URL lies in; status 0 where nothing comes of it."""
        try:
            return self._ask("GET", self._root() + path, None, GET_TIMEOUT_S)
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            return Reply(0)

    def post(self, wire_format: WireFormat, body: bytes) -> Reply:
        """POST where this protocol is served. Raises InputError where no reply comes."""
        path = parse_endpoint(self.url, wire_format).path
        try:
            return self._ask("POST", path, body, self._timeout_s)
        except TimeoutError as exc:
            raise InputError(
                f"{self.url} gave no whole answer to POST {path} within {self._timeout_s:g} s"
            ) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise InputError(f"{self.url} broke off the answer to POST {path}: {exc!r}") from exc

    def _root(self) -> str:
        """What stands before the API's own paths, such as `/openai` in `/openai/v1`."""
        for mark in ("/v1/", "/invocations/", "/predictions/", "/generate/", "/generate_stream/"):
            if mark in self.path + "/":
                return (self.path + "/").partition(mark)[0]
        return self.path

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        deadline_s = time.monotonic() + timeout_s
        connection = self._connect()
        try:
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            headers = dict(self._headers)
            if body is not None:
                headers.setdefault("Content-Type", "application/json")
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            parts: list[bytes] = []
            while part := reply.read1(MAX_REPLY_BYTES):
                parts.append(part)
                if sum(map(len, parts)) > MAX_REPLY_BYTES or time.monotonic() > deadline_s:
                    raise TimeoutError
            kind = (reply.getheader("Content-Type") or "").split(";")[0].strip().lower()
            return Reply(reply.status, kind, b"".join(parts))
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=GET_TIMEOUT_S)
        try:
            connection.connect()
        except TimeoutError as exc:
            raise InputError(
                f"no connection to {self.authority} within {GET_TIMEOUT_S:g} s"
            ) from exc
        except ssl.SSLError as exc:
            hint = ""
            if exc.reason == "WRONG_VERSION_NUMBER":
                hint = ": the port does not speak TLS; write http:// instead of https://"
            elif isinstance(exc, ssl.SSLCertVerificationError):
                hint = f": {exc.verify_message}"
            raise InputError(f"TLS with {self.authority} failed ({exc.reason}){hint}") from exc
        except OSError as exc:
            raise InputError(
                f"nothing answers at {self.url}: {exc.strerror or exc}; is the server up?"
            ) from exc
        return connection
