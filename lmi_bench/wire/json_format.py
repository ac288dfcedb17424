"""What the protocols share whose payloads are JSON objects: malformed payloads, failed requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import orjson

from lmi_bench.core.errors import InputError, TargetError, TargetErrorKind
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import NO_HEADERS, WireEvent
from lmi_bench.wire.failure import clip, describe_status, load_object, status_kind


class JsonFormat(ABC):
    """Base of the protocols; `payload_name` is used in errors."""

    name: str
    payload_name: str

    @abstractmethod
    def event(self, reply: dict[str, Any]) -> WireEvent:
        """Read an object. A missing or ill-typed field may raise what Python raises for it."""

    def parse(self, payload: bytes) -> WireEvent:
        """Read one payload, or the whole body of an unstreamed response."""
        reply = load_object(payload)
        if reply is None:
            raise TargetError("malformed_frame", f"not a JSON object: {clip(payload)}")
        try:
            return self.event(reply)
        except (AttributeError, KeyError, TypeError, IndexError) as exc:
            raise TargetError(
                "malformed_frame", f"not {self.payload_name} ({exc}): {clip(payload)}"
            ) from exc

    def plain_text(self, payload: bytes) -> str | None:
        """None: every payload goes through `parse`."""
        return None

    def error(
        self, status: int, body: bytes, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> TargetError:
        """The category of a failed request, and the server's message."""
        kind = self.error_kind(status, load_object(body) or {})
        return TargetError(kind, describe_status(status, body))

    def error_kind(self, status: int, reply: dict[str, Any]) -> TargetErrorKind:
        """The category of an error object under an HTTP status."""
        return status_kind(status)

    def prompt_text(self, request: PlannedRequest) -> str:
        """The request's text; raises InputError without one."""
        if request.prompt_text:
            return request.prompt_text
        raise InputError(
            f"request {request.request_id} has no prompt_text: the {self.name} protocol takes no "
            "token ids"
        )

    def inputs_body(self, request: PlannedRequest, stream: bool, **parameters: Any) -> bytes:
        """A body with `inputs` and `parameters`: greedy, with details."""
        parameters = {
            "max_new_tokens": request.output_tokens,
            "do_sample": False,
            "details": True,
            **parameters,
        }
        inputs = self.prompt_text(request)
        return orjson.dumps({"inputs": inputs, "parameters": parameters, "stream": stream})
