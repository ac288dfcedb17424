"""AWS access without threads: region, address and credentials of the boto3 chain, and signatures.

Everything is resolved before a level's clock starts. Credentials that expire (roles, SSO, instance
profiles) are fetched again in a thread before each level and once a minute while requests are
signed; the loop never waits for them. boto3's own client is not used to send: it would retry
behind the measurement's back.
"""

import asyncio
import logging
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.core.errors import InputError

LOGGER = logging.getLogger(__name__)
SIGNING_NAME = "sagemaker"  # not sagemaker-runtime
REFRESH_EVERY_S = 60.0
_LOCAL_REGION = "us-east-1"
_ADDED_HEADERS = ("X-Amz-Date", "X-Amz-Security-Token", "Authorization")


@dataclass(frozen=True, slots=True)
class AwsAccess:
    """Credentials and the address of SageMaker's runtime.

    runtime_url  address of SageMaker's runtime, without a path
    is_aws       False for another server that replaces it
    credentials  botocore's, possibly refreshable
    """

    region: str
    runtime_url: str
    is_aws: bool
    credentials: Any = field(repr=False)
    session: Any = field(repr=False)

    def client(self, service: str) -> Any:
        """botocore's client of another service, with short time-outs. AWS_ENDPOINT_URL_<SERVICE>
        overrides its address."""
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
        return self.session.create_client(service, region_name=self.region, config=config)


def open_aws_access(endpoint_url: str | None = None) -> AwsAccess:
    """Resolve the boto3 chain: environment, profiles, SSO, container and instance roles.

    endpoint_url  the runtime's address if it is not AWS's own
    Raises InputError without a region or credentials.
    """
    import botocore.session

    try:
        session = botocore.session.Session()
        region = session.get_config_variable("region") or os.environ.get("AWS_REGION")
        if region is None and endpoint_url is None:
            raise InputError("no AWS region: set AWS_REGION, or a region in the profile")
        region = region or _LOCAL_REGION
        client = session.create_client("sagemaker-runtime", region_name=region, endpoint_url=endpoint_url)
        credentials = session.get_credentials()
        if credentials is None:
            raise InputError(
                "no AWS credentials: set AWS_PROFILE or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or run `aws configure` (for a local server any "
                "will do)"
            )
        credentials.get_frozen_credentials()
    except (*refusals(), ValueError) as exc:  # ValueError: an invalid endpoint URL
        raise InputError(f"AWS: {error_text(exc)}") from exc
    url = str(client.meta.endpoint_url).rstrip("/")
    host = urllib.parse.urlsplit(url).hostname or ""
    is_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
    return AwsAccess(region, url, is_aws, credentials, session)


def refusals() -> tuple[type[Exception], type[Exception]]:
    """What a client raises where AWS refuses, or cannot be asked."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def error_text(exc: Exception) -> str:
    """Code and message of an error that AWS returned; the text of any other."""
    error = getattr(exc, "response", {}).get("Error")
    return str(exc) if error is None else f"{error.get('Code')}: {error.get('Message')}"


class Signer:
    """Signs POSTs to one URL with Signature Version 4.

    headers  signed headers of every request
    """

    def __init__(self, access: AwsAccess, url: str, headers: Mapping[str, str]) -> None:
        self._access = access
        self._url = url
        self._headers = dict(headers)
        self._frozen: Any = access.credentials.get_frozen_credentials()
        self._expires = hasattr(access.credentials, "refresh_needed")
        self._fetched_s: float | None = None
        self._fetching: asyncio.Future[None] | None = None

    async def refresh(self) -> None:
        """Fetch valid credentials. Raises InputError if that fails."""
        try:
            await asyncio.to_thread(self._fetch)
        except refusals() as exc:
            raise InputError(f"AWS: {error_text(exc)}") from exc
        self._fetched_s = asyncio.get_running_loop().time()

    def sign(self, body: bytes) -> dict[str, str]:
        """The additional headers of a request with this body; takes about 0.1 ms."""
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        self._refresh_in_passing()
        request = AWSRequest(method="POST", url=self._url, data=body, headers=self._headers)
        SigV4Auth(self._frozen, SIGNING_NAME, self._access.region).add_auth(request)
        return {name: request.headers[name] for name in _ADDED_HEADERS if name in request.headers}

    def _fetch(self) -> None:
        self._frozen = self._access.credentials.get_frozen_credentials()

    def _refresh_in_passing(self) -> None:
        """Start a refresh in a thread if the last one is old; this request does not wait for it."""
        if not self._expires:
            return
        loop = asyncio.get_running_loop()
        if self._fetched_s is not None and loop.time() - self._fetched_s < REFRESH_EVERY_S:
            return
        self._fetched_s = loop.time()
        self._fetching = loop.run_in_executor(None, self._fetch)
        self._fetching.add_done_callback(_log_failure)


def _log_failure(fetching: asyncio.Future[None]) -> None:
    """The old credentials stay in use; when they expire, requests fail with that error."""
    if not fetching.cancelled() and (exc := fetching.exception()) is not None:
        LOGGER.warning("AWS credentials could not be refreshed: %s", exc)
