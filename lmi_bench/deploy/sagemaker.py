"""Builds the SageMaker requests of a plan for boto3, checked against botocore's service model.

LMI starts as many copies as fit its container's accelerators; if the plan wants fewer, or the
server starts only one, each copy is an inference component. Nothing here opens a connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from botocore.loaders import Loader
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator

from lmi_bench.core.errors import InputError
from lmi_bench.core.units import MIB
from lmi_bench.deploy.plan import DeploymentPlan

VARIANT: Final = "AllTraffic"
_LONGEST_WAIT_S: Final = 3600
_NAME: Final = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,48}")
_HOST_SHARE: Final = 0.9  # share of host memory for all components; the system uses the rest
_SCALE_OUT_S, _SCALE_IN_S = 60, 300
_CONCURRENT: Final = {
    False: "SageMakerVariantConcurrentRequestsPerModelHighResolution",
    True: "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution",
}


@dataclass(frozen=True, slots=True)
class Container:
    """Image, environment and location of the weights (None: the container fetches them)."""

    image: str
    environment: Mapping[str, str]
    model_data_uri: str | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """Endpoint settings that a plan does not contain.

    name             prefix of the names of endpoint, model and component
    startup_s        deadline to fetch and load the weights and become healthy
    max_instances    upper limit for autoscaling, in machines; None: no autoscaling
    target_per_copy  concurrent requests per copy, the target of autoscaling
    components       True: one inference component per copy even if not needed
    """

    name: str
    role_arn: str
    startup_s: int = 1200
    max_instances: int | None = None
    target_per_copy: float | None = None
    components: bool = False
    accept_eula: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"endpoint name {self.name!r}: use letters, digits and single hyphens, at most 50"
            )
        if not 60 <= self.startup_s <= _LONGEST_WAIT_S:
            raise InputError(
                f"container_startup_health_check_timeout of {self.startup_s} s: SageMaker accepts "
                f"60 to {_LONGEST_WAIT_S} s; a model that loads longer needs faster storage"
            )


def needs_components(plan: DeploymentPlan, *, one_copy_a_container: bool) -> bool:
    """True if one container cannot run exactly the planned copies."""
    if one_copy_a_container:
        return plan.copies > 1
    return not plan.fills_the_machine


def endpoint_requests(
    plan: DeploymentPlan, container: Container, wishes: Wishes, *, one_copy_a_container: bool
) -> list[tuple[str, dict[str, Any]]]:
    """(operation, parameters) in the order to send them; each is valid for botocore."""
    components = wishes.components or needs_components(
        plan, one_copy_a_container=one_copy_a_container
    )
    requests = [
        ("create_model", _model(container, wishes)),
        ("create_endpoint_config", _config(plan, wishes, components)),
        (
            "create_endpoint",
            {"EndpointName": wishes.name, "EndpointConfigName": f"{wishes.name}-config"},
        ),
    ]
    if components:
        requests.append(("create_inference_component", _component(plan, wishes)))
    for operation, parameters in requests:
        check_request(operation, parameters)
    if wishes.max_instances is not None:
        requests += _autoscaling(plan, wishes, components)
    return requests


def check_request(operation: str, parameters: Mapping[str, Any]) -> None:
    """Validate parameters against the service model; raises InputError with the problems."""
    pascal = "".join(part.capitalize() for part in operation.split("_"))
    shape = _service().operation_model(pascal).input_shape
    assert shape is not None  # every operation here takes parameters
    report = ParamValidator().validate(parameters, shape)
    problems = [report.generate_report()] if report.has_errors() else []
    problems += _enum_problems(parameters, shape, "")
    if problems:
        raise InputError(f"{pascal} would be rejected: {'; '.join(problems)}")


def _model(container: Container, wishes: Wishes) -> dict[str, Any]:
    primary: dict[str, Any] = {
        "Image": container.image,
        "Environment": dict(container.environment),
    }
    if container.model_data_uri is not None:
        archive = container.model_data_uri.endswith(".tar.gz")
        source: dict[str, Any] = {
            "S3Uri": container.model_data_uri,
            "S3DataType": "S3Object" if archive else "S3Prefix",
            "CompressionType": "Gzip" if archive else "None",
        }
        if wishes.accept_eula:
            source["ModelAccessConfig"] = {"AcceptEula": True}
        primary["ModelDataSource"] = {"S3DataSource": source}
    return {
        "ModelName": f"{wishes.name}-model",
        "ExecutionRoleArn": wishes.role_arn,
        "PrimaryContainer": primary,
    }


def _config(plan: DeploymentPlan, wishes: Wishes, components: bool) -> dict[str, Any]:
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "InstanceType": plan.instance.instance_type,
        "InitialInstanceCount": plan.instances,
        "ModelDataDownloadTimeoutInSeconds": wishes.startup_s,
        "ContainerStartupHealthCheckTimeoutInSeconds": wishes.startup_s,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    config: dict[str, Any] = {"EndpointConfigName": f"{wishes.name}-config"}
    if components:
        config["ExecutionRoleArn"] = wishes.role_arn
        most = max(plan.instances, wishes.max_instances or plan.instances)
        variant["ManagedInstanceScaling"] = {
            "Status": "ENABLED",
            "MinInstanceCount": plan.instances,
            "MaxInstanceCount": most,
        }
    else:
        variant["ModelName"] = f"{wishes.name}-model"
    return config | {"ProductionVariants": [variant]}


def _component(plan: DeploymentPlan, wishes: Wishes) -> dict[str, Any]:
    host_mib = int(plan.instance.host_memory_bytes * _HOST_SHARE / plan.copies) // MIB
    devices = plan.tensor_parallel
    cores = plan.instance.neuron_cores
    if cores is not None:  # the degree counts cores, a component counts chips
        devices = max(1, plan.tensor_parallel * plan.instance.num_accelerators // cores)
    return {
        "InferenceComponentName": f"{wishes.name}-component",
        "EndpointName": wishes.name,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": f"{wishes.name}-model",
            "StartupParameters": {
                "ModelDataDownloadTimeoutInSeconds": wishes.startup_s,
                "ContainerStartupHealthCheckTimeoutInSeconds": wishes.startup_s,
            },
            "ComputeResourceRequirements": {
                "NumberOfAcceleratorDevicesRequired": devices,
                "MinMemoryRequiredInMb": max(128, host_mib),
            },
        },
        "RuntimeConfig": {"CopyCount": plan.instances * plan.copies},
    }


def _autoscaling(
    plan: DeploymentPlan, wishes: Wishes, components: bool
) -> list[tuple[str, dict[str, Any]]]:
    """Application Auto Scaling's requests, which track concurrency per model or copy."""
    assert wishes.max_instances is not None
    if wishes.max_instances < plan.instances:
        raise InputError(
            f"at most {wishes.max_instances} instances are fewer than the {plan.instances} planned"
        )
    copies = 1 if not components else plan.copies
    target = wishes.target_per_copy or plan.slots * (1 if components else plan.copies)
    if components:
        resource = f"inference-component/{wishes.name}-component"
        dimension = "sagemaker:inference-component:DesiredCopyCount"
    else:
        resource = f"endpoint/{wishes.name}/variant/{VARIANT}"
        dimension = "sagemaker:variant:DesiredInstanceCount"
    place = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource,
        "ScalableDimension": dimension,
    }
    capacity = {
        "MinCapacity": plan.instances * copies,
        "MaxCapacity": wishes.max_instances * copies,
    }
    policy = {
        "PolicyName": f"{wishes.name}-concurrency",
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": float(target),
            "PredefinedMetricSpecification": {"PredefinedMetricType": _CONCURRENT[components]},
            "ScaleOutCooldown": _SCALE_OUT_S,
            "ScaleInCooldown": _SCALE_IN_S,
        },
    }
    return [
        ("register_scalable_target", place | capacity),
        ("put_scaling_policy", place | policy),
    ]


@cache
def _service() -> ServiceModel:
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")


def _enum_problems(value: Any, shape: Shape, where: str) -> list[str]:
    """Values outside an enumeration or above a maximum, which botocore does not check."""
    kind: Any = shape
    if shape.type_name == "structure" and isinstance(value, Mapping):
        return [
            problem
            for name, member in value.items()
            if name in kind.members
            for problem in _enum_problems(member, kind.members[name], f"{where}.{name}".lstrip("."))
        ]
    if shape.type_name == "list" and isinstance(value, Sequence):
        return [p for item in value for p in _enum_problems(item, kind.member, where)]
    if shape.type_name == "string" and isinstance(value, str):
        allowed = list(kind.enum)
        if allowed and value not in allowed:
            return [f"{where} {value!r} is not a value that the service knows"]
        longest = shape.metadata.get("max")
        if longest is not None and len(value) > longest:
            return [f"{where} has {len(value)} characters, at most {longest} are allowed"]
    if shape.type_name == "integer" and isinstance(value, int):
        longest = shape.metadata.get("max")
        if longest is not None and value > longest:
            return [f"{where} is {value}, at most {longest} is allowed"]
    return []
