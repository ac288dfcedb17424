"""Test requests before a run: whether a server accepts the protocol, the model and the length.

One request for two tokens shows whether a protocol is served, and by which field a server obeys a
requested length. A request that the server would refuse every time is reported before the run.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.endpoint import parse_endpoint
from lmi_bench.wire.event import WireEvent, WireFormat
from lmi_bench.wire.format import find_format
from lmi_bench.wire.openai import OpenAiChatFormat

GET_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 2**20
TELL_AFTER_S = 2.0
"""After this long, print what the program is waiting for."""
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
        if self.status != 200:
            return {}
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}


class _OverrunError(Exception):
    """An answer far beyond the requested length; its text: what has arrived so far."""


class Probe:
    """Sends requests to one server; `path` is that of its URL, `url` is safe to show.

    tell  called with a message when a request takes long
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.url = redact_text(url)
        self._tell = tell
        self._asked_url = url
        at = parse_endpoint(url, find_format("openai"))
        self.authority = at.authority
        self.path = urllib.parse.urlsplit(url).path.rstrip("/")
        self._https, self._host, self._port = at.scheme == "https", at.host, at.port
        own = {} if at.authorization is None else {"Authorization": at.authorization}
        self._headers = {"Accept": "*/*", **own, **headers}
        self._timeout_s = timeout_s

    @property
    def keys(self) -> tuple[str, ...]:
        """The credentials in its requests."""
        named = {"authorization", "x-api-key", "api-key"}
        values = [value for name, value in self._headers.items() if name.lower() in named]
        return tuple(part for value in values for part in (value, value.rpartition(" ")[2]))

    def get(self, path: str) -> Reply:
        """GET a path of the URL's API; status 0 if that fails."""
        try:
            with self._announced(f"GET {path}", GET_TIMEOUT_S):
                return self._ask("GET", self._root() + path, None, GET_TIMEOUT_S)
        except (TimeoutError, ConnectionError, http.client.HTTPException, _OverrunError):
            return Reply(0)

    def post(self, wire_format: WireFormat, body: bytes, *, whole: bool = True) -> Reply:
        """POST where this protocol is served.

        whole  False: do not read the body of a 2xx reply

        Raises InputError if nothing answers, UnansweredError if the reply is incomplete.
        """
        path = parse_endpoint(self._asked_url, wire_format).path
        try:
            with self._announced(f"POST {path}", self._timeout_s):
                return self._ask("POST", path, body, self._timeout_s, whole=whole)
        except TimeoutError as exc:
            raise UnansweredError(
                f"{self.url} gave no whole answer to POST {path} within {self._timeout_s:g} s"
            ) from exc
        except _OverrunError as exc:
            raise EndlessError(
                f"{self.url} does not end its answer to POST {path}: asked for a few tokens, it "
                f"sent {exc} and goes on. Does it obey the requested number of tokens? With "
                "--protocol and --model it is measured all the same"
            ) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise UnansweredError(
                f"{self.url} broke off the answer to POST {path}: {exc!r}"
            ) from exc

    @contextlib.contextmanager
    def _announced(self, what: str, limit_s: float) -> Iterator[None]:
        """Announce the wait if the block takes long."""
        text = f"waiting for {self.authority} to answer {what}, {limit_s:g} s at most"
        timer = threading.Timer(TELL_AFTER_S, self._tell, (text,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _root(self) -> str:
        """The path prefix before the API's own paths, such as `/openai` in `/openai/v1`."""
        for mark in ("/v1/", "/invocations/", "/predictions/", "/generate/", "/generate_stream/"):
            if mark in self.path + "/":
                return (self.path + "/").partition(mark)[0]
        return self.path

    def _ask(
        self, method: str, path: str, body: bytes | None, timeout_s: float, *, whole: bool = True
    ) -> Reply:
        began_s = time.monotonic()
        with contextlib.closing(self._connect()) as connection:
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            headers = dict(self._headers)
            if body is not None:
                headers.setdefault("Content-Type", "application/json")
            connection.request(method, path, body=body, headers=headers)
            with contextlib.closing(connection.getresponse()) as reply:
                kind = (reply.getheader("Content-Type") or "").split(";")[0].strip().lower()
                if not whole and 200 <= reply.status < 300:
                    return Reply(reply.status, kind)
                return Reply(reply.status, kind, _read(reply, began_s, timeout_s))

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=GET_TIMEOUT_S)
        try:
            connection.connect()
        except TimeoutError as exc:
            if connection.sock is not None:  # connected, and silent since
                raise InputError(
                    f"{self.authority} does not answer TLS within {GET_TIMEOUT_S:g} s: does it "
                    "speak it? Else write http:// instead of https://"
                ) from exc
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


REFUSED_FIELDS: Final = (400, 422, 424)
"""Statuses of a server that rejects an unknown field."""
WANTS_KEY: Final = (401, 403)
OLD_LENGTH: Final = OpenAiChatFormat(length_field="max_tokens")
_OLD_LENGTH_NOTE: Final = (
    "the server ignores max_completion_tokens: lengths are requested as max_tokens"
)
_ASKED_TOKENS, _TOO_MANY_TOKENS = 2, 5


def ask_for_two(
    probe: Probe,
    wire_format: WireFormat,
    model: str,
    *,
    stream: bool,
    ignore_eos: bool = True,
    whole: bool = True,
) -> tuple[WireFormat, Reply, bool]:
    """Request two tokens; gives the format that the server obeys, its reply, and whether the
    length was forced.

    A chat server may know only the older field for the length. It then answers with more tokens
    than requested, so its answer is always read.

    whole  False: do not wait for the body
    """
    chat = isinstance(wire_format, OpenAiChatFormat)
    request = PlannedRequest(
        *(0, 0.0, 1, _ASKED_TOKENS), prompt_text="Hello", ignore_eos=ignore_eos
    )

    def generate(form: WireFormat) -> tuple[WireFormat, Reply, bool]:
        """One request; repeated without `ignore_eos` if the server may refuse that field."""

        def post(planned: PlannedRequest) -> Reply:
            body = form.request_body(planned, model=model, stream=stream)
            return probe.post(form, body, whole=whole or chat)

        reply = post(request)
        if reply.status not in REFUSED_FIELDS or not ignore_eos:
            return form, reply, ignore_eos
        again = post(replace(request, ignore_eos=False))
        return (form, again, False) if 200 <= again.status < 300 else (form, reply, True)

    endless: EndlessError | None = None
    usual: tuple[WireFormat, Reply, bool] | None = None
    try:
        usual = generate(wire_format)
        if not chat or not _is_too_long(wire_format, usual[1], stream=stream):
            return usual
    except EndlessError as exc:
        if not chat:
            raise
        endless = exc
    try:
        older = generate(OLD_LENGTH)
    except UnansweredError:
        older = OLD_LENGTH, Reply(0), False
    if 200 <= older[1].status < 300 and not _is_too_long(OLD_LENGTH, older[1], stream=stream):
        return older
    if usual is None:
        assert endless is not None  # otherwise there is an answer
        raise endless
    return usual


def _is_too_long(wire_format: WireFormat, reply: Reply, *, stream: bool) -> bool:
    """Whether an answer has clearly more tokens than requested."""
    try:
        events = list(events_of(wire_format, reply, stream=stream))
    except TargetError:
        return False
    stated = max((event.output_tokens or 0 for event in events), default=0)
    return (stated or sum(event.num_tokens for event in events)) >= _TOO_MANY_TOKENS


def events_of(wire_format: WireFormat, reply: Reply, *, stream: bool) -> Iterator[WireEvent]:
    """The events of a reply. Raises TargetError if it is of another protocol."""
    kind = reply.content_type
    if not stream or kind == "application/json":
        yield wire_format.parse(reply.body)
        return
    splitter = wire_format.new_splitter()
    for payload in (*splitter.feed(reply.body), *splitter.close()):
        yield wire_format.parse(payload)


def length_notes(wire_format: WireFormat) -> tuple[str, ...]:
    """Notes about the length format that a server obeys."""
    return (_OLD_LENGTH_NOTE,) if wire_format is OLD_LENGTH else ()


def wants_key(probe: Probe, wire_format: WireFormat, reply: Reply) -> InputError:
    """The error for a request that got 401 or 403."""
    said = redact_text(str(wire_format.error(reply.status, reply.body)), probe.keys)
    if probe.keys:
        return InputError(
            f"{probe.url} refuses the key that it is given ({said}): give another with --api-key, "
            "or -H 'Name: value'"
        )
    return InputError(f"{probe.url} wants a key ({said}): give --api-key, or -H 'Name: value'")


TIMEOUT_S = 10.0
_MAY_PASS = (408, 409, 425)
"""Client error statuses that may be temporary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """How a server handles requests of a protocol and a model.

    forces_length  whether it accepts `ignore_eos`
    wire_format    request format, if it is not the protocol's usual one
    """

    forces_length: bool = True
    wire_format: WireFormat | None = None
    notes: tuple[str, ...] = ()


def accepts(
    url: str,
    *,
    protocol: str,
    model: str,
    stream: bool = True,
    ignore_eos: bool = True,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[str], None] = lambda _: None,
) -> Accepted:
    """Request two tokens from a server whose protocol and model are stated.

    Raises InputError if nothing answers, or if the server would refuse every other request too
    (key, model, path). Failures that may be temporary (a server error, overload, a slow or endless
    answer) are left to the measurement.
    """
    probe = Probe(url, headers or {}, timeout_s=timeout_s, tell=tell)
    try:
        wire_format, reply, forced = ask_for_two(
            probe,
            find_format(protocol, stream=stream),
            model,
            stream=stream,
            ignore_eos=ignore_eos,
            whole=False,
        )
    except UnansweredError:
        return Accepted()
    if reply.status in WANTS_KEY:
        raise wants_key(probe, wire_format, reply)
    error = wire_format.error(reply.status, reply.body)
    mistaken = error.kind == "client_error" and reply.status not in _MAY_PASS
    if mistaken or 300 <= reply.status < 400:
        said = redact_text(str(error), probe.keys).rstrip(".")
        known = _known_models(probe)
        others = f" (it has {', '.join(known)})" if known and model not in known else ""
        raise InputError(
            f"{probe.url} refuses protocol {protocol} with model {model!r}{others}: {said}. Leave "
            "--protocol and --model out to have them found"
        )
    return Accepted(
        forces_length=forced and protocol != "tgi",
        wire_format=wire_format if wire_format is OLD_LENGTH else None,
        notes=length_notes(wire_format),
    )


def takes_token_ids(
    url: str,
    *,
    model: str,
    stream: bool = True,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    tell: Callable[[str], None] = lambda _: None,
) -> bool:
    """Whether `/v1/completions` accepts a prompt of token ids; requests one token.

    False only if the same request with a text succeeds: other failures are reported by the
    measurement. Raises InputError if nothing answers.
    """
    probe = Probe(url, headers or {}, timeout_s=timeout_s, tell=tell)
    wire_format = find_format("openai", stream=stream)
    text = PlannedRequest(
        0, 0.0, input_tokens=1, output_tokens=1, prompt_text="Hello", ignore_eos=False
    )

    def status(request: PlannedRequest) -> int:
        body = wire_format.request_body(request, model=model, stream=stream)
        return probe.post(wire_format, body, whole=False).status

    try:
        if status(replace(text, prompt_token_ids=(1,))) not in (*REFUSED_FIELDS, 500):
            return True
        return not 200 <= status(text) < 300
    except UnansweredError:
        return True


def _known_models(probe: Probe) -> list[str]:
    """Model names that the server lists, at most five."""
    entries = probe.get("/v1/models").json_object().get("data")
    entries = entries if isinstance(entries, list) else []
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry][:5]
