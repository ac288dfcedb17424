"""Files of a plan: valid for the services that would take them, and the same layout in each."""

from __future__ import annotations

import ast
import json
import shlex
import tarfile
from dataclasses import replace

import pytest
import yaml
from cfnlint.api import ManualArgs, lint

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import RequestKind, Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_12
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.setup import Parallelism
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.deploy.aws_jobs import job_files
from lmi_bench.deploy.bundle import build_bundle, pack_model, unpack_properties
from lmi_bench.deploy.images import Container
from lmi_bench.deploy.plan import plan_from_layout, plan_from_recommendation
from lmi_bench.deploy.properties import parse_properties
from lmi_bench.deploy.sagemaker import check_request, endpoint_requests
from lmi_bench.deploy.server_settings import lmi_settings, tgi_environment, vllm_arguments
from lmi_bench.deploy.settings import EndpointSettings, Server, Stated

ROLE = "arn:aws:iam::111122223333:role/sagemaker"
ENDPOINT = EndpointSettings("test", ROLE)
STARTED = EndpointSettings("test", ROLE, startup_s=600)
LMI = Server("lmi")


def plan(model="llama-2-7b", instance="ml.g5.12xlarge", weights=None, **stated):
    return plan_from_layout(model, instance, TGI_2023, Stated(**stated), weights=weights)


def template_of(bundle):
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda loader, tag, node: f"!{tag} {node.value}")
    return yaml.load(bundle.files["cloudformation.yaml"], Loader)["Resources"]


def test_the_smallest_degree_that_holds_the_model_is_taken_and_the_machine_filled():
    """Falcon 40B in 16 bit is 83 GB: not on 1 or 2 GPUs of 24 GB, but on 4, as the post found.
    Falcon 180B's 360 GB do not fit 8 GPUs of 40 GB."""
    small = plan(max_model_len=2048)
    assert (small.setup.tensor_parallel, small.copies) == (1, 4)
    assert small.fills_the_machine
    large = plan("falcon-40b", "ml.g5.12xlarge", max_model_len=2048)
    assert (large.setup.tensor_parallel, large.copies) == (4, 1)
    with pytest.raises(CapacityError, match=r"TP 8: 41.* of weights a device at TP 8 exceed"):
        plan("falcon-180b", "ml.p4d.24xlarge", max_model_len=2048)


def test_fewer_sequences_run_the_longer_requests_are():
    """The longest request decides nothing; below 32 a paged cache would only let requests wait."""
    made = [plan(typical_tokens=tokens).limits.max_num_seqs for tokens in (128, 256, 512, 2048)]
    assert made == sorted(made, reverse=True)
    assert len(set(made)) >= 3
    assert made[-1] == plan(max_model_len=4096).limits.max_num_seqs == 32


def test_layouts_that_cannot_be_are_refused_with_numbers():
    with pytest.raises(CapacityError, match=r"3 copies of TP 2 need 6 accelerators; .* has 4"):
        plan(tensor_parallel=2, replicas=3)
    with pytest.raises(CapacityError, match="at most 4,096 tokens"):
        plan(max_model_len=8192)
    with pytest.raises(CapacityError, match="71 query heads"):
        plan("falcon-7b", tensor_parallel=4)


def answer_of(model, *, slots=57, input_tokens=300, output_tokens=200, **changes):
    """An answer for 300 tokens in and 200 out whose recommended candidate is changed."""
    answer = recommend(
        RecommendRequest(
            Workload(find_model(model), "float16", input_tokens, output_tokens),
            VLLM_0_12,
            instances=(find_instance("ml.p4d.24xlarge"),),
        )
    )
    best = answer.recommended
    memory = replace(best.memory, slots_per_copy=slots)
    return replace(answer, recommended=replace(best, memory=memory, **changes))


