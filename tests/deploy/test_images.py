"""Images, the machines and regions that they are for, and what their engines accept."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.bundle import build_bundle
from lmi_bench.deploy.checks import check_settings, container_of
from lmi_bench.deploy.engine_arguments import argument_history, engine_arguments
from lmi_bench.deploy.images import all_images, check_machine, find_image
from lmi_bench.deploy.plan import plan_from_layout
from lmi_bench.deploy.properties import parse_properties
from lmi_bench.deploy.settings import EndpointSettings, Server, Stated

SIZED = {"option.max_rolling_batch_size": "64"}
LORA = {
    "option.model_id": "org/model",
    "option.tensor_parallel_degree": "max",
    "option.enable_lora": "True",
    "option.max_loras": "2",
    "option.max_lora_rank": "64",
    "option.long_lora_scaling_factors": "4.0",
    "option.gpu_memory_utilization": "0.9",
    "option.max_model_len": "16384",
}
SAMPLES = (
    {"engine": "Python", "option.tensor_parallel_degree": "max"},
    {"engine": "Python", "option.rolling_batch": "vllm", "option.model_id": "org/model"},
    LORA,
    {"option.enable_prefix_caching": "true", "option.tokenizer_mode": "mistral"},
    {
        "option.speculative_config": '{"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 4}',
        "option.tensor_parallel_degree": "1",
    },
    {
        "option.enable_auto_tool_choice": "true",
        "option.tool_call_parser": "llama3_json",
        "option.rolling_batch": "vllm",
        "option.chat_template": "/opt/ml/model/template.jinja",
    },
    {
        "option.kv_transfer_config": '{"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}',
        "option.tensor_parallel_degree": "4",
    },
    {"option.limit_mm_per_prompt": '{"image": 4, "video": 0}', "option.max_model_len": "16384"},
    {"option.enable_expert_parallel": "true", "option.tensor_parallel_degree": "8"},
    {
        "option.task": "text-embedding",
        "option.entryPoint": "djl_python.lmi_vllm.vllm_async_service",
        "option.rolling_batch": "disable",
        "option.async_mode": "true",
        "option.normalize": "false",
        "batch_size": "1",
    },
    {"engine": "Rust", "option.model_id": "org/model", "batch_size": "32"},
    {"engine": "Rust", "translatorFactory": "org.example.EmbeddingFactory", "batch_size": "8"},
    {"engine": "PyTorch", "application": "cv/image_classification", "height": "224"},
    {"option.enable_venv": "true", "option.model_id": "org/model"},
)
"""Settings of the samples in djl-serving's user guides for vLLM, tools, LMCache, vision, LoRA."""


def verdict(settings, vllm="0.26.0", era="C"):
    return check_settings(SIZED | settings, era=era, vllm=vllm)


@pytest.mark.parametrize("settings", SAMPLES)
@pytest.mark.parametrize("image", ["lmi16", "lmi20", "lmi28", "lmi29"])
def test_the_samples_of_the_documentation_pass(settings, image):
    era, vllm = container_of(image)
    settings = {k: v for k, v in settings.items() if not (era == "B" and k == "option.async_mode")}
    assert verdict(settings, vllm, era).mistakes == ()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("gpu_memory_utilization", "1.7", "expected more than 0 and at most 1"),
        ("gpu_memory_utilization", "0", "expected more than 0 and at most 1"),
        ("kv_cache_dtype", "banana", "expected one of auto, float16, bfloat16, fp8"),
        ("speculative_config", "{bad", "expected JSON in one line"),
        ("max_rolling_batch_prefill_tokens", "-5", "expected at least 1"),
        ("max_rolling_batch_size", "0", "expected a whole number of at least 1"),
        ("dtype", "int4", "expected one of fp32, fp16"),
        ("async_scheduling", "perhaps", "expected true or false"),
        ("stream_interval", "0", "expected at least 1"),
        ("max_model_len", "long", "expected a whole number, or one such as 32k"),
        ("pipeline_parallel_degree", "2", "LMI accepts only 1 with vLLM"),
        ("enable_prefix_cachin", "1", "did you mean option.enable_prefix_caching?"),
    ],
)
def test_a_value_that_the_engine_of_the_image_refuses_is_a_mistake(name, value, problem):
    (found,) = verdict({f"option.{name}": value}).mistakes
    assert problem in found


