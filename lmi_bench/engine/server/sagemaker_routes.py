"""SageMaker's runtime routes, so that boto3 can call this server like an endpoint.

    /endpoints/{name}/invocations                  InvokeEndpoint
    /endpoints/{name}/invocations-response-stream  InvokeEndpointWithResponseStream

Any endpoint name is accepted. The body selects the protocol, as in djl-serving's async mode:
`prompt` an OpenAI completion, `messages` a chat, otherwise LMI, or TGI (a list) if the server
stands for a TGI container. An error of the container (this
server's other routes) becomes ModelError, status 424, with the container's status inside.

A request's AWS Signature Version 4 is verified by recomputing it, with AWS's error codes and
messages. Source: the AWS reference "Create a signed AWS API request".
"""

import asyncio
import hashlib
import hmac
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import web

from lmi_bench.core.errors import InputError, drop_frames
from lmi_bench.engine.server import failures
from lmi_bench.engine.server.lmi_routes import LmiRoutes
from lmi_bench.engine.server.openai_routes import OpenAiRoutes
from lmi_bench.engine.server.streaming import ENVELOPE, Envelope
from lmi_bench.engine.server.tgi_routes import TgiRoutes
from lmi_bench.wire.sagemaker import CONTENT_TYPE, payload_part

ALGORITHM = "AWS4-HMAC-SHA256"
MAX_SKEW_S = 300.0
_DATE_FORMAT = "%Y%m%dT%H%M%SZ"


class SignatureError(Exception):
    """A request that AWS would reject; `code` is AWS's error name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _invalid(message: str) -> SignatureError:
    return SignatureError("InvalidSignatureException", message)


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The signed parts of a request, as received.

    path, query  still encoded; headers: names in any case
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """The only accepted key, valid in any region."""

    access_key: str
    secret_key: str = field(repr=False)
    service: str = "sagemaker"

    def verify(self, request: SignedRequest, now: datetime | None = None) -> None:
        """Raises SignatureError unless the request was signed recently with this key."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        scope, signed_names, sent = self._parse(headers.get("authorization"))
        stamp = headers.get("x-amz-date", "")
        _check_date(stamp, scope[0], now or datetime.now(UTC))
        missing = {"host", "x-amz-date"} - set(signed_names)
        if missing or any(name not in headers for name in signed_names):
            raise _invalid("host and x-amz-date must be signed, and all signed sent")
        canonical = "\n".join(
            [
                request.method,
                urllib.parse.quote(_bytes(request.path), safe="/~"),  # twice, except in S3
                "&".join(sorted(request.query.split("&"))),
                *(f"{name}:{' '.join(headers[name].split())}" for name in signed_names),
                "",
                ";".join(signed_names),
                hashlib.sha256(request.body).hexdigest(),
            ]
        )
        hashed = hashlib.sha256(_bytes(canonical)).hexdigest()
        to_sign = "\n".join([ALGORITHM, stamp, "/".join(scope), hashed])
        key = ("AWS4" + self.secret_key).encode()
        for step in (*scope, to_sign):
            key = hmac.new(key, _bytes(step), hashlib.sha256).digest()
        if not hmac.compare_digest(_bytes(sent), key.hex().encode()):
            raise _invalid("The request signature we calculated does not match the signature you provided.")

    def _parse(self, authorization: str | None) -> tuple[list[str], list[str], str]:
        """(scope, signed header names, signature) of the Authorization header."""
        if not authorization:
            raise SignatureError("MissingAuthenticationTokenException", "Missing token")
        algorithm, _, rest = authorization.partition(" ")
        parts = dict(part.strip().partition("=")[::2] for part in rest.split(","))
        credential = parts.get("Credential", "").split("/")
        if algorithm != ALGORITHM or len(credential) != 5 or "Signature" not in parts:
            raise SignatureError("IncompleteSignatureException", f"not an {ALGORITHM} header")
        access_key, *scope = credential
        if access_key != self.access_key:
            raise SignatureError(
                "UnrecognizedClientException", "The security token included in the request is invalid."
            )
        if scope[2:] != [self.service, "aws4_request"]:
            raise _invalid(f"Credential should be scoped to correct service: '{self.service}'.")
        return scope, parts.get("SignedHeaders", "").split(";"), parts["Signature"]


