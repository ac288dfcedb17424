"""Facts about a SageMaker endpoint: instances, routing, scaling, container, and the price.

Read through boto3's control plane before a sweep. Credentials that may invoke an endpoint may not
be allowed to describe it; the sweep then continues without these facts.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.redaction import REDACTED
from lmi_bench.loadgen.aws.access import AwsAccess, error_text, refusals
from lmi_bench.loadgen.aws.cloudwatch import Watched
from lmi_bench.loadgen.aws.target import Invocation

_SECRET_WORDS = {"TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS", "AUTH"}
_MODEL_NAMES = (  # as the containers read them, the first one that is set
    *("SM_VLLM_SERVED_MODEL_NAME", "SM_VLLM_MODEL"),
    *("SM_SGLANG_SERVED_MODEL_NAME", "SM_SGLANG_MODEL_PATH"),
    *("HF_MODEL_ID", "OPTION_MODEL_ID", "MODEL_ID"),
)
_CHAT_IMAGES = re.compile(r"vllm|sglang|llama\.?cpp|\bnim\b")
_MOUNTED = "/opt/ml/model"


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """An endpoint as it was when the sweep began.

    facts               plain values for the manifest
    protocol            the likely one of the container, from its image; LMI by default
    price_usd_per_hour  of all its instances, from the catalog; None: unknown
    model               from the container's settings
    count_instances     counts the instances that run now; None: unknown
    component           the inference component that answers
    watched             whose metrics CloudWatch has; None: not known
    notes               notes to print at start
    """

    facts: dict[str, Any]
    protocol: str = "lmi"
    price_usd_per_hour: float | None = None
    model: str | None = None
    count_instances: Callable[[], int | None] | None = None
    component: str | None = None
    watched: Watched | None = None
    notes: tuple[str, ...] = ()


def _protocol(image: str) -> str:
    name = image.rpartition("/")[2].partition(":")[0]
    if "tgi" in image:
        return "tgi"
    return "openai-chat" if _CHAT_IMAGES.search(name) else "lmi"


def read_endpoint_facts(access: AwsAccess, invocation: Invocation) -> EndpointFacts:
    """Describe an endpoint. Raises InputError if it does not exist or is not in service."""
    try:
        return _describe(access, invocation)
    except refusals() as exc:
        reason = error_text(exc)
        if reason.startswith("ValidationException: ") and "Could not find" in reason:
            raise InputError(
                f"SageMaker has no endpoint {invocation.endpoint_name!r} in {access.region}: "
                + reason.partition(": ")[2]
            ) from exc
        return EndpointFacts(
            {"kind": "sagemaker", "facts_unread": reason},
            notes=(f"the endpoint's settings could not be read, so it has no price: {reason}",),
        )


def _describe(access: AwsAccess, invocation: Invocation) -> EndpointFacts:
    """Without a target variant the settings are those of the variant with the greatest weight.
    Price and instances are those of all variants, because they share the requests."""
    sagemaker, endpoint_name = access.client("sagemaker"), invocation.endpoint_name
    endpoint = sagemaker.describe_endpoint(EndpointName=endpoint_name)
    status = endpoint["EndpointStatus"]
    if status not in ("InService", "Updating", "SystemUpdating"):
        why = endpoint.get("FailureReason") or "wait until it is"
        raise InputError(f"endpoint {endpoint_name!r} is {status}, not InService: {why}")
    config = sagemaker.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
    variants = endpoint.get("ProductionVariants", ())
    running = _pick_variant(variants, endpoint_name, invocation.target_variant)
    name = running["VariantName"]
    planned = next(v for v in config["ProductionVariants"] if v["VariantName"] == name)
    component_name = invocation.inference_component
    if component_name is None and "ModelName" not in planned:
        component_name = _only_component(sagemaker, endpoint_name)
    container, component = _container(sagemaker, planned, component_name)
    answering = variants if invocation.target_variant is None else [running]
    price = _price_of_all(answering, config["ProductionVariants"], access.region)
    environment = {
        name: REDACTED if _SECRET_WORDS & set(name.upper().split("_")) else value
        for name, value in container.get("Environment", {}).items()
    }
    facts = {
        "kind": "sagemaker",
        "endpoint": endpoint_name,
        "region": access.region,
        "status": status,
        "endpoint_config": endpoint["EndpointConfigName"],
        "variant": name,
        "variants": len(variants),
        "instance": planned.get("InstanceType"),
        "instances": running.get("CurrentInstanceCount"),
        "serverless": planned.get("ServerlessConfig"),
        "routing": planned.get("RoutingConfig", {}).get("RoutingStrategy", "RANDOM"),
        "managed_scaling": planned.get("ManagedInstanceScaling"),
        "autoscaling": _autoscaling(access, endpoint_name, name, component_name),
        "inference_component": component,
        "image": container.get("Image"),
        "environment": environment,
        "price": price,
    }
    devices, cores = _hardware(planned.get("InstanceType"), component)
    return EndpointFacts(
        {key: value for key, value in facts.items() if value is not None},
        protocol=_protocol(container.get("Image") or ""),
        price_usd_per_hour=price.get("usd_per_hour"),
        model=_model(container, environment),
        component=component_name,
        watched=Watched(endpoint_name, name, component_name, devices, cores),
        count_instances=lambda: _count_instances(sagemaker, endpoint_name, [each["VariantName"] for each in answering]),
        notes=tuple(_notes(facts, len(answering))),
    )


def _only_component(sagemaker: Any, endpoint_name: str) -> str | None:
    """The endpoint's one inference component; raises InputError with the names of several."""
    try:
        found = sagemaker.list_inference_components(EndpointNameEquals=endpoint_name)
    except refusals():
        return None  # may not be listed: the first request tells
    names = [each["InferenceComponentName"] for each in found["InferenceComponents"]]
    if len(names) > 1:
        raise InputError(
            f"endpoint {endpoint_name!r} hosts {len(names)} inference components: "
            f"name one with --inference-component: {', '.join(names)}"
        )
    return names[0] if names else None


