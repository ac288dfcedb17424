"""Status codes and error bodies of failed requests, in each of the three protocols.

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
`{"error", "error_type"}`.
"""

import logging
import traceback
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_bench.core.errors import EngineError, InputError, OverloadedError

LOGGER = logging.getLogger(__name__)
FAILURES = (InputError, OverloadedError, EngineError)
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_OPENAI_PREFIXES: Final = ("/v1/", "/tokenize", "/detokenize")
TGI_PATHS: Final = ("/", "/generate", "/generate_stream", "/info")

_OPENAI_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
_LMI_TYPES = {
    400: "BadRequestException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    401: "UnauthorizedException",
    408: "RequestTimeoutException",
    413: "RequestEntityTooLargeException",
    417: "ExpectationFailedException",
    500: "InternalServerException",
    503: "WlmCapacityException",
}


class RefusedError(Exception):
    """A request that no route gets; its connection is closed where its body was not read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UnknownModelError(InputError):
    """The request names a model that is not served."""


def lmi_failure(exc: Exception, model_name: str) -> tuple[int, dict[str, Any]]:
    """Status and body of a failure on an LMI route."""
    if isinstance(exc, EngineError):
        return 424, {"code": 424, "error": str(exc)}
    if isinstance(exc, OverloadedError):
        message = f"Worker queue capacity exceeded for model: {model_name} ({exc})"
        return 503, _lmi_body(503, message)
    status = 404 if isinstance(exc, UnknownModelError) else 400
    return status, _lmi_body(status, str(exc))


def openai_failure(exc: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of a failure on an OpenAI route."""
    kinds = ((EngineError, 500), (OverloadedError, 503), (UnknownModelError, 404))
    status = next((status for kind, status in kinds if isinstance(exc, kind)), 400)
    return status, _openai_body(status, str(exc))


def tgi_failure(exc: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of a failure on a TGI route; a stream sends the body as an event."""
    if isinstance(exc, EngineError):
        message = f"Request failed during generation: {exc}"
        return 424, {"error": message, "error_type": "generation"}
    if isinstance(exc, OverloadedError):
        return 429, {"error": "Model is overloaded", "error_type": "overloaded"}
    return 422, {"error": f"Input validation error: {exc}", "error_type": "validation"}


def failure_middleware(model_name: str) -> Middleware:
    """Turns an exception before a reply's first byte into an error of the route's protocol."""
    logged: set[str] = set()

    @web.middleware
    async def answer_failure(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except FAILURES as exc:
            status, body = _failure(request.path, exc, model_name)
            return json_response(body, status=status)
        except RefusedError as exc:
            return closing(
                json_response(_body(request.path, exc.status, str(exc)), status=exc.status)
            )
        except web.HTTPRequestEntityTooLarge as exc:
            status, message = 413, f"the body is too large: {exc.text}"
        except web.RequestPayloadError as exc:
            body = _body(request.path, 400, unreadable(exc))
            return closing(json_response(body, status=400))
        except web.HTTPNotFound:
            status, message = 404, f"no such path: {request.path}"
        except web.HTTPMethodNotAllowed as exc:
            status, message = 405, f"{request.path} accepts {', '.join(exc.allowed_methods)}"
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as exc:
            if request.writer.output_size:  # too late for a status: the connection ends
                raise
            status, message = 500, "internal error: a fault of the server, which its log names"
            place = traceback.extract_tb(exc.__traceback__)[-1]
            kind = f"{type(exc).__name__} at {place.filename}:{place.lineno}"
            if kind not in logged:
                logged.add(kind)
                LOGGER.error("a fault of the server: %s", kind, exc_info=exc)
        return json_response(_body(request.path, status, message), status=status)

    return answer_failure


def without_expectations(handle: Handle) -> Handle:
    """A server's handler that refuses what `Expect` may not say, in the path's protocol.

    aiohttp's own refusal repeats the header, and fails where that is no UTF-8.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() == "100-continue":
            return await handle(request)
        body = _body(request.path, 417, "Expect may only be 100-continue")
        return closing(json_response(body, status=417))

    return answer


def unreadable(exc: web.RequestPayloadError) -> str:
    """The message for a body that does not match its Content-Encoding or length."""
    reason = " ".join(str(exc).removeprefix("400, message:").split())
    return f"the body cannot be read: {reason}"


def closing(response: web.Response) -> web.Response:
    """Close the connection after this response: the end of the body is unknown."""
    response.force_close()
    return response


def json_response(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )


def _failure(path: str, exc: Exception, model_name: str) -> tuple[int, dict[str, Any]]:
    if path.startswith(_OPENAI_PREFIXES):
        return openai_failure(exc)
    return tgi_failure(exc) if path in TGI_PATHS else lmi_failure(exc, model_name)


def _body(path: str, status: int, message: str) -> dict[str, Any]:
    """The error body for a status and a message, in the path's protocol."""
    if path.startswith(_OPENAI_PREFIXES):
        return _openai_body(status, message)
    if path in TGI_PATHS:  # TGI has no other type for client errors
        return {"error": message, "error_type": "generation" if status == 500 else "validation"}
    return _lmi_body(status, message)


def _lmi_body(status: int, message: str) -> dict[str, Any]:
    return {"code": status, "type": _LMI_TYPES[status], "message": message}


def _openai_body(status: int, message: str) -> dict[str, Any]:
    type_ = _OPENAI_TYPES.get(status, HTTPStatus(status).phrase)
    return {"error": {"message": message, "type": type_, "param": None, "code": status}}