def test_a_queue_is_at_least_one_long():
    (found,) = verdict({"job_queue_size": "-1"}).mistakes
    assert found == "job_queue_size=-1: expected a whole number of at least 1"


def test_values_count_for_the_version_inside_the_image():
    """Blocks of 7 tokens: a list of sizes up to vLLM 0.17, any number since 0.18."""
    assert verdict({"option.block_size": "7"}, "0.17.0").mistakes
    assert not verdict({"option.block_size": "7"}, "0.18.0").mistakes
    assert not verdict({"option.max_model_len": "32k"}).mistakes
    fixed = {"option.rolling_batch": "trtllm", "option.kv_cache_dtype": "banana"}
    assert not verdict(fixed).mistakes


def test_an_option_that_the_container_drops_is_a_trap():
    traps = verdict({"option.swap_space": "4", "option.zzz_new": "1"}).traps
    assert traps[:2] == (
        "option.swap_space has no effect: vLLM 0.26.0 lacks it (it is an argument since 0.6.2, before 0.18.0)",
        "option.zzz_new has no effect: neither LMI nor vLLM 0.26.0 knows it",
    )
    assert not verdict({"option.zzz_new": "1"}).mistakes
    assert not [t for t in verdict({"option.swap_space": "4"}, "0.17.0").traps if "swap" in t]


def test_a_version_names_the_engine_inside():
    assert container_of("lmi20") == ("C", "0.15.1")
    assert container_of("0.36.0") == container_of("lmi28") == ("C", "0.26.0")
    assert container_of("0.26.0") == ("A", "")
    assert container_of("0.35.1") == container_of("lmi17")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engine_of_every_image_has_its_arguments(engine):
    images = [i for i in all_images() if i.engine == engine and i.engine_version]
    usual = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}[engine]
    assert len(images) > 20
    assert all(usual in engine_arguments(engine, image.engine_version) for image in images)
    for row in argument_history(engine):
        assert re.fullmatch(r"([(\[](-?[\d.]+)?,([\d.]+)?[)\]])?", row.range), row
        assert (row.kind == "enum") == bool(row.choices), row
        if row.choices:
            assert row.problem(row.default or row.choices.split()[0]) is None, row


