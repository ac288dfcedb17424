"""The protocols of LMI's and TGI's containers, also behind SageMaker's runtime.

LMI: three eras use the same names but different responses (djl-serving's output_formatter.py up to
0.34, lmi_vllm/request_response_utils.py from 0.35 on):

    A, B  {"token": {"id", "text", "log_prob"}}            the last line adds generated_text and,
                                                           if requested, details
    C     {"index", "token": {"id", "text", "logprob"}, "generated_text", "details"}

Era A omits falsy fields (no `id` for token 0, no `text` if empty), so every token object counts as
a token. Era C's streamed `generated_tokens` is one too high, and one of its lines may hold several
tokens but name only the first.

TGI: errors, overload included, are events under status 200: the server opens the stream before it
requests a slot (router/src/server.rs of TGI 3). No parameter ignores the end-of-sequence token, so
output lengths cannot be forced; `details` states the number of tokens.

InvokeEndpoint returns the container's response; InvokeEndpointWithResponseStream wraps it in an
AWS event stream. A container's error reaches the client as ModelError, status 424, with the cause
in OriginalStatusCode: 429 and 503 are the container's own, 0 is an invocation timeout. Throttling
by SageMaker itself is status 400. Source of the errors: botocore's sagemaker-runtime model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from lmi_bench.core.errors import TargetError, TargetErrorKind
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import NO_HEADERS, Splitter, WireEvent, WireFormat
from lmi_bench.wire.framing import EitherSplitter, EventStreamSplitter, SseSplitter, StreamFailure
from lmi_bench.wire.json_format import (
    JsonFormat,
    describe_status,
    find_message,
    load_object,
    status_kind,
    whole_answer,
)

_FAILED_REASONS = ("error", "abort")


class LmiFormat(JsonFormat):
    """`/invocations` with JSON lines, or server-sent events under `output_formatter=sse`."""

    name = "lmi"
    path: ClassVar[str] = "/invocations"
    payload_name = "an LMI token line"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        """The body to POST; the endpoint has one model, so `model` is not sent.

        `ignore_eos_token` (vLLM and lmi-dist, eras A and B) and `ignore_eos` (era C) force the
        output length. Raises InputError without a prompt text.
        """
        forced = {"ignore_eos_token": True, "ignore_eos": True} if request.ignore_eos else {}
        return self.inputs_body(request, stream, **forced)

    def new_splitter(self) -> EitherSplitter:
        """A splitter for JSON lines or server-sent events."""
        return EitherSplitter()

    def event(self, reply: dict[str, Any]) -> WireEvent:
        """Read a line of a stream, or the whole body of an unstreamed response."""
        if "token" in reply:
            return _token_event(reply)
        if reply.get("error") is not None or "code" in reply:
            return self._error_event(reply)
        details = reply.get("details") or {}
        token_ids = tuple(token["id"] for token in details.get("tokens") or () if "id" in token)
        return whole_answer(reply, token_ids, details.get("input_length"))

    def plain_text(self, payload: bytes) -> str | None:
        """Text of an era A or B line that holds a token and nothing else."""
        try:
            line = orjson.loads(payload)
            if len(line) != 1:
                return None
            token = line["token"]
            if token.get("error_msg"):
                return None
            text = token["text"]
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
            return None
        return text if type(text) is str else None

    def error_kind(self, status: int, reply: dict[str, Any]) -> TargetErrorKind:
        """The category of an error; LMI's `type` resolves ambiguous statuses.

        503 is a full queue (WlmCapacityException) or a model that is not running (WlmException,
        WlmShutdownException); 400 also means that a request timed out waiting for a batch slot.
        """
        type_ = reply.get("type")
        if status == 503 and type_ in ("WlmException", "WlmShutdownException"):
            return "server_error"
        if status == 400 and type_ == "TranslateException" and "Time out in" in find_message(reply):
            return "overloaded"
        return status_kind(status)

    def _error_event(self, line: dict[str, Any]) -> WireEvent:
        """An error object in place of a token: under status 200 the only sign of a failure."""
        nested = line.get("error")
        code = line.get("code")
        if code is None and isinstance(nested, dict):
            code = nested.get("code")
        kind = self.error_kind(code if isinstance(code, int) else 500, line)
        return WireEvent(error=find_message(line), error_kind=kind, end=True)


def _token_event(line: dict[str, Any]) -> WireEvent:
    token = line["token"]
    details = line.get("details") or {}
    finish_reason = details.get("finish_reason")
    if token.get("error_msg") or finish_reason in _FAILED_REASONS:
        message = token.get("error_msg") or f"the server ended the request: {finish_reason}"
        return WireEvent(
            error=str(message), error_kind="server_error", finish_reason=finish_reason, end=True
        )
    token_id = token.get("id")
    text = token.get("text") or ""
    if not isinstance(text, str):
        raise TypeError("its text is not a string")
    era_c = line.get("index") == 0  # the choice; TGI-like containers number tokens from 1 here
    output_tokens = details.get("generated_tokens")
    if output_tokens is not None and era_c:
        output_tokens -= 1
    return WireEvent(
        text=text,
        token_ids=() if token_id is None else (token_id,),
        token_count=None if era_c else 1,
        finish_reason=finish_reason,
        input_tokens=details.get("input_length"),
        output_tokens=output_tokens,
        end=line.get("generated_text") is not None or bool(details),
    )


_ERROR_KINDS: Mapping[str, TargetErrorKind] = {
    "overloaded": "overloaded",
    "validation": "client_error",
    "template_error": "client_error",
    "tool_error": "client_error",
    "empty_input": "client_error",
}


@dataclass(frozen=True)
class TgiFormat(JsonFormat):
    """`/generate_stream`, or `/generate` for unstreamed responses."""

    name: str = "tgi"
    path: str = "/generate_stream"
    payload_name: str = "a TGI event"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        """The body to POST; the endpoint has one model, so `model` is not sent.

        Raises InputError without a prompt text.
        """
        return self.inputs_body(request, stream)  # TGI reads `stream` only on `/invocations`

    def new_splitter(self) -> SseSplitter:
        """Server-sent events."""
        return SseSplitter()

    def event(self, reply: dict[str, Any]) -> WireEvent:
        """Read an event of a stream, or the whole body of an unstreamed response."""
        if reply.get("error") is not None:
            kind = self.error_kind(500, reply)
            return WireEvent(error=find_message(reply), error_kind=kind, end=True)
        if "token" in reply:
            return _tgi_event(reply)
        details = reply.get("details") or {}
        token_ids = tuple(token["id"] for token in details.get("tokens") or ())
        return whole_answer(reply, token_ids, len(details.get("prefill") or ()) or None)

    def error_kind(self, status: int, reply: dict[str, Any]) -> TargetErrorKind:
        """The category of an error; TGI answers 429 when it is full, 424 for a failed model."""
        return _ERROR_KINDS.get(str(reply.get("error_type")), status_kind(status))


def _tgi_event(reply: dict[str, Any]) -> WireEvent:
    token = reply["token"]
    details = reply.get("details") or {}
    text = token.get("text") or ""
    if not isinstance(text, str):
        raise TypeError("its text is not a string")
    return WireEvent(
        text="" if token.get("special") else text,
        token_ids=(token["id"],),
        token_count=1,
        finish_reason=details.get("finish_reason"),
        input_tokens=details.get("input_length"),
        output_tokens=details.get("generated_tokens"),
        end=reply.get("generated_text") is not None,
    )


_ERROR_TYPE = b"x-amzn-errortype"
_NAMES: Mapping[TargetErrorKind, str] = {
    "throttled": "ThrottlingException Throttling TooManyRequestsException",
    # ModelNotReadyException: resources are still being provisioned; a later retry succeeds
    "overloaded": "ServiceUnavailable ServiceUnavailableException ModelNotReadyException",
    "client_error": "ValidationError ValidationException AccessDeniedException",
    "server_error": "InternalFailure InternalDependencyException InternalStreamFailure",
    "timeout": "ModelInvocationTimeExceeded",
    "broken_stream": "StreamBroken",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class SageMakerFormat:
    """The container's protocol inside InvokeEndpoint, with or without a response stream."""

    container: WireFormat

    @property
    def name(self) -> str:
        """The container's protocol."""
        return self.container.name

    @property
    def path(self) -> str:
        """Unused: the operation's path contains the endpoint's name."""
        return "/"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        """The container's request body."""
        return self.container.request_body(request, model=model, stream=stream)

    def new_splitter(self) -> Splitter:
        """A splitter of the container's payloads inside the event stream."""
        return EventStreamSplitter(EitherSplitter())

    def parse(self, payload: bytes) -> WireEvent:
        """Read a container payload, or SageMaker's reason for ending the stream."""
        if not isinstance(payload, StreamFailure):
            return self.container.parse(payload)
        detail = load_object(bytes(payload)) or {}  # orjson rejects subclasses of bytes
        code = str(detail.get("ErrorCode") or payload.code)
        message = detail.get("Message") or detail.get("message") or payload.decode(errors="replace")
        kind = _KINDS.get(code, _KINDS.get(payload.code, "server_error"))
        return WireEvent(error=f"{code}: {message}"[:500], error_kind=kind, end=True)

    def plain_text(self, payload: bytes) -> str | None:
        """Text of a plain payload, by the container's protocol."""
        return None if isinstance(payload, StreamFailure) else self.container.plain_text(payload)

    def error(
        self, status: int, body: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> TargetError:
        """The category of a failed request: by the error's name and the container's status."""
        reply = load_object(body) or {}
        name = _error_name(reply, headers)
        if name == "ModelError":
            return self._model_error(status, body, reply)
        kind = _KINDS.get(name, status_kind(status))
        described = describe_status(status, body)
        return TargetError(kind, f"{name}: {described}" if name else described)

    def _model_error(self, status: int, body: bytes, reply: dict[str, Any]) -> TargetError:
        original = reply.get("OriginalStatusCode")
        if not isinstance(original, int):
            return TargetError("server_error", f"ModelError: {describe_status(status, body)}")
        if original == 0:
            message = str(reply.get("Message") or reply.get("message") or "no answer in time")[:500]
            return TargetError("timeout", f"ModelError, the invocation timed out: {message}")
        cause = self.container.error(original, str(reply.get("OriginalMessage") or "").encode())
        return TargetError(cause.kind, f"ModelError, the container answered {cause}")


def _error_name(reply: dict[str, Any], headers: Mapping[bytes, bytes]) -> str:
    """The error's name, without a name space before `#` or a URI after `:`."""
    raw = headers.get(_ERROR_TYPE, b"").decode("latin-1") or str(
        reply.get("__type") or reply.get("code") or ""
    )
    return raw.split(":")[0].rsplit("#", 1)[-1]