def _bytes(text: str) -> bytes:
    """A header's or path's bytes as received, which may be no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _check_date(stamp: str, scope_date: str, now: datetime) -> None:
    try:
        signed_at = datetime.strptime(stamp, _DATE_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        raise SignatureError("IncompleteSignatureException", "no valid x-amz-date") from None
    if abs((now - signed_at).total_seconds()) > MAX_SKEW_S or not stamp.startswith(scope_date):
        raise _invalid(f"Signature expired: {stamp} is not within 5 min of now")


UNARY_TIMEOUT_S = 60.0
VARIANT = {"x-Amzn-Invoked-Production-Variant": "AllTraffic"}
_CONTAINER_TYPE = "X-Amzn-SageMaker-Content-Type"

_AT_ONCE = Envelope(headers=dict, wrap=bytes, at_once=True)
_PARTS = Envelope(headers=lambda headers: _stream_headers(headers), wrap=payload_part)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class SageMakerRoutes:
    """Handlers that pass requests on to the other routes.

    tgi              answers in LMI's place; None: LMI does
    check            None accepts unsigned requests
    unary_timeout_s  timeout of InvokeEndpoint; the stream has none here
    """

    lmi: LmiRoutes
    openai: OpenAiRoutes
    tgi: TgiRoutes | None
    check: SignatureCheck | None = None
    unary_timeout_s: float = UNARY_TIMEOUT_S

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """The container's whole response, even if it streams."""
        try:
            async with asyncio.timeout(self.unary_timeout_s):
                response = await self._answer(request, _AT_ONCE)
        except TimeoutError:
            return _model_error(0, "", "Model container did not answer in time.")
        response.headers.update(VARIANT)
        return response

    async def invoke_with_response_stream(self, request: web.Request) -> web.StreamResponse:
        """The container's response in payload parts, one per write."""
        response = await self._answer(request, _PARTS)
        if isinstance(response, web.Response) and response.status == 200:
            body = response.body
            assert isinstance(body, bytes)  # true for our own JSON responses
            headers = _stream_headers({"Content-Type": response.content_type})
            # a newline is no part of JSON's value, and a client that reads lines waits for one
            return web.Response(body=payload_part(body + b"\n"), headers=headers)
        return response

    async def _answer(self, request: web.Request, envelope: Envelope) -> web.StreamResponse:
        body = await request.read()
        if self.check is not None:
            url = request.rel_url
            try:
                self.check.verify(
                    SignedRequest(request.method, url.raw_path, url.raw_query_string, request.headers, body)
                )
            except SignatureError as exc:
                return failures.aws_error(403, exc.code, str(exc))
        outside = ENVELOPE.set(envelope)
        try:
            response = await self._contained(request, body)
        finally:
            ENVELOPE.reset(outside)
        if isinstance(response, web.Response) and response.status != 200:
            return _model_error(response.status, response.text or "")
        return response

    async def container(self, request: web.Request) -> web.StreamResponse:
        """What a container is asked itself, at `/predictions` under the model's name."""
        served = self.lmi.state.model_name
        if (model := request.match_info.get("model", served)) != served:
            raise failures.UnknownModelError(f"model {model!r} is not served here: use {served!r}")
        return await self._contained(request, await request.read())

    async def _contained(self, request: web.Request, body: bytes) -> web.StreamResponse:
        protocol, handler = self._route(body)
        try:
            return await handler(request)
        except failures.FAILURES as exc:
            drop_frames(exc)
            return failures.failure_response(protocol, exc, self.lmi.state.model_name)

    def _route(self, body: bytes) -> tuple[str, _Handler]:
        """The protocol of a body, and its handler."""
        try:
            keys: Any = orjson.loads(body)
        except orjson.JSONDecodeError:
            keys = ()
        if isinstance(keys, dict) and "prompt" in keys:
            return "openai", self.openai.completions
        if isinstance(keys, dict) and "messages" in keys and "inputs" not in keys:
            return "openai", self.openai.chat
        if self.tgi is not None:
            return "tgi", self.tgi.compat_generate
        return "lmi", self.lmi.invocations


def credentials_check(access_key: str | None, secret_key: str | None) -> SignatureCheck:
    """A check of signatures with these credentials; raises InputError if one half is missing."""
    if not access_key or not secret_key:
        raise InputError(
            "signatures cannot be checked without a key: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY (any values, the same as the client's)"
        )
    return SignatureCheck(access_key, secret_key)


def _stream_headers(headers: dict[str, str]) -> dict[str, str]:
    """The event stream's headers, with the container's content type in a separate one."""
    return {
        **{name: value for name, value in headers.items() if name.startswith("X-")},
        **VARIANT,
        "Content-Type": CONTENT_TYPE,
        _CONTAINER_TYPE: headers.get("Content-Type", "application/octet-stream"),
    }


def _model_error(original_status: int, said: str, why: str = "") -> web.Response:
    message = why or (
        f"Received {'client' if 400 <= original_status < 500 else 'server'} error "
        f'({original_status}) from primary with message "{said}".'
    )
    return failures.aws_error(
        424, "ModelError", message, OriginalStatusCode=original_status, OriginalMessage=said, LogStreamArn=""
    )
