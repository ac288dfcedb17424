"""The protocol of DJL-serving's LMI containers: `/invocations` with inputs and parameters.

Three eras use the same names but different responses (djl-serving's output_formatter.py up to
0.34, lmi_vllm/request_response_utils.py from 0.35 on):

    A, B  {"token": {"id", "text", "log_prob"}}            the last line adds generated_text and,
                                                           if requested, details
    C     {"index", "token": {"id", "text", "logprob"}, "generated_text", "details"}

Era A omits falsy fields (no `id` for token 0, no `text` if empty), so every token object counts as
a token. Era C's streamed `generated_tokens` is one too high, and one of its lines may hold several
tokens but name only the first.
"""

from typing import Any

import orjson

from lmi_bench.core.errors import TargetErrorKind
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.framing import EitherSplitter
from lmi_bench.wire.json_format import JsonFormat, find_message, status_kind, whole_answer

_FAILED_REASONS = ("error", "abort")


class LmiFormat(JsonFormat):
    """`/invocations` with JSON lines, or server-sent events under `output_formatter=sse`."""

    name = "lmi"
    path = "/invocations"
    payload_name = "an LMI token line"
    new_splitter = EitherSplitter

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        """The body to POST; the endpoint has one model, so `model` is not sent.

        `ignore_eos_token` (vLLM and lmi-dist, eras A and B) and `ignore_eos` (era C) force the
        output length. Raises InputError without a prompt text.
        """
        forced = {"ignore_eos_token": True, "ignore_eos": True} if request.ignore_eos else {}
        return self.inputs_body(request, stream, **forced)

    def event(self, reply: dict[str, Any]) -> WireEvent:
        if "token" in reply:
            return _token_event(reply)
        nested, code = reply.get("error"), reply.get("code")
        if nested is not None or "code" in reply:  # under status 200 the only sign of a failure
            if code is None and isinstance(nested, dict):
                code = nested.get("code")
            kind = self.error_kind(code if isinstance(code, int) else 500, reply)
            return WireEvent(error=find_message(reply), error_kind=kind, end=True)
        details = reply.get("details") or {}
        token_ids = tuple(token["id"] for token in details.get("tokens") or () if "id" in token)
        return whole_answer(reply, token_ids, details.get("input_length"))

    def plain_text(self, payload: bytes) -> str | None:
        """Text of an era A or B line that holds a token and nothing else."""
        try:
            line = orjson.loads(payload)
            token = line["token"]
            if len(line) != 1 or token.get("error_msg"):
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


def _token_event(line: dict[str, Any]) -> WireEvent:
    token = line["token"]
    details = line.get("details") or {}
    finish_reason = details.get("finish_reason")
    if token.get("error_msg") or finish_reason in _FAILED_REASONS:
        message = token.get("error_msg") or f"the server ended the request: {finish_reason}"
        message = find_message({"message": message})
        return WireEvent(error=message, error_kind="server_error", finish_reason=finish_reason, end=True)
    token_id = token.get("id")
    era_c = line.get("index") == 0  # the choice; TGI-like containers number tokens from 1 here
    output_tokens = details.get("generated_tokens")
    if output_tokens is not None and era_c:
        output_tokens -= 1
    return WireEvent(
        text=token.get("text") or "",
        token_ids=() if token_id is None else (token_id,),
        token_count=None if era_c else 1,
        finish_reason=finish_reason,
        input_tokens=details.get("input_length"),
        output_tokens=output_tokens,
        end=line.get("generated_text") is not None or bool(details),
    )
