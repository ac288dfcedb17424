"""Status codes and error bodies of failed requests, in each protocol.

    client error (bad JSON, a bad value, too long)          400; 422 for TGI
    no such model or path                                   404 (405 for a wrong method)
    no or another API key                                   401
    body not there within its time limit                    408
    body above the limit                                    413
    an expectation other than 100-continue                  417
    the engine failed                                       424 for LMI and TGI, 500 for OpenAI
    too many requests                                       503; 429 for TGI
    a fault of the server, logged once a kind               500

LMI: djl-serving's bodies `{"code", "type", "message"}`, and `{"code": 424, "error"}` for errors of
the model's handler. OpenAI: vLLM's error object, whose `code` is the status. TGI:
`{"error", "error_type"}`. SageMaker: AWS's name in a header, which boto3 raises.
"""

import logging
import traceback
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_bench.core.errors import EngineError, InputError, OverloadedError, drop_frames
from lmi_bench.models.hf_config import read_table

LOGGER = logging.getLogger(__name__)
_RETRY_AFTER_S = "1"  # a place is free as soon as any request has ended
FAILURES = (InputError, OverloadedError, EngineError)
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_OPENAI_PREFIXES: Final = ("/v1/", "/tokenize", "/detokenize")
TGI_PATHS: Final = ("/", "/generate", "/generate_stream", "/info")

_ROWS: Final = {(row["protocol"], row["failure"]): row for row in read_table("failures.csv", __package__)}
"""A failure's kind is the name of its class, or the status of a refusal."""


class RefusedError(Exception):
    """A request that no route gets; its connection is closed unless it `keeps_open`. HTTP demands
    a header beside some statuses."""

    def __init__(self, status: int, message: str, *header: tuple[str, str], keeps_open: bool = False) -> None:
        super().__init__(message)
        self.status, self.header, self.keeps_open = status, header, keeps_open


class UnknownModelError(InputError):
    """The request names a model that is not served."""


def failure(protocol: str, exc: Exception, model_name: str = "") -> tuple[int, dict[str, Any]]:
    """Status and body of a failure on a protocol's route; streams send the body as an event."""
    kinds = [kind.__name__ for kind in type(exc).__mro__]
    refused = {"status": "400", "type": "", "message": "{said}"}
    if isinstance(exc, RefusedError):
        kinds, refused["status"] = [str(exc.status)], str(exc.status)
    row = next((_ROWS[protocol, kind] for kind in kinds if (protocol, kind) in _ROWS), refused)
    status, type_ = int(row["status"]), row["type"]
    message = row["message"].format(said=exc, model=model_name)
    if protocol == "tgi":  # which has no other type for client errors
        return status, {"error": message, "error_type": type_ or "validation"}
    if protocol == "openai":
        type_ = type_ or HTTPStatus(status).phrase
        error = {"message": message, "type": type_, "param": None, "code": status}
        return status, {"error": error}
    if not type_:
        return status, {"code": status, "error": message}
    return status, {"code": status, "type": type_, "message": message}


def failure_middleware(model_name: str) -> Middleware:
    """Turns an exception before a reply's first byte into an error of the route's protocol."""
    logged: set[str] = set()

    @web.middleware
    async def answer_failure(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as exc:
            found = _refusal(exc, request.path)
            if found is None:
                is_aiohttps = isinstance(exc, web.HTTPException | ConnectionError)
                if is_aiohttps or request.writer.output_size:  # too late for a status
                    raise
                message = "internal error: a fault of the server, which its log names"
                found = RefusedError(500, message, keeps_open=True)
                place = traceback.extract_tb(exc.__traceback__)[-1]
                kind = f"{type(exc).__name__} at {place.filename}:{place.lineno}"
                if kind not in logged:
                    logged.add(kind)
                    LOGGER.error("a fault of the server: %s", kind, exc_info=exc)
            drop_frames(exc)
            return _response(request.path, found, model_name)

    return answer_failure


def _refusal(exc: Exception, path: str) -> Exception | None:
    """The failure to answer an exception with; None: no request should raise it, or aiohttp
    answers."""
    match exc:
        case InputError() | OverloadedError() | EngineError() | RefusedError():
            return exc
        case web.HTTPRequestEntityTooLarge():
            return RefusedError(413, f"the body is too large: {exc.text}", keeps_open=True)
        case web.RequestPayloadError():  # the body does not match its Content-Encoding or length
            reason = " ".join(str(exc).removeprefix("400, message:").split())
            return RefusedError(400, f"the body cannot be read: {reason}")
        case web.HTTPNotFound():
            return RefusedError(404, f"no such path: {path}", keeps_open=True)
        case web.HTTPMethodNotAllowed():
            accepted = ", ".join(exc.allowed_methods)
            return RefusedError(405, f"{path} accepts {accepted}", ("Allow", accepted), keeps_open=True)
    return None


def without_expectations(handle: Handle) -> Handle:
    """A server's handler that refuses what `Expect` may not say, in the path's protocol.

    aiohttp's own refusal repeats the header, and fails where that is no UTF-8.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() == "100-continue":
            return await handle(request)
        return _response(request.path, RefusedError(417, "Expect may only be 100-continue"))

    return answer


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def aws_error(status: int, code: str, message: str, **fields: Any) -> web.Response:
    """A restJson1 error: its name is in a header."""
    body = {"Message": message, "message": message} | fields
    return json_response(body, status=status, headers={"x-amzn-ErrorType": code})


def _response(path: str, exc: Exception, model_name: str = "") -> web.Response:
    """The error of a failure, in the path's protocol."""
    protocol = "tgi" if path in TGI_PATHS else "lmi"
    if path.startswith(_OPENAI_PREFIXES):
        protocol = "openai"
    response = failure_response(protocol, exc, model_name)
    if path.startswith("/endpoints/"):
        code = "ValidationError" if response.status < 500 else "InternalFailure"
        response = aws_error(response.status, code, str(exc))
    if isinstance(exc, RefusedError):
        response.headers.update(exc.header)
        if not exc.keeps_open:
            response.force_close()  # the end of the body is unknown
    return response


def failure_response(protocol: str, exc: Exception, model_name: str) -> web.Response:
    """The error of a failure, in this protocol."""
    status, body = failure(protocol, exc, model_name)
    is_full = isinstance(exc, OverloadedError)
    return json_response(body, status=status, headers={"Retry-After": _RETRY_AFTER_S} if is_full else None)
