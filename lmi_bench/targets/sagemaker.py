"""Opens a SageMaker endpoint; its container's settings state the protocol and the model."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmi_bench.core.errors import InputError
from lmi_bench.core.level import Level
from lmi_bench.core.listener import Listener
from lmi_bench.core.scenario import AUTO, SAGEMAKER_PREFIX, Scenario
from lmi_bench.core.server_metrics import CloudWatch
from lmi_bench.loadgen.aws.access import AwsAccess, open_aws_access
from lmi_bench.loadgen.aws.cloudwatch import Watched, read_levels
from lmi_bench.loadgen.aws.facts import EndpointFacts, read_endpoint_facts
from lmi_bench.loadgen.aws.target import Invocation, SageMakerTarget
from lmi_bench.targets.bench import Access, Bench
from lmi_bench.targets.http import endpoint_bench
from lmi_bench.targets.prompts import find_tokenizer
from lmi_bench.wire.format import DISCOVERED, find_format


def sagemaker_bench(scenario: Scenario, access: Access, listener: Listener) -> Bench:
    """A SageMaker endpoint. Raises InputError without AWS credentials, or if no such endpoint is in
    service."""
    settings = scenario.sagemaker
    invocation = Invocation(
        scenario.target.removeprefix(SAGEMAKER_PREFIX),
        settings.inference_component,
        settings.target_variant,
        settings.custom_attributes,
    )
    aws = open_aws_access(settings.endpoint_url)
    found = EndpointFacts({}, **access.asked) if access.asked else _facts(aws, invocation)
    if found.component is not None:
        invocation = replace(invocation, inference_component=found.component)
    protocol = found.protocol if scenario.protocol == AUTO else scenario.protocol
    if protocol not in DISCOVERED:
        raise InputError(
            f"--protocol {protocol} needs a URL: SageMaker's containers answer {', '.join(DISCOVERED)} on /invocations"
        )
    model = (found.model or invocation.endpoint_name) if scenario.model == AUTO else scenario.model
    scenario = scenario.with_overrides({"protocol": protocol, "model": model})
    wire_format = find_format(protocol, stream=scenario.stream)
    facts = {
        **found.facts,
        "endpoint": invocation.endpoint_name,
        "region": aws.region,
        "protocol": protocol,
        "model": model,
        "operation": "InvokeEndpointWithResponseStream" if scenario.stream else "InvokeEndpoint",
        "target_variant": settings.target_variant,
        "headers": sorted(access.headers),
    }
    keys = aws.credentials.get_frozen_credentials()
    return endpoint_bench(
        *(scenario, aws.runtime_url, listener),
        functools.partial(SageMakerTarget, aws, invocation, wire_format, headers=access.headers),
        title=f"{scenario.target} in {aws.region}, {protocol}, {model}",
        facts=facts,
        tokenizer=find_tokenizer(model),
        notes=found.notes,
        secrets=(*access.secrets(), *(key for key in (keys.secret_key, keys.token) if key)),
        usd_per_hour=found.price_usd_per_hour,
        count_instances=found.count_instances,
        cloudwatch=_cloudwatch(aws, invocation, found),
        asked={"component": found.component},
    )


def _facts(aws: AwsAccess, invocation: Invocation) -> EndpointFacts:
    """SageMaker's description of the endpoint, if its control plane can be reached."""
    if aws.is_aws or os.environ.get("AWS_ENDPOINT_URL_SAGEMAKER"):
        return read_endpoint_facts(aws, invocation)
    return EndpointFacts(
        {"kind": "sagemaker", "facts_unread": "the runtime is not at AWS"},
        notes=(f"{aws.runtime_url} is not AWS: no endpoint settings, no price",),
    )


def _cloudwatch(
    aws: AwsAccess, invocation: Invocation, found: EndpointFacts
) -> Callable[[Sequence[Level]], list[CloudWatch]] | None:
    """A function that reads the endpoint's metrics for given spans; None without CloudWatch."""
    if not (aws.is_aws or os.environ.get("AWS_ENDPOINT_URL_CLOUDWATCH")):
        return None
    watched = found.watched or Watched(
        invocation.endpoint_name, invocation.target_variant or "AllTraffic", invocation.inference_component
    )
    return functools.partial(read_levels, aws.client("cloudwatch"), watched)
