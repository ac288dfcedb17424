"""What is deployed is what was planned: formats, gates, machines, limits, and stated flags."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import RequestKind, Workload
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12, VLLM_0_19
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.memory import checkpoint_format
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import all_model_entries, find_model, is_gated
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.deploy.backend_choice import OUT, choose_backend
from lmi_bench.deploy.bundle import build_bundle
from lmi_bench.deploy.checks import check_settings, container_of
from lmi_bench.deploy.engine_arguments import engine_arguments
from lmi_bench.deploy.images import SERVERS, all_images, choose_image, machine_problem
from lmi_bench.deploy.limits import profile_of
from lmi_bench.deploy.option_table import effective_settings
from lmi_bench.deploy.plan import plan_from_layout, plan_from_recommendation
from lmi_bench.deploy.properties import parse_properties
from lmi_bench.deploy.server_settings import lmi_settings, vllm_arguments
from lmi_bench.deploy.settings import EndpointSettings, Server, Stated
from lmi_bench.jobs.deploy import write_deployment
from lmi_bench.jobs.settings.deploy import DeploySettings

ENDPOINT = EndpointSettings("test", "arn:aws:iam::111122223333:role/sagemaker")


def planned(model, instance="ml.g6e.xlarge", server=None, weights=None, **stated):
    server = server or Server("lmi")
    _, image = choose_image(server, find_instance(instance))
    profile = profile_of(image, server.kind)
    return plan_from_layout(model, instance, profile, Stated(**stated), image=image, weights=weights)


def written(model, instance="ml.g6e.xlarge", server=None, **stated):
    server = server or Server("lmi")
    return build_bundle(planned(model, instance, server, **stated), server, ENDPOINT)


@pytest.mark.parametrize(
    ("model", "dtype", "weights", "says"),
    [
        ("qwen3-8b", "int4", None, r"int4 .*Qwen/Qwen3-8B is none by its name: .*--model-id"),
        ("qwen3-8b", "int8", None, r"int8 weights need a quantized checkpoint"),
        ("qwen3-8b", "mxfp4", None, r"mxfp4 weights need a quantized checkpoint"),
        ("qwen3-8b", "int4", "org/Qwen3-8B-FP8", r"are float8, the plan has int4"),
        ("qwen3-8b", "float16", "Qwen/Qwen3-8B-AWQ", r"are int4, the plan has float16"),
        ("gpt-oss-20b", "bfloat16", None, r"are mxfp4, the plan has bfloat16"),
        ("phi-4", None, "unsloth/phi-4-GGUF", r"does not read .*phi-4-GGUF \(gguf\)"),
        ("phi-4", None, "mlx-community/phi-4-4bit", r"does not read .* \(mlx\)"),
        ("phi-4", None, "unsloth/phi-4-unsloth-bnb-4bit", r"does not read .* \(bnb\)"),
    ],
)
def test_weights_in_another_format_than_the_plans_are_refused(model, dtype, weights, says):
    with pytest.raises(InputError, match=says):
        planned(model, dtype=dtype, weights=weights)


def test_weights_of_bitsandbytes_are_for_the_engines_that_read_them():
    weights = "unsloth/phi-4-unsloth-bnb-4bit"
    for server in (Server("lmi", image="lmi24"), Server("sglang")):
        made = planned("phi-4", server=server, weights=weights)
        assert (made.setup.dtype, made.weights.location) == ("int4", weights)
    with pytest.raises(InputError, match="does not read"):  # vLLM has none since 0.28
        planned("phi-4", server=Server("vllm"), weights=weights)


def test_the_context_is_that_of_the_weights_variant():
    wide = {"instance": "ml.p5.48xlarge", "max_model_len": 100_000}
    assert planned("qwen2.5-72b", **wide).limits.max_model_len == 100_000
    with pytest.raises(CapacityError, match="takes at most 32,768 tokens"):
        planned("qwen2.5-72b", weights="Qwen/Qwen2.5-72B-Instruct", **wide)
    made = planned("Qwen/Qwen3-Coder-30B-A3B-Instruct", **wide)
    assert made.limits.max_model_len == 100_000


def test_an_isolated_container_is_told_to_have_its_weights_mounted():
    isolated = replace(ENDPOINT, parameters=("create_model.EnableNetworkIsolation=true",))
    for uri, told in ((None, 1), ("s3://bucket/weights/", 0)):
        made = planned("phi-4", weights=uri)
        traps = build_bundle(made, Server("vllm", model_data_uri=uri), isolated).traps
        assert sum("cannot fetch its weights" in trap for trap in traps) == told


def test_a_draft_model_has_the_models_vocabulary():
    with pytest.raises(CapacityError, match=r"152,064 tokens and its draft .* 151,936"):
        planned("qwen2.5-72b", "ml.p5.48xlarge", draft="qwen2.5-0.5b")
    assert planned("qwen2.5-72b", "ml.p5.48xlarge", draft="qwen2.5-7b").draft == "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("model", "dtype", "weights"),
    [
        ("qwen3-8b", "int4", "Qwen/Qwen3-8B-AWQ"),
        ("qwen3-8b", "int8", "org/Qwen3-8B-quantized.w8a8"),
        ("qwen3-8b", "int4", "s3://bucket/my-own/"),
        ("qwen3-8b", "float8", None),
        ("gpt-oss-20b", None, None),
    ],
)
def test_a_checkpoint_in_the_plans_format_is_deployed(model, dtype, weights):
    made = planned(model, dtype=dtype, weights=weights)
    assert weights in (None, made.weights.location)
    assert planned("qwen3-8b", weights="Qwen/Qwen3-8B-AWQ").setup.dtype == "int4"


@pytest.mark.parametrize(
    ("hub_id", "gated"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("meta-llama/Llama-9-900B", True),
        ("google/gemma-2-9b-it", True),
        ("tiiuae/falcon-180B", True),
        ("tiiuae/falcon-7b-instruct", False),
        ("TheBloke/Llama-2-13B-chat-AWQ", False),
        ("Qwen/Qwen3-8B", False),
        ("s3://bucket/llama-2-7b/", False),
        ("", False),
    ],
)
def test_the_hub_asks_for_a_token_for_some_models(hub_id, gated):
    assert is_gated(hub_id) == gated


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_multi_constructor("!", lambda loader, tag, node: f"!{tag} {node.value}")


@pytest.mark.parametrize("kind", list(SERVERS))
def test_a_gated_model_gets_its_token_at_deployment_and_never_in_a_file(kind):
    server = Server(kind, env=("HF_HOME=/tmp/hub", "WANDB_API_KEY"))
    bundle = written("gemma-2-9b", server=server)
    create_model = json.loads(bundle.files["sagemaker.json"])[0]["parameters"]
    variables = create_model["PrimaryContainer"]["Environment"]
    assert variables["HF_TOKEN"] == "${HF_TOKEN}"
    assert variables["HF_HOME"] == "/tmp/hub"
    assert "\nHF_TOKEN\n" in bundle.files[f"{kind}.env"]
    template = yaml.load(bundle.files["cloudformation.yaml"], _Loader)
    assert template["Parameters"]["HfToken"] == {"Type": "String", "NoEcho": True}
    resource = template["Resources"]["Model"]["Properties"]["PrimaryContainer"]
    assert resource["Environment"]["WANDB_API_KEY"] == "!Ref WandbApiKey"
    assert "os.environ[name]" in bundle.files["deploy_boto3.py"]
    assert any("gated on the Hub" in trap for trap in bundle.traps)
    own = replace(server, env=(), model_data_uri="s3://bucket/gemma/")
    assert "HF_TOKEN" not in "".join(
        build_bundle(planned("gemma-2-9b", server=own, weights=own.model_data_uri), own, ENDPOINT).files.values()
    )


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (("HF_TOKEN=hf_abcdefghijklmnop",), "a secret is not written into files"),
        (("NOTE=hf_abcdefghijklmnop",), "a secret is not written into files"),
        (("9X=1",), "write NAME=VALUE"),
        (("A=1", "A=2"), "states a variable twice"),
        (("OPTION_DTYPE=bf16",), "the plan writes this variable"),
    ],
)
def test_a_variable_that_cannot_be_written_is_refused(texts, says):
    with pytest.raises(InputError, match=says):
        written("qwen3-8b", server=Server("lmi", env=texts))


def test_16_bit_weights_keep_their_own_type_unless_one_is_stated():
    made = planned("gemma-2-9b")
    assert lmi_settings(made)["option.dtype"] == "auto"
    assert vllm_arguments(made)["dtype"] == "auto"
    assert lmi_settings(planned("qwen3-8b", dtype="fp16"))["option.dtype"] == "fp16"
    tgi = written("qwen3-8b", server=Server("tgi")).files["tgi.env"]
    assert "DTYPE=bfloat16" in tgi
    assert "DTYPE" not in written("llama-2-7b", server=Server("tgi")).files["tgi.env"]


@pytest.mark.parametrize(
    ("model", "instance", "dtype", "says"),
    [
        ("gemma-2-9b", "ml.g6e.xlarge", "float16", "overflows in float16.*leave out --dtype"),
        ("gemma-3-4b", "ml.g4dn.xlarge", None, "with bfloat16, which T4 lacks"),
        ("qwen3-4b", "ml.g4dn.xlarge", "bfloat16", "bfloat16 weights need compute capability 8, T4"),
    ],
)
def test_a_type_that_the_engine_or_the_device_refuses_is_not_written(model, instance, dtype, says):
    with pytest.raises(InputError, match=says):
        written(model, instance, dtype=dtype)


def test_the_check_knows_the_models_that_vllm_refuses_in_float16():
    settings = {"option.model_id": "google/gemma-3-4b-it", "option.dtype": "fp16"}
    (found,) = check_settings(settings, vllm="0.26.0").mistakes
    assert "vLLM refuses float16 for google/gemma-3-4b-it" in found
    settings["option.model_id"] = "Qwen/Qwen3-8B"
    assert check_settings(settings, vllm="0.26.0").mistakes == ()


def test_writing_and_choosing_ask_the_same_function_for_the_machine():
    grace = find_instance("ml.p6e-gb200.36xlarge")
    assert "x86_64 hosts, not arm64" in machine_problem({"vllm"}, grace)
    assert machine_problem({"vllm"}, find_instance("ml.inf2.8xlarge")) is None
    verdicts = choose_backend(find_model("qwen3-8b"), grace)
    assert {each.verdict for each in verdicts} == {OUT}
    for kind in SERVERS:
        with pytest.raises(InputError, match="does not run on"):
            choose_image(Server(kind), grace)
    with pytest.raises(InputError, match="is for lmi, not tgi"):
        choose_image(Server("tgi", image="0.36.0-lmi28.0.0-cu130"), find_instance("ml.g5.2xlarge"))


def answer_of(kinds=(), **changes):
    """622 tokens in and 250 out, as README's example."""
    workload = Workload(find_model("qwen3-8b"), "float16", 622, 250)
    machines = (find_instance("ml.g6e.xlarge"),)
    answer = recommend(RecommendRequest(workload, VLLM_0_12, instances=machines))
    question = replace(answer.question, kinds=kinds)
    best = replace(answer.recommended, **changes)
    return replace(answer, question=question, recommended=best)