def test_a_recommendation_becomes_its_own_layout():
    answer = answer_of("llama-2-13b", instance="ml.p4d.24xlarge", instances=3, tensor_parallel=2, copies=4, slots=57)
    made = plan_from_recommendation(answer, "llama-2-13b", VLLM_0_12)
    settings = parse_properties(build_bundle(made, LMI, ENDPOINT).files["serving.properties"])
    assert settings["option.tensor_parallel_degree"] == "2"
    assert settings["option.gpu_memory_utilization"] == "0.9"
    assert settings["option.model_id"] == "meta-llama/Llama-2-13b-hf"
    assert made.instances == 3
    mixed = replace(
        answer,
        question=replace(answer.question, kinds=(RequestKind(900, 10, 0.1),)),
        recommended=replace(
            answer.recommended, setting=EngineSetting(dtype="int4", kv_dtype="float8", max_batch_size=57)
        ),
    )
    awq = "org/Llama-2-13B-AWQ"
    made = plan_from_recommendation(mixed, "llama-2-13b", VLLM_0_12, weights=awq)
    assert (made.setup.dtype, made.limits.max_num_seqs) == ("int4", 57)
    assert made.limits.max_model_len >= 910
    assert made.limits.max_input_tokens >= 900
    assert made.engine == mixed.recommended.setting


@pytest.mark.parametrize(
    ("layout", "target", "endpoint"),
    [
        ({"max_model_len": 2048}, LMI, ENDPOINT),
        ({"max_model_len": 2048, "tensor_parallel": 1, "replicas": 3}, LMI, ENDPOINT),
        (
            {"max_model_len": 2048, "tensor_parallel": 2, "machines": 2},
            Server("lmi", image="lmi20", model_data_uri="s3://bucket/prefix/"),
            EndpointSettings("test", ROLE, max_instances=4, components=True, accept_eula=True),
        ),
        (
            {"max_model_len": 2048, "tensor_parallel": 4},
            Server("tgi", image="111122223333.dkr.ecr.us-east-1.amazonaws.com/tgi:3.3"),
            EndpointSettings("test", ROLE, max_instances=3, target_per_copy=16),
        ),
    ],
    ids=["one container", "copies that leave a GPU free", "components and scaling", "TGI, scaling"],
)
def test_requests_and_templates_are_valid_for_botocore_and_cfn_lint(layout, target, endpoint):
    made = plan(**layout)
    bundle = build_bundle(made, target, endpoint)
    problems = lint(bundle.files["cloudformation.yaml"], config=ManualArgs(regions=["us-east-1"]))
    assert [str(problem) for problem in problems] == []
    ast.parse(bundle.files["deploy_boto3.py"])
    sent = json.loads(bundle.files["sagemaker.json"])
    operations = [request["operation"] for request in sent]
    resources = template_of(bundle)
    component = "create_inference_component" in operations
    assert component == (endpoint.components or not made.fills_the_machine)
    assert len(resources) == len(sent)
    variant = resources["Config"]["Properties"]["ProductionVariants"][0]
    assert ("ModelName" in variant) == (not component)
    assert variant["InitialInstanceCount"] == made.instances
    if component:
        runtime = resources["Component"]["Properties"]["RuntimeConfig"]
        assert runtime["CopyCount"] == made.instances * made.copies
        needs = resources["Component"]["Properties"]["Specification"]
        assert needs["ComputeResourceRequirements"]["NumberOfAcceleratorDevicesRequired"] == (
            made.setup.tensor_parallel
        )


def test_a_component_has_the_devices_of_all_stages():
    """TP 2 in two stages: the container starts with four devices."""
    made = plan(tensor_parallel=2, max_model_len=2048)
    setup = replace(made.setup, parallelism=Parallelism(pipeline=2))
    staged = replace(made, setup=setup, copies=1, engine=EngineSetting(pipeline=2))
    endpoint = replace(STARTED, components=True)
    requests = dict(endpoint_requests(staged, container(), endpoint, one_copy_a_container=False))
    needs = requests["create_inference_component"]["Specification"]
    assert needs["ComputeResourceRequirements"]["NumberOfAcceleratorDevicesRequired"] == 4


def test_a_component_reserves_what_loading_needs_and_no_more_than_its_share():
    """Three copies of 6.74e9 weights in 16 bits and 4 GiB; a third of 0.9 * 192 GiB is more.
    A machine of 32 GiB has less: a copy gets 0.9 of it."""

    def reserved(made):
        endpoint = replace(STARTED, components=True)
        requests = dict(endpoint_requests(made, container(), endpoint, one_copy_a_container=False))
        needs = requests["create_inference_component"]["Specification"]
        return needs["ComputeResourceRequirements"]["MinMemoryRequiredInMb"]

    three = plan(tensor_parallel=1, replicas=3, max_model_len=2048)
    assert reserved(three) == pytest.approx((6.74e9 * 2 + 4 * 2**30) / 2**20, rel=0.01)
    large = plan("gemma-3-12b", "ml.g6e.xlarge", max_model_len=2048)
    assert reserved(large) == pytest.approx((12.2e9 * 2 + 4 * 2**30) / 2**20, rel=0.05)
    tight = plan("qwen3-14b", "ml.g6e.xlarge", max_model_len=2048)
    assert reserved(tight) == int(0.9 * 32 * 1024)


