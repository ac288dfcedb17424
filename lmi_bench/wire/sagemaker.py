"""A container's protocol behind SageMaker's runtime: the same body, other frames and errors.

InvokeEndpoint returns the container's response; InvokeEndpointWithResponseStream wraps it in an
AWS event stream. A container's error reaches the client as ModelError, status 424, with the cause
in OriginalStatusCode: 429 and 503 are the container's own, 0 is an invocation timeout. Throttling
by SageMaker itself is status 400. Source of the errors: botocore's sagemaker-runtime model.
"""

from collections.abc import Mapping
from typing import Any

from lmi_bench.core.errors import TargetError, TargetErrorKind
from lmi_bench.wire.event import NO_HEADERS, Splitter, WireEvent, WireFormat
from lmi_bench.wire.event_stream import EventStreamSplitter, StreamFailure
from lmi_bench.wire.framing import EitherSplitter
from lmi_bench.wire.json_format import describe_status, error_kinds, load_object, status_kind

_ERROR_TYPE = b"x-amzn-errortype"
_KINDS: Mapping[str, TargetErrorKind] = error_kinds("sagemaker")


class SageMakerFormat:
    """The container's protocol inside InvokeEndpoint, with or without a response stream."""

    def __init__(self, container: WireFormat) -> None:
        self.container = container
        self.name, self.request_body = container.name, container.request_body
        self.path = "/"  # unused: the operation's path contains the endpoint's name

    def new_splitter(self) -> Splitter:
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