def test_the_context_holds_longer_requests_than_the_mean():
    """Half of real requests exceed the mean; where the lengths are known, the longest counts."""
    answer = answer_of()
    limits = plan_from_recommendation(answer, "qwen3-8b", VLLM_0_19).limits
    assert 4 * 872 - 256 <= limits.max_model_len <= 40_960
    assert limits.max_input_tokens >= 622
    assert limits.max_num_seqs >= 32
    mixed = answer_of((RequestKind(20_000, 3_000, 0.01), RequestKind(500, 200, 0.99)))
    limits = plan_from_recommendation(mixed, "qwen3-8b", VLLM_0_19).limits
    assert limits.max_model_len >= 23_000
    assert limits.max_input_tokens >= 20_000


def test_a_plan_that_the_images_memory_does_not_hold_is_told():
    memory = replace(answer_of().recommended.memory, mean_batch_per_copy=9_999.0)
    made = plan_from_recommendation(answer_of(memory=memory), "qwen3-8b", VLLM_0_19)
    assert "the plan runs 9999 sequences at once" in made.warnings[0]
    assert made.limits.max_model_len >= 872
    long = answer_of((RequestKind(20_000, 3_000, 1.0),), instance="ml.g5.2xlarge")
    with pytest.raises(CapacityError, match="no sequence of"):
        plan_from_recommendation(long, "qwen3-8b", VLLM_0_19)


