"""A SageMaker endpoint as a target: an HTTP endpoint with signed requests and its own frames."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.loadgen.aws.access import AwsAccess, Signer
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.wire.event import WireFormat
from lmi_bench.wire.sagemaker import SageMakerFormat

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_MAX_ATTRIBUTES_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Invocation:
    """An endpoint, and the part of it that answers.

    inference_component  required if the endpoint hosts several
    target_variant       one production variant; None: requests are spread over all
    custom_attributes    the only header of ours that reaches the container
    """

    endpoint_name: str
    inference_component: str | None = None
    target_variant: str | None = None
    custom_attributes: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.endpoint_name):
            raise InputError(
                f"{self.endpoint_name!r} is not the name of a SageMaker endpoint: write "
                "sagemaker:NAME with letters, digits and hyphens, 63 at most"
            )
        attributes = self.custom_attributes or ""
        if len(attributes) > _MAX_ATTRIBUTES_CHARS or not attributes.isascii():
            raise InputError(
                f"custom attributes must be ASCII, at most {_MAX_ATTRIBUTES_CHARS} characters, got {len(attributes)}"
            )

    def headers(self) -> dict[str, str]:
        """The headers, named as botocore names them."""
        named = {
            "X-Amzn-SageMaker-Inference-Component": self.inference_component,
            "X-Amzn-SageMaker-Target-Variant": self.target_variant,
            "X-Amzn-SageMaker-Custom-Attributes": self.custom_attributes,
        }
        return {name: value for name, value in named.items() if value is not None}


class SageMakerTarget(HttpTarget):
    """InvokeEndpointWithResponseStream, or InvokeEndpoint without `stream`.

    wire_format  protocol of the container
    headers      unsigned headers of every request
    options      as for HttpTarget
    """

    def __init__(
        self,
        access: AwsAccess,
        invocation: Invocation,
        wire_format: WireFormat,
        *,
        stream: bool = True,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        operation = "invocations-response-stream" if stream else "invocations"
        url = f"{access.runtime_url}/endpoints/{invocation.endpoint_name}/{operation}"
        signed = {"Content-Type": "application/json", **invocation.headers()}
        self._signer = Signer(access, url, signed)
        super().__init__(
            url,
            SageMakerFormat(wire_format),
            headers={**(headers or {}), **signed},
            stream=stream,
            sign=self._signer.sign,
            **options,
        )

    async def open_level(self, connections: int) -> None:
        """Prepare for a level: refresh credentials, open connections."""
        await self._signer.refresh()
        await super().open_level(connections)
