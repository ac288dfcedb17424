"""Endpoint facts from boto3's own clients; their answers are stubbed, checked by AWS's model."""

from datetime import UTC, datetime

import boto3
import pytest
from botocore.stub import Stubber

from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.loadgen.aws.access import AwsAccess
from lmi_bench.loadgen.aws.facts import read_endpoint_facts
from lmi_bench.loadgen.aws.target import Invocation

WHEN = datetime(2026, 1, 1, tzinfo=UTC)
ARN = "arn:aws:sagemaker:us-east-1:000000000000:"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.36.0-lmi25.0.0-cu130"
ENVIRONMENT = {
    "HF_MODEL_ID": "meta-llama/Llama-2-7b-hf",
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS": "4096",
    "MY_API_KEY": "xyz",
}


def variant(name="AllTraffic", weight=1.0, count=2):
    return {"VariantName": name, "CurrentWeight": weight, "CurrentInstanceCount": count, "DesiredInstanceCount": count}


def planned(name="AllTraffic", instance_type="ml.g5.2xlarge", **more):
    return {
        "VariantName": name,
        "ModelName": "model-1",
        "InstanceType": instance_type,
        "InitialInstanceCount": 1,
        **more,
    }


def endpoint(*variants, status="InService", **more):
    return {
        "EndpointName": "mine",
        "EndpointArn": ARN + "endpoint/mine",
        "EndpointConfigName": "config-1",
        **({"ProductionVariants": list(variants)} if variants else {}),
        "EndpointStatus": status,
        "CreationTime": WHEN,
        "LastModifiedTime": WHEN,
        **more,
    }


def config(*variants):
    return {
        "EndpointConfigName": "config-1",
        "EndpointConfigArn": ARN + "endpoint-config/config-1",
        "ProductionVariants": list(variants),
        "CreationTime": WHEN,
    }


MODEL = {
    "ModelName": "model-1",
    "ModelArn": ARN + "model/model-1",
    "PrimaryContainer": {"Image": IMAGE, "Environment": ENVIRONMENT},
    "CreationTime": WHEN,
}
TARGET = {
    "ServiceNamespace": "sagemaker",
    "ResourceId": "endpoint/mine/variant/AllTraffic",
    "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    "MinCapacity": 1,
    "MaxCapacity": 4,
    "RoleARN": "arn:aws:iam::000000000000:role/x",
    "CreationTime": WHEN,
}


SESSION = boto3.Session()  # it reads the service descriptions once