def test_stated_values_override_a_recommendation():
    stated = Stated(machines=2, dtype="bfloat16", max_model_len=8192, max_batch=33, draft="qwen3-0.6b")
    made = plan_from_recommendation(answer_of(), "qwen3-8b", VLLM_0_19, stated)
    assert (made.instances, made.setup.dtype, made.draft) == (2, "bfloat16", "Qwen/Qwen3-0.6B")
    assert (made.limits.max_model_len, made.limits.max_num_seqs) == (8192, 33)
    assert lmi_settings(made)["option.dtype"] == "bf16"
    assert "stated: --machines 2, --dtype bfloat16, --max-model-len 8192" in made.basis
    with pytest.raises(InputError, match="800 is below the workload's longest request of 872"):
        plan_from_recommendation(answer_of(), "qwen3-8b", VLLM_0_19, Stated(max_model_len=800))


def test_without_a_workload_a_prompt_may_fill_the_context_but_for_a_typical_answer():
    """A typical request has 2,048 tokens, half of them an answer."""
    limits = planned("qwen3-8b", server=Server("tgi")).limits
    assert limits.max_input_tokens == limits.max_model_len - 1_024
    assert planned("qwen3-8b", max_input_tokens=512).limits.max_input_tokens == 512


def test_what_a_server_cannot_do_is_refused_where_it_is_stated(tmp_path):
    def write(server, **layout):
        place = {"model": "qwen3-8b", "instance": "ml.g6e.xlarge", "stated": Stated(**layout)}
        settings = DeploySettings(
            out=tmp_path / f"{server.kind}{len(list(tmp_path.iterdir()))}", **place, server=server
        )
        plan, _ = write_deployment(settings)
        return plan

    for server in (Server("tgi"), Server("lmi", image="0.33.0-tensorrtllm0.21.0-cu128")):
        with pytest.raises(InputError, match="takes no such draft here"):
            write(server, draft="Qwen/Qwen3-0.6B")
    with pytest.raises(InputError, match="only LMI downloads from S3; with --model-data"):
        Server("vllm", model_id="s3://bucket/weights/")
    assert write(Server("tgi"), draft="ngram").draft == "ngram"
    for server in (Server("lmi"), Server("vllm"), Server("sglang", platform="kubernetes")):
        with pytest.raises(InputError, match=r"--max-input-tokens: \w+ limits prompt and answer together"):
            write(server, max_input_tokens=512)
    for server in (Server("tgi"), Server("lmi", image="0.33.0-tensorrtllm0.21.0-cu128")):
        assert write(server, max_input_tokens=512).limits.max_input_tokens == 512