def _hardware(instance_type: str | None, component: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Accelerators and cores of one copy of the component, or of the instance."""
    if component is not None:
        compute = component.get("compute") or {}
        cores = compute.get("NumberOfCpuCoresRequired")
        return compute.get("NumberOfAcceleratorDevicesRequired"), cores and int(cores)
    try:
        instance = find_instance(instance_type or "")
    except InputError:
        return None, None
    return instance.num_accelerators, instance.vcpus


def _model(container: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """The name that the server knows its model by: as stated, or where the weights lie."""
    model = next((environment[key] for key in _MODEL_NAMES if environment.get(key)), None)
    has_weights = container.get("ModelDataSource") or container.get("ModelDataUrl")
    is_chat = _protocol(container.get("Image") or "") == "openai-chat"
    return _MOUNTED if model is None and has_weights and is_chat else model


def _notes(facts: Mapping[str, Any], num_answering: int) -> Iterator[str]:
    """What to print about an endpoint before the sweep starts."""
    instance_type, price = facts["instance"], facts["price"]
    where = f"{facts['instances']} x {instance_type}" if instance_type else "serverless"
    if num_answering > 1:
        where += f" and {num_answering - 1} other variant(s), which answer, too"
    yield f"{facts['endpoint']} in {facts['region']}: {where}, routing {facts['routing']}"
    if "reason" in price:
        yield f"price unknown: {price['reason']}"
    else:
        cost, provenance = price["usd_per_hour"], price["provenance"]
        yield f"price {cost:.2f} USD an hour for all instances ({provenance})"
    if facts["autoscaling"] or facts["managed_scaling"]:
        yield "warning: the endpoint scales by itself, so levels may differ in instances"
    if facts["status"] != "InService":
        yield f"warning: the endpoint is {facts['status']}"


def _count_instances(sagemaker: Any, endpoint_name: str, variants: Sequence[str]) -> int | None:
    """Current instances of these variants; None: unknown."""
    try:
        running = sagemaker.describe_endpoint(EndpointName=endpoint_name)["ProductionVariants"]
    except (*refusals(), KeyError):
        return None
    counts = [one.get("CurrentInstanceCount") for one in running if one["VariantName"] in variants]
    if not counts or None in counts:
        return None
    return int(sum(counts))


def _pick_variant(variants: Sequence[Mapping[str, Any]], endpoint_name: str, wanted: str | None) -> Mapping[str, Any]:
    if wanted is None:
        if not variants:
            raise InputError(f"endpoint {endpoint_name!r} has no production variant")
        return max(variants, key=lambda variant: variant.get("CurrentWeight", 0.0))
    for variant in variants:
        if variant["VariantName"] == wanted:
            return variant
    known = ", ".join(variant["VariantName"] for variant in variants)
    raise InputError(f"endpoint {endpoint_name!r} has no variant {wanted!r}: it has {known}")


def _container(
    sagemaker: Any, planned: Mapping[str, Any], inference_component: str | None
) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """The container that answers, and the inference component's own numbers if there is one."""
    component = None
    model_name = planned.get("ModelName")
    container: Mapping[str, Any] = {}
    if inference_component is not None:
        found = sagemaker.describe_inference_component(InferenceComponentName=inference_component)
        specification = found.get("Specification", {})
        container = specification.get("Container", {})
        model_name = specification.get("ModelName")
        component = {
            "name": inference_component,
            "copies": found.get("RuntimeConfig", {}).get("CurrentCopyCount"),
            "compute": specification.get("ComputeResourceRequirements"),
        }
        if "DeployedImage" in container:
            image = container["DeployedImage"].get("SpecifiedImage")
            container = {**container, "Image": image}
    if model_name is not None:
        model = sagemaker.describe_model(ModelName=model_name)
        container = model.get("PrimaryContainer") or next(iter(model.get("Containers", ())), {})
    return container, component


def _autoscaling(
    access: AwsAccess, endpoint_name: str, variant: str, component_name: str | None
) -> list[dict[str, Any]] | None:
    """The scalable targets with their policies; None if they cannot be read."""
    resources = [f"endpoint/{endpoint_name}/variant/{variant}"]
    if component_name is not None:
        resources.append(f"inference-component/{component_name}")
    try:
        scaling = access.client("application-autoscaling")
        targets = scaling.describe_scalable_targets(ServiceNamespace="sagemaker", ResourceIds=resources)[
            "ScalableTargets"
        ]
        return [
            {
                "resource": target["ResourceId"],
                "min": target["MinCapacity"],
                "max": target["MaxCapacity"],
                "policies": [
                    policy.get("TargetTrackingScalingPolicyConfiguration")
                    or policy.get("StepScalingPolicyConfiguration")
                    for policy in scaling.describe_scaling_policies(
                        ServiceNamespace="sagemaker", ResourceId=target["ResourceId"]
                    )["ScalingPolicies"]
                ],
            }
            for target in targets
        ]
    except refusals():
        return None


def _price_of_all(
    answering: Sequence[Mapping[str, Any]], planned: Sequence[Mapping[str, Any]], region: str
) -> dict[str, Any]:
    """USD an hour of the variants that answer; with several, facts of each by name, too."""
    types = {each["VariantName"]: each.get("InstanceType") for each in planned}
    prices = {
        each["VariantName"]: _price(types.get(each["VariantName"]), each.get("CurrentInstanceCount"), region)
        for each in answering
    }
    if len(prices) == 1:
        return next(iter(prices.values()))
    reasons = [f"{name}: {each['reason']}" for name, each in prices.items() if "reason" in each]
    if reasons:
        return {"reason": "; ".join(reasons), "variants": prices}
    cost = sum(each["usd_per_hour"] for each in prices.values())
    provenance = next(each["provenance"] for each in prices.values())
    return {"usd_per_hour": cost, "provenance": provenance, "variants": prices}


def _price(instance_type: str | None, num_instances: int | None, region: str) -> dict[str, Any]:
    """USD an hour of all instances and its source, or the reason why there is none."""
    if instance_type is None or not num_instances:
        return {"reason": "no instance is billed by the hour"}
    try:
        instance = find_instance(instance_type)
    except InputError:
        return {"reason": f"{instance_type} is not in the catalog"}
    each = instance.price_usd_per_hour
    if each is None:
        return {"reason": f"the catalog has no price of {instance_type}"}
    facts: dict[str, Any] = {
        "usd_per_hour_each": each,
        "usd_per_hour": each * num_instances,
        "provenance": instance.price_provenance,
    }
    if instance.price_region != region:
        facts["warning"] = f"the price is that of {instance.price_region}, not of {region}"
    return facts
