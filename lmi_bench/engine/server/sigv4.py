"""Verifies a request's AWS Signature Version 4 by recomputing it.

Source: the AWS reference "Create a signed AWS API request". Errors have AWS's codes and messages,
so that a client's error handling can be tested.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

ALGORITHM = "AWS4-HMAC-SHA256"
MAX_SKEW_S = 300.0
_DATE_FORMAT = "%Y%m%dT%H%M%SZ"


class SignatureError(Exception):
    """A request that AWS would reject; `code` is AWS's error name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


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
            raise SignatureError(
                "InvalidSignatureException",
                "host and x-amz-date must be signed, and all signed sent",
            )
        due = self._signature(request, headers, scope, signed_names, stamp)
        if not hmac.compare_digest(sent, due):
            raise SignatureError(
                "InvalidSignatureException",
                "The request signature we calculated does not match the signature you provided.",
            )

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
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
            )
        if scope[2:] != [self.service, "aws4_request"]:
            raise SignatureError(
                "InvalidSignatureException",
                f"Credential should be scoped to correct service: '{self.service}'.",
            )
        return scope, parts.get("SignedHeaders", "").split(";"), parts["Signature"]

    def _signature(
        self,
        request: SignedRequest,
        headers: Mapping[str, str],
        scope: list[str],
        signed_names: list[str],
        stamp: str,
    ) -> str:
        canonical = "\n".join(
            [
                request.method,
                urllib.parse.quote(request.path, safe="/~"),  # encoded twice, except in S3
                "&".join(sorted(request.query.split("&"))),
                *(f"{name}:{' '.join(headers[name].split())}" for name in signed_names),
                "",
                ";".join(signed_names),
                hashlib.sha256(request.body).hexdigest(),
            ]
        )
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = "\n".join([ALGORITHM, stamp, "/".join(scope), hashed])
        key = ("AWS4" + self.secret_key).encode()
        for step in (*scope, to_sign):
            key = hmac.new(key, step.encode(), hashlib.sha256).digest()
        return key.hex()


def _check_date(stamp: str, scope_date: str, now: datetime) -> None:
    try:
        signed_at = datetime.strptime(stamp, _DATE_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        raise SignatureError("IncompleteSignatureException", "no valid x-amz-date") from None
    if abs((now - signed_at).total_seconds()) > MAX_SKEW_S or not stamp.startswith(scope_date):
        raise SignatureError(
            "InvalidSignatureException", f"Signature expired: {stamp} is not within 5 min of now"
        )
