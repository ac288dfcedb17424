"""Writes the endpoint requests as a CloudFormation template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from lmi_bench.deploy.sagemaker import VARIANT, Request

_TYPES: Final = {
    "create_model": ("Model", "AWS::SageMaker::Model"),
    "create_endpoint_config": ("Config", "AWS::SageMaker::EndpointConfig"),
    "create_endpoint": ("Endpoint", "AWS::SageMaker::Endpoint"),
    "create_inference_component": ("Component", "AWS::SageMaker::InferenceComponent"),
    "register_scalable_target": ("Target", "AWS::ApplicationAutoScaling::ScalableTarget"),
    "put_scaling_policy": ("Policy", "AWS::ApplicationAutoScaling::ScalingPolicy"),
}


@dataclass(frozen=True)
class _Tag:
    """A CloudFormation function such as !Ref."""

    name: str
    value: str


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Tag, lambda dumper, tag: dumper.represent_scalar(f"!{tag.name}", tag.value)
)


def template(requests: Sequence[Request], *, description: str) -> str:
    """The requests of `endpoint_requests` as YAML; the role becomes a stack parameter.

    The stack names the model, configuration and endpoint; the component has an explicit name,
    since a scaling target needs it and no attribute returns it.
    """
    by_operation = dict(requests)
    components = "create_inference_component" in by_operation
    resources: dict[str, Any] = {}
    for operation, parameters in requests:
        logical, kind = _TYPES[operation]
        resource: dict[str, Any] = {"Type": kind}
        if operation == "register_scalable_target" and components:
            resource["DependsOn"] = "Component"  # used by name, so CloudFormation sees no reference
        resource["Properties"] = _properties(operation, parameters, components)
        resources[logical] = resource
    content = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": description[:1024],
        "Parameters": {
            "RoleArn": {
                "Type": "String",
                "Description": "Role that SageMaker assumes to fetch the image and weights",
            }
        },
        "Resources": resources,
        "Outputs": {"EndpointName": {"Value": _Tag("GetAtt", "Endpoint.EndpointName")}},
    }
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100)


def _properties(operation: str, parameters: dict[str, Any], components: bool) -> dict[str, Any]:
    properties = dict(parameters)
    match operation:
        case "create_model":
            del properties["ModelName"]
            properties["ExecutionRoleArn"] = _Tag("Ref", "RoleArn")
        case "create_endpoint_config":
            del properties["EndpointConfigName"]
            if "ExecutionRoleArn" in properties:
                properties["ExecutionRoleArn"] = _Tag("Ref", "RoleArn")
            (variant,) = properties["ProductionVariants"]
            if "ModelName" in variant:
                model = {"ModelName": _Tag("GetAtt", "Model.ModelName")}
                properties["ProductionVariants"] = [variant | model]
        case "create_endpoint":
            properties = {"EndpointConfigName": _Tag("GetAtt", "Config.EndpointConfigName")}
        case "create_inference_component":
            specification = properties["Specification"]
            properties |= {
                "InferenceComponentName": _Tag("Sub", "${AWS::StackName}-component"),
                "EndpointName": _Tag("GetAtt", "Endpoint.EndpointName"),
                "Specification": specification | {"ModelName": _Tag("GetAtt", "Model.ModelName")},
            }
        case "register_scalable_target":
            properties["ResourceId"] = _resource_id(components)
        case "put_scaling_policy":
            for name in ("ServiceNamespace", "ResourceId", "ScalableDimension"):
                del properties[name]
            properties["ScalingTargetId"] = _Tag("Ref", "Target")
    return properties


def _resource_id(components: bool) -> _Tag:
    if components:
        return _Tag("Sub", "inference-component/${AWS::StackName}-component")
    return _Tag("Sub", "endpoint/${Endpoint.EndpointName}/variant/" + VARIANT)