def test_any_parameter_can_be_set_and_is_checked():
    def made(*texts):
        endpoint = replace(STARTED, parameters=texts, max_instances=2)
        one = plan(max_model_len=2048)
        return build_bundle(one, LMI, endpoint)

    bundle = made(
        "create_model.EnableNetworkIsolation=true",
        "create_model.VpcConfig={SecurityGroupIds: [sg-1], Subnets: [subnet-1]}",
        "create_endpoint_config.ProductionVariants.0.VolumeSizeInGB=200",
        "create_endpoint_config.AsyncInferenceConfig.OutputConfig.S3OutputPath=s3://b/out/",
        "create_endpoint_config.MetricsConfig.MetricPublishFrequencyInSeconds=60",
        "register_scalable_target.MinCapacity=0",
        "create_endpoint.Tags=[{Key: team, Value: search}]",
    )
    sent = {each["operation"]: each["parameters"] for each in json.loads(bundle.files["sagemaker.json"])}
    assert sent["create_model"]["EnableNetworkIsolation"] is True
    assert sent["create_endpoint_config"]["ProductionVariants"][0]["VolumeSizeInGB"] == 200
    resources = template_of(bundle)
    assert resources["Model"]["Properties"]["VpcConfig"]["Subnets"] == ["subnet-1"]
    assert "AsyncInferenceConfig" in resources["Config"]["Properties"]
    metrics = {"EnableEnhancedMetrics": True, "EnableDetailedObservability": True}
    metrics |= {"MetricPublishFrequencyInSeconds": 60}
    assert sent["create_endpoint_config"]["MetricsConfig"] == metrics
    assert sent["register_scalable_target"]["MinCapacity"] == 0
    assert resources["Target"]["Properties"]["MinCapacity"] == 0
    assert resources["Endpoint"]["Properties"]["Tags"] == [{"Key": "team", "Value": "search"}]
    assert set(resources["Endpoint"]["Properties"]) == {"EndpointConfigName", "Tags"}
    for text, message in (
        ("create_model.EnableNetworkIsolatoin=true", "Unknown parameter"),
        ("create_modle.X=1", "an operation of create_model"),
        ("create_model=1", r"OPERATION\.PATH"),
        ("create_endpoint_config.ProductionVariants.7.VolumeSizeInGB=1", "is no place"),
        ("create_model.Tags={", "is not YAML"),
        ("create_model.ModelName=my_model", "'my_model' does not match the service's pattern"),
        ("put_scaling_policy.PolicyType=Guess", "'Guess' is not a value that the service knows"),
        ("put_scaling_policy.Target=3", "PutScalingPolicy would be rejected: Unknown parameter"),
        ("create_model.ModelName.Deeper=1", "is no place"),
    ):
        with pytest.raises(InputError, match=message):
            made(text)


def container():
    return Container("i", {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"InstanceType": "ml.g5.2xlarg"}, "'ml.g5.2xlarg' is not a value that the service knows"),
        ({"InitialInstanceCount": "2"}, "Invalid type for parameter"),
        ({"VariantName": "all_traffic"}, "'all_traffic' does not match the service's pattern"),
        ({"Instances": 2}, "Unknown parameter"),
        ({"ContainerStartupHealthCheckTimeoutInSeconds": 7200}, "at most 3600 is allowed"),
        ({"RoutingConfig": {"RoutingStrategy": "FAST"}}, "'FAST' is not a value"),
    ],
)
def test_a_request_that_the_service_would_refuse_is_found_here(change, message):
    variant = {"VariantName": "AllTraffic", "ModelName": "m", "InitialInstanceCount": 1}
    variant |= {"InstanceType": "ml.g5.2xlarge"}
    good = {"EndpointConfigName": "c", "ProductionVariants": [variant]}
    check_request("create_endpoint_config", good)
    with pytest.raises(InputError, match=message):
        check_request("create_endpoint_config", good | {"ProductionVariants": [variant | change]})


