"""Kubernetes files of a plan: valid by the kinds' own schemas, and the plan's layout in them."""

from __future__ import annotations

import gzip
import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.setup import Parallelism
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.bundle import build_bundle
from lmi_bench.deploy.engine_arguments import engine_arguments
from lmi_bench.deploy.images import choose_image
from lmi_bench.deploy.plan import plan_from_layout, plan_from_recommendation
from lmi_bench.deploy.settings import EndpointSettings, Server, Stated
from lmi_bench.jobs.settings.deploy import DeploySettings

SCHEMAS = json.loads(gzip.decompress((Path(__file__).parent / "schemas" / "kubernetes.json.gz").read_bytes()))
AWQ = "org/Llama-3.1-70B-AWQ"


def objects(bundle):
    """All objects of the files by kind, each valid by its schema."""
    found = {}
    for text in bundle.files.values():
        for each in yaml.safe_load_all(text):
            schema = {**SCHEMAS["kinds"][each["kind"]], "$defs": SCHEMAS["$defs"]}
            jsonschema.Draft202012Validator(schema).validate(each)
            found[each["kind"]] = each
    return found


def written(model, instance, *, server="vllm", weights=None, env=(), endpoint=None, **stated):
    stated = Stated(**{"max_model_len": 4096} | stated)
    plan = plan_from_layout(model, instance, VLLM_0_12, stated, weights=weights)
    settings = endpoint or EndpointSettings("chat", max_instances=5)
    bundle = build_bundle(plan, Server(server, "kubernetes", weights, env=env), settings)
    return plan, bundle, objects(bundle)