def test_the_memory_is_that_of_the_servers_version():
    image = next(each for each in all_images() if "-lmi29." in each.tag)
    assert profile_of(image, "lmi").label == "vLLM 0.12 to 0.19"
    old = next(each for each in all_images() if "-lmi18." in each.tag)
    assert profile_of(old, "lmi").label == "vLLM 0.12 to 0.19"
    assert profile_of(None, "sglang").memory_share <= 0.9
    assert profile_of(None, "tgi").name == "TGI"
    oldest = Server("lmi", image="lmi10")
    whole = planned("llama-2-7b", server=oldest).limits
    assert whole.step_tokens >= whole.max_model_len  # it does not split prompts
    settings = lmi_settings(planned("qwen3-8b"))
    assert settings["option.gpu_memory_utilization"] == "0.9"
    long = planned("llama-3.1-8b")
    assert long.limits.max_model_len == 32_768
    assert "32,768 of the model's 131,072 tokens" in long.warnings[0]


def test_whole_experts_on_a_device_are_written_where_the_engine_of_the_image_can():
    """Of expert parallelism and data-parallel attention, LMI has an option for the first."""
    made = planned("mixtral-8x7b", "ml.p4d.24xlarge", tensor_parallel=8)
    experts = replace(made, engine=EngineSetting(expert_parallel=True))
    both = replace(made, engine=EngineSetting(expert_parallel=True, dp_attention=True))
    for plan, image, is_set, said in (
        (experts, None, True, ""),
        (both, None, True, "do not set DP attention"),
        (experts, "0.33.0-tensorrtllm0.21.0-cu128", False, "do not set EP"),
        (made, None, False, ""),
    ):
        bundle = build_bundle(plan, Server("lmi", image=image), ENDPOINT)
        properties = bundle.files["serving.properties"]
        assert ("option.enable_expert_parallel=true" in properties) == is_set
        missing = [trap for trap in bundle.traps if "files do not set" in trap]
        assert [said in trap for trap in missing] == ([True] if said else [])


def test_a_batch_that_reserves_its_cache_is_what_surely_fits():
    server = Server("lmi", image="0.26.0-neuronx-sdk2.16.0")
    limits = planned("llama-2-7b", "ml.inf2.xlarge", server).limits
    assert limits.max_num_seqs < 32


MACHINES = ("ml.g5.12xlarge", "ml.inf2.24xlarge", "ml.p4d.24xlarge", "ml.p6-b200.48xlarge")