def test_a_start_longer_than_sagemaker_waits_is_refused():
    with pytest.raises(InputError, match="of 7200 s: SageMaker accepts 60 to 3600 s"):
        build_bundle(plan(), Server("lmi"), EndpointSettings("test", ROLE, startup_s=7200))
    with pytest.raises(InputError, match="--startup-timeout 30: give at least 60 s"):
        EndpointSettings("test", ROLE, startup_s=30)


def test_scaling_holds_the_concurrency_of_what_is_scaled():
    """80 % of the sequences. Whole machines: of all their copies. Components: of one."""
    made = plan(tensor_parallel=2, machines=2, max_model_len=2048, max_batch=10)
    by_machine = dict(
        endpoint_requests(
            made, container(), EndpointSettings("e", ROLE, 600, max_instances=5), one_copy_a_container=False
        )
    )
    policy = by_machine["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
    assert policy["TargetValue"] == 16.0
    assert by_machine["register_scalable_target"]["MaxCapacity"] == 5
    by_copy = dict(
        endpoint_requests(
            *(made, container(), EndpointSettings("e", ROLE, 600, max_instances=5, components=True)),
            one_copy_a_container=False,
        )
    )
    target = by_copy["register_scalable_target"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (4, 10)
    policy = by_copy["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
    assert policy["TargetValue"] == 8.0
    assert "InferenceComponent" in str(policy["PredefinedMetricSpecification"])


def test_a_recommendation_is_scaled_at_its_concurrency_and_not_at_its_slots():
    """Little: the sequences at the load, times how much more than the load is carried."""
    answer = answer_of("llama-2-13b", tensor_parallel=2, copies=4)
    capacity = Estimate(8.0, 6.0, 10.0)
    best = answer.recommended
    best = replace(
        best,
        figures={**best.figures, "capacity_rate_per_s": capacity},
        memory=replace(best.memory, mean_batch_per_copy=5.0),
    )
    loaded = replace(answer, question=replace(answer.question, rate_per_s=3.0), recommended=best)
    made = plan_from_recommendation(loaded, "llama-2-13b", VLLM_0_12)
    assert made.concurrency == pytest.approx(5.0 * 6.0 / 3.0)
    assert made.limits.max_num_seqs > 30

    def target(**stated):
        endpoint = EndpointSettings("e", ROLE, 600, max_instances=9, **stated)
        sent = dict(endpoint_requests(made, container(), endpoint, one_copy_a_container=False))
        policy = sent["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
        return policy["TargetValue"]

    assert target() == pytest.approx(0.8 * 10 * 4)
    assert target(components=True) == pytest.approx(0.8 * 10)
    assert target(target_per_copy=7) == 28


def test_the_time_limit_to_start_follows_the_bytes_and_the_copies():
    def limit(model, instance, **settings):
        made = plan(model, instance, max_model_len=2048)
        bundle = build_bundle(made, LMI, EndpointSettings(None, ROLE, **settings), date="20261123")
        (config,) = (
            request["parameters"]
            for request in json.loads(bundle.files["sagemaker.json"])
            if request["operation"] == "create_endpoint_config"
        )
        assert config["EndpointConfigName"] == f"{model.replace('.', '-')}-20261123-config"
        variant = config["ProductionVariants"][0]
        return variant["ContainerStartupHealthCheckTimeoutInSeconds"], bundle

    small, _ = limit("llama-3.2-1b", "ml.g5.xlarge", accept_eula=True)
    large, bundle = limit("falcon-180b", "ml.p4de.24xlarge", accept_eula=True)
    assert small == 600
    assert 1800 < large <= 3600
    assert "loading may take" not in " ".join(bundle.traps)
    copies = build_bundle(plan(max_model_len=2048), LMI, ENDPOINT).files["serving.properties"]
    assert "option.parallel_loading=true" in copies


def test_each_server_gets_the_limits_in_its_own_words():
    made = plan(tensor_parallel=4, max_model_len=4096, max_input_tokens=3840, max_batch=40)
    tgi = build_bundle(made, Server("tgi"), ENDPOINT)
    assert parse_properties(tgi.files["tgi.env"]) == {
        "HF_MODEL_ID": "meta-llama/Llama-2-7b-hf",
        "SM_NUM_GPUS": "4",
        "MAX_INPUT_LENGTH": "3840",
        "MAX_TOTAL_TOKENS": "4096",
        "MAX_BATCH_PREFILL_TOKENS": "4096",
        "MAX_CONCURRENT_REQUESTS": "80",
        "CUDA_MEMORY_FRACTION": "0.95",
        "HF_TOKEN": "",
    }
    script = build_bundle(made, Server("vllm"), ENDPOINT).files["vllm-serve.sh"]
    for words in ("--tensor-parallel-size", "--max-num-seqs", "--max-model-len", "--dtype"):
        assert words in script
    old = build_bundle(made, Server("lmi", image="0.26.0-deepspeed0.12.6-cu121"), ENDPOINT)
    settings = parse_properties(old.files["serving.properties"])
    assert settings["engine"] == "MPI"
    assert settings["option.output_formatter"] == "jsonlines"


def test_code_from_the_hub_is_never_allowed_unasked():
    made = plan(max_model_len=2048)
    for server in ("lmi", "tgi", "vllm"):
        files = "".join(build_bundle(made, Server(server), ENDPOINT).files.values()).lower()
        assert "trust" not in files
        asked = build_bundle(made, Server(server, trust_remote_code=True), ENDPOINT)
        assert "trust" in "".join(asked.files.values()).lower()


class TestArchive:
    def write(self, folder):
        folder.mkdir()
        (folder / "serving.properties").write_text("option.model_id=x\n")
        (folder / "model.py").write_text("pass\n")
        (folder / "weights.bin").write_text("no")
        return folder

    def test_it_has_the_files_at_its_root_and_the_same_bytes_each_time(self, tmp_path):
        folder = self.write(tmp_path / "model")
        names = pack_model(folder, tmp_path / "a.tar.gz")
        pack_model(folder, tmp_path / "b.tar.gz")
        assert names == ["serving.properties", "model.py"]
        with tarfile.open(tmp_path / "a.tar.gz") as tar:
            assert tar.getnames() == names
        assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
        assert unpack_properties(tmp_path / "a.tar.gz") == "option.model_id=x\n"
        with pytest.raises(InputError, match="exists"):
            pack_model(folder, tmp_path / "a.tar.gz")
        (folder / "serving.properties").write_text("option.dtype=auto\n")  # --model-data ...tar.gz
        assert "no weights: add them" in pack_model(folder, tmp_path / "c.tar.gz")[-1]

    def test_one_whose_files_lie_in_a_folder_is_refused(self, tmp_path):
        folder = self.write(tmp_path / "model")
        with tarfile.open(tmp_path / "deep.tar.gz", "w:gz") as tar:
            tar.add(folder, arcname="model")
        with pytest.raises(InputError, match="is in a folder, where no container looks"):
            unpack_properties(tmp_path / "deep.tar.gz")
        whole = (tmp_path / "deep.tar.gz").read_bytes()
        (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
        for name in ("model/model.py", "cut.tar.gz"):
            with pytest.raises(InputError, match="cannot read"):
                unpack_properties(tmp_path / name)
        with pytest.raises(InputError, match=r"has no serving.properties"):
            pack_model(tmp_path, tmp_path / "none.tar.gz")


SETTING = EngineSetting(
    kv_dtype="float8", max_prefill_tokens=8192, chunked_prefill=True, memory_share=0.85, cuda_graphs=False
)


def fast_plan():
    layout = {"instance": "ml.g5.12xlarge", "tensor_parallel": 1, "copies": 4}
    answer = answer_of("llama-2-7b", setting=SETTING, **layout)
    stated = Stated(draft="org/tiny-draft")
    return plan_from_recommendation(answer, "llama-2-7b", VLLM_0_12, stated)


def test_engine_settings_of_a_plan_are_written_in_each_servers_words():
    made = fast_plan()
    lmi = parse_properties(build_bundle(made, LMI, ENDPOINT).files["serving.properties"])
    assert json.loads(lmi["option.speculative_config"]) == {"model": "org/tiny-draft", "num_speculative_tokens": 5}
    assert {
        name: lmi[f"option.{name}"]
        for name in (
            "kv_cache_dtype",
            "max_rolling_batch_prefill_tokens",
            "enable_chunked_prefill",
            "gpu_memory_utilization",
            "enforce_eager",
        )
    } == {
        "kv_cache_dtype": "fp8",
        "max_rolling_batch_prefill_tokens": "8192",
        "enable_chunked_prefill": "true",
        "gpu_memory_utilization": "0.85",
        "enforce_eager": "true",
    }
    script = build_bundle(made, Server("vllm"), ENDPOINT).files["vllm-serve.sh"]
    words = shlex.split(script.split("exec ")[1].replace("\\\n", ""))
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"
    assert words[words.index("--max-num-batched-tokens") + 1] == "8192"
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 5
    assert {"--enable-chunked-prefill", "--enforce-eager"} < set(words)


def test_what_tgi_cannot_be_told_is_said_and_not_dropped():
    bundle = build_bundle(fast_plan(), Server("tgi"), ENDPOINT)
    assert "CUDA_MEMORY_FRACTION=0.85" in bundle.files["tgi.env"]
    assert "MAX_BATCH_PREFILL_TOKENS=8192" in bundle.files["tgi.env"]
    [said] = [trap for trap in bundle.traps if "do not set" in trap]
    assert all(word in said for word in ("chunked_prefill", "float8", "org/tiny-draft"))
    looked_up = replace(plan(), draft="ngram", draft_tokens=2)
    assert "SPECULATE=2" in build_bundle(looked_up, Server("tgi"), ENDPOINT).files["tgi.env"]


def test_a_container_of_2024_takes_its_draft_by_the_older_names():
    made = replace(plan(), draft="org/tiny-draft", draft_tokens=3)
    target = Server("lmi", image="0.28.0")
    lmi = parse_properties(build_bundle(made, target, ENDPOINT).files["serving.properties"])
    assert lmi["option.speculative_draft_model"] == "org/tiny-draft"
    assert lmi["option.speculative_length"] == "3"
    assert "option.speculative_config" not in lmi


class TestAVariantOfACatalogModel:
    def test_a_hub_id_is_deployed_as_it_was_given(self):
        asked = "meta-llama/Llama-3.1-8B-Instruct"
        made = plan(asked, "ml.g5.2xlarge", max_model_len=2048)
        assert made.weights.location == asked
        assert made.setup.shape.name == "llama-3.1-8b"

    def test_a_variant_without_a_hub_id_is_not_deployed_as_its_base(self):
        with pytest.raises(InputError, match=r"only for meta-llama/Llama-3\.1-8B, .*--model-id"):
            plan("llama-3.1-8b-instruct", "ml.g5.2xlarge", max_model_len=2048)

    @pytest.mark.parametrize("name", ["llama-3.3-70b", "deepseek-r1"])
    def test_a_sibling_of_the_same_shape_is_not_deployed_in_its_place(self, name):
        with pytest.raises(InputError, match=f"no Hub id is known for {name}, only for"):
            plan(name, "ml.p5en.48xlarge", max_model_len=2048)

    @pytest.mark.parametrize(
        ("name", "hub_id"),
        [
            ("mistral-7b", "mistralai/Mistral-7B-v0.3"),
            ("Mixtral 8x7B", "mistralai/Mixtral-8x7B-v0.1"),
            ("llama2-7b", "meta-llama/Llama-2-7b-hf"),
            ("gemma-3-4b-it", "google/gemma-3-4b-it"),
        ],
    )
    def test_a_shorter_or_joined_name_is_the_models(self, name, hub_id):
        assert plan(name, "ml.p5en.48xlarge", max_model_len=2048).weights.location == hub_id

    def test_a_recommendation_keeps_the_name_that_was_asked_for(self):
        setting = EngineSetting(dtype="int4")
        layout = {"instance": "ml.g5.12xlarge", "tensor_parallel": 4, "copies": 1}
        answer = answer_of("qwen3-32b", setting=setting, **layout)
        made = plan_from_recommendation(answer, "Qwen/Qwen3-32B-AWQ", VLLM_0_12)
        assert made.weights.location == "Qwen/Qwen3-32B-AWQ"

    @pytest.mark.parametrize(
        ("model", "dtype"), [("openai/gpt-oss-20b", "mxfp4"), ("RedHatAI/Qwen3-32B-FP8-dynamic", "float8")]
    )
    def test_published_formats_are_left_to_the_checkpoint(self, model, dtype):
        made = plan(model, "ml.p5.48xlarge", max_model_len=2048)
        assert made.setup.dtype == dtype
        assert not {"option.dtype", "option.quantize"} & lmi_settings(made).keys()
        assert not {"dtype", "quantization"} & {*vllm_arguments(made)}

    def test_a_format_that_is_asked_of_16_bit_weights_is_set(self):
        made = plan("Qwen/Qwen3-32B", "ml.p5.48xlarge", max_model_len=2048, dtype="fp8")
        assert lmi_settings(made)["option.quantize"] == "fp8"
        assert vllm_arguments(made)["quantization"] == "fp8"

    def test_tgi_is_told_which_four_bits(self):
        made = plan("TheBloke/Llama-2-13B-chat-GPTQ", max_model_len=2048)
        assert tgi_environment(made)["HF_MODEL_QUANTIZE"] == "gptq"
        made = plan("org/Llama-2-13B-quantized.w4a16", max_model_len=2048)
        assert "HF_MODEL_QUANTIZE" not in tgi_environment(made)  # neither: it reads the checkpoint


def test_sagemakers_own_jobs_get_the_plans_load_and_machines():
    kinds = (RequestKind(100, 50, 3), RequestKind(500, 250, 1))
    answer = answer_of("llama-2-13b", tensor_parallel=2, copies=4)
    question = replace(answer.question, kinds=kinds, slos=("ttft_p90<=1s",), users=24)
    answer = replace(answer, question=question)
    own = {"weights": "s3://bucket/weights"}
    made = plan_from_recommendation(answer, "llama-2-13b", VLLM_0_12, **own)
    longest = "a-name-as-long-as-endpoints-may-have-it-50-letters"
    endpoint = EndpointSettings(longest, ROLE, jobs_output_uri="s3://bucket/out/")
    server = Server("lmi", model_data_uri="s3://bucket/weights")
    files, left_out = job_files(made, answer, endpoint, server)
    assert left_out == ()
    spec = json.loads(files["create-ai-workload-config.json"])["AIWorkloadConfigs"]["WorkloadSpec"]
    asked = json.loads(spec["Inline"])["parameters"]
    assert (asked["concurrency"], asked["request_count"]) == (24, 300)
    assert asked["prompt_input_tokens_stddev"] == 173  # of 100, 100, 100, 500
    job = json.loads(files["create-ai-recommendation-job.json"])
    assert job["PerformanceTarget"] == {"Constraints": [{"Metric": "ttft-ms"}]}
    assert job["ComputeSpec"]["InstanceTypes"] == ["ml.p4d.24xlarge"]
    assert job["ModelSource"]["S3"]["S3Uri"].endswith("/weights/")
    assert asked["tokenizer"] == "meta-llama/Llama-2-13b-hf"
    archive = json.loads(files["create-ai-benchmark-job.json"])
    assert archive["AIWorkloadConfigIdentifier"] == job["AIWorkloadConfigIdentifier"]
    for weights in (None, "s3://bucket/model.tar.gz"):
        _, left_out = job_files(made, answer, endpoint, Server("lmi", model_data_uri=weights))
        assert "needs the weights on S3" in left_out[0]


@pytest.mark.parametrize(("instance", "size_gb"), [("ml.p3.2xlarge", 37), ("ml.g5.2xlarge", None)])
def test_a_machine_without_disks_gets_a_volume_for_the_weights(instance, size_gb):
    """Qwen3 1.7B: 1.72e9 weights of 2 bytes, written twice, and 30 GB for the image."""
    made = plan_from_layout("qwen3-1.7b", instance, VLLM_0_12, Stated(max_model_len=2048))
    bundle = build_bundle(made, Server("lmi", image="0.32.0-lmi14.0.0-cu126"), ENDPOINT)
    (variant,) = json.loads(bundle.files["sagemaker.json"])[1]["parameters"]["ProductionVariants"]
    assert variant.get("VolumeSizeInGB") == size_gb


def test_blackwell_gets_the_driver_that_knows_it_whatever_the_image():
    """CUDA 12.8 and 12.9 run on driver 580; a B200 does not on 550."""
    made = plan_from_layout("llama-3.1-8b", "ml.p6-b200.48xlarge", VLLM_0_12, Stated())
    bundle = build_bundle(made, Server("lmi", image="lmi24"), ENDPOINT)
    (config,) = (
        each["parameters"]
        for each in json.loads(bundle.files["sagemaker.json"])
        if each["operation"] == "create_endpoint_config"
    )
    ami = config["ProductionVariants"][0]["InferenceAmiVersion"]
    assert ami == "al2023-ami-sagemaker-inference-gpu-4-1"


def test_tgi_computes_its_longest_prompt_in_one_batch():
    made = plan(tensor_parallel=4, max_model_len=4096)
    small = replace(made, engine=EngineSetting(max_prefill_tokens=1024))
    found = tgi_environment(small)
    assert int(found["MAX_BATCH_PREFILL_TOKENS"]) >= int(found["MAX_INPUT_LENGTH"])
