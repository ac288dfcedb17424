"""The protocol of Text Generation Inference: `/generate_stream`, one event per token.

Errors, overload included, are events under status 200: the server opens the stream before it
requests a slot (router/src/server.rs of TGI 3). No parameter ignores the end-of-sequence token, so
output lengths cannot be forced; `details` states the number of tokens.
"""

from collections.abc import Mapping
from typing import Any

from lmi_bench.core.errors import TargetErrorKind
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.json_format import SseFormat, error_kinds, find_message, status_kind, whole_answer

_ERROR_KINDS: Mapping[str, TargetErrorKind] = error_kinds("tgi")


class TgiFormat(SseFormat):
    """`/generate_stream`, or `/generate` for unstreamed responses."""

    name = "tgi"
    payload_name = "a TGI event"

    def __init__(self, *, stream: bool = True) -> None:
        self.path = "/generate_stream" if stream else "/generate"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        adapter = {"adapter_id": request.adapter} if request.adapter else {}
        return self.inputs_body(request, stream, **adapter)  # `stream`: only for `/invocations`

    def event(self, reply: dict[str, Any]) -> WireEvent:
        if reply.get("error") is not None:
            kind = self.error_kind(500, reply)
            return WireEvent(error=find_message(reply), error_kind=kind, end=True)
        if "token" in reply:
            return _token_event(reply)
        details = reply.get("details") or {}
        token_ids = tuple(token["id"] for token in details.get("tokens") or ())
        return whole_answer(reply, token_ids, len(details.get("prefill") or ()) or None)

    def error_kind(self, status: int, reply: dict[str, Any]) -> TargetErrorKind:
        """The category of an error; TGI answers 429 when it is full, 424 for a failed model."""
        name = reply.get("error_type")
        return _ERROR_KINDS.get(name if isinstance(name, str) else "", status_kind(status))


def _token_event(reply: dict[str, Any]) -> WireEvent:
    token = reply["token"]
    details = reply.get("details") or {}
    return WireEvent(
        text="" if token.get("special") else token.get("text") or "",
        token_ids=(token["id"],),
        token_count=1,
        finish_reason=details.get("finish_reason"),
        input_tokens=details.get("input_length"),
        output_tokens=details.get("generated_tokens"),
        end=reply.get("generated_text") is not None,
    )
