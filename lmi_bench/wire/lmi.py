"""The protocol of DJL-serving's LMI containers: `/invocations` with inputs and parameters.

Three eras share the names and differ in the answer (djl-serving's output_formatter.py up to 0.34,
lmi_vllm/request_response_utils.py from 0.35 on):

    A, B  {"token": {"id", "text", "log_prob"}}            the last line adds generated_text and,
                                                           if asked for, details
    C     {"index", "token": {"id", "text", "logprob"}, "generated_text", "details"}

Era A leaves a falsy field out (no `id` for token 0, no `text` for an empty one), so a token object
is a token whatever it holds. Era C's streamed `generated_tokens` is one too many, and one of its
lines may hold several tokens of which only the first is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from lmi_bench.core.errors import InputError, TargetError, TargetErrorKind
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.either import EitherSplitter
from lmi_bench.wire.event import NO_HEADERS, WireEvent
from lmi_bench.wire.failure import clip, describe_status, find_message, load_object, status_kind

_FAILED_REASONS = ("error", "abort")


class LmiFormat:
    """`/invocations`, JSON lines; a server set to `output_formatter=sse` is read as well."""

    name: ClassVar[str] = "lmi"
    path: ClassVar[str] = "/invocations"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        """The body to POST; the endpoint has one model, so `model` is not sent.

        The length is forced by `ignore_eos_token` (vLLM and lmi-dist of eras A and B) and by
        `ignore_eos`, which era C hands to vLLM under that name. Raises InputError without a text.
        """
        if not request.prompt_text:
            raise InputError(
                f"request {request.request_id} has no prompt_text: the lmi protocol takes no "
                "token ids"
            )
        parameters: dict[str, Any] = {
            "max_new_tokens": request.output_tokens,
            "do_sample": False,
            "details": True,
        }
        if request.ignore_eos:
            parameters["ignore_eos_token"] = True
            parameters["ignore_eos"] = True
        body = {"inputs": request.prompt_text, "parameters": parameters, "stream": stream}
        return orjson.dumps(body)

    def new_splitter(self) -> EitherSplitter:
        """JSON lines, or server-sent events where the server is set to them."""
        return EitherSplitter()

    def parse(self, payload: bytes) -> WireEvent:
        """Read a line of a stream, or the whole body of an unstreamed answer."""
        line = load_object(payload)
        if line is None:
            raise TargetError("malformed_frame", f"not a JSON object: {clip(payload)}")
        try:
            if "token" in line:
                return _token_event(line)
            if line.get("error") is not None or "code" in line:
                return _error_event(line)
            return _whole_answer(line)
        except (AttributeError, KeyError, TypeError) as exc:
            raise TargetError(
                "malformed_frame", f"not an LMI token line ({exc}): {clip(payload)}"
            ) from exc

    def plain_text(self, payload: bytes) -> str | None:
        """Text of a line of eras A and B that holds a token and nothing else."""
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

    def error(
        self, status: int, body: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> TargetError:
        """The bucket of a refused request, and the server's message."""
        reply = load_object(body) or {}
        return TargetError(_error_kind(status, reply), describe_status(status, body))


def _error_kind(status: int, reply: dict[str, Any]) -> TargetErrorKind:
    """LMI says by `type` what its statuses leave open.

    503 is a full queue (WlmCapacityException) or a model that is not up (WlmException,
    WlmShutdownException); 400 is also what a request gets that waited in vain for a batch slot.
    """
    type_ = reply.get("type")
    if status == 503 and type_ in ("WlmException", "WlmShutdownException"):
        return "server_error"
    if status == 400 and type_ == "TranslateException" and "Time out in" in find_message(reply):
        return "overloaded"
    return status_kind(status)


def _error_event(line: dict[str, Any]) -> WireEvent:
    """An error object where a token was due: under status 200 the only sign of a failure."""
    nested = line.get("error")
    code = line.get("code")
    if code is None and isinstance(nested, dict):
        code = nested.get("code")
    status = code if isinstance(code, int) else 500
    return WireEvent(error=find_message(line), error_kind=_error_kind(status, line), end=True)


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
    era_c = line.get("index") == 0  # its choice; a container in TGI's manner counts tokens from 1
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


def _whole_answer(line: dict[str, Any]) -> WireEvent:
    details = line.get("details") or {}
    finish_reason = details.get("finish_reason")
    tokens = details.get("tokens") or ()
    text = line["generated_text"]
    if not isinstance(text, str):
        raise TypeError("generated_text is not a string")
    return WireEvent(
        text=text,
        token_ids=tuple(token["id"] for token in tokens if "id" in token),
        token_count=details.get("generated_tokens"),
        finish_reason=finish_reason,
        input_tokens=details.get("input_length"),
        output_tokens=details.get("generated_tokens"),
        end=True,
    )