@pytest.mark.parametrize(
    ("region", "registry"),
    [
        ("eu-west-1", "763104351884.dkr.ecr.eu-west-1.amazonaws.com/"),
        ("eu-south-1", "692866216735.dkr.ecr.eu-south-1.amazonaws.com/"),
        ("us-gov-west-1", "442386744353.dkr.ecr.us-gov-west-1.amazonaws.com/"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/"),
    ],
)
def test_each_region_has_its_own_registry(region, registry):
    assert find_image("lmi").uri(region).startswith(registry + "djl-inference:")


def test_a_region_without_a_known_registry_needs_an_account():
    image = find_image("lmi")
    with pytest.raises(InputError, match=r"region 'mars-1'.*--account names one"):
        image.uri("mars-1")
    assert image.uri("mars-1", "1").startswith("1.dkr.ecr.mars-1.amazonaws.com/djl-inference:")
    neuron = find_image("huggingface-vllm-inference-neuronx", "0.10.2")
    with pytest.raises(InputError, match="eu-west-2 has no huggingface-vllm-inference-neuronx"):
        neuron.uri("eu-west-2")


def test_a_version_that_several_images_share_has_to_be_pinned():
    assert find_image("lmi", "lmi28").engine_version == "0.26.0"
    assert find_image("lmi", "0.33.0").tag == "0.33.0-lmi15.0.0-cu128"
    assert find_image("tgi", "3.3.6").repository == "huggingface-pytorch-tgi-inference"
    with pytest.raises(InputError, match=r"images have djl-serving 0.36.0: pin one of"):
        find_image("lmi", "0.36.0")
    with pytest.raises(InputError, match=r"no lmi image '0.99.0'"):
        find_image("lmi", "0.99.0")
    assert all(image.source and image.date for image in all_images())


@pytest.mark.parametrize(
    ("machine", "newest"), [("ml.g5.2xlarge", "lmi29"), ("ml.g4dn.xlarge", "lmi26"), ("ml.p3.2xlarge", "lmi24")]
)
def test_without_a_version_the_newest_image_that_runs_is_taken(machine, newest):
    """T4 is 7.5, and LMI's own wheels since 27 start at 8.0; CUDA 13 has no Volta (7.0)."""
    assert f"-{newest}." in find_image("lmi", None, find_instance(machine)).tag


@pytest.mark.parametrize(
    ("family", "version", "machine", "message"),
    [
        ("lmi", "lmi28", "ml.g4dn.xlarge", r"needs compute capability 8.0, T4 has 7.5; .*lmi26"),
        ("lmi", "lmi25", "ml.p3.2xlarge", r"needs compute capability 7.5, V100 has 7.0; .*lmi24"),
        ("lmi", None, "ml.inf2.8xlarge", r"for NVIDIA GPUs; huggingface-vllm-inference-neuronx:"),
        ("neuronx", None, "ml.g5.2xlarge", r"for Neuron devices; "),
        ("lmi", None, "ml.p6e-gb200.36xlarge", r"for x86_64 hosts, not arm64; .*for ec2"),
        ("tgi", None, "ml.p6-b200.48xlarge", r"B200 needs cu128, it has cu124"),
    ],
)
def test_an_image_is_refused_on_a_machine_that_it_is_not_for(family, version, machine, message):
    with pytest.raises(InputError, match=rf"does not run on {machine}: .*{message}"):
        check_machine(find_image(family, version, find_instance(machine)), find_instance(machine))


@pytest.mark.parametrize(
    ("server", "ami"),
    [
        (Server("lmi", image="lmi28"), "al2023-ami-sagemaker-inference-gpu-4-1"),
        (Server("lmi", image="lmi20"), "al2-ami-sagemaker-inference-gpu-3-1"),
        (Server("tgi"), "al2-ami-sagemaker-inference-gpu-3-1"),
        (Server("tgi", image="1.dkr.ecr.us-east-1.amazonaws.com/own:1"), None),
    ],
)
def test_the_hosts_get_the_driver_of_the_image(server, ami):
    """botocore: driver 580 and CUDA 13.0 are in 4-1, driver 550 and CUDA 12.4 in 3-1."""
    made = plan_from_layout("llama-2-7b", "ml.g5.2xlarge", TGI_2023, Stated(max_model_len=2048))
    role = "arn:aws:iam::111122223333:role/sagemaker"
    bundle = build_bundle(made, server, EndpointSettings("test", role))
    (variant,) = json.loads(bundle.files["sagemaker.json"])[1]["parameters"]["ProductionVariants"]
    assert variant.get("InferenceAmiVersion") == ami
    assert ("InferenceAmiVersion" in bundle.files["cloudformation.yaml"]) == (ami is not None)


def test_the_region_chooses_the_registry_of_a_bundle():
    made = plan_from_layout("llama-2-7b", "ml.g5.2xlarge", TGI_2023, Stated(max_model_len=2048))
    role = "arn:aws:iam::111122223333:role/sagemaker"
    server = Server("lmi", region="eu-south-1")
    image = build_bundle(made, server, EndpointSettings("test", role)).image
    assert str(image).startswith("692866216735.dkr.ecr.eu-south-1.")


def test_the_driver_of_an_unknown_image_follows_from_its_name_or_is_said_to_be_unknown():
    def made(address):
        plan = plan_from_layout("llama-2-7b", "ml.g5.2xlarge", TGI_2023, Stated(max_model_len=2048))
        bundle = build_bundle(plan, Server("lmi", image=address), EndpointSettings("test"))
        return bundle.files["sagemaker.json"], " ".join(bundle.traps)

    for cuda, driver in (("cu136", "al2023-ami-sagemaker-inference-gpu-4-1"), ("cu121", "gpu-3-1")):
        sent, said = made(f"123.dkr.ecr.eu-west-3.amazonaws.com/own:1.0-{cuda}")
        assert driver in sent
        assert "InferenceAmiVersion" not in said
    sent, said = made("registry.example.org/own:1.0")
    assert "InferenceAmiVersion" not in sent
    assert "CUDA version is unknown, so InferenceAmiVersion is left out" in said


def test_an_address_of_a_known_image_is_held_against_the_machine():
    address = find_image("lmi", "lmi28").uri("us-east-1")
    with pytest.raises(InputError, match=r"needs compute capability 8\.0, T4 has 7\.5"):
        bundle_of("ml.g4dn.12xlarge", address, 4)


def bundle_of(instance, image, tensor_parallel=1, components=False, **changes):
    stated = Stated(max_model_len=4096, max_input_tokens=3072, max_batch=8, tensor_parallel=tensor_parallel)
    made = replace(plan_from_layout("llama-2-7b", instance, TGI_2023, stated), **changes)
    role = "arn:aws:iam::111122223333:role/sagemaker"
    endpoint = EndpointSettings("test", role, components=components)
    return build_bundle(made, Server("lmi", image=image), endpoint)


def written(instance, image, **changes):
    bundle = bundle_of(instance, image, **changes)
    return parse_properties(bundle.files["serving.properties"]), bundle.traps


def test_tensorrt_llm_gets_the_lengths_that_it_compiles_for():
    """Its own default prompt is 1,024 tokens; 0.26 adds the output's limit to the prompt's."""
    new, traps = written("ml.g5.2xlarge", "0.33.0-tensorrtllm0.21.0-cu128")
    assert new["option.rolling_batch"] == "trtllm"
    assert (new["option.max_input_len"], new["option.max_seq_len"]) == ("3072", "4096")
    assert int(new["option.max_num_tokens"]) >= 3072
    assert "option.max_model_len" not in new
    assert not [trap for trap in traps if "no effect" in trap]
    middle, _ = written("ml.g5.2xlarge", "0.32.0-tensorrtllm0.12.0-cu125")
    assert middle["option.max_output_len"] == "4096"
    old, _ = written("ml.g5.2xlarge", "0.26.0-tensorrtllm0.7.1-cu122")
    assert old["option.max_output_len"] == "1024"


def test_neuronx_gets_its_positions_and_counts_cores():
    """Inferentia2 has two cores a device; 128 positions unless stated."""
    settings, _ = written("ml.inf2.xlarge", "0.26.0-neuronx-sdk2.16.0")
    assert settings["engine"] == "Python"
    assert settings["option.n_positions"] == "4096"
    assert settings["option.tensor_parallel_degree"] == "2"
    assert "option.max_rolling_batch_prefill_tokens" not in settings


def test_a_component_on_neuron_gets_the_devices_of_its_copy():
    """Six devices of two cores: TP 2 is two devices and four cores, three copies fill it."""
    bundle = bundle_of("ml.inf2.24xlarge", "0.26.0-neuronx-sdk2.16.0", 2, components=True)
    settings = parse_properties(bundle.files["serving.properties"])
    assert settings["option.tensor_parallel_degree"] == "4"
    requests = {r["operation"]: r["parameters"] for r in json.loads(bundle.files["sagemaker.json"])}
    component = requests["create_inference_component"]
    needs = component["Specification"]["ComputeResourceRequirements"]
    assert needs["NumberOfAcceleratorDevicesRequired"] == 2
    assert component["RuntimeConfig"]["CopyCount"] == 3


def test_a_draft_is_written_for_the_engine_inside_or_refused():
    model = {"draft": "org/tiny-draft", "draft_tokens": 3}
    with pytest.raises(InputError, match=r"vLLM 0\.12\.0 in this image takes no draft model"):
        written("ml.g5.2xlarge", "lmi18", **model)
    assert "option.speculative_config" in written("ml.g5.2xlarge", "lmi19", **model)[0]
    looked_up, traps = written("ml.g5.2xlarge", "lmi16", draft="ngram", draft_tokens=3)
    assert json.loads(looked_up["option.speculative_config"])["method"] == "ngram"
    assert not [trap for trap in traps if "speculative" in trap or "draft" in trap]
    early, traps = written("ml.g5.2xlarge", "lmi14", draft="ngram", draft_tokens=3)
    assert "option.speculative_config" not in early
    assert [trap for trap in traps if "do not set draft ngram" in trap]
    compiled, traps = written("ml.g5.2xlarge", "0.33.0-tensorrtllm0.21.0-cu128", **model)
    assert not [name for name in compiled if "speculative" in name]
    assert [trap for trap in traps if "do not set draft org/tiny-draft" in trap]
