"""Builds the SageMaker requests of a plan, for boto3 and as a CloudFormation template.

The requests are in data/sagemaker.yaml; this module has their values, and checks them against
botocore's service model. Nothing here opens a connection. LMI starts as many copies as fit its
container's accelerators; if the plan wants fewer, or the server starts only one, each copy is an
inference component.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from botocore.loaders import Loader
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator

from lmi_bench.analysis.model.memory import weight_bytes
from lmi_bench.catalog.templates import Tag, as_yaml, filled, read_template
from lmi_bench.core.durable import parsed_yaml
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import GIB, MIB
from lmi_bench.deploy.images import Container
from lmi_bench.deploy.plan import DeploymentPlan
from lmi_bench.deploy.settings import EndpointSettings

Requests = Mapping[str, dict[str, Any]]
"""The parameters of each operation by its name in boto3, in the order to send them."""

VARIANT: Final = "AllTraffic"
_STACK: Final = "deploy/cloudformation.yaml"
_HOST_SHARE: Final = 0.9  # share of host memory for all components; the system uses the rest
_SERVER_BYTES: Final = 4 * GIB  # of host memory for a copy, beside its weights while they load
_WITHOUT_DISKS: Final = ("ml.p3.", "ml.inf1.", "ml.inf2.")
_LARGEST_VOLUME_GB, _SYSTEM_GB = 512, 30  # of SageMaker's; for image and caches
_JAVA_ONLY: Final = (r"\uD800", r"\p{")  # in patterns of printable text, which Python has not
_CONCURRENT: Final = {
    False: "SageMakerVariantConcurrentRequestsPerModelHighResolution",
    True: "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution",
}


def endpoint_requests(
    plan: DeploymentPlan, container: Container, endpoint: EndpointSettings, *, one_copy_a_container: bool
) -> Requests:
    """The requests; each is valid for botocore."""
    fits_one = plan.copies == 1 if one_copy_a_container else plan.fills_the_machine
    components, scales = endpoint.components or not fits_one, endpoint.max_instances is not None
    wanted = [
        *("create_model", "create_endpoint_config", "create_endpoint"),
        *(("create_inference_component",) if components else ()),
        *(("register_scalable_target", "put_scaling_policy") if scales else ()),
    ]
    values = {
        "name": endpoint.name,
        **{part: f"{endpoint.name}-{part}" for part in ("model", "config", "component")},
        "role_arn": endpoint.role_arn,
        "startup_s": endpoint.startup_s,
        "instances": plan.instances,
        "copies": plan.instances * plan.copies,
        **_container_values(container, endpoint),
        **_machine_values(plan, endpoint, components=components),
        **(_scaling_values(plan, endpoint, components=components) if scales else {}),
    }
    requests = filled("deploy/sagemaker.yaml", wanted, values)
    for text in endpoint.parameters:
        _set_parameter(requests, text)
    for operation, parameters in requests.items():
        check_request(operation, parameters)
    return requests


def _set_parameter(requests: Requests, text: str) -> None:
    """Set a parameter as `--set` states it; raises InputError for a request that is not sent."""
    place, sign, value = text.partition("=")
    operation, *path = place.split(".")
    if not sign or not path or not all(path) or operation not in requests:
        raise InputError(f"--set {text}: write OPERATION.PATH=VALUE with an operation of {', '.join(requests)}")
    content = parsed_yaml(value, f"--set {text}: {value}")
    found: Any = requests[operation]
    try:
        for name in path[:-1]:
            is_list = isinstance(found, list)
            found = found[int(name)] if is_list else found.setdefault(name, {})
        found[int(path[-1]) if isinstance(found, list) else path[-1]] = content
    except (ValueError, IndexError, AttributeError, TypeError) as exc:
        raise InputError(f"--set {text}: {place} is no place in the request") from exc


def check_request(operation: str, parameters: Mapping[str, Any]) -> None:
    """Validate parameters against the service model; raises InputError with the problems."""
    shape = _input_shape(operation)
    report = ParamValidator().validate(parameters, shape)
    problems = report.generate_report().splitlines()
    problems += _enum_problems(parameters, shape, "")
    if problems:
        raise InputError(f"{_pascal(operation)} would be rejected: {'; '.join(problems)}")


def allowed_values(operation: str, *path: str) -> list[str]:
    """The values of an enumeration, or of a list of one, inside an operation's parameters."""
    shape: Any = _input_shape(operation)
    for name in path:
        shape = shape.members[name]
    return list(shape.member.enum if shape.type_name == "list" else shape.enum)


def _pascal(operation: str) -> str:
    return "".join("AI" if part == "ai" else part.capitalize() for part in operation.split("_"))


def _input_shape(operation: str) -> Shape:
    service = "sagemaker" if operation.startswith("create") else "application-autoscaling"
    shape = _service(service).operation_model(_pascal(operation)).input_shape
    assert shape is not None  # every operation here takes parameters
    return shape


def _container_values(container: Container, endpoint: EndpointSettings) -> dict[str, Any]:
    """Image, variables and weights of the container."""
    variables = {**container.environment, **{name: f"${{{name}}}" for name in container.secrets}}
    weights, uri = None, container.model_data_uri
    if uri is not None:
        archive = uri.endswith(".tar.gz")
        source: dict[str, Any] = {
            "S3Uri": uri if archive else f"{uri.rstrip('/')}/",  # as the service wants a prefix
            "S3DataType": "S3Object" if archive else "S3Prefix",
            "CompressionType": "Gzip" if archive else "None",
        }
        if endpoint.accept_eula:
            source["ModelAccessConfig"] = {"AcceptEula": True}
        weights = {"S3DataSource": source}
    ami = container.ami or None
    return {"image": container.image, "environment": variables, "weights": weights, "ami": ami}