def client(name):
    return SESSION.client(name, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y")


def described(*replies, targets=(), policies=(), scaling_error=None, region="us-east-1", **asked):
    sagemaker, scaling = client("sagemaker"), client("application-autoscaling")
    with Stubber(sagemaker) as stub, Stubber(scaling) as scaling_stub:
        for operation, reply in replies:
            stub.add_response(operation, reply)
        if scaling_error:
            scaling_stub.add_client_error("describe_scalable_targets", scaling_error)
        else:
            scaling_stub.add_response("describe_scalable_targets", {"ScalableTargets": list(targets)})
        for policy in policies:
            scaling_stub.add_response("describe_scaling_policies", {"ScalingPolicies": [policy]})
        session = Session({"sagemaker": sagemaker, "application-autoscaling": scaling})
        access = AwsAccess(region, "https://x", True, None, session)
        return read_endpoint_facts(access, Invocation("mine", **asked))


def plain(**more):
    return (
        ("describe_endpoint", endpoint(variant(**more))),
        ("describe_endpoint_config", config(planned())),
        ("describe_model", MODEL),
    )


def test_instances_container_and_price_are_read():
    """The price is the catalog's, for each of the two instances."""
    found = described(*plain())
    each = find_instance("ml.g5.2xlarge").price_usd_per_hour
    assert (found.facts["instance"], found.facts["instances"]) == ("ml.g5.2xlarge", 2)
    assert found.price_usd_per_hour == pytest.approx(2 * each)
    assert found.facts["routing"] == "RANDOM"
    assert found.facts["autoscaling"] == []
    assert found.model == "meta-llama/Llama-2-7b-hf"
    assert found.protocol == "lmi"


def test_secrets_in_the_containers_settings_stay_out_and_token_limits_stay_in():
    environment = described(*plain()).facts["environment"]
    assert environment["HF_TOKEN"] == environment["MY_API_KEY"] == "<redacted>"
    assert environment["OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS"] == "4096"


def test_scaling_and_routing_are_read_and_warned_of():
    policy = {
        "PolicyARN": ARN + "x",
        "PolicyName": "p",
        "ServiceNamespace": "sagemaker",
        "ResourceId": TARGET["ResourceId"],
        "ScalableDimension": TARGET["ScalableDimension"],
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {"TargetValue": 5.0},
        "CreationTime": WHEN,
    }
    routed = planned(RoutingConfig={"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"})
    found = described(
        ("describe_endpoint", endpoint(variant())),
        ("describe_endpoint_config", config(routed)),
        ("describe_model", MODEL),
        targets=[TARGET],
        policies=[policy],
    )
    assert found.facts["routing"] == "LEAST_OUTSTANDING_REQUESTS"
    assert found.facts["autoscaling"] == [
        {"resource": "endpoint/mine/variant/AllTraffic", "min": 1, "max": 4, "policies": [{"TargetValue": 5.0}]}
    ]
    assert any("scales by itself" in note for note in found.notes)


def test_scaling_that_may_not_be_read_is_left_out():
    found = described(*plain(), scaling_error="AccessDeniedException")
    assert "autoscaling" not in found.facts


def test_the_heaviest_variant_stands_for_the_endpoint_unless_one_is_named():
    replies = (
        ("describe_endpoint", endpoint(variant("a", 0.2), variant("b", 0.8, count=3))),
        ("describe_endpoint_config", config(planned("a", "ml.g5.xlarge"), planned("b", "ml.g5.12xlarge"))),
        ("describe_model", MODEL),
    )
    assert described(*replies).facts["instance"] == "ml.g5.12xlarge"
    assert described(*replies).facts["instances"] == 3
    assert described(*replies, target_variant="a").facts["instance"] == "ml.g5.xlarge"
    with pytest.raises(InputError, match="no variant 'c': it has a, b"):
        described(*replies, target_variant="c")


def test_variants_that_share_the_requests_are_all_paid_for():
    """One ml.g5.xlarge and three ml.g5.12xlarge; who names one of them pays for that."""
    replies = (
        ("describe_endpoint", endpoint(variant("a", 0.2, count=1), variant("b", 0.8, count=3))),
        ("describe_endpoint_config", config(planned("a", "ml.g5.xlarge"), planned("b", "ml.g5.12xlarge"))),
        ("describe_model", MODEL),
    )
    small, large = (find_instance(f"ml.g5.{size}").price_usd_per_hour for size in ("xlarge", "12xlarge"))
    found = described(*replies)
    assert found.price_usd_per_hour == pytest.approx(small + 3 * large)
    assert "1 other variant" in found.notes[0]
    assert described(*replies, target_variant="a").price_usd_per_hour == pytest.approx(small)


COMPONENT = {
    "InferenceComponentName": "ic-1",
    "InferenceComponentArn": ARN + "inference-component/ic-1",
    "EndpointName": "mine",
    "EndpointArn": ARN + "endpoint/mine",
    "CreationTime": WHEN,
    "LastModifiedTime": WHEN,
    "RuntimeConfig": {"DesiredCopyCount": 2, "CurrentCopyCount": 2},
    "Specification": {
        "Container": {
            "DeployedImage": {"SpecifiedImage": "x/vllm:0.27"},
            "Environment": {"SM_VLLM_MODEL": "m", "HF_MODEL_ID": "other"},
        },
        "ComputeResourceRequirements": {"MinMemoryRequiredInMb": 1024, "NumberOfAcceleratorDevicesRequired": 2.0},
    },
}


def hosting_components(*names, **asked):
    """An endpoint with these components; one is described."""
    bare = planned()
    del bare["ModelName"]
    listed = {
        "InferenceComponents": [
            {
                **{key: COMPONENT[key] for key in ("EndpointName", "EndpointArn")},
                **{key: COMPONENT[key] for key in ("CreationTime", "LastModifiedTime")},
                "InferenceComponentName": name,
                "InferenceComponentArn": ARN + name,
                "VariantName": "AllTraffic",
            }
            for name in names
        ]
    }
    return described(
        ("describe_endpoint", endpoint(variant())),
        ("describe_endpoint_config", config(bare)),
        *([("list_inference_components", listed)] if names else []),
        ("describe_inference_component", COMPONENT),
        **asked,
    )


def test_an_inference_component_has_its_own_container_copies_and_devices():
    found = hosting_components(inference_component="ic-1")
    assert found.facts["inference_component"]["copies"] == 2
    assert found.facts["image"] == "x/vllm:0.27"
    assert found.protocol == "openai-chat"
    assert found.model == "m"
    assert (found.watched.devices, found.watched.cores) == (2, None)


def test_the_only_component_answers_and_one_of_several_must_be_named():
    assert hosting_components("ic-1").component == "ic-1"
    with pytest.raises(InputError, match=r"hosts 2 inference components.*: ic-1, ic-2"):
        hosting_components("ic-1", "ic-2")


@pytest.mark.parametrize(
    ("image", "environment", "protocol", "model"),
    [
        (IMAGE, {}, "lmi", None),
        ("x/sglang:server-sagemaker-cuda-v1.4", {}, "openai-chat", "/opt/ml/model"),
        ("x/vllm:0.29", {"SM_VLLM_SERVED_MODEL_NAME": "chat", "SM_VLLM_MODEL": "m"}, None, "chat"),
        ("x/nim-llm:1", {"MODEL_ID": "meta/llama"}, "openai-chat", "meta/llama"),
        ("x/minimal:1", {}, "lmi", None),
    ],
)
def test_the_container_says_its_protocol_and_its_models_name(image, environment, protocol, model):
    container = {"Image": image, "Environment": environment, "ModelDataUrl": "s3://b/m.tar.gz"}
    found = described(
        ("describe_endpoint", endpoint(variant())),
        ("describe_endpoint_config", config(planned())),
        ("describe_model", {**MODEL, "PrimaryContainer": container}),
    )
    assert found.protocol == (protocol or "openai-chat")
    assert found.model == model
    assert found.watched.devices == 1


def test_a_serverless_endpoint_has_no_price_by_the_hour():
    serverless = planned(ServerlessConfig={"MemorySizeInMB": 6144, "MaxConcurrency": 5})
    del serverless["InstanceType"], serverless["InitialInstanceCount"]
    found = described(
        ("describe_endpoint", endpoint({"VariantName": "AllTraffic"})),
        ("describe_endpoint_config", config(serverless)),
        ("describe_model", MODEL),
    )
    assert found.price_usd_per_hour is None
    assert found.facts["serverless"]["MaxConcurrency"] == 5


def test_a_price_of_another_region_says_so():
    facts = described(*plain(), region="eu-west-3").facts
    assert "not of eu-west-3" in facts["price"]["warning"]


def test_an_endpoint_that_is_not_in_service_is_refused():
    with pytest.raises(InputError, match=r"Failed, not InService: no capacity"):
        described(("describe_endpoint", endpoint(status="Failed", FailureReason="no capacity")))


class Session:
    """Gives stubbed clients in place of real ones."""

    def __init__(self, clients):
        self.clients = clients

    def create_client(self, name, **options):
        return self.clients[name]


def read_with_error(code, message):
    sagemaker = client("sagemaker")
    session = Session({"sagemaker": sagemaker, "application-autoscaling": None})
    access = AwsAccess("us-east-1", "https://x", True, None, session)
    with Stubber(sagemaker) as stub:
        stub.add_client_error("describe_endpoint", code, message)
        return read_endpoint_facts(access, Invocation("mine"))


def test_who_may_not_describe_may_still_measure():
    found = read_with_error("AccessDeniedException", "not authorized")
    assert found.price_usd_per_hour is None
    assert "not authorized" in found.notes[0]


def test_an_unknown_endpoint_is_the_users_to_mend():
    with pytest.raises(InputError, match="no endpoint 'mine' in us-east-1"):
        read_with_error("ValidationException", 'Could not find endpoint "mine".')
