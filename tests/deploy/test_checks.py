"""What containers refuse, and what they do otherwise than it seems: one case each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.analysis.model.builtin_profiles import VLLM_0_19
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.bundle import build_bundle, pack_model, write_bundle
from lmi_bench.deploy.checks import check_settings, era_of
from lmi_bench.deploy.engine_arguments import engine_arguments
from lmi_bench.deploy.option_table import all_options, find_option, variable_of
from lmi_bench.deploy.plan import plan_from_layout
from lmi_bench.deploy.properties import read_properties
from lmi_bench.deploy.settings import EndpointSettings, Server
from lmi_bench.jobs.deploy import check_file
from tests.core.test_run_store import no_room

FILES = Path(__file__).parents[1] / "data" / "deploy"
SIZED = {"option.max_rolling_batch_size": "32", "option.output_formatter": "jsonlines"}


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        (
            {"option.max_rolling_batch": "32"},
            "option.max_rolling_batch is not read; the key is option.max_rolling_batch_size",
        ),
        ({"option.max_batch_delay": "5"}, "option.max_batch_delay is not read; the key is max_batch_delay"),
        (
            {"option.tensor_paralel_degree": "2"},
            "unknown key option.tensor_paralel_degree; did you mean option.tensor_parallel_degree?",
        ),
        ({"option.dtpye": "fp16"}, "unknown key option.dtpye; did you mean option.dtype?"),
        ({"dtype": "fp16"}, "unknown key dtype; did you mean option.dtype?"),
        ({"translatorFactory": "org.example.F"}, "unknown key translatorFactory"),
        ({"zzz_new": "1"}, "unknown key zzz_new; if the engine knows it, --allow"),
        ({"option.max_rolling_batch_size": "many"}, "option.max_rolling_batch_size=many: expected a whole number"),
        ({"option.tensor_parallel_degree": "all"}, "expected a whole number of at least 1, or max"),
        ({"option.dtype": "int4"}, "option.dtype=int4: expected one of fp32, fp16"),
        ({"option.enforce_eager": "yes"}, "expected true or false"),
        ({"option.speculative_config": "ngram"}, "expected JSON in one line"),
        ({"option.rolling_batch": "deepspeed"}, "option.rolling_batch=deepspeed does not exist since 0.35"),
        (
            {"batch_size": "8", "option.rolling_batch": "vllm"},
            "batch_size=8 is dynamic batching and option.rolling_batch=vllm is not",
        ),
        (
            {"option.async_mode": "true", "option.rolling_batch": "vllm"},
            "option.async_mode=true excludes a rolling batch",
        ),
        (
            {"option.max_num_seqs": "8", "option.max_rolling_batch_size": "16"},
            "option.max_num_seqs=8 and option.max_rolling_batch_size=16 must be equal",
        ),
        ({"option.rotary_scaling_factor": "2"}, "must be set together: give both or neither"),
    ],
)
def test_a_mistake_is_one_line_with_what_to_write(settings, mistake):
    (found,) = check_settings(settings).mistakes
    assert mistake in found
    with pytest.raises(InputError, match=r"^serving\.properties: "):
        check_settings(settings).raise_mistakes("serving.properties")


@pytest.mark.parametrize(("version", "method"), [("0.26.0", "int4"), ("0.28.0", "bitsandbytes")])
def test_a_quantization_that_the_images_vllm_lacks_is_a_mistake(version, method):
    settings = SIZED | {"option.model_id": "org/model", "option.quantize": method}
    (found,) = check_settings(settings, vllm=version).mistakes
    assert found.startswith(f"option.quantize={method}: expected one of awq")
    assert check_settings(settings | {"option.quantize": "fp8"}, vllm=version).mistakes == ()
    trt = settings | {"option.quantize": "smoothquant", "option.rolling_batch": "trtllm"}
    assert check_settings(trt, vllm=version).mistakes == ()


def test_every_mistake_is_named_at_once():
    verdict = check_settings({"batch_size": "x", "nope": "1"})
    with pytest.raises(InputError, match=r"f: 2 mistakes\n  batch_size=x.*\n  unknown key"):
        verdict.raise_mistakes("f")


@pytest.mark.parametrize(
    ("engine", "rolling", "needed"),
    [
        ("Python", "lmi-dist", "engine=Python has no rolling batch lmi-dist.*engine=MPI"),
        ("Python", "trtllm", "engine=MPI"),
        ("MPI", "vllm", "engine=MPI has no rolling batch vllm.*engine=Python"),
        ("MPI", "lmi-dist", None),
        ("Python", "vllm", None),
        ("MPI", "auto", None),
    ],
)
def test_up_to_0_26_an_engine_has_its_own_rolling_batches(engine, rolling, needed):
    settings = {"engine": engine, "option.rolling_batch": rolling, **SIZED}
    verdict = check_settings(settings, era="A")
    if needed is None:
        assert verdict.mistakes == ()
    else:
        with pytest.raises(InputError, match=needed):
            verdict.raise_mistakes("file")


@pytest.mark.parametrize(
    ("settings", "era", "trap"),
    [
        ({"option.model_loading_timeout": "7200"}, "A", "SageMaker waits at most 3600 s"),
        ({"option.trust_remote_code": "true"}, "C", "runs Python code that comes with the weights"),
        ({"option.rolling_batch": "auto"}, "C", "it is 32 since 0.35"),
        ({"engine": "MPI"}, "C", "Python is right for every backend"),
        ({"option.rolling_batch": "lmi-dist"}, "C", "silently vLLM since 0.33"),
        ({"option.output_formatter": "sse"}, "C", "no effect in async mode"),
        ({"option.paged_attention": "true"}, "C", "is read only to 0.26"),
        ({"option.my_own": "1"}, "B", "option.my_own: it counts only if the handler reads it"),
        ({"option.max_model_len": "4096"}, "A", "output_formatter is not set: 0.26 then streams one"),
        ({"option.quantize": "awq"}, "C", "disables the faster Marlin kernels"),
    ],
)
def test_a_trap_is_told_and_is_no_mistake(settings, era, trap):
    verdict = check_settings(settings, era=era)
    assert verdict.mistakes == ()
    assert any(trap in text for text in verdict.traps), verdict.traps


def test_files_of_2023_are_right_then_and_full_of_traps_today():
    for path in FILES.glob("*.properties"):
        settings = read_properties(path)
        assert check_settings(settings, era="A").mistakes == ()
        assert check_settings(settings, era="C").mistakes == ()
    paged = read_properties(FILES / "falcon_paged.properties")
    traps = " ".join(check_settings(paged, era="C").traps)
    for text in ("engine=MPI", "paged_attention", "output_formatter", "trust_remote_code"):
        assert text in traps


def test_a_new_argument_passes_where_it_is_allowed():
    settings = {"option.brand_new": "1", **SIZED}
    assert check_settings(settings, era="B", allowed=["brand_new"]).mistakes == ()


@pytest.mark.parametrize(
    ("version", "era"), [("0.24.0", "A"), ("0.26.0", "A"), ("0.27", "B"), ("0.34.0", "B"), ("0.36.0", "C")]
)
def test_versions_fall_into_three_eras(version, era):
    assert era_of(version) == era


def test_another_version_text_is_refused():
    with pytest.raises(InputError, match="djl-serving version 'latest'"):
        era_of("latest")


def test_the_table_has_each_option_once_with_what_it_needs():
    options = all_options()
    assert len(options) > 100
    for option in options.values():
        assert option.meaning
        assert option.eras
        assert set(option.eras) <= set("ABC")
        assert (option.kind == "enum") == bool(option.choices)
    assert find_option("dtype") is options["option.dtype"]
    assert variable_of("option.dtype") == "OPTION_DTYPE"
    assert variable_of("gpu.minWorkers") == "SERVING_GPU_MINWORKERS"
    with pytest.raises(InputError, match=r"did you mean option.quantize"):
        find_option("quantise")


def bundle_of(kind, instance="ml.g6e.xlarge", **server):
    made = plan_from_layout("gemma-2-9b", instance, VLLM_0_19)
    made = replace(made, engine=EngineSetting(kv_dtype="float8", cuda_graphs=False))
    return build_bundle(made, Server(kind, **server), EndpointSettings("test"))


@pytest.mark.parametrize(
    ("kind", "line", "says"),
    [
        ("vllm", "SM_VLLM_GPU_MEMORY_UTILIZATION=1.7", "expected more than 0 and at most 1"),
        ("vllm", "SM_VLLM_KV_CACHE_DTYPE=banana", "expected one of auto"),
        ("vllm", "SM_VLLM_QUANTIZATION=int4", "expected one of awq"),
        ("vllm", "SM_VLLM_SPECULATIVE_CONFIG={bad", "expected JSON"),
        ("vllm", "SM_VLLM_MAX_NUM_SEQ=8", "has no argument max_num_seq; did you mean max-num-seqs"),
        ("vllm", "SM_VLLM_NO_ENABLE_CHUNKED_PREFILL=maybe", "expected true or false"),
        ("sglang", "SM_SGLANG_TP_SIZE=two", "expected a whole number"),
        ("sglang", "SM_SGLANG_CONTEXT_LENGHT=8", "did you mean context-length"),
        ("tgi", "CUDA_MEMORY_FRACTION=1.7", "at most 1"),
        ("tgi", "KV_CACHE_DTYPE=banana", "expected one of fp8_e4m3fn, fp8_e5m2"),
        ("tgi", "MAX_TOTAL_TOKENS=10", "must be above the prompt's limit"),
    ],
)
def test_what_is_written_passes_and_a_changed_line_is_refused(kind, line, says, tmp_path):
    folder = tmp_path / "files"
    write_bundle(bundle_of(kind), folder)
    server, settings, _ = check_file(folder, "lmi28", ())
    assert server.startswith(kind)
    assert "HF_TOKEN" in settings
    file, name = folder / f"{kind}.env", line.partition("=")[0]
    kept = [each for each in file.read_text().splitlines() if not each.startswith(f"{name}=")]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(InputError, match=says):
        check_file(file, "lmi28", ())


def test_arguments_of_the_servers_http_part_pass_in_every_version(tmp_path):
    lines = ["SM_VLLM_ENABLE_AUTO_TOOL_CHOICE=true", "SM_VLLM_TOOL_CALL_PARSER=hermes"]
    lines += ["SM_VLLM_HOST=0.0.0.0", "SM_VLLM_CHAT_TEMPLATE=/opt/ml/model/chat.jinja"]
    lines += ["SM_VLLM_REASONING_PARSER=qwen3", "SM_VLLM_LORA_MODULES=a=b"]
    file = tmp_path / "vllm.env"
    file.write_text("\n".join(["SM_VLLM_MODEL=Qwen/Qwen3-8B", *lines]))
    assert len(check_file(file, "lmi28", ())[1]) == 7
    for version in ("0.10.2", "0.28.0", "0.30.0", "0.33.0"):
        known = engine_arguments("vllm", version)
        assert known["tool_call_parser"].part == known["api_key"].part == "frontend"
    (tmp_path / "sglang.env").write_text("SM_SGLANG_TP=2\nSM_SGLANG_EP=2\n")
    assert len(check_file(tmp_path / "sglang.env", "lmi28", ())[1]) == 2


@pytest.mark.parametrize(
    ("instance", "image", "is_set"),
    [("ml.g6e.xlarge", None, True), ("ml.g5.12xlarge", None, False), ("ml.g6e.xlarge", "2.0.2", False)],
)
def test_tgi_keeps_a_one_byte_cache_where_its_version_and_the_device_can(instance, image, is_set):
    bundle = bundle_of("tgi", instance, image=image)
    assert ("KV_CACHE_DTYPE=fp8_e4m3fn" in bundle.files["tgi.env"]) == is_set
    assert any("kv_dtype float8" in trap for trap in bundle.traps) != is_set


@pytest.mark.parametrize("is_there", [True, False])
def test_a_full_disk_leaves_no_part_of_the_files(tmp_path, is_there):
    """So that the same command is not refused when there is room again."""
    folder = tmp_path / "files"
    if is_there:
        folder.mkdir()
    with no_room(), pytest.raises(InputError, match=r"cannot write .*: File too large"):
        write_bundle(bundle_of("lmi"), folder)
    assert {*tmp_path.rglob("*")} <= {folder}
    write_bundle(bundle_of("lmi"), folder)
    assert {path.name for path in folder.iterdir()} == bundle_of("lmi").files.keys()
    with no_room(), pytest.raises(InputError, match="File too large"):
        pack_model(folder, tmp_path / "model.tar.gz")
    assert not (tmp_path / "model.tar.gz").exists()


def test_lmis_variables_are_read_as_its_container_reads_them(tmp_path):
    write_bundle(bundle_of("lmi"), tmp_path / "files")
    file = tmp_path / "files" / "lmi.env"
    checked = check_file(file, "lmi28", ())[1]
    assert checked["option.kv_cache_dtype"].value == "fp8"
    assert checked["option.kv_cache_dtype"].origin == "OPTION_KV_CACHE_DTYPE"
    file.write_text("OPTION_GPU_MEMORY_UTILIZATION=1.7\nOPTION_ENGINE=Python\n")
    with pytest.raises(InputError, match="more than 0 and at most 1"):
        check_file(file, "lmi28", ())
    with pytest.raises(InputError, match=r"option\.engine is not read"):
        check_file(file, "0.26.0", ())