def _machine_values(plan: DeploymentPlan, endpoint: EndpointSettings, *, components: bool) -> dict[str, Any]:
    """The machines, and what a copy takes of one; a component scales them itself."""
    setup, instance = plan.setup, plan.setup.instance
    stored_bytes, volume_gb = weight_bytes(setup.shape, setup.dtype), None
    if instance.instance_type.startswith(_WITHOUT_DISKS):
        volume_gb = min(_LARGEST_VOLUME_GB, math.ceil(2 * stored_bytes / 1e9) + _SYSTEM_GB)
    share_bytes = instance.host_memory_bytes * _HOST_SHARE / plan.copies
    scaling = {
        "Status": "ENABLED",
        "MinInstanceCount": plan.instances,
        "MaxInstanceCount": max(plan.instances, endpoint.max_instances or plan.instances),
    }
    return {
        "instance_type": instance.instance_type,
        "volume_gb": volume_gb,
        "devices": setup.devices,
        "host_mib": max(128, int(min(share_bytes, stored_bytes + _SERVER_BYTES)) // MIB),
        "role_of_components": endpoint.role_arn if components else None,
        "managed_scaling": scaling if components else None,
        "model_of_variant": None if components else f"{endpoint.name}-model",
    }


def _scaling_values(plan: DeploymentPlan, endpoint: EndpointSettings, *, components: bool) -> dict[str, Any]:
    """Application Auto Scaling tracks the concurrency of a model, or of a copy as a component."""
    assert endpoint.max_instances is not None
    per_copy = plan.scaling_target(endpoint.target_per_copy, endpoint.max_instances)
    copies, target = (plan.copies, per_copy) if components else (1, per_copy * plan.copies)
    scaled, count = f"endpoint/{endpoint.name}/variant/{VARIANT}", "variant:DesiredInstanceCount"
    if components:
        scaled = f"inference-component/{endpoint.name}-component"
        count = "inference-component:DesiredCopyCount"
    return {
        "scaled": scaled,
        "dimension": f"sagemaker:{count}",
        "least_capacity": plan.instances * copies,
        "most_capacity": endpoint.max_instances * copies,
        "policy": f"{endpoint.name}-concurrency",
        "target": round(target, 1),
        "metric": _CONCURRENT[components],
    }


@cache
def _service(name: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


def _enum_problems(value: Any, shape: Shape, where: str) -> Iterator[str]:
    """Values outside an enumeration, pattern or maximum, which botocore does not check."""
    kind: Any = shape
    most, pattern = (shape.metadata.get(limit) for limit in ("max", "pattern"))
    is_known = pattern and not any(words in pattern for words in _JAVA_ONLY)
    match shape.type_name:
        case "structure" if isinstance(value, Mapping):
            for name in filter(kind.members.__contains__, value):
                place = f"{where}.{name}".lstrip(".")
                yield from _enum_problems(value[name], kind.members[name], place)
        case "list" if isinstance(value, Sequence):
            for item in value:
                yield from _enum_problems(item, kind.member, where)
        case "string" if isinstance(value, str):
            if kind.enum and value not in kind.enum:
                yield f"{where} {value!r} is not a value that the service knows"
            elif most is not None and len(value) > most:
                yield f"{where} has {len(value)} characters, at most {most} are allowed"
            elif is_known and not re.fullmatch(pattern, value):
                yield f"{where} {value!r} does not match the service's pattern {pattern}"
        case "integer" if isinstance(value, int) and most is not None and value > most:
            yield f"{where} is {value}, at most {most} is allowed"


def parameter_name(variable: str) -> str:
    """The stack parameter of a secret.

    >>> parameter_name("HF_TOKEN")
    'HfToken'
    """
    return "".join(word.capitalize() for word in variable.split("_"))


def template(requests: Requests, *, description: str, secrets: Sequence[str] = ()) -> str:
    """The requests of `endpoint_requests` as YAML; role and secrets become stack parameters."""
    rows, components = read_template(_STACK), "create_inference_component" in requests
    refs = {name: Tag("Ref", parameter_name(name)) for name in secrets}
    resources: dict[str, Any] = {}
    for operation, parameters in requests.items():
        of_component = operation == "register_scalable_target" and components
        row = rows[f"{operation}_of_component" if of_component else operation]
        properties = _replaced(parameters, row["replaced"]) | row.get("added", {})
        if operation == "create_model":
            primary = properties["PrimaryContainer"]
            variables = {"Environment": primary["Environment"] | refs}
            properties["PrimaryContainer"] = primary | variables
        resources[row["name"]] = {**row["resource"], "Properties": properties}
    role = "Role that SageMaker assumes to fetch the image and weights"
    names = {
        "RoleArn": {"Type": "String", "Description": role},
        **{parameter_name(name): {"Type": "String", "NoEcho": True} for name in secrets},
    }
    values = {"description": description[:1024], "parameters": names, "resources": resources}
    return as_yaml(filled(_STACK, ["stack"], values)["stack"])


def _replaced(part: Any, by: Any) -> Any:
    """A copy of a request, or of each item of a list, with other values for keys that it has."""
    if isinstance(part, list):
        return [_replaced(each, by) for each in part]
    if not isinstance(part, dict) or not isinstance(by, dict):
        return by
    return {
        key: _replaced(value, by[key]) if key in by else value
        for key, value in part.items()
        if key not in by or by[key] is not None
    }