@pytest.mark.parametrize("kind", list(SERVERS))
def test_every_image_gets_files_that_pass_its_check_and_hold_the_workload(kind):
    """Every image that runs on one of the machines, with three kinds of model."""
    done = set()
    for number, image in enumerate(all_images()):
        if image.family not in SERVERS[kind]:
            continue
        machines = [name for name in MACHINES if image.problem(find_instance(name)) is None]
        model = ("qwen3-8b", "llama-2-13b", "gpt-oss-20b")[number % (3 if kind != "tgi" else 2)]
        instance = machines[number % len(machines)]
        server = Server(kind, image=image.tag)
        made = planned(model, instance, server)
        bundle = build_bundle(made, server, ENDPOINT)
        check_files(bundle, made, image, kind)
        done.add(image.family)
    assert done == {*SERVERS[kind]}


def check_files(bundle, made, image, kind):
    environment = parse_properties(bundle.files[f"{kind}.env"])
    assert made.limits.max_model_len >= 2048
    assert made.limits.max_num_seqs <= made.limits.step_tokens
    if kind == "lmi":
        era, vllm = container_of(image.tag if image.family == "lmi" else image.djl)
        settings = parse_properties(bundle.files["serving.properties"])
        vllm = vllm if image.engine == "vllm" else ""
        assert check_settings(settings, era=era, vllm=vllm).mistakes == ()
        read = effective_settings({}, environment, source="env", era=era)
        assert {name: each.value for name, each in read.items()}.items() >= {
            name: value for name, value in settings.items() if name != "engine"
        }.items()
    elif kind != "tgi" and image.engine_version:
        known = engine_arguments(kind, image.engine_version)
        for name, value in environment.items():
            if name.startswith("SM_"):
                argument = name.split("_", 2)[2].lower()
                argument = argument.removeprefix("no_")
                if argument != "model":
                    assert known[argument].problem(value) is None, (image.tag, name, value)


def test_every_model_is_written_and_names_its_gate():
    """The servers in turn; TGI has no MXFP4, and no image for a B300."""
    models = [entry for entry in all_model_entries() if entry.hf_id]
    for number, entry in enumerate(models):
        stored = checkpoint_format(entry.checkpoint_dtype)
        large = entry.shape.params_total * stored.bits / 8 > 0.8e12
        machine = "ml.p6-b300.48xlarge" if large else "ml.p5en.48xlarge"
        kinds = ("lmi", "vllm", "sglang", "tgi")[: 2 if large else 3 if stored.bits < 8 else 4]
        bundle = written(entry.shape.name, machine, Server(kinds[number % len(kinds)]))
        assert any("gated" in trap for trap in bundle.traps) == bool(entry.gated), entry.hf_id


def test_a_setting_that_is_off_becomes_the_engines_own_switch():
    """AWS's images leave a variable out whose value is false."""
    setting = EngineSetting(chunked_prefill=False, cuda_graphs=False)
    made = plan_from_recommendation(answer_of(setting=setting), "qwen3-8b", VLLM_0_19)
    bundle = build_bundle(made, Server("vllm"), ENDPOINT)
    assert "SM_VLLM_NO_ENABLE_CHUNKED_PREFILL=true" in bundle.files["vllm.env"]
    assert "SM_VLLM_ENFORCE_EAGER=true" in bundle.files["vllm.env"]
    assert "--no-enable-chunked-prefill" in bundle.files["vllm-serve.sh"]
    limits = made.limits
    assert limits.step_tokens >= limits.max_model_len
    assert "SM_SGLANG_CHUNKED_PREFILL_SIZE=-1" in build_bundle(made, Server("sglang"), ENDPOINT).files["sglang.env"]


def test_a_prefix_of_weights_ends_with_a_slash():
    """botocore: a valid key name prefix always ends with a forward slash."""
    server = Server("vllm", model_data_uri="s3://bucket/weights")
    made = planned("qwen3-8b", server=server, weights=server.model_data_uri)
    bundle = build_bundle(made, server, ENDPOINT)
    container = json.loads(bundle.files["sagemaker.json"])[0]["parameters"]["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/weights/"
    assert container["Environment"]["SM_VLLM_MODEL"] == "/opt/ml/model"


def test_sagemakers_own_variables_beat_the_file_since_0_35():
    file = {"option.model_loading_timeout": "1200", "minWorkers": "1"}
    environ = {"SAGEMAKER_STARTUP_TIMEOUT": "60", "SAGEMAKER_NUM_MODEL_WORKERS": "2"}
    read = effective_settings(file, environ, source="file")
    assert read["option.model_loading_timeout"].value == "60"
    assert read["minWorkers"].value == read["maxWorkers"].value == "2"
    assert read["minWorkers"].origin == "SAGEMAKER_NUM_MODEL_WORKERS"
    old = effective_settings(file, environ, source="file", era="B")
    assert old["minWorkers"].value == "1"
