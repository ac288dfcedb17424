"""Which status and body each failure gets, in the words of the two protocols.

    the request's fault (bad JSON, a bad value, too long)   400
    no such model or path                                   404 (405 for a wrong method)
    body above the limit                                    413
    the engine failed                                       424 for LMI, 500 for OpenAI
    no room for another request                             503

LMI: djl-serving's bodies `{"code", "type", "message"}`, and `{"code": 424, "error"}` for what the
model's handler says. OpenAI: vLLM's error object, whose `code` is the status.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_bench.errors import EngineError, InputError, OverloadedError

FAILURES = (InputError, OverloadedError, EngineError)

_OPENAI_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
}
_LMI_TYPES = {
    400: "BadRequestException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    413: "RequestEntityTooLargeException",
    503: "WlmCapacityException",
}


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
    if isinstance(exc, EngineError):
        status = 500
    elif isinstance(exc, OverloadedError):
        status = 503
    else:
        status = 404 if isinstance(exc, UnknownModelError) else 400
    return status, _openai_body(status, str(exc))


def is_openai(path: str) -> bool:
    """Whether a path belongs to the OpenAI routes."""
    return path.startswith("/v1/")


def failure_middleware(model_name: str) -> Middleware:
    """Turns what a handler raises before its first byte into a reply of its route's protocol."""

    @web.middleware
    async def answer_failure(request: web.Request, handler: Handler) -> web.StreamResponse:
        openai = is_openai(request.path)
        try:
            return await handler(request)
        except FAILURES as exc:
            status, body = openai_failure(exc) if openai else lmi_failure(exc, model_name)
        except web.HTTPRequestEntityTooLarge as exc:
            status = 413
            body = _body(openai, status, f"the body is too large: {exc.text}")
        except web.RequestPayloadError as exc:
            return closing(json_response(_body(openai, 400, unreadable(exc)), status=400))
        except web.HTTPNotFound:
            status, body = 404, _body(openai, 404, f"no such path: {request.path}")
        except web.HTTPMethodNotAllowed as exc:
            status = 405
            body = _body(openai, status, f"{request.path} takes {', '.join(exc.allowed_methods)}")
        return json_response(body, status=status)

    return answer_failure


def unreadable(exc: web.RequestPayloadError) -> str:
    """What is wrong with a body that is not packed as its headers say."""
    reason = " ".join(str(exc).removeprefix("400, message:").split())
    return f"the body cannot be read: {reason}"


def closing(response: web.Response) -> web.Response:
    """The same as the last of its connection: what follows such a body cannot be told from it."""
    response.force_close()
    return response


def json_response(
    body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A JSON reply."""
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )


def _body(openai: bool, status: int, message: str) -> dict[str, Any]:
    return _openai_body(status, message) if openai else _lmi_body(status, message)


def _lmi_body(status: int, message: str) -> dict[str, Any]:
    return {"code": status, "type": _LMI_TYPES[status], "message": message}


def _openai_body(status: int, message: str) -> dict[str, Any]:
    type_ = _OPENAI_TYPES.get(status, HTTPStatus(status).phrase)
    return {"error": {"message": message, "type": type_, "param": None, "code": status}}
