"""What protocols with JSON payloads share: malformed payloads, failed requests, their category."""

import csv
from abc import abstractmethod
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, ClassVar

import orjson

from lmi_bench.core.errors import InputError, TargetError, TargetErrorKind
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import NO_HEADERS, WireEvent, WireFormat
from lmi_bench.wire.framing import EitherSplitter, SseSplitter

DONE = b"[DONE]"
_MAX_MESSAGE_CHARS, _MAX_PLAIN_CHARS = 500, 200
_TABLE = (files("lmi_bench.wire") / "data" / "error_kinds.csv").read_text(encoding="utf-8")


def error_kinds(api: str) -> dict[str, Any]:
    """The category of each error that an API names, or of each HTTP status (error_kinds.csv)."""
    rows = csv.DictReader(_TABLE.splitlines())
    return {row["name"]: row["kind"] for row in rows if row["api"] == api}


_STATUS_KINDS: Mapping[str, TargetErrorKind] = error_kinds("http")
_KINDS: Mapping[str, TargetErrorKind] = error_kinds("openai")


def status_kind(status: int) -> TargetErrorKind:
    """The category of a non-2xx HTTP status.

    429 is throttling, 503 overload, 499 a request cancelled on the way, any other 4xx a client
    error and the rest server errors; so is 424, which LMI and SageMaker use for a failed model.
    529 is Anthropic's overload.
    """
    usual: TargetErrorKind = "client_error" if 400 <= status < 500 else "server_error"
    return _STATUS_KINDS.get(str(status), usual)


def load_object(payload: bytes) -> dict[str, Any] | None:
    """The JSON object in a payload or in an array of one; None if there is none."""
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) else None


def find_message(reply: dict[str, Any]) -> str:
    """The readable message in an error object: `message` or `error`, nested or not."""
    value: Any = reply
    while isinstance(value, dict):
        found = (value.get(key) for key in ("message", "error"))
        inner = next((each for each in found if each and isinstance(each, dict | str)), None)
        if inner is None:
            break
        value = inner
    try:
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
    except TypeError:  # nested too deep to be written
        text = "an error without a message"
    return text[:_MAX_MESSAGE_CHARS]


def describe_status(status: int, body: bytes) -> str:
    """One line about a failed request: the status and the server's message."""
    reply = load_object(body)
    if reply is not None:
        message = find_message(reply)
    else:
        text = body[:_MAX_MESSAGE_CHARS].decode("utf-8", errors="replace")
        message = " ".join(text.split())[:_MAX_PLAIN_CHARS]
    if 300 <= status < 400:
        message = f"a redirect, which is not followed: is the address right? {message}".strip()
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


def error_event(reply: dict[str, Any]) -> WireEvent:
    """The end of a stream by an error object, nested under `error` or not. Its category is that of
    its status, possibly written as text, else that of its name."""
    error = reply["error"] if isinstance(reply.get("error"), dict) else reply
    code = error.get("code", error.get("http_status_code"))
    if isinstance(code, int) or (isinstance(code, str) and code.isdecimal()):
        kind = status_kind(int(code))
    else:
        names = (error.get("code"), error.get("type"))
        kind = next((kind for name, kind in _KINDS.items() if name in names), "server_error")
    return WireEvent(error=find_message(reply), error_kind=kind, end=True)


def clip(payload: bytes) -> str:
    """The start of a payload, safe to print."""
    return repr(payload[:120].decode("utf-8", errors="replace"))


def whole_answer(reply: dict[str, Any], token_ids: tuple[int, ...], input_tokens: int | None) -> WireEvent:
    """The body of an unstreamed response, as TGI and LMI write it."""
    details = reply.get("details") or {}
    return WireEvent(
        text=reply["generated_text"],
        token_ids=token_ids,
        token_count=details.get("generated_tokens"),
        finish_reason=details.get("finish_reason"),
        input_tokens=input_tokens,
        output_tokens=details.get("generated_tokens"),
        end=True,
    )


class JsonFormat(WireFormat):
    """Base of the protocols; `payload_name` is used in errors."""

    payload_name: str

    @abstractmethod
    def event(self, reply: dict[str, Any]) -> WireEvent:
        """Read an object. A missing or ill-typed field may raise what Python raises for it."""

    def parse(self, payload: bytes) -> WireEvent:
        reply = load_object(payload)
        if reply is None:
            raise TargetError("malformed_frame", f"not a JSON object: {clip(payload)}")
        try:
            return self.event(reply)
        except Exception as exc:  # whatever a server sends is its fault
            raise TargetError("malformed_frame", f"not {self.payload_name} ({exc}): {clip(payload)}") from exc

    def error(self, status: int, body: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS) -> TargetError:
        kind = self.error_kind(status, load_object(body) or {})
        return TargetError(kind, describe_status(status, body))

    def error_kind(self, status: int, reply: dict[str, Any]) -> TargetErrorKind:
        """The category of an error object under an HTTP status."""
        return status_kind(status)

    def turns(self, request: PlannedRequest) -> list[dict[str, str]]:
        """The conversation so far, or the prompt as its first turn; InputError without text."""
        turns = request.messages or (("user", self.prompt_text(request)),)
        return [{"role": role, "content": text} for role, text in turns]

    def prompt_text(self, request: PlannedRequest) -> str:
        """The request's text; raises InputError without one."""
        if request.prompt_text:
            return request.prompt_text
        raise InputError(
            f"request {request.request_id} has no prompt_text: the {self.name} protocol takes no token ids"
        )

    def inputs_body(self, request: PlannedRequest, stream: bool, **parameters: Any) -> bytes:
        """A body with `inputs` and `parameters`: greedy, with details."""
        asked = {"max_new_tokens": request.output_tokens, "do_sample": False, "details": True}
        asked |= parameters
        body = {"inputs": self.prompt_text(request), "parameters": asked, "stream": stream}
        return orjson.dumps(body | ({"adapters": request.adapter} if request.adapter else {}))


class SseFormat(JsonFormat):
    """Base of the protocols whose streams are server-sent events, possibly ended by `[DONE]`."""

    new_splitter: ClassVar[type[SseSplitter | EitherSplitter]] = SseSplitter

    def parse(self, payload: bytes) -> WireEvent:
        """Read an event, `[DONE]`, or the body of an unstreamed response."""
        return WireEvent(end=True) if payload.strip() == DONE else super().parse(payload)