@pytest.mark.parametrize(
    ("model", "instance", "more"),
    [
        ("qwen3-8b", "ml.g5.2xlarge", {}),
        ("qwen3-8b", "ml.g6e.12xlarge", {"machines": 2}),
        ("llama-3.1-70b", "ml.g5.12xlarge", {"weights": AWQ, "dtype": "int4"}),
        ("mixtral-8x7b", "ml.p4d.24xlarge", {"draft": "ngram"}),
        ("gpt-oss-120b", "ml.p5.48xlarge", {"server": "sglang"}),
        ("gemma-3-4b", "ml.g6.2xlarge", {"env": ("VLLM_LOGGING_LEVEL=INFO", "MY_TOKEN")}),
        ("qwen3-8b", "ml.g6.2xlarge", {"weights": "s3://bucket/qwen3-8b/"}),
    ],
)
def test_the_files_are_valid_and_hold_the_planned_layout(model, instance, more):
    plan, bundle, found = written(model, instance, **more)
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    degree, copies = plan.setup.tensor_parallel, plan.instances * plan.copies
    assert deployment["replicas"] == copies
    assert container["resources"]["limits"] == {"nvidia.com/gpu": degree}
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": instance[3:]}
    memory = int(container["resources"]["requests"]["memory"].removesuffix("Gi")) * plan.copies
    assert memory * 2**30 <= plan.setup.instance.host_memory_bytes * 0.9
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"]
    assert service["selector"].items() <= labels.items()
    waits_s = container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
    start_up = plan.start_up(workers=1, downloads=plan.copies)
    assert waits_s >= max(600, 2 * (start_up.weights_s + start_up.compile_s))
    assert str(plan.limits.max_model_len) in container["args"]
    scaled = found["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (copies, 5 * plan.copies)
    assert float(scaled["triggers"][0]["metadata"]["threshold"]) < plan.limits.max_num_seqs
    assert ("LLMInferenceService" in found) == (more.get("server") != "sglang")
    known = engine_arguments(more.get("server", "vllm"), bundle.image.rpartition(":v")[2])
    flags = {word[2:].replace("-", "_") for word in container["args"] if word.startswith("--")}
    assert flags - {"host", "port"} <= set(known)


@pytest.mark.parametrize(
    ("server", "own", "headless"), [("vllm", "--master-addr", True), ("sglang", "--dist-init-addr", False)]
)
def test_a_copy_over_two_hosts_is_a_group_of_pods_whose_leader_serves(server, own, headless):
    """DeepSeek-V3 on 2 x 8 H100: each pod has a host's 8 devices and its own rank."""
    plan, bundle, found = spanning(server)
    group = found["LeaderWorkerSet"]["spec"]
    parts = group["leaderWorkerTemplate"]
    assert (group["replicas"], parts["size"]) == (plan.instances, 2)
    pods = [parts[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
        words = container["args"]
        given = dict(itertools.pairwise(words))
        assert (given["--nnodes"], given["--node-rank"]) == ("$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)")
        assert given[own].startswith("$(LWS_LEADER_ADDRESS)")
        assert "16" in (given.get("--tensor-parallel-size"), given.get("--tp-size"))
        memory = int(container["resources"]["requests"]["memory"].removesuffix("Gi"))
        assert memory * 2**30 <= find_instance("ml.p5.48xlarge").host_memory_bytes * 0.9
    leader, worker = (pod["containers"][0] for pod in pods)
    assert ("--headless" in worker["args"]) == headless
    assert "--headless" not in leader["args"]
    assert "--port" not in worker["args"]
    assert "startupProbe" in leader
    assert "startupProbe" not in worker
    selector = found["Service"]["spec"]["selector"]
    assert selector.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    assert selector.items() <= parts["leaderTemplate"]["metadata"]["labels"].items()
    scaled = found["ScaledObject"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["apiVersion"]) == ("LeaderWorkerSet", found["LeaderWorkerSet"]["apiVersion"])
    known = engine_arguments(server, bundle.image.rpartition(":v")[2])
    flags = {word[2:].replace("-", "_") for word in leader["args"] if word.startswith("--")}
    assert flags - {"host", "port"} <= set(known)
    assert "Deployment" not in found
    assert "LLMInferenceService" not in found


def spanning(server, **split):
    """DeepSeek-V3 planned for two hosts a copy, as files."""
    request = RecommendRequest(
        Workload(find_model("deepseek-v3"), "float8", 1000, 300),
        VLLM_0_12,
        instances=(find_instance("ml.p5.48xlarge"),),
        settings=(EngineSetting(hosts=2, **split),),
        degrees=(16,),
    )
    plan = plan_from_recommendation(recommend(request), "deepseek-v3", VLLM_0_12)
    settings = EndpointSettings("chat", max_instances=5)
    bundle = build_bundle(plan, Server(server, "kubernetes"), settings)
    return plan, bundle, objects(bundle)


def test_attention_by_ranks_over_hosts_is_written_for_sglang_only():
    split = {"expert_parallel": True, "dp_attention": True}
    assert spanning("sglang", **split)[2]["LeaderWorkerSet"]
    with pytest.raises(InputError, match="use --server sglang"):
        spanning("vllm", **split)


def test_stages_of_a_pipeline_share_a_pod():
    """TP 2 in two stages: four devices in the pod, not two."""
    plan = plan_from_layout("qwen3-8b", "ml.g6e.12xlarge", VLLM_0_12, Stated(tensor_parallel=2))
    setup = replace(plan.setup, parallelism=Parallelism(pipeline=2))
    staged = replace(plan, setup=setup, copies=1, engine=EngineSetting(pipeline=2))
    bundle = build_bundle(staged, Server("vllm", "kubernetes"), EndpointSettings("chat"))
    pod = objects(bundle)["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}


def test_kserve_gets_the_arguments_of_the_deployment():
    _, _, found = written("mixtral-8x7b", "ml.p4d.24xlarge", draft="ngram")
    (container,) = found["LLMInferenceService"]["spec"]["template"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    added = shlex.split(variables["VLLM_ADDITIONAL_ARGS"])
    (served,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert [served["args"][0], *added] == served["args"][:-4]
    model = found["LLMInferenceService"]["spec"]["model"]
    assert model["uri"] == f"hf://{served['args'][0]}"


def test_a_token_is_a_reference_to_a_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    settings = EndpointSettings("chat", accept_eula=True)
    _, bundle, found = written("llama-3.1-8b", "ml.g6e.xlarge", endpoint=settings)
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    (token,) = (each for each in container["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["key"] == "HF_TOKEN"
    assert "hf_secretsecret" not in "".join(bundle.files.values())
    name = token["valueFrom"]["secretKeyRef"]["name"]
    assert any(f"kubectl create secret generic {name}" in trap for trap in bundle.traps)
    assert "ScaledObject" not in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "lmi"}, "--server lmi: on Kubernetes use vllm or sglang"),
        ({"model_data_uri": "s3://b/m/"}, "--model-data is mounted by SageMaker only"),
        ({"account": "123"}, "--account is of SageMaker's images"),
        ({"platform": "nomad"}, "--platform nomad: use sagemaker or kubernetes"),
    ],
)
def test_what_kubernetes_cannot_take_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        Server(**{"platform": "kubernetes"} | change)


def test_sagemakers_options_and_a_fleet_above_the_maximum_are_refused():
    layout = {"model": "qwen3-8b", "instance": "ml.g6e.xlarge"}
    pods = Server(platform="kubernetes")
    for server, endpoint, message in (
        (pods, EndpointSettings(components=True), "no effect here: leave out --components"),
        (replace(pods, region="eu-west-1"), EndpointSettings(), "leave out --region"),
        (pods, EndpointSettings(parameters=("create_model.A=1",)), "leave out --set"),
        (replace(pods, prometheus="http://p"), EndpointSettings(), "--prometheus is for"),
        (Server(prometheus="http://p"), EndpointSettings(max_instances=2), "--prometheus is for"),
    ):
        with pytest.raises(InputError, match=message):
            DeploySettings(**layout, server=server, endpoint=endpoint)
    with pytest.raises(InputError, match="at most 1 instances are fewer than the 2 planned"):
        written("qwen3-8b", "ml.g6e.xlarge", endpoint=EndpointSettings("chat", max_instances=1), machines=2)


def test_texts_that_kubernetes_would_read_as_numbers_are_quoted():
    """go-yaml takes `1e3`, `08` and `y` for other than texts, which PyYAML does not."""
    texts = {"OWNER": "094389454867", "X": "1e3", "FLAG": "y", "OCTAL": "-0o17", "HOST": "0.0.0.0"}
    env = tuple(f"{name}={text}" for name, text in texts.items())
    _, bundle, found = written("qwen3-8b", "ml.g6e.xlarge", env=env)
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert texts.items() <= variables.items()
    for text in ("'094389454867'", "'1e3'", "'y'", "'-0o17'", " 0.0.0.0\n"):
        assert text in bundle.files["kubernetes.yaml"]


def test_a_services_name_neither_sets_variables_of_the_server_nor_begins_with_a_digit():
    _, _, found = written("qwen3-8b", "ml.g6e.xlarge", endpoint=EndpointSettings("vllm"))
    assert found["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    with pytest.raises(InputError, match="begins with a letter"):
        written("qwen3-8b", "ml.g6e.xlarge", endpoint=EndpointSettings("7b-chat"))


def test_the_network_that_a_plan_over_hosts_counts_with_is_named():
    _, bundle, _ = spanning("sglang")
    assert any("3,200 Gbit/s" in trap and "vpc.amazonaws.com/efa" in trap for trap in bundle.traps)


@pytest.mark.parametrize(
    ("server", "version", "more", "said"),
    [
        ("vllm", "0.13.0", {"draft": "qwen3-0.6b"}, "takes no draft model"),
        ("vllm", "server-sagemaker-cuda-v2.6", {}, "its vllm version is not known"),
        ("sglang", "0.5.5", {"weights": "s3://b/m/"}, "does not read weights from s3://"),
    ],
)
def test_what_a_version_cannot_do_is_refused(server, version, more, said):
    instance = find_instance("ml.g6e.xlarge")
    asked = Server(server, "kubernetes", image=version)
    _, image = choose_image(asked, instance)
    weights = more.get("weights")
    stated = Stated(max_model_len=4096, dtype="float16", draft=more.get("draft"))
    plan = plan_from_layout("qwen3-8b", instance.instance_type, VLLM_0_12, stated, image=image, weights=weights)
    with pytest.raises(InputError, match=said):
        build_bundle(plan, asked, EndpointSettings("chat"))


def test_what_cannot_be_scheduled_is_refused():
    plan = plan_from_layout("llama-3.1-8b", "ml.trn1.32xlarge", VLLM_0_12, Stated())
    asked = Server("vllm", "kubernetes", image="registry/neuron/vllm:0.11")
    with pytest.raises(InputError, match="NVIDIA GPUs alone"):
        build_bundle(plan, asked, EndpointSettings("chat"))
